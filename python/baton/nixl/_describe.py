"""Descriptors out of what NIXL's callers pass: lists of tuples, arrays, tensors, or lists of descriptors."""
from __future__ import annotations

import logging
from typing import Any, Dict, Optional, Tuple, TypeVar

from baton.buffers import memory_of

from . import _bindings as nixlBind

_log = logging.getLogger("nixl")

T = TypeVar("T")


class Words(Dict[str, T]):
    """A dictionary whose KeyError says which words there are."""

    def __init__(self, what: str, words: Dict[str, T]) -> None:
        super().__init__(words)
        self.what = what

    def __missing__(self, key: Any) -> T:
        raise KeyError(f"{self.what} {key!r} is unknown: use one of {', '.join(self)}")


MEMORY = Words("mem_type", {"DRAM": nixlBind.nixl_mem_t.DRAM_SEG, "VRAM": nixlBind.nixl_mem_t.VRAM_SEG,
          "FILE": nixlBind.nixl_mem_t.FILE_SEG, "BLOCK": nixlBind.nixl_mem_t.BLK_SEG,
          "OBJ": nixlBind.nixl_mem_t.OBJ_SEG, "cpu": nixlBind.nixl_mem_t.DRAM_SEG,
          "cuda": nixlBind.nixl_mem_t.VRAM_SEG})


_FACES = ("__dlpack__", "__cuda_array_interface__")  # of buffers, on the host or on a device


def is_array(thing: Any) -> bool:
    return hasattr(thing, "__array_interface__")


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "data_ptr") and hasattr(thing, "element_size")


def _tensors(tensors: Any, kind: type, extra: Tuple[Any, ...]) -> Any:
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1:
        raise _no_list(f"the tensors are on different kinds of devices: {', '.join(sorted(devices))}")
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise _no_list("a tensor is not contiguous")
    rows_of_tensors = [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0), *extra)
                       for tensor in tensors]
    return kind(MEMORY[devices.pop()], rows_of_tensors)


def _no_list(why: str) -> nixlBind.nixlNoDescriptorsError:
    return nixlBind.nixlNoDescriptorsError(why)


def described(descs: Any, mem_type: Optional[str], kind: Any) -> Any:
    """The same; None, and a line in the log, for what cannot be a list."""
    try:
        return describe(descs, mem_type, kind)
    except nixlBind.nixlNoDescriptorsError as why:
        _log.error("%s", why)
        return None


def describe(descs: Any, mem_type: Optional[str], kind: Any) -> Any:
    """A list of `kind`."""
    extra = (b"",) * kind.extra
    if isinstance(descs, kind):
        return descs
    if _is_tensor(descs):
        return _tensors([descs], kind, extra)
    if isinstance(descs, list) and _is_tensor(descs[0]):
        return _tensors(descs, kind, extra)
    if is_array(descs) or isinstance(descs, list):
        if isinstance(descs, list) and (not isinstance(descs[0], tuple) or len(descs[0]) != 3 + kind.extra):
            raise _no_list(f"a list for this has tuples of {3 + kind.extra}, and this one has {descs[0]!r}")
        if mem_type is None:
            raise _no_list("mem_type is needed with a list of tuples and with an array")
        return kind(MEMORY[mem_type], descs)
    if any(hasattr(descs, face) for face in _FACES) or isinstance(descs, (bytearray, memoryview)):
        memory = memory_of(descs)
        return kind(nixlBind.nixl_mem_t(memory.kind), [(*memory[:3], *extra)])
    raise _no_list(f"no descriptors can be made of {type(descs).__name__}")


def rows(descs: Any) -> Any:
    """What baton.buffers.rows_of() takes."""
    return descs._rows if is_array(descs._rows) else [row[:3] for row in descs._rows]
