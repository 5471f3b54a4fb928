"""The names of NIXL's compiled module: enumerations, exceptions, lists of descriptors, telemetry."""
from __future__ import annotations

import enum
import operator
from typing import Any, List, Tuple, Type

DEFAULT_COMM_PORT = 8888
NIXL_INIT_AGENT = "NIXL_INIT_AGENT"
HAVE_UCX_GPU_DEVICE_API = False


class nixl_mem_t(enum.IntEnum):
    DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = range(5)


class nixl_xfer_op_t(enum.IntEnum):
    NIXL_READ, NIXL_WRITE = range(2)


class nixl_thread_sync_t(enum.IntEnum):
    NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT, NIXL_THREAD_SYNC_RW = range(3)
    NIXL_THREAD_SYNC_DEFAULT = 0


class nixl_cost_t(enum.IntEnum):
    NIXL_COST_ANALYTICAL_BACKEND = 0


class nixl_status_t(enum.IntEnum):
    NIXL_IN_PROG, NIXL_SUCCESS, NIXL_ERR_NOT_POSTED, NIXL_ERR_INVALID_PARAM, NIXL_ERR_BACKEND = range(1, -4, -1)
    NIXL_ERR_NOT_FOUND, NIXL_ERR_MISMATCH, NIXL_ERR_NOT_ALLOWED, NIXL_ERR_REPOST_ACTIVE = range(-4, -8, -1)
    NIXL_ERR_UNKNOWN, NIXL_ERR_NOT_SUPPORTED, NIXL_ERR_REMOTE_DISCONNECT, NIXL_ERR_CANCELED = range(-8, -12, -1)
    NIXL_ERR_NO_TELEMETRY = -12


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = list(nixl_mem_t)
NIXL_READ, NIXL_WRITE = list(nixl_xfer_op_t)
NIXL_THREAD_SYNC_NONE, NIXL_THREAD_SYNC_STRICT, NIXL_THREAD_SYNC_RW = list(nixl_thread_sync_t)
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
NIXL_COST_ANALYTICAL_BACKEND = nixl_cost_t.NIXL_COST_ANALYTICAL_BACKEND
(NIXL_IN_PROG, NIXL_SUCCESS, NIXL_ERR_NOT_POSTED, NIXL_ERR_INVALID_PARAM, NIXL_ERR_BACKEND, NIXL_ERR_NOT_FOUND, NIXL_ERR_MISMATCH,
 NIXL_ERR_NOT_ALLOWED, NIXL_ERR_REPOST_ACTIVE, NIXL_ERR_UNKNOWN, NIXL_ERR_NOT_SUPPORTED, NIXL_ERR_REMOTE_DISCONNECT,
 NIXL_ERR_CANCELED, NIXL_ERR_NO_TELEMETRY) = list(nixl_status_t)


class _NixlError(Exception):
    """An exception whose text begins with the status's name, as NIXL's is, and goes on with ours."""

    status = nixl_status_t.NIXL_ERR_UNKNOWN

    def __init__(self, why: str = "") -> None:
        super().__init__(f"{self.status.name}: {why}" if why else self.status.name)


def _exception(name: str, status: nixl_status_t) -> "Type[_NixlError]":
    return type(name, (_NixlError,), {"status": status, "__module__": __name__})


nixlNotPostedError: Type[_NixlError] = _exception("nixlNotPostedError", nixl_status_t.NIXL_ERR_NOT_POSTED)
nixlInvalidParamError: Type[_NixlError] = _exception("nixlInvalidParamError", nixl_status_t.NIXL_ERR_INVALID_PARAM)
nixlBackendError: Type[_NixlError] = _exception("nixlBackendError", nixl_status_t.NIXL_ERR_BACKEND)
nixlNotFoundError: Type[_NixlError] = _exception("nixlNotFoundError", nixl_status_t.NIXL_ERR_NOT_FOUND)
nixlMismatchError: Type[_NixlError] = _exception("nixlMismatchError", nixl_status_t.NIXL_ERR_MISMATCH)
nixlNotAllowedError: Type[_NixlError] = _exception("nixlNotAllowedError", nixl_status_t.NIXL_ERR_NOT_ALLOWED)
nixlRepostActiveError: Type[_NixlError] = _exception("nixlRepostActiveError", nixl_status_t.NIXL_ERR_REPOST_ACTIVE)
nixlUnknownError: Type[_NixlError] = _exception("nixlUnknownError", nixl_status_t.NIXL_ERR_UNKNOWN)
nixlNotSupportedError: Type[_NixlError] = _exception("nixlNotSupportedError", nixl_status_t.NIXL_ERR_NOT_SUPPORTED)
nixlRemoteDisconnectError: Type[_NixlError] = _exception("nixlRemoteDisconnectError", nixl_status_t.NIXL_ERR_REMOTE_DISCONNECT)
nixlCancelledError: Type[_NixlError] = _exception("nixlCancelledError", nixl_status_t.NIXL_ERR_CANCELED)
nixlNoTelemetryError: Type[_NixlError] = _exception("nixlNoTelemetryError", nixl_status_t.NIXL_ERR_NO_TELEMETRY)


class nixlNoDescriptorsError(nixlInvalidParamError, TypeError):  # type: ignore[valid-type,misc]
    """What is no list of descriptors. NIXL has a TypeError of its compiled module here."""


class nixlNotMadeError(nixlBackendError, RuntimeError):  # type: ignore[valid-type,misc]
    """An agent that could not be made: its port is in use, say. NIXL has a RuntimeError here."""


class nixlXferTelemetry:
    """Of a transfer's last post; times in microseconds."""

    def __init__(self, start: int = 0, post: int = 0, transfer: int = 0, total: int = 0, count: int = 0) -> None:
        self.startTime, self.postDuration, self.xferDuration = start, post, transfer
        self.totalBytes, self.descCount = total, count


class _DescriptorList:
    """(address, bytes, device) and, in a subclass, one thing more. Kept as a numpy array if made from one."""

    extra = 0

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:  # NIXL calls it `type`
        self._type = nixl_mem_t(type)
        self._rows: Any = []
        if hasattr(descs, "__array_interface__"):
            if descs.ndim != 2 or descs.shape[1] != 3:
                raise ValueError(f"expected an N x 3 array, got {descs.shape}")
            if descs.dtype.str[1:] not in ("u8", "i8") or not descs.flags["C_CONTIGUOUS"]:
                raise ValueError("expected an array of 64-bit integers in C order")
            self._rows = [self._row((*row, b"")) for row in descs.tolist()] if self.extra else descs.copy()
        elif isinstance(descs, (list, tuple)):
            self._rows = [self._row(row) for row in descs]
        elif operator.index(descs) > 0:
            self._rows = [self._row((0, 0, 0, b"")[:3 + self.extra])] * operator.index(descs)

    def _row(self, row: Any) -> Tuple[Any, ...]:
        if len(row) != 3 + self.extra:
            raise TypeError(f"expected a tuple of {3 + self.extra}, got {row!r}")
        return tuple(operator.index(number) for number in row[:3])

    def _list(self) -> List[Tuple[Any, ...]]:
        if not isinstance(self._rows, list):
            self._rows = [tuple(row) for row in self._rows.tolist()]
        return self._rows

    def getType(self) -> nixl_mem_t:
        return self._type

    def descCount(self) -> int:
        return len(self._rows)

    def isEmpty(self) -> bool:
        return len(self._rows) == 0

    def addDesc(self, desc: Tuple[Any, ...]) -> None:
        self._list().append(self._row(desc))

    append = addDesc

    def index(self, desc: Tuple[Any, ...]) -> int:
        try:
            return self._list().index(self._row(desc))
        except ValueError:
            raise nixlNotFoundError(f"no descriptor {desc}") from None

    def remDesc(self, index: int) -> None:
        self._check(index)
        del self._list()[index]

    def clear(self) -> None:
        self._rows = []

    def print(self) -> None:
        print(f"DescList of mem type {int(self._type)}", *self._list(), sep="\n")

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self._rows):
            raise IndexError("Index is out of range")

    def __getitem__(self, index: int) -> Tuple[Any, ...]:
        self._check(index)
        row = self._rows[index]
        return row if isinstance(row, tuple) else tuple(int(number) for number in row)

    def __setitem__(self, index: int, desc: Tuple[Any, ...]) -> None:
        self._check(index)
        self._list()[index] = self._row(desc)

    def __eq__(self, other: Any) -> bool:
        return type(other) is type(self) and other._type == self._type and other._list() == self._list()

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (self._type, self._rows)


class nixlXferDList(_DescriptorList):
    """Descriptors to be moved."""


class nixlRegDList(_DescriptorList):
    """Descriptors to be registered; the fourth is the application's own bytes."""

    extra = 1

    def _row(self, row: Any) -> Tuple[Any, ...]:
        first, meta = super()._row(row), row[3]
        return (*first, meta if isinstance(meta, bytes) else str(meta).encode())

    def trim(self) -> nixlXferDList:
        return nixlXferDList(self._type, [row[:3] for row in self._list()])


class nixlRemoteDList(_DescriptorList):
    """Descriptors with the name of the agent that they belong to."""

    extra = 1

    def _row(self, row: Any) -> Tuple[Any, ...]:
        first, agent = super()._row(row), row[3]
        return (*first, agent.decode() if isinstance(agent, bytes) else str(agent))

    def trim(self) -> nixlXferDList:
        return nixlXferDList(self._type, [row[:3] for row in self._list()])


from ._agent import nixlAgent as nixlAgent, nixlAgentConfig as nixlAgentConfig  # noqa: E402,F401  (it uses all of the above)
