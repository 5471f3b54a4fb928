"""Calls in flight of the backend in Python."""
from __future__ import annotations

import ctypes
import datetime
import queue
import struct
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Optional

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _library
from .._handle import Handle
from .._library import lib
from ..errors import InvalidParamError

_INVALID, _TIMEOUT, _CANCELED = -2, -64, -11
_SLICE = 0.05  # seconds that a thread stays in the library: a group may be destroyed meanwhile


def fail(result: int, text: str) -> None:
    raise (ValueError if result == _INVALID else dist.DistBackendError)(text)


class Flight:
    """Calls in flight, with what they use. They may outlive their group."""

    __slots__ = ("comm", "flying", "outputs", "numbers", "keep", "unpack", "over", "limit", "error", "reaping", "lock", "ended",
                 "future")

    def __init__(self, comm: Handle, flying: "Dict[int, Flight]", outputs: List[torch.Tensor]) -> None:
        self.comm, self.flying, self.outputs = comm, flying, outputs
        self.numbers: List[int] = []
        self.keep: List[Any] = []
        self.unpack: List[Callable[[], Any]] = []
        self.over, self.limit = False, 0
        self.error: Optional[Exception] = None
        self.reaping = threading.Lock()  # of the thread that waits in the library, a slice of time at once
        self.lock = threading.Lock()  # of `over` and `future`
        self.ended: Optional[torch.futures.Future[Any]] = None
        self.future: Optional[torch.futures.Future[Any]] = None

    def start(self, request: "_Request") -> None:
        """Starts another call, which `request` describes."""
        while len(self.flying) >= request.most:
            for oldest in list(self.flying.values())[:1]:
                oldest.tell(_SLICE)  # and no more: it may be the one that is being made
        try:
            result = self.comm.ask(lib.comm_start, request.call, request.number_, request.error_)
        except InvalidParamError as why:
            raise dist.DistBackendError(str(why)) from None
        if result < 0:
            if self.numbers:
                Helper.add(self)
            fail(result, request.text())
        number = request.number.value
        self.numbers.append(number)
        self.flying[number] = self

    def tell(self, within: float) -> bool:
        """Takes the ends of its calls, for these seconds; False: one is still in flight."""
        if not self.reaping.acquire(timeout=within):
            return False
        try:
            request = requests.mine
            while self.numbers:
                text = ""
                try:
                    result = self.comm.ask(lib.work_wait, self.numbers[0], int(within * 1e9), request.error_)
                except InvalidParamError as why:  # the group is destroyed, and its calls with it
                    result, text = _CANCELED, str(why)
                if result == _TIMEOUT:
                    return False
                self.flying.pop(self.numbers.pop(0), None)
                if result < 0 and self.error is None:
                    try:
                        fail(result, text or f"{request.text()}. The call's timeout was {self.limit // 10 ** 6} ms")
                    except Exception as why:
                        self.error = why
            return True
        finally:
            self.reaping.release()

    def advance(self, within: float) -> bool:
        """The same, and what follows the last end. True once the work is over."""
        if not self.over and self.tell(within):
            with self.reaping:
                self._settle()
        return self.over

    def _settle(self) -> None:
        if self.over:
            return
        if self.error is None and self.unpack:
            try:
                with torch.inference_mode():  # also tensors that a program made in that mode
                    for unpack in self.unpack:
                        unpack()
            except Exception as why:
                self.error = why
        self.unpack, self.keep = [], []
        with self.lock:
            self.over, ended = True, self.ended
        if ended is not None:
            ended.set_result(None)

    def _value(self, _: Any) -> List[torch.Tensor]:
        if self.error is not None:
            raise self.error
        return self.outputs

    def wait(self, timeout: float = 0) -> None:
        end = time.monotonic() + timeout if timeout > 0 else 0
        while not self.advance(min(_SLICE, max(0.0, end - time.monotonic())) if end else _SLICE):
            if end and time.monotonic() >= end:
                raise dist.DistBackendError("wait() Timed out; the call goes on until its own timeout: wait() again, or abort "
                                            "the group")
        if self.error is not None:
            raise self.error.with_traceback(None)

    def get_future(self) -> "torch.futures.Future[Any]":
        with self.lock:
            if self.future is None:
                # Not set_exception(), which is lost where torch's C++ holds the future.
                self.ended = torch.futures.Future()
                self.future = self.ended.then(self._value)
                if self.over:
                    self.ended.set_result(None)
                else:
                    Helper.add(self)
            return self.future


_pack_call: Callable[..., None] = struct.Struct("@NiiiiPPNPPPPqPiIPP").pack_into  # of a baton_call


class _Request:
    """A call's arguments as the library takes them, and what it answers: a thread's, for one call after the other."""

    def __init__(self) -> None:
        self.memory, self.number = _library.Call(), ctypes.c_uint64()
        self._error = _library.Error(ctypes.sizeof(_library.Error))
        self.call, self.number_, self.error_ = map(ctypes.byref, (self.memory, self.number, self._error))
        self.most = 0  # such calls in flight
        self._size = ctypes.sizeof(self.memory)

    def fill(self, kind: int, dtype: int, op: int, peer: int, source: int, out: int, count: int, lists: Iterable[int],
             timeout: int, tag: int) -> None:
        _pack_call(self.memory, 0, self._size, kind, dtype, op, peer, source, out, count, *lists, timeout, 0, tag, 0, 0, 0)

    def text(self) -> str:
        return bytes(self._error.text).decode(errors="replace")


class _Requests(threading.local):
    def __init__(self) -> None:
        self.mine = _Request()


requests = _Requests()


class Work(dist.Work):
    """The work object of a flight that torch holds."""

    def __init__(self, flight: Flight) -> None:
        super().__init__()
        self.flight, self.get_future = flight, flight.get_future

    def wait(self, timeout: datetime.timedelta = datetime.timedelta(0)) -> bool:
        self.flight.wait(timeout.total_seconds())
        return True

    def result(self) -> List[torch.Tensor]:
        return self.flight.outputs


class Helper:
    """A thread that ends flights that have a future."""

    works: "queue.SimpleQueue[Flight]" = queue.SimpleQueue()
    thread: Optional[threading.Thread] = None

    @classmethod
    def add(cls, work: Flight) -> None:
        if threading.current_thread() is cls.thread:  # in a callback, which may wait for it
            works: "queue.SimpleQueue[Flight]" = queue.SimpleQueue()
            works.put(work)
            threading.Thread(target=cls.run, args=(works, False), daemon=True).start()
            return
        if cls.thread is None or not cls.thread.is_alive():
            cls.works = queue.SimpleQueue()
            cls.thread = threading.Thread(target=cls.run, args=(cls.works,), daemon=True, name="baton futures")
            cls.thread.start()
        cls.works.put(work)

    @staticmethod
    def run(works: "queue.SimpleQueue[Flight]", forever: bool = True) -> None:
        here = [works.get()]
        while here or forever:
            while not here or not works.empty():
                here.append(works.get())
            here = [work for work in here if not work.advance(0.001)]  # one must not keep another from ending


def done(outputs: List[torch.Tensor]) -> Any:
    """A work that is over: torch's own, which can say so."""
    future = torch._C.Future([])
    future.set_result(outputs)
    return c10d._create_work_from_future(future)
