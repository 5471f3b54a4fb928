"""LMCache's second level in a store: its `native_plugin` adapter, chosen by configuration (seen with LMCache 0.5.6).

    {"type": "native_plugin", "module_path": "baton.kv_store.lmcache", "class_name": "BatonStore",
     "adapter_params": {"store": "10.0.0.7:65432", "models": {"meta-llama/Llama-3.1-8B":
       {"model": "/models/llama-3.1-8b", "dtype": "bfloat16", "layout": "vLLM 0.32, 256 tokens"}}}}

LMCache names a block by the model's name, the worker, the group of layers, the chained hash of its tokens and the salt
of its user. What it does not say, configuration must: which weights that name stands for, their dtype and layout.
"""
from __future__ import annotations

import importlib.metadata
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence

from .client import KvStore
from .names import Names, names_of

log = logging.getLogger("baton.kv_store")
_SHORTEST_HASH = 16  # bytes: Python's own hash() has 8, and prompts that collide can be made


class Completion(NamedTuple):
    """A batch that has ended, as drain_completions() says it. `results`: for each of its keys."""

    future_id: int
    ok: bool
    error: str
    results: Optional[List[bool]]


class BatonStore:
    """The interface that LMCache's NativeConnectorL2Adapter requires of a native connector. Submitting returns at
    once; `workers` threads do the work, and the memory of a batch is touched until its completion is there, never
    after.

    store    HOST:PORT of `baton kv_store --lm-port`
    models   for each name of a model: "model", where its weights lie, or "weights", what names them; "dtype"; "layout",
             whatever tells how a block's bytes are ordered: engine, version, tokens; and "tokenizer", "adapter", "salt",
             where blocks depend on them. A model that is not here has no blocks in the store
    silence, timeout, retry   as of KvStore
    """

    def __init__(self, store: str, models: Dict[str, Dict[str, Any]], workers: int = 4, **limits: float) -> None:
        if not models:
            raise ValueError('no "models": without one, nothing can be named')
        self._names = {name: _names_of_model(name, said) for name, said in models.items()}
        self._unknown: Dict[str, str] = {}  # models and hashes that have been complained of
        self._lock = threading.Lock()
        self._next = 1
        self._done: List[Completion] = []
        self._closed = False
        self._woken, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._store = KvStore(store, **limits)
        except BaseException:
            self._close_pipe()
            raise
        self._pool = ThreadPoolExecutor(max(1, int(workers)), thread_name_prefix="baton-lmcache")

    def event_fd(self) -> int:
        """Readable while there are completions."""
        return self._woken

    def submit_batch_get(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Reads blocks into memory. The completion says of each whether it is there, whole."""
        return self._submit(keys, lambda known: self._store.get(known.keys, [memoryviews[i] for i in known.where]))

    def submit_batch_set(self, keys: Sequence[str], memoryviews: Sequence[Any]) -> int:
        """Writes blocks. The completion is ok if all of them were kept."""
        return self._submit(keys, lambda known: self._store.put(known.keys, [memoryviews[i] for i in known.where]),
                            whole=True)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Asks which blocks are there."""
        return self._submit(keys, lambda known: self._store.exists(known.keys))

    def drain_completions(self) -> List[Completion]:
        """The operations that ended since the last call."""
        with self._lock:
            try:
                while not self._closed and os.read(self._woken, 4096):
                    pass
            except BlockingIOError:
                pass
            done, self._done = self._done, []
            return done

    def close(self) -> None:
        """Ends what runs; afterwards no memory is touched."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._store.close()
        self._pool.shutdown()
        self._close_pipe()

    def report(self) -> Dict[str, int]:
        """Counts, as of KvStore."""
        return self._store.counts()

    def _submit(self, keys: Sequence[str], work: Callable[["_Known"], List[bool]], whole: bool = False) -> int:
        with self._lock:
            if self._closed:
                raise ValueError("the connector is closed")
            number, self._next = self._next, self._next + 1
            self._pool.submit(self._run, number, list(keys), work, whole)
            return number

    def _run(self, number: int, keys: List[str], work: Callable[["_Known"], List[bool]], whole: bool) -> None:
        results, error = [False] * len(keys), ""
        try:
            known = self._known(keys)
            for i, right in zip(known.where, work(known)):
                results[i] = right
        except Exception as why:  # LMCache waits for every batch
            log.exception("a batch of %d blocks failed", len(keys))
            error = str(why)
        if whole and not error and not all(results):
            error = f"{results.count(False)} of {len(keys)} blocks were not kept"
        with self._lock:
            self._done.append(Completion(number, not error, error, results))
            try:
                os.write(self._wake, b"x")
            except BlockingIOError:  # it is readable
                pass

    def _known(self, keys: Sequence[str]) -> "_Known":
        where, found = [], []
        for i, key in enumerate(keys):
            name = self._name(key)
            if name is not None:
                where.append(i)
                found.append(name)
        return _Known(where, found)

    def _name(self, key: str) -> Optional[bytes]:
        """A block's name in the store. LMCache says model@rank@group@hash or model@rank@group@hash@salt."""
        model, *rest = key.split("@")
        if len(rest) not in (3, 4):
            return self._complain(model, f"{key!r} is not how LMCache 0.5 names a block")
        rank, group, hexed = rest[:3]
        if model not in self._names:
            return self._complain(model, f'{model!r} is not among "models": its blocks are not kept')
        if len(hexed) < 2 * _SHORTEST_HASH:
            return self._complain(hexed[:0], "hashes of tokens are too short for blocks that others share: let LMCache's "
                                             '--hash-algorithm be "blake3"')
        return self._names[model].key(bytes.fromhex(hexed), rank, group, *rest[3:])

    def _complain(self, about: str, text: str) -> Optional[bytes]:
        """No name, and why: once."""
        if about not in self._unknown:
            self._unknown[about] = text
            log.warning("%s", text)
        return None

    def _close_pipe(self) -> None:
        os.close(self._woken)
        os.close(self._wake)


class _Known(NamedTuple):
    where: List[int]  # in the batch
    keys: List[bytes]


def _names_of_model(name: str, said: Dict[str, Any]) -> Names:
    missing = [field for field in ("dtype", "layout") if not said.get(field)]
    if missing:
        raise ValueError(f'model {name!r} has no {" and no ".join(missing)}: LMCache does not tell a connector, and blocks '
                         "of two would have one name")
    return names_of(said, layout=f"LMCache {_version()}")


def _version() -> str:
    try:
        return importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return "of nowhere"
