"""Blocks of a request from prefill's engine to decode's: two halves of a hand-off with real agents over two
caches, by hand and by a clock that stands still."""
import sys
import unittest

from baton.hand_off import Run
from engines import BLOCKS, LAYERS, SIZE, Engine, Pair, order


class HandOff(Pair):
    def test_blocks_come_whether_prefill_or_decode_was_first(self):
        for transfer, first in (("decode first", False), ("prefill first", True)):
            self.p.fill([3, 1, 8], len(transfer))
            if first:
                self.p.save(transfer, [3, 1, 8])
            self.order([5, 6, 7], transfer)
            if not first:
                self.asked()
                self.p.save(transfer, [3, 1, 8])
            self.assertEqual(self.ended(), ({"request " + transfer}, set(), [(3 * LAYERS * SIZE, 0, 3 * LAYERS, 0)]))
            self.check([3, 1, 8], [5, 6, 7])
            self.p.service.sends.hold(transfer, "r")
            self.assertEqual(self.freed(), {"r"})

    def test_chunks_and_layers_come_one_by_one_and_what_decode_has_stays_away(self):
        self.p.fill(range(BLOCKS), 1)
        self.order([9, 2], first=1)  # its first block is here already
        self.d.cache[self.d.at(0, 4)] = b"x" * SIZE
        for blocks in ([4], [4, 5], [4, 5, 6]):
            for layer in range(LAYERS):
                self.assertFalse(self.d.service.loads.take().requests)
                self.p.service.sends.save("t", layer, Run(0, blocks))
                for _ in range(20):
                    self.p.service.turn()
                    self.d.service.turn()
        self.assertEqual(self.ended()[:2], ({"request t"}, set()))
        self.check([5, 6], [9, 2])
        self.assertEqual(self.d.cache[self.d.at(0, 4)], b"x" * SIZE)

    def test_a_prefill_that_died_is_found_at_once_and_one_that_came_back_is_used(self):
        self.p.fill([1], 3)
        self.p.save("t", [1])
        self.order([5])
        self.assertFalse(self.ended().failed)
        port = self.p.agent.port
        self.p.close()
        self.until(lambda: not self.d.agent.has_remote("prefill/0"), prefill=False)
        self.order([6], "u", port=port)
        while not self.d.service.loads.take().failed:  # nobody listens there: silence
            self.d.service.turn()
            self.clock.now += 0.01
        self.clock.now += 1
        self.p = Engine("prefill", self.clock)
        self.addCleanup(self.p.close)
        self.p.fill([2], 9)
        self.p.save("v", [2])
        self.order([7], "v")
        self.assertFalse(self.ended().failed)
        self.check([2], [7])

    def test_who_has_asked_is_asked_in_its_turn(self):
        """It is known then, and its memory is not."""
        self.p.save("t", [1])
        self.order([5])
        self.assertFalse(self.ended().failed)
        self.d.fill([7], 4)
        self.d.save("u", [7])
        self.p.service.loads.start(order("u", [Run(0, [2])], f"127.0.0.1:{self.d.agent.port}", True, "decode"))
        got = []
        self.until(lambda: got or got.extend([e for e in [self.p.service.loads.take()] if e.requests]))
        self.assertFalse(got[0].failed)
        self.check([2], [7])

    def test_a_transfer_that_prefill_does_not_know_fails_at_once_if_it_must(self):
        self.order([5], sure=True)
        self.assertTrue(self.ended().failed)

    def test_what_prefill_drops_fails(self):
        self.order([5])
        self.asked()
        self.p.service.sends.drop("t")
        self.assertTrue(self.ended().failed)

    def test_another_model_is_refused_each_time_and_one_that_came_back_with_ours_is_used(self):
        self.p.close()
        self.p = Engine("other", self.clock, "another model")
        for transfer in "tu":  # the clock stands still: neither waits for anything
            self.p.save(transfer, [1])
            self.order([5], transfer, agent="other")
            self.assertTrue(self.ended().failed)
        self.p.close()
        self.until(lambda: not self.d.agent.has_remote("other/0"), prefill=False)
        self.p = Engine("other", self.clock)
        self.addCleanup(self.p.close)
        self.p.fill([2], 9)
        self.p.save("v", [2])
        self.order([7], "v", agent="other")
        self.assertFalse(self.ended().failed)
        self.check([2], [7])

    # Promise(vllm): Blocks that prefill holds are returned, at the latest when the lease ends |
    #   decode says when it has read
    def test_blocks_that_nobody_reads_are_given_back_after_their_lease(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.assertFalse(self.p.service.sends.finished())
        self.p.service.turn()
        self.assertFalse(self.p.service.sends.finished())
        self.clock.now += 31
        self.p.service.turn()
        self.assertEqual(self.p.service.sends.finished(), {"r"})

    def test_what_decode_does_not_want_is_given_back(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.order(None, sure=True)
        self.assertEqual(self.freed(), {"r"})

    def test_blocks_that_were_computed_again_are_told_again(self):
        self.p.fill([1, 2, 3], 5)
        self.p.save("t", [1, 2])
        self.p.save("t", [3, 2])  # preempted meanwhile
        self.order([5, 6])
        self.assertFalse(self.ended().failed)
        self.check([3, 2], [5, 6])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
