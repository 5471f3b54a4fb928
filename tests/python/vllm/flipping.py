"""BatonConnector at whose prefill one bit of every request is another when its checksums are taken: what a network or a
memory may do to what decode reads. The bit is put right when decode has given the blocks back. By configuration
"kv_connector_module_path": "flipping"."""
import ctypes
import random

from baton.vllm.connector import BatonConnector as _Right


class BatonConnector(_Right):
    def register_kv_caches(self, kv_caches):
        super().register_kv_caches(kv_caches)
        sends, layers, dice = self._service.sends, self._service.memory.layers, random.Random(1)
        save, hold, finished, saved, flipped = sends.save, sends.hold, sends.finished, {}, {}

        def flip(at, bit):
            ctypes.c_uint8.from_address(at).value ^= bit

        def saves(transfer, layer, run):
            save(transfer, layer, run)
            if run.ids:
                saved[transfer] = layers[layer], run.ids[-1]  # of each window the last block is looked at

        def holds(transfer, request):
            if transfer in saved:
                layer, block = saved.pop(transfer)
                flipped[request] = layer.address + block * layer.stride + dice.randrange(layer.bytes), 1 << dice.randrange(8)
                flip(*flipped[request])
            hold(transfer, request)

        def ends():
            free = finished()
            for request in free & set(flipped):
                flip(*flipped.pop(request))
            return free
        sends.save, sends.hold, sends.finished = saves, holds, ends
