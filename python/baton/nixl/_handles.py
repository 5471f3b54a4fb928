"""The objects that nixl_agent takes and returns, and the translation of Baton's exceptions to NIXL's."""
from __future__ import annotations

import contextlib
import enum
import logging
from typing import Any, Dict, Iterator, List, Optional, Type

from baton import errors

from . import _bindings as nixlBind

nixl_backend_handle = int
_log = logging.getLogger("nixl")

_EXCEPTIONS: Dict[Type[errors.BatonError], Type[Exception]] = {
    errors.NotPostedError: nixlBind.nixlNotPostedError, errors.InvalidParamError: nixlBind.nixlInvalidParamError,
    errors.BackendError: nixlBind.nixlBackendError, errors.NotFoundError: nixlBind.nixlNotFoundError,
    errors.MismatchError: nixlBind.nixlMismatchError, errors.NotAllowedError: nixlBind.nixlNotAllowedError,
    errors.RepostActiveError: nixlBind.nixlRepostActiveError, errors.NotSupportedError: nixlBind.nixlNotSupportedError,
    errors.RemoteDisconnectError: nixlBind.nixlRemoteDisconnectError,
    errors.CancelledError: nixlBind.nixlCancelledError,
}


@contextlib.contextmanager
def nixl_errors(**instead: Type[Exception]) -> Iterator[None]:
    """Baton's exceptions as NIXL's. `instead`: by the name of ours, another one."""
    try:
        yield
    except errors.BatonError as why:
        kind: Type[Exception] = instead.get(type(why).__name__,
                                            _EXCEPTIONS.get(type(why), nixlBind.nixlUnknownError))
        raise kind(str(why)) from None


class nixl_thread_sync_t(enum.Enum):
    """Accepted for what NIXL's callers write; every agent here may be used from any thread."""

    NIXL_THREAD_SYNC_NONE = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
    NIXL_THREAD_SYNC_STRICT = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    NIXL_THREAD_SYNC_RW = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW


class nixl_agent_config:
    """The configuration of an agent. Baton accepts num_threads and sync_mode and ignores them."""

    def __init__(self, enable_prog_thread: bool = True, enable_listen_thread: bool = False, listen_port: int = 8888,
                 capture_telemetry: bool = False, num_threads: int = 0, backends: Optional[List[str]] = None,
                 sync_mode: Optional[nixl_thread_sync_t] = None) -> None:
        if sync_mode is not None and not isinstance(sync_mode, nixl_thread_sync_t):
            raise TypeError(f"sync_mode must be a nixl_thread_sync_t, not {type(sync_mode).__name__}")
        self.enable_pthread, self.enable_listen, self.port = enable_prog_thread, enable_listen_thread, listen_port
        self.capture_telemetry, self.num_threads, self.sync_mode = capture_telemetry, num_threads, sync_mode
        self.backends = ["UCX"] if backends is None else backends


class nixl_prepped_dlist_handle:
    """A prepared list."""

    def __init__(self, agent: Any, value: Any) -> None:
        self._agent, self._list = agent, value

    def __repr__(self) -> str:
        return f"nixl_prepped_dlist_handle({self._list.number:#x})"

    def release(self) -> None:
        self._list.release()


# As long as a release waits for the other agent's word that no byte moves any more. What is silent longer is fenced
# in the background.
FENCE_SECONDS = 5.0


def fenced_release(transfer: Any, seconds: float = FENCE_SECONDS) -> None:
    """Ends it; no byte of it moves any more, unless the other agent is silent. Once is enough."""
    try:
        transfer.release(seconds)
    except errors.BatonTimeoutError as why:
        _log.warning("released without the other agent's confirmation: %s", why)
        transfer.abandon()
    except errors.RemoteDisconnectError as why:
        _log.warning("released: %s", why)
    except errors.NotFoundError:
        pass


class nixl_xfer_handle:
    """A transfer. When no caller has it any more it is aborted."""

    fence_seconds = FENCE_SECONDS

    def __init__(self, agent: Any, value: Any, count: Optional[int] = None) -> None:
        self._agent, self._transfer, self._count = agent, value, count

    def __repr__(self) -> str:
        return f"nixl_xfer_handle({self._transfer.number:#x})"

    def release(self) -> None:
        fenced_release(self._transfer, self.fence_seconds)
