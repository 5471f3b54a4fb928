"""BatonConnector whose decode finds one bit of every load flipped: what a network or a memory may do. By configuration
"kv_connector_module_path": "flipping"."""
import ctypes
import random

import baton
from baton.vllm.connector import BatonConnector as _Right


class BatonConnector(_Right):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        loads, post, dice = self._service.loads, baton.KvPlan.post, random.Random(1)

        def flipped(plan, mine, theirs, tokens, local_first_block, **how):
            """Of the first of these tokens' block."""
            read = post(plan, mine, theirs, tokens=tokens, local_first_block=local_first_block, **how)
            (layer,) = {number for peer in loads._peers.values() for number, passage in enumerate(peer.passages or ())
                        if passage.plan is plan}
            there = loads.memory.layers[layer]
            return _Flipped(read, there.block(mine[tokens[0] // there.tokens - local_first_block]), dice)

        baton.KvPlan.post = flipped


class _Flipped:
    """A transfer; when it has ended, one bit of one of its blocks is another."""

    def __init__(self, transfer, block, dice):
        self.transfer, self.abort, self.release = transfer, transfer.abort, transfer.release
        self.at, self.bit = ctypes.addressof(block) + dice.randrange(len(block)), 1 << dice.randrange(8)

    def done(self):
        if not self.transfer.done():
            return False
        ctypes.c_uint8.from_address(self.at).value ^= self.bit
        return True
