"""torch's own tests of process groups, from its wheel, over Baton: suite.py [--page FILE] [--backend NAME] [TEST...]

They ask for the backend by name, before they look at what it can do. Those questions are answered in memory, when the module is
loaded: where a test wants "gloo", or "mpi" for CPU tensors, Baton will do. Nothing of torch's is copied or changed. Ranks are
forked, not spawned: torch is imported once.
"""
import argparse
import collections
import importlib.util
import logging
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
import time
import types
import unittest

SIZE = 4
parser = argparse.ArgumentParser()
parser.add_argument("--page", type=pathlib.Path, help="the results as a page of docs")
parser.add_argument("--backend", default="baton")
parser.add_argument("tests", nargs="*", help="names; without, all")
options = parser.parse_args()

folder = tempfile.TemporaryDirectory()
os.environ.update(BACKEND=options.backend, WORLD_SIZE=str(SIZE), TEMP_DIR=folder.name, MASTER_ADDR="127.0.0.1",
                  INIT_METHOD=f"file://{folder.name}/shared")
os.environ.setdefault("MASTER_PORT", "29531")

import torch  # noqa: E402
from torch.testing._internal.common_distributed import DistTestCases  # noqa: E402

import baton.torch  # noqa: E402

torch.set_num_threads(1)
logging.disable(logging.ERROR)  # what failed is printed once, by us
NAME = "torch.testing._internal.distributed.distributed_test"
OPENED = ((r'require_backend_is_available\(\{"gloo"\}\)', 'require_backend_is_available({"gloo", BACKEND})'),
          (r'BACKEND != "(gloo|mpi)"', r'BACKEND not in ("\1", "baton")'),
          (r'BACKEND == "gloo"', 'BACKEND in ("gloo", "baton")'))


def load():
    """torch's module, with its gates open to the name baton."""
    spec = importlib.util.find_spec(NAME)
    source = pathlib.Path(spec.origin).read_text()
    for pattern, instead in OPENED if options.backend == "baton" else ():
        source, times = re.subn(pattern, instead, source)
        assert times, f"torch's tests have no {pattern!r} any more"
    if options.backend == "baton":
        for feature in ("ddp", "subgroup", "plugin", "gpu"):
            DistTestCases.backend_feature[feature].add("baton")
    module = types.ModuleType(NAME)
    module.__file__, module.__package__ = spec.origin, NAME.rpartition(".")[0]
    sys.modules[NAME] = module
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    return module


if options.backend == "baton":
    print(f"over the backend in {baton.torch.implementation()}", flush=True)
module = load()


# What no backend that is not torch's own can pass.
KNOWN = {"test_ddp_logging_data_cpu": "DDP logs torch's own word for a backend: `custom` for all that are not its own"}


class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)

    def _spawn_processes(self):
        pass


class Result(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.told = {}

    def tell(self, test, outcome, why=""):
        name = test._testMethodName
        self.told.setdefault(name, (outcome, why))
        print(f"{time.monotonic() - begun:6.1f} s  {outcome:8}{name}  {self.told[name][1].splitlines()[-1] if why else ''}", flush=True)

    def addSuccess(self, test):
        self.tell(test, "passed")

    def addSkip(self, test, reason):
        self.tell(test, "skipped", reason)

    def addFailure(self, test, error):
        known = KNOWN.get(test._testMethodName) if options.backend == "baton" else None
        self.tell(test, "known" if known else "failed", known or self._exc_info_to_string(error, test))

    addError = addFailure


def reason(why):
    """Of a skip, in the words of the page."""
    why = next((line for line in reversed(why.strip().splitlines()) if "Error" in line), why.strip().splitlines()[-1])
    if why.startswith("https://"):
        return f"torch itself skips it: {why}"
    for pattern, said in (
            (r"(?i)cuda|gpu|nccl|accelerator|multigpu|device", "needs a GPU or NCCL"),
            (r"(?i)world.?size|num_workers|processes", "needs another number of ranks"),
            (r"(?i)torchvision", "needs torchvision")):
        if re.search(pattern, why):
            return said
    return why


begun = time.monotonic()
names = options.tests or unittest.TestLoader().getTestCaseNames(Case)
result = Result()
for name in names:
    Case(name).run(result)
    if result.told.get(name, ("",))[0] == "failed":
        print(result.told[name][1], flush=True)
count = collections.Counter(outcome for outcome, _ in result.told.values())
summary = (f"{len(result.told)} tests at {SIZE} ranks: {count['passed']} passed, {count['failed']} failed, "
           f"{count['known']} known to fail, {count['skipped']} skipped")
print(f"{summary}, {time.monotonic() - begun:.0f} s")

if options.page:
    groups = collections.defaultdict(list)
    for name, (outcome, why) in sorted(result.told.items()):
        if outcome != "passed":
            groups[(outcome, reason(why))].append(name)
    lines = ["# torch's own tests of process groups over Baton", "",
             f"`torch {torch.__version__.partition('+')[0]}`, the `distributed_test` of its wheel, backend `{options.backend}` in "
             f"{baton.torch.implementation()}: {summary}. Written by `./run torch suite --page docs/pytorch-suite.md`.", "",
             "| | why | tests | which |", "|---|---|---|---|"]
    for (outcome, why), tests in sorted(groups.items(), key=lambda item: -len(item[1])):
        which = ", ".join(f"`{name.removeprefix('test_')}`" for name in tests)
        lines.append(f"| {outcome} | {why.replace('|', '/')} | {len(tests)} | {which} |")
    options.page.write_text("\n".join(lines) + "\n")
sys.exit(1 if count["failed"] else 0)
