"""What the package's annotations say: mypy finds nothing in it, sees all of what programs use, and finds what they do
wrong (types_program.py, line by line).

usage: types_test.py SOURCE_TREE"""
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

# Classes of serving engines, from which plug-ins derive, are Any where those are not installed.
STRICT = ["--strict", "--no-warn-return-any", "--ignore-missing-imports", "--allow-subclassing-any"]


def find_mypy(root):
    private = root / "build/venv/mypy/bin/mypy"
    if private.exists():
        return [str(private)]
    if importlib.util.find_spec("mypy"):
        return [sys.executable, "-m", "mypy"]
    found = shutil.which("mypy")
    return [found] if found else None


def main():
    root = pathlib.Path(sys.argv[1])
    mypy = find_mypy(root)
    if mypy is None:
        print("skipped: there is no mypy: install Debian's (./run install-deps all), or `python3 -m venv build/venv/mypy && "
              "build/venv/mypy/bin/pip install mypy`")
        sys.exit(77)
    with tempfile.TemporaryDirectory() as cache:
        def run(*what):
            return subprocess.run([*mypy, *STRICT, "--cache-dir", cache, "--no-error-summary", *what], cwd=root / "python",
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        found = run("baton", "names")
        if found:
            sys.exit(found)
        program = root / "tests/python/types/types_program.py"
        said = {}
        # Older releases write builtins.int for int, and List for list: what is compared has neither.
        for number, text in re.findall(r"types_program\.py:(\d+): (?:error: |note: (?=Revealed))(.*)", run(str(program))):
            said.setdefault(int(number), []).append(text.replace("builtins.", ""))
    wrong = []
    for number, line in enumerate(program.read_text().splitlines(), 1):
        expected = re.findall(r"# (?:is|wrong): (.*)", line)
        heard = said.pop(number, [])
        if len(heard) != len(expected) or any(e not in h for e, h in zip(expected, heard)):
            wrong.append(f"types_program.py:{number}: expected {expected}, mypy says {heard}")
    sys.exit("\n".join(wrong) if wrong else print(f"{number} lines: as expected"))


if __name__ == "__main__":
    main()
