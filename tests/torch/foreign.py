"""Another's suite over Baton in the place of Gloo (in_place_of_gloo/), unchanged.

    foreign.py torchft [OPTIONS OF pytest]     torchft's tests of its process groups: those that pass over Gloo, and why some are skipped
"""
import collections
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


def environment(over):
    return {**os.environ, "OVER": over, "PYTHONPATH": f"{HERE / 'in_place_of_gloo'}:{os.environ.get('PYTHONPATH', '')}"}


def torchft(*options):
    """Its file of process groups, which makes Gloo's by name, in threads and in processes of their own: what passes over Gloo
    here passes over Baton. For both, the processes come from one that has imported torch, and 10 s for that are 300."""
    import torchft

    suite = pathlib.Path(torchft.__file__).parent / "process_group_test.py"
    passed = {}
    for over in ("gloo", "baton"):
        ran = subprocess.run([sys.executable, __file__, "pytest", "-p", "no:cacheprovider", "--timeout=300", "-v", "-rs", str(suite), *options],
                             env={**environment(over), "PYTHONHASHSEED": "0"},  # on which the names of some tests depend
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
        told = dict(re.findall(r"^\S+?::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", ran.stdout, re.MULTILINE))
        passed[over] = {name for name, how in told.items() if how == "PASSED"}
        print(f"torchft over {over}: {dict(collections.Counter(told.values()))}", flush=True)
    for line in re.findall(r"^SKIPPED \[\d+\] .*", ran.stdout, re.MULTILINE):
        print(re.sub(r"^(SKIPPED \[\d+\]) \S*/", r"\1 ", line))
    missing = sorted(passed["gloo"] - passed["baton"])
    if missing or not passed["gloo"]:
        sys.exit(f"{ran.stdout[-20000:]}\nFAILED  torchft, over Gloo alone: {missing}")
    print(f"ok      torchft: {len(passed['baton'])} passed, all {len(passed['gloo'])} that pass over Gloo here")


def pytest(*options):
    import multiprocessing

    import pytest as runner
    from torchft import process_group

    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torchft.process_group"])
    process_group.mp.get_context = lambda _: server
    configure = process_group.ProcessGroupBaby.configure

    def patient(self, *arguments, **named):
        given, self._timeout = self._timeout, self._timeout if self._timeout < 10 else 300
        try:
            configure(self, *arguments, **named)
        finally:
            self._timeout = given

    process_group.ProcessGroupBaby.configure = patient
    sys.exit(runner.main(list(options)))


if __name__ == "__main__":
    {"torchft": torchft, "pytest": pytest}[sys.argv[1]](*sys.argv[2:])
