"""nixl_agent over baton.Agent: the calls, arguments and exceptions of NIXL 1.5. docs/from-nixl.md says what is
better here and what is missing."""
from __future__ import annotations

import itertools
import logging
import os
import pickle
import time
from typing import Any, Dict, List, Optional, Union

import baton

from . import _bindings as nixlBind
from ._bindings import DEFAULT_COMM_PORT
from ._describe import MEMORY, describe, is_array, rows
from ._handles import (nixl_agent_config, nixl_backend_handle, nixl_errors, nixl_prepped_dlist_handle,
                       nixl_thread_sync_t, nixl_xfer_handle)

__all__ = ["DEFAULT_COMM_PORT", "nixl_agent", "nixl_agent_config", "nixl_backend_handle", "nixl_prepped_dlist_handle",
           "nixl_thread_sync_t", "nixl_xfer_handle", "nixlBind"]

_log = logging.getLogger("nixl")
_Name = Union[str, bytes]
_DRAM = nixlBind.nixl_mem_t.DRAM_SEG
_PLUGINS = ("UCX", "BATON")  # UCX: what NIXL's callers ask for. Either is Baton here.
_backend_numbers = itertools.count(1)


def _text(name: _Name) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _bytes(message: Union[str, bytes]) -> bytes:
    return message.encode() if isinstance(message, str) else bytes(message)


def _store() -> str:
    """Where metadata is left when no address is given: etcd, by NIXL's own variables."""
    endpoints = os.environ.get("NIXL_ETCD_ENDPOINTS", "")
    if not endpoints:
        return ""
    hosts = ",".join(one.strip().split("://")[-1].rstrip("/") for one in endpoints.replace(";", ",").split(","))
    return f"etcd://{hosts}/{os.environ.get('NIXL_ETCD_NAMESPACE', '/nixl/agents').strip('/')}"


def _known(backend: str, among: Any) -> bool:
    if backend not in among:
        _log.warning("%s is not there", backend)
    return backend in among


class nixl_agent:
    """An agent with NIXL's calls."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None,
                 instantiate_all: bool = False) -> None:
        if not agent_name:
            raise ValueError("an agent's name is not empty")
        conf = nixl_conf or nixl_agent_config()
        self.name = _text(agent_name)
        # Every interface: NIXL's agents are reached from other machines. Whoever calls proves that it has the
        # cluster key before anything else.
        with nixl_errors():
            self._agent = baton.Agent(self.name, listen_host="0.0.0.0",
                                      listen_port=conf.port if conf.enable_listen else 0,
                                      progress_thread=conf.enable_pthread, serve_metadata=conf.enable_listen,
                                      metadata_store=_store())
        self._telemetry = conf.capture_telemetry
        self.nixl_mems = MEMORY
        self.nixl_ops = {"WRITE": nixlBind.nixl_xfer_op_t.NIXL_WRITE, "READ": nixlBind.nixl_xfer_op_t.NIXL_READ}
        self.notifs: Dict[str, List[bytes]] = {}
        self.plugin_list = list(_PLUGINS)
        self.backends: Dict[str, int] = {}
        self.backend_mems: Dict[str, List[str]] = {}
        self.backend_options: Dict[str, Dict[str, str]] = {}
        for backend in _PLUGINS if instantiate_all else conf.backends:
            if backend in _PLUGINS:
                self.create_backend(backend)
            else:
                _log.warning("skipping backend %s: Baton has no such plugin", backend)

    # --- plugins and backends

    def get_plugin_list(self) -> List[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> List[str]:
        return ["DRAM_SEG"] if _known(backend, _PLUGINS) else []

    def get_plugin_params(self, backend: str) -> Dict[str, str]:
        _known(backend, _PLUGINS)
        return {}

    def get_backend_mem_types(self, backend: str) -> List[str]:
        return self.backend_mems[backend] if _known(backend, self.backends) else []

    def get_backend_params(self, backend: str) -> Dict[str, str]:
        return self.backend_options[backend] if _known(backend, self.backends) else {}

    def create_backend(self, backend: str, initParams: Optional[Dict[str, str]] = None) -> None:
        """Takes note. The parameters are UCX's, and mean nothing here."""
        if backend not in _PLUGINS:
            raise nixlBind.nixlNotFoundError(f"no plugin {backend}: there are {', '.join(_PLUGINS)}")
        if backend in self.backends:
            raise nixlBind.nixlInvalidParamError(f"backend {backend} is there already")
        self.backends[backend] = next(_backend_numbers)
        self.backend_mems[backend] = ["DRAM_SEG"]
        self.backend_options[backend] = dict(initParams or {})

    # --- descriptors and memory

    def get_reg_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return describe(descs, mem_type, nixlBind.nixlRegDList)

    def get_xfer_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return describe(descs, mem_type, nixlBind.nixlXferDList)

    def get_remote_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return describe(descs, mem_type, nixlBind.nixlRemoteDList)

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Only of bytes that you trust, as with NIXL: this is pickle."""
        return pickle.loads(serialized_descs)

    def register_memory(self, reg_list: Any, mem_type: Optional[str] = None, backends: Any = ()) -> Any:
        descs = self.get_reg_descs(reg_list, mem_type)
        if descs is None:
            raise nixlBind.nixlInvalidParamError("nothing to register")
        if descs.getType() != _DRAM:
            raise nixlBind.nixlBackendError(f"{descs.getType().name} memory: Baton's agent moves host memory (DRAM)")
        with nixl_errors(InvalidParamError=nixlBind.nixlBackendError):
            self._agent.register(*(row[:3] for row in descs._list()))
        return descs

    def deregister_memory(self, dereg_list: Any, backends: Any = ()) -> None:
        with nixl_errors():
            self._agent.deregister(*(row[:3] for row in dereg_list._list()))

    def query_memory(self, reg_list: Any, backend: str, mem_type: Optional[str] = None) -> Any:
        raise nixlBind.nixlNotSupportedError("Baton's agent knows host memory only")

    # --- lists and transfers

    def prep_xfer_dlist(self, agent_name: _Name, xfer_list: Any, mem_type: Optional[str] = None,
                        backends: Any = ()) -> nixl_prepped_dlist_handle:
        if is_array(xfer_list) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("mem_type is needed with an array")
            kind, table = MEMORY[mem_type], xfer_list
        else:
            descs = self.get_xfer_descs(xfer_list, mem_type)
            if descs is None:
                raise nixlBind.nixlInvalidParamError("nothing to prepare")
            kind, table = descs.getType(), rows(descs)
        if kind != _DRAM:
            raise nixlBind.nixlNotFoundError(f"no {kind.name} memory is registered: Baton's agent moves host memory")
        name = _text(agent_name)
        local = name in ("", nixlBind.NIXL_INIT_AGENT)
        with nixl_errors(InvalidParamError=nixlBind.nixlNotFoundError):
            return nixl_prepped_dlist_handle(self, self._agent.prepare(table, None if local else name))

    def make_prepped_xfer(self, operation: str, local_xfer_side: nixl_prepped_dlist_handle, local_indices: Any,
                          remote_xfer_side: nixl_prepped_dlist_handle, remote_indices: Any, notif_msg: Any = b"",
                          backends: Any = (), skip_desc_merge: bool = False) -> nixl_xfer_handle:
        op = self._op(operation)
        with nixl_errors():
            return nixl_xfer_handle(self, self._agent.transfer(op, local_xfer_side._list, local_indices,
                                                               remote_xfer_side._list, remote_indices,
                                                               _bytes(notif_msg)))

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: _Name,
                        notif_msg: Any = b"", backends: Any = ()) -> nixl_xfer_handle:
        op = self._op(operation)
        for descs in (local_descs, remote_descs):
            if descs.getType() != _DRAM:
                raise nixlBind.nixlNotFoundError(f"no {descs.getType().name} memory is registered")
        with nixl_errors():
            return nixl_xfer_handle(self, self._agent.direct(op, rows(local_descs), rows(remote_descs),
                                                             _text(remote_agent), _bytes(notif_msg)))

    def _op(self, operation: str) -> int:
        return baton.WRITE if self.nixl_ops[operation] == nixlBind.nixl_xfer_op_t.NIXL_WRITE else baton.READ

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Any = b"") -> str:
        with nixl_errors():
            handle._transfer.post(_bytes(notif_msg) if notif_msg else None)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        with nixl_errors():
            return "DONE" if handle._transfer.done() else "PROC"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        with nixl_errors():
            seen = handle._transfer.telemetry()
        if not self._telemetry:
            raise nixlBind.nixlNoTelemetryError("capture_telemetry is off")
        since = time.time() - (time.monotonic() - seen.start)
        post = max(1, round(seen.post_duration * 1e6))
        return nixlBind.nixlXferTelemetry(int(since * 1e6), post, max(post, round(seen.transfer_duration * 1e6)),
                                          seen.bytes, seen.descriptors)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return next(iter(self.backends), _PLUGINS[0])

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> Any:
        raise nixlBind.nixlNotSupportedError("Baton does not guess what a transfer will cost")

    def prep_mem_view(self, dlist: Any, *, backends: Any = None) -> int:
        raise nixlBind.nixlNotSupportedError("views of device memory")

    def release_mem_view(self, mvh: int) -> None:
        raise nixlBind.nixlNotSupportedError("views of device memory")

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        with nixl_errors():
            handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # --- other agents

    def get_agent_metadata(self) -> bytes:
        return self._agent.metadata()

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool = False, backends: Any = ()) -> bytes:
        with nixl_errors():
            return self._agent.partial_metadata([row[:3] for row in descs._list()], inc_conn_info)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        with nixl_errors():
            return self._agent.add_remote(metadata).encode()

    def remove_remote_agent(self, agent: _Name) -> None:
        self._agent.remove_remote(agent)

    def make_connection(self, remote_agent: _Name, backends: Any = ()) -> None:
        with nixl_errors():
            self._agent.connect(remote_agent)

    def check_remote_metadata(self, agent: _Name, descs: Any = None) -> bool:
        return self._agent.has_remote(agent, rows(descs) if descs is not None else ())

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        with nixl_errors(NotAllowedError=nixlBind.nixlNotSupportedError):
            if ip_addr:
                self._agent.send_metadata(self._listener(ip_addr, port))
            else:
                self._agent.publish_metadata()

    def send_partial_agent_metadata(self, descs: Any, inc_conn_info: bool = False, backends: Any = (),
                                    ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = "") -> None:
        part = self.get_partial_agent_metadata(descs, inc_conn_info)
        with nixl_errors(NotAllowedError=nixlBind.nixlNotSupportedError):
            if ip_addr:
                self._agent.send_metadata(self._listener(ip_addr, port), part)
            else:
                self._agent.publish_metadata(part, label)

    def fetch_remote_metadata(self, remote_agent: _Name, ip_addr: str = "", port: int = DEFAULT_COMM_PORT,
                              label: str = "") -> None:
        with nixl_errors(NotAllowedError=nixlBind.nixlNotSupportedError):
            if ip_addr:
                self._agent.fetch_metadata(remote_agent, self._listener(ip_addr, port))
            else:
                self._agent.follow_metadata(remote_agent, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        with nixl_errors(NotAllowedError=nixlBind.nixlNotSupportedError):
            if ip_addr:
                self._agent.invalidate_metadata(self._listener(ip_addr, port))
            else:
                self._agent.withdraw_metadata()

    @staticmethod
    def _listener(ip_addr: str, port: int) -> str:
        return f"[{ip_addr}]:{port}" if ":" in ip_addr else f"{ip_addr}:{port}"

    # --- notifications

    def send_notif(self, remote_agent_name: _Name, notif_msg: Any, backend: Optional[str] = None) -> None:
        with nixl_errors():
            self._agent.notify(remote_agent_name, _bytes(notif_msg))

    def get_new_notifs(self, backends: Any = ()) -> Dict[str, List[bytes]]:
        out: Dict[str, List[bytes]] = {}
        for agent, message in self._agent.messages():
            out.setdefault(agent, []).append(message)
        return out

    def update_notifs(self, backends: Any = ()) -> Dict[str, List[bytes]]:
        for agent, messages in self.get_new_notifs().items():
            self.notifs.setdefault(agent, []).extend(messages)
        return self.notifs

    def check_remote_xfer_done(self, remote_agent_name: _Name, lookup_tag: bytes, backends: Any = (),
                               tag_is_prefix: bool = True) -> bool:
        """Whether a notification with this tag has come from that agent; takes it away."""
        self.update_notifs()
        waiting = self.notifs.get(_text(remote_agent_name), [])
        for number, message in enumerate(waiting):
            if message.startswith(lookup_tag) if tag_is_prefix else lookup_tag in message:
                del waiting[number]
                return True
        return False
