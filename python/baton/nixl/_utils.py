"""Memory for NIXL's own tests and examples."""
from __future__ import annotations

import ctypes

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
_libc.free.restype, _libc.free.argtypes = None, [ctypes.c_void_p]


def malloc_passthru(size: int) -> int:
    return _libc.malloc(size)


def free_passthru(address: int) -> None:
    _libc.free(address)


def ba_buf(address: int, size: int) -> None:
    """Fills it with 0xba."""
    ctypes.memset(address, 0xBA, size)


def verify_transfer(address1: int, address2: int, size: int) -> None:
    """Fails unless both hold the same."""
    if ctypes.string_at(address1, size) != ctypes.string_at(address2, size):
        raise AssertionError(f"{size} bytes at {address1:#x} and at {address2:#x} differ")
