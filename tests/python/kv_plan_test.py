"""KV plans between agents: every byte of every target against a plain re-shard by numpy, and what is refused."""
import asyncio
import copy as copying
import itertools
import math
import os
import pickle
import random
import subprocess
import sys
import unittest
import unittest.mock

import numpy

import baton
from helpers import in_child, in_threads

MODEL = baton.KvModel("sha256:0123", "bfloat16", "rope 10000")
ORDERS, PAIRS = ("NHD", "HND"), ("split", "stacked", "in_block", "joined")


def shard(total, ranks, rank):
    """[first, end) of the heads that a rank holds: the usual split, the same head at several beyond `total`."""
    if ranks <= total:
        return rank * total // ranks, (rank + 1) * total // ranks
    return rank * total // ranks, rank * total // ranks + 1


class Cache:
    """K and V of some layers in tensors of a random shape: `views[layer]` are its K and its V, each seen as
    [block][token][head][element], which is all that the rest of this file knows of where they lie."""

    def __init__(self, layers, blocks, tokens, heads, size, order, pair, one_tensor, fill):
        self.layers, self.blocks, self.tokens, self.heads, self.size = layers, blocks, tokens, heads, size
        self.order, self.pair, self.one_tensor = order, pair, one_tensor
        block = (tokens, heads, size) if order == "NHD" else (heads, tokens, size)
        shape = {"split": (blocks, *block), "stacked": (2, blocks, *block), "in_block": (blocks, 2, *block),
                 "joined": (blocks, *block[:2], 2, size)}[pair]
        count = len(layers)
        self.tensors = [numpy.full((count, *shape) if one_tensor else shape, fill, numpy.uint16)
                        for _ in range((1 if one_tensor else count) * (2 if pair == "split" else 1))]
        self.views = {layer: self._views(i) for i, layer in enumerate(layers)}

    def _views(self, i):
        step = 2 if self.pair == "split" else 1
        mine = [tensor[i] for tensor in self.tensors] if self.one_tensor else self.tensors[step * i:step * i + step]
        if self.pair == "split":
            key, value = mine
        elif self.pair == "stacked":
            key, value = mine[0]
        elif self.pair == "in_block":
            key, value = mine[0][:, 0], mine[0][:, 1]
        else:
            key, value = mine[0][..., 0, :], mine[0][..., 1, :]
        return [view if self.order == "NHD" else view.swapaxes(1, 2) for view in (key, value)]

    def add_to(self, layout, total_heads, first_head, window=0):
        return layout.add_paged(self.tensors, blocks=self.blocks, block_tokens=self.tokens, heads=self.heads,
                                head_size=self.size, dtype="bfloat16", layers=self.layers, total_heads=total_heads,
                                first_head=first_head, order=self.order, pair=self.pair, one_tensor=self.one_tensor,
                                window=window)

    def put(self, content, pages, begin, end, heads, first_block=0):
        """Tokens [begin, end) of `content` [layer][K or V][token][head of the model][element] into blocks."""
        tokens = numpy.arange(begin, end)
        blocks = numpy.asarray(pages)[tokens // self.tokens - first_block]
        for layer, views in self.views.items():
            for view, values in zip(views, content[layer]):
                view[blocks, tokens % self.tokens] = values[begin:end, heads[0]:heads[1]]


class Engine:
    """An agent with a cache of one group, of rank `rank` of `ranks`, and a sequence in some of its blocks."""

    def __init__(self, agent, rng, total_heads, ranks, rank, style, length, fill):
        self.agent, self.heads = agent, shard(total_heads, ranks, rank)
        used = -(-length // style["tokens"])
        blocks = used + rng.randint(0, 3)
        self.pages = rng.sample(range(blocks), used)
        self.cache = Cache(range(style["layers"]), blocks, style["tokens"], self.heads[1] - self.heads[0], style["size"],
                           style["order"], style["pair"], style["one_tensor"], fill)
        self.layout = self.cache.add_to(baton.KvLayout(MODEL), total_heads, self.heads[0])
        agent.register(*self.cache.tensors)

    def close(self):
        self.agent.deregister(*self.cache.tensors)


def style_of(rng, layers, size):
    return {"tokens": rng.choice([4, 8, 12, 16, 32]), "order": rng.choice(ORDERS), "pair": rng.choice(PAIRS),
            "one_tensor": rng.random() < 0.5, "layers": layers, "size": size}


def content_of(seed, layers, tokens, heads, size):
    random_bytes = numpy.random.default_rng(seed)
    return [[random_bytes.integers(0, 65536, (tokens, heads, size), numpy.uint16) for _ in range(2)]
            for _ in range(layers)]


def check_pair(agents, seed):
    """Sources of one degree into targets of another: every byte of every target is what numpy says."""
    rng = random.Random(seed)
    total, layers, size = rng.choice([1, 2, 3, 4, 8]), rng.randint(1, 3), rng.choice([1, 2, 8])
    length, op = rng.randint(1, 150), rng.choice([baton.WRITE, baton.READ])
    degrees = [rng.randint(1, 3), rng.randint(1, 3)]
    if op == baton.READ or rng.random() < 0.5:
        rng.shuffle(degrees)
    names = iter(agents)
    sides = []
    for ranks, fill in zip(degrees, (0x1111, 0xEEEE)):
        style = style_of(rng, layers, size)
        sides.append([Engine(next(names), rng, total, ranks, rank, style, length, fill) for rank in range(ranks)])
    sources, targets = sides
    content = content_of(seed, layers, length + 64, total, size)
    for source in sources:
        source.cache.put(content, source.pages, 0, len(source.pages) * source.cache.tokens, source.heads)
    begin = rng.randrange(0, length) if rng.random() < 0.3 else 0
    unit = math.gcd(sources[0].cache.tokens, targets[0].cache.tokens)
    expected = []
    for target in targets:
        before = [tensor.copy() for tensor in target.cache.tensors]
        target.cache.put(content, target.pages, begin // unit * unit, -(-length // unit) * unit, target.heads)
        expected.append([tensor.copy() for tensor in target.cache.tensors])
        for tensor, old in zip(target.cache.tensors, before):
            tensor[:] = old
    for (rank, source), target in itertools.product(enumerate(sources), targets):
        mine, theirs = (source, target) if op == baton.WRITE else (target, source)
        name = mine.agent.add_remote(theirs.agent.metadata())
        plan = baton.KvPlan(mine.agent, op, mine.layout, name, baton.KvLayout.decode(theirs.layout.encode()),
                            share=baton.KvShare(len(sources), rank, seed))
        assert plan.complete, seed
        with plan.post(mine.pages, numpy.array(theirs.pages), tokens=(begin, length)) as transfer:
            transfer.wait(60)
    for number, (target, right) in enumerate(zip(targets, expected)):
        for got, want in zip(target.cache.tensors, right):
            assert numpy.array_equal(got, want), f"seed {seed}: target {number} is not what numpy says"
    for engine in sources + targets:
        engine.close()


def agents_of(count):
    return [baton.Agent(f"engine {i}") for i in range(count)]


# Threads that nobody waits for make transfers that take a while, and the program ends.
ENDS_INSIDE = """
import threading, baton, numpy
a, b = baton.Agent("a"), baton.Agent("b")
mine, theirs = numpy.zeros(1 << 16, numpy.uint8), numpy.zeros(1 << 16, numpy.uint8)
def layout(memory):
    return baton.KvLayout("m").add_latent([memory], blocks=4096, block_tokens=1, width=16, dtype="uint8")
here, there = layout(mine), layout(theirs)
a.register(mine), b.register(theirs), a.add_remote(b.metadata())
plan, many, begun = baton.KvPlan(a, baton.WRITE, here, "b", there), numpy.tile(numpy.arange(4096), 500), threading.Barrier(4)
def work():
    plan.transfer([1], [1])
    begun.wait()
    while True:
        plan.transfer(many, many)
for _ in range(3):
    threading.Thread(target=work, daemon=True).start()
begun.wait()
"""


class RandomPairs(unittest.TestCase):
    # Promise(python): Plans move between two engines' caches exactly the bytes that a numpy
    #   re-shard moves | any degrees, block sizes, orders and windows
    def test_every_byte_is_where_numpy_puts_it(self):
        agents = agents_of(6)
        for seed in range(200):
            with self.subTest(seed=seed):
                check_pair(agents, seed)
        for agent in agents:
            agent.close()


class Two(unittest.TestCase):
    """Prefill and decode, and a model of 4 heads and 2 layers."""

    LAYERS, HEADS, SIZE, LENGTH = 2, 4, 8, 100

    def setUp(self):
        self.prefill, self.decode = baton.Agent("prefill"), baton.Agent("decode")
        self.content = content_of(1, self.LAYERS, 256, self.HEADS, self.SIZE)
        self.pages_there, self.pages_here = [5, 0, 6, 2, 9, 1, 7], [1, 3, 0, 2]
        there = {"tokens": 16, "order": "NHD", "pair": "split", "one_tensor": False, "layers": 2, "size": self.SIZE}
        here = dict(there, tokens=32, order="HND", pair="stacked", one_tensor=True)
        self.there, self.here = self.engine(self.prefill, there, 10), self.engine(self.decode, here, 4)
        self.there.put(self.content, self.pages_there, 0, 112, (0, 4))
        self.theirs = self.there.add_to(baton.KvLayout(MODEL), self.HEADS, 0)
        self.mine = self.here.add_to(baton.KvLayout(MODEL), self.HEADS, 0)
        self.decode.add_remote(self.prefill.metadata())
        self.prefill.add_remote(self.decode.metadata())
        self.addCleanup(self.decode.close)
        self.addCleanup(self.prefill.close)

    def engine(self, agent, style, blocks):
        cache = Cache(range(self.LAYERS), blocks, style["tokens"], self.HEADS, self.SIZE, style["order"], style["pair"],
                      style["one_tensor"], 0xEEEE)
        agent.register(*cache.tensors)
        return cache

    def pull(self):
        return baton.KvPlan(self.decode, baton.READ, self.mine, "prefill", self.theirs)

    def expect(self, begin, end, layers=(0, 1)):
        """All of decode's memory is tokens [begin, end) of these layers, and what it was before elsewhere."""
        want = Cache(range(2), 4, 32, 4, self.SIZE, "HND", "stacked", True, 0xEEEE)
        want.views = {layer: views for layer, views in want.views.items() if layer in layers}
        want.put(self.content, self.pages_here, begin, end, (0, 4))
        for got, right in zip(self.here.tensors, want.tensors):
            self.assertTrue(numpy.array_equal(got, right))

    def test_a_pull_with_a_message(self):
        plan = self.pull()
        self.assertTrue(plan.complete)
        self.assertEqual((plan.layers, plan.bytes_per_token), (2, 2 * 2 * 4 * self.SIZE * 2))
        with plan.post(self.pages_here, self.pages_there, tokens=self.LENGTH, message=b"request 1") as transfer:
            asyncio.run(asyncio.wait_for(transfer, 60))
            self.assertEqual(transfer.telemetry().bytes, 112 * plan.bytes_per_token)
        self.expect(0, 112)
        heard = []
        while not heard:
            heard = self.prefill.messages()
        self.assertEqual(heard, [("decode", b"request 1")])

    def test_a_push_of_layers_one_by_one_posted_again(self):
        plan = baton.KvPlan(self.prefill, baton.WRITE, self.theirs, "decode", self.mine)
        with plan.transfer(numpy.array(self.pages_there, numpy.int32), self.pages_here, tokens=64, layers=1) as transfer:
            transfer.post().wait(60)
            self.expect(0, 64, (1,))
            self.here.tensors[0][:] = 0xEEEE
            transfer.post().wait(60)
            self.expect(0, 64, (1,))
        with plan.post(self.pages_there, self.pages_here, tokens=64, layers=(0, 1)) as transfer:
            transfer.wait(60)
        self.expect(0, 64)

    def test_without_tokens_what_both_sides_have_blocks_for(self):
        plan = self.pull()
        with plan.post(self.pages_here, self.pages_there[:3]) as transfer:
            transfer.wait(60)
        self.expect(0, 48)
        with plan.post(self.pages_here[2:], self.pages_there[3:6], local_first_block=2, remote_first_block=3) as transfer:
            transfer.wait(60)
        want = Cache(range(2), 4, 32, 4, self.SIZE, "HND", "stacked", True, 0xEEEE)
        for begin, end in ((0, 48), (64, 96)):
            want.put(self.content, self.pages_here, begin, end, (0, 4))
        self.assertTrue(numpy.array_equal(self.here.tensors[0], want.tensors[0]))

    def test_threads_share_a_plan(self):
        plan = self.pull()

        def work(_):
            for _ in range(20):
                with plan.post(self.pages_here, self.pages_there, tokens=112) as transfer:
                    transfer.wait(60)

        in_threads(work, range(4))
        self.expect(0, 112)

    def test_they_have_one_owner(self):
        for one in (self.pull(), self.mine):
            for copy in (copying.copy, copying.deepcopy, pickle.dumps):
                with self.assertRaisesRegex(TypeError, "cannot be copied"):
                    copy(one)

    def test_the_interpreter_ends_while_threads_are_inside_calls(self):
        run = subprocess.run([sys.executable, "-c", ENDS_INSIDE], env=dict(os.environ), capture_output=True, text=True)
        self.assertEqual(run.returncode, 0, run.stderr)  # the threads may hear that the agent is closed

    def test_a_forked_child_has_the_layouts_and_not_the_agent(self):
        plan = self.pull()

        def child():
            self.assertEqual(baton.KvLayout.decode(self.mine.encode()).encode(), self.mine.encode())
            with self.assertRaisesRegex(baton.InvalidParamError, "forked"):
                plan.transfer(self.pages_here, self.pages_there)

        in_child(child)
        with plan.post(self.pages_here, self.pages_there, tokens=112) as transfer:
            transfer.wait(60)
        self.expect(0, 112)

    # --- what is refused

    def test_block_numbers_that_are_none(self):
        plan = self.pull()
        here, there = self.pages_here, self.pages_there
        for mine, theirs, how, said in (
                ([1, 4, 0, 2], there, {}, "local block 1 of group 0 is 4, but that cache has 4"),
                (here, [5, 0, -1], {}, "remote block 2 of group 0 is -1, but that cache has 10"),
                (here, there, {"tokens": (8, 50), "length": 40}, "tokens .8, 50. of a sequence of 40"),
                ([here, here], there, {}, "2 lists of local blocks for the 1 groups"),
                (here, there, {"local_first_block": 2 ** 40}, "number 1099511627776"),
                (here, there, {"local_first_block": [0, 1]}, "2 first blocks for 1 lists"),
                (here, there, {"tokens": -1}, "at least 0")):
            with self.subTest(said=said), self.assertRaisesRegex(baton.InvalidParamError, said):
                plan.transfer(mine, theirs, **how)
        for bad in ([0.5], numpy.array([True, False]), ["1"]):
            with self.assertRaises(TypeError):
                plan.transfer(bad, there)
        self.expect(0, 0)
        self.assertEqual(self.decode.stats()["transfers"], 0)

    def test_layouts_that_make_no_sense_leave_it_as_it_was(self):
        layout = self.mine
        before = layout.encode()
        tensors = self.here.tensors
        how = dict(blocks=4, block_tokens=32, heads=4, head_size=self.SIZE, dtype="bfloat16", layers=[7], pair="stacked",
                   one_tensor=True)
        for change, said in (({"blocks": 0}, "at least one"), ({"blocks": 4000}, "its contents take"), ({"dtype": "int4"}, "int4"),
                             ({"order": "DHN"}, "NHD, HND"), ({"pair": "both"}, "split, "), ({"layers": [0]}, "two groups"),
                             ({"layers": None}, "layers is missing"), ({"total_heads": 2}, "heads"),
                             ({"pair": "split"}, "1 buffers for a layout that has 2"), ({"heads": -1}, "at least 0")):
            with self.subTest(said=said), self.assertRaisesRegex(baton.InvalidParamError, said):
                layout.add_paged(tensors, **dict(how, **change))
        with self.assertRaisesRegex(baton.InvalidParamError, "at least one|1 to"):
            baton.KvLayout(MODEL).encode()
        view, wider = numpy.zeros((4, 8, 2, 2), numpy.uint16), numpy.zeros((4, 8, 2, 4), numpy.uint16)
        for views, more, said in (({}, {}, "views are"), ({"key": [view[0]], "value": [view]}, {}, "as many"),
                                  ({"key": [view, view]}, {"layers": [9]}, "2 layers, but 1"),
                                  ({"key": [view], "value": [view[:, :4]]}, {}, "one block size"),
                                  ({"key": [view], "value": [view]}, {"layers": [9]}, "overlap"),
                                  ({"key": [view], "value": [view[:, :, :1]]}, {}, "as many heads"),
                                  ({"key": [view, wider[..., :2]]}, {}, "equal strides"),
                                  ({"key": [view[:, ::-1]]}, {"layers": [9]}, "not negative"),
                                  ({"key": [view[:, 0]]}, {"layers": [9]}, "no view has tokens"),
                                  ({"key": [view, view], "value": [view]}, {}, "a view for each layer"),
                                  ({"key": [view]}, {"buffers": [(4096, 64, 0, 64, 2)]}, "rows of 3 numbers"),
                                  ({"query": [view]}, {"layers": [9]}, "'query'"),
                                  ({"key": [view]}, {"dtype": "float32", "layers": [9]}, "elements of 2 bytes"),
                                  ({"key": [view]}, {"buffers": tensors, "layers": [9]}, "in none of")):
            with self.subTest(said=said), self.assertRaisesRegex(baton.InvalidParamError, said):
                layout.add_views(views, **dict({"dtype": "bfloat16"}, **more))
        self.assertEqual(layout.encode(), before)

    def test_what_is_left_out_of_a_layout(self):
        how = dict(blocks=4, block_tokens=8, heads=2, head_size=4, dtype="float32")
        tensors = [numpy.zeros((4, 8, 2, 4), numpy.float32) for _ in range(6)]
        whole, named = baton.KvLayout("weights"), baton.KvLayout(baton.KvModel("weights"))
        self.assertEqual(whole.add_paged(tensors, **how).groups[0].layers, (0, 1, 2))  # K and V of each
        self.assertEqual(whole.encode(), named.add_paged(tensors, layers=3, **how).encode())
        stacked = [numpy.zeros((2, 4, 8, 2, 4), numpy.float32) for _ in range(3)]
        self.assertEqual(baton.KvLayout("weights").add_paged(stacked, pair="stacked", **how).groups[0].layers, (0, 1, 2))
        # Nothing is given back of what was not made.
        with unittest.mock.patch("sys.unraisablehook") as ignored, self.assertRaises(baton.InvalidParamError):
            baton.KvLayout("weights\0")
        ignored.assert_not_called()

    def test_agents_that_are_closed_gone_or_others(self):
        plan = self.pull()
        with baton.Agent("other") as plan.agent, self.assertRaisesRegex(baton.InvalidParamError, "made with another agent"):
            plan.transfer(self.pages_here, self.pages_there)
        plan.agent = self.decode
        # Another agent of that name.
        self.prefill.close()
        again = baton.Agent("prefill")
        self.addCleanup(again.close)
        again.register(*self.there.tensors)
        self.decode.add_remote(again.metadata())
        with self.assertRaisesRegex(baton.NotFoundError, "make the plan again"):
            plan.transfer(self.pages_here, self.pages_there)
        with self.pull().post(self.pages_here, self.pages_there, tokens=100) as transfer:
            transfer.wait(60)
        self.expect(0, 112)
        self.decode.close()
        with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
            plan.transfer(self.pages_here, self.pages_there)
        with self.assertRaisesRegex(baton.InvalidParamError, "closed"):
            self.pull()


class OtherShapes(unittest.TestCase):
    """MLA, windows, several groups, keys that lie transposed."""

    def setUp(self):
        self.a, self.b = baton.Agent("a"), baton.Agent("b")
        self.addCleanup(self.a.close)
        self.addCleanup(self.b.close)

    def move(self, mine, theirs, tensors_a, tensors_b, *blocks, **how):
        self.a.register(*tensors_a)
        self.b.register(*tensors_b)
        self.a.add_remote(self.b.metadata())
        plan = baton.KvPlan(self.a, baton.WRITE, mine, "b", baton.KvLayout.decode(theirs.encode()))
        with plan.post(*blocks, **how) as transfer:
            transfer.wait(60)
        return plan

    def test_two_groups_of_which_one_keeps_a_window(self):
        content = content_of(3, 4, 128, 2, 4)
        sides = []
        for blocks, tokens, order, windows in ((9, 16, "NHD", (0, 0)), (16, 8, "HND", (0, 24))):
            full = Cache([0, 2], blocks, tokens, 2, 4, order, "split", False, 0xEEEE)
            near = Cache([1, 3], blocks, tokens, 2, 4, order, "in_block", False, 0xEEEE)
            layout = baton.KvLayout(MODEL)
            for cache, window in zip((full, near), windows):
                cache.add_to(layout, 2, 0, window)
            sides.append((full, near, layout))
        (full, near, mine), (full_there, near_there, theirs) = sides
        self.assertEqual([group.window for group in theirs.groups], [0, 24])
        pages, near_pages = [3, 1, 4, 8, 5, 2, 6], [7, 2, 0, 6, 5, 4, 1]
        full.put(content, pages, 0, 112, (0, 2))
        near.put(content, near_pages, 0, 112, (0, 2))
        # 100 tokens: of a window of 24 those from 76 on, which block 9 of that side's begins with.
        there, near_blocks = [2, 9, 4, 11, 0, 7, 5, 13, 1, 10, 3, 8, 12], [6, 14, 2, 5]
        self.move(mine, theirs, full.tensors + near.tensors, full_there.tensors + near_there.tensors,
                  [pages, near_pages], [there, near_blocks], tokens=100, remote_first_block=[0, 9])
        want = Cache([0, 2], 16, 8, 2, 4, "HND", "split", False, 0xEEEE)
        want.put(content, there, 0, 104, (0, 2))
        wanted_near = Cache([1, 3], 16, 8, 2, 4, "HND", "in_block", False, 0xEEEE)
        wanted_near.put(content, near_blocks, 72, 104, (0, 2), first_block=9)
        for got, right in zip(full_there.tensors + near_there.tensors, want.tensors + wanted_near.tensors):
            self.assertTrue(numpy.array_equal(got, right))
        # A window is not where it came from again.
        with self.assertRaisesRegex(baton.MismatchError, "the window of layer 1"):
            baton.KvPlan(self.a, baton.READ, mine, "b", theirs)

    def test_views_of_any_strides(self):
        """Keys that lie [block][head][element][token] at one end, scales of float32 beside them."""
        rng = numpy.random.default_rng(5)
        keys = rng.integers(0, 65536, (5, 2, 4, 8), numpy.uint16)         # [block][head][element][token]
        values = rng.integers(0, 65536, (5, 2, 8, 4), numpy.uint16)       # [block][head][token][element]
        scales = rng.random((5, 8, 2, 1), numpy.float32)
        mine = baton.KvLayout(MODEL).add_views(
            {"key": [keys.transpose(0, 3, 1, 2)], "value": [values.transpose(0, 2, 1, 3)], "key_scale": [scales]},
            dtype={"key": "bfloat16", "value": "bfloat16", "key_scale": None})
        both = numpy.zeros((4, 4, 2, 2, 4), numpy.uint16)                 # [block][token][K or V][head][element]
        theirs_scales = numpy.zeros((4, 4, 2, 1), numpy.float32)
        theirs = baton.KvLayout(MODEL).add_views(
            {"key": [both[:, :, 0]], "value": [both[:, :, 1]], "key_scale": [theirs_scales]},
            buffers=[both, theirs_scales], dtype={"key": "bfloat16", "value": "bfloat16", "key_scale": None})
        self.move(mine, theirs, [keys, values, scales], [both, theirs_scales], [4, 1], [3, 0, 2, 1], tokens=16)
        for token in range(16):
            source, target = ([4, 1][token // 8], token % 8), ([3, 0, 2, 1][token // 4], token % 4)
            self.assertTrue((both[target][0] == keys[source[0], :, :, source[1]]).all())
            self.assertTrue((both[target][1] == values[source[0], :, source[1]]).all())
            self.assertTrue((theirs_scales[target] == scales[source]).all())

    def test_places_of_blocks_that_nobody_looks_into(self):
        """Descriptors alone, as one process hears of another's: blocks of 24 bytes, 32 apart."""
        here, there = numpy.arange(4 * 32, dtype=numpy.uint8), numpy.zeros(5 * 32, numpy.uint8)

        def layout(memory, blocks, tokens, **more):
            at = baton.memory_of(memory)
            view = baton.buffers.View(at, (blocks, 1, 24), (32, 24, 1), "uint8", 1)
            return baton.KvLayout(MODEL).add_views({"opaque": [view]}, buffers=[at], block_tokens=tokens, **more)

        self.move(layout(here, 4, 16), layout(there, 5, 16), [here], [there], [2, 0], [4, 1], tokens=20)
        wanted = numpy.zeros((5, 32), numpy.uint8)
        wanted[[4, 1], :24] = here.reshape(4, 32)[[2, 0], :24]
        self.assertTrue((there.reshape(5, 32) == wanted).all())
        with self.assertRaisesRegex(baton.MismatchError, "once per block and cannot be split"):
            self.move(layout(here, 4, 16), layout(there, 5, 32), [here], [there], [2, 0], [4], tokens=20)
        with self.assertRaisesRegex(baton.InvalidParamError, "as block_tokens"):
            layout(here, 4, None)


if __name__ == "__main__":
    unittest.main()
