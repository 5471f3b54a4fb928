"""Blocks that kernels pack: how they do is found by looking, and plans move their tokens between packings of other sizes.
Against a reference in numpy that knows of a block only where each number is."""
import math
import random
import sys
import unittest

import baton
from baton.kv import find_packing

try:
    import numpy
except ImportError:
    print("skipped: this needs numpy (Debian: python3-numpy)")
    sys.exit(77)

BLOCKS = 24  # of a cache
TYPES = {"bfloat16": numpy.uint16, "float16": numpy.uint16, "float32": numpy.uint32}


def tiled(tokens, heads, size, total=None, first=0, tile=16, pair=2, dtype="bfloat16"):
    """K in tiles of [tokens]: [group of elements][token]{elements}, V of [elements]: [group of tokens][element]{tokens}."""
    half = tokens * size
    key = {"start": 0, "tokens": [[tile, pair], [tokens // tile, tile * size]],
           "elements": [[pair, 1], [size // pair, tile * pair]]}
    value = {"start": half, "tokens": [[pair, 1], [tokens // pair, tile * pair]],
             "elements": [[tile, pair], [size // tile, tile * tokens]]}
    for each in key, value:
        each["heads"] = [[heads, 2 * half]]
    return said(tokens, heads, size, total, first, dtype, key, value)


def rows(tokens, heads, size, total=None, first=0, dtype="bfloat16", transposed=False):
    """[token][head]{K, V}, or [head]{K: [element][token], V: [token][element]}."""
    if transposed:
        key = {"start": 0, "tokens": [[tokens, 1]], "elements": [[size, tokens]], "heads": [[heads, 2 * tokens * size]]}
        value = {"start": tokens * size, "tokens": [[tokens, size]], "elements": [[size, 1]], "heads": key["heads"]}
    else:
        key = {"start": 0, "tokens": [[tokens, 2 * size * heads]], "elements": [[size, 1]], "heads": [[heads, 2 * size]]}
        value = dict(key, start=size)
    return said(tokens, heads, size, total, first, dtype, key, value)


def said(tokens, heads, size, total, first, dtype, key, value):
    return {"block_tokens": tokens, "heads": heads, "total_heads": total or heads, "first_head": first, "head_size": size,
            "dtype": dtype, "bytes": 2 * tokens * heads * size * TYPES[dtype]().itemsize, "key": key, "value": value}


def along(levels, count):
    """Where the steps of an axis are."""
    out, index = numpy.zeros(count, int), numpy.arange(count)
    for many, stride in levels:
        out, index = out + index % many * stride, index // many
    return out


def places(packing):
    """[K or V][token][head][element] -> place in a block."""
    return numpy.stack([half["start"] + along(half["tokens"], packing["block_tokens"])[:, None, None]
                        + along(half["heads"], packing["heads"])[:, None] + along(half["elements"], packing["head_size"])
                        for half in (packing["key"], packing["value"])])


class Cache:
    """Layers of blocks that are packed like this, with gaps between them; registered with an agent."""

    def __init__(self, agent, packing, blocks, layers=2, gap=64, dice=random):
        self.packing, self.blocks, self.type = packing, blocks, TYPES[packing["dtype"]]
        self.stride = packing["bytes"] + gap
        self.layers = [numpy.frombuffer(bytearray(dice.randbytes(blocks * self.stride)), self.type) for _ in range(layers)]
        agent.register(*self.layers)
        self.layout = baton.KvLayout("a model").add_packed(self.layers, packing, blocks=blocks, block_stride=self.stride)
        self.places = places(packing)

    def at(self, ids, token, head):
        """Places of [K or V][element], in a layer."""
        size = self.packing["block_tokens"]
        return ids[token // size] * self.stride // self.type().itemsize + self.places[:, token % size, head]


class Pair:
    def __init__(self, test, source, target, dice, share=None):
        self.agents = [baton.Agent("source"), baton.Agent("target")]
        for agent in self.agents:
            test.addCleanup(agent.close)
        self.source, self.target = (Cache(agent, packing, BLOCKS, dice=dice) for agent, packing in
                                    zip(self.agents, (source, target)))
        self.agents[1].add_remote(self.agents[0].metadata())
        theirs = baton.KvLayout.decode(self.source.layout.encode())
        self.plan = baton.KvPlan(self.agents[1], baton.READ, self.target.layout, "source", theirs, share=share)
        self.dice = dice
        self.heads = range(max(source["first_head"], target["first_head"]),
                           min(source["first_head"] + source["heads"], target["first_head"] + target["heads"]))

    def tables(self, tokens):
        return [self.dice.sample(range(BLOCKS), -(-tokens // cache.packing["block_tokens"])) for cache in
                (self.source, self.target)]

    def move(self, begin, end, layer):
        """Moves tokens, and compares all of the target's layer."""
        theirs, mine = self.tables(end)
        expected = self.target.layers[layer].copy()
        unit = math.gcd(*(cache.packing["block_tokens"] for cache in (self.source, self.target)))
        for token in range(begin // unit * unit, -(-end // unit) * unit):
            for head in self.heads:
                here = self.target.at(mine, token, head - self.target.packing["first_head"])
                there = self.source.at(theirs, token, head - self.source.packing["first_head"])
                expected[here] = self.source.layers[layer][there]
        with self.plan.post(mine, theirs, tokens=(begin, end), layers=layer) as transfer:
            transfer.wait(timeout=60)
        if (self.target.layers[layer] != expected).any():
            raise AssertionError(f"tokens {begin} to {end} of {self.source.packing} to {self.target.packing}")


CASES = [(tiled(32, 2, 32), tiled(64, 2, 32)), (tiled(96, 2, 32), tiled(32, 2, 32)),
         (tiled(32, 4, 32), tiled(64, 2, 32, 4, 2)), (tiled(32, 2, 16, tile=8), tiled(16, 2, 16, tile=8)),
         (tiled(32, 2, 32, pair=4, dtype="float32"), tiled(48, 2, 32, pair=4, dtype="float32")),
         (rows(16, 2, 8), rows(32, 2, 8, transposed=True)), (rows(48, 3, 8, transposed=True), rows(32, 3, 8, transposed=True)),
         (rows(16, 2, 8, 4, 2), rows(16, 4, 8)), (tiled(64, 2, 32), tiled(64, 2, 32))]


class Packed(unittest.TestCase):
    def setUp(self):
        self.dice = random.Random(3)

    def test_every_number_comes(self):
        for source, target in CASES:
            with self.subTest(source=source, target=target):
                pair = Pair(self, source, target, self.dice)
                for _ in range(3):
                    begin = self.dice.randrange(90)
                    pair.move(begin, begin + 1 + self.dice.randrange(90), self.dice.randrange(2))

    def test_who_tiles_otherwise_is_refused(self):
        for one, other in ((tiled(32, 2, 32), rows(32, 2, 32)), (tiled(32, 2, 32), tiled(32, 2, 32, pair=4)),
                           (tiled(32, 2, 32), tiled(32, 2, 32, tile=8))):
            with self.assertRaisesRegex(baton.MismatchError, "only the kernels know this order"):
                Pair(self, one, other, self.dice)
        memory = bytearray(64)
        whole = [baton.KvLayout("m").add_packed([memory], {"block_tokens": 16, "bytes": 64, "whole": word}, blocks=1)
                 for word in ("rank 0 of 2", "rank 1 of 2")]
        with baton.Agent("alone") as agent, self.assertRaisesRegex(baton.MismatchError, "rank 1 of 2"):
            agent.register(memory)
            baton.KvPlan(agent, baton.READ, whole[0], "alone", whole[1])

    def test_a_layout_with_tiles_is_told_and_one_without_as_older_releases_tell_it(self):
        packed = baton.KvLayout("m").add_packed([(4096, 4 * 8192, 0)], tiled(32, 2, 32), blocks=4)
        plain = baton.KvLayout("m").add_packed([(4096, 4 * 1024, 0)], rows(16, 2, 8), blocks=4)
        for layout, version in ((packed, 3), (plain, 2)):
            told = layout.encode()
            self.assertEqual(told[8 + 2 + 2 + 8], version)
            again = baton.KvLayout.decode(told)
            self.assertEqual(again.encode(), told)
            self.assertEqual(again.groups, layout.groups)

    def test_where_numbers_lie_is_found_by_looking(self):
        packings = [tiled(32, 2, 32), tiled(64, 3, 16, tile=8, pair=4), rows(16, 2, 8), rows(16, 3, 8, transposed=True),
                    rows(1, 1, 5), rows(300, 1, 64)]
        for packing in packings:
            with self.subTest(packing=packing):
                at, shape = places(packing), [packing[key] for key in ("block_tokens", "heads", "head_size")]

                def write(*key_and_value):
                    block = numpy.zeros(at.size, int)
                    for half, numbers in zip(at, key_and_value):
                        block[half] = numpy.array(numbers).reshape(shape)
                    self.assertLessEqual(numpy.abs(block).max(), 128)
                    return block.tolist()
                found = find_packing(write, block_tokens=shape[0], heads=shape[1], head_size=shape[2])
                self.assertTrue((places(dict(packing, **found)) == at).all())
                for half, axis in (("key", "tokens"), ("value", "tokens"), ("key", "elements"), ("value", "elements")):
                    known = [level for level in packing[half][axis] if level[0] > 1]
                    self.assertLessEqual(len(found[half][axis]), len(known))


if __name__ == "__main__":
    unittest.main()
