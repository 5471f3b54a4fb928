"""The hand-over of requests from a worker that computes their prompts (prefill) to the one that goes on with them
(decode): who asks for what, which layers have arrived, who has died, when blocks are free again.

    connector = baton.KvConnector("decode-0")
    connector.register_cache(layout)                                   # a baton.KvLayout, of memory of the engine's
    with connector.load(address_of_prefill, tokens=[1, 15, 8], blocks=[3, 1]) as load:
        load.wait(layer=0)                                             # before layer 0 is computed; and so on
        first_token = await load                                       # all layers, and what prefill gave with them

    connector = baton.KvConnector("prefill-0", allow_pull=True)        # the other side; connector.address goes to decode
    connector.register_cache(layout)
    job = await connector.job()                                        # or: connector.next_job()
    for layer in range(layers):
        job.save_layer(layer, blocks)                                  # sent, or offered, while the next one is computed
    job.finish(payload=first_token)
    await job.saved()                                                  # the blocks are free again

A connector may be both sides. The two caches may lie differently (KvLayout); types are equal. Calls may come from any
thread. A thread of the library's moves bytes, renews leases and answers, whatever Python does meanwhile."""
from __future__ import annotations

import array
import collections
import contextlib
import ctypes
import itertools
import operator
import threading
import time
import weakref
from typing import Any, Callable, Deque, Dict, Iterable, List, Mapping, Optional, Union

from . import _library, _loop
from ._handle import Closing, Handle
from ._library import defaults, lib, take
from .agent import _SLICE, _bytes, _in_slices, _reached, _text, _within
from .errors import BatonError, BatonTimeoutError, InvalidParamError, NotFoundError, number_of
from .kv import KvLayout

_LONGEST = 2 ** 63 - 1


class KvLoad(_loop.Awaited[bytes], Closing):
    """KV that was asked for. Its blocks stay as they are until it has ended: close(), or the end of `with`."""

    def __init__(self, connector: "KvConnector", number: int) -> None:
        self.connector, self.number = connector, number
        self._over = False

    @property
    def layers(self) -> int:
        """How many layers, counted from 0, have arrived completely."""
        layers = ctypes.c_uint32()
        self.connector._open.ask(lib.kv_load_state, self.number, ctypes.byref(layers), None)
        return layers.value

    def done(self) -> bool:
        """Whether all layers have arrived. Raises why the KV will never arrive; CancelledError: its time has run out."""
        return self.connector._open.call(lib.kv_load_state, self.number, None) != _library.IN_PROGRESS

    def wait(self, layer: Optional[int] = None, timeout: Optional[float] = None) -> None:
        """Waits for this layer; None: all layers. Raises why it will never arrive. BatonTimeoutError: the load continues."""
        last = self.connector.layers - 1 if layer is None else _within(layer, 2 ** 32 - 1, "layer")
        self.connector._in_slices(lib.kv_load_wait, timeout, self.number, last)

    async def layer(self, layer: int) -> None:
        """wait() for asyncio."""
        await self.connector._until(lambda: self.layers > layer or self.done())

    async def _wait(self) -> bytes:
        given: List[bytes] = []

        def look() -> bool:
            if self.done() and not given:
                payload = self.payload()
                given.extend([] if payload is None else [payload])
            return bool(given)
        await self.connector._until(look)
        return given[0]

    def payload(self) -> Optional[bytes]:
        """What prefill sent with the KV: the first token, sampling state. None: it has not finished."""
        out = _library.Bytes()
        if self.connector._open.call(lib.kv_load_payload, self.number, ctypes.byref(out)) == _library.IN_PROGRESS:
            return None
        return take(out)

    def renew(self, timeout: float) -> None:
        """Sets its deadline to this many seconds from now, here and at prefill."""
        self.connector._open.call(lib.kv_load_renew, self.number, _nanoseconds(timeout, "timeout"))

    def failed_blocks(self) -> List[int]:
        """Which of its blocks do not hold all of their KV, as far as is known. Of a load that failed, the others may be
        kept. Before it has ended: NotFoundError afterwards."""
        count, room = ctypes.c_size_t(), 64
        while True:
            out = (ctypes.c_uint32 * room)()
            self.connector._open.call(lib.kv_load_failed_blocks, self.number, out, room, ctypes.byref(count))
            if count.value <= room:
                return list(out[:count.value])
            room = count.value

    def end(self) -> bool:
        """Ends it, complete or not: prefill is told to stop. True: no byte can arrive any more, and its blocks are free.
        False: not yet, call it again."""
        if not self._over:
            self._over = self.connector._open.call(lib.kv_load_end, self.number) != _library.IN_PROGRESS
        return self._over

    def close(self, timeout: Optional[float] = None) -> None:
        """end(), then waits until its blocks are free. BatonTimeoutError: they are not."""
        self.connector._block_until(self.end, timeout)

    async def ended(self) -> None:
        """end(), awaited until its blocks are free."""
        await self.connector._until(self.end)

    async def __aenter__(self) -> "KvLoad":
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.ended()


class KvJob:
    """A request whose prompt is to be computed. finish() it in any case, wanted or not."""

    def __init__(self, connector: "KvConnector", number: int, request: int, decode: str, key: str, tokens: List[int],
                 first_token: int, loads_of_key: int) -> None:
        self.connector, self.number = connector, number
        self.request, self.decode = request, decode  # the load's number at decode, and the name of who asks
        self.key, self.loads_of_key = key, loads_of_key
        self.tokens, self.first_token = tokens, first_token  # of the sequence; send from this one on

    @property
    def wanted(self) -> bool:
        """False: decode gave it up or died, or no load came during its lease. Stop computing it."""
        return bool(self.connector._open.ask(lib.kv_job_is_wanted, self.number))

    def save_layer(self, layer: int, blocks: Iterable[int], first_block: int = 0) -> None:
        """Blocks [first_block, ...) of the sequence are computed in this layer, and lie in these blocks of the cache.
        Each is sent once. CancelledError: no worker wants the job any more."""
        listed = _numbers(blocks, "I", "a block")
        self.connector._open.call(lib.kv_job_save_layer, self.number, _within(layer, 2 ** 32 - 1, "layer"),
                                  _within(first_block, 2 ** 32 - 1, "first_block"), listed.buffer_info()[0], len(listed))

    def renew(self, lease: float) -> None:
        """Its loads may come for this many more seconds."""
        self.connector._open.call(lib.kv_job_renew, self.number, _nanoseconds(lease, "lease"))

    def finish(self, payload: bytes = b"", error: Union[None, str, BaseException] = None) -> None:
        """All is saved, and `payload` (at most 4096 bytes: the first token, sampling state) goes with it. Or, with an
        error, nothing more will come: decode gets a BatonError as it is, else an UnknownError with this text."""
        given = _bytes(payload, "the payload")
        if given and error is None:
            self.connector._open.call(lib.kv_job_give_payload, self.number, given, len(given))
        outcome = 0 if error is None else number_of(error)
        why = None if error is None else (str(error) or type(error).__name__).encode().replace(b"\0", b" ")
        self.connector._open.call(lib.kv_job_finish, self.number, outcome, why)

    def is_saved(self) -> bool:
        """After finish(): whether no byte of it moves and no load of it can come any more, so its blocks are free."""
        return self.connector._open.call(lib.kv_job_state, self.number) != _library.IN_PROGRESS

    def wait_saved(self, timeout: Optional[float] = None) -> None:
        """Waits for is_saved(). BatonTimeoutError: it is not."""
        self.connector._block_until(self.is_saved, timeout)

    async def saved(self) -> None:
        """wait() for asyncio."""
        await self.connector._until(self.is_saved)


class _Wish:
    """What a caller awaits, as _loop has transfers."""

    def __init__(self, connector: "KvConnector", look: Callable[[], bool]) -> None:
        self.agent, self.done = connector, look

    def abort(self) -> None:
        pass


class KvConnector(Closing):
    """One worker with its cache. `allow_pull`, of prefill: loads may read its blocks, under a lease of `max_lease` seconds
    at most (0: 60 s). `serialized`: nothing leaves before finish(), to compare. The others as for an Agent."""

    def __init__(self, name: Union[str, bytes], *, providers: Optional[List[str]] = None, require: str = "",
                 key_file: str = "", listen_host: str = "", listen_port: int = 0, max_transfers: int = 0,
                 settings: Optional[Mapping[str, Any]] = None, allow_pull: bool = False, serialized: bool = False,
                 max_lease: float = 0, advertise: str = "") -> None:
        self._open = Handle(None, "connector")
        options = defaults(_library.KvConnectorOptions, lib.kv_connector_options_init)
        options.name = _text(name, "a connector's name")
        _reached(options, providers, require, key_file, listen_host, listen_port, settings, advertise)
        options.max_transfers = _within(max_transfers, 2 ** 32 - 1, "max_transfers")
        options.allow_pull, options.serialized = allow_pull, serialized
        options.max_lease = _nanoseconds(max_lease, "max_lease")
        self._open.make(lib.kv_connector_create, ctypes.byref(options))
        self.name = options.name.decode()
        self.threaded = True
        self.layers = 0  # of the cache
        self._kept: Any = None
        self._loads = itertools.count(1)
        self._taking_jobs = threading.Lock()
        self._given_back: Deque[KvJob] = collections.deque()  # jobs whose taker was cancelled
        weakref.finalize(self, self._open.destroy)

    def close(self) -> None:
        """Ends what is under way. Nothing touches the cache afterwards."""
        self._open.destroy()
        self._given_back.clear()
        _loop.wake(self)

    def register_cache(self, layout: KvLayout, keep: Any = None) -> None:
        """The engine's memory in which `layout` lies, once, before all else. It has to outlive the connector; what `keep`
        is does, with the buffers that belong to it."""
        self._open.call(lib.kv_connector_register_cache, layout._layout)
        self.layers = sum(len(group.layers) for group in layout.groups)
        self._kept = keep

    @property
    def address(self) -> str:
        """Its address, which load() of other connectors takes."""
        return self._open.bytes_of(lib.kv_connector_address).decode()

    @property
    def event_fd(self) -> int:
        """Readable when a load or a job may have got on; read 8 bytes to clear it. `await` reads it."""
        return self._open.ask(lib.kv_connector_event_fd)

    def wait(self, timeout: Optional[float] = None) -> None:
        """Until a load or a job may have got on since this returned last. BatonTimeoutError: none has."""
        self._in_slices(lib.kv_connector_wait, timeout)

    def stats(self) -> Dict[str, int]:
        """Counters."""
        return self._open.counters_of(lib.kv_connector_get_stats, _library.KvConnectorStats, None)

    def route(self) -> str:
        """The route to the last peer, for people."""
        stats = _library.KvConnectorStats(ctypes.sizeof(_library.KvConnectorStats))
        return self._open.bytes_of(lib.kv_connector_get_stats, ctypes.byref(stats)).decode()

    # --- decode

    def load(self, prefill: Union[str, Iterable[str]], tokens: Iterable[int], blocks: Iterable[int], *,
             number: Optional[int] = None, key: str = "", loads_of_key: int = 1, first_token: int = 0,
             timeout: float = 60, silence: float = 0, lease: float = 10, pull: bool = False) -> KvLoad:
        """Asks for the KV of tokens [first_token, ...) of a sequence that begins with `tokens`; it goes into these blocks, in
        order, group after group. `prefill`: the address of a connector, or those of a tensor-parallel group in the order of
        ranks. `key` names the request at both ends: loads with the same key are one job, of which `loads_of_key` come to
        one prefill worker. It fails `timeout` seconds from now, and when prefill says nothing for `silence` (0: any time),
        not even that it lives. `pull`: read prefill's blocks instead of having these written; prefill holds its blocks for
        `lease` when it hears nothing from here."""
        several = [] if isinstance(prefill, str) else [_text(one, "an address") for one in prefill]
        listed, goals = _numbers(tokens, "i", "a token"), _numbers(blocks, "I", "a block")
        wanted = _library.KvLoad(size=ctypes.sizeof(_library.KvLoad),
                                 id=next(self._loads) if number is None else _within(number, 2 ** 64 - 1, "number"),
                                 prefill=_text(prefill, "an address") if isinstance(prefill, str) else None,
                                 shards=(ctypes.c_char_p * max(1, len(several)))(*several), shard_count=len(several),
                                 key=_text(key, "the key") or None, tokens=listed.buffer_info()[0], token_count=len(listed),
                                 blocks=goals.buffer_info()[0], block_count=len(goals),
                                 first_token=_within(first_token, 2 ** 32 - 1, "first_token"),
                                 loads_of_key=_within(loads_of_key, 2 ** 32 - 1, "loads_of_key"),
                                 timeout=_nanoseconds(timeout, "timeout"), silence=_nanoseconds(silence, "silence"),
                                 lease=_nanoseconds(lease, "lease"), pull=pull)
        self._open.call(lib.kv_load_start, ctypes.byref(wanted))
        return KvLoad(self, wanted.id)

    # --- prefill

    def next_job(self) -> Optional[KvJob]:
        """The next request of a decode worker; None: no request is waiting."""
        out = _library.KvJob(ctypes.sizeof(_library.KvJob))
        with self._taking_jobs:  # what it points at is gone with the next call
            if self._given_back:
                return self._given_back.popleft()
            try:
                self._open.call(lib.kv_job_next, ctypes.byref(out))
            except NotFoundError:
                return None
            return KvJob(self, out.job, out.request, out.decode.decode(errors="replace"), out.key.decode(errors="replace"),
                         out.tokens[:out.token_count], out.first_token, out.loads_of_key)

    async def job(self) -> KvJob:
        """next_job() for asyncio. If cancelled, it takes no request: the next call gets it."""
        found: List[KvJob] = []

        def look() -> bool:
            job = None if found else self.next_job()
            found.extend([] if job is None else [job])
            return bool(found)
        try:
            await self._until(look)
        except BaseException:  # it was taken, and then this task was cancelled
            if found:
                self._give_back(found[0])
            raise
        return found[0]

    def _give_back(self, job: KvJob) -> None:
        self._given_back.append(job)  # without the lock: a coroutine may end anywhere, when it is collected
        with contextlib.suppress(BatonError):
            # Changes nothing, but wakes all waiters, in threads and loops, as every call of this kind.
            self._open.call(lib.kv_job_give_payload, job.number, b"", 0)

    def bind(self, key: str, tokens: int, *, loads: int = 1, lease: float = 60) -> KvJob:
        """Opens the job of a key that no load has named yet, of so many tokens: `loads` of them come within `lease` seconds.
        What is saved leaves when they do."""
        binding = _library.KvBinding(ctypes.sizeof(_library.KvBinding), _text(key, "the key"),
                                     _within(tokens, 2 ** 32 - 1, "tokens"), _within(loads, 2 ** 32 - 1, "loads"),
                                     _nanoseconds(lease, "lease"))
        return KvJob(self, self._open.number_of(lib.kv_job_bind, ctypes.byref(binding)), 0, "", key, [], 0, loads)

    # --- waiting

    def _in_slices(self, function: Any, timeout: Optional[float], *arguments: Any) -> None:
        _in_slices(self._open.call, timeout, function, *arguments)

    def _block_until(self, look: Callable[[], bool], timeout: Optional[float]) -> None:
        end = None if timeout is None else time.monotonic() + _nanoseconds(max(timeout, 0), "timeout") / 1e9
        while not look():
            span = _SLICE // 10  # others may wait(), and take what happened
            if end is not None:
                left = end - time.monotonic()
                if left <= 0:
                    raise BatonTimeoutError("it has not ended yet: keep its blocks as they are")
                span = min(_nanoseconds(left, "timeout"), span)
            with contextlib.suppress(BatonTimeoutError):
                self._open.call(lib.kv_connector_wait, span)

    async def _until(self, look: Callable[[], bool]) -> None:
        await _loop.wait_for(_Wish(self, look))


def _nanoseconds(seconds: float, what: str) -> int:
    if not 0 <= seconds:
        raise InvalidParamError(f"{what} is {seconds}: give seconds, 0 or more")
    return min(int(seconds * 1e9), _LONGEST) if seconds < 1e9 else _LONGEST


def _numbers(values: Iterable[int], kind: str, what: str) -> "array.array[int]":
    """As 32-bit numbers; also of numpy's arrays."""
    try:
        return array.array(kind, [operator.index(value) for value in values])
    except OverflowError as why:
        raise InvalidParamError(f"{what} does not fit into 32 bits: {why}") from None
