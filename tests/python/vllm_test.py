"""The vLLM connector without vLLM: its scheduler half with what vLLM's scheduler would hand it, its worker halves with
real agents over two caches, by hand and by a clock that stands still."""
import hashlib
import json
import logging
import os
import pathlib
import sys
import tempfile
import types
import unittest
import unittest.mock

import baton
from baton.vllm.decode import Order
from baton.vllm.memory import KvMemory
from baton.vllm.scheduler import Scheduler
from baton.vllm.service import identity_of
from baton.vllm.weights import weights_digest
from vllm_engines import BLOCKS, LAYERS, SIZE, Clock, Engine

class HandOff(unittest.TestCase):
    def setUp(self):
        self.clock = Clock()
        self.p, self.d = Engine("prefill", self.clock), Engine("decode", self.clock)
        self.addCleanup(self.p.close)
        self.addCleanup(self.d.close)

    def order(self, blocks, transfer="t", first=0, sure=False, agent="prefill", port=None):
        address = f"127.0.0.1:{port or self.p.agent.port}"
        self.d.service.loads.start(Order("request " + transfer, transfer, agent, address,
                                         first, blocks, sure))

    def until(self, fact, prefill=True):
        """Turns both engines until it is so. A fact that never comes is the test's time limit's to find."""
        while not fact():
            if prefill:
                self.p.service.turn()
            self.d.service.turn()

    def ended(self, prefill=True):
        got = []
        self.until(lambda: got or got.extend([e for e in [self.d.service.loads.take()] if e.requests]), prefill)
        return got[0]

    def check(self, theirs, mine):
        for layer in range(LAYERS):
            for a, b in zip(theirs, mine):
                self.assertEqual(self.p.cache[self.p.at(layer, a)], self.d.cache[self.d.at(layer, b)])

    def freed(self):
        got = set()
        self.until(lambda: got.update(self.p.service.sends.finished()) or got)
        return got

    def test_blocks_come_whether_prefill_or_decode_was_first(self):
        for transfer, first in (("prefill first", True), ("decode first", False)):
            self.p.fill([3, 1, 8], len(transfer))
            if first:
                self.p.save(transfer, [3, 1, 8])
            self.order([5, 6, 7], transfer)
            if not first:
                self.until(lambda: "decode first" in self.p.service.sends._sends)
                self.p.save(transfer, [3, 1, 8])
            self.assertEqual(self.ended()[:2], ({"request " + transfer}, set()))
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
                self.p.service.sends.save("t", layer, blocks)
                for _ in range(20):
                    self.p.service.turn()
                    self.d.service.turn()
        self.assertEqual(self.ended()[:2], ({"request t"}, set()))
        self.check([5, 6], [9, 2])
        self.assertEqual(self.d.cache[self.d.at(0, 4)], b"x" * SIZE)

    def test_a_block_that_changed_on_its_way_is_found(self):
        self.p.fill([1, 2], 3)
        self.p.save("t", [1, 2])
        self.p.cache[self.p.at(2, 1).start + 100] ^= 4  # one bit
        self.order([5, 6])
        self.assertEqual(self.ended()[:2], ({"request t"}, {5, 6}))

    def test_any_bit_is_found(self):
        self.p.fill([1], 3)
        for bit in (0, 1, 8 * SIZE // 2 + 3, 8 * SIZE - 1):
            transfer = f"bit {bit}"
            self.p.save(transfer, [1])
            at = self.p.at(0, 1).start + bit // 8
            self.p.cache[at] ^= 1 << bit % 8
            self.order([5], transfer)
            self.assertEqual(self.ended().failed, {5})
            self.p.cache[at] ^= 1 << bit % 8

    def test_a_prefill_that_is_silent_is_given_up(self):
        self.order([5])
        self.until(lambda: self.p.service.sends._sends)  # it knows, and says nothing more
        self.p.service.turn()
        for _ in range(10):
            self.d.service.turn()
        self.assertFalse(self.d.service.loads.take().requests)
        # Its last words may still be on their way, and count from when they are heard.
        while not (ended := self.d.service.loads.take()).requests:
            self.d.service.turn()
            self.clock.now += 0.01
        self.assertEqual(ended[:2], ({"request t"}, {5}))
        self.assertLess(self.clock.now, 109)  # by its silence, not by the age of the load

    def test_one_that_answers_is_waited_for_until_the_load_is_too_old(self):
        self.order([5])
        self.d.service.turn()
        load = self.d.service.loads._loads["t"]
        while self.clock.now < 109.9:  # a quarter of a second at a time; it answers each time
            self.until(lambda: load.heard == self.clock.now)
            self.assertFalse(self.d.service.loads.take().requests)
            self.clock.now += 0.25
        self.clock.now = 111
        self.assertEqual(self.ended().failed, {5})

    def test_a_prefill_that_died_is_found_at_once_and_one_that_came_back_is_used(self):
        self.p.fill([1], 3)
        self.p.save("t", [1])
        self.order([5])
        self.assertFalse(self.ended().failed)
        port = self.p.agent.port
        self.p.close()
        self.until(lambda: not self.d.agent.has_remote("prefill"), prefill=False)
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

    def test_a_transfer_that_prefill_does_not_know_fails_at_once_if_it_must(self):
        self.order([5], sure=True)
        self.assertEqual(self.ended().failed, {5})

    def test_what_prefill_drops_fails(self):
        self.order([5])
        self.until(lambda: self.p.service.sends._sends)
        self.p.service.sends.drop("t")
        self.assertEqual(self.ended().failed, {5})

    def test_what_has_failed_is_reported_when_nothing_moves(self):
        agent, ended, aborted = self.d.agent, [], []
        read = agent.read

        def slow(*arguments):
            transfer = read(*arguments)
            return types.SimpleNamespace(done=lambda: bool(ended), abort=lambda: aborted.append(1),
                                         release=transfer.release)

        agent.read = slow
        self.p.save("t", [1])
        self.order([5])
        self.d.service.turn()
        load = self.d.service.loads._loads["t"]
        self.until(lambda: load.reads)
        self.clock.now += 11
        for _ in range(5):
            self.d.service.turn()
            self.assertFalse(self.d.service.loads.take().requests)
        self.assertTrue(aborted)
        ended.append(1)
        self.assertEqual(self.ended().failed, {5})

    def test_another_model_is_refused_each_time_and_one_that_came_back_with_ours_is_used(self):
        self.p.close()
        self.p = Engine("other", self.clock, "another model")
        for transfer in "tu":  # the clock stands still: neither waits for anything
            self.p.save(transfer, [1])
            self.order([5], transfer, agent="other")
            self.assertEqual(self.ended().failed, {5})
        self.p.close()
        self.until(lambda: not self.d.agent.has_remote("other"), prefill=False)
        self.p = Engine("other", self.clock)
        self.addCleanup(self.p.close)
        self.p.fill([2], 9)
        self.p.save("v", [2])
        self.order([7], "v", agent="other")
        self.assertFalse(self.ended().failed)
        self.check([2], [7])

    def test_blocks_that_nobody_reads_are_given_back_after_their_lease(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.assertFalse(self.p.service.sends.finished())
        self.clock.now += 31
        self.assertEqual(self.p.service.sends.finished(), {"r"})

    def test_what_decode_does_not_want_is_given_back(self):
        self.p.save("t", [1])
        self.p.service.sends.hold("t", "r")
        self.order(None, sure=True)
        self.assertEqual(self.freed(), {"r"})
        self.until(lambda: not self.d.service.loads.busy())

    def test_nonsense_is_not_obeyed(self):
        self.p.save("t", [1])
        self.order([5])
        self.until(lambda: self.d.agent.has_remote("prefill"))
        for nonsense in (b"", b"{}", b"[]", b"\xff", b'{"kind": "want"}', b'{"kind": "ready", "transfer": "t"}',
                         b'{"kind": "ready", "transfer": "t", "parts": [[0, 0, [[99, 1]]]]}'):
            self.d.agent.notify("prefill", nonsense)
        self.assertFalse(self.ended().failed)

    def test_blocks_that_were_computed_again_are_told_again(self):
        self.p.fill([1, 2, 3], 5)
        self.p.save("t", [1, 2])
        self.p.save("t", [3, 2])  # preempted meanwhile
        self.order([5, 6])
        self.assertFalse(self.ended().failed)
        self.check([3, 2], [5, 6])


def request(name, params=None, tokens=0, status="FINISHED_LENGTH_CAPPED"):
    return types.SimpleNamespace(request_id=name, kv_transfer_params=params, prompt_token_ids=list(range(tokens)),
                                 num_prompt_tokens=tokens, status=types.SimpleNamespace(name=status))


def blocks(*ids):
    return types.SimpleNamespace(get_block_ids=lambda: (list(ids),))


def scheduled(new=(), cached=(), resumed=()):
    """new: (request, blocks, computed, scheduled); cached the same with the new blocks or None."""
    counts = {row[0]: row[3] for row in (*new, *cached)}
    return types.SimpleNamespace(
        num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[types.SimpleNamespace(req_id=r, block_ids=(b,), num_computed_tokens=c)
                            for r, b, c, _ in new],
        scheduled_cached_reqs=types.SimpleNamespace(
            req_ids=[row[0] for row in cached], resumed_req_ids=set(resumed),
            new_block_ids=[None if row[1] is None else (row[1],) for row in cached],
            num_computed_tokens=[row[2] for row in cached]))


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


class Tensor:
    """A layer's cache, blocks x bytes, as much of a torch tensor as the connector looks at."""

    device = types.SimpleNamespace(type="cpu")

    def __init__(self, blocks, size):
        self.memory, self.shape = bytearray(blocks * size), (blocks, size)

    def __getitem__(self, block):
        return types.SimpleNamespace(numel=lambda: self.shape[1], stride=lambda: (1,), shape=self.shape[1:])

    def element_size(self):
        return 1

    def stride(self, dimension):
        return (self.shape[1], 1)[dimension]

    def data_ptr(self):
        return baton.memory_of(self.memory).address

    def untyped_storage(self):
        return types.SimpleNamespace(data_ptr=self.data_ptr, nbytes=lambda: len(self.memory))


def fake_vllm():
    """The base classes that the connector derives from, in vLLM's place."""
    class Base:
        def __init__(self, config, role, kv_cache_config):
            self.metadata = None

        def _get_connector_metadata(self):
            return self.metadata

        def has_connector_metadata(self):
            return self.metadata is not None

    base = types.SimpleNamespace(KVConnectorBase_V1=Base, KVConnectorMetadata=object,
                                 KVConnectorRole=types.SimpleNamespace(SCHEDULER=0, WORKER=1))
    return {"vllm.distributed.kv_transfer.kv_connector.v1.base": base,
            "vllm.distributed.kv_transfer.kv_connector.v1.metrics": types.SimpleNamespace(KVConnectorStats=object)}


# A checkpoint of nothing but the bytes that the digest is of.
_FOLDER = tempfile.TemporaryDirectory()
MODEL = _FOLDER.name
pathlib.Path(MODEL, "model.safetensors").write_bytes(b"weights")


def config(name, **more):
    extra = {"name": name, "port": 0, **more}
    transfer = types.SimpleNamespace(engine_id="engine", kv_port=1, kv_load_failure_policy="recompute",
                                     get_from_extra_config=lambda key, default: extra.get(key, default))
    return types.SimpleNamespace(kv_transfer_config=transfer, parallel_config=types.SimpleNamespace(rank=0),
                                 cache_config=types.SimpleNamespace(block_size=16, cache_dtype="auto"),
                                 load_config=types.SimpleNamespace(load_format="auto", download_dir=None),
                                 model_config=types.SimpleNamespace(hf_config="a model", dtype="float", model=MODEL))


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


class Identity(unittest.TestCase):
    """What two engines must have in common besides the weights."""

    def test_the_configuration_counts_and_the_version_of_what_reads_it_does_not(self):
        def of(**more):
            one = config("x")
            one.model_config.hf_config = types.SimpleNamespace(to_json_string=lambda: json.dumps({"rope": 1, **more}))
            return identity_of(one, KvMemory([(4096, 64, 64, 8)]), 16)

        self.assertEqual(of(transformers_version="5.1"), of(transformers_version="5.2"))
        self.assertNotEqual(of(rope=2), of())


class Weights(unittest.TestCase):
    """Which bytes tell one checkpoint from another."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.config = config("x")
        self.config.model_config.model = folder.name

    def test_every_byte_and_every_file_counts(self):
        first, second = self.folder / "model-1.safetensors", self.folder / "model-2.safetensors"
        first.write_bytes(bytes(100))
        seen = {weights_digest(self.config)}
        for at in range(100):
            first.write_bytes(bytes(at) + b"\1" + bytes(99 - at))
            seen.add(weights_digest(self.config))
        first.write_bytes(bytes(100))
        second.write_bytes(b"")
        seen.add(weights_digest(self.config))
        self.assertEqual(len(seen), 102)
        (self.folder / "training.bin").write_bytes(b"is not read where there are safetensors")
        self.assertIn(weights_digest(self.config), seen)

    def test_a_copy_and_a_cache_of_the_hub_are_one_checkpoint(self):
        whole = self.folder / "whole"
        hub = self.folder / "snapshot"
        (self.folder / "blobs").mkdir()
        for one in (whole, hub):
            one.mkdir()
        (whole / "model.safetensors").write_bytes(b"weights")
        blob = self.folder / "blobs" / hashlib.sha256(b"weights").hexdigest()
        blob.write_bytes(b"not read")
        os.symlink(blob, hub / "model.safetensors")
        self.config.model_config.model = str(whole)
        said = weights_digest(self.config)
        self.config.model_config.model = str(hub)
        self.assertEqual(weights_digest(self.config), said)

    def test_weights_that_are_nowhere_are_an_error_that_says_what_to_do(self):
        with self.assertRaisesRegex(ValueError, '"identity"'):
            weights_digest(self.config)
        self.config.load_config.load_format = "dummy"
        self.assertEqual(weights_digest(self.config), "dummy")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[1:])
