"""The class that vLLM makes, without vLLM: its scheduler half with what vLLM's scheduler would hand it, and both halves
together, as vLLM's engine calls them."""
import logging
import pathlib
import sys
import tempfile
import types
import unittest
import unittest.mock

from baton.vllm.decode import Order
from baton.vllm.scheduler import Scheduler
from vllm_fakes import Tensor, blocks, config, fake_vllm, request, scheduled


class Scheduling(unittest.TestCase):
    def setUp(self):
        self.scheduler = Scheduler(16, "me", "here:1")

    def test_prefill_in_chunks(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 40)
        self.assertEqual(self.scheduler.matched(one, 0), (0, False))
        self.scheduler.allocated(one, blocks(4, 5), 0)
        steps = [scheduled(new=[("r", [4, 5], 0, 20)]), scheduled(cached=[("r", [6], 20, 12)]),
                 scheduled(cached=[("r", None, 32, 8)])]
        self.assertEqual([self.scheduler.step(step).saves for step in steps],
                         [[("t", [4])], [("t", [4, 5])], [("t", [4, 5, 6])]])
        held, params = self.scheduler.finished(one, [4, 5, 6])
        self.assertTrue(held)
        self.assertEqual((params["transfer_id"], params["remote_agent"], params["remote_address"]),
                         ("t", "me", "here:1"))
        step = self.scheduler.step(scheduled())
        self.assertEqual((step.holds, step.forward), ([("t", "r")], False))

    def test_preempted_prefill_begins_anew(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 32)
        self.scheduler.allocated(one, blocks(4, 5), 0)
        self.scheduler.step(scheduled(new=[("r", [4, 5], 0, 20)]))
        step = self.scheduler.step(scheduled(cached=[("r", [8, 9], 0, 32)], resumed=["r"]))
        self.assertEqual(step.saves, [("t", [8, 9])])

    def test_aborted_prefill_is_dropped(self):
        one = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 32, "FINISHED_ABORTED")
        self.scheduler.allocated(one, blocks(4, 5), 0)
        self.assertEqual(self.scheduler.finished(one, [4, 5]), (False, None))
        self.assertEqual(self.scheduler.step(scheduled()).drops, ["t"])

    def params(self, **more):
        return {"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p", "remote_address": "h:2", **more}

    def test_decode_wants_what_it_lacks_once(self):
        one = request("r", self.params(remote_finished=True), 40)
        self.assertEqual(self.scheduler.matched(one, 16), (24, True))
        self.scheduler.allocated(one, blocks(7, 8, 9, 10), 24)
        self.assertEqual(self.scheduler.step(scheduled()).orders, [Order("r", "t", "p", "h:2", 1, [8, 9], True)])
        self.assertEqual(self.scheduler.matched(one, 0), (0, False))  # again after a failure: computed here
        self.scheduler.allocated(one, blocks(7, 8, 9), 0)
        self.assertFalse(self.scheduler.step(scheduled()).orders)

    def test_what_is_all_here_or_ended_early_is_given_back(self):
        one, two = request("r", self.params(), 32), request("s", self.params(transfer_id="u"), 32)
        self.assertEqual(self.scheduler.matched(one, 32), (0, False))
        self.scheduler.allocated(one, blocks(7, 8), 0)
        self.assertEqual(self.scheduler.finished(two, []), (False, None))
        self.assertEqual([(o.transfer, o.blocks) for o in self.scheduler.step(scheduled()).orders],
                         [("t", None), ("u", None)])

    def test_params_that_cannot_be_used_are_computed_here(self):
        for wrong in ({"remote_agent": None}, {"remote_address": "h"}, {"transfer_id": 5}, {"remote_address": ""}):
            one = request("r", self.params(**wrong), 40)
            self.assertEqual(self.scheduler.matched(one, 0), (0, False))
            self.scheduler.allocated(one, blocks(7, 8, 9), 0)
            self.assertFalse(self.scheduler.step(scheduled()).orders)


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
        return worker.get_finished(set()), worker.get_block_ids_with_load_errors()

    def test_a_request_goes_from_one_engine_to_the_other(self):
        p, d = self.worker("p"), self.worker("d")
        address = f"127.0.0.1:{p._service.agent.port}"
        ps, ds = self.kind(config("p"), 0), self.kind(config("d"), 0)
        asked = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 30)
        ps.update_state_after_alloc(asked, blocks(3, 5), 0)
        self.run_step(p, ps, scheduled(new=[("r", [3, 5], 0, 30)]), [3, 5])
        held, params = ps.request_finished(asked, [3, 5])
        self.assertTrue(held)

        wanted = request("s", dict(params, remote_address=address), 30)
        self.assertEqual(ds.get_num_new_matched_tokens(wanted, 0), (30, True))
        ds.update_state_after_alloc(wanted, blocks(1, 2), 30)
        got, errors = self.run_step(d, ds, scheduled())
        while not got[1]:
            got, errors = self.run_step(d, ds, scheduled())
        self.assertEqual((got, errors), ((None, {"s"}), set()))
        for name in d.caches:
            self.assertEqual(p.caches[name].memory[192:256], d.caches[name].memory[64:128])
            self.assertEqual(p.caches[name].memory[320:384], d.caches[name].memory[128:192])
        self.assertEqual(self.kind.build_kv_connector_stats(d.get_kv_connector_stats().data)
                         .reduce()["Num successful transfers"], 1)
        self.assertIsNone(d.get_kv_connector_stats())
        freed, _ = self.run_step(p, ps, scheduled())
        while not freed[0]:
            freed, _ = self.run_step(p, ps, scheduled())
        self.assertEqual(freed[0], {"r"})

    def test_a_prefill_that_is_not_there_is_an_error_of_the_blocks(self):
        d, ds = self.worker("d", silence=0.1), self.kind(config("d"), 0)
        wanted = request("s", {"do_remote_prefill": True, "transfer_id": "t", "remote_agent": "p",
                               "remote_address": "127.0.0.1:1"}, 30)
        ds.get_num_new_matched_tokens(wanted, 0)
        ds.update_state_after_alloc(wanted, blocks(1, 2), 30)
        got, errors = self.run_step(d, ds, scheduled())
        while not got[1]:
            got, errors = self.run_step(d, ds, scheduled())
        self.assertEqual((got[1], errors), ({"s"}, {1, 2}))
        self.assertEqual(d.get_kv_connector_stats().data["failed"], 1)

    def test_another_checkpoint_of_the_same_shape_is_refused(self):
        ours, theirs = self.worker("d"), self.kind(config("p"), 1)
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "model.safetensors").write_bytes(b"Weights")
            theirs._config.model_config.model = folder
            theirs.caches = {"layer 0": Tensor(8, 64), "layer 1": Tensor(8, 64)}
            theirs.register_kv_caches(theirs.caches)
        self.addCleanup(theirs.shutdown)
        self.assertEqual(ours._service.loads.identity, self.worker("e")._service.sends.identity)
        self.assertNotEqual(ours._service.loads.identity, theirs._service.sends.identity)
        ds, ps = self.kind(config("d"), 0), self.kind(config("p"), 0)
        asked = request("r", {"do_remote_decode": True, "transfer_id": "t"}, 30)
        ps.update_state_after_alloc(asked, blocks(3, 5), 0)
        self.run_step(theirs, ps, scheduled(new=[("r", [3, 5], 0, 30)]), [3, 5])
        _, params = ps.request_finished(asked, [3, 5])
        wanted = request("s", dict(params, remote_address=f"127.0.0.1:{theirs._service.agent.port}"), 30)
        ds.get_num_new_matched_tokens(wanted, 0)
        ds.update_state_after_alloc(wanted, blocks(1, 2), 30)
        got, errors = self.run_step(ours, ds, scheduled())
        while not got[1]:
            got, errors = self.run_step(ours, ds, scheduled())
        self.assertEqual((got[1], errors), ({"s"}, {1, 2}))

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

    def test_a_cache_that_cannot_be_moved_is_refused(self):
        groups = types.SimpleNamespace(kv_cache_groups=[1, 2])
        with self.assertRaisesRegex(ValueError, "disable-hybrid"):
            self.kind(config("x"), 1, groups)
        odd = self.kind(config("x"), 1)
        with self.assertRaisesRegex(ValueError, "differ"):
            odd.register_kv_caches({"a": Tensor(8, 64), "b": Tensor(8, 32)})


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
