"""BatonConnector whose decode finds one bit of every load flipped: what a network or a memory may do. By configuration
"kv_connector_module_path": "flipping"."""
import bisect
import ctypes
import random

from baton.vllm.connector import BatonConnector as _Right


class BatonConnector(_Right):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        agent, memory, dice = self._service.agent, self._service.memory, random.Random(1)
        read = agent.read

        def flipped(local, mine, remote, theirs):
            return _Flipped(read(local, mine, remote, theirs), memory, dice.choice(mine), dice)

        agent.read = flipped


class _Flipped:
    """A transfer; when it has ended, one bit of one of its blocks is another."""

    def __init__(self, transfer, memory, row, dice):
        self.transfer, self.abort, self.release = transfer, transfer.abort, transfer.release
        number = bisect.bisect_right(memory.starts, row) - 1
        layer = memory.layers[number]
        self.at = layer.address + (row - memory.starts[number]) * layer.stride + dice.randrange(layer.bytes)
        self.bit = 1 << dice.randrange(8)

    def done(self):
        if not self.transfer.done():
            return False
        ctypes.c_uint8.from_address(self.at).value ^= self.bit
        return True
