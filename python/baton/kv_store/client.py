"""A way to `baton kv_store --lm-port`: blocks by their names, checked before a caller is told that they are here.

    store = KvStore("10.0.0.7:65432")
    store.put([key], [block])           # [True]: it is kept
    store.get([key], [memory])          # [True]: memory has what was put; [False]: it has not, whatever lies there
    store.exists([key])

Nothing here raises for what a store does or does not do: what it has not, or not whole, or not in time, is a miss. A
store of which no byte comes for `silence` seconds has nothing at all, and is asked nothing, until it answers again; it
is called every `retry` seconds. It may be away when an engine starts, and may be started again.

Over the `lm://` wire (kvtransfer/store/lm_server.h): a name is 64 hex digits there, and the seven numbers that the wire
keeps for its clients hold what a value is checked by. Any thread may call; a batch has a connection to itself. Not for
use across fork().
"""
from __future__ import annotations

import logging
import socket
import struct
import threading
import time
import zlib
from typing import Any, Dict, List, NamedTuple, Sequence, Set, Tuple

log = logging.getLogger("baton.kv_store")

_PUT, _GET, _EXIST, _HEALTH = 1, 2, 3, 5
_FOUND, _MISSING, _BAD = 200, 400, -1  # what the store says, and that it is not true
_REQUEST = struct.Struct("<9i150s")  # command, length, format, dtype, location, 4 dimensions; a name
_REPLY = struct.Struct("<9i")        # code, length, format, dtype, 4 dimensions, location
_VERSION = 0x314B5642                # as a format: "BVK1"
_WINDOW = 64                         # requests whose replies may be outstanding: less than any socket's buffers hold
_LARGEST = (1 << 31) - 1
_REMEMBERED = 1 << 16                # names of values that were bad
_NO_META = (_VERSION, 0, 0, 0, 0, 0, 0)


class _Late(Exception):
    """The batch's time is over."""


class _Limits(NamedTuple):
    silence: float
    timeout: float
    retry: float


class KvStore:
    """The store at `store`, "HOST:PORT" of its --lm-port. Returns at once; the store is called by a thread.

    silence  s without a byte, after which the store is away
    timeout  s that a batch may take in all; what has not come by then is a miss
    retry    s between calls to a store that is away
    """

    def __init__(self, store: str, silence: float = 1.0, timeout: float = 10.0, retry: float = 0.5) -> None:
        host, colon, port = store.rpartition(":")
        if not colon or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f'"{store}" is no HOST:PORT; give the address of `baton kv_store --lm-port`')
        if min(silence, retry) <= 0 or timeout <= silence:
            raise ValueError("silence, timeout and retry must be seconds above 0, and timeout must exceed silence")
        self.store = store
        self._address = (host.strip("[]"), int(port))
        self._limits = _Limits(float(silence), float(timeout), float(retry))
        self._lock = threading.Lock()
        self._idle: List[_Connection] = []
        self._busy: Set[_Connection] = set()
        self._bad: Set[bytes] = set()
        self._counts = dict.fromkeys(("asked", "found", "hits", "misses", "corrupt", "kept", "refused", "silences"), 0)
        self._closed = threading.Event()
        self._here = threading.Event()
        self._caller = threading.Thread(target=self._call_until_it_answers, name="baton-kv-store", daemon=True)
        self._caller.start()

    def here(self, patience: float = 0) -> bool:
        """True if the store answers, as far as is known; waits up to this long for the answer."""
        return self._here.wait(patience)

    def counts(self) -> Dict[str, int]:
        """Names asked for and found; hits, misses and corrupt ones among reads; kept and refused; silences."""
        with self._lock:
            return dict(self._counts)

    def exists(self, keys: Sequence[bytes]) -> List[bool]:
        """Which of these the store has. It may forget them before they are read."""
        found = [False] * len(keys)
        self._batch(lambda connection: connection.exists(keys, found))
        self._count(asked=len(keys), found=sum(found))
        return found

    def get(self, keys: Sequence[bytes], into: Sequence[Any]) -> List[bool]:
        """Reads values into memory of exactly their size. Memory of a miss may hold anything. Once this returns nothing
        writes there any more."""
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} names, and memory for {len(into)}")
        flat, answers = [_flat(one) for one in into], [0] * len(keys)
        if any(one.readonly for one in flat):
            raise TypeError("a value is read into memory that can be written")
        self._batch(lambda connection: connection.get(keys, flat, answers))
        got = [answer == _FOUND for answer in answers]
        bad = answers.count(_BAD)
        self._count(hits=sum(got), misses=len(keys) - sum(got), corrupt=bad)
        if bad:
            log.warning("%d of %d blocks of the store at %s were not what was put", bad, len(keys), self.store)
        with self._lock:
            # Also what the store says it has and does not give, for it has seen itself that the bytes are bad.
            self._bad.update(key for key, answer in zip(keys, answers) if answer in (_BAD, _MISSING))
            while len(self._bad) > _REMEMBERED:
                self._bad.pop()
        return got

    def put(self, keys: Sequence[bytes], values: Sequence[Any]) -> List[bool]:
        """Writes what the store has not yet. True: it was kept; it may leave for others at any time."""
        if len(keys) != len(values):
            raise ValueError(f"{len(keys)} names, and {len(values)} values")
        kept = [False] * len(keys)
        flat = [_flat(one) for one in values]
        with self._lock:
            bad = self._bad.intersection(keys)

        def all_of_it(connection: "_Connection") -> None:
            connection.exists(keys, kept)
            missing = [i for i, key in enumerate(keys)
                       if (not kept[i] or key in bad) and 0 < len(flat[i]) <= _LARGEST]
            for i in missing:
                kept[i] = False
                connection.put(keys[i], flat[i])
            now = [False] * len(missing)
            try:
                connection.exists([keys[i] for i in missing], now)  # a put has no answer: whether there was room
            finally:
                for i, here in zip(missing, now):
                    kept[i] = here

        self._batch(all_of_it)
        with self._lock:
            self._bad.difference_update(key for key, here in zip(keys, kept) if here)
        self._count(kept=sum(kept), refused=len(keys) - sum(kept))
        return kept

    def close(self) -> None:
        """Ends running batches as misses. The store counts as empty from then on."""
        with self._lock:
            self._closed.set()
            self._here.clear()
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
            caller = self._caller
        for connection in idle:
            connection.close()
        caller.join()

    def _count(self, **more: int) -> None:
        with self._lock:
            for name, number in more.items():
                self._counts[name] += number

    def _batch(self, work: Any) -> None:
        """Does `work` on a connection, or as much of it as the store lets."""
        if not self._here.is_set():
            return
        deadline = time.monotonic() + self._limits.timeout
        connection, whole = None, False
        try:
            connection = self._take(deadline)
            connection.deadline = deadline
            work(connection)
            whole = True
        except _Late:
            log.warning("the store at %s is slow: a batch was not complete within %g s", self.store, self._limits.timeout)
        except OSError as why:  # a socket's timeout is one
            self._lost(why)
        finally:
            if connection is not None:
                self._give_back(connection, whole)

    def _take(self, deadline: float) -> "_Connection":
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._call(deadline)
            if not connection.ended():
                with self._lock:
                    self._busy.add(connection)
                if self._closed.is_set():
                    connection.interrupt()
                return connection
            connection.close()  # the store was started again

    def _call(self, deadline: float) -> "_Connection":
        connection = _Connection(self._address, self._limits.silence, deadline)
        with self._lock:
            self._busy.add(connection)
        if self._closed.is_set():
            connection.interrupt()
        try:
            connection.greet()
        except BaseException:
            self._give_back(connection, False)
            raise
        return connection

    def _give_back(self, connection: "_Connection", whole: bool = True) -> None:
        with self._lock:
            self._busy.discard(connection)
            if whole and not self._closed.is_set():
                self._idle.append(connection)
                return
        connection.close()  # replies may be on their way: no call can use it

    def _lost(self, why: Exception) -> None:
        """The store is away: it is called by a thread until it answers."""
        with self._lock:
            if self._closed.is_set() or not self._here.is_set():
                return
            self._here.clear()
            self._counts["silences"] += 1
            idle, self._idle = self._idle, []
            self._caller = threading.Thread(target=self._call_until_it_answers, name="baton-kv-store", daemon=True)
            self._caller.start()
        for connection in idle:
            connection.close()
        log.warning("the store at %s counts as empty until it answers again: %s", self.store, why)

    def _call_until_it_answers(self) -> None:
        said = False
        while not self._closed.is_set():
            try:
                connection = self._call(time.monotonic() + self._limits.timeout)
            except (OSError, _Late) as why:
                if not said:
                    log.info("connecting to the store at %s until it answers: %s", self.store, why)
                said = True
                self._closed.wait(self._limits.retry)
                continue
            with self._lock:
                if not self._closed.is_set():
                    self._here.set()
            self._give_back(connection)
            log.info("the store at %s answers", self.store)
            return


class _Connection:
    """One socket, for one batch at a time. Raises OSError when the store has broken or is silent, _Late after the
    deadline. Whatever it raises, nothing can be said on it any more."""

    def __init__(self, address: Tuple[str, int], silence: float, deadline: float) -> None:
        self.deadline, self._silence = deadline, silence
        self._head = bytearray(_REPLY.size)
        self._socket = socket.create_connection(address, timeout=self._patience())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def greet(self) -> None:
        """The first thing to do: a stopped store's kernel takes calls, so that the store itself must say a word."""
        self._send(_request(_HEALTH, b""))
        if self._reply()[0] != _FOUND:
            raise ConnectionError("the server is not a KV store")

    def close(self) -> None:
        self._socket.close()

    def interrupt(self) -> None:
        """Closes it: callers that wait on it lose the connection."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def ended(self) -> bool:
        """True if an idle socket is unusable: the store closed it, or sent something that no client asked for."""
        try:
            self._socket.settimeout(0)
            return self._socket.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except OSError:
            return True

    def exists(self, keys: Sequence[bytes], found: List[bool]) -> None:
        def take(i: int) -> None:
            reply = self._reply()
            found[i] = reply[0] == _FOUND
            self._waste(reply[1])

        self._pipeline(_EXIST, keys, take)

    def put(self, key: bytes, value: memoryview) -> None:
        self._send(_request(_PUT, key, len(value), _meta(key, value)))
        self._send(value)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], answers: List[int]) -> None:
        def take(i: int) -> None:
            code, length, *meta = self._reply()
            whole = code == _FOUND and length == len(into[i])
            if whole:
                self._fill(into[i])
                whole = tuple(meta) == _meta(keys[i], into[i])
            else:
                self._waste(length)
            answers[i] = _BAD if code == _FOUND and not whole else code

        self._pipeline(_GET, keys, take)

    def _pipeline(self, command: int, keys: Sequence[bytes], take: Any) -> None:
        """Asks for each key, and takes the replies in turn, some requests ahead of them."""
        asked = 0
        for i in range(len(keys)):
            if asked <= i + _WINDOW // 2 and asked < len(keys):
                ahead = keys[asked:i + _WINDOW]
                self._send(b"".join(_request(command, key) for key in ahead))
                asked += len(ahead)
            take(i)

    def _patience(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise _Late
        return min(left, self._silence)

    def _waited(self, why: Exception) -> None:
        if time.monotonic() >= self.deadline:
            raise _Late from why
        raise TimeoutError(f"not a byte for {self._silence} s") from why

    def _send(self, data: Any) -> None:
        left = memoryview(data)
        while left:
            self._socket.settimeout(self._patience())
            try:
                left = left[self._socket.send(left):]
            except socket.timeout as why:
                self._waited(why)

    def _fill(self, memory: memoryview) -> None:
        left = memory
        while left:
            self._socket.settimeout(self._patience())
            try:
                count = self._socket.recv_into(left)
            except socket.timeout as why:
                self._waited(why)
            if count == 0:
                raise ConnectionError("it closed the connection")
            left = left[count:]

    def _reply(self) -> Tuple[int, ...]:
        self._fill(memoryview(self._head))
        reply = _REPLY.unpack(self._head)
        if reply[0] not in (_FOUND, _MISSING) or reply[1] < 0:
            raise ConnectionError("it does not speak a KV store's protocol")
        return reply

    def _waste(self, count: int) -> None:
        room = memoryview(bytearray(min(count, 1 << 16)))
        while count > 0:
            self._fill(room[:count])
            count -= len(room[:count])


def _request(command: int, key: bytes, length: int = 0, meta: Tuple[int, ...] = _NO_META) -> bytes:
    form, dtype, one, two, three, four, location = meta
    return _REQUEST.pack(command, length, form, dtype, location, one, two, three, four, key.hex().encode().ljust(150))


def _meta(key: bytes, value: memoryview) -> Tuple[int, ...]:
    """What a value is checked by, as (format, dtype, 4 dimensions, location) of the wire: a CRC-32 that begins with the
    name's, and half of the name."""
    crc = zlib.crc32(value, zlib.crc32(key))
    return (_VERSION, *struct.unpack("<i4i", struct.pack("<I", crc) + key[:16]), len(value) & 0x7FFFFFFF)


def _flat(memory: Any) -> memoryview:
    view = memory if isinstance(memory, memoryview) else memoryview(memory)
    return view if view.format == "B" and view.ndim == 1 and view.contiguous else view.cast("B")
