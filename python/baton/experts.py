"""Experts: rows of tokens go to the ranks that have their experts, and what those say comes back, weighted and summed.

    experts = baton.Experts(comm, experts=64, top_k=8, hidden=4096, max_tokens=512)   # every rank makes it
    received = experts.dispatch(rows, chosen)            # rows [tokens][hidden], chosen int32 [tokens][top_k], -1 for none
    for group in received.groups:                        # the experts of this rank
        for slot in range(group.first, group.first + group.count):
            numpy.frombuffer(received.output(slot), ...)[:] = ask(group.expert, numpy.frombuffer(received.row(slot), ...))
    experts.combine(received, weights, out)              # weights float32 [tokens][top_k], out [tokens][hidden]

A token's sum is made in ascending number of the expert, in float32, and rounded once: the bits that one rank gives which has all
experts. A rank that dies is masked: the call goes on without it, and missing() tells. dispatch_async() and combine_async() give an
ExpertsWork at once, which can be awaited. One thread at a time is inside; the others wait for it.
"""
from __future__ import annotations

import array
import ctypes
import threading
import weakref
from typing import Any, Dict, List, NamedTuple, Optional

from . import _library
from ._handle import Handle
from ._library import lib
from .agent import _within
from .buffers import Elements, elements_of
from ._requests import TYPES, nanoseconds
from .communicator import Communicator
from .errors import BatonError, InvalidParamError
from .work import OnEnd, Work

_MODES = {"auto": 0, "low_latency": 1, "throughput": 2}
_INT = 2 ** 31 - 1


class ExpertGroup(NamedTuple):
    """The slots [first, first + count) of one expert; a slot is a token at an expert."""

    expert: int
    first: int
    count: int  # type: ignore[assignment]


class Received:
    """The rows that a dispatch brought. `groups`: an ExpertGroup for each expert of this rank, ascending.
    `row_of[slot]`: the number of its row, in bytes `row_stride` apart in `rows`; `outputs`: [slots], `output_stride`
    apart, to be written. Memory of the Experts: of use until the round is combined."""

    def __init__(self, owner: "Experts", work: int, tokens: int, raw: Any) -> None:
        self._owner, self._work, self._tokens, self._scales = owner, work, tokens, raw.scales_offset
        self.groups = [ExpertGroup(g.expert, g.first, g.count) for g in raw.groups[:raw.group_count]]
        self.row_of = array.array("I", ctypes.string_at(raw.row_of, 4 * raw.slots) if raw.slots else b"")
        self.row_stride, self.output_stride = raw.row_stride, raw.output_stride
        self._rows = owner._view(raw.rows, (max(self.row_of, default=-1) + 1) * raw.row_stride)
        self._outputs = owner._view(raw.outputs, raw.slots * raw.output_stride)

    def row(self, slot: int) -> memoryview:
        """The row of that slot as it came: bytes of `dtype`, or with fp8 of e4m3 (then see dequantised())."""
        begin = self._number(slot) * self.row_stride
        return self._rows[begin:begin + self._owner.row_bytes].toreadonly()

    def dequantised(self, slot: int, out: Any) -> Any:
        """With fp8: the row as float32, into an array of `hidden` elements."""
        into = self._owner._array(out, "out", "float32", self._owner.hidden, True)
        if not self._scales:
            raise InvalidParamError("dequantised() is for Experts that were made with fp8=True")
        begin = self._number(slot) * self.row_stride
        row = ctypes.addressof(ctypes.c_char.from_buffer(self._rows, begin))
        lib.experts_dequantise(row, row + self._scales, self._owner.hidden, into.address)
        return out

    def output(self, slot: int) -> memoryview:
        """The memory for the expert's output for that slot, as bytes of `dtype`."""
        self._number(slot)
        return self._outputs[slot * self.output_stride:(slot + 1) * self.output_stride]

    def _number(self, slot: int) -> int:
        if not 0 <= slot < len(self.row_of):
            raise InvalidParamError(f"slot {slot}: there are {len(self.row_of)}")
        if self._owner._current.get(self._work) is not self:
            raise InvalidParamError("this dispatch is combined: what it brought is gone")
        return self.row_of[slot]

    def _gone(self) -> None:
        self._rows = self._outputs = memoryview(b"")


class ExpertsWork(Work):
    """A dispatch or combine that was begun; its result is what dispatch() or combine() returns. It advances while something waits
    for it, awaits it or asks done()."""

    _TEST, _WAIT = lib.experts_test, lib.experts_wait

    def __init__(self, experts: "Experts", name: str, keep: Any, result: Any, on_end: Optional[OnEnd]) -> None:
        owner: Any = experts  # it has what a communicator's work needs of that
        super().__init__(owner, name, keep, result)
        self._experts, self._on_end = experts, on_end
        self.missing: List[int] = []  # the ranks that it went without, once it has ended

    def _ask(self, function: Any, *arguments: Any) -> bool:
        with self._experts._inside:
            ended = super()._ask(function, *arguments)
        if ended and self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self, self._error)
        return ended

    def _end(self, error: Optional[BatonError]) -> None:
        if error is None:
            self.missing = self._experts._without(self.number)
            if self.name == "dispatch":
                self._result = self._experts._receive(self.number, self._result)
        super()._end(error)


class Experts:
    """`experts` of all ranks together, a multiple of their number: rank r has those from r * experts / ranks on. Options are
    equal at all ranks, but `mode` and `rank_timeout` (seconds after which a silent rank is masked; 60). `dtype`: "float32",
    "bfloat16" or "float16"; arrays of two bytes an element may also come as uint16. `fp8`: dispatched rows travel as e4m3 with
    a scale for each 128 elements. `capacity`: tokens of one rank for one expert at most; 0 takes what there is. `in_flight`:
    rounds that may be open at a time, to 4. A call of all ranks."""

    def __init__(self, comm: Communicator, *, experts: int, top_k: int, hidden: int, max_tokens: int, dtype: str = "bfloat16",
                 fp8: bool = False, capacity: int = 0, in_flight: int = 1, mode: str = "auto",
                 rank_timeout: Optional[float] = None) -> None:
        if dtype not in ("float32", "bfloat16", "float16"):
            raise InvalidParamError(f"dtype {dtype!r}: rows are float32, bfloat16 or float16")
        if mode not in _MODES:
            raise InvalidParamError(f"mode {mode!r}: there are {', '.join(_MODES)}")
        numbers = {"experts": experts, "top_k": top_k, "hidden": hidden, "max_tokens": max_tokens, "capacity": capacity,
                   "in_flight": in_flight}
        options = _library.ExpertsOptions(ctypes.sizeof(_library.ExpertsOptions), type=TYPES[dtype], fp8=bool(fp8),
                                          mode=_MODES[mode], rank_timeout=nanoseconds(rank_timeout, "rank_timeout"),
                                          **{name: _within(value, _INT, name) for name, value in numbers.items()})
        self.comm, self.top_k, self.hidden, self.dtype, self.fp8 = comm, top_k, hidden, dtype, bool(fp8)
        self._element = 4 if dtype == "float32" else 2
        self.row_bytes = hidden * (1 if fp8 else self._element)  # of a row as it is received
        # By the number of their dispatch. One that is given up is combined no more.
        self._current: "weakref.WeakValueDictionary[int, Received]" = weakref.WeakValueDictionary()
        self._running: Dict[int, Work] = {}  # what is in flight, with the memory that it uses
        self._inside, self._views = threading.Lock(), 0
        self.name, self.endpoint, self._background = f"{comm.name}, experts", comm.endpoint, comm._background
        self._open = Handle(None, "experts")
        self._open.value = comm._open.handle_of(lib.experts_create, ctypes.byref(options))
        weakref.finalize(self, Handle.destroy, self._open)

    def dispatch_async(self, rows: Any, chosen: Any, on_end: Optional[OnEnd] = None) -> ExpertsWork:
        """Starts dispatch(). `on_end` is called with the work and its error or None by what finds out that it has ended: wait(),
        done() or a task that awaits it, which raises what it raises."""
        sent = self._array(rows, "rows", self.dtype, None, False)
        if sent.count % self.hidden:
            raise InvalidParamError(f"rows have {sent.count} elements: that is no multiple of hidden, {self.hidden}")
        tokens = sent.count // self.hidden
        choices = self._array(chosen, "chosen", "int32", tokens * self.top_k, False)
        return self._begin(ExpertsWork(self, "dispatch", (sent, choices), tokens, on_end), lib.experts_dispatch, sent.address,
                           _within(tokens, _INT, "tokens"), choices.address, choices.count)

    def dispatch(self, rows: Any, chosen: Any, timeout: Optional[float] = None) -> Received:
        """Sends each row to the ranks of its experts, and waits for the others'. BatonTimeoutError: not within `timeout`; it goes
        on, and the Experts are of no use: wait for dispatch_async() where that may be."""
        received: Received = self.dispatch_async(rows, chosen).wait(timeout)
        return received

    def combine_async(self, received: Received, weights: Any, out: Any, on_end: Optional[OnEnd] = None) -> ExpertsWork:
        """Starts combine()."""
        if self._current.get(received._work) is not received:
            raise InvalidParamError("received is no dispatch of these experts, or is combined already")
        weigh = self._array(weights, "weights", "float32", received._tokens * self.top_k, False)
        into = self._array(out, "out", self.dtype, received._tokens * self.hidden, True)
        work = self._begin(ExpertsWork(self, "combine", (weigh, into), out, on_end), lib.experts_combine, received._work,
                           weigh.address, weigh.count, into.address, into.count * into.itemsize)
        self._current.pop(received._work)._gone()
        return work

    def combine(self, received: Received, weights: Any, out: Any, timeout: Optional[float] = None) -> Any:
        """Sums what experts have said of this rank's tokens into `out`, which it returns."""
        return self.combine_async(received, weights, out).wait(timeout)

    def missing(self, received: Optional[Received] = None) -> List[int]:
        """The ranks that a dispatch went without; of none: all that are masked."""
        if received is not None and received._owner is not self:
            raise InvalidParamError("received is no dispatch of these experts")
        with self._inside:
            return self._without(received._work if received else 0)

    def close(self) -> None:
        """Waits until no rank reads what this one's experts said; the others go on without it. InvalidParamError: something still
        holds a row() or an output()."""
        for received in list(self._current.values()):
            received._gone()
        self._current.clear()
        if self._views:
            raise InvalidParamError(f"{self._views} views of rows or outputs are held: give them up first")
        self._open.destroy()
        self._running.clear()

    def __enter__(self) -> "Experts":
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except InvalidParamError:
            if kind is None:  # else views are held by what has raised
                raise

    def _begin(self, work: ExpertsWork, function: Any, *arguments: Any) -> ExpertsWork:
        with self._inside:
            work.number = self._open.number_of(function, *arguments)
        self._running[work.number] = work
        return work

    def _receive(self, number: int, tokens: int) -> Received:
        raw = _library.ExpertRows(ctypes.sizeof(_library.ExpertRows))
        self._open.call(lib.experts_received, number, ctypes.byref(raw))
        received = self._current[number] = Received(self, number, tokens, raw)
        return received

    def _without(self, number: int) -> List[int]:
        ranks, count = (ctypes.c_int32 * 4096)(), ctypes.c_size_t()
        self._open.call(lib.experts_missing, number, ranks, len(ranks), ctypes.byref(count))
        return list(ranks[:count.value])

    def _view(self, address: Optional[int], size: int) -> memoryview:
        if not size:
            return memoryview(b"")
        memory = (ctypes.c_char * size).from_address(address or 0)
        self._views += 1
        weakref.finalize(memory, self._view_gone)  # which keeps the Experts
        return memoryview(memory).cast("B")

    def _view_gone(self) -> None:
        self._views -= 1

    def _array(self, thing: Any, what: str, dtype: str, count: Optional[int], writes: bool) -> Elements:
        one = elements_of(thing, what, writes)
        if one.dtype != dtype and not (one.dtype == "uint16" and dtype in ("bfloat16", "float16")):
            raise InvalidParamError(f"{what} is of {one.dtype}: pass {dtype}")
        if count is not None and one.count != count:
            raise InvalidParamError(f"{what} has {one.count} elements: it needs {count}")
        return one
