"""Two engines hand over the KV of a prompt. Their kernel packs blocks in tiles, in an order that it alone knows; prefill's
blocks have 16 tokens, and decode's 32. Both live in this process; in yours, a proxy tells decode the transfer's name and
where prefill is. Then prefill is gone, and decode is told to compute."""
import numpy

import baton
from baton.hand_off import HandOff, KvMemory, Layer, Limits, Order, Run
from baton.kv import find_packing

LAYERS, HEADS, SIZE, BLOCKS, TOKENS = 2, 2, 16, 8, 80


def kernel(block, key, value):
    """Writes [token][head][element] of K and V into a block: [head][group of 8 tokens][element][token] of each."""
    for half, numbers in zip(block.reshape(2, -1), (key, value)):
        half[:] = numbers.reshape(-1, 8, HEADS, SIZE).transpose(2, 0, 3, 1).ravel()


class Engine:
    def __init__(self, name, block_tokens):
        self.cache = numpy.zeros((LAYERS, BLOCKS, 2 * block_tokens * HEADS * SIZE), numpy.float32)

        def write(*key_and_value):
            block = numpy.zeros(self.cache.shape[2], numpy.float32)
            kernel(block, *(numpy.array(each, numpy.float32).reshape(-1, HEADS, SIZE) for each in key_and_value))
            return block.astype(int).tolist()
        packing = {"block_tokens": block_tokens, "bytes": self.cache[0, 0].nbytes, "dtype": "float32", "heads": HEADS,
                   "head_size": SIZE, **find_packing(write, block_tokens=block_tokens, heads=HEADS, head_size=SIZE)}
        layers = [Layer(layer.ctypes.data, layer[0].nbytes, layer[0].nbytes, BLOCKS, packing) for layer in self.cache]
        self.half = HandOff(baton.Agent(name + "/0", serve_metadata=True),  # a worker's name ends in its number
                            KvMemory(layers, [(self.cache.ctypes.data, self.cache.nbytes)], keep=self.cache),
                            "sha256 of the checkpoint", Limits(silence=0.5))
        self.address = f"127.0.0.1:{self.half.agent.port}"

    def load(self, order):
        """Whether the KV came: else the engine computes it."""
        self.half.loads.start(order)
        while not (ended := self.half.loads.take(0.1)).requests:  # an engine computes something else meanwhile
            pass
        return not ended.failed


def main():
    prefill, decode = Engine("prefill", 16), Engine("decode", 32)
    kv = numpy.random.default_rng(1).random((LAYERS, 2, 96, HEADS, SIZE), numpy.float32)
    theirs, mine = Run(0, [6, 1, 3, 0, 5]), Run(0, [2, 7, 4])
    for layer in range(LAYERS):
        for number, block in enumerate(theirs.ids):
            kernel(prefill.cache[layer, block], *kv[layer, :, 16 * number:16 * number + 16])
        prefill.half.sends.save("t1", layer, theirs)  # decode may read this layer while the next one is computed
    prefill.half.sends.hold("t1", "request 1")        # its blocks stay as they are until all is read

    came = decode.load(Order("request 1", "t1", "prefill", prefill.address, [mine], [(0, TOKENS)]))
    wanted = numpy.zeros_like(decode.cache[0, 0])
    kernel(wanted, *kv[1, :, 32:64])
    print("came:", came, "right:", bool((decode.cache[1, 7] == wanted).all()), end="; ")
    while prefill.half.sends.finished() != {"request 1"}:
        pass
    prefill.half.close()
    print("prefill is gone, came:", decode.load(Order("request 2", "t2", "prefill", prefill.address, [mine], [(0, TOKENS)])))
    decode.half.close()


if __name__ == "__main__":
    main()
