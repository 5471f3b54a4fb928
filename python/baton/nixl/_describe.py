"""Descriptors out of what NIXL's callers pass: lists of tuples, arrays, tensors, or lists of descriptors."""
from __future__ import annotations

import logging
from typing import Any, Optional, Tuple

from baton.buffers import memory_of

from . import _bindings as nixlBind

_log = logging.getLogger("nixl")

MEMORY = {"DRAM": nixlBind.nixl_mem_t.DRAM_SEG, "VRAM": nixlBind.nixl_mem_t.VRAM_SEG,
          "FILE": nixlBind.nixl_mem_t.FILE_SEG, "BLOCK": nixlBind.nixl_mem_t.BLK_SEG,
          "OBJ": nixlBind.nixl_mem_t.OBJ_SEG, "cpu": nixlBind.nixl_mem_t.DRAM_SEG,
          "cuda": nixlBind.nixl_mem_t.VRAM_SEG}


_FACES = ("__dlpack__", "__cuda_array_interface__")  # of buffers, on the host or on a device


def is_array(thing: Any) -> bool:
    return hasattr(thing, "__array_interface__")


def _is_tensor(thing: Any) -> bool:
    return hasattr(thing, "data_ptr") and hasattr(thing, "element_size")


def _tensors(tensors: Any, kind: type, extra: Tuple[Any, ...]) -> Any:
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1:
        _log.error("the tensors are on different kinds of devices: %s", ", ".join(sorted(devices)))
        return None
    if not all(tensor.is_contiguous() for tensor in tensors):
        _log.error("a tensor is not contiguous")
        return None
    rows_of_tensors = [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), max(tensor.get_device(), 0), *extra)
                       for tensor in tensors]
    return kind(MEMORY[devices.pop()], rows_of_tensors)


def describe(descs: Any, mem_type: Optional[str], kind: Any) -> Any:
    """A list of `kind`; None, and a line in the log, for what cannot be one."""
    extra = (b"",) * kind.extra
    if isinstance(descs, kind):
        return descs
    if _is_tensor(descs):
        return _tensors([descs], kind, extra)
    if isinstance(descs, list) and _is_tensor(descs[0]):
        return _tensors(descs, kind, extra)
    if is_array(descs) or isinstance(descs, list):
        if isinstance(descs, list) and (not isinstance(descs[0], tuple) or len(descs[0]) != 3 + kind.extra):
            _log.error("expected tuples of %d, got %r", 3 + kind.extra, descs[0])
        elif mem_type is None:
            _log.error("mem_type is needed with a list of tuples and with an array")
        else:
            return kind(MEMORY[mem_type], descs)
        return None
    if any(hasattr(descs, face) for face in _FACES) or isinstance(descs, (bytearray, memoryview)):
        memory = memory_of(descs)
        return kind(nixlBind.nixl_mem_t(memory.kind), [(*memory[:3], *extra)])
    _log.error("cannot make descriptors of %s", type(descs).__name__)
    return None


def rows(descs: Any) -> Any:
    """What baton.buffers.rows_of() takes."""
    return descs._rows if is_array(descs._rows) else [row[:3] for row in descs._rows]
