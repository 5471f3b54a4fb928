"""vLLM's second tier in a store: a tier of its TieringOffloadingSpec, chosen by configuration (seen with vLLM 0.32).

    --kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
      "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [
        {"type": "BatonTier", "module_path": "baton.kv_store.vllm_tier", "store": "10.0.0.7:65432"}]}}'

vLLM keeps chunks of blocks in host memory, puts every new one here too, and asks here for those that it has not. All
calls are its scheduler's and return at once; threads do the work.
"""
from __future__ import annotations

import dataclasses
import json
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Collection, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import vllm
from vllm.v1.kv_offload.base import Locality, LookupResult, RequestOffloadingContext
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from .client import KvStore
from .names import Names, names_of

log = logging.getLogger("baton.kv_store")


class _Lookup:
    """The known state of a key, kept while a request that asked for it exists."""

    def __init__(self) -> None:
        self.verdict: Optional[bool] = None
        self.requests: Set[str] = set()


class _Job(NamedTuple):
    number: int
    keys: List[bytes]  # vLLM's
    memory: List[memoryview]
    load: bool


class BatonTier(SecondaryTierManager):
    """The tier in `baton kv_store --lm-port`.

    store      HOST:PORT of that
    names      what vLLM does not tell: "model" or "weights" in place of the model that vLLM was given; "tokenizer", "adapter",
               "salt", "dtype", "layout" are added to what counts
    threads    that load, and as many that store
    locality   as of vLLM's own tiers: "LOCAL" or "REMOTE"
    silence, timeout, retry   as of KvStore
    """

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, *, store: str, names: Optional[Dict[str, Any]] = None,
                 threads: int = 2, locality: Optional[str] = None, **limits: float) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality else None
        self._names = names_of_engine(offloading_spec.config, self.block_size_bytes, names or {})
        self._store = KvStore(store, **limits)
        self._memory = primary_kv_view.cast("B")
        self._lookups: Dict[bytes, _Lookup] = {}        # of the scheduler's thread, as what follows
        self._asked_by: Dict[str, Set[bytes]] = {}      # a request's keys
        self._to_ask: List[bytes] = []
        self._known: "queue.SimpleQueue[Tuple[List[bytes], List[bool]]]" = queue.SimpleQueue()
        self._ended: "queue.SimpleQueue[Tuple[_Job, List[bool], float]]" = queue.SimpleQueue()
        self._running, self._changed = 0, threading.Condition()
        # None waits behind another kind: a lookup decides what a step may do, a load what a request waits for.
        self._asker, self._loader, self._storer = (ThreadPoolExecutor(count, thread_name_prefix=f"baton-tier-{name}")
                                                   for name, count in (("ask", 1), ("load", threads), ("store", threads)))

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """HIT or MISS when it is known, RETRY while it is being asked. A store that is away has nothing, at once."""
        self._learn()
        found = self._lookups.get(key)
        if found is None:
            if not self._store.here():
                return LookupResult.MISS
            found = self._lookups[key] = _Lookup()
            self._to_ask.append(key)
        found.requests.add(req_context.req_id)
        self._asked_by.setdefault(req_context.req_id, set()).add(key)
        if found.verdict is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found.verdict else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        """Asks for what this step has looked up, all at once."""
        if self._to_ask:
            keys, self._to_ask = self._to_ask, []
            self._asker.submit(self._ask, keys)

    def submit_store(self, job_metadata: Any) -> None:
        """Puts chunks that the store has not."""
        self._submit(self._storer, self._job(job_metadata, False))

    def submit_load(self, job_metadata: Any) -> None:
        """Reads chunks into the first tier; until the job is reported, and never after."""
        self._submit(self._loader, self._job(job_metadata, True))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Jobs that have ended. Chunks that could not be loaded are a miss for all who have asked so far, so that vLLM
        computes them."""
        results = []
        for job, right, seconds in _all_of(self._ended):
            here = [key for key, one in zip(job.keys, right) if one]
            if job.load and len(here) < len(job.keys):
                for key, one in zip(job.keys, right):
                    if not one and key in self._lookups:
                        self._lookups[key].verdict = False
            results.append(JobResult(job.number, success=len(here) == len(job.keys),
                                     successful_keys=tuple(here) if job.load and here else None, transfer_time=seconds,
                                     transfer_bytes=len(here) * self.block_size_bytes))
        return results

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Only new chunks are put here."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        """Forgets what only this request has asked."""
        for key in self._asked_by.pop(req_context.req_id, ()):
            found = self._lookups[key]
            found.requests.discard(req_context.req_id)
            if not found.requests:
                del self._lookups[key]

    def drain_jobs(self) -> None:
        """Returns when no job is under way; none takes longer than `timeout`, and none begins while the store is away."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def shutdown(self) -> None:
        """Ends what runs; afterwards no memory is touched or held."""
        self._store.close()
        for pool in (self._asker, self._loader, self._storer):
            pool.shutdown()
        self._ended = queue.SimpleQueue()
        self._memory.release()
        counts = self._store.counts()
        log.info("the tier in %s: %s", self._store.store, ", ".join(f"{n} {name}" for name, n in counts.items()))

    def _learn(self) -> None:
        for keys, found in _all_of(self._known):
            for key, here in zip(keys, found):
                lookup = self._lookups.get(key)
                if lookup is not None and lookup.verdict is None:
                    lookup.verdict = here

    def _ask(self, keys: List[bytes]) -> None:
        found = [False] * len(keys)
        try:
            found = self._store.exists([self._names.key(key) for key in keys])
        except Exception:  # the requests wait for an answer
            log.exception("a lookup of %d chunks failed", len(keys))
        self._known.put((keys, found))

    def _job(self, job: Any, load: bool) -> _Job:
        size = self.block_size_bytes
        return _Job(job.job_id, list(job.keys),
                    [self._memory[int(chunk) * size:(int(chunk) + 1) * size] for chunk in job.chunk_ids], load)

    def _submit(self, pool: ThreadPoolExecutor, job: _Job) -> None:
        with self._changed:
            self._running += 1
        pool.submit(self._run, job)

    def _run(self, job: _Job) -> None:
        begin, right = time.monotonic(), [False] * len(job.keys)
        try:
            names = [self._names.key(key) for key in job.keys]
            right = (self._store.get if job.load else self._store.put)(names, job.memory)
        except Exception:  # the chunks stay pinned until the job ends
            log.exception("a job of %d chunks failed", len(job.keys))
        for memory in job.memory:
            memory.release()
        self._ended.put((job, right, time.monotonic() - begin))
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def names_of_engine(config: Any, chunk_bytes: int, said: Dict[str, Any]) -> Names:
    """Names for the chunks of an engine, from vLLM's OffloadingConfig. A chunk holds the blocks of all workers."""
    said = dict(said)
    if not said.get("model") and not said.get("weights"):
        said["model"] = config.model.name
    parallel, cache = config.parallel, config.cache
    layout = json.dumps([getattr(vllm, "__version__", ""), chunk_bytes, [dataclasses.astuple(one) for one in config.groups],
                         cache.tokens_per_hash, cache.blocks_per_chunk, config.worker_kv_bytes_per_block,
                         getattr(config, "replicated_layout", None), getattr(config, "canonical_layout", None),
                         str(getattr(config, "kv_cache_layout", None))], sort_keys=True)
    shard = json.dumps([parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size])
    try:
        return names_of(said, dtype=str(config.model.dtype), layout=layout, shard=shard)
    except ValueError as why:
        raise ValueError(f"{why}; the tier's \"names\" says so, as {{\"weights\": \"...\"}}") from None


def _all_of(things: Any) -> Collection[Any]:
    taken = []
    try:
        while True:
            taken.append(things.get_nowait())
    except queue.Empty:
        return taken
