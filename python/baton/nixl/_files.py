"""Files as memory: what NIXL's POSIX backend is. A FILE descriptor is (offset, bytes, file descriptor), and a transfer
goes between DRAM and FILE of one agent. Threads of the agent read and write, vectors of pages at a time; the
interpreter's lock is free meanwhile."""
from __future__ import annotations

import concurrent.futures
import ctypes
import itertools
import os
import threading
import time
from typing import Any, Dict, List, Optional, Tuple

from baton import errors
from baton.agent import Telemetry

_THREADS = 4
_JOB_BYTES = 8 << 20  # of a transfer, that one thread does before it looks whether it is still wanted
_VECTOR = 1024  # IOV_MAX of Linux
_numbers = itertools.count(1 << 62)  # no number of the library's

Range = Tuple[int, int, int]  # offset or address, bytes, file descriptor or device
Pair = Tuple[int, int, int, int]  # file descriptor, offset, address, bytes


class FileList:
    """A prepared list of FILE."""

    def __init__(self, ranges: List[Range]) -> None:
        self.number, self.ranges, self.size = next(_numbers), ranges, len(ranges)

    def release(self) -> None:
        """Nothing is held for it."""


class Files:
    """The files of an agent, and what moves to and fro. Who runs keeps the agent, which keeps its memory."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self._lock = threading.Lock()
        self._registered: Dict[Range, int] = {}
        self._running: "set[FileTransfer]" = set()
        self._pool: Optional[concurrent.futures.ThreadPoolExecutor] = None

    def register(self, ranges: List[Range]) -> None:
        """Each must be of an open file; the file may be shorter than the range, until something is read there."""
        for offset, size, fd in ranges:
            try:
                os.fstat(fd)
            except (OSError, OverflowError) as why:
                raise errors.BackendError(f"file descriptor {fd}: {why}; a FILE descriptor's device is an open file's "
                                          "number") from None
            if size == 0 or offset + size >= 1 << 63:
                raise errors.BackendError(f"{size} bytes at {offset} are no part of a file")
        with self._lock:
            for one in ranges:
                self._registered[one] = self._registered.get(one, 0) + 1

    def deregister(self, ranges: List[Range]) -> None:
        with self._lock:
            for one in ranges:
                if one not in self._registered:
                    raise errors.NotFoundError(f"{one[1]} bytes at {one[0]} of file descriptor {one[2]} are not "
                                               "registered: name them as they were registered")
                self._refuse_running(lambda pair, one=one: pair[0] == one[2] and _overlap(pair[1], pair[3], *one[:2]))
            for one in ranges:
                self._registered[one] -= 1
                if self._registered[one] == 0:
                    del self._registered[one]

    def memory_leaves(self, ranges: List[Range]) -> None:
        """Of DRAM: refuses while a transfer uses it."""
        with self._lock:
            for address, size, _ in ranges:
                self._refuse_running(lambda pair, at=(address, size): _overlap(pair[2], pair[3], *at))

    def _refuse_running(self, uses: Any) -> None:
        if any(uses(pair) for transfer in self._running for pair in transfer.pairs):
            raise errors.NotAllowedError("a transfer between memory and file uses it: release that first")

    def check(self, ranges: List[Range]) -> None:
        """That each lies in one registered range."""
        with self._lock:
            for offset, size, fd in ranges:
                if size == 0 or not any(fd == its and start <= offset and offset + size <= start + length
                                        for start, length, its in self._registered):
                    raise errors.NotFoundError(f"{size} bytes at {offset} of file descriptor {fd} are not registered")

    def transfer(self, write: bool, memory: List[Range], files: List[Range]) -> "FileTransfer":
        """One that moves memory[i] to or from files[i]; not posted."""
        if not memory or len(memory) != len(files):
            raise errors.InvalidParamError(f"{len(memory)} descriptors of memory and {len(files)} of files")
        for number, (here, there) in enumerate(zip(memory, files)):
            if here[1] != there[1]:
                raise errors.InvalidParamError(f"pair {number}: {here[1]} bytes of memory and {there[1]} of a file")
        self.check(files)
        return FileTransfer(self, write, [(fd, offset, here[0], size)
                                          for here, (offset, size, fd) in zip(memory, files)])

    def started(self, transfer: "FileTransfer") -> concurrent.futures.ThreadPoolExecutor:
        with self._lock:
            self._running.add(transfer)
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(_THREADS, "baton-files")
            return self._pool

    def ended(self, transfer: "FileTransfer") -> None:
        with self._lock:
            self._running.discard(transfer)


def _overlap(one: int, size: int, other: int, length: int) -> bool:
    return one < other + length and other < one + size


class FileTransfer:
    """As baton.Transfer."""

    def __init__(self, files: Files, write: bool, pairs: List[Pair]) -> None:
        self.number = next(_numbers)
        self.pairs = sorted(pairs)  # what is one behind the other in a file goes at once
        self._files, self._write, self._bytes = files, write, sum(pair[3] for pair in pairs)
        self._changed = threading.Condition()
        self._left = -1  # jobs; -1: not posted
        self._stop = False
        self._why: Optional[errors.BatonError] = None
        self._times = [0.0, 0.0, 0.0]  # begun, posted, ended

    def post(self, message: Optional[bytes] = None) -> "FileTransfer":
        if message:
            raise errors.BackendError("files hear no notification: post it without")
        jobs = self._jobs()
        assert self._files.agent.handle  # or it raises: closed, or of the process that this one was forked from
        with self._changed:
            if self.number == 0:
                raise errors.NotFoundError("the transfer was released")
            if self._left > 0:
                raise errors.RepostActiveError("the transfer is running: wait for its end")
            self._left, self._stop, self._why = len(jobs), False, None
            self._times[0] = time.monotonic()
        pool = self._files.started(self)
        for job in jobs:
            try:
                pool.submit(self._run, job)
            except RuntimeError:  # the interpreter is ending and starts no threads
                self._run(job)
        self._times[1] = time.monotonic()
        return self

    def _jobs(self) -> List[List[Pair]]:
        jobs: List[List[Pair]] = [[]]
        held = 0
        for pair in self.pairs:
            if held >= _JOB_BYTES:
                jobs.append([])
                held = 0
            jobs[-1].append(pair)
            held += pair[3]
        return jobs

    def _run(self, job: List[Pair]) -> None:
        why: Optional[errors.BatonError] = None
        try:
            at = 0
            while at < len(job) and not self._stop:
                end = at + 1
                while (end < len(job) and end - at < _VECTOR and job[end][0] == job[at][0]
                       and job[end][1] == job[end - 1][1] + job[end - 1][3]):
                    end += 1
                self._move(job[at:end])
                at = end
        except OSError as failed:
            what = "written" if self._write else "read"
            why = errors.BackendError(f"file descriptor {job[at][0]} at {job[at][1]}: could not be {what}: "
                                      f"{failed.strerror}")
        except errors.BatonError as failed:
            why = failed
        except BaseException as failed:  # no job may be lost: somebody waits for its end
            why = errors.UnknownError(repr(failed))
        with self._changed:
            if why is not None:
                self._stop, self._why = True, self._why or why
            self._left -= 1
            over = self._left == 0
            if over:
                self._times[2] = time.monotonic()
                self._changed.notify_all()
        if over:
            self._files.ended(self)

    def _move(self, run: List[Pair]) -> None:
        """One stretch of a file."""
        fd, offset = run[0][:2]
        views = [memoryview((ctypes.c_char * size).from_address(address)).cast("B") for _, _, address, size in run]
        while views:
            done = os.pwritev(fd, views, offset) if self._write else os.preadv(fd, views, offset)
            if done == 0:
                raise errors.BackendError(f"file descriptor {fd} ends at {offset}: {sum(map(len, views))} bytes more "
                                          "were asked for")
            offset += done
            while views and done >= len(views[0]):
                done -= len(views.pop(0))
            if done:
                views[0] = views[0][done:]

    def done(self) -> bool:
        with self._changed:
            if self.number == 0:
                raise errors.NotFoundError("the transfer was released")
            if self._left < 0:
                raise errors.NotPostedError("the transfer was not posted")
            if self._left == 0 and self._why is not None:
                raise type(self._why)(str(self._why))  # one of our own: that of the job holds its memory
            return self._left == 0

    def wait(self, timeout: Optional[float] = None) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._left <= 0, timeout):
                raise errors.BatonTimeoutError("the transfer is running still")
        self.done()

    def abort(self) -> None:
        with self._changed:
            if self._left > 0:
                self._stop = True
                self._why = self._why or errors.CancelledError("aborted")

    def release(self, timeout: Optional[float] = None) -> None:
        """Fenced: no byte of it moves any more when this returns."""
        self.abort()
        with self._changed:
            if not self._changed.wait_for(lambda: self._left <= 0, timeout):
                raise errors.BatonTimeoutError("a file answers slowly: the transfer has not ended")
            self.number = 0

    def abandon(self) -> None:
        self.abort()
        self.number = 0

    def telemetry(self) -> Telemetry:
        with self._changed:
            if self._left < 0:
                raise errors.NotPostedError("the transfer was not posted")
            begun, posted, ended = self._times
            now = time.monotonic() if self._left > 0 else ended
        return Telemetry(begun, max(posted - begun, 0.0), now - begun, self._bytes, len(self.pairs))
