"""Ranks of a group, as processes forked from a test: run(function, size) gives what each returned."""
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist

import baton.torch

torch.set_num_threads(1)
baton.torch.implementation()  # compiled and loaded once, not by each rank


class Failed(Exception):
    """A rank raised, or ended before it returned."""


class Ranks:
    """The processes, begun by the constructor: function(rank, size, *arguments) after init_process_group(), if there is a
    backend. result(rank) waits for one."""

    def __init__(self, function, size, *arguments, backend="baton", timeout=60, **options):
        self.folder = tempfile.TemporaryDirectory()
        self.pids, self.pipes, self.results = [], [], {}
        sys.stdout.flush()
        for rank in range(size):
            read, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(read)
                self._child(write, function, rank, size, arguments, backend, timeout, options)
            os.close(write)
            self.pids.append(pid)
            self.pipes.append(os.fdopen(read, "rb"))

    def _child(self, pipe, function, rank, size, arguments, backend, timeout, options):
        try:
            if backend:
                import datetime
                dist.init_process_group(backend, init_method=f"file://{self.folder.name}/store", rank=rank, world_size=size,
                                        timeout=datetime.timedelta(seconds=timeout), **options)
            told = (True, function(rank, size, *arguments))
        except BaseException:
            told = (False, traceback.format_exc())
        try:
            data = pickle.dumps(told)
        except Exception as why:
            data = pickle.dumps((False, f"the result cannot be passed on: {why}"))
        with os.fdopen(pipe, "wb") as out:
            out.write(data)
        sys.stdout.flush()
        if told[0] and backend and dist.is_initialized():
            dist.destroy_process_group()
        os._exit(0)  # nothing of the parent's is ended here

    def result(self, rank):
        if rank not in self.results:
            data = self.pipes[rank].read()  # until the rank ends
            os.waitpid(self.pids[rank], 0)
            self.results[rank] = pickle.loads(data) if data else (False, "the process ended")
        good, value = self.results[rank]
        if not good:
            raise Failed(f"rank {rank}: {value}")
        return value

    def send(self, rank, number):
        os.kill(self.pids[rank], number)

    def close(self):
        for rank, pid in enumerate(self.pids):
            if rank not in self.results:
                for number in (signal.SIGKILL, signal.SIGCONT):
                    os.kill(pid, number)
                os.waitpid(pid, 0)
                self.results[rank] = (False, "killed at the end")
            self.pipes[rank].close()
        self.folder.cleanup()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def run(function, size, *arguments, **options):
    with Ranks(function, size, *arguments, **options) as ranks:
        return [ranks.result(rank) for rank in range(size)]


def compiled():
    """Whether it is not the backend in Python."""
    return os.environ.get("BATON_TORCH") != "python"


def at_ranks(*sizes, if_compiled=False, folder=False, **options):
    """Makes a test of what each rank does: body(rank, size), and the name of a folder that they share, at each of these sizes."""
    def test_of(body):
        def test():
            for size in sizes if compiled() or not if_compiled else ():
                with tempfile.TemporaryDirectory() as shared:
                    run(body, size, *([shared] if folder else []), **options)
        return test
    return test_of


def raises(kind, call, *words):
    """Asserts that call() raises `kind` with these words in its text; returns the text."""
    try:
        call()
    except kind as why:
        text = str(why)
        for word in words:
            assert word in text, f"no {word!r} in: {text}"
        return text
    raise AssertionError(f"no {kind} was raised")


def main(tests):
    """Runs functions whose names begin with test_, or those named on the command line; exits with 1 if one failed."""
    wanted = sys.argv[1:]
    failed = 0
    for name, test in list(tests.items()):
        if not name.startswith("test_") or wanted and name not in wanted:
            continue
        start = time.monotonic()
        try:
            test()
            print(f"ok      {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    sys.exit(1 if failed else 0)
