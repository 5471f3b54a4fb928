"""The class that vLLM makes, without vLLM: its scheduler half with what vLLM's scheduler would hand it, and both halves
together, as vLLM's engine calls them."""
import contextlib
import logging
import pathlib
import sys
import tempfile
import unittest
import unittest.mock

from baton.hand_off import Order, Run
from baton.vllm.groups import Group, groups_of, there
from baton.vllm.scheduler import Scheduler
from ports import free_ports
from vllm_fakes import (FullAttentionSpec, MambaSpec, SlidingWindowSpec, Tensor, UniformTypeKVCacheSpecs, blocks,
                        cache_config, config, fake_vllm, request, scheduled)


class Scheduling(unittest.TestCase):
    def setUp(self):
        self.scheduler = Scheduler([Group(16)], "me", "here:1")

    def test_prefill_in_chunks(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 40)
        self.assertEqual(self.scheduler.matched(one, 0), (0, False))
        self.scheduler.allocated(one, blocks([4, 5]), 0)
        steps = [scheduled(new=[("r", ([4, 5],), 0, 20)]), scheduled(cached=[("r", ([6],), 20, 12)]),
                 scheduled(cached=[("r", None, 32, 8)])]
        self.assertEqual([self.scheduler.step(step).saves for step in steps],
                         [[("t", [Run(0, ids)])] for ids in ([4], [4, 5], [4, 5, 6])])
        held, params = self.scheduler.finished(one, ([4, 5, 6],))
        self.assertTrue(held)
        self.assertEqual((params["transfer_id"], params["remote_agent"], params["remote_address"]),
                         ("t", "me", "here:1"))
        self.assertEqual(params["tp_size"], 1)
        step = self.scheduler.step(scheduled())
        self.assertEqual((step.holds, step.forward), ([("t", "r")], False))

    def test_preempted_prefill_begins_anew(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 32)
        self.scheduler.allocated(one, blocks([4, 5]), 0)
        self.scheduler.step(scheduled(new=[("r", ([4, 5],), 0, 20)]))
        step = self.scheduler.step(scheduled(cached=[("r", ([8, 9],), 0, 32)], resumed=["r"]))
        self.assertEqual(step.saves, [("t", [Run(0, [8, 9])])])

    def test_aborted_prefill_is_dropped(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 32, "FINISHED_ABORTED")
        self.scheduler.allocated(one, blocks([4, 5]), 0)
        self.assertEqual(self.scheduler.finished(one, ([4, 5],)), (False, None))
        self.assertEqual(self.scheduler.step(scheduled()).drops, ["t"])

    def params(self, **more):
        return {"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p", "remote_address": "h:2", **more}

    def test_decode_wants_what_it_lacks_once(self):
        one = request("r", self.params(remote_finished=True), 40)
        self.assertEqual(self.scheduler.matched(one, 16), (23, True))
        self.scheduler.allocated(one, blocks([7, 8, 9, 10]), 23)
        self.assertEqual(self.scheduler.step(scheduled()).orders, [Order("r", "t", "p", "h:2", [Run(1, [8, 9])], [(16, 39)], 1, True)])
        self.assertEqual(self.scheduler.matched(one, 0), (0, False))  # again after a failure: computed here
        self.scheduler.allocated(one, blocks([7, 8, 9]), 0)
        self.assertFalse(self.scheduler.step(scheduled()).orders)

    def test_what_is_all_here_or_ended_early_is_given_back(self):
        one, two = request("r", self.params(), 32), request("s", self.params(transfer_id="u"), 32)
        self.assertEqual(self.scheduler.matched(one, 32), (0, False))
        self.scheduler.allocated(one, blocks([7, 8]), 0)
        self.assertEqual(self.scheduler.finished(two, ([],)), (False, None))
        self.assertEqual([(o.transfer, o.runs) for o in self.scheduler.step(scheduled()).orders],
                         [("t", None), ("u", None)])

    def test_two_requests_with_one_transfer_id_are_not_handed_over(self):
        """Decode would take the blocks of one for those of the other."""
        names = (("a", [4]), ("b", [5]), ("c", [6]))
        for name, ids in names:
            one = request(name, {"do_remote_decode": True, "transfer_id": "t"}, 16)
            self.scheduler.allocated(one, blocks(ids), 0)
        step = self.scheduler.step(scheduled(new=[(name, (ids,), 0, 16) for name, ids in names]))
        self.assertEqual((step.saves, step.drops), ([], ["t"]))
        for name, ids in names:
            self.assertEqual(self.scheduler.finished(request(name, {"do_remote_decode": True}, 16), (ids,)), (False, None))

    def test_params_that_cannot_be_used_are_computed_here(self):
        for wrong in ({"tp_size": 0}, {"tp_size": "2"}, {"tp_size": 2.0},
                      {"remote_address": "h:²"}, {"remote_agent": None}, {"remote_address": "h"}, {"transfer_id": 5}, {"remote_address": ""}):
            one = request("r", self.params(**wrong), 40)
            self.assertEqual(self.scheduler.matched(one, 0), (0, False))
            self.scheduler.allocated(one, blocks([7, 8, 9]), 0)
            self.assertFalse(self.scheduler.step(scheduled()).orders)


class Groups(unittest.TestCase):
    """Layers that share their blocks, and which of a prompt's blocks they have."""

    # Promise(vllm): Models with sliding windows get the blocks that their last token looks back at;
    #   other kinds are refused by name | each group has its block size, window and run of blocks
    def test_of_windows_those_are_told_of_that_stay_until_the_prompt_is_computed(self):
        """As vLLM takes them away: before a step it knows how many tokens are computed, and the first token of the step
        looks back at window - 1 of those."""
        for size in (1, 4, 16):
            for window in range(1, 40):
                group = Group(size, window)
                for prompt in range(1, 100):
                    last = prompt - 1  # decode computes this token, and its window begins here:
                    self.assertEqual(group.needed(prompt), max(0, last - window + 1) // size)
                    for computed in range(prompt):
                        gone = max(0, computed - window + 1) // size
                        self.assertLessEqual(gone, group.needed(prompt))
        self.assertEqual(Group(4).needed(99), 0)

    def test_what_is_there_of_a_request(self):
        self.assertEqual(there([0, 0, 7, 8, 9], 1, 4), Run(2, [7, 8]))
        self.assertEqual(there([5, 6, 7], 1, 9), Run(1, [6, 7]))
        self.assertEqual(there([0, 0], 0, 2).ids, [])
        self.assertEqual(there([5, 6, 7], 2, 1).ids, [])

    def test_as_vllm_tells_of_them(self):
        self.assertEqual(groups_of(None, 16), [Group(16)])
        told = cache_config(a=FullAttentionSpec(32), b=SlidingWindowSpec(100, 8),
                            c=UniformTypeKVCacheSpecs(x=SlidingWindowSpec(4), y=SlidingWindowSpec(4)))
        self.assertEqual(groups_of(told, 1), [Group(32, None, ["a"]), Group(8, 100, ["b"]), Group(16, 4, ["c"])])

    def test_prefill_and_decode_speak_of_the_blocks_of_each_group(self):
        scheduler = Scheduler([Group(16), Group(16, 20), Group(32, 20)], "me", "here:1")
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 70)  # windows begin at token 50
        mine = ([1, 2, 3, 4, 5], [11, 12, 13, 14, 15], [21, 22, 23])
        scheduler.allocated(one, blocks(*mine), 0)
        steps = [scheduled(new=[("r", ([1, 2, 3], [11, 12, 13], [21, 22]), 0, 48)]),
                 scheduled(cached=[("r", ([4], [14], []), 48, 16)]), scheduled(cached=[("r", ([5], [15], [23]), 64, 6)])]
        said = [scheduler.step(step).saves for step in steps]
        self.assertEqual(said[0], [("t", [Run(0, [1, 2, 3]), Run(3, []), Run(1, [])])])
        self.assertEqual(said[1], [("t", [Run(0, [1, 2, 3, 4]), Run(3, [14]), Run(1, [22])])])
        self.assertEqual(said[2], [("t", [Run(0, mine[0]), Run(3, [14, 15]), Run(1, [22, 23])])])
        two = request("s", {"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p",
                            "remote_address": "h:2"}, 70)
        self.assertEqual(scheduler.matched(two, 32), (37, True))
        scheduler.allocated(two, blocks([1, 2, 3, 4, 5], [0, 0, 0, 6, 7], [0, 8, 9]), 37)
        self.assertEqual(scheduler.step(scheduled()).orders[0].runs, [Run(2, [3, 4, 5]), Run(3, [6, 7]), Run(1, [8, 9])])


class Connector(unittest.TestCase):
    """The class that vLLM makes, both halves of it, as its engine calls them."""

    def setUp(self):
        with unittest.mock.patch.dict(sys.modules, fake_vllm()):
            from baton.vllm import BatonConnector
        self.kind = BatonConnector

    def worker(self, name, **more):
        one = self.kind(config(name, **more), 1)
        one.caches = {"layer 0": Tensor(8, 64), "layer 1": Tensor(8, 64)}
        one.register_kv_caches(one.caches)
        self.addCleanup(one.shutdown)
        return one

    @staticmethod
    def run_step(worker, scheduler, output, blocks=()):
        worker.metadata = scheduler.build_connector_meta(output)
        for name, cache in worker.caches.items() if output.total_num_scheduled_tokens else ():
            for block in blocks:
                cache.memory[64 * block:64 * block + 64] = name.encode() * 8 + bytes([block] * 8)
            worker.save_kv_layer(name, cache, None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        return (results.finished_sending, results.finished_recving), results.failed_recving

    def prefilled(self, workers, scheduler, transfer="t", **more):
        """Has prefill compute a prompt of 30 tokens in blocks 3 and 5; what decode is told."""
        asked = request(f"of {transfer}", {"do_remote_decode": True, "transfer_id": transfer}, 30)
        scheduler.update_state_after_alloc(asked, blocks([3, 5]), 0)
        for worker in workers:
            self.run_step(worker, scheduler, scheduled(new=[(asked.request_id, ([3, 5],), 0, 30)]), [3, 5])
        held, params = scheduler.request_finished_all_groups(asked, ([3, 5],))
        self.assertTrue(held)
        return dict(params, **more)

    def wants(self, scheduler, params):
        """Decode's request "s" for it, in blocks 1 and 2."""
        wanted = request("s", params, 30)
        self.assertEqual(scheduler.get_num_new_matched_tokens(wanted, 0), (29, True))
        scheduler.update_state_after_alloc(wanted, blocks([1, 2]), 29)

    def loaded(self, worker, scheduler):
        """Steps until a load has ended: the requests whose have, and those whose have failed."""
        got, errors = self.run_step(worker, scheduler, scheduled())
        while not got[1]:
            got, errors = self.run_step(worker, scheduler, scheduled())
        self.assertEqual(got[0], set())
        return got[1], errors

    def test_a_request_goes_from_one_engine_to_the_other(self):
        p, d = self.worker("p"), self.worker("d")
        ps, ds = self.kind(config("p"), 0), self.kind(config("d"), 0)
        self.wants(ds, self.prefilled([p], ps, remote_address=f"127.0.0.1:{p._service.agent.port}"))
        self.assertEqual(self.loaded(d, ds), ({"s"}, set()))
        for name in d.caches:
            self.assertEqual(p.caches[name].memory[192:256], d.caches[name].memory[64:128])
            self.assertEqual(p.caches[name].memory[320:384], d.caches[name].memory[128:192])
        self.assertEqual(self.kind.build_kv_connector_stats(d.get_kv_connector_stats().data)
                         .reduce()["Num successful transfers"], 1)
        self.assertIsNone(d.get_kv_connector_stats())
        freed, _ = self.run_step(p, ps, scheduled())
        while not freed[0]:
            freed, _ = self.run_step(p, ps, scheduled())
        self.assertEqual(freed[0], {"of t"})

    def test_each_worker_of_an_engine_has_its_own_and_whole_blocks_go_to_as_many(self):
        """Nobody looks into these caches' blocks: two workers' are not one's."""
        port = free_ports(2)
        p = [self.worker("p", rank=rank, tp_size=2, port=port) for rank in (0, 1)]
        ps = self.kind(config("p", tp_size=2, port=port), 0)
        for transfer, tp_size in (("t", 2), ("u", 1)):
            params = self.prefilled(p, ps, transfer)
            self.assertEqual((params["tp_size"], params["remote_address"]), (2, f"127.0.0.1:{port}"))
            ds = self.kind(config("d" + transfer, tp_size=tp_size), 0)
            self.wants(ds, params)
            step = ds.build_connector_meta(scheduled())
            for rank in range(tp_size):
                d = self.worker("d" + transfer, rank=rank, tp_size=tp_size)
                d.metadata = step
                with self.assertLogs("baton.hand_off") if tp_size == 1 else contextlib.nullcontext() as said:
                    d.start_load_kv(None)
                    results = d.get_transfer_results(set())
                    while not results.finished_recving:
                        results = d.get_transfer_results(set())
                self.assertEqual(results.failed_recving, set() if tp_size == 2 else {"s"})
                if tp_size == 2:
                    self.assertEqual(d.caches["layer 1"].memory[64:128], p[rank].caches["layer 1"].memory[192:256])
                else:
                    self.assertIn("of one of 2 ranks", said.output[0])

    def test_a_prefill_that_is_not_there_is_an_error_of_the_blocks(self):
        d, ds = self.worker("d", silence=0.1), self.kind(config("d"), 0)
        self.wants(ds, {"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p", "remote_address": "127.0.0.1:1"})
        self.assertEqual(self.loaded(d, ds), ({"s"}, {"s"}))
        self.assertEqual(d.get_kv_connector_stats().data["failed"], 1)

    # Promise(vllm): Two checkpoints of one shape never mix their KV | a SHA-256 over the weights'
    #   files must be equal
    def test_another_checkpoint_of_the_same_shape_is_refused(self):
        ours, theirs = self.worker("d"), self.kind(config("p"), 1)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "model.safetensors").write_bytes(b"Weights")
            theirs._config.model_config.model = folder
            theirs.caches = {"layer 0": Tensor(8, 64), "layer 1": Tensor(8, 64)}
            theirs.register_kv_caches(theirs.caches)
        self.addCleanup(theirs.shutdown)
        self.assertEqual(ours._service.identity, self.worker("e")._service.identity)
        self.assertNotEqual(ours._service.identity, theirs._service.identity)
        ds, ps = self.kind(config("d"), 0), self.kind(config("p"), 0)
        self.wants(ds, self.prefilled([theirs], ps, remote_address=f"127.0.0.1:{theirs._service.agent.port}"))
        self.assertEqual(self.loaded(ours, ds), ({"s"}, {"s"}))

    def test_what_it_says_appears_where_vllm_says_something_unless_the_program_has_said_where(self):
        ours, theirs, root = logging.getLogger("baton.vllm"), logging.getLogger("vllm"), logging.getLogger()
        place = logging.NullHandler()
        for place_of_the_programs in ([], [logging.NullHandler()]):
            with unittest.mock.patch.multiple(ours, handlers=[], propagate=True, level=0), \
                    unittest.mock.patch.multiple(theirs, handlers=[place], level=logging.INFO), \
                    unittest.mock.patch.multiple(root, handlers=place_of_the_programs):
                self.kind(config("x"), 0)
                self.assertEqual(ours.handlers, [] if place_of_the_programs else [place])
                self.assertEqual(ours.level, 0 if place_of_the_programs else logging.INFO)

    def test_a_model_of_several_kinds_of_attention(self):
        """Three layers with blocks of 16, of which one has a window of 20 tokens, and other blocks in every way."""
        kinds = {"full": FullAttentionSpec(), "window": SlidingWindowSpec(20)}
        kinds = cache_config(**kinds)
        kinds.kv_cache_groups[0].layer_names.append("last")

        def caches():
            return {"window": Tensor(16, 32), "full": Tensor(12, 64), "shares full's": Tensor(12, 64),
                    "last": Tensor(12, 64)}

        workers, schedulers = [], []
        for name in "pd":
            one = self.kind(config(name), 1, kinds)
            one.caches = caches()
            one.register_kv_caches(one.caches)
            self.addCleanup(one.shutdown)
            workers.append(one)
            schedulers.append(self.kind(config(name), 0, kinds))
        (p, d), (ps, ds) = workers, schedulers
        asked = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 62)
        ps.update_state_after_alloc(asked, blocks([3, 5, 6, 7], [8, 9, 10, 11]), 0)
        for at, name in enumerate(("full", "window", "last")):
            for i in range(len(p.caches[name].memory)):
                p.caches[name].memory[i] = (at + i * 7) % 251
        self.run_step(p, ps, scheduled(new=[("r", ([3, 5, 6, 7], [8, 9, 10, 11]), 0, 62)]))
        held, params = ps.request_finished_all_groups(asked, ([3, 5, 6, 7], [0, 0, 10, 11]))
        self.assertTrue(held)
        wanted = request("s", dict(params, remote_address=f"127.0.0.1:{p._service.agent.port}"), 62)
        self.assertEqual(ds.get_num_new_matched_tokens(wanted, 16), (45, True))
        ds.update_state_after_alloc(wanted, blocks([1, 2, 3, 4], [0, 0, 6, 7]), 45)
        self.assertEqual(self.loaded(d, ds), ({"s"}, set()))
        expected = {name: bytearray(len(cache.memory)) for name, cache in d.caches.items()}
        for name, size, pairs in (("full", 64, ((2, 5), (3, 6), (4, 7))), ("last", 64, ((2, 5), (3, 6), (4, 7))),
                                  ("window", 32, ((6, 10), (7, 11)))):
            for mine, theirs in pairs:
                expected[name][size * mine:size * mine + size] = \
                    p.caches[name].memory[size * theirs:size * theirs + size]
        self.assertEqual({name: cache.memory for name, cache in d.caches.items()}, expected)
        self.assertNotEqual(p._service.identity, self.worker("x")._service.identity)

    def test_what_cannot_be_moved_is_refused_by_name(self):
        for groups, words in ((dict(a=FullAttentionSpec(), b=MambaSpec()), r"not that of b \(MambaSpec\)"),
                              (dict(a=UniformTypeKVCacheSpecs(a=FullAttentionSpec(), b=SlidingWindowSpec(4))),
                               "UniformTypeKVCacheSpecs")):
            with self.assertRaisesRegex(ValueError, words):
                self.kind(config("x"), 1, cache_config(**groups))


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
