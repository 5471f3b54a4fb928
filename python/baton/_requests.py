"""Arguments of collective calls, checked, as the library takes them."""
from __future__ import annotations

import array
import ctypes
import itertools
import sys
from typing import Any, List, Optional, Sequence, Tuple

from . import _library
from .buffers import Elements, elements_of
from .errors import InvalidParamError

KINDS = {name: number for number, name in enumerate((
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "all_to_all", "barrier", "send", "receive",
    "all_to_all_v", "scatter", "gather", "all_gather_v", "reduce_scatter_v"))}
TYPES = {name: number for number, name in enumerate((
    "float32", "float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "uint32",
    "uint64", "bool"))}
OPS = {name: number for number, name in enumerate((
    "sum", "prod", "min", "max", "avg", "premulsum", "and", "or", "xor"))}
_REDUCES = {"all_reduce", "reduce_scatter", "reduce", "reduce_scatter_v"}
_BYTE = TYPES["uint8"]
_ORDERED, _UNORDERED = 1, 2


def nanoseconds(timeout: Optional[float], what: str) -> int:
    """Seconds as the library's nanoseconds: 0 is the default, -1 means no limit."""
    if timeout is None:
        return 0
    if timeout == float("inf"):
        return -1
    if not 0 < timeout < 9e9:
        raise InvalidParamError(f"{what} is {timeout!r}: it is in seconds, more than 0; float('inf') is for ever")
    return max(int(timeout * 1e9), 1)


def request_of(rank: int, ranks: int, name: str, data: Any, out: Any, in_parts: int = 0, out_parts: int = 0, *, peer: int = 0,
               op: str = "sum", in_list: Any = None, out_list: Any = None, writes: bool = True, ordered: Optional[bool] = None,
               tag: int = 0, factor: Any = None, mine: Any = None) -> Tuple[_library.Call, Any, Any]:
    """A call of rank `rank` as the library takes it; what it points to, until it has begun; and what it uses until it has ended.
    `in_parts`, `out_parts`: 1 where there are as many parts of `count` elements as ranks. `mine`: which of the two has one part,
    where the other's are listed."""
    in_place = out is data
    source = None if data is None else elements_of(data, "data", writes and in_place)
    target = source if in_place else None if out is None else elements_of(out, "out", True)
    one = source or target
    if one is None and name != "barrier":
        raise InvalidParamError(f"{name}: pass an array, not None")
    count, kind, scale = 0, _BYTE, 1
    if one is not None:
        if source is not None and target is not None and source.dtype != target.dtype:
            raise InvalidParamError(f"{name}: data is {source.dtype} and out is {target.dtype}: they must be of one type")
        kind, scale = _type_of(name, one)
        if in_list is None and out_list is None:
            count = _count(ranks, name, source, target, in_parts, out_parts) * scale
        elif mine is not None:
            part, listed = (source if mine is data else target), (in_list or out_list)[0][rank]
            if part is not None and part.count != listed:
                raise InvalidParamError(f"{name}: {'data' if mine is data else 'out'} has {part.count} elements; counts "
                                        f"says {listed} for rank {rank}")
    if op not in OPS:
        raise InvalidParamError(f"{name}: op is {op!r}: it is one of {', '.join(OPS)}")
    if not (-2 ** 31 <= peer < 2 ** 31 and -2 ** 31 <= tag < 2 ** 31):
        raise InvalidParamError(f"{name}: {peer} is no rank, or {tag} is no tag: they have 32 bits")
    request = _library.Call(
        ctypes.sizeof(_library.Call), KINDS[name], kind, OPS[op], peer, source.address if source else None,
        target.address if target else None, count)
    kept: List[Any] = []  # what the request points to
    for which, listed in (("in", in_list), ("out", out_list)) if in_list or out_list else ():
        for field, numbers in zip((f"{which}_counts", f"{which}_offsets"), listed or ()):
            kept.append((ctypes.c_size_t * ranks)(*[number * scale for number in numbers]))
            setattr(request, field, ctypes.addressof(kept[-1]))
    request.tag = tag
    if op == "premulsum":
        if factor is None:
            raise InvalidParamError(f"{name}: premulsum needs factor=, a number")
        kept.append(elements_of(_one_like(data, factor), "factor", False))
        request.factor = kept[-1].address
    if ordered is not None:
        request.flags = _ORDERED if ordered else _UNORDERED
    return request, kept, (source, target)


def _type_of(name: str, one: Elements) -> Tuple[int, int]:
    """The library's number of a type, and how many of those an element is."""
    kind = TYPES.get(one.dtype)
    if kind is not None:
        return kind, 1
    if name in _REDUCES:
        raise InvalidParamError(f"{name}: data is {one.dtype}: it must be one of {', '.join(TYPES)}")
    return _BYTE, one.itemsize


def _count(ranks: int, name: str, source: Optional[Elements], target: Optional[Elements], in_parts: int, out_parts: int) -> int:
    """Elements of a part: what both say."""
    counts = []
    for which, one, parts in (("data", source, in_parts), ("out", target, out_parts)):
        if one is None:
            continue
        count, rest = divmod(one.count, ranks if parts else 1)
        if rest:
            raise InvalidParamError(f"{name}: {which} has {one.count} elements, which are not {ranks} equal parts")
        counts.append(count)
    if len(counts) == 2 and counts[0] != counts[1]:
        raise InvalidParamError(f"{name}: data has {source.count if source else 0} elements, and out has "
                                f"{target.count if target else 0}: with {ranks} ranks out must have "
                                f"{counts[0] * (ranks if out_parts else 1)}")
    return counts[0] if counts else 0


def places(ranks: int, thing: Any, counts: Sequence[int], offsets: Optional[Sequence[int]], what: str) -> Any:
    """Counts and offsets, all of them inside the array."""
    counts = [int(count) for count in counts]
    offsets = [0, *itertools.accumulate(counts)][:-1] if offsets is None else [int(offset) for offset in offsets]
    if len(counts) != ranks or len(offsets) != ranks:
        raise InvalidParamError(f"{what}_counts and {what}_offsets have {len(counts)} and {len(offsets)} numbers: they "
                                f"have one for each of {ranks} ranks")
    size = elements_of(thing, "the array", False).count
    for rank, (count, offset) in enumerate(zip(counts, offsets)):
        if count < 0 or offset < 0 or offset + count > size:
            raise InvalidParamError(f"{what}: {count} elements from {offset} on for rank {rank} are not inside an array of "
                                    f"{size}")
    return counts, offsets


def all_of(ranks: int, data: Any) -> Any:
    """A new array for one like `data` of each rank."""
    return like(data, (ranks, *data.shape) if hasattr(data, "shape") else None)


def part_of(ranks: int, data: Any) -> Any:
    """A new array for a rank's part of `data`."""
    shape = getattr(data, "shape", None)
    if shape is None:
        return like(data, None)
    if not shape or shape[0] % ranks:
        raise InvalidParamError(f"reduce_scatter: data has the shape {tuple(shape)}: the first dimension must be a multiple "
                                f"of {ranks} ranks, or pass `out`")
    return like(data, (shape[0] // ranks, *shape[1:]))


def like(data: Any, shape: Optional[Tuple[int, ...]]) -> Any:
    """A new array of that shape, of the type of `data`."""
    if shape is not None and hasattr(data, "new_empty"):  # torch
        return data.new_empty(shape)
    if shape is not None and hasattr(data, "__array_interface__"):
        return sys.modules["numpy"].empty(shape, data.dtype)
    raise InvalidParamError(f"pass `out`: there is no new {type(data).__name__} to be made like `data`")


def _one_like(data: Any, number: Any) -> Any:
    """An array of one number, of the type of `data`, on the host."""
    if hasattr(data, "new_full"):  # torch
        return data.new_full((1,), number, device="cpu")
    if hasattr(data, "__array_interface__"):
        one = like(data, (1,))
        one[0] = number
        return one
    return array.array(memoryview(data).format, [number])
