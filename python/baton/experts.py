"""Experts: rows of tokens go to the ranks that have their experts, and what those say comes back, weighted and summed.

    experts = baton.Experts(comm, experts=64, top_k=8, hidden=4096, max_tokens=512)   # every rank makes it
    received = experts.dispatch(rows, chosen)            # rows [tokens][hidden], chosen int32 [tokens][top_k], -1 for none
    for group in received.groups:                        # the experts of this rank
        for slot in range(group.first, group.first + group.count):
            numpy.frombuffer(received.output(slot), ...)[:] = ask(group.expert, numpy.frombuffer(received.row(slot), ...))
    experts.combine(received, weights, out)              # weights float32 [tokens][top_k], out [tokens][hidden]

A token's sum is made in ascending number of the expert, in float32, and rounded once: the bits that one rank gives which has all
experts. A rank that dies is masked: the call goes on without it, and missing() tells. One thread at a time.
"""
from __future__ import annotations

import array
import ctypes
import weakref
from typing import Any, List, NamedTuple, Optional

from . import _library
from ._handle import Handle
from ._library import lib
from .agent import _within
from .buffers import Elements, elements_of
from ._requests import TYPES, nanoseconds
from .communicator import Communicator
from .errors import InvalidParamError

_MODES = {"auto": 0, "low_latency": 1, "throughput": 2}
_INT = 2 ** 31 - 1


class ExpertGroup(NamedTuple):
    """The slots [first, first + count) of one expert; a slot is a token at an expert."""

    expert: int
    first: int
    count: int  # type: ignore[assignment]


class Received:
    """What a dispatch has brought. `groups`: an ExpertGroup for each expert of this rank, ascending. `row_of[slot]`: the number
    of its row, in bytes `row_stride` apart in `rows`; `outputs`: [slots], `output_stride` apart, to be written. Memory of the
    Experts: of use until the round is combined."""

    def __init__(self, owner: "Experts", work: int, raw: Any) -> None:
        self._owner, self._work, self._raw = owner, work, raw
        self.groups = [ExpertGroup(g.expert, g.first, g.count) for g in raw.groups[:raw.group_count]]
        self.row_of = array.array("I", ctypes.string_at(raw.row_of, 4 * raw.slots) if raw.slots else b"")
        self.row_stride, self.output_stride = raw.row_stride, raw.output_stride

    def row(self, slot: int) -> memoryview:
        """The row of that slot as it came: bytes of `dtype`, or with fp8 of e4m3 (then see dequantised())."""
        return self._bytes(self._raw.rows + self._number(slot) * self.row_stride, self._owner.row_bytes).toreadonly()

    def dequantised(self, slot: int, out: Any) -> Any:
        """With fp8: the row as float32, into an array of `hidden` elements."""
        into = self._owner._array(out, "out", "float32", self._owner.hidden, True)
        if not self._raw.scales_offset:
            raise InvalidParamError("dequantised() is for Experts that were made with fp8=True")
        row = self._raw.rows + self._number(slot) * self.row_stride
        lib.experts_dequantise(row, row + self._raw.scales_offset, self._owner.hidden, into.address)
        return out

    def output(self, slot: int) -> memoryview:
        """Where what the expert says of that slot goes: bytes of `dtype`."""
        self._number(slot)
        return self._bytes(self._raw.outputs + slot * self.output_stride, self.output_stride)

    def _number(self, slot: int) -> int:
        if not 0 <= slot < len(self.row_of):
            raise InvalidParamError(f"slot {slot}: there are {len(self.row_of)}")
        if self._owner._current.get(self._work) is not self:
            raise InvalidParamError("this dispatch is combined: what it brought is gone")
        return self.row_of[slot]

    @staticmethod
    def _bytes(address: int, size: int) -> memoryview:
        return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


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
        self._current: dict[int, Received] = {}
        self._tokens: dict[int, int] = {}
        self._open = Handle(None, "experts")
        handle = ctypes.c_void_p()
        comm._open.call(lib.experts_create, ctypes.byref(options), ctypes.byref(handle))
        self._open.value = handle.value
        weakref.finalize(self, Handle.destroy, self._open)

    def dispatch(self, rows: Any, chosen: Any, timeout: Optional[float] = None) -> Received:
        """Sends each row to the ranks of its experts, and waits for the others'. BatonTimeoutError: not within `timeout`; the
        object is then of no use."""
        sent = self._array(rows, "rows", self.dtype, None, False)
        if sent.count % self.hidden:
            raise InvalidParamError(f"rows have {sent.count} elements: that is no multiple of hidden, {self.hidden}")
        tokens = sent.count // self.hidden
        choices = self._array(chosen, "chosen", "int32", tokens * self.top_k, False)
        work = ctypes.c_uint64()
        self._open.call(lib.experts_dispatch, sent.address, tokens, choices.address, choices.count, ctypes.byref(work))
        self._wait(work.value, timeout)
        raw = _library.ExpertRows(ctypes.sizeof(_library.ExpertRows))
        self._open.call(lib.experts_received, work.value, ctypes.byref(raw))
        received = Received(self, work.value, raw)
        self._current[work.value], self._tokens[work.value] = received, tokens
        return received

    def combine(self, received: Received, weights: Any, out: Any, timeout: Optional[float] = None) -> Any:
        """Sums what experts have said of this rank's tokens into `out`, which it returns."""
        tokens = self._tokens.get(received._work)
        if tokens is None or received._owner is not self:
            raise InvalidParamError("received is no dispatch of these experts, or is combined already")
        weigh = self._array(weights, "weights", "float32", tokens * self.top_k, False)
        into = self._array(out, "out", self.dtype, tokens * self.hidden, True)
        work = ctypes.c_uint64()
        self._open.call(lib.experts_combine, received._work, weigh.address, weigh.count, into.address,
                        into.count * into.itemsize, ctypes.byref(work))
        del self._current[received._work], self._tokens[received._work]
        self._wait(work.value, timeout)
        return out

    def missing(self, received: Optional[Received] = None) -> List[int]:
        """The ranks that a dispatch went without; of none: all that are masked."""
        ranks, count = (ctypes.c_int32 * 4096)(), ctypes.c_size_t()
        self._open.call(lib.experts_missing, received._work if received else 0, ranks, len(ranks), ctypes.byref(count))
        return list(ranks[:count.value])

    def close(self) -> None:
        """Waits until no rank reads what this one's experts said; the others go on without it."""
        self._current.clear()
        self._tokens.clear()
        self._open.destroy()

    def __enter__(self) -> "Experts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _wait(self, work: int, timeout: Optional[float]) -> None:
        self._open.call(lib.experts_wait, work, nanoseconds(timeout, "timeout") or -1)

    def _array(self, thing: Any, what: str, dtype: str, count: Optional[int], writes: bool) -> Elements:
        one = elements_of(thing, what, writes)
        if one.dtype != dtype and not (one.dtype == "uint16" and dtype in ("bfloat16", "float16")):
            raise InvalidParamError(f"{what} is of {one.dtype}: pass {dtype}")
        if count is not None and one.count != count:
            raise InvalidParamError(f"{what} has {one.count} elements: it needs {count}")
        return one
