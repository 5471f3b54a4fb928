"""Prefill and decode whose blocks differ in size, in order, and in which heads they hold: the worker halves of the vLLM
connector and its schedulers, without vLLM, over caches that a reference in numpy fills and compares. Then one bit of what
prefill has kept is flipped, before and after it has told decode of it: each is found.

usage: vllm_reshard_test.py [CASES [SEED]]: so many random pairs instead of the tests
"""
import itertools
import logging
import random
import sys
import unittest
import unittest.mock

import numpy

import baton
from baton.hand_off import HandOff, KvMemory, Layer, Limits, Shard
from baton.kv import ranks_heard, shard_heads
from baton.vllm.groups import Group
from baton.vllm.scheduler import Scheduler
from hand_off.engines import Clock
from packings import TYPES, along, packing_of
from vllm_fakes import blocks, request, scheduled

SIZE, BLOCKS = 32, 24


def kind_of(tokens, heads, total, first, dtype, order):
    return packing_of(order, tokens, heads, SIZE, dtype, total, first)


class Worker:
    """One of an engine's: its cache as bytes, and where each number of K and V is in it."""

    def __init__(self, engine, name, shard, groups, clock):
        heads = shard_heads(shard.heads, shard.ranks, shard.rank)
        self.heads, self.engine = heads, engine
        self.kinds = [kind_of(group.block_size, len(heads), shard.heads, heads[0], engine.dtype, engine.order)
                      for group in groups]
        self.cache = numpy.zeros((len(groups), BLOCKS * max(kind["bytes"] for kind in self.kinds)), numpy.uint8)
        self.layers = [Layer(row.ctypes.data, kind["bytes"], kind["bytes"], BLOCKS, kind)
                       for row, kind in zip(self.cache, self.kinds)]
        agent = baton.Agent(f"{name}/{shard.rank}", serve_metadata=True, listen_port=engine.port + shard.rank)
        memory = KvMemory(self.layers, [(self.cache.ctypes.data, self.cache.nbytes)], self.cache, range(len(groups)))
        self.service = HandOff(agent, memory, "a model", Limits(silence=1, load=10), 30, shard=shard, clock=clock)

    def at(self, layer, role, number, token):
        """Where [head][element] of a token of a block are, counted in numbers from the layer's beginning."""
        kind = self.kinds[layer]
        token, heads, elements = (along(kind[role][axis], index) for axis, index in (
            ("tokens", numpy.array([token])), ("heads", numpy.arange(len(self.heads))), ("elements", numpy.arange(SIZE))))
        base = number * kind["bytes"] // TYPES[self.engine.dtype]().itemsize + kind[role]["start"]
        return base + token + heads[:, None] + elements

    def numbers(self, layer):
        return self.cache[layer].view(TYPES[self.engine.dtype])


class Engine:
    def __init__(self, name, ranks, heads, sizes, windows, order, dtype, clock, dice):
        self.name, self.order, self.dtype, self.ranks = name, order, dtype, ranks
        self.groups = [Group(size, window) for size, window in zip(sizes, windows)]
        self.port = 0
        while not self.port:  # ports side by side, as an engine's workers have them
            self.port = dice.randrange(20000, 60000)
            self.workers = []
            try:
                for rank in range(ranks):
                    self.workers.append(Worker(self, name, Shard(rank, ranks, heads), self.groups, clock))
            except baton.BatonError:
                self.close()
                self.port = 0
        self.scheduler = Scheduler(self.groups, name, f"127.0.0.1:{self.port}", ranks)

    def close(self):
        for worker in self.workers:
            worker.service.close()

    def turn(self):
        for worker in self.workers:
            worker.service.turn()

    def each_token(self, layer, ids, tokens):
        """(worker, K or V, place, token) of all numbers of these tokens of a request."""
        size = self.groups[layer].block_size
        for worker, token, (i, role) in itertools.product(self.workers, tokens, enumerate(("key", "value"))):
            yield worker, i, worker.at(layer, role, ids[token // size], token % size), token

    def write(self, reference, layer, ids, tokens):
        for worker, i, at, token in self.each_token(layer, ids, tokens):
            worker.numbers(layer)[at] = reference[layer, i, token, worker.heads.start:worker.heads.stop]

    def differs(self, reference, layer, ids, tokens):
        return any((worker.numbers(layer)[at] != reference[layer, i, token, worker.heads.start:worker.heads.stop]).any()
                   for worker, i, at, token in self.each_token(layer, ids, tokens))


class Pair:
    """Two engines; load() hands a prompt over."""

    def __init__(self, dice, heads=2, ranks=(1, 1), sizes=((16,), (16,)), windows=(None,), orders=("vec", "vec"),
                 dtype="float32"):
        self.dice, self.clock, self.heads = dice, Clock(), heads
        self.prefill, self.decode = (
            Engine(name, many, heads, size, windows, order, dtype, self.clock, dice)
            for name, many, size, order in zip(("p", "d"), ranks, sizes, orders))
        self.count, self.dtype, self.windows = 0, dtype, windows

    def close(self):
        self.prefill.close(), self.decode.close()

    def has_whole_blocks(self, prompt):
        """Whether prefill keeps of each window what is in all of decode's blocks of it."""
        return all(a.needed(prompt) * a.block_size <= b.needed(prompt) * b.block_size
                   for a, b in zip(self.prefill.groups, self.decode.groups))

    def tables(self, engine, prompt):
        return [self.dice.sample(range(1, BLOCKS), group.count(prompt)) for group in engine.groups]

    def load(self, prompt, computed=0, chunks=1, first="prefill", hurt=None, tp_size=None):
        """Whether decode believes it. `hurt`: a bit is flipped at prefill, "before" or "after" decode has asked and is told
        what is there. Numbers that are not right where they are believed are an error."""
        p, d, dice = self.prefill, self.decode, self.dice
        self.count += 1
        transfer = f"t{self.count}"
        for worker in (*p.workers, *d.workers):
            worker.cache[:] = numpy.frombuffer(dice.randbytes(worker.cache.nbytes), numpy.uint8).reshape(worker.cache.shape)
        layers = range(len(p.groups))
        reference = numpy.frombuffer(dice.randbytes(len(layers) * 2 * prompt * self.heads * SIZE *
                                                    TYPES[self.dtype]().itemsize), TYPES[self.dtype]).reshape(
            len(layers), 2, prompt, self.heads, SIZE)
        theirs, mine = self.tables(p, prompt), self.tables(d, prompt)
        asked = request("r" + transfer, {"do_remote_decode": True, "transfer_id": transfer}, prompt)
        p.scheduler.allocated(asked, blocks(*theirs), 0)
        wanted = request("s" + transfer, {"do_remote_prefill": True, "transfer_id": transfer, "remote_agent": "p",
                                          "remote_address": f"127.0.0.1:{p.port}", "tp_size": tp_size or p.ranks}, prompt)
        # A window's blocks that no token looks back at any more are not there.
        tables = [[0 if i < group.needed(prompt) else one for i, one in enumerate(ids)]
                  for group, ids in zip(d.groups, mine)]
        d.scheduler.matched(wanted, computed)
        d.scheduler.allocated(wanted, blocks(*tables), prompt - 1 - computed)
        order = d.scheduler.step(scheduled()).orders[0]
        before = [worker.cache.copy() for worker in d.workers]

        def ask():
            for worker in d.workers:
                worker.service.loads.start(order)

        def save():
            done = 0
            for chunk in range(1, chunks + 1):
                end = prompt * chunk // chunks
                step = p.scheduler.step(scheduled(new=[(asked.request_id, theirs, done, end - done)]))
                for layer in layers:
                    p.write(reference, layer, theirs[layer], range(done, end))
                    for worker in p.workers:
                        for name, runs in step.saves:
                            worker.service.sends.save(name, layer, runs[layer])
                    if first == "decode":
                        d.turn(), p.turn()
                done = end
            for worker in p.workers:
                worker.service.sends.hold(transfer, asked.request_id)

        def spoil():
            """A bit of a number, wherever prefill has it: with more ranks than heads several do."""
            layer = dice.choice(layers)
            token, head, element = dice.randrange(*order.tokens[layer]), dice.randrange(self.heads), dice.randrange(SIZE)
            which, bit = dice.randrange(2), dice.randrange(8 * TYPES[self.dtype]().itemsize)
            for worker, role, at, _ in p.each_token(layer, theirs[layer], [token]):
                if role == which and head in worker.heads:
                    worker.numbers(layer)[at[head - worker.heads.start, element]] ^= numpy.array(1 << bit, TYPES[self.dtype])

        if first == "decode" and not hurt:
            ask()
            for _ in range(20):
                d.turn(), p.turn()
        save()
        if hurt == "before":
            spoil()
        if first != "decode" or hurt:
            ask()
        if hurt == "after":
            d.turn()
            for _ in range(20):
                p.turn()
            spoil()
        ended, free, heard = {}, set(), [set(ranks_heard(self.heads, p.ranks, d.ranks, rank)) for rank in range(d.ranks)]
        while len(ended) < d.ranks or len(free) < p.ranks:  # what never ends is the test's time limit's to find
            d.turn()
            for rank, one in enumerate(d.workers):
                done = one.service.loads.take()
                if done.requests:
                    ended[rank] = not done.failed
            p.turn()
            free |= {rank for rank, one in enumerate(p.workers) if one.service.sends.finished()}
            if len(ended) == d.ranks and not all(ended.values()):
                self.clock.now += 0.01  # a worker that a failed load has not reached keeps its blocks for the lease
            if any(free & heard[rank] for rank in range(d.ranks) if rank not in ended):
                raise AssertionError(f"prefill has given back blocks that are read: {free} are free, {ended} ended")
        if not all(ended.values()):
            return False
        for layer, (begin, end), run in zip(layers, order.tokens, order.runs):
            if d.differs(reference, layer, mine[layer], range(begin, end)):
                raise AssertionError(f"wrong numbers in layer {layer}")
            for worker, was in zip(d.workers, before):
                kept = [number for number in range(BLOCKS) if number not in run.ids]
                for number in kept:
                    span = slice(number * worker.kinds[layer]["bytes"], (number + 1) * worker.kinds[layer]["bytes"])
                    if (worker.cache[layer][span] != was[layer][span]).any():
                        raise AssertionError(f"block {number} was not asked for")
        return True


CASES = [  # heads, ranks, sizes, orders
    (2, (1, 1), (32, 16), ("vec", "vec")), (2, (1, 1), (16, 32), ("vec", "vec")), (3, (1, 1), (48, 32), ("vec", "rows")),
    (2, (1, 2), (32, 32), ("vec", "vec")), (2, (2, 1), (32, 32), ("vec", "vec")), (4, (4, 2), (16, 32), ("rows", "vec")),
    (2, (1, 1), (32, 64), ("amx", "amx")), (2, (2, 1), (96, 64), ("amx", "amx")), (2, (1, 4), (32, 32), ("amx", "amx")),
    (4, (2, 4), (32, 16), ("vec", "vec")), (2, (4, 1), (16, 16), ("vec", "vec")), (2, (1, 4), (16, 16), ("vec", "rows")),
    (2, (4, 2), (32, 16), ("vec", "vec")), (1, (2, 1), (16, 16), ("vec", "vec")), (2, (2, 2), (16, 16), ("vec", "vec"))]


class Reshard(unittest.TestCase):
    def setUp(self):
        self.dice = random.Random(1)

    def pair(self, case, **more):
        heads, ranks, sizes, orders = case
        pair = Pair(self.dice, heads, ranks, [[size] * len(more.get("windows", "1")) for size in sizes], orders=orders,
                    dtype="bfloat16" if "amx" in orders else "float32", **more)
        self.addCleanup(pair.close)
        return pair

    # Promise(vllm): Block sizes and tensor-parallel degrees may differ: each number lands where one
    #   engine would have it | a KV plan per layer and pair of workers
    def test_every_number_comes_whatever_the_blocks_and_the_ranks_are(self):
        for case in CASES:
            with self.subTest(case=case):
                pair = self.pair(case)
                for prompt in (2, 33, 97 + self.dice.randrange(60)):
                    for first in ("prefill", "decode"):
                        self.assertTrue(pair.load(prompt, chunks=self.dice.choice((1, 3)), first=first))
                self.assertTrue(pair.load(150, computed=2 * case[2][1]))

    def test_layers_with_windows_of_other_blocks(self):
        for case in CASES[:6]:
            with self.subTest(case=case):
                pair = self.pair(case, windows=(None, 20, 41))
                for prompt in (5, 64, 65, 66, 150):
                    self.assertEqual(pair.load(prompt, chunks=3, first=self.dice.choice(("prefill", "decode"))),
                                     pair.has_whole_blocks(prompt))

    def test_a_flipped_bit_is_found_wherever_it_is(self):
        logging.getLogger("baton.hand_off").setLevel(logging.ERROR)
        for case in CASES[::2]:
            with self.subTest(case=case):
                pair = self.pair(case)
                for _ in range(2):
                    self.assertTrue(pair.load(90))
                    self.assertFalse(pair.load(90, hurt="after"))
                self.assertFalse(pair.load(90, hurt="before"))

    def test_what_does_not_fit_is_refused_and_said(self):
        def refused(pair, words, **more):
            self.addCleanup(pair.close)
            with self.assertLogs("baton.hand_off", logging.WARNING) as said:
                self.assertFalse(pair.load(40, **more))
            self.assertIn(words, said.output[0])

        refused(Pair(self.dice), "prefill has 1 ranks, but was expected to have 2", tp_size=2)
        refused(Pair(self.dice, orders=("amx", "vec"), dtype="bfloat16", sizes=((32,), (32,))), "only the kernels know this order")
        right = kind_of
        with unittest.mock.patch.dict(globals(), kind_of=lambda tokens, heads, total, first, *more: right(
                tokens, heads, total, first or int(heads < total), *more)):
            refused(Pair(self.dice, 4, (2, 1)), "as rank 0 of 2 it should send others")

    def test_each_worker_of_prefill_is_heard_and_no_head_is_read_twice(self):
        for heads, prefill, decode in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8, 16)):
            said = [ranks_heard(heads, prefill, decode, rank) for rank in range(decode)]
            self.assertEqual(set().union(*said), set(range(prefill)))
            for rank, heard in enumerate(said):
                for head in shard_heads(heads, decode, rank):
                    self.assertGreaterEqual(sum(head in shard_heads(heads, prefill, p) for p in heard), 1)
        for ranks in (1, 2, 16):
            self.assertEqual([ranks_heard(8, ranks, ranks, rank) for rank in range(ranks)], [[rank] for rank in range(ranks)])
        for nonsense in ((8, 10 ** 9, 1, 0), (8, 0, 1, 0), (8, 1, 1, 1), (0, 1, 1, 0)):
            with self.assertRaises(baton.InvalidParamError):
                ranks_heard(*nonsense)


def many(cases, seed):
    dice = random.Random(seed)
    logging.getLogger("baton.hand_off").setLevel(logging.ERROR)
    flipped = whole = 0
    for number in range(cases):
        heads = dice.choice((1, 2, 4, 6))
        ranks = [dice.choice([n for n in (1, 2, 4, 8) if heads % n == 0 or n % heads == 0]) for _ in range(2)]
        windows = [None, *(dice.randrange(2, 90) for _ in range(dice.randrange(2)))]
        tiled = dice.random() < 0.4
        sizes = [[dice.choice((32, 64, 96) if tiled else (8, 16, 24, 32, 48)) for _ in windows] for _ in range(2)]
        pair = Pair(dice, heads, ranks, sizes, windows,
                    ("amx", "amx") if tiled else [dice.choice(("vec", "rows")) for _ in range(2)],
                    "bfloat16" if tiled else dice.choice(("bfloat16", "float32")))
        try:
            pair.load(2)  # so that all know each other: a load that fails before gives nothing back
            for _ in range(6):
                prompt = dice.randrange(2, 180)
                hurt = dice.choice((None, "before", "after"))
                computed = 0 if len(windows) > 1 else dice.randrange(prompt) // sizes[1][0] * sizes[1][0]
                if computed >= prompt - 1:
                    computed = 0
                believed = pair.load(prompt, computed, dice.choice((1, 1, 4)), dice.choice(("prefill", "decode")), hurt)
                if believed != (hurt is None and pair.has_whole_blocks(prompt)):
                    sys.exit(f"case {number} of seed {seed}: {heads} heads, ranks {ranks}, sizes {sizes}, windows "
                             f"{windows}, {prompt} tokens: hurt at {hurt}, and believed: {believed}")
                flipped, whole = flipped + (not believed), whole + believed
        finally:
            pair.close()
    print(f"seed {seed}: {flipped} bits flipped, all found; {whole} loads left whole, all right")


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].isdigit():
        many(*map(int, (sys.argv[1:] + ["1"])[:2]))
    else:
        unittest.main(argv=sys.argv[:1] + sys.argv[1:])
