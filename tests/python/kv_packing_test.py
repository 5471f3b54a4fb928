"""Blocks that kernels pack: how they do is found by looking, and a plan moves their tokens between packings. Against a
reference in numpy that knows of a block only where each number is."""
import unittest

import numpy

import baton
from baton.kv import find_packing
from packings import along, packing_of

def places(packing):
    """[K or V][token][head][element] -> place in a block."""
    tokens, heads, elements = (numpy.arange(packing[name]) for name in ("block_tokens", "heads", "head_size"))
    return numpy.stack([half["start"] + along(half["tokens"], tokens)[:, None, None] + along(half["heads"], heads)[:, None]
                        + along(half["elements"], elements) for half in (packing["key"], packing["value"])])


class Packed(unittest.TestCase):
    def test_a_plan_moves_what_is_packed(self):
        """Two of four heads, from blocks of other tokens and of another order, with gaps between them."""
        source, target, gap = packing_of("rows", 32, 2, 8, total=4, first=2), packing_of("vec", 16, 4, 8), 64
        theirs, mine, layouts = [3, 0], [2, 5, 1, 4], []
        with baton.Agent("source") as a, baton.Agent("target") as b:
            for agent, packing in (a, source), (b, target):
                dice = numpy.random.default_rng(3)
                layers = [dice.integers(0, 1 << 16, 6 * (packing["bytes"] + gap) // 2, numpy.uint16) for _ in range(2)]
                agent.register(*layers)
                layouts.append((layers, baton.KvLayout("a model").add_packed(layers, packing, blocks=6,
                                                                             block_stride=packing["bytes"] + gap)))
            (there, said_there), (here, said_here) = layouts
            b.add_remote(a.metadata())
            plan = baton.KvPlan(b, baton.READ, said_here, "source", baton.KvLayout.decode(said_there.encode()))
            expected = [layer.copy() for layer in here]
            for token in range(16, 48):
                at = [ids[token // size] * (packing["bytes"] + gap) // 2 + places(packing)[:, token % size] for ids, size, packing in
                      ((theirs, 32, source), (mine, 16, target))]
                expected[1][at[1][:, 2:]] = there[1][at[0]]
            with plan.post(mine[:3], theirs, tokens=(16, 48), layers=1) as transfer:
                transfer.wait(timeout=60)
            for layer, right in zip(here, expected):
                self.assertTrue((layer == right).all())

    def test_blocks_that_go_whole_go_to_equal_ranks(self):
        memory = bytearray(64)
        whole = [baton.KvLayout("m").add_packed([memory], {"block_tokens": 16, "bytes": 64, "whole": word}, blocks=1)
                 for word in ("rank 0 of 2", "rank 1 of 2")]
        with baton.Agent("alone") as agent, self.assertRaisesRegex(baton.MismatchError, "rank 1 of 2"):
            agent.register(memory)
            baton.KvPlan(agent, baton.READ, whole[0], "alone", whole[1])

    def test_a_layout_with_tiles_is_told_and_one_without_as_older_releases_tell_it(self):
        packed = baton.KvLayout("m").add_packed([(4096, 4 * 8192, 0)], packing_of("amx", 32, 2, 32), blocks=4)
        plain = baton.KvLayout("m").add_packed([(4096, 4 * 1024, 0)], packing_of("rows", 16, 2, 8), blocks=4)
        for layout, version in ((packed, 3), (plain, 2)):
            told = layout.encode()
            self.assertEqual(told[8 + 2 + 2 + 8], version)
            again = baton.KvLayout.decode(told)
            self.assertEqual(again.encode(), told)
            self.assertEqual(again.groups, layout.groups)

    def test_where_numbers_lie_is_found_by_looking(self):
        packings = [packing_of("amx", 32, 2, 32), packing_of("amx", 64, 3, 16, tile=8, pair=4), packing_of("rows", 16, 2, 8),
                    packing_of("vec", 16, 3, 8), packing_of("rows", 1, 1, 5), packing_of("rows", 300, 1, 64)]
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
