"""nixlAgent and nixlAgentConfig: the agent of NIXL's compiled module, whose handles are numbers. nixl_agent sits on
it; programs that go past nixl_agent use it by itself."""
from __future__ import annotations

import functools
import itertools
import os
import time
from typing import Any, Dict, List, Optional, Tuple

import baton

from . import _bindings as nixlBind
from ._describe import rows
from ._handles import fenced_release, nixl_errors

# UCX: what NIXL's callers ask for. Either is Baton here; POSIX is files.
PLUGINS = ("UCX", "BATON", "POSIX")
_DRAM, _VRAM, _FILE = (nixlBind.nixl_mem_t.DRAM_SEG, nixlBind.nixl_mem_t.VRAM_SEG, nixlBind.nixl_mem_t.FILE_SEG)
_backend_numbers = itertools.count(1)


@functools.lru_cache(maxsize=None)
def _kinds(plugin: str) -> Tuple[str, ...]:
    """The kinds of memory that a plugin takes: that of devices where there are any."""
    if plugin == "POSIX":
        return "DRAM_SEG", "FILE_SEG"
    return ("DRAM_SEG", "VRAM_SEG") if baton.memory_supported(baton.VRAM) else ("DRAM_SEG",)


def _text(name: Any) -> str:
    if not isinstance(name, (str, bytes)):
        raise TypeError(f"an agent's name is str or bytes, not {type(name).__name__}")
    return name.decode() if isinstance(name, bytes) else name


def _bytes(message: Any) -> bytes:
    if not isinstance(message, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"a notification is bytes or str, not {type(message).__name__}")
    return message.encode() if isinstance(message, str) else bytes(message)


def _is_list(descs: Any, what: str) -> None:
    if not hasattr(descs, "getType"):
        raise TypeError(f"{what} is a list of descriptors, as get_xfer_descs() makes it, not {type(descs).__name__}")


def _port(port: Any) -> int:
    if not isinstance(port, int) or not 0 <= port < 2 ** 16:
        raise TypeError(f"the listener's port is {port!r}: it is a whole number from 0 to {2 ** 16 - 1}")
    return port


def _store() -> str:
    """The metadata store when no address is given: etcd, from NIXL's own variables."""
    endpoints = os.environ.get("NIXL_ETCD_ENDPOINTS", "")
    if not endpoints:
        return ""
    hosts = ",".join(one.strip().split("://")[-1].rstrip("/") for one in endpoints.replace(";", ",").split(","))
    return f"etcd://{hosts}/{os.environ.get('NIXL_ETCD_NAMESPACE', '/nixl/agents').strip('/')}"


def _telemetry(asked: bool) -> bool:
    """True if transfers are measured: NIXL_TELEMETRY_ENABLE decides if it is set, else the configuration."""
    said = os.environ.get("NIXL_TELEMETRY_ENABLE", "").strip().lower()
    if not said:
        return asked
    if said in ("y", "yes", "1", "true", "on", "enable"):
        return True
    if said in ("n", "no", "0", "false", "off", "disable"):
        return False
    raise ValueError(f"NIXL_TELEMETRY_ENABLE is {said!r}: say yes or no")


def _file(path: str) -> Optional[Dict[str, str]]:
    try:
        seen = os.stat(path)
    except (OSError, ValueError):
        return None
    return {"size": str(seen.st_size), "mode": str(seen.st_mode), "mtime": str(int(seen.st_mtime))}


class nixlAgentConfig:
    """The configuration of a nixlAgent. Baton accepts delays and sync_mode and ignores them."""

    def __init__(self, useProgThread: bool = False, useListenThread: bool = False, listenPort: int = nixlBind.DEFAULT_COMM_PORT,
                 syncMode: Any = nixlBind.nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT, *_: Any) -> None:
        self.useProgThread, self.useListenThread, self.listenPort = useProgThread, useListenThread, listenPort
        self.syncMode, self.captureTelemetry = syncMode, False
        self.pthrDelay, self.lthrDelay, self.etcdWatchTimeout = 0, 100000, 5000000


class nixlAgent:
    """An agent. Handles of lists and transfers are numbers that releasedDlistH() and releaseXferReq() give back."""

    def __init__(self, name: str, config: nixlAgentConfig) -> None:
        if not _text(name):
            raise ValueError("an agent's name is not empty")
        port = _port(config.listenPort)
        self.measured = _telemetry(config.captureTelemetry)
        # Every interface: NIXL's agents are reached from other machines. Whoever calls proves that it has the
        # cluster key before anything else.
        self._store = _store()
        with nixl_errors(BackendError=nixlBind.nixlNotMadeError):
            self.baton = baton.Agent(_text(name), listen_host="*", listen_port=port if config.useListenThread else 0,
                                     progress_thread=config.useProgThread, serve_metadata=config.useListenThread,
                                     metadata_store=self._store)
        self._backends: Dict[int, Tuple[str, Dict[str, str]]] = {}
        self._held: Dict[int, Any] = {}  # lists and transfers by number
        self._counts: Dict[int, int] = {}  # of descriptors, where they were given one by one: NIXL does not merge those

    # --- plugins and backends

    def getAvailPlugins(self) -> List[str]:
        return list(PLUGINS)

    def getPluginParams(self, plugin: str) -> Tuple[Dict[str, str], List[str]]:
        if plugin not in PLUGINS:
            raise nixlBind.nixlNotFoundError(f"no plugin {plugin}: there are {', '.join(PLUGINS)}")
        return {}, list(_kinds(plugin))

    def createBackend(self, plugin: str, params: Dict[str, str]) -> int:
        """Takes note. The parameters are UCX's, and mean nothing here."""
        self.getPluginParams(plugin)
        if any(plugin == there for there, _ in self._backends.values()):
            raise nixlBind.nixlInvalidParamError(f"backend {plugin} is there already")
        number = next(_backend_numbers)
        self._backends[number] = plugin, dict(params)
        return number

    def getBackendParams(self, backend: int) -> Tuple[Dict[str, str], List[str]]:
        plugin, params = self._backend(backend)
        return params, list(_kinds(plugin))

    def _backend(self, number: int) -> Tuple[str, Dict[str, str]]:
        if number not in self._backends:
            raise nixlBind.nixlNotFoundError(f"no backend {number} of this agent")
        return self._backends[number]

    # --- memory

    def _has_files(self) -> bool:
        return any(plugin == "POSIX" for plugin, _ in self._backends.values())

    def registerMem(self, descs: Any, backends: Any = ()) -> Any:
        kind, ranges = descs.getType(), [row[:3] for row in descs._list()]
        if kind == _FILE and not self._has_files():
            raise nixlBind.nixlBackendError("files are memory of the backend POSIX: create_backend(\"POSIX\") first")
        with nixl_errors(InvalidParamError=nixlBind.nixlBackendError, NotSupportedError=nixlBind.nixlBackendError):
            self.baton.register(*ranges, memory=kind.value)
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def deregisterMem(self, descs: Any, backends: Any = ()) -> Any:
        ranges = [row[:3] for row in descs._list()]
        with nixl_errors():
            self.baton.deregister(*ranges, memory=descs.getType().value)
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def queryMem(self, descs: Any, backend: int) -> List[Optional[Dict[str, str]]]:
        """Of each file that a FILE descriptor's fourth names: its size, mode and time, or None."""
        plugin, _ = self._backend(backend)
        if plugin != "POSIX" or descs.getType() != _FILE:
            raise nixlBind.nixlNotSupportedError("only POSIX tells of memory, and only of files")
        return [_file(os.fsdecode(row[3])) for row in descs._list()]

    # --- lists and transfers

    def _hold(self, thing: Any) -> int:
        self._held[thing.number] = thing
        return thing.number

    def _of(self, number: int) -> Any:
        if number not in self._held:
            raise nixlBind.nixlNotFoundError(f"handle {number:#x} was released, or belongs to another agent")
        return self._held[number]

    def prepare(self, agent: str, kind: Any, table: Any) -> Any:
        """A prepared list, not yet a number."""
        mine = agent in ("", nixlBind.NIXL_INIT_AGENT)
        files = kind == _FILE and (mine or agent == self.baton.name)
        if kind not in (_DRAM, _VRAM) and not files:
            raise nixlBind.nixlNotFoundError(f"no {kind.name} memory of \"{agent}\" is registered")
        # Files are the remote side of a transfer with oneself, whatever their list is called.
        owner = self.baton.name if files else None if mine else agent
        with nixl_errors(InvalidParamError=nixlBind.nixlNotFoundError):
            listed: Any = self.baton.prepare(table, owner, kind.value)
        listed.of_files = files
        return listed

    def make(self, operation: Any, local: Any, here: Any, remote: Any, there: Any, message: bytes) -> Any:
        """A transfer of two prepared lists, not yet a number."""
        if local.of_files:
            raise nixlBind.nixlNotSupportedError("files are on the remote side of a transfer; the local one is DRAM")
        _check_message(remote.of_files, message)
        with nixl_errors():
            return self.baton.transfer(self._op(operation), local, here, remote, there, message)

    def direct(self, operation: Any, local: Any, remote: Any, agent: str, message: bytes) -> Any:
        """A transfer without prepared lists, not yet a number."""
        _is_list(local, "local_descs")
        _is_list(remote, "remote_descs")
        kinds = local.getType(), remote.getType()
        files = kinds == (_DRAM, _FILE) and agent == self.baton.name
        if not {*kinds} <= {_DRAM, _VRAM} and not files:
            raise nixlBind.nixlNotFoundError(f"{kinds[0].name} here and {kinds[1].name} of \"{agent}\": agents exchange "
                                             "DRAM and VRAM; an agent with itself also DRAM here and FILE there")
        _check_message(files, message)
        with nixl_errors():
            return self.baton.direct(self._op(operation), rows(local), rows(remote), agent, message, kinds[1].value,
                                     kinds[0].value)

    def prepXferDlist(self, *arguments: Any, **named: Any) -> int:
        """([agent,] list, backends), or (agent, kind, N x 5 array, backends)."""
        words = [*arguments, *(named[key] for key in ("agent_name", "mem_type", "descs") if key in named)]
        agent = _text(words.pop(0)) if isinstance(words[0], (str, bytes)) else ""
        kind = words.pop(0) if isinstance(words[0], nixlBind.nixl_mem_t) else words[0].getType()
        return self._hold(self.prepare(agent, kind, rows(words[0]) if hasattr(words[0], "getType") else words[0]))

    def makeXferReq(self, operation: Any, local_side: int, local_indices: Any, remote_side: int, remote_indices: Any,
                    notif_msg: Any = "", backend: Any = (), skip_desc_merg: bool = False) -> int:
        return self._hold(self.make(operation, self._of(local_side), local_indices, self._of(remote_side),
                                    remote_indices, _bytes(notif_msg)))

    def createXferReq(self, operation: Any, local_descs: Any, remote_descs: Any, remote_agent: Any,
                      notif_msg: Any = "", backend: Any = ()) -> int:
        number = self._hold(self.direct(operation, local_descs, remote_descs, _text(remote_agent), _bytes(notif_msg)))
        self._counts[number] = local_descs.descCount()
        return number

    @staticmethod
    def _op(operation: Any) -> int:
        if not isinstance(operation, nixlBind.nixl_xfer_op_t):
            raise TypeError(f"an operation is NIXL_WRITE or NIXL_READ, not {operation!r}")
        return baton.WRITE if operation == nixlBind.nixl_xfer_op_t.NIXL_WRITE else baton.READ

    def postXferReq(self, reqh: int, notif_msg: Any = "") -> Any:
        with nixl_errors(NotSupportedError=nixlBind.nixlBackendError):  # a message to files
            self._of(reqh).post(_bytes(notif_msg) or None)
        return self.getXferStatus(reqh)

    def getXferStatus(self, reqh: int) -> Any:
        with nixl_errors():
            done = self._of(reqh).done()
        return nixlBind.nixl_status_t.NIXL_SUCCESS if done else nixlBind.nixl_status_t.NIXL_IN_PROG

    def getXferTelemetry(self, reqh: int) -> Any:
        return self.telemetry_of(self._of(reqh), self._counts.get(reqh))

    def telemetry_of(self, transfer: Any, count: Optional[int] = None) -> Any:
        """As NIXL tells it: microseconds, on the clock of the wall. `count`: of descriptors that are not merged."""
        with nixl_errors():
            seen = transfer.telemetry()
        if not self.measured:
            raise nixlBind.nixlNoTelemetryError("capture_telemetry is off, or NIXL_TELEMETRY_ENABLE says no")
        since = time.time() - (time.monotonic() - seen.start)
        post = max(1, round(seen.post_duration * 1e6))
        return nixlBind.nixlXferTelemetry(int(since * 1e6), post, max(post, round(seen.transfer_duration * 1e6)),
                                          seen.bytes, seen.descriptors if count is None else count)

    def queryXferBackend(self, reqh: int) -> int:
        self._of(reqh)
        return next(iter(self._backends), 0)

    def estimateXferCost(self, req_handle: int) -> Any:
        raise nixlBind.nixlNotSupportedError("Baton does not guess what a transfer will cost")

    def prepMemView(self, dlist: Any, backends: Any = ()) -> int:
        raise nixlBind.nixlNotSupportedError("views of device memory")

    def releaseMemView(self, mvh: int) -> None:
        raise nixlBind.nixlNotSupportedError("views of device memory")

    def releaseXferReq(self, reqh: int) -> Any:
        with nixl_errors():
            fenced_release(self._of(reqh))
        del self._held[reqh]
        self._counts.pop(reqh, None)
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def releasedDlistH(self, dlist: int) -> Any:
        self._of(dlist).release()
        del self._held[dlist]
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    # --- other agents

    def getLocalMD(self) -> bytes:
        with nixl_errors():
            return self.baton.metadata()

    def getLocalPartialMD(self, descs: Any, inc_conn_info: bool = False, backends: Any = ()) -> bytes:
        with nixl_errors():
            return self.baton.partial_metadata([row[:3] for row in descs._list()], inc_conn_info,
                                               descs.getType().value)

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        with nixl_errors():
            return self.baton.add_remote(_bytes(metadata)).encode()

    def invalidateRemoteMD(self, agent: Any) -> Any:
        with nixl_errors():
            self.baton.remove_remote(agent)
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def makeConnection(self, agent: Any, backends: Any = ()) -> Any:
        with nixl_errors():
            self.baton.connect(agent)
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def has_remote(self, *what: Any) -> bool:
        with nixl_errors():
            return self.baton.has_remote(*what)

    def checkRemoteMD(self, agent: Any, descs: Any) -> Any:
        """NIXL_SUCCESS, or NIXL_ERR_NOT_FOUND as a result: it is not raised."""
        there = self.has_remote(agent, rows(descs), descs.getType().value)
        return nixlBind.nixl_status_t.NIXL_SUCCESS if there else nixlBind.nixl_status_t.NIXL_ERR_NOT_FOUND

    def _listener(self, ip_addr: str, port: int) -> str:
        """The other side for metadata: a listener's address, or "" for etcd."""
        if ip_addr:
            port = _port(port) or nixlBind.DEFAULT_COMM_PORT
            return f"[{ip_addr}]:{port}" if ":" in ip_addr else f"{ip_addr}:{port}"
        if not self._store:
            raise nixlBind.nixlInvalidParamError("no ip_addr is given, and when this agent was made NIXL_ETCD_ENDPOINTS named "
                                                 "no etcd: give one or the other")
        return ""

    def sendLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        there = self._listener(ip_addr, port)
        with nixl_errors():
            if there:
                self.baton.send_metadata(there)
            else:
                self.baton.publish_metadata()

    def sendLocalPartialMD(self, descs: Any, inc_conn_info: bool = False, backends: Any = (), ip_addr: str = "",
                           port: int = 0, label: str = "") -> None:
        there, part = self._listener(ip_addr, port), self.getLocalPartialMD(descs, inc_conn_info)
        with nixl_errors():
            if there:
                self.baton.send_metadata(there, part)
            else:
                self.baton.publish_metadata(part, label)

    def fetchRemoteMD(self, remote_agent: Any, ip_addr: str = "", port: int = 0, label: str = "") -> None:
        there = self._listener(ip_addr, port)
        with nixl_errors():
            if there:
                self.baton.fetch_metadata(remote_agent, there)
            else:
                self.baton.follow_metadata(remote_agent, label)

    def invalidateLocalMD(self, ip_addr: str = "", port: int = 0) -> None:
        there = self._listener(ip_addr, port)
        with nixl_errors():
            if there:
                self.baton.invalidate_metadata(there)
            else:
                self.baton.withdraw_metadata()

    # --- notifications

    def genNotif(self, remote_agent: Any, msg: Any, backends: Any = ()) -> Any:
        with nixl_errors():
            self.baton.notify(remote_agent, _bytes(msg))
        return nixlBind.nixl_status_t.NIXL_SUCCESS

    def getNotifs(self, notif_map: Dict[str, List[bytes]], backends: Any = ()) -> Dict[str, List[bytes]]:
        """What has come, behind what the map holds already."""
        out = {agent: list(messages) for agent, messages in notif_map.items()}
        with nixl_errors():
            came = self.baton.messages()
        for agent, message in came:
            out.setdefault(agent, []).append(message)
        return out


def _check_message(files: bool, message: bytes) -> None:
    """As NIXL says it of a backend that has no notifications."""
    if files and message:
        raise nixlBind.nixlBackendError("a transfer with files cannot carry a notification: make it without one")
