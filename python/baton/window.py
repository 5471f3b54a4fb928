"""Windows: memory of each rank that the others write and read without its help.

    window = baton.Window(comm, size=4096)             # every rank makes it
    window.put(array, to=1, offset=64, add=1)          # bytes to rank 1, and behind them a signal
    window.wait_signal(source=0, value=1)              # at rank 1: the bytes are there
    numpy.frombuffer(window.memory, ...)

A signal is seen only when all earlier puts of that rank to that target, in any window of the communicator, are there. A put has
ended when its bytes are there; flush() ends when all before it have. Nothing else is ordered. The functions ..._async() give a
Work of the communicator. Over anything but shared memory the target has to be in a call as well, or have an endpoint with
`background`. An access that fails, or whose `timeout` is over, ends alone; what breaks the communicator ends all of them.
"""
from __future__ import annotations

import ctypes
import weakref
from typing import Any, Optional

from . import _library
from ._handle import Closing, Handle
from ._library import lib
from ._requests import nanoseconds
from .agent import _within
from .buffers import elements_of
from .communicator import ANY_RANK, Communicator
from .errors import InvalidParamError
from .work import OnEnd, Work

_KINDS = {name: number for number, name in enumerate(("put", "get", "signal", "wait_signal", "flush"))}


class Window(Closing):
    """This rank's part of a window: `memory`, an array of its own that others may write, or `size` bytes of Baton's, zeros,
    which ranks of this machine can view(). Each rank brings as much as it likes, also nothing. `signals`: how many counters
    each rank has at each other one, equal at all ranks. A call of all ranks; `timeout`: until all have made it. Where one
    rank's memory is of no use all raise InvalidParamError, and the communicator goes on. Offsets and sizes are bytes."""

    def __init__(self, comm: Communicator, memory: Any = None, *, size: int = 0, signals: int = 1,
                 timeout: Optional[float] = None) -> None:
        if memory is not None and size:
            raise InvalidParamError("pass `memory` or `size`, not both")
        self.comm, self.signals, self._views = comm, signals, 0
        self.memory = memory if memory is not None else comm.endpoint.allocate(size) if size else bytearray()
        self._mine = elements_of(self.memory, "memory", True)
        self._open = Handle(None, "window")
        self._open.value = comm._open.handle_of(
            lib.window_create, self._mine.address, self._mine.count * self._mine.itemsize,
            _within(signals, 2 ** 32 - 1, "signals"), nanoseconds(timeout, "timeout"))
        # The memory stays until no peer writes to it any more.
        weakref.finalize(self, lambda window, kept: window.destroy(), self._open, self._mine)

    def put_async(self, data: Any, to: int, offset: int = 0, *, add: int = 0, slot: int = 0, **how: Any) -> Work:
        """Starts put()."""
        return self._start("put", to, data, offset, add, slot, **how)

    def put(self, data: Any, to: int, offset: int = 0, *, add: int = 0, slot: int = 0, **how: Any) -> None:
        """Writes an array to a rank's memory, and with `add` then signals."""
        self.put_async(data, to, offset, add=add, slot=slot, **how).wait()

    def get_async(self, out: Any, source: int, offset: int = 0, **how: Any) -> Work:
        """Starts get()."""
        return self._start("get", source, out, offset, **how)

    def get(self, out: Any, source: int, offset: int = 0, **how: Any) -> Any:
        """Reads a rank's memory into an array."""
        return self.get_async(out, source, offset, **how).wait()

    def signal_async(self, to: int, add: int = 1, slot: int = 0, **how: Any) -> Work:
        """Starts signal()."""
        return self._start("signal", to, None, 0, add, slot, **how)

    def signal(self, to: int, add: int = 1, slot: int = 0, **how: Any) -> None:
        """Adds to this rank's counter `slot` at another one, behind all earlier puts to it."""
        self.signal_async(to, add, slot, **how).wait()

    def wait_signal_async(self, source: int, value: int, slot: int = 0, **how: Any) -> Work:
        """Starts wait_signal()."""
        return self._start("wait_signal", source, None, 0, value, slot, **how)

    def wait_signal(self, source: int, value: int, slot: int = 0, **how: Any) -> None:
        """Waits until the counter `slot` of that rank here is at least `value`. Counters only rise."""
        self.wait_signal_async(source, value, slot, **how).wait()

    def flush_async(self, to: int = ANY_RANK, **how: Any) -> Work:
        """Starts flush()."""
        return self._start("flush", to, None, 0, **how)

    def flush(self, to: int = ANY_RANK, **how: Any) -> None:
        """Waits until all earlier accesses of this rank, to one or all, have ended; raises the error if one
        failed."""
        self.flush_async(to, **how).wait()

    def signal_value(self, source: int, slot: int = 0) -> int:
        """This rank's value of counter `slot` of that rank."""
        return self._open.number_of(lib.window_signal_value, _rank(source), _within(slot, 2 ** 32 - 1, "slot"))

    def size(self, rank: int) -> int:
        """Bytes of that rank's memory."""
        return self._open.number_of(lib.window_bytes, _rank(rank))

    def view(self, rank: int) -> memoryview:
        """That rank's memory as a read-only buffer, without a copy. NotSupportedError, with the reason: it cannot be
        mapped here, or that rank passed its own memory instead of `size`."""
        data, size = ctypes.c_void_p(), ctypes.c_uint64()
        self._open.call(lib.window_view, _rank(rank), ctypes.byref(data), ctypes.byref(size))
        memory = (ctypes.c_char * size.value).from_address(data.value or 0) if size.value else (ctypes.c_char * 0)()
        self._views += 1
        weakref.finalize(memory, self._view_gone)  # which keeps the window
        return memoryview(memory).cast("B").toreadonly()

    def _view_gone(self) -> None:
        self._views -= 1

    def close(self) -> None:
        """This rank's part ends: works in flight end with CancelledError, accesses of others fail. InvalidParamError: something
        still holds a view()."""
        if self._views:
            raise InvalidParamError(f"{self._views} views of the window are held: give them up first")
        self._open.destroy()

    def _start(self, name: str, rank: int, data: Any, offset: int, value: int = 0, slot: int = 0, *,
               timeout: Optional[float] = None, on_end: Optional[OnEnd] = None) -> Work:
        one = None if data is None else elements_of(data, "out" if name == "get" else "data", name == "get")
        access = _library.Access(ctypes.sizeof(_library.Access), _KINDS[name], _rank(rank), one.address if one else None,
                                 one.count * one.itemsize if one else 0, _within(offset, 2 ** 64 - 1, "offset"),
                                 _within(value, 2 ** 64 - 1, "value"), _within(slot, 2 ** 32 - 1, "slot"))
        work = Work(self.comm, name, (self, one), data if name == "get" else None)
        return self.comm._begin(work, access, self._open, lib.window_start, timeout, on_end)


def _rank(rank: int) -> int:
    """ctypes would take what is left of a number of more than 32 bits."""
    if not -2 ** 31 <= rank < 2 ** 31:
        raise InvalidParamError(f"{rank} is no rank")
    return rank
