#!/usr/bin/env python3
"""`baton train --device cuda` as real processes, over the fake of the CUDA driver: what the CPU prints and saves, on one
rank and on two, and going on from a checkpoint elsewhere. And what is refused.

usage: train_device_test.py BATON FOLDER, where FOLDER has the fake's libcuda.so.1
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

BATON = sys.argv[1]
# A new process for each run: the flags of ranks, as a launcher would set them, are none of ours.
CUDA = {"LD_LIBRARY_PATH": sys.argv[2]}
SHORT = ["--preset", "tiny", "--steps", "4", "--threads", "1"]


def check(condition, *what):
    if not condition:
        sys.exit("FAILED: " + " ".join(str(word) for word in what))


class Folder:
    def __init__(self, path):
        self.path = pathlib.Path(path)
        text = "".join(f"And it came to pass in the {i % 7} year, that the king said.\n" for i in range(300))
        (self.path / "text").write_text(text)

    def train(self, *flags, environment=None):
        return subprocess.run([BATON, "train", "--data", str(self.path / "text"), *map(str, flags)], text=True, timeout=500,
                              capture_output=True, env={**os.environ, **(environment or {})})

    def model(self, name, *flags, environment=None):
        """The weights' file, and what was said of steps, but for times."""
        out = self.path / name
        made = self.train(*SHORT, "--out", out, *flags, environment=environment)
        check(made.returncode == 0, name, made.stdout, made.stderr)
        steps = re.findall(r"^step .*?rate \S+|held out \S+", made.stdout, re.MULTILINE)
        return (out / "model.safetensors").read_bytes(), steps, made.stdout


def refused(folder):
    def says(words, *flags, environment=None):
        made = folder.train(*SHORT, "--out", folder.path / "none", *flags, environment=environment)
        check(made.returncode != 0 and words in made.stderr and made.stderr.count("\n") == 1, flags, made.stderr)
        check("learning" not in made.stdout, "it was too late:", made.stdout)

    for ranks in ([], ["--ranks", 2]):
        says("libcuda.so.1", "--device", "cuda", *ranks, environment={"LD_LIBRARY_PATH": ""})
        says("CUDA device 7", "--device", "cuda:7", *ranks, environment=CUDA)
    says("is not a device", "--device", "gpu")


def main():
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(path)
        kernels = folder.train(*SHORT, "--out", folder.path / "none", "--device", "cuda", environment=CUDA)
        if "nvcc" in kernels.stderr:
            print("skipped: this build has no kernels, since nvcc was not found")
            sys.exit(77)
        refused(folder)
        weights, steps, _ = folder.model("cpu", "--accumulate", 2, "--checkpoint", folder.path / "of-cpu",
                                         "--checkpoint-every", 2)
        check(len(steps) == 3, steps)
        one = folder.model("one", "--accumulate", 2, "--device", "cuda:1", environment=CUDA)
        check("rank 0 computes on CUDA device 1: Fake GPU" in one[2], one[2])
        check(one[:2] == (weights, steps), "one rank:", steps, one[1])
        two = folder.model("two", "--ranks", 2, "--ordered", "--zero", 1, "--device", "cuda", "--checkpoint",
                           folder.path / "of-two", "--checkpoint-every", 2, environment=CUDA)
        for rank in range(2):
            check(f"rank {rank} computes on CUDA device {rank}: Fake GPU" in two[2], two[2])
        check(two[:2] == (weights, steps), "two ranks:", steps, two[1])
        # Both wrote two checkpoints: of steps 2 and 4. From the first of them on, elsewhere.
        for name, device, environment in (("of-two", "cpu", None), ("of-cpu", "cuda", CUDA)):
            for newest in (folder.path / name / "step-00000004").iterdir():
                newest.unlink()
            (folder.path / name / "step-00000004").rmdir()
            resumed = folder.model("resumed-" + name, "--accumulate", 2, "--device", device, "--resume", folder.path / name,
                                   environment=environment)
            check("going on after step 2" in resumed[2], resumed[2])
            check(resumed[0] == weights, "resumed from", name)
        print(f"{len(weights)} bytes of weights, five times the same")


main()
