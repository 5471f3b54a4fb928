"""Compiles the C++ backend for the torch that is there, once, and loads it.

    python3 -m baton.torch        # now, instead of when the first group is made

It lies in $XDG_CACHE_HOME/baton, or ~/.cache/baton, in a folder for each version of torch, of Python, of Baton's sources and
of the compiler's options: no paths, so that one made elsewhere is found where there is no compiler. A failed attempt is not
repeated for ten minutes, by other ranks say, but by the command above it is."""
from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import pathlib
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from types import ModuleType
from typing import List

import torch

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = ("backend.cc", "calls.h", "device.h", "elements.h", "hooks.h", "window.h", "work.h")
NAME = "baton_c10d"
OPTIONS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}",
           "-DTORCH_API_INCLUDE_EXTENSION_H", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
           "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO")
_AGAIN = 600.0  # seconds after which a failed attempt is repeated


class CannotBuild(Exception):
    """There is no C++ backend here; the text says why."""


def _headers() -> pathlib.Path:
    """The folder of baton/collectives.h: in the wheel, in a checkout, or installed."""
    for folder in (HERE.parent / "include", HERE.parents[2] / "capi/include", pathlib.Path("/usr/include")):
        if (folder / "baton/collectives.h").exists():
            return folder
    raise CannotBuild("baton/collectives.h is not beside the package: install the wheel, or Baton's Debian package")


def _library() -> str:
    """The libbaton that this process has loaded."""
    for line in pathlib.Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if os.path.basename(path).startswith("libbaton.so"):
            return path
    raise CannotBuild("libbaton.so.0 is not loaded")


def _compiler() -> List[str]:
    wanted = shlex.split(os.environ.get("CXX", ""))  # "ccache g++", say
    for name in wanted[:1] or ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return [found, *wanted[1:]]
    raise CannotBuild(f"there is no C++ compiler ({os.environ.get('CXX') or 'c++, g++, clang++'}): "
                      "install g++ 11 or newer, or set CXX")


def _command(out: str) -> List[str]:
    python = pathlib.Path(sysconfig.get_paths()["include"])
    if not (python / "Python.h").exists():
        raise CannotBuild(f"{python}/Python.h is not there: install Python's headers (python3-dev)")
    includes = [_headers(), HERE]
    theirs = pathlib.Path(torch.__file__).parent
    system = [theirs / "include", theirs / "include/torch/csrc/api/include", python]
    return [*_compiler(), *OPTIONS,
            *(f"-I{folder}" for folder in includes), *(word for folder in system for word in ("-isystem", str(folder))),
            str(HERE / SOURCES[0]), "-o", out, f"-L{theirs}/lib", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10",
            _library()]


def _folder() -> pathlib.Path:
    try:
        base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "baton"
    except RuntimeError as why:
        raise CannotBuild(f"there is no folder for it: {why}. Set XDG_CACHE_HOME to one") from why
    digest = hashlib.sha256()
    for source in [HERE / name for name in SOURCES] + [_headers() / "baton/collectives.h"]:
        digest.update(source.read_bytes())
    digest.update(" ".join(OPTIONS).encode())
    return base / f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"


def find(again: bool = False) -> pathlib.Path:
    """The path of the C++ backend; compiles it first if necessary, which takes half a minute. CannotBuild says why
    that failed. `again`: tries even if it has just failed."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        raise CannotBuild(f"it is written for Linux, and this is {sys.platform}")
    folder = _folder()
    out = folder / f"{NAME}.so"
    if not out.exists():
        try:
            _compile(folder, out, again)
        except OSError as why:
            raise CannotBuild(f"{folder} cannot be written: {why}. Set XDG_CACHE_HOME to a folder that can") from why
    about = out.stat()
    if about.st_uid not in (0, os.getuid()) or about.st_mode & stat.S_IWOTH:
        raise CannotBuild(f"{out} belongs to user {about.st_uid}, with mode {about.st_mode & 0o777:o}: it could be anything. Remove "
                          "it, or set XDG_CACHE_HOME to a folder of your own")
    return out


def load(again: bool = False) -> ModuleType:
    """The C++ backend, from where find() finds it."""
    out = find(again)
    spec = importlib.util.spec_from_file_location(NAME, out)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as why:
        raise CannotBuild(f"{out} cannot be loaded: {why}. Remove it, and it will be compiled again") from why
    return module


def _compile(folder: pathlib.Path, out: pathlib.Path, again: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks of this machine wait here
        if out.exists():
            return
        failed, command = folder / "failed", _command("backend.so")
        if not again and failed.exists() and time.time() - failed.stat().st_mtime < _AGAIN:
            made_by, _, why = failed.read_text().partition("\n")
            if made_by == " ".join(command):
                raise CannotBuild(f"{why} (a moment ago; `python3 -m baton.torch` tries again)")
        print(f"baton.torch: compiling the backend for torch {torch.__version__}, once, into {folder}", file=sys.stderr)
        file, made = tempfile.mkstemp(".so", dir=folder)
        os.close(file)
        ran = subprocess.run(_command(made), capture_output=True, text=True)
        if ran.returncode != 0:
            log = folder / "log"
            log.write_text(" ".join(command) + "\n" + ran.stderr)
            first = next((line for line in ran.stderr.splitlines() if "error" in line), f"exit {ran.returncode}")
            reason = f"{command[0]} failed: {first.strip()} (all of it: {log})"
            failed.write_text(f"{' '.join(command)}\n{reason}")
            os.unlink(made)
            raise CannotBuild(reason)
        os.chmod(made, 0o755)
        os.rename(made, out)
