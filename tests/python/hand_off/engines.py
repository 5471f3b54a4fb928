"""A worker of an engine, and a clock that stands still."""
import baton
from baton.hand_off import HandOff, KvMemory, Layer, Limits, Order, Run

LAYERS, BLOCKS, SIZE, TOKENS = 3, 16, 512, 16
PACKING = {"block_tokens": TOKENS, "bytes": SIZE, "whole": "a test's"}


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def order(transfer, runs, address, sure=False, agent="prefill", request=None):
    """All tokens of all blocks of these runs; None: nothing."""
    tokens = [(run.first * TOKENS, (run.first + len(run.ids)) * TOKENS) for run in runs or ()]
    return Order(request or transfer, transfer, agent, address, runs, tokens, 1, sure)


class Engine:
    """A worker with a cache; the blocks of a layer lie with gaps between them."""

    def __init__(self, name, clock, identity="a model", groups=()):
        self.cache = bytearray(2 * LAYERS * BLOCKS * SIZE)
        at = baton.memory_of(self.cache).address
        layers = [Layer(at + 2 * i * BLOCKS * SIZE, SIZE, 2 * SIZE, BLOCKS, PACKING) for i in range(LAYERS)]
        self.agent = baton.Agent(name + "/0", serve_metadata=True)
        self.service = HandOff(self.agent, KvMemory(layers, [(at, len(self.cache))], self.cache, groups), identity,
                               Limits(silence=1, load=10, ask=0.25), 30, clock=clock, start_thread=False)
        self.closed = False

    def at(self, layer, block):
        start = 2 * SIZE * (layer * BLOCKS + block)
        return slice(start, start + SIZE)

    def fill(self, blocks, seed):
        for layer in range(LAYERS):
            for block in blocks:
                self.cache[self.at(layer, block)] = bytes([(seed + 7 * layer + block) % 251]) * SIZE

    def save(self, transfer, *blocks, first=0):
        """Of each group a list, of which the first block has this number."""
        for layer, group in enumerate(self.service.memory.groups):
            self.service.sends.save(transfer, layer, Run(first, blocks[group]))

    def close(self):
        if not self.closed:
            self.closed = True
            self.service.close()
