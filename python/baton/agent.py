"""Agents: memory that other processes move to and fro by lists of descriptors.

    agent = baton.Agent("decode-0")
    agent.register(cache)                                 # a numpy array, a torch tensor, a bytearray
    prefill = agent.add_remote(metadata_of_the_other)     # its name
    mine = agent.prepare(pages_here)                      # rows of (address, bytes, device)
    theirs = agent.prepare(pages_there, prefill)
    with agent.read(mine, [3, 1], theirs, [7, 8], b"request 5") as transfer:
        transfer.wait(timeout=5)                          # or: await transfer, asyncio.create_task(transfer)
    for sender, message in agent.wait_messages(timeout=5):
        ...

Every call may come from any thread, and frees the interpreter's lock. A forked child makes agents of its own; `os.fork()` waits, a
second at most, while other threads make agents or move bytes.
"""
from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Any, Coroutine, Dict, List, Mapping, NamedTuple, Optional, Tuple, Union

from . import _library, _loop
from ._handle import Closing, Handle
from ._library import call, defaults, lib, take
from .buffers import DRAM, FILE, Rows, indices_of, known_kind, memory_of, rows_of
from .errors import BatonTimeoutError, InvalidParamError, RemoteDisconnectError, error_of

WRITE, READ = 0, 1
_MADV_POPULATE_WRITE = 23
_SLICE = 200_000_000  # ns: how long a wait may keep Ctrl-C, and close() in another thread, waiting

Name = Union[str, bytes]


def _name(agent: Name) -> bytes:
    if not isinstance(agent, (str, bytes)):
        raise TypeError(f"an agent's name is text, not {type(agent).__name__}")
    return _text(agent, "an agent's name")


def _text(text: Union[str, bytes], what: str) -> bytes:
    """Text as C takes it, which would end at a zero byte."""
    encoded = text.encode() if isinstance(text, str) else text
    if b"\0" in encoded:
        raise InvalidParamError(f"{what} holds a zero byte, {text!r}: C's text ends there")
    return encoded


def _bytes(thing: Any, what: str) -> bytes:
    """The bytes as C takes them."""
    if isinstance(thing, bytes):
        return thing
    if isinstance(thing, str):
        raise TypeError(f"{what} is bytes, and this is a str: encode it first ({thing[:20]!r}.encode())")
    try:
        return memoryview(thing).tobytes()
    except TypeError:
        raise TypeError(f"{what} is bytes, and this is of type {type(thing).__name__}") from None


def _in_slices(call: Any, timeout: Optional[float], *arguments: Any) -> None:
    """A call of the library whose last argument is a timeout in nanoseconds, so that Ctrl-C, and close() in another thread,
    come through."""
    left = None if timeout is None else int(min(max(timeout, 0), 1e9) * 1e9)
    while True:
        span = _SLICE if left is None else min(left, _SLICE)
        try:
            call(*arguments, span)
            return
        except BatonTimeoutError:
            if left is not None:
                left -= span
                if left <= 0:
                    raise


def _within(number: int, most: int, what: str) -> int:
    """A number that its place in the C interface can hold: ctypes would take what is left of another."""
    if not 0 <= number <= most:
        raise InvalidParamError(f"{what} is {number}: it is at least 0 and at most {most}")
    return number


def _settings(settings: Mapping[str, Any]) -> bytes:
    for key, value in settings.items():
        if "," in f"{key}{value}" or "=" in key:
            raise InvalidParamError(f"setting {key!r} is {value!r}: neither may have a comma, and a name no '='")
    return _text(",".join(f"{key}={value}" for key, value in settings.items()), "a setting")


def _reached(options: Any, providers: Optional[List[str]], require: str, key_file: str, listen_host: str, listen_port: int,
             settings: Optional[Mapping[str, Any]], advertise: str) -> None:
    """Fills in what agents, endpoints and connectors take alike: how others reach them, and their settings."""
    texts = {"providers": ",".join(providers or []), "require": require, "key_file": key_file, "listen_host": listen_host,
             "advertise": advertise}
    for name, text in texts.items():
        setattr(options, name, _text(text, name) or None)
    options.listen_port = _within(listen_port, 2 ** 16 - 1, "listen_port")
    options.settings = _settings(settings or {}) or None


def _op(op: int) -> int:
    number = op.__index__() if hasattr(op, "__index__") else None
    if number not in (WRITE, READ):
        raise InvalidParamError(f"op is baton.WRITE or baton.READ, not {op!r}")
    return number


def memory_supported(memory: int) -> bool:
    """True if this process can register memory of that kind: VRAM needs a CUDA device that the process may use. Loads
    CUDA's driver to find out."""
    return lib.memory_supported(known_kind(memory), None) == 0


class Telemetry(NamedTuple):
    """Telemetry of the last post of a transfer; times in seconds."""

    start: float
    post_duration: float
    transfer_duration: float
    bytes: int
    descriptors: int


class DescriptorList:
    """A prepared list. Transfers made from it do not need it any more."""

    def __init__(self, agent: "Agent", number: int, size: int) -> None:
        self.agent, self.number, self.size = agent, number, size

    def release(self) -> None:
        """Releases it. Further calls do nothing."""
        number, self.number = self.number, 0
        if number:
            self.agent._open.drop(lib.list_release, number, None)

    def __del__(self) -> None:
        self.release()


class Transfer(_loop.Awaited[None]):
    """A transfer, prepared but not started. post() starts it; after it has ended it may be posted again. `await
    transfer`, asyncio.create_task(transfer) and the like post it, unless that was done, and end as it does."""

    def __init__(self, agent: "Agent", number: int) -> None:
        self.agent, self.number = agent, number

    def post(self, message: Optional[bytes] = None) -> "Transfer":
        """Starts the transfer. `message` replaces the one that it was made with."""
        text = None if message is None else _bytes(message, "a message")
        self.agent._open.call(lib.transfer_post, self.number, text, len(text or b""))
        return self

    def done(self) -> bool:
        """False while it runs. Raises its error, if it failed; NotPostedError before post()."""
        return self.agent._open.call(lib.transfer_state, self.number) != _library.IN_PROGRESS

    def wait(self, timeout: Optional[float] = None) -> None:
        """Waits for its end; raises its error, if it failed. BatonTimeoutError: it still runs."""
        _in_slices(self.agent._open.call, timeout, lib.transfer_wait, self.number)

    def abort(self) -> None:
        """Requests its end. It has ended when done() returns True or raises."""
        self.agent._open.call(lib.transfer_abort, self.number)

    def local_free(self) -> bool:
        """Whether its local memory may be reused: it does not run, or it was aborted and waits for
        nothing but the other agent's confirmation."""
        return self.agent._open.call(lib.transfer_local_free, self.number) != _library.IN_PROGRESS

    def release(self, timeout: Optional[float] = None) -> None:
        """Ends it, fenced: no byte of it moves any more when this returns. RemoteDisconnectError: it is released, but
        the other agent was given up, and bytes that were on their way may land there until it hears of that."""
        if self.number == 0 or not self.agent._open.value:
            return
        try:
            _in_slices(self.agent._open.call, timeout, lib.transfer_release, self.number)
        except RemoteDisconnectError:
            self.number = 0
            raise
        self.number = 0

    def abandon(self) -> None:
        """Aborts and releases it without waiting: the fence follows later."""
        number, self.number = self.number, 0
        if number:
            self.agent._open.drop(lib.transfer_abandon, number)

    def telemetry(self) -> Telemetry:
        """Telemetry of the last post."""
        out = _library.Telemetry(ctypes.sizeof(_library.Telemetry))
        self.agent._open.call(lib.transfer_telemetry, self.number, ctypes.byref(out))
        return Telemetry(out.start_ns / 1e9, out.post_ns / 1e9, out.transfer_ns / 1e9, out.bytes, out.descriptors)

    def _wait(self) -> Coroutine[Any, Any, None]:
        return _loop.wait_for(self)

    def close(self) -> None:
        """release(), under a coroutine's name for it."""
        self.release()

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *_: Any) -> None:
        self.release()

    def __del__(self) -> None:
        self.abandon()


class Agent(Closing):
    """An agent. `listen_host` "*" (every interface, by IPv4 and IPv6) or an address of this machine is for peers on other
    machines; one that cannot be listened on raises. `advertise`, "HOST" or "HOST:PORT", is where others reach this agent if
    that is no address of this machine (NAT, a published port). `key_file` holds what all agents of a
    cluster share (empty: the user's own); `settings` are those of docs/settings.md; `serve_metadata` answers fetch_metadata() of others;
    `metadata_store` is where agents leave metadata for each other ("etcd://HOST:PORT/PREFIX", "http://HOST:PORT/PATH",
    "file:///FOLDER", of a folder that is there: else NotFoundError), which is gone `metadata_lease` seconds after its agent."""

    def __init__(self, name: Name, *, providers: Optional[List[str]] = None, require: str = "", key_file: str = "",
                 listen_host: str = "", listen_port: int = 0, progress_thread: bool = True,
                 serve_metadata: bool = False, max_transfers: int = 0,
                 settings: Optional[Mapping[str, Any]] = None, metadata_store: str = "",
                 metadata_lease: float = 10, advertise: str = "") -> None:
        self._open = Handle(None)
        options = defaults(_library.Options, lib.agent_options_init)
        options.name = _name(name)
        _reached(options, providers, require, key_file, listen_host, listen_port, settings, advertise)
        options.progress_thread = progress_thread
        options.serve_metadata = serve_metadata
        options.max_transfers = _within(max_transfers, 2 ** 32 - 1, "max_transfers")
        options.metadata_store = _text(metadata_store, "metadata_store") or None
        options.metadata_lease_ms = _within(int(metadata_lease * 1000), 2 ** 32 - 1, "metadata_lease in milliseconds")
        self._open.make(lib.agent_create, ctypes.byref(options))
        self.name = _name(name).decode()
        self.threaded = progress_thread
        self._kept: Dict[Tuple[int, int, int, int], List[Any]] = {}  # what registered memory belongs to
        weakref.finalize(self, self._open.destroy)

    def close(self) -> None:
        """Cancels and fences all transfers; nothing touches registered memory afterwards. Calls of other threads end
        first; a wait for a transfer raises that the agent is closed. The interpreter's exit closes agents too."""
        self._open.destroy()
        self._kept.clear()
        _loop.wake(self)

    @property
    def handle(self) -> int:
        """Its handle in the C interface; raises when it is closed."""
        if self._open.value is None:
            raise InvalidParamError(self._open.why)
        return self._open.value

    @property
    def port(self) -> int:
        """The address that the agent listens on; others pass "host:port" to fetch_metadata()."""
        return self._open.ask(lib.agent_port)

    @property
    def event_fd(self) -> int:
        """Readable when something happened; read 8 bytes to clear it."""
        return self._open.ask(lib.agent_event_fd)

    def progress(self) -> bool:
        """Makes progress, for an agent without a progress thread. Returns whether anything happened."""
        return bool(self._open.ask(lib.agent_progress))

    def stats(self) -> Dict[str, int]:
        """Counters."""
        return self._open.counters_of(lib.agent_get_stats, _library.Stats)

    # --- memory

    def register(self, *buffers: Any, memory: Optional[int] = None) -> None:
        """Registers buffers: numpy arrays, torch tensors, DLPack, CUDA arrays, bytearrays, or descriptors (address,
        bytes, device). All or none, and all of one kind: `memory`, or what the buffers are of; descriptors alone are
        DRAM. Of VRAM the device is the number that CUDA has for it. The agent keeps buffers alive until they are
        deregistered. `memory` FILE: descriptors (offset, bytes, file descriptor) of files, which stay open for the
        agent, whoever closes them."""
        things, keep, rows = self._ranges(buffers, memory)
        self._open.call(lib.agent_register, rows.kind, rows.address, rows.count)
        for one, thing in zip(things, keep) if rows.kind != FILE else ():
            self._kept.setdefault((rows.kind, *one), []).append(thing)

    def allocate(self, size: int) -> mmap.mmap:
        """`size` bytes, zeros, registered already: a buffer (numpy.frombuffer() makes an array of it) that agents of
        this machine reach with one copy and no system call for each page. It lives as long as a caller has it, or the
        agent has it registered: until deregister() or the agent's close() its own close() is a BufferError. Raises where the
        machine or a memory cgroup has not so much left. Where this process may have no such file (`ulimit -f`, a sandbox)
        it is memory like any other."""
        if size <= 0:
            raise InvalidParamError(f"{size} bytes cannot be allocated: ask for at least one")
        file = ctypes.c_int(-1)
        call(lib.memory_file, size, ctypes.byref(file))
        fd = file.value  # -1: this process may have no such file, and others copy its memory by other ways
        try:
            memory = mmap.mmap(fd, size)
            with contextlib.suppress(OSError, ValueError):  # an old kernel: pages come when they are touched
                memory.madvise(_MADV_POPULATE_WRITE)
            place = memory_of(memory)
            one = (place.address, place.bytes, place.device)
            row = (ctypes.c_uint64 * 3)(*one)
            if fd < 0:
                self.register(memory)
                return memory
            self._open.call(lib.agent_register_mapped, row, fd, 0)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self._kept.setdefault((DRAM, *one), []).append((memory, place.keep, weakref.finalize(memory, os.close, fd)))
        return memory

    def deregister(self, *buffers: Any, memory: Optional[int] = None) -> None:
        """Deregisters ranges, each as it was registered. Fences."""
        ranges, _, rows = self._ranges(buffers, memory)
        self._open.call(lib.agent_deregister, rows.kind, rows.address, rows.count)
        for one in ranges if rows.kind != FILE else ():
            things = self._kept.get((rows.kind, *one), [])
            if things:
                things.pop()
            if not things:
                self._kept.pop((rows.kind, *one), None)

    @staticmethod
    def _ranges(buffers: Tuple[Any, ...],
                memory: Optional[int]) -> Tuple[List[Tuple[int, int, int]], List[Any], Rows]:
        things = [tuple(map(int, one)) if isinstance(one, tuple) and len(one) == 3 else memory_of(one)
                  for one in buffers]
        return ([(one[0], one[1], one[2]) for one in things], [getattr(one, "keep", None) for one in things],
                rows_of(things, memory))

    # --- agents that know each other

    def metadata(self) -> bytes:
        """Metadata that another agent needs to reach all registered memory of this one."""
        return self._open.bytes_of(lib.agent_metadata)

    def partial_metadata(self, descriptors: Any, with_address: bool = True, memory: Optional[int] = None) -> bytes:
        """The same for some registered ranges; it adds to what the other agent knows."""
        rows = rows_of(descriptors, memory)
        return self._open.bytes_of(lib.agent_partial_metadata, rows.kind, rows.address, rows.count, with_address)

    def add_remote(self, metadata: bytes) -> str:
        """Loads another agent's metadata; returns its name."""
        given = _bytes(metadata, "metadata")
        return self._open.bytes_of(lib.agent_add_remote, given, len(given)).decode()

    def remove_remote(self, agent: Name) -> None:
        """Removes an agent, if it is known. Returns at once: running transfers with it
        fail once none of their bytes moves any more, on both sides, and their release waits for that."""
        self._open.call(lib.agent_remove_remote, _name(agent))

    def has_remote(self, agent: Name, descriptors: Any = (), memory: Optional[int] = None) -> bool:
        """True if the agent's metadata is loaded, the agent is not known to be gone, and it has registered these
        ranges."""
        rows = rows_of(descriptors, memory)
        return bool(self._open.ask(lib.agent_has_remote, _name(agent), rows.kind, rows.address, rows.count))

    def wait_remote(self, agent: Name, descriptors: Any = (), timeout: Optional[float] = None,
                    memory: Optional[int] = None) -> None:
        """Waits for has_remote(), after fetch_metadata() or follow_metadata(), or for a caller. BatonTimeoutError says
        why it did not appear, as far as known."""
        rows = rows_of(descriptors, memory)
        _in_slices(self._open.call, timeout, lib.agent_wait_remote, _name(agent), rows.kind, rows.address, rows.count)

    def fetch_metadata(self, agent: Name, host_port: str) -> None:
        """Asks the agent that listens there, with serve_metadata. Returns at once: wait_remote() waits for it, and calls it
        again for a minute when it is not there yet; so does has_remote()."""
        self._open.call(lib.agent_fetch_metadata, _name(agent), _text(host_port, "host_port"))

    def ask_metadata(self, agent: Name, host_port: str) -> None:
        """fetch_metadata() that does not wait for DNS: call it again, some times a second, until has_remote(). One of the
        calls raises what failed in looking the name up."""
        self._open.call(lib.agent_ask_metadata, _name(agent), _text(host_port, "host_port"))

    def send_metadata(self, host_port: str, metadata: Optional[bytes] = None) -> None:
        """Sends this agent's metadata, or this part of it, to the agent that listens there, with serve_metadata."""
        given = None if metadata is None else _bytes(metadata, "metadata")
        self._open.call(lib.agent_send_metadata, _text(host_port, "host_port"), given, len(given or b""))

    def invalidate_metadata(self, host_port: str) -> None:
        """Removes this agent's metadata there."""
        self._open.call(lib.agent_invalidate_metadata, _text(host_port, "host_port"))

    def publish_metadata(self, metadata: Optional[bytes] = None, label: str = "") -> None:
        """Publishes this agent's metadata, or this part of it under a label, in the metadata_store. Returns at once: watch
        metadata_state()."""
        given = None if metadata is None else _bytes(metadata, "metadata")
        self._open.call(lib.agent_publish_metadata, given, len(given or b""), _text(label, "label") or None)

    def follow_metadata(self, agent: Name, label: str = "") -> None:
        """Loads that agent's metadata from the metadata_store, now and whenever it changes. Returns at once: wait_remote()
        waits for it."""
        self._open.call(lib.agent_follow_metadata, _name(agent), _text(label, "label") or None)

    def withdraw_metadata(self) -> None:
        """Removes this agent's metadata from the metadata_store: agents that follow it drop this agent."""
        self._open.call(lib.agent_withdraw_metadata)

    def metadata_state(self, agent: Optional[Name] = None) -> None:
        """Returns if this agent's metadata is published, or another's is loaded; else raises why not."""
        self._open.call(lib.agent_metadata_state, _name(self.name if agent is None else agent))

    def connect(self, agent: Name) -> None:
        """Starts connecting now instead of at the first use."""
        self._open.call(lib.agent_connect, _name(agent))

    def explain(self, agent: Name) -> str:
        """The route to an agent, and why a better one is not used."""
        return self._open.bytes_of(lib.agent_explain, _name(agent)).decode()

    # --- lists and transfers

    def prepare(self, descriptors: Any, agent: Optional[Name] = None, memory: Optional[int] = None) -> DescriptorList:
        """Prepares a list over this agent's memory, or over another's. `descriptors`: an N x 3 array of 64-bit
        numbers (address, bytes, device), an N x 5 one (and stride, count), tuples of these, or buffers; of `memory`,
        as register() has it. Lists of files (`memory` FILE) are those of this agent by its name: the remote side of a
        transfer with oneself."""
        rows = rows_of(descriptors, memory)
        function = lib.list_prepare if rows.columns == 3 else lib.list_prepare_strided
        name = None if agent is None else _name(agent)
        return DescriptorList(self, self._open.number_of(function, name, rows.kind, rows.address, rows.count), rows.count)

    def transfer(self, op: int, local: DescriptorList, local_indices: Any, remote: DescriptorList,
                 remote_indices: Any, message: bytes = b"") -> Transfer:
        """Pairs local[local_indices[i]] with remote[remote_indices[i]]. The message reaches the other agent when
        all bytes are there."""
        mine, many, held = indices_of(local_indices)
        theirs, as_many, held_too = indices_of(remote_indices)
        text = _bytes(message, "a message")
        number = self._open.number_of(lib.transfer_make, _op(op), local.number, mine, many, remote.number, theirs, as_many, text,
                                      len(text))
        del held, held_too
        return Transfer(self, number)

    def write(self, local: DescriptorList, local_indices: Any, remote: DescriptorList, remote_indices: Any,
              message: bytes = b"") -> Transfer:
        """A transfer from here to there, posted."""
        return self.transfer(WRITE, local, local_indices, remote, remote_indices, message).post()

    def read(self, local: DescriptorList, local_indices: Any, remote: DescriptorList, remote_indices: Any,
             message: bytes = b"") -> Transfer:
        """A transfer from there to here, posted."""
        return self.transfer(READ, local, local_indices, remote, remote_indices, message).post()

    def direct(self, op: int, local: Any, remote: Any, agent: Name, message: bytes = b"",
               memory: Optional[int] = None, local_memory: Optional[int] = None) -> Transfer:
        """A transfer without prepared lists, not posted: pairs local[i] with remote[i]. `memory`: of the remote side."""
        mine, theirs = rows_of(local, local_memory), rows_of(remote, memory)
        if mine.columns != 3 or theirs.columns != 3:
            raise ValueError("rows of 5 numbers are for prepare()")
        text = _bytes(message, "a message")
        return Transfer(self, self._open.number_of(lib.transfer_make_between, _op(op), mine.kind, mine.address, mine.count,
                                                   theirs.kind, theirs.address, theirs.count, _name(agent), text, len(text)))

    # --- messages

    def notify(self, agent: Name, message: bytes) -> None:
        """Sends bytes to an agent's inbox. RemoteDisconnectError: it is known to be gone, and did not answer now. What is lost
        with it later is in lost_messages()."""
        text = _bytes(message, "a message")
        self._open.call(lib.notify, _name(agent), text, len(text))

    def messages(self) -> List[Tuple[str, bytes]]:
        """All (agent, message) that came since the last call."""
        return [(sender.decode(), message) for sender, message in self._take_all(lib.next_message, 2)]

    def wait_messages(self, timeout: Optional[float] = None) -> List[Tuple[str, bytes]]:
        """The same, but waits for a message. BatonTimeoutError: none came in that time. If several threads wait, each
        message goes to one of them; a coroutine awaits asyncio.to_thread(agent.wait_messages)."""
        sender, message = _library.Bytes(), _library.Bytes()

        def wait(span: int) -> None:
            self._open.call(lib.wait_message, span, ctypes.byref(sender), ctypes.byref(message))

        _in_slices(wait, timeout)
        first = take(sender).decode(), take(message)
        return [first, *self.messages()]

    def lost_messages(self) -> List[Tuple[str, bytes, str]]:
        """The messages of notify() that were lost with their agent since the last call, as (agent, message, why). The
        agent did not confirm them, but may have received them. The newest 1,024 are kept; stats()["messages_lost"]
        counts all."""
        return [(agent.decode(), message, why.decode(errors="replace"))
                for agent, message, why in self._take_all(lib.next_lost_message, 3)]

    def _take_all(self, call: Any, fields: int) -> List[List[bytes]]:
        out: List[List[bytes]] = []
        while True:
            parts = [_library.Bytes() for _ in range(fields)]
            error = _library.Error(ctypes.sizeof(_library.Error))
            result = self._open.ask(call, *map(ctypes.byref, parts), ctypes.byref(error))
            if result == _library.NOT_FOUND:
                return out
            if result < 0:
                raise error_of(result, error.text.decode(errors="replace"))
            out.append([take(part) for part in parts])
