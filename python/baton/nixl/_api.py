"""nixl_agent over baton.Agent: the calls, arguments and exceptions of NIXL 1.5. docs/from-nixl.md says what is
better here and what is missing."""
from __future__ import annotations

import logging
import pickle
from typing import Any, Dict, List, Optional, Union

import baton

from . import _bindings as nixlBind
from ._agent import PLUGINS, _bytes, _text
from ._bindings import DEFAULT_COMM_PORT
from ._describe import MEMORY, Words, describe, described, is_array, rows
from ._handles import (nixl_agent_config, nixl_backend_handle, nixl_errors, nixl_prepped_dlist_handle,
                       nixl_thread_sync_t, nixl_xfer_handle)

__all__ = ["DEFAULT_COMM_PORT", "nixl_agent", "nixl_agent_config", "nixl_backend_handle", "nixl_prepped_dlist_handle",
           "nixl_thread_sync_t", "nixl_xfer_handle", "nixlBind"]

_log = logging.getLogger("nixl")
_Name = Union[str, bytes]


def _known(backend: str, among: Any) -> bool:
    if backend not in among:
        _log.warning("%s is not there", backend)
    return backend in among


class nixl_agent:
    """An agent with NIXL's calls."""

    def __init__(self, agent_name: str, nixl_conf: Optional[nixl_agent_config] = None,
                 instantiate_all: bool = False) -> None:
        conf = nixl_conf or nixl_agent_config()
        self.name = _text(agent_name)
        config = nixlBind.nixlAgentConfig()
        config.useProgThread, config.useListenThread = conf.enable_pthread, conf.enable_listen
        config.listenPort, config.captureTelemetry = conf.port, conf.capture_telemetry
        config.syncMode = (conf.sync_mode or (nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT if conf.enable_listen else
                                              nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE)).value
        self.agent = nixlBind.nixlAgent(agent_name, config)
        self._agent = self.agent.baton
        self.nixl_mems = MEMORY
        self.nixl_ops = Words("operation", {"WRITE": nixlBind.nixl_xfer_op_t.NIXL_WRITE,
                                            "READ": nixlBind.nixl_xfer_op_t.NIXL_READ})
        self.notifs: Dict[str, List[bytes]] = {}
        self.plugin_list = self.agent.getAvailPlugins()
        self.backends: Dict[str, int] = {}
        self.backend_mems: Dict[str, List[str]] = {}
        self.backend_options: Dict[str, Dict[str, str]] = {}
        for backend in PLUGINS if instantiate_all else conf.backends:
            if backend in PLUGINS:
                self.create_backend(backend)
            else:
                _log.warning("skipping backend %s: Baton has no such plugin", backend)

    # --- plugins and backends

    def get_plugin_list(self) -> List[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> List[str]:
        return self.agent.getPluginParams(backend)[1] if _known(backend, PLUGINS) else []

    def get_plugin_params(self, backend: str) -> Dict[str, str]:
        return self.agent.getPluginParams(backend)[0] if _known(backend, PLUGINS) else {}

    def get_backend_mem_types(self, backend: str) -> List[str]:
        return self.backend_mems[backend] if _known(backend, self.backends) else []

    def get_backend_params(self, backend: str) -> Dict[str, str]:
        return self.backend_options[backend] if _known(backend, self.backends) else {}

    def create_backend(self, backend: str, initParams: Optional[Dict[str, str]] = None) -> None:
        number = self.agent.createBackend(backend, initParams or {})
        self.backend_options[backend], self.backend_mems[backend] = self.agent.getBackendParams(number)
        self.backends[backend] = number

    # --- descriptors and memory

    def get_reg_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return described(descs, mem_type, nixlBind.nixlRegDList)

    def get_xfer_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return described(descs, mem_type, nixlBind.nixlXferDList)

    def get_remote_descs(self, descs: Any, mem_type: Optional[str] = None) -> Any:
        return described(descs, mem_type, nixlBind.nixlRemoteDList)

    def get_serialized_descs(self, descs: Any) -> bytes:
        return pickle.dumps(descs)

    def deserialize_descs(self, serialized_descs: bytes) -> Any:
        """Only of bytes that you trust, as with NIXL: this is pickle."""
        return pickle.loads(serialized_descs)

    def register_memory(self, reg_list: Any, mem_type: Optional[str] = None, backends: Any = ()) -> Any:
        descs = describe(reg_list, mem_type, nixlBind.nixlRegDList)
        self.agent.registerMem(descs)
        return descs

    def deregister_memory(self, dereg_list: Any, backends: Any = ()) -> None:
        self.agent.deregisterMem(dereg_list)

    def query_memory(self, reg_list: Any, backend: str, mem_type: Optional[str] = None) -> Any:
        descs = describe(reg_list, mem_type, nixlBind.nixlRegDList)
        return self.agent.queryMem(descs, self.backends.get(backend, 0))

    # --- lists and transfers

    def prep_xfer_dlist(self, agent_name: _Name, xfer_list: Any, mem_type: Optional[str] = None,
                        backends: Any = ()) -> nixl_prepped_dlist_handle:
        if is_array(xfer_list) and xfer_list.ndim == 2 and xfer_list.shape[1] == 5:
            if mem_type is None:
                raise ValueError("mem_type is needed with an array")
            kind, table = MEMORY[mem_type], xfer_list
        else:
            descs = describe(xfer_list, mem_type, nixlBind.nixlXferDList)
            kind, table = descs.getType(), rows(descs)
        return nixl_prepped_dlist_handle(self, self.agent.prepare(_text(agent_name), kind, table))

    def make_prepped_xfer(self, operation: str, local_xfer_side: nixl_prepped_dlist_handle, local_indices: Any,
                          remote_xfer_side: nixl_prepped_dlist_handle, remote_indices: Any, notif_msg: Any = b"",
                          backends: Any = (), skip_desc_merge: bool = False) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        return nixl_xfer_handle(self, self.agent.make(op, local_xfer_side._list, local_indices, remote_xfer_side._list,
                                                      remote_indices, _bytes(notif_msg)))

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: _Name,
                        notif_msg: Any = b"", backends: Any = ()) -> nixl_xfer_handle:
        op = self.nixl_ops[operation]
        return nixl_xfer_handle(self, self.agent.direct(op, local_descs, remote_descs, _text(remote_agent),
                                                        _bytes(notif_msg)), local_descs.descCount())

    def transfer(self, handle: nixl_xfer_handle, notif_msg: Any = b"") -> str:
        with nixl_errors(NotSupportedError=nixlBind.nixlBackendError):  # a message to files
            handle._transfer.post(_bytes(notif_msg) or None)
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: nixl_xfer_handle) -> str:
        with nixl_errors():
            return "DONE" if handle._transfer.done() else "PROC"

    def get_xfer_telemetry(self, handle: nixl_xfer_handle) -> nixlBind.nixlXferTelemetry:
        return self.agent.telemetry_of(handle._transfer, handle._count)

    def query_xfer_backend(self, handle: nixl_xfer_handle) -> str:
        return next(iter(self.backends), next(iter(PLUGINS)))

    def estimate_xfer_cost(self, req_handle: nixl_xfer_handle) -> Any:
        return self.agent.estimateXferCost(0)

    def prep_mem_view(self, dlist: Any, *, backends: Any = None) -> int:
        return self.agent.prepMemView(dlist)

    def release_mem_view(self, mvh: int) -> None:
        self.agent.releaseMemView(mvh)

    def release_xfer_handle(self, handle: nixl_xfer_handle) -> None:
        with nixl_errors():
            handle.release()

    def release_dlist_handle(self, handle: nixl_prepped_dlist_handle) -> None:
        handle.release()

    # --- other agents

    def get_agent_metadata(self) -> bytes:
        return self.agent.getLocalMD()

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool = False, backends: Any = ()) -> bytes:
        return self.agent.getLocalPartialMD(descs, inc_conn_info)

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return self.agent.loadRemoteMD(metadata)

    def remove_remote_agent(self, agent: _Name) -> None:
        self.agent.invalidateRemoteMD(agent)

    def make_connection(self, remote_agent: _Name, backends: Any = ()) -> None:
        self.agent.makeConnection(remote_agent)

    def check_remote_metadata(self, agent: _Name, descs: Any = None) -> bool:
        if descs is None:
            return self.agent.has_remote(agent)
        return self.agent.has_remote(agent, rows(descs), descs.getType().value)

    def send_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.sendLocalMD(ip_addr, port)

    def send_partial_agent_metadata(self, descs: Any, inc_conn_info: bool = False, backends: Any = (),
                                    ip_addr: str = "", port: int = DEFAULT_COMM_PORT, label: str = "") -> None:
        self.agent.sendLocalPartialMD(descs, inc_conn_info, backends, ip_addr, port, label)

    def fetch_remote_metadata(self, remote_agent: _Name, ip_addr: str = "", port: int = DEFAULT_COMM_PORT,
                              label: str = "") -> None:
        self.agent.fetchRemoteMD(remote_agent, ip_addr, port, label)

    def invalidate_local_metadata(self, ip_addr: str = "", port: int = DEFAULT_COMM_PORT) -> None:
        self.agent.invalidateLocalMD(ip_addr, port)

    # --- notifications

    def send_notif(self, remote_agent_name: _Name, notif_msg: Any, backend: Optional[str] = None) -> None:
        self.agent.genNotif(remote_agent_name, notif_msg)

    def get_new_notifs(self, backends: Any = ()) -> Dict[str, List[bytes]]:
        return self.agent.getNotifs({})

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
