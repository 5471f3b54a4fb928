"""A worker of an engine, and a clock that stands still."""
import unittest

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

    def __init__(self, name, clock, identity="a model"):
        self.cache = bytearray(2 * LAYERS * BLOCKS * SIZE)
        at = baton.memory_of(self.cache).address
        layers = [Layer(at + 2 * i * BLOCKS * SIZE, SIZE, 2 * SIZE, BLOCKS, PACKING) for i in range(LAYERS)]
        self.agent = baton.Agent(name + "/0", serve_metadata=True)
        self.service = HandOff(self.agent, KvMemory(layers, [(at, len(self.cache))], self.cache), identity,
                               Limits(silence=1, load=10), 30, clock=clock)
        self.closed = False

    def at(self, layer, block):
        start = 2 * SIZE * (layer * BLOCKS + block)
        return slice(start, start + SIZE)

    def fill(self, blocks, seed):
        for layer in range(LAYERS):
            for block in blocks:
                self.cache[self.at(layer, block)] = bytes([(seed + 7 * layer + block) % 251]) * SIZE

    def save(self, transfer, blocks):
        for layer in range(LAYERS):
            self.service.sends.save(transfer, layer, Run(0, blocks))

    def close(self):
        if not self.closed:
            self.closed = True
            self.service.close()


class Pair(unittest.TestCase):
    """Two of them: p has the KV, d wants it."""

    def setUp(self):
        self.clock = Clock()
        self.p, self.d = Engine("prefill", self.clock), Engine("decode", self.clock)
        self.addCleanup(self.p.close)
        self.addCleanup(self.d.close)

    def order(self, blocks, transfer="t", first=0, sure=False, agent="prefill", port=None):
        address = f"127.0.0.1:{port or self.p.agent.port}"
        runs = None if blocks is None else [Run(first, blocks)]
        self.d.service.loads.start(order(transfer, runs, address, sure, agent, "request " + transfer))

    def until(self, fact, prefill=True):
        """Turns both engines until it is so. A fact that never comes is the test's time limit's to find."""
        while not fact():
            if prefill:
                self.p.service.turn()
            self.d.service.turn()

    def asked(self):
        """Prefill has heard from decode for the first time."""
        self.until(lambda: self.p.agent.has_remote("decode/0"))

    def ended(self):
        got = []
        self.until(lambda: got or got.extend([e for e in [self.d.service.loads.take()] if e.requests]))
        return got[0]

    def check(self, theirs, mine):
        for layer in range(LAYERS):
            for a, b in zip(theirs, mine):
                self.assertEqual(self.p.cache[self.p.at(layer, a)], self.d.cache[self.d.at(layer, b)])

    def freed(self):
        got = set()
        self.until(lambda: got.update(self.p.service.sends.finished()) or got)
        return got
