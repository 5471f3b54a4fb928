"""What engines, proxies and peers do wrong with hand-offs: orders that make no sense, names that are used twice, queues
that are full, ends in the midst of it. Each load ends, each block is free again, and nobody gets another's KV."""
import concurrent.futures
import os
import subprocess
import sys
import unittest
import unittest.mock

import baton
from baton.hand_off import HandOff, KvMemory, Layer, Limits, Order, Run, Shard
from engines import BLOCKS, LAYERS, SIZE, TOKENS, Clock, Pair, order
from helpers import in_child

CHILD = """
import baton
from baton.hand_off import Order, Run
from engines import SIZE, PACKING
from misuse_test import running
a, b = running("prefill"), running("decode")
for number in range(100):
    a.sends.save(str(number), 0, Run(0, [1]))
    b.loads.start(Order("r", str(number), "prefill", f"127.0.0.1:{a.agent.port}", [Run(0, [1])], [(0, 16)], 1, False))
b.loads.take(10)
print("ends")
"""


def running(name):
    """One with a thread, over a cache of one layer."""
    cache = bytearray(BLOCKS * SIZE)
    at = baton.memory_of(cache).address
    packing = {"block_tokens": TOKENS, "bytes": SIZE, "whole": "a test's"}
    memory = KvMemory([Layer(at, SIZE, SIZE, BLOCKS, packing)], [(at, len(cache))], cache)
    return HandOff(baton.Agent(name + "/0", serve_metadata=True), memory, "a model", Limits(silence=20, load=20))


class Number:
    """As numpy's are: a whole number, and no int."""

    def __init__(self, number):
        self.number = number

    def __index__(self):
        return self.number


class Decode(Pair):
    def test_a_transfer_is_loaded_by_one_request_at_a_time(self):
        self.p.fill([1], 3)
        self.p.save("t", [1])
        for request, block in (("a", 5), ("b", 6), ("c", 7)):
            self.d.service.loads.start(order("t", [Run(0, [block])], f"127.0.0.1:{self.p.agent.port}", request=request))
        got, failed = set(), set()
        while len(got) < 3:
            ended = self.ended()
            got, failed = got | ended.requests, failed | ended.failed
        self.assertEqual((got, failed), ({"a", "b", "c"}, {"b", "c"}))
        self.check([1], [5])

    def test_prefill_may_have_far_more_than_is_wanted(self):
        self.p.fill(range(BLOCKS), 3)
        self.p.save("t", list(range(BLOCKS)) * 20)
        self.order([5])
        self.assertFalse(self.ended().failed)
        self.check([0], [5])

    # Promise(vllm): A load always ends, whatever its order says, also when the agent or interpreter
    #   ends | a bad order is a failed load
    def test_an_order_that_makes_no_sense_is_a_load_that_failed(self):
        self.p.save("t", [1])
        right = order("t", [Run(0, [5])], f"127.0.0.1:{self.p.agent.port}")
        for wrong in ({"address": "127.0.0.1"}, {"address": "127.0.0.1:x"}, {"address": "127.0.0.1:²"}, {"ranks": 0},
                      {"ranks": 600}, {"ranks": 2.0}, {"runs": []}, {"tokens": []}, {"agent": "\ud800"}, {"agent": "a\0b"},
                      {"runs": [Run(0, [BLOCKS])]}, {"tokens": [(0, 17)]}):
            self.p.save("t", [1, 2])
            self.d.service.loads.start(right._replace(**wrong))
            self.assertEqual(self.ended()[:2], ({"t"}, {"t"}), wrong)
        self.assertFalse(self.d.service.loads.busy())

    def ended_of_name(self, address):
        """Of a load from there. Its address is asked for again and again, by the clock."""
        self.d.service.loads.start(order("t", [Run(0, [5])], address))
        while not (ended := self.d.service.loads.take()).requests:
            self.p.service.turn()
            self.d.service.turn()
            self.clock.now += 0.001
        return ended

    def test_a_wrong_address_fails_those_that_say_it(self):
        """Of a worker that is known, since it has asked us."""
        self.d.save("u", [7])
        self.p.service.loads.start(order("u", [Run(0, [2])], f"127.0.0.1:{self.d.agent.port}", True, "decode"))
        self.until(lambda: self.p.service.loads.take().requests)
        self.p.fill([1], 3)
        self.p.save("t", [1])
        self.assertTrue(self.ended_of_name("no host:1").failed)
        self.order([5])
        self.assertFalse(self.ended().failed)

    # Promise(vllm): A hand-off waits for no DNS, and delays no other | another thread looks names up
    def test_a_name_is_looked_up_while_others_are_served(self):
        self.p.fill([1], 3)
        self.p.save("t", [1])
        with unittest.mock.patch.object(baton.Agent, "fetch_metadata") as waits:
            while self.ended_of_name(f"localhost:{self.p.agent.port}").failed:  # silent, by this clock
                self.assertFalse(waits.called)
        self.check([1], [5])


class Prefill(Pair):
    # Promise(vllm): Two requests with one `transfer_id` never get each other's KV | neither is
    #   handed over; decode computes
    def test_a_name_that_two_requests_have_is_neithers(self):
        """Decode would take the blocks of one for those of the other."""
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "a")
        self.p.fill([2], 9)
        self.p.save("t", [2])
        self.p.service.sends.hold("t", "b")
        for sure in (True, False):
            self.order([5], sure=sure)
            self.assertTrue(self.ended().failed)
        self.assertEqual(self.p.service.sends.finished(), {"a", "b"})
        self.clock.now += 31
        self.p.service.turn()
        self.assertEqual(self.p.service.sends.finished(), set())
        self.p.save("t", [2])
        self.order([5], sure=True)
        self.assertFalse(self.ended().failed)

    def test_whose_blocks_are_the_same_frees_both(self):
        for request in "ab":
            self.p.save("t", [1])
            self.p.service.sends.hold("t", request)
        self.assertEqual(self.p.service.sends.finished(), {"a"})
        self.order([5])
        self.assertFalse(self.ended().failed)
        self.assertEqual(self.freed(), {"b"})

    def test_what_is_dropped_is_not_held(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.p.service.sends.drop("t")
        self.assertEqual(self.freed(), {"r"})

    def test_what_is_being_computed_is_not_forgotten(self):
        """However long it waited for its turn."""
        self.p.service.sends.hold("t", "r")
        self.p.service.sends.drop("t")
        self.assertEqual(self.freed(), {"r"})
        self.p.fill([1, 2], 3)
        self.p.save("t", [1])
        self.clock.now += 25
        self.p.save("t", [1, 2])
        self.clock.now += 10
        self.p.service.turn()
        self.p.service.sends.hold("t", "r")
        self.order([5, 6], sure=True)
        self.assertFalse(self.ended().failed)

    def test_whole_numbers_of_any_kind(self):
        self.p.fill([1, 2], 3)
        self.order([5, 6])
        self.asked()
        for layer in range(LAYERS):
            self.p.service.sends.save("t", layer, Run(Number(0), [Number(1), Number(2)]))
        self.assertFalse(self.ended().failed)


class Ends(Pair):
    def test_what_is_under_way_has_failed_and_what_is_held_is_free(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.order([5])
        self.order([6], "u")
        self.d.service.turn()
        self.order([7], "v")
        self.d.close()
        self.assertEqual(self.d.service.loads.take().failed, {"request t", "request u", "request v"})
        with self.assertRaises(baton.InvalidParamError):
            self.order([5])
        self.p.close()
        self.assertEqual(self.p.service.sends.finished(), {"r"})

    def test_the_thread_hears_that_its_agent_is_closed(self):
        half = running("own")
        half.loads.start(Order("r", "t", "nobody", "127.0.0.1:1", [Run(0, [1])], [(0, TOKENS)]))
        half.agent.close()
        self.assertEqual(half.loads.take(600).failed, {"r"})
        half.close()

    def test_a_forked_child_has_none(self):
        half = running("parent")

        def child():
            with self.assertRaises(baton.InvalidParamError):
                half.loads.start(Order("r", "t", "nobody", "127.0.0.1:1", [Run(0, [1])], [(0, TOKENS)]))
            half.close()

        in_child(child)
        self.assertEqual(half.loads.take().requests, set())
        half.close()

    def test_the_interpreter_ends_in_the_midst_of_it(self):
        ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False,
                             cwd=os.path.dirname(os.path.abspath(__file__)))
        said = [line for line in ran.stderr.splitlines() if "was not loaded" not in line]
        self.assertEqual((ran.returncode, ran.stdout, said), (0, "ends\n", []))

    def test_threads_of_an_engine(self):
        """One saves and holds, one asks what is free, one loads."""
        a, b = running("a"), running("b")
        free, wanted = set(), {str(number) for number in range(200)}

        def save():
            for number in sorted(wanted):
                a.sends.save(number, 0, Run(0, [int(number) % BLOCKS]))
                a.sends.hold(number, number)

        def load():
            for number in sorted(wanted):
                b.loads.start(Order(number, number, "a", f"127.0.0.1:{a.agent.port}", [Run(0, [1])], [(0, TOKENS)]))
        ended, failed = set(), set()
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pool.submit(save), pool.submit(load)
            while ended != wanted or free != wanted:
                done = b.loads.take(0.01)
                ended, failed = ended | done.requests, failed | done.failed
                free |= a.sends.finished()
        a.close(), b.close()
        self.assertFalse(failed)


class Heads(unittest.TestCase):
    def test_they_are_those_that_the_layers_say(self):
        """Else a worker of two would ask the wrong ones of four, and take what they have for all."""
        row = 2 * 8
        place = {"start": 0, "heads": [[2, 8]], "tokens": [[TOKENS, row]], "elements": [[8, 1]]}
        packing = {"block_tokens": TOKENS, "bytes": 8 * TOKENS * row, "dtype": "float32", "heads": 2, "total_heads": 4,
                   "first_head": 2, "head_size": 8, "key": place, "value": {**place, "start": TOKENS * row}}
        cache = bytearray(packing["bytes"])
        at = baton.memory_of(cache).address

        def half(shard):
            memory = KvMemory([Layer(at, packing["bytes"], packing["bytes"], 1, packing)], [(at, len(cache))], cache)
            return HandOff(baton.Agent("a/1"), memory, "a model", shard=shard, clock=Clock())
        for shard in (Shard(1, 2), Shard(1, 2, 4)):
            made = half(shard)
            self.assertEqual(made.shard, Shard(1, 2, 4))
            made.close()
        with self.assertRaises(ValueError):
            half(Shard(1, 2, 8))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
