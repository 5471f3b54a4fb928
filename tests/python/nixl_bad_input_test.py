"""What a program of NIXL's may get wrong, and what may happen to its peer: NIXL's exception, whose text goes on with
ours, and never a crash, a hang or a wrong byte. What baton.Agent says of the same: bad_input_test.py."""
import os
import re
import tempfile
import unittest
import unittest.mock

import numpy
from baton.nixl import _bindings as nixlBind
from baton.nixl._api import nixl_agent, nixl_agent_config
from helpers import Refusing, in_child

PAGE, PAGES = 4096, 64


def agent(name, **options):
    return nixl_agent(name, nixl_agent_config(**options))


def finish(one, handle):
    state = one.transfer(handle)
    while state == "PROC":
        state = one.check_xfer_state(handle)
    return state


def row(address, count=PAGES):
    return numpy.array([(address, PAGE, 0, PAGE, count)], numpy.uint64)


class Refused(Refusing):
    def refused(self, kind, call, *words):
        text = super().refused(kind, call, *words)
        self.assertTrue(text.startswith(f"{kind.status.name}: "), text)
        self.assertGreater(len(text), len(kind.status.name) + 20, "what happened, and to what")
        for name in re.findall(r"(\w+)\(", text):
            self.assertTrue(hasattr(nixl_agent, name) or hasattr(nixlBind.nixlAgent, name), f"baton.nixl has no {name}(): {text}")


class Words(Refused):
    def setUp(self):
        self.a, self.b = agent("a"), agent("b")
        self.mine, self.theirs = numpy.ones(PAGE * PAGES, numpy.uint8), numpy.zeros(PAGE * PAGES, numpy.uint8)
        for one, memory in ((self.a, self.mine), (self.b, self.theirs)):
            one.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
        self.a.add_remote_agent(self.b.get_agent_metadata())
        self.local = self.a.prep_xfer_dlist("", row(self.mine.ctypes.data), "DRAM")
        self.remote = self.a.prep_xfer_dlist("b", row(self.theirs.ctypes.data), "DRAM")
        self.foreign = self.b.prep_xfer_dlist("", row(self.theirs.ctypes.data), "DRAM")

    def make(self, here=(0,), there=(0,), local=None, remote=None, op="WRITE"):
        return self.a.make_prepped_xfer(op, local or self.local, here, remote or self.remote, there)

    def untouched(self):
        self.assertTrue((self.theirs == 0).all() and (self.mine == 1).all())

    def test_stale_handles(self):
        handle = self.make()
        self.assertEqual(finish(self.a, handle), "DONE")
        self.a.release_xfer_handle(handle)
        self.a.release_xfer_handle(handle)  # once is enough
        for call in (self.a.transfer, self.a.check_xfer_state, self.a.get_xfer_telemetry):
            self.refused(nixlBind.nixlNotFoundError, lambda: call(handle), "already released")
        self.a.release_dlist_handle(self.local)
        self.a.release_dlist_handle(self.local)
        self.refused(nixlBind.nixlNotFoundError, self.make, "no such list")

    def test_stale_numbers_of_the_bindings(self):
        one, other = self.a.agent, self.b.agent
        descs = [self.a.get_xfer_descs([(memory.ctypes.data, PAGE, 0)], "DRAM") for memory in (self.mine, self.theirs)]
        local, remote = one.prepXferDlist("", descs[0]), one.prepXferDlist("b", descs[1])
        move = one.makeXferReq(nixlBind.NIXL_WRITE, local, [0], remote, [0])
        for agent_of, numbers in ((other, (local, remote, move)), (one, (0, move + 1000, 2 ** 64 - 1, -1))):
            for number in numbers:
                for call in (agent_of.postXferReq, agent_of.getXferStatus, agent_of.getXferTelemetry,
                             agent_of.queryXferBackend, agent_of.releaseXferReq, agent_of.releasedDlistH):
                    self.refused(nixlBind.nixlNotFoundError, lambda: call(number), f"{number:#x}")
        one.releaseXferReq(move)
        one.releasedDlistH(local)
        self.refused(nixlBind.nixlNotFoundError, lambda: one.postXferReq(move), "was released")
        self.refused(nixlBind.nixlNotFoundError, lambda: one.makeXferReq(nixlBind.NIXL_WRITE, local, [0], remote, [0]))
        self.refused(nixlBind.nixlNotFoundError, lambda: one.makeXferReq(nixlBind.NIXL_WRITE, remote, [0], local, [0]))
        self.untouched()

    def test_lists_of_another_agent(self):
        self.refused(nixlBind.nixlNotFoundError, lambda: self.make(local=self.foreign), "another agent")
        self.refused(nixlBind.nixlNotFoundError, lambda: self.make(remote=self.foreign), "another agent")
        self.refused(nixlBind.nixlInvalidParamError, lambda: self.make(local=self.remote, remote=self.local))
        self.untouched()

    def test_memory_in_use_is_not_deregistered(self):
        descs = self.a.get_reg_descs([(self.mine.ctypes.data, self.mine.nbytes, 0, "")], "DRAM")
        self.refused(nixlBind.nixlNotFoundError, lambda: self.b.deregister_memory(descs), "name it as it was registered")
        self.a.deregister_memory(descs)
        self.refused(nixlBind.nixlNotFoundError, lambda: self.a.deregister_memory(descs))

    def test_names_settings_and_backends(self):
        for name in ("n" * 65, "zero\0byte"):
            self.refused(nixlBind.nixlInvalidParamError, lambda: agent(name))
        one = self.a.agent
        for call in (lambda: one.getPluginParams("GDS"), lambda: one.createBackend("GDS", {}),
                     lambda: one.getBackendParams(10 ** 6), lambda: one.queryMem(nixlBind.nixlRegDList(nixlBind.FILE_SEG), 0)):
            self.refused(nixlBind.nixlNotFoundError, call)
        self.refused(nixlBind.nixlInvalidParamError, lambda: one.createBackend("UCX", {}), "there already")
        self.refused(nixlBind.nixlNotSupportedError, lambda: self.a.query_memory([(0, 1, 0, "")], "UCX", "DRAM"))
        self.refused(nixlBind.nixlNotFoundError, lambda: self.a.make_connection("nobody"), "load its metadata")
        for said, asked, measured in (("", False, False), ("no", True, False), ("0", True, False), ("Yes", False, True)):
            with unittest.mock.patch.dict(os.environ, {"NIXL_TELEMETRY_ENABLE": said}):
                measures = agent("measures", capture_telemetry=asked)
            measures.register_memory([(self.mine.ctypes.data, self.mine.nbytes, 0, "")], "DRAM")
            measures.add_remote_agent(self.b.get_agent_metadata())
            move = measures.make_prepped_xfer(
                "READ", measures.prep_xfer_dlist("", row(self.mine.ctypes.data), "DRAM"), [0],
                measures.prep_xfer_dlist("b", row(self.theirs.ctypes.data), "DRAM"), [0])
            self.refused(nixlBind.nixlNotPostedError, lambda: measures.get_xfer_telemetry(move))
            self.refused(nixlBind.nixlNotPostedError, lambda: measures.check_xfer_state(move))
            self.refused(nixlBind.nixlNotPostedError, lambda: measures.agent.getXferTelemetry(measures.agent._hold(move._transfer)))
            self.assertEqual(finish(measures, move), "DONE")
            if measured:
                self.assertEqual(measures.get_xfer_telemetry(move).totalBytes, PAGE)
            else:
                self.refused(nixlBind.nixlNoTelemetryError, lambda: measures.get_xfer_telemetry(move), "capture_telemetry")
        with unittest.mock.patch.dict(os.environ, {"NIXL_TELEMETRY_ENABLE": "perhaps"}):
            with self.assertRaises(ValueError):
                agent("measures")

    def test_memory_that_is_none_and_kinds_that_do_not_go_together(self):
        reg = lambda kind, *descs: self.a.get_reg_descs([(*one, "") for one in descs], kind)  # noqa: E731
        for descs in (reg("DRAM", (16, PAGE, 0)), reg("DRAM", (0, 0, 0)), reg("OBJ", (0, PAGE, 1)), reg("BLOCK", (0, PAGE, 1)),
                      reg("FILE", (0, PAGE, 0))):
            self.refused(nixlBind.nixlBackendError, lambda: self.a.register_memory(descs))
        self.refused(nixlBind.nixlNotFoundError, lambda: self.a.get_partial_agent_metadata(reg("DRAM", (16, PAGE, 0))))
        self.a.create_backend("POSIX")
        self.refused(nixlBind.nixlNotSupportedError, lambda: self.a.query_memory([(0, 1, 0, "")], "POSIX", "DRAM"))
        mine, theirs = ([(memory.ctypes.data, PAGE, 0)] for memory in (self.mine, self.theirs))
        for kind, name in (("OBJ", ""), ("OBJ", "b"), ("BLOCK", "a"), ("FILE", "b")):
            self.refused(nixlBind.nixlNotFoundError, lambda: self.a.prep_xfer_dlist(name, [(0, PAGE, 0)], kind), "registered")
            self.refused(nixlBind.nixlNotFoundError, lambda: self.a.initialize_xfer(
                "WRITE", self.a.get_xfer_descs(mine, "DRAM"), self.a.get_xfer_descs([(0, PAGE, 0)], kind), name))
        with tempfile.TemporaryFile() as file:
            of_file = [(0, PAGE, file.fileno())]
            self.a.register_memory([(*of_file[0], "")], "FILE")
            listed = self.a.prep_xfer_dlist("", of_file, "FILE")
            self.refused(nixlBind.nixlNotSupportedError, lambda: self.make(local=listed), "local one is DRAM")
            self.refused(nixlBind.nixlNotSupportedError, lambda: self.a.agent.make(
                nixlBind.NIXL_READ, listed._list, [0], self.remote._list, [0], b"x"), "local one is DRAM")
            self.refused(nixlBind.nixlBackendError, lambda: self.a.make_prepped_xfer(
                "WRITE", self.local, [0], listed, [0], b"heard"), "cannot carry a notification")
            here, there = self.a.get_xfer_descs(mine, "DRAM"), self.a.get_xfer_descs(of_file, "FILE")
            self.refused(nixlBind.nixlBackendError, lambda: self.a.initialize_xfer("WRITE", here, there, "a", b"heard"))
            self.refused(nixlBind.nixlNotFoundError, lambda: self.a.initialize_xfer("WRITE", here, there, "b"))
            self.refused(nixlBind.nixlNotFoundError, lambda: self.a.initialize_xfer("WRITE", there, here, "a"))
            move = self.a.initialize_xfer("WRITE", here, there, "a")
            self.refused(nixlBind.nixlBackendError, lambda: self.a.transfer(move, b"heard"))
            number = self.a.agent.createXferReq(nixlBind.NIXL_WRITE, here, there, "a")
            self.refused(nixlBind.nixlBackendError, lambda: self.a.agent.postXferReq(number, "heard"))
            self.assertEqual(finish(self.a, move), "DONE")
        self.untouched()

    def test_lists_of_descriptors_that_are_none(self):
        make = nixlBind.nixlXferDList
        for bad in (numpy.zeros((2, 2), numpy.uint64), numpy.zeros(3, numpy.uint64), numpy.zeros((2, 3)),
                    numpy.zeros((3, 2), numpy.uint64).T):
            with self.assertRaises(ValueError):
                make(nixlBind.DRAM_SEG, bad)
        for bad in ([(1, 2)], [(1, 2, 3, 4)], [(1, 2, 0.5)], [("a", 2, 3)]):
            with self.assertRaises(TypeError):
                make(nixlBind.DRAM_SEG, bad)
        with self.assertRaises(ValueError):
            make(77, [])
        descs = make(nixlBind.DRAM_SEG, [(1, 2, 3)])
        self.refused(nixlBind.nixlNotFoundError, lambda: descs.index((3, 2, 1)), "(3, 2, 1)")
        for index in (1, -1, 2 ** 70):
            for call in (lambda: descs[index], lambda: descs.remDesc(index), lambda: descs.__setitem__(index, (1, 2, 3))):
                with self.assertRaises(IndexError):
                    call()
        self.assertEqual(descs, make(nixlBind.DRAM_SEG, [(1, 2, 3)]))
        with self.assertLogs("nixl", "ERROR"):
            for nothing in ("text", 7, None, [(1, 2)], [7]):
                self.assertIsNone(self.a.get_xfer_descs(nothing, "DRAM"))
        for call in (lambda: self.a.register_memory([(1, 2)], "DRAM"), lambda: self.a.query_memory([(1, 2)], "UCX", "DRAM"),
                     lambda: self.a.prep_xfer_dlist("", [(1, 2)], "DRAM")):
            self.refused(nixlBind.nixlInvalidParamError, call, "(1, 2)", "tuples of")
        self.refused(nixlBind.nixlInvalidParamError, lambda: self.a.register_memory([(1, 2, 3, "")]), "mem_type is needed")
        for call, words in ((lambda: self.make(op="COPY"), ("COPY", "WRITE, READ")),
                            (lambda: self.a.get_xfer_descs([(1, 2, 3)], "HOST"), ("HOST", "DRAM, VRAM"))):
            with self.assertRaises(KeyError) as raised:
                call()
            for word in words:
                self.assertIn(word, str(raised.exception))
        with self.assertRaises(ValueError):
            self.a.prep_xfer_dlist("", row(1))

    def test_a_forked_child_has_no_agent_and_may_make_one(self):
        handle = self.make()

        def child():
            for call in (lambda: self.a.transfer(handle), lambda: self.a.check_xfer_state(handle), self.make,
                         self.a.get_agent_metadata, self.a.get_new_notifs, self.a.update_notifs,
                         lambda: self.a.add_remote_agent(b"x"), lambda: self.a.remove_remote_agent("b"),
                         lambda: self.a.check_remote_metadata("b"), lambda: self.a.make_connection("b"),
                         lambda: self.a.check_remote_metadata("b", self.a.get_xfer_descs([(1, 1, 0)], "DRAM")),
                         lambda: self.a.agent.checkRemoteMD("b", self.a.get_xfer_descs([(1, 1, 0)], "DRAM")),
                         lambda: self.a.send_notif("b", b"x"), lambda: self.a.send_local_metadata("127.0.0.1", 1)):
                self.refused(nixlBind.nixlInvalidParamError, call, "forked")
            self.a.release_xfer_handle(handle)  # quiet: it is the parent's
            own = agent("own")
            own.register_memory([(self.mine.ctypes.data, PAGE, 0, "")], "DRAM")

        in_child(child)
        self.assertEqual(finish(self.a, handle), "DONE")


if __name__ == "__main__":
    unittest.main()
