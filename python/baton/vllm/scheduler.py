"""The side of the connector that lives in vLLM's scheduler: which blocks of which request are wanted, ready, or held.
It talks to the workers by Step, once for each step of the engine.

kv_transfer_params of a request at prefill: {"do_remote_decode": true}, and "transfer_id" if the caller has chosen one.
At decode: {"do_remote_prefill": true, "transfer_id", "remote_agent", "remote_address", "tp_size"}: prefill's answer
has them; a caller that knows them need not wait for that answer, and the two engines work at the same time. Without
tp_size, its tensor-parallel degree, prefill has as many as decode."""
from __future__ import annotations

import dataclasses
import logging
import uuid
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ..hand_off import Order, Run
from .groups import Group, there

log = logging.getLogger("baton.vllm")
_MOST_RANKS = 256  # that a peer is believed


@dataclasses.dataclass
class Step:
    """The scheduler's orders to the workers for one step."""

    orders: List[Order] = dataclasses.field(default_factory=list)
    saves: List[Tuple[str, List[Run]]] = dataclasses.field(default_factory=list)  # transfer, what is complete after it
    holds: List[Tuple[str, str]] = dataclasses.field(default_factory=list)        # transfer, request
    drops: List[str] = dataclasses.field(default_factory=list)                    # transfers
    forward: bool = True                                                          # the model runs


class _Sender:
    """A request whose KV is for another worker."""

    def __init__(self, transfer: str, prompt: int, groups: int) -> None:
        self.transfer, self.prompt = transfer, prompt
        self.blocks: List[List[int]] = [[] for _ in range(groups)]
        self.shared = False  # the transfer is another request's, too: whose blocks are meant, no side can tell


class Scheduler:
    def __init__(self, groups: List[Group], name: str, address: str, ranks: int = 1) -> None:
        self.groups, self.name, self.address, self.ranks = groups, name, address, ranks
        self._local: Dict[str, int] = {}       # request -> tokens that are here already
        self._senders: Dict[str, _Sender] = {}
        self._next = Step()

    def matched(self, request: Any, computed: int) -> Tuple[int, bool]:
        """How many tokens behind the first `computed` can be loaded; they come between steps. All but the last: its
        layers with a window look back farther than those of the next one, and vLLM computes it in any case."""
        params = request.kv_transfer_params or {}
        if not self._remote(request, params):
            return 0, False
        self._local[request.request_id] = computed
        wanted = len(request.prompt_token_ids or ()) - 1 - computed
        return (wanted, True) if wanted > 0 else (0, False)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """The request has its blocks."""
        params = request.kv_transfer_params or {}
        name = request.request_id
        if params.get("do_remote_decode") and name not in self._senders:
            transfer = str(params.get("transfer_id") or uuid.uuid4().hex)
            mine = self._senders[name] = _Sender(transfer, request.num_prompt_tokens, len(self.groups))
            for other, sender in self._senders.items():
                if sender is not mine and sender.transfer == transfer:
                    log.warning("requests %s and %s have one transfer_id, %s: neither is handed over", other, name, transfer)
                    self._next.drops += [] if sender.shared else [transfer]
                    mine.shared = sender.shared = True
        if self._remote(request, params):
            params["do_remote_prefill"] = False  # once: what fails is computed here
            computed, runs, tokens = self._local.pop(name, 0), None, []
            if external > 0:
                end = computed + external
                runs = [there(ids, computed // group.block_size, group.count(end))
                        for group, ids in zip(self.groups, blocks.get_block_ids())]
                tokens = [(run.first * group.block_size, end) for group, run in zip(self.groups, runs)]
            self._order(name, params, runs, tokens)

    def step(self, output: Any) -> Step:
        """The workers' orders for the step that was scheduled."""
        scheduled = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            self._save(new.req_id, new.block_ids, True, new.num_computed_tokens + scheduled[new.req_id])
        cached = output.scheduled_cached_reqs
        for i, request in enumerate(cached.req_ids):
            self._save(request, cached.new_block_ids[i] or (), request in cached.resumed_req_ids,
                       cached.num_computed_tokens[i] + scheduled[request])
        step, self._next = self._next, Step()
        step.forward = output.total_num_scheduled_tokens > 0
        return step

    def finished(self, request: Any, blocks: Sequence[List[int]]) -> Tuple[bool, Optional[Dict[str, Any]]]:
        """A request has ended: whether its blocks stay, and what its caller is told."""
        params = request.kv_transfer_params or {}
        self._local.pop(request.request_id, None)
        if self._remote(request, params):  # it ended before it began
            self._order(request.request_id, params, None, [])
        sender = self._senders.pop(request.request_id, None)
        if sender is None or sender.shared:
            return False, None
        if not any(blocks) or request.status.name not in ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"):
            self._next.drops.append(sender.transfer)
            return False, None
        self._next.holds.append((sender.transfer, request.request_id))
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": sender.transfer,
                      "remote_agent": self.name, "remote_address": self.address, "tp_size": self.ranks,
                      "remote_finished": True}

    def _save(self, request: str, blocks: Sequence[List[int]], anew: bool, tokens: int) -> None:
        sender = self._senders.get(request)
        if sender is None or sender.shared:
            return
        for known, new in zip(sender.blocks, blocks):
            known[:] = new if anew else known + new
        runs = []
        for group, known in zip(self.groups, sender.blocks):
            ready = group.count(sender.prompt) if tokens >= sender.prompt else tokens // group.block_size
            runs.append(there(known, group.needed(sender.prompt), ready))
        self._next.saves.append((sender.transfer, runs))

    def _order(self, request: str, params: Dict[str, Any], runs: Optional[List[Run]],
               tokens: List[Tuple[int, int]]) -> None:
        self._next.orders.append(Order(request, params["transfer_id"], params["remote_agent"], params["remote_address"],
                                       runs, tokens, params.get("tp_size", self.ranks),
                                       bool(params.get("remote_finished"))))

    def _remote(self, request: Any, params: Dict[str, Any]) -> bool:
        """True if the request's KV comes from another engine. KV that cannot be used is computed here instead."""
        if not params.get("do_remote_prefill"):
            return False
        wrong = [key for key in ("transfer_id", "remote_agent", "remote_address")
                 if not isinstance(params.get(key), str) or not params[key]]
        host, _, port = str(params.get("remote_address")).rpartition(":")
        if not wrong and not (host and port.isdecimal()):
            wrong = ["remote_address"]
        if type(params.get("tp_size", 1)) is not int or not 1 <= params.get("tp_size", 1) <= _MOST_RANKS:
            wrong.append("tp_size")
        if wrong:
            params["do_remote_prefill"] = False
            log.warning("request %s is computed here: its kv_transfer_params lack %s; pass on what prefill answered",
                        request.request_id, ", ".join(wrong))
        return not wrong
