"""Calls in flight: what a communicator's calls return."""
from __future__ import annotations

import asyncio
import ctypes
import itertools
import sys
import threading
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Tuple

from . import _library, _loop
from ._library import lib
from ._requests import KINDS
from .agent import _in_slices
from .errors import BatonError, BatonTimeoutError, InvalidParamError, NotAllowedError, error_of

if TYPE_CHECKING:
    from .communicator import Communicator

_SPINS, _NAP = 20, 0.01  # of a task that awaits a call: looks, before it sleeps, and for how many seconds at most

OnEnd = Callable[["Work", Optional[BatonError]], None]
_awaited: Dict[int, Tuple["Work", OnEnd]] = {}  # whose end the library tells by _told()
_keys = itertools.count(1)


def _told(key: int, number: int, result: int, text: bytes) -> None:
    """On whichever thread finds out that a call has ended."""
    work, on_end = _awaited.pop(key)
    # Exceptions of the callback have no caller: ctypes passes them to sys.unraisablehook.
    on_end(work, error_of(result, text.decode(errors="replace")) if result < 0 else None)


_TOLD = _library.OnEnd(_told)


def tell_end(request: Any, work: "Work", on_end: OnEnd) -> int:
    """Has the library tell `on_end` when the call has ended that `request` will begin. Returns what forget_end() takes."""
    request.context, request.on_end = next(_keys), _TOLD
    _awaited[request.context] = work, on_end
    return int(request.context)


def forget_end(key: int) -> None:
    """Frees the callback of a call that did not begin; 0: there was none."""
    _awaited.pop(key, None)


class Work(_loop.Awaited[Any]):
    """A call that was started. `await work`, asyncio.create_task(work) and the like end as it does; a cancelled wait
    changes nothing."""

    _TEST, _WAIT = lib.work_test, lib.work_wait  # of the library

    def __init__(self, comm: "Communicator", name: str, keep: Any, result: Any) -> None:
        self.comm, self.name, self.number = comm, name, 0
        self._keep, self._result = keep, result
        self._error: Optional[BatonError] = None
        self._ended, self._lock = False, threading.Lock()
        self._group: Optional[Work] = None  # that it ends with
        self._collects = False  # such a group, to which calls are still added
        self._of_all: List[int] = []  # the calls in it that all ranks make

    def __repr__(self) -> str:
        state = "runs" if not self._ended else f"failed: {self._error}" if self._error else "done"
        return f"<{self.name} of {self.comm.name!r}: {state}>"

    def _end(self, error: Optional[BatonError]) -> None:
        self._error, self._ended, self._keep = error, True, None
        self.comm._running.pop(self.number, None)

    def _ask(self, function: Any, *arguments: Any) -> bool:
        """Whether it has ended, after one of the library's functions for that."""
        try:
            if self.comm._open.call(function, self.number, *arguments) != _library.IN_PROGRESS:
                self._end(None)
        except BatonTimeoutError:
            raise
        except BatonError as why:
            self._end(why)
        return self._ended

    def _add(self, work: "Work") -> None:
        """To this group, whose result is a list."""
        work._group = self
        if work._is_of_all():
            self._of_all.append(work.number)
        self._keep.append(work._keep)
        self._result.append(work._result)

    def _is_of_all(self) -> bool:
        """True for calls that all ranks make, in the same order."""
        return self.name in KINDS and self.name not in ("send", "receive")

    def _check_complete(self) -> None:
        if self._collects:
            raise NotAllowedError("calls may be added to this group yet: wait() for them behind its `with`")

    def _tell(self) -> Any:
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._result

    def done(self) -> bool:
        """False while it runs. Raises its error, if it failed."""
        if self._group is not None:
            return self._group.done()
        self._check_complete()
        if not self._ended and self._lock.acquire(blocking=False):  # else another thread waits for it
            try:
                if not self._ended:
                    self._ask(self._TEST)
            finally:
                self._lock.release()
        if self._ended:
            self._tell()
        return self._ended

    def wait(self, timeout: Optional[float] = None) -> Any:
        """Waits for its end; returns what the call returns, or raises its error. BatonTimeoutError: it still runs. Any thread
        may wait, any number of times."""
        if self._group is not None:
            self._group.wait(timeout)
            return self._result
        self._check_complete()
        if not self._ended:
            _in_slices(self._wait_slice, timeout)
        return self._tell()

    def _wait_slice(self, span: int) -> None:
        if not self._lock.acquire(timeout=span / 1e9):
            raise BatonTimeoutError(f"{self.name} still runs")
        try:
            if not self._ended:
                self._ask(self._WAIT, span)
        finally:
            self._lock.release()

    @property
    def source(self) -> int:
        """The sender's rank of a receive that has ended. NotFoundError: this is another kind of call, or at least
        1,024 calls came after it."""
        return self.comm._open.number_of(lib.work_source, self.number, kind=ctypes.c_int32)

    @property
    def result(self) -> Any:
        """The result of the call after it has ended; InvalidParamError while it runs."""
        if not self.done():
            raise InvalidParamError(f"{self.name} still runs: wait() for it")
        return self._result

    async def _wait(self) -> Any:
        # With a background thread, a callback for each call would wait for the interpreter's lock: to look now and then costs
        # less. Without one looking is what advances it; soon it sleeps, and other tasks run, until there is something to do.
        pause, turns = 0.0, 0
        while not self.done():
            turns += 1
            if self.comm._background:
                await asyncio.sleep(pause)
                pause = min(pause + 20e-6, 1e-3)
            elif turns < _SPINS or self.comm.endpoint.progress():
                await asyncio.sleep(0)
            else:
                await _loop.readable(self.comm.endpoint.event_fd, _NAP)
        return self._tell()

    def close(self) -> None:
        """Nothing: under a coroutine's name for it."""
