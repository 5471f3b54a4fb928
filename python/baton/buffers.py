"""Where things lie in memory: numpy arrays, torch tensors, whatever speaks DLPack or the buffer protocol; and
lists of descriptors and of indices as plain arrays of numbers. numpy and torch are used where they are, and
never imported."""
from __future__ import annotations

import array
import ctypes
import itertools
import operator
import sys
from typing import Any, Iterable, NamedTuple, Tuple


class Memory(NamedTuple):
    """A range of memory. `keep` is what it belongs to, and must live as long as it is used."""

    address: int
    bytes: int
    device: int
    keep: Any


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_HOST = (1, 3)  # DLPack's kDLCPU and kDLCUDAHost
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def memory_of(thing: Any) -> Memory:
    """The memory of a buffer. It has to be in one piece, and on the host."""
    if isinstance(thing, Memory):
        return thing
    if hasattr(thing, "__array_interface__"):  # numpy
        face = thing.__array_interface__
        if not thing.flags["C_CONTIGUOUS"] and not thing.flags["F_CONTIGUOUS"]:
            raise ValueError("the array is not in one piece: register the one that it is a view of")
        return Memory(face["data"][0], thing.nbytes, 0, thing)
    if hasattr(thing, "data_ptr") and hasattr(thing, "element_size"):  # torch
        if thing.device.type != "cpu":
            raise NotImplementedError(f"a tensor on {thing.device}: Baton moves host memory; copy it there first")
        if not thing.is_contiguous():
            raise ValueError("the tensor is not in one piece: register the one that it is a view of")
        return Memory(thing.data_ptr(), thing.numel() * thing.element_size(), 0, thing)
    if hasattr(thing, "__dlpack__"):
        return _dlpack(thing)
    view = memoryview(thing)
    if not view.c_contiguous:
        raise ValueError("the buffer is not in one piece")
    if view.readonly:
        raise ValueError("the buffer is read-only: pass a bytearray, or a Memory(address, bytes, 0, keep)")
    start = ctypes.c_char.from_buffer(view) if view.nbytes else ctypes.c_char()
    return Memory(ctypes.addressof(start), view.nbytes, 0, (thing, start))


def _dlpack(thing: Any) -> Memory:
    kind, device = thing.__dlpack_device__()
    if kind not in _HOST:
        raise NotImplementedError(f"a tensor on device {kind}:{device}: Baton moves host memory; copy it there first")
    capsule = thing.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    expected = 1
    for i in reversed(range(tensor.ndim)):
        if tensor.strides and shape[i] > 1 and tensor.strides[i] != expected:
            raise ValueError("the tensor is not in one piece: register the one that it is a view of")
        expected *= shape[i]
    size = expected * tensor.bits * tensor.lanes // 8
    return Memory(tensor.data + tensor.byte_offset, size, 0, (thing, capsule))


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "__array_interface__")


def rows_of(descriptors: Any) -> Tuple[int, int, int, Any]:
    """(address, rows, columns, keep) of descriptors as 64-bit numbers: an N x 3 or N x 5 array of them, buffers,
    or tuples (address, bytes, device) or (address, bytes, device, stride, count)."""
    if _is_array(descriptors):
        if descriptors.ndim != 2 or descriptors.shape[1] not in (3, 5):
            raise ValueError(f"descriptors are rows of 3 or of 5 numbers; this array is {descriptors.shape}")
        if descriptors.dtype.str[1:] not in ("u8", "i8") or not descriptors.flags["C_CONTIGUOUS"]:
            raise ValueError("descriptors are 64-bit integers in C order: use numpy.ascontiguousarray(d, numpy.uint64)")
        return descriptors.__array_interface__["data"][0], *descriptors.shape, descriptors
    listed = [row if isinstance(row, (tuple, list)) and not isinstance(row, Memory) else memory_of(row)[:3]
              for row in descriptors]
    columns = len(listed[0]) if listed else 3
    if columns not in (3, 5) or any(len(row) != columns for row in listed):
        raise ValueError("descriptors are tuples of (address, bytes, device), or of these and (stride, count)")
    flat = array.array("Q", itertools.chain.from_iterable(listed))
    return flat.buffer_info()[0], len(listed), columns, flat


def indices_of(indices: Any) -> Tuple[int, int, Any]:
    """(address, count, keep) of indices as 64-bit numbers."""
    if _is_array(indices):
        if indices.ndim != 1:
            raise ValueError(f"indices are a flat array; this one is {indices.shape}")
        kind, numpy = indices.dtype.kind, sys.modules["numpy"]
        if kind not in "iu" and not (kind == "f" and (indices == numpy.trunc(indices)).all()):
            raise TypeError(f"indices are whole numbers, not {indices.dtype}: of a mask, numpy.flatnonzero(mask)")
        if indices.dtype.str[1:] != "i8" or not indices.flags["C_CONTIGUOUS"]:
            indices = numpy.ascontiguousarray(indices, dtype="int64")
        return indices.__array_interface__["data"][0], len(indices), indices
    flat = array.array("q", _whole(indices))
    return flat.buffer_info()[0], len(flat), flat


def _whole(numbers: Iterable[Any]) -> Iterable[int]:
    """What is no whole number, as text and 0.5, is a TypeError."""
    listed = numbers if isinstance(numbers, (list, tuple, range)) else list(numbers)
    if len(listed) and isinstance(listed[0], bool):
        raise TypeError("indices are whole numbers, not truth values: of a mask, those of the places that are set")
    return listed if listed is numbers else [operator.index(number) for number in listed]
