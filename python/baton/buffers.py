"""Addresses of objects in host or CUDA memory: numpy arrays, torch tensors, objects with DLPack, CUDA's array
interface or the buffer protocol; and lists of descriptors and of indices as plain arrays of numbers. numpy and torch
are used where they are, and never imported."""
from __future__ import annotations

import array
import ctypes
import itertools
import operator
import sys
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple

from .errors import InvalidParamError

DRAM, VRAM, BLOCK, OBJECT, FILE = range(5)  # kinds of memory
_NAMES = ("DRAM", "VRAM", "BLOCK", "OBJECT", "FILE")


class Memory(NamedTuple):
    """A range of memory. `keep` is what it belongs to, and must live as long as it is used. `device`: of VRAM the
    number that CUDA has for it in this process."""

    address: int
    bytes: int
    device: int
    keep: Any
    kind: int = DRAM


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
                ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_DLPACK_CODES = ("int", "uint", "float", None, "bfloat", None, "bool", None, None, None, "float8_e4m3fn", None,
                 "float8_e5m2")  # by DLDataType.code; bits follow, but for the last
_HOST, _CUDA = (1, 3), 2  # DLPack's kDLCPU and kDLCUDAHost, and kDLCUDA
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype = ctypes.c_void_p
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def memory_of(thing: Any) -> Memory:
    """The memory of a buffer, which must be contiguous."""
    if isinstance(thing, Memory):
        return thing
    if hasattr(thing, "__array_interface__"):  # numpy
        face = thing.__array_interface__
        if not thing.flags["C_CONTIGUOUS"] and not thing.flags["F_CONTIGUOUS"]:
            raise ValueError("the array is not contiguous: register the array that it is a view of")
        return Memory(face["data"][0], thing.nbytes, 0, thing)
    if hasattr(thing, "data_ptr") and hasattr(thing, "element_size"):  # torch
        kinds = {"cpu": DRAM, "cuda": VRAM}
        if thing.device.type not in kinds:
            raise NotImplementedError(f"a tensor on {thing.device}: Baton moves memory of the host and of CUDA devices; "
                                      "copy it there first")
        if not thing.is_contiguous():
            raise ValueError("the tensor is not contiguous: register the tensor that it is a view of")
        kind = kinds[thing.device.type]
        return Memory(thing.data_ptr(), thing.numel() * thing.element_size(), thing.get_device() if kind else 0, thing,
                      kind)
    if hasattr(thing, "__dlpack__"):
        return _dlpack(thing)
    if hasattr(thing, "__cuda_array_interface__"):
        return _cuda_array(thing)
    view = memoryview(thing)
    if not view.c_contiguous:
        raise ValueError("the buffer is not contiguous")
    if view.readonly:
        raise ValueError("the buffer is read-only: pass a bytearray, or a Memory(address, bytes, 0, keep)")
    start = ctypes.c_char.from_buffer(view) if view.nbytes else ctypes.c_char()
    return Memory(ctypes.addressof(start), view.nbytes, 0, (thing, start))


class Elements(NamedTuple):
    """A contiguous array, in C order: `count` elements of `itemsize` bytes. `dtype` is numpy's name of their type."""

    address: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    dtype: str
    itemsize: int
    keep: Any


def elements_of(thing: Any, what: str, writes: bool) -> Elements:
    """The buffer that a call reads, or with `writes` also writes. `what` is its name in messages."""
    if hasattr(thing, "data_ptr") and hasattr(thing, "element_size"):  # torch
        if thing.device.type not in ("cpu", "cuda"):
            raise NotImplementedError(f"{what} is a tensor on {thing.device}: Baton moves memory of the host and of CUDA "
                                      "devices; copy it there first")
        if not thing.is_contiguous():
            raise InvalidParamError(f"{what} is not contiguous: pass {what}.contiguous()")
        return Elements(thing.data_ptr(), thing.numel(), _name_of(thing.dtype), thing.element_size(), thing)
    if hasattr(thing, "__array_interface__"):  # numpy
        if not thing.flags.c_contiguous:
            raise InvalidParamError(f"{what} is not contiguous: pass numpy.ascontiguousarray({what})")
        if writes and not thing.flags.writeable:
            raise InvalidParamError(f"{what} is read-only: pass a copy")
        if thing.dtype.hasobject:
            raise InvalidParamError(f"{what} holds Python objects, which mean nothing elsewhere: pickle them")
        return Elements(thing.__array_interface__["data"][0], thing.size, _name_of(thing.dtype), thing.itemsize, thing)
    if hasattr(thing, "__dlpack__"):
        try:
            memory, code, bits, lanes = _dlpack_of(thing)
        except ValueError:
            raise InvalidParamError(f"{what} is not contiguous: pass a contiguous copy") from None
        name = _DLPACK_CODES[code] if code < len(_DLPACK_CODES) else None
        size = max(bits * lanes // 8, 1)
        dtype = name if name is None or name.startswith("float8") or name == "bool" else f"{name}{bits}"
        return Elements(memory.address, memory.bytes // size, dtype if dtype and lanes == 1 else f"type {code}", size,
                        memory.keep)
    try:
        view = memoryview(thing)
    except TypeError:
        raise TypeError(f"{what} is of type {type(thing).__name__}: pass a numpy array, a torch tensor, or anything that has "
                        "DLPack or the buffer protocol") from None
    if not view.c_contiguous:
        raise InvalidParamError(f"{what} is not contiguous: pass bytes({what})")
    if writes and view.readonly:
        raise InvalidParamError(f"{what} is read-only: pass a bytearray")
    keep: Any
    if view.readonly:
        copy = bytes(thing)  # itself, if it is bytes
        address, keep = ctypes.cast(ctypes.c_char_p(copy), ctypes.c_void_p).value or 0, copy
    else:
        start = ctypes.c_char.from_buffer(view) if view.nbytes else ctypes.c_char()
        address, keep = ctypes.addressof(start), (thing, start)
    letter = view.format.lstrip("@=<")
    dtype = "bool" if letter == "?" else f"{_LETTERS[letter]}{8 * view.itemsize}" if letter in _LETTERS else view.format
    return Elements(address, view.nbytes // view.itemsize, dtype, view.itemsize, keep)


_names: Dict[Any, str] = {}  # to find one takes numpy some microseconds


def _name_of(dtype: Any) -> str:
    """Numpy's name of a type of numpy's or of torch's; of one of another byte order, its letters."""
    name = _names.get(dtype)
    if name is None:
        native = getattr(dtype, "isnative", True)
        name = str(getattr(dtype, "name" if native else "str", None) or str(dtype)[len("torch."):])
        _names[dtype] = name
    return name


# The letters of Python's struct module; the size says the rest.
_LETTERS = {**dict.fromkeys("bhilqn", "int"), **dict.fromkeys("BHILQNc", "uint"), **dict.fromkeys("efd", "float")}


class View(NamedTuple):
    """An array with any strides, in bytes. `memory`: from its first element to its last."""

    memory: Memory
    shape: Tuple[int, ...]
    strides: Tuple[int, ...]
    dtype: str
    itemsize: int


def view_of(thing: Any) -> View:
    """An array of numpy's or a tensor of torch's, as it lies in memory: it need not be in one piece. A View is itself."""
    if isinstance(thing, View):
        return thing
    if hasattr(thing, "__array_interface__"):
        shape, strides, itemsize = tuple(thing.shape), tuple(thing.strides), thing.dtype.itemsize
        start, device, kind, dtype = thing.__array_interface__["data"][0], 0, DRAM, str(thing.dtype)
    elif hasattr(thing, "data_ptr") and hasattr(thing, "stride"):
        itemsize = thing.element_size()
        shape, strides = tuple(thing.shape), tuple(step * itemsize for step in thing.stride())
        kind = VRAM if thing.device.type == "cuda" else DRAM
        start, device, dtype = thing.data_ptr(), thing.get_device() if kind else 0, str(thing.dtype)
    else:
        raise TypeError(f"{type(thing).__name__} is neither a numpy array nor a torch tensor")
    size = itemsize + sum((length - 1) * step for length, step in zip(shape, strides)) if 0 not in shape else 0
    return View(Memory(start, size, device, thing, kind), shape, strides, dtype, itemsize)


def _dlpack(thing: Any) -> Memory:
    return _dlpack_of(thing)[0]


def _dlpack_of(thing: Any) -> Tuple[Memory, int, int, int]:
    """Its memory, and the code, bits and lanes of its type."""
    place, device = thing.__dlpack_device__()
    if place not in (*_HOST, _CUDA):
        raise NotImplementedError(f"a tensor on device {place}:{device}: Baton moves memory of the host and of CUDA "
                                  "devices; copy it there first")
    # On no stream: where it lies is all that is asked.
    capsule = thing.__dlpack__(stream=-1) if place == _CUDA else thing.__dlpack__()
    tensor = _DLTensor.from_address(_capsule_pointer(capsule, b"dltensor"))
    shape = [tensor.shape[i] for i in range(tensor.ndim)]
    strides = [tensor.strides[i] for i in range(tensor.ndim)] if tensor.strides else None
    size = _elements(shape, strides) * tensor.bits * tensor.lanes // 8
    address = (tensor.data or 0) + tensor.byte_offset
    memory = Memory(address, size, device, (thing, capsule), VRAM) if place == _CUDA else Memory(
        address, size, 0, (thing, capsule))
    return memory, tensor.code, tensor.bits, tensor.lanes


def _cuda_array(thing: Any) -> Memory:
    """It does not say which device: what the thing itself calls it, or the first."""
    face = thing.__cuda_array_interface__
    item = int(face["typestr"][2:])
    strides = face.get("strides")
    if strides and any(stride % item for stride in strides):
        raise ValueError("the array is not contiguous: register the array that it is a view of")
    size = item * _elements(face["shape"], strides and [stride // item for stride in strides])
    device = getattr(thing, "device", 0)
    return Memory(face["data"][0], size, int(getattr(device, "id", device)), thing, VRAM)


def _elements(shape: Iterable[int], strides: Optional[Iterable[int]]) -> int:
    """The memory of a contiguous array."""
    lengths: List[int] = list(shape)
    steps = list(strides) if strides else None
    expected = 1
    for i in reversed(range(len(lengths))):
        if steps and lengths[i] > 1 and steps[i] != expected:
            raise ValueError("the tensor is not contiguous: register the tensor that it is a view of")
        expected *= lengths[i]
    return expected


def host_memory_of(thing: Any) -> Memory:
    """The same for memory that the CPU reads and writes."""
    memory = memory_of(thing)
    if memory.kind != DRAM:
        raise NotImplementedError(f"memory of CUDA device {memory.device}: the processor cannot touch it; copy it to "
                                  "the host first")
    return memory


def kind_of(buffers: Iterable[Memory], kind: Optional[int]) -> int:
    """The kind of memory that all buffers are of, which is `kind` unless that is None; of none, `kind` or DRAM."""
    for one in buffers:
        if kind is None:
            kind = one.kind
        if one.kind != kind:
            name = _NAMES[kind] if kind in range(len(_NAMES)) else f"memory {kind!r}"
            raise ValueError(f"{one.bytes} bytes at {one.address:#x} are {_NAMES[one.kind]}, "
                             f"not {name}: one list must be of one kind")
    return DRAM if kind is None else known_kind(kind)


def known_kind(kind: Any) -> int:
    """A kind of memory by the library's number."""
    number = kind.__index__() if hasattr(kind, "__index__") else -1
    if not 0 <= number < len(_NAMES):
        raise InvalidParamError(f"memory is {kind!r}: it is one of {', '.join(f'baton.{name}' for name in _NAMES)}")
    return number


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "__array_interface__")


class Rows(NamedTuple):
    """Descriptors as 64-bit numbers, `columns` each, from `address` on, as long as `keep` lives."""

    address: int
    count: int  # type: ignore[assignment]  # a tuple has a method of that name
    columns: int
    keep: Any
    kind: int  # of memory


def rows_of(descriptors: Any, kind: Optional[int] = None) -> Rows:
    """Of an N x 3 or N x 5 array of them, of buffers, or of tuples (address, bytes, device) or (address, bytes,
    device, stride, count). `kind`: of memory, where buffers do not say it; DRAM by default."""
    if _is_array(descriptors):
        if descriptors.ndim != 2 or descriptors.shape[1] not in (3, 5):
            raise ValueError(f"descriptors are rows of 3 or of 5 numbers; this array is {descriptors.shape}")
        if descriptors.dtype.str[1:] not in ("u8", "i8") or not descriptors.flags["C_CONTIGUOUS"]:
            raise ValueError("descriptors are 64-bit integers in C order: use numpy.ascontiguousarray(d, numpy.uint64)")
        return Rows(descriptors.__array_interface__["data"][0], int(descriptors.shape[0]), int(descriptors.shape[1]),
                    descriptors, kind_of((), kind))
    things = [row if isinstance(row, (tuple, list)) else memory_of(row) for row in descriptors]
    buffers = [row for row in things if isinstance(row, Memory)]
    kind = kind_of(buffers, kind)
    listed = [row[:3] if isinstance(row, Memory) else row for row in things] if buffers else things
    columns = len(listed[0]) if listed else 3
    if columns not in (3, 5) or any(len(row) != columns for row in listed):
        raise ValueError("descriptors are tuples of (address, bytes, device), or of these and (stride, count)")
    flat = array.array("Q", itertools.chain.from_iterable(listed))
    return Rows(flat.buffer_info()[0], len(listed), columns, (flat, things), kind)


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
    """Raises TypeError for anything but whole numbers, such as text or 0.5."""
    listed = numbers if isinstance(numbers, (list, tuple, range)) else list(numbers)
    if len(listed) and isinstance(listed[0], bool):
        raise TypeError("indices are whole numbers, not truth values: of a mask, those of the places that are set")
    return listed if listed is numbers else [operator.index(number) for number in listed]
