"""What pip calls to build the package from this tree (PEP 517): ./run makes the wheel."""
import io
import os
import pathlib
import re
import shutil
import subprocess
import tarfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    # pip installs no system packages: those that are missing are named, unless who calls it wants otherwise.
    environment = {"BATON_INSTALL": "no", **os.environ}
    environment.pop("PYTHONPATH", None)  # pip's own
    # The last line of ./run's error is what to do about it; pip shows all of it.
    subprocess.run([ROOT / "run", "wheel"], check=True, env=environment)
    wheel, = (ROOT / "build/release/packages").glob("baton-*.whl")
    shutil.copy(wheel, wheel_directory)
    return wheel.name


def build_sdist(sdist_directory, config_settings=None):
    version = re.search(r"project\(baton VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    name = f"baton-{version}"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(pathlib.Path(sdist_directory, f"{name}.tar.gz"), "w:gz", format=tarfile.PAX_FORMAT) as out:
        for path in listed.decode().split("\0"):
            if path:
                out.add(ROOT / path, f"{name}/{path}")
        metadata = f"Metadata-Version: 2.1\nName: baton\nVersion: {version}\n".encode()
        entry = tarfile.TarInfo(f"{name}/PKG-INFO")
        entry.size = len(metadata)
        out.addfile(entry, io.BytesIO(metadata))
    return f"{name}.tar.gz"
