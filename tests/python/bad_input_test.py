"""What an application may get wrong, and what may happen to its peer: an exception that says what, and never a crash,
a hang or a wrong byte. Over shm and over tcp."""
import os
import re
import tempfile
import unittest
import unittest.mock

import numpy

import baton
from helpers import FakeTensor, Refusing

PAGE, PAGES = 4096, 64
LONG = 120


class Pair(Refusing):
    """Two agents, one after the other over shm and over tcp."""

    def over_each(self, body):
        for provider in ("shm", "tcp"):
            with self.subTest(provider), baton.Agent("a", require=provider) as a, \
                    baton.Agent("b", require=provider) as b:
                body(a, b)

    def refused(self, kind, call, *words):
        text = super().refused(kind, call, *words)
        self.assertGreater(len(text), 20)
        for name in re.findall(r"(\w+)\(", text):
            self.assertTrue(any(hasattr(kind, name) for kind in (baton, baton.Agent, baton.Transfer, baton.KvLayout)),
                            f"baton has no {name}(): {text}")


class Listeners(Pair):
    # Promise(python): Misuse from Python raises an exception that says what is wrong: no crash,
    #   hang or wrong byte | arguments are checked before the call
    def test_what_cannot_be_listened_on_is_an_error_at_the_start(self):
        for options, kind, word in (({"listen_host": "10.99.99.99"}, baton.InvalidParamError, "10.99.99.99"),
                                    ({"listen_host": "nosuch.invalid"}, baton.NotFoundError, "nosuch.invalid"),
                                    ({"listen_host": "0.0.0.0:7000"}, baton.InvalidParamError, "host alone"),
                                    ({"advertise": "nosuch.invalid"}, baton.NotFoundError, "advertise")):
            self.refused(kind, lambda: baton.Agent("c", **options), word)


class Words(Pair):
    def setUp(self):
        self.mine, self.theirs = numpy.ones(PAGE * PAGES, numpy.uint8), numpy.zeros(PAGE * PAGES, numpy.uint8)

    def test_buffers_and_descriptors_that_are_none(self):
        grid = numpy.zeros((8, 8), numpy.float32)
        self.assertEqual(baton.memory_of(FakeTensor(grid))[:3], (grid.ctypes.data, 256, 0))
        self.assertEqual(baton.buffers.view_of(FakeTensor(grid))[1:], ((8, 8), (32, 4), "torch.float32", 4))
        with self.assertRaises(NotImplementedError):
            baton.memory_of(FakeTensor(grid, device="meta"))
        for bad in (FakeTensor(grid, contiguous=False), self.mine[::2], memoryview(bytearray(64))[::2], b"read-only",
                    numpy.zeros((4, 4)).T[:2]):
            with self.assertRaises(ValueError):
                baton.memory_of(bad)
        for bad in (7, None, object()):
            with self.assertRaises(TypeError):
                baton.memory_of(bad)
            with self.assertRaises(TypeError):
                baton.buffers.view_of(bad)

        def body(a, _b):
            a.register(self.mine)
            at = self.mine.ctypes.data
            for bad in (numpy.zeros((2, 4), numpy.uint64), numpy.zeros(6, numpy.uint64), numpy.zeros((2, 3, 1), numpy.uint64),
                        numpy.zeros((2, 3)), numpy.zeros((2, 3), numpy.uint32), numpy.zeros((3, 2), numpy.uint64).T,
                        numpy.zeros((2, 6), numpy.uint64)[:, ::2], [(at, 8)], [(at, 8, 0, 8)], [(at, 8, 0), (at, 8, 0, 8, 1)],
                        [(at, 8, 0, 8, 1), (at, 8, 0)]):
                with self.assertRaises(ValueError):
                    a.prepare(bad)
                with self.assertRaises(ValueError):
                    a.direct(baton.WRITE, bad, [(at, 8, 0)], "a")
            row = [(at, 8, 0)]
            for kind in ("HOST", 5, -1, 2 ** 32, 1.5):
                for call in (lambda: a.register(*row, memory=kind), lambda: a.prepare(row, memory=kind),
                             lambda: a.direct(baton.WRITE, row, row, "a", memory=kind), lambda: a.has_remote("a", row, kind),
                             lambda: a.partial_metadata(row, memory=kind), lambda: a.wait_remote("a", row, 1, kind)):
                    self.refused(baton.InvalidParamError, call, "baton.DRAM", repr(kind))
            local, remote = a.prepare(row), a.prepare(row, "a")
            for op in ("WRITE", "COPY", 2, -1, 2 ** 32, 2 ** 32 + 1, 0.0, 1.0, None):
                for call in (lambda: a.transfer(op, local, [0], remote, [0]), lambda: a.direct(op, row, row, "a")):
                    self.refused(baton.InvalidParamError, call, "baton.WRITE", repr(op))
            move = a.transfer(baton.WRITE, local, [0], remote, [0])
            for what, word in (("text", "encode"), (7, "int"), (["x"], "list")):
                for call in (lambda: a.notify("a", what), lambda: a.transfer(baton.WRITE, local, [0], remote, [0], what),
                             lambda: a.direct(baton.WRITE, row, row, "a", what), lambda: move.post(what),
                             lambda: a.add_remote(what), lambda: a.send_metadata("127.0.0.1:1", what),
                             lambda: a.publish_metadata(what)):
                    self.refused(TypeError, call, "bytes", word)
            for what in (b"x", bytearray(b"x"), memoryview(b"x"), numpy.frombuffer(b"x", numpy.uint8)):
                move.post(what).wait(LONG)
            for bad in ([(at, 8, 0, 8, 1)], numpy.array([(at, 8, 0, 8, 1)], numpy.uint64)):
                for sides in ((bad, [(at, 8, 0)]), ([(at, 8, 0)], bad)):
                    with self.assertRaises(ValueError):
                        a.direct(baton.WRITE, *sides, "a")
            for bad in ([(at, -1, 0)], [(at, 2 ** 64, 0)]):
                with self.assertRaises(OverflowError):
                    a.prepare(bad)
            self.refused(baton.InvalidParamError, lambda: a.prepare([]))
        self.over_each(body)
        for number in (-1, 5, 256, 2 ** 32, "HOST", "DRAM", 1.5, b"DRAM"):
            self.refused(baton.InvalidParamError, lambda: baton.memory_supported(number), "baton.DRAM", repr(number))
        for settings in ({"a=b": 1}, {"a,b": 1}, {"a": "1,2"}):
            self.refused(baton.InvalidParamError, lambda: baton.Agent("c", settings=settings), "comma")

    def test_numbers_of_kv_are_not_what_is_left_of_them(self):
        """Each is right but for 2^32 or 2^64 that a C number would drop."""
        mine, theirs = ([numpy.zeros((4, 8, 2, 16), numpy.uint16) for _ in range(2)] for _ in range(2))  # block, token, head, element
        cache = mine[0]

        def paged(tensors=mine, **wrong):
            return baton.KvLayout("m").add_paged(tensors, **{
                "blocks": 4, "block_tokens": 8, "heads": 2, "head_size": 16, "dtype": "bfloat16", "layers": 1, **wrong})

        latent = {"blocks": 4, "block_tokens": 8, "width": 32, "dtype": "bfloat16"}
        packing = {"block_tokens": 8, "bytes": 512, "whole": "x"}
        layout = paged()
        for name, right in (("blocks", 4), ("block_tokens", 8), ("heads", 2), ("head_size", 16), ("first_head", 0), ("window", 0)):
            self.refused(baton.InvalidParamError, lambda: paged(**{name: right + 2 ** 32}))
        self.refused(baton.InvalidParamError, lambda: baton.KvLayout("m").add_latent([cache], **{**latent, "width": 32 + 2 ** 32}))
        self.refused(baton.InvalidParamError, lambda: baton.KvLayout("m").add_packed([cache], packing, blocks=4,
                                                                                     block_stride=2 ** 64))
        baton.KvLayout("m").add_packed([cache], packing, blocks=4)
        with baton.Agent("a") as a, baton.Agent("b") as b:
            a.register(*mine)
            b.register(*theirs)
            there = paged(theirs)
            a.add_remote(b.metadata())
            for op in (256, -1, 2 ** 32):
                self.refused(baton.InvalidParamError, lambda: baton.KvPlan(a, op, layout, "b", there))
            plan = baton.KvPlan(a, baton.WRITE, layout, "b", there)
            for wrong in ({"tokens": 2 ** 64 + 8}, {"tokens": (2 ** 64, 2 ** 64 + 8)}, {"length": 2 ** 64}, {"layers": 2 ** 32},
                          {"layers": (2 ** 32, 2 ** 32 + 1)}, {"local_first_block": 2 ** 64}):
                self.refused(baton.InvalidParamError, lambda: plan.transfer([0], [0], **wrong))
            plan.transfer([0], [0], tokens=8).release()

    def test_a_cluster_key_that_cannot_be_made_or_read(self):
        """What is wrong is set up wrong here; nobody is disconnected."""
        with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as folder:
            os.makedirs(os.path.join(folder, "baton", "cluster.key"))
            for where, words in ((file.name, ("cannot make a cluster key", "BATON_KEY_FILE")),
                                 (folder, ("cluster.key", "not a plain file"))):
                with unittest.mock.patch.dict(os.environ, {"BATON_KEY_FILE": "", "XDG_CONFIG_HOME": where}):
                    self.refused(baton.NotAllowedError, lambda: baton.Agent("a"), *words)


if __name__ == "__main__":
    unittest.main()
