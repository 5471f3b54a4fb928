"""The connector class that vLLM calls (KVConnectorBase_V1, as of 0.32). Its scheduler half uses Scheduler, its worker
half HandOff. Those make all decisions; this file only translates."""
from __future__ import annotations

import hashlib
import logging
from typing import Any, Dict, List, Optional, Set, Tuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (KVConnectorBase_V1, KVConnectorMetadata,
                                                               KVConnectorTransferResults, SupportsHMA)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from ..agent import Agent
from ..hand_off import HandOff, KvMemory, Limits, Shard
from .groups import groups_of
from .identity import checkpoint_of, identity_of, weights_digest
from .packing import kv_of, packings_of
from .scheduler import Scheduler, Step

log = logging.getLogger("baton.vllm")
_PATIENCE = 0.002  # s: an engine with nothing to compute waits so long for a load instead of spinning


class BatonMetadata(KVConnectorMetadata):
    def __init__(self, step: Step) -> None:
        self.step = step


class BatonStats(KVConnectorStats):
    """Loads that were complete: data["loads"] is what Done.loads has. A transfer's time is that of its reads, as it is
    NixlConnector's, here with the checksums; a load's is from the engine's order to its end."""

    data: Dict[str, Any]

    def reset(self) -> None:
        self.data = {"loads": [], "failed": 0}

    def aggregate(self, other: KVConnectorStats) -> "BatonStats":
        self.data = {key: self.data[key] + other.data[key] for key in ("loads", "failed")}
        return self

    def is_empty(self) -> bool:
        return not self.data.get("loads") and not self.data.get("failed")

    def reduce(self) -> Dict[str, Any]:
        size, whole, reading = (sum(load[i] for load in self.data["loads"]) for i in (0, 1, 3))
        count = max(1, len(self.data["loads"]))
        return {"Num successful transfers": len(self.data["loads"]), "Num failed transfers": self.data["failed"],
                "Avg xfer time (ms)": round(1e3 * reading / count, 3),
                "Avg MB per transfer": round(size / 2**20 / count, 3),
                "Throughput (MB/s)": round(size / 2**20 / reading, 1) if reading else 0,
                "Avg load time (ms)": round(1e3 * whole / count, 3)}


class BatonConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _log_like_vllm()
        self._groups = groups_of(kv_cache_config, vllm_config.cache_config.block_size)
        config = vllm_config.kv_transfer_config
        if getattr(config, "kv_load_failure_policy", "recompute") != "recompute":
            log.warning('requests fail when prefill does: set "kv_load_failure_policy": "recompute"')
        self._config = vllm_config
        self._extra = config.get_from_extra_config
        self._name = self._extra("name", None) or config.engine_id
        self._host, self._port = self._extra("host", "127.0.0.1"), int(self._extra("port", config.kv_port))
        self._ranks = vllm_config.parallel_config.tensor_parallel_size
        self._scheduler = Scheduler(self._groups, self._name, self._address(), self._ranks)  # not a worker's
        self._service: Any = None  # a HandOff, of a worker that has its caches
        self._layers: Dict[str, int] = {}
        self._stats = BatonStats()
        self._stats.reset()

    def _address(self) -> str:
        host = f"[{self._host}]" if ":" in self._host and self._host[0] != "[" else self._host
        return f"{host}:{self._port}"

    # --- in a worker

    def register_kv_caches(self, kv_caches: Dict[str, Any]) -> None:
        group_of = {name: i for i, group in enumerate(self._groups) for name in group.layers or kv_caches}
        caches = {name: cache for name, cache in kv_caches.items() if name in group_of}  # others use one of these
        number, ranks = self._config.parallel_config.rank, self._ranks
        shard = Shard(number % ranks, ranks, _heads(self._config.model_config), number // ranks)
        packings = packings_of(self._config, caches, [self._groups[group_of[name]].block_size for name in caches], shard)
        memory = KvMemory.of_tensors(caches, packings, [group_of[name] for name in caches])
        self._layers = {name: i for i, name in enumerate(caches)}
        self._group_of = group_of
        identity = model = self._extra("identity", None)
        if not identity:
            digest = weights_digest(self._config)
            identity = identity_of(self._config, memory, self._groups, digest)
            model = checkpoint_of(self._config, digest)
        about = {"model": model, "kv": kv_of(list(caches), packings, self._groups)}  # for a pair with Baton's own server
        listen = self._extra("listen_host", self._host if self._host in ("127.0.0.1", "localhost", "::1") else "*")
        agent = Agent(f"{self._name}/{number}", listen_host=listen, listen_port=self._port + number,
                      advertise=self._extra("advertise", ""), serve_metadata=True, settings=self._extra("settings", None))
        limits = Limits(float(self._extra("silence", 1.0)), float(self._extra("load_timeout", 60.0)))
        said = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._service = HandOff(agent, memory, said, limits, float(self._extra("lease", 60.0)), shard=shard, about=about)
        log.info("Baton's agent %s listens on port %d, for %d layers in %d groups; engines have in common with it, as "
                 "%s: %s", agent.name, agent.port, len(caches), len(self._groups), said, identity)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._get_connector_metadata().step
        for order in step.orders:
            self._service.loads.start(order)
        for transfer in step.drops:
            self._service.sends.drop(transfer)
        for transfer, request in step.holds:
            self._service.sends.hold(transfer, request)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is not scheduled before its load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if layer_name not in self._layers:
            return
        for transfer, runs in self._get_connector_metadata().step.saves:
            self._service.sends.save(transfer, self._layers[layer_name], runs[self._group_of[layer_name]])

    def wait_for_save(self) -> None:
        """Nothing: the blocks of a save stay until get_finished() names the request."""

    def get_transfer_results(self, finished_req_ids: Set[str]) -> KVConnectorTransferResults:
        idle = self.has_connector_metadata() and not self._get_connector_metadata().step.forward
        loads = self._service.loads
        ended = loads.take(_PATIENCE if idle and loads.busy() else 0)
        self._stats.data["loads"] += ended.loads
        self._stats.data["failed"] += len(ended.requests) - len(ended.loads)
        return KVConnectorTransferResults(finished_sending=self._service.sends.finished(),
                                          finished_recving=ended.requests, failed_recving=ended.failed)

    def get_kv_connector_stats(self) -> Optional[BatonStats]:
        if self._service is None or self._stats.is_empty():
            return None
        stats, self._stats = self._stats, BatonStats()
        self._stats.reset()
        return stats

    def shutdown(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    # --- in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Tuple[int, bool]:
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> BatonMetadata:
        return BatonMetadata(self._scheduler.step(scheduler_output))

    def request_finished_all_groups(self, request: Any,
                                    block_ids: Tuple[List[int], ...]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        return self._scheduler.finished(request, block_ids)

    @classmethod
    def build_kv_connector_stats(cls, data: Optional[Dict[str, Any]] = None) -> BatonStats:
        stats = BatonStats()
        stats.reset()
        stats.data.update(data or {})
        return stats


def _heads(model: Any) -> int:
    """Of K and V in the whole model: of latents (MLA) all ranks hold the same."""
    return 1 if getattr(model, "use_mla", False) else model.get_total_num_kv_heads()


def _log_like_vllm() -> None:
    """Sends this package's log lines where vLLM's go, unless the program has configured the logger."""
    theirs = logging.getLogger("vllm")
    for ours in (log, logging.getLogger("baton.hand_off")):
        if theirs.handlers and not ours.hasHandlers():
            ours.handlers, ours.propagate = list(theirs.handlers), False
            ours.setLevel(theirs.getEffectiveLevel())
