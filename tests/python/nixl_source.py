"""NIXL's own Python tests and examples, unmodified, over NIXL's wheel and over baton.nixl in its place:

    python nixl_source.py --nixl-source DIR [--only WORD]

DIR is a checkout of github.com/ai-dynamo/nixl. This Python needs nixl, numpy, torch, pytest and pytest-timeout;
baton.nixl is taken from this tree. Fails if anything passes over NIXL and not over Baton."""
import argparse
import importlib.util
import os
import re
import socket
import subprocess
import sys
import tempfile
import time

TREE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LONGEST = 240  # seconds; nothing here takes ten


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def listened(port):
    """Whether anybody listens at it; nobody is called for that."""
    wanted = f":{int(port):04X}"
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table, encoding="ascii") as lines:
            if any(words[1].endswith(wanted) and words[3] == "0A" for words in map(str.split, lines)):
                return True
    return False


def start(words, environment, folder, name):
    with open(os.path.join(folder, f"{name}.log"), "wb") as log:
        return subprocess.Popen([sys.executable, *words], env=environment, cwd=folder, stdout=log,
                                stderr=subprocess.STDOUT)


def said(folder, name):
    with open(os.path.join(folder, f"{name}.log"), encoding="utf8", errors="replace") as log:
        return log.read()


def ended(children):
    """Their exit statuses; None for what had to be killed."""
    until = time.monotonic() + LONGEST
    out = []
    for child in children:
        try:
            out.append(child.wait(max(0.1, until - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            out.append(None)
    return out


def suite(source, name, environment, folder):
    """A file of pytest's: how many passed, were skipped and failed."""
    status = ended([start(["-m", "pytest", "-q", "-p", "no:cacheprovider", f"{source}/test/python/{name}.py"],
                          environment, folder, name)])
    text = said(folder, name)
    found = {word: int(count) for count, word in re.findall(r"(\d+) (passed|skipped|failed|errors?)\b", text)}
    good = status == [0] and "passed" in found
    return good, ", ".join(f"{count} {word}" for word, count in found.items()) or f"ended with {status[0]}"


def program(source, path, words, environment, folder):
    name = os.path.basename(path)[:-3]
    status = ended([start([f"{source}/{path}", *words], environment, folder, name)])
    good = status == [0] and "ERROR" not in said(folder, name)
    return good, "passes" if good else f"ended with {status[0]}"


def two_peers(source, path, environment, folder):
    """An example of two processes, target and initiator."""
    port = free_port()
    words = [f"{source}/{path}", "--ip", "127.0.0.1", "--port", port, "--use_cuda", ""]
    target = start([*words, "--mode", "target"], environment, folder, "target")
    until = time.monotonic() + LONGEST
    while target.poll() is None and not listened(port) and time.monotonic() < until:
        time.sleep(0.05)
    status = ended([target, start([*words, "--mode", "initiator"], environment, folder, "initiator")])
    good = status == [0, 0] and "verification passed" in said(folder, "initiator")
    return good, "passes" if good else f"ended with {status}"


# What each is, and how it is run.
ALL = {
    "test_nixl_api": lambda *where: suite(where[0], "test_nixl_api", *where[1:]),
    "test_nixl_bindings": lambda *where: suite(where[0], "test_nixl_bindings", *where[1:]),
    "desc_perf": lambda *where: program(where[0], "test/python/desc_perf.py", [], *where[1:]),
    "prep_xfer_perf list": lambda *where: program(where[0], "test/python/prep_xfer_perf.py", ["list"], *where[1:]),
    "prep_xfer_perf array": lambda *where: program(where[0], "test/python/prep_xfer_perf.py", ["array"], *where[1:]),
    "basic_two_peers": lambda *where: two_peers(where[0], "examples/python/basic_two_peers.py", *where[1:]),
    "expanded_two_peers": lambda *where: two_peers(where[0], "examples/python/expanded_two_peers.py", *where[1:]),
    "partial_md_example": lambda source, environment, folder: program(
        source, "examples/python/partial_md_example.py", ["--init-port", free_port(), "--target-port", free_port()],
        dict(environment, NIXL_ETCD_ENDPOINTS=""), folder),  # it deletes that variable, and expects that it is set
    "query_mem_example": lambda *where: program(where[0], "examples/python/query_mem_example.py", [], *where[1:]),
}


def environments():
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NIXL_ETCD_ENDPOINTS")}
    plain.update(PYTHONDONTWRITEBYTECODE="1", UCX_MODULES="^ib", UCX_LOG_LEVEL="fatal")
    ours = dict(plain, PYTHONPATH=f"{TREE}/python:{TREE}/python/names")
    return {"NIXL": plain, "Baton": ours}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nixl-source", default="", help="a checkout of NIXL")
    parser.add_argument("--only", default="", help="what has this in its name")
    arguments = parser.parse_args()
    source = os.path.abspath(arguments.nixl_source)
    if not arguments.nixl_source or not os.path.isfile(f"{source}/test/python/test_nixl_api.py"):
        print("skipped: --nixl-source names no checkout of github.com/ai-dynamo/nixl")
        return 77
    lacking = [name for name in ("numpy", "torch", "pytest", "pytest_timeout") if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"skipped: {sys.executable} lacks {', '.join(lacking)}")
        return 77
    failed = 0
    print(f"{'':22} {'NIXL':24} Baton")
    for name, run in ALL.items():
        if arguments.only not in name:
            continue
        results = {}
        for library, environment in environments().items():
            with tempfile.TemporaryDirectory() as folder:
                results[library] = run(source, environment, folder)
                if library == "Baton" and not results["Baton"][0]:
                    for log in sorted(os.listdir(folder)):
                        if log.endswith(".log"):
                            print(said(folder, log[:-4])[-6000:])
        print(f"{name:22} {results['NIXL'][1]:24} {results['Baton'][1]}", flush=True)
        same = name.startswith("test_") and results["NIXL"][1] != results["Baton"][1]
        failed += results["NIXL"][0] and (not results["Baton"][0] or same)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
