"""A program for NIXL 1.5: what serving engines call, in the order in which they do, in two processes. It knows nothing
of Baton. Run over the drop-in by the tests, and over NIXL itself by `./run nixl`.

usage: nixl_program.py [unittest options]
"""
import collections
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import uuid

import numpy
from nixl import _bindings as nixlBind
from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

PAGE, PAGES = 4096, 64


def agent(name=None, **options):
    return nixl_agent(name or str(uuid.uuid4()), nixl_agent_config(capture_telemetry=True, **options))


def agent_named(name):
    return nixl_agent(name, nixl_agent_config())


def buffer(fill=None):
    """A page-aligned array of PAGES pages; page i is full of i, or of `fill`."""
    raw = numpy.zeros(PAGE * (PAGES + 1), dtype=numpy.uint8)
    start = -raw.ctypes.data % PAGE
    memory = raw[start:start + PAGE * PAGES]
    memory[:] = numpy.repeat(numpy.arange(PAGES, dtype=numpy.uint8), PAGE) if fill is None else fill
    return memory


def rows(memory):
    base = memory.ctypes.data
    return numpy.array([(base + PAGE * i, PAGE, 0) for i in range(PAGES)], dtype=numpy.uint64)


def finish(one, handle, state=None):
    state = state or one.transfer(handle)
    while state == "PROC":
        state = one.check_xfer_state(handle)
    return state


class OneProcess(unittest.TestCase):
    def setUp(self):
        self.a, self.b = agent(), agent()
        self.mine, self.theirs = buffer(), buffer(0)
        self.a_reg = self.a.register_memory([(self.mine.ctypes.data, self.mine.nbytes, 0, "")], "DRAM")
        self.b_reg = self.b.register_memory([(self.theirs.ctypes.data, self.theirs.nbytes, 0, "")], "DRAM")
        self.assertTrue(self.a_reg)
        self.assertEqual(self.a.add_remote_agent(self.b.get_agent_metadata()), self.b.name.encode())
        self.local = self.a.prep_xfer_dlist("NIXL_INIT_AGENT", self.a.get_xfer_descs(rows(self.mine), "DRAM"))
        self.remote = self.a.prep_xfer_dlist(self.b.name, self.a.get_xfer_descs(rows(self.theirs), "DRAM"))

    def tearDown(self):
        self.a.release_dlist_handle(self.local)
        self.a.release_dlist_handle(self.remote)
        self.a.remove_remote_agent(self.b.name)
        self.a.deregister_memory(self.a_reg)
        self.b.deregister_memory(self.b_reg)

    def prepped(self, op, local, remote, notif=b"", **options):
        return self.a.make_prepped_xfer(op, self.local, local, self.remote, remote, notif, **options)

    def notifs(self, count=1):
        got = collections.defaultdict(list)
        while sum(map(len, got.values())) < count:
            for name, messages in self.b.get_new_notifs().items():
                got[name] += messages
        return dict(got)

    def test_prepped_writes_and_reads(self):
        handle = self.prepped("WRITE", [3, 1, 7], [10, 20, 30], b"req:1")
        self.assertEqual(finish(self.a, handle), "DONE")
        self.assertEqual(self.notifs(), {self.a.name: [b"req:1"]})
        for page, target in zip((3, 1, 7), (10, 20, 30)):
            self.assertTrue((self.theirs[PAGE * target:PAGE * (target + 1)] == page).all())
        self.assertEqual(int((self.theirs != 0).sum()), 3 * PAGE)
        telemetry = self.a.get_xfer_telemetry(handle)
        self.assertEqual((telemetry.totalBytes, telemetry.descCount), (3 * PAGE, 3))
        self.assertGreater(telemetry.startTime, 0)
        self.assertGreaterEqual(telemetry.xferDuration, telemetry.postDuration)
        self.a.release_xfer_handle(handle)
        self.a.release_xfer_handle(handle)
        self.theirs[:] = 99
        handle = self.prepped("READ", numpy.array([5, 6]), numpy.array([0, 1]))
        self.assertEqual(finish(self.a, handle), "DONE")
        self.assertTrue((self.mine[5 * PAGE:7 * PAGE] == 99).all())
        self.assertEqual(self.a.get_xfer_telemetry(handle).descCount, 1, "neighbours are merged")

    def test_posted_again_with_another_notification(self):
        handle = self.prepped("WRITE", [0], [0], b"first")
        self.assertTrue({handle: 1})
        with self.assertRaises(nixlBind.nixlNotPostedError):
            self.a.check_xfer_state(handle)
        self.assertEqual(finish(self.a, handle), "DONE")
        self.assertEqual(finish(self.a, handle), "DONE")
        self.assertEqual(finish(self.a, handle, self.a.transfer(handle, b"other")), "DONE")
        self.assertEqual(sorted(self.notifs(3)[self.a.name]), [b"first", b"first", b"other"])

    def test_strided_rows(self):
        table = numpy.array([(self.theirs.ctypes.data, 512, 0, PAGE, PAGES)], dtype=numpy.uint64)
        local = self.a.prep_xfer_dlist("", [(self.mine.ctypes.data + PAGE * i, 512, 0) for i in range(PAGES)], "DRAM")
        remote = self.a.prep_xfer_dlist(self.b.name.encode(), table, "DRAM")
        order = numpy.arange(PAGES, dtype=numpy.int32)
        handle = self.a.make_prepped_xfer("WRITE", local, order, remote, order[::-1].copy())
        self.assertEqual(finish(self.a, handle), "DONE")
        self.assertTrue((self.theirs.reshape(PAGES, PAGE)[:, :512] == order[::-1, None]).all())
        self.assertEqual(int(self.theirs.reshape(PAGES, PAGE)[:, 512:].sum()), 0)
        with self.assertRaises(ValueError):
            self.a.prep_xfer_dlist(self.b.name, table)

    def test_one_shot(self):
        local = self.a.get_xfer_descs([(self.mine.ctypes.data + PAGE, 100, 0)], "DRAM")
        remote = self.a.get_xfer_descs([(self.theirs.ctypes.data + 7, 100, 0)], "DRAM")
        handle = self.a.initialize_xfer("WRITE", local, remote, self.b.name, b"one shot")
        self.assertEqual(finish(self.a, handle), "DONE")
        while not self.b.check_remote_xfer_done(self.a.name, b"one"):
            pass
        self.assertFalse(self.b.check_remote_xfer_done(self.a.name, b"one"))
        self.assertTrue((self.theirs[7:107] == 1).all())

    def test_notifications(self):
        self.a.send_notif(self.b.name, b"\0 binary")
        self.a.send_notif(self.b.name, notif_msg=b"x" * (1 << 20))
        self.assertEqual(sorted(map(len, self.notifs(2)[self.a.name])), [8, 1 << 20])
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.send_notif("nobody", b"x")

    def test_what_is_refused(self):
        for call in (lambda: self.prepped("WRITE", [0, 1], [0]), lambda: self.prepped("WRITE", [PAGES], [0]),
                     lambda: self.prepped("WRITE", [-1], [0]), lambda: self.prepped("WRITE", [], [])):
            with self.assertRaises(nixlBind.nixlInvalidParamError):
                call()
        for call in (lambda: self.prepped("COPY", [0], [0]),
                     lambda: self.a.get_xfer_descs([(1, 2, 3)], "V-RAM")):
            with self.assertRaises(KeyError):
                call()
        with self.assertRaises(ValueError):
            self.prepped("WRITE", numpy.zeros((2, 2), dtype=numpy.int64), [0])
        base = self.theirs.ctypes.data
        for name, table in ((self.b.name, [(base - 8, 16, 0)]), (self.b.name, [(base, 16, 3)]), ("nobody", [(1, 1, 0)]),
                            (self.b.name, numpy.array([(base, 512, 0, 256, 4)], dtype=numpy.uint64)),
                            (self.b.name, numpy.array([(base, 512, 0, 512, 0)], dtype=numpy.uint64))):
            with self.assertRaises(nixlBind.nixlNotFoundError):
                self.a.prep_xfer_dlist(name, table, "DRAM")
        for bad in (b"garbage", self.b.get_agent_metadata()[:40]):
            with self.assertRaises(nixlBind.nixlMismatchError):
                self.a.add_remote_agent(bad)
        with self.assertRaises(nixlBind.nixlInvalidParamError):
            self.a.add_remote_agent(self.a.get_agent_metadata())
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.deregister_memory(self.a.get_reg_descs([(4096, 4096, 0, "")], "DRAM"))
        with self.assertRaises(TypeError):
            nixl_agent_config(sync_mode=1)
        nixl_agent_config(sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        with self.assertRaises(ValueError):
            nixl_agent("")
        self.assertIsNone(self.a.get_xfer_descs([(1, 2, 3, 4)], "DRAM"))
        self.assertIsNone(self.a.get_xfer_descs([(1, 2, 3)]))
        self.assertIsNone(self.a.get_reg_descs([(1, 2, 3)], "DRAM"))

    def test_arguments_of_the_wrong_kind(self):
        here, there = ([(memory.ctypes.data, PAGE, 0)] for memory in (self.mine, self.theirs))
        mine, theirs = self.a.get_xfer_descs(here, "DRAM"), self.a.get_xfer_descs(there, "DRAM")
        handle = self.prepped("WRITE", [0], [0])
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            with self.assertRaises(RuntimeError) as raised:
                agent(enable_listen_thread=True, listen_port=taken.getsockname()[1])
            self.assertNotIsInstance(raised.exception, nixlBind.nixlRepostActiveError)
        for kind, calls in (
                (TypeError, [lambda port=port: agent(enable_listen_thread=True, listen_port=port) for port in (70000, -1, "8888")]),
                (TypeError, [lambda name=name, call=call: call(name) for name in (7, None) for call in (
                    agent_named, self.a.make_connection, self.a.remove_remote_agent, self.a.check_remote_metadata,
                    lambda name: self.a.send_notif(name, b"x"), lambda name: self.a.prep_xfer_dlist(name, there, "DRAM"))]),
                (TypeError, [lambda what=what, call=call: call(what) for what in (7, None, ["x"]) for call in (
                    lambda what: self.a.send_notif(self.b.name, what), lambda what: self.prepped("WRITE", [0], [0], what),
                    lambda what: self.a.transfer(handle, what),
                    lambda what: self.a.initialize_xfer("WRITE", mine, theirs, self.b.name, what))]),
                (TypeError, [lambda descs=descs, call=call: call(descs) for descs in ([(1, 2)], None) for call in (
                    self.a.register_memory, lambda descs: self.a.register_memory(descs, "DRAM"),
                    lambda descs: self.a.prep_xfer_dlist("", descs, "DRAM"), lambda descs: self.a.query_memory(descs, "UCX", "DRAM"),
                    lambda descs: self.a.initialize_xfer("WRITE", descs, theirs, self.b.name),
                    lambda descs: self.a.initialize_xfer("WRITE", mine, descs, self.b.name))]),
                (TypeError, [lambda: self.a.add_remote_agent(None)]),
                (TypeError, [lambda op=op: self.a.agent.createXferReq(op, mine, theirs, self.b.name) for op in ("COPY", 0, None)]),
                (nixlBind.nixlMismatchError, [lambda: self.a.add_remote_agent("text")]),
                (nixlBind.nixlInvalidParamError, [self.a.send_local_metadata, lambda: self.a.fetch_remote_metadata("other")]),
                (KeyError, [lambda op=op, call=call: call(op) for op in ("COPY", "write", 0, None) for call in (
                    lambda op: self.prepped(op, [0], [0]), lambda op: self.a.initialize_xfer(op, mine, theirs, self.b.name))]),
                (KeyError, [lambda mem=mem, call=call: call(mem) for mem in ("HOST", "dram", 0) for call in (
                    lambda mem: self.a.register_memory([(1, 2, 3, "")], mem), lambda mem: self.a.get_xfer_descs(here, mem),
                    lambda mem: self.a.prep_xfer_dlist("", here, mem),
                    lambda mem: self.a.query_memory([(1, 2, 3, "")], "UCX", mem))])):
            for number, call in enumerate(calls):
                with self.subTest(kind=kind.__name__, number=number), self.assertRaises(kind):
                    call()
        for message in ("text", bytearray(b"bytes")):  # the same as bytes
            self.a.send_notif(self.b.name, message)
            self.assertEqual(finish(self.a, handle, self.a.transfer(handle, message)), "DONE")
        self.assertEqual(sorted(*self.notifs(4).values()), [b"bytes", b"bytes", b"text", b"text"])

    def test_backends(self):
        self.assertIn("UCX", self.a.get_plugin_list())
        self.assertIn("DRAM_SEG", self.a.get_plugin_mem_types("UCX"))
        self.assertEqual(len(self.a.get_plugin_params("no such")), 0)
        one = agent(backends=[])
        self.assertEqual(one.backends, {})
        one.create_backend("UCX", {"num_threads": "2"})
        self.assertEqual(list(one.backends), ["UCX"])
        with self.assertRaises(nixlBind.nixlInvalidParamError):
            one.create_backend("UCX")
        with self.assertRaises(nixlBind.nixlNotFoundError):
            one.create_backend("UVX")

    def test_removed_agents(self):
        handle = self.prepped("WRITE", [0], [0])
        self.assertTrue(self.a.check_remote_metadata(self.b.name))
        self.assertEqual(self.a.add_remote_agent(self.b.get_agent_metadata()), self.b.name.encode())
        self.assertEqual(finish(self.a, handle), "DONE")
        self.a.remove_remote_agent(self.b.name)
        self.a.remove_remote_agent(self.b.name)
        self.assertFalse(self.a.check_remote_metadata(self.b.name))
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.transfer(handle)
        self.a.release_xfer_handle(handle)

    def test_lists_of_descriptors(self):
        one = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, [(1, 2, 0), (4096, 5, 0)])
        self.assertEqual((one.descCount(), one[1], one.index((4096, 5, 0))), (2, (4096, 5, 0), 1))
        one.append((7, 8, 0))
        one.remDesc(0)
        self.assertEqual((one.descCount(), one[1], one.isEmpty()), (2, (7, 8, 0), False))
        self.assertEqual(pickle.loads(pickle.dumps(one)), one)
        self.assertEqual(self.a.deserialize_descs(self.a.get_serialized_descs(one)), one)
        with self.assertRaises(nixlBind.nixlNotFoundError):
            one.index((9, 9, 9))
        registered = nixlBind.nixlRegDList(nixlBind.DRAM_SEG, [(1, 2, 0, "meta")])
        self.assertEqual((registered[0], registered.trim()[0]), ((1, 2, 0, b"meta"), (1, 2, 0)))
        self.assertEqual(registered.getType(), nixlBind.DRAM_SEG)
        array = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(self.mine))
        self.assertEqual((array.descCount(), array[2][0]), (PAGES, self.mine.ctypes.data + 2 * PAGE))


class Bindings(unittest.TestCase):
    """The agent of the compiled module, whose handles are numbers."""

    def setUp(self):
        config = nixlBind.nixlAgentConfig()
        config.useProgThread, config.captureTelemetry = True, True
        self.a, self.b = (nixlBind.nixlAgent(str(uuid.uuid4()), config) for _ in range(2))
        self.backends = [one.createBackend("UCX", {}) for one in (self.a, self.b)]
        self.mine, self.theirs = buffer(), buffer(0)
        for one, memory in ((self.a, self.mine), (self.b, self.theirs)):
            registered = nixlBind.nixlRegDList(nixlBind.DRAM_SEG, [(memory.ctypes.data, memory.nbytes, 0, "")])
            self.assertEqual(one.registerMem(registered, []), nixlBind.NIXL_SUCCESS)
        self.other = self.a.loadRemoteMD(self.b.getLocalMD()).decode()
        self.mine_listed = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(self.mine))
        self.theirs_listed = nixlBind.nixlXferDList(nixlBind.DRAM_SEG, rows(self.theirs))

    def finish(self, handle, *message):
        state = self.a.postXferReq(handle, *message)
        while state == nixlBind.NIXL_IN_PROG:
            state = self.a.getXferStatus(handle)
        return state

    def test_prepared_and_direct(self):
        local, remote = self.a.prepXferDlist("", self.mine_listed), self.a.prepXferDlist(self.other, self.theirs_listed)
        handle = self.a.makeXferReq(nixlBind.NIXL_WRITE, local, [3, 4], remote, [10, 11], "two")
        with self.assertRaises(nixlBind.nixlNotPostedError):
            self.a.getXferStatus(handle)
        self.assertEqual(self.finish(handle), nixlBind.NIXL_SUCCESS)
        self.assertTrue((self.theirs[10 * PAGE:11 * PAGE] == 3).all() and (self.theirs[11 * PAGE:12 * PAGE] == 4).all())
        self.assertEqual(self.a.getXferTelemetry(handle).descCount, 1, "neighbours are merged")
        direct = self.a.createXferReq(nixlBind.NIXL_READ, self.mine_listed, self.theirs_listed, self.other)
        self.assertEqual(self.finish(direct, "all"), nixlBind.NIXL_SUCCESS)
        self.assertTrue((self.mine == self.theirs).all())
        self.assertEqual(self.a.getXferTelemetry(direct).descCount, PAGES, "what is given one by one is not merged")
        got = {"before": [b"kept"]}
        while sum(map(len, got.values())) < 3:
            got = self.b.getNotifs(got)
        self.assertEqual(got.pop("before"), [b"kept"])
        self.assertEqual(sorted(*got.values()), [b"all", b"two"])
        for one in (handle, direct):
            self.assertEqual(self.a.releaseXferReq(one), nixlBind.NIXL_SUCCESS)
        for one in (local, remote):
            self.assertEqual(self.a.releasedDlistH(one), nixlBind.NIXL_SUCCESS)

    def test_what_it_knows(self):
        self.assertIn("UCX", self.a.getAvailPlugins())
        self.assertIn("DRAM_SEG", self.a.getPluginParams("UCX")[1])
        self.assertIn("DRAM_SEG", self.a.getBackendParams(self.backends[0])[1])
        self.assertEqual(self.a.checkRemoteMD(self.other, self.theirs_listed), nixlBind.NIXL_SUCCESS)
        self.assertEqual(self.a.checkRemoteMD("nobody", self.theirs_listed), nixlBind.NIXL_ERR_NOT_FOUND)
        self.assertEqual(self.a.invalidateRemoteMD(self.other), nixlBind.NIXL_SUCCESS)
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.genNotif(self.other, "gone")
        files = nixlBind.nixlRegDList(nixlBind.FILE_SEG, [(0, 0, 0, __file__), (0, 0, 0, __file__ + ".none")])
        there, not_there = self.a.queryMem(files, self.a.createBackend("POSIX", {}))
        self.assertEqual(int(there["size"]), os.stat(__file__).st_size)
        self.assertEqual(int(there["mode"]), os.stat(__file__).st_mode)
        self.assertEqual(int(there["mtime"]), int(os.stat(__file__).st_mtime))
        self.assertIsNone(not_there)
        with self.assertRaises(nixlBind.nixlNotSupportedError):
            self.a.queryMem(files, self.backends[0])


class Files(unittest.TestCase):
    """Files as memory, by the backend POSIX: the remote side of a transfer within one agent."""

    def setUp(self):
        self.a = agent(backends=["POSIX"])
        self.mine = buffer()
        self.a_reg = self.a.register_memory([(self.mine.ctypes.data, self.mine.nbytes, 0, "")], "DRAM")
        self.file = tempfile.TemporaryFile()
        self.addCleanup(self.file.close)
        self.fd = self.file.fileno()
        self.file_reg = self.a.register_memory([(0, self.mine.nbytes, self.fd, "")], "FILE")

    def there(self):
        return numpy.frombuffer(os.pread(self.fd, 1 << 20, 0), numpy.uint8)

    def test_direct_and_again(self):
        here = self.a.get_xfer_descs(rows(self.mine), "DRAM")
        there = self.a.get_xfer_descs([(PAGE * (PAGES - 1 - i), PAGE, self.fd) for i in range(PAGES)], "FILE")
        write = self.a.initialize_xfer("WRITE", here, there, self.a.name)
        with self.assertRaises(nixlBind.nixlNotPostedError):
            self.a.check_xfer_state(write)
        for _ in range(3):
            self.mine += 1
            self.assertEqual(finish(self.a, write), "DONE")
            self.assertTrue((self.there().reshape(PAGES, PAGE) == self.mine.reshape(PAGES, PAGE)[::-1]).all())
        expected = self.mine.copy()
        self.mine[:] = 255
        read = self.a.initialize_xfer("READ", here, there, self.a.name)
        self.assertEqual(finish(self.a, read), "DONE")
        self.assertTrue((self.mine == expected).all())
        telemetry = self.a.get_xfer_telemetry(read)
        self.assertEqual((telemetry.totalBytes, telemetry.descCount), (PAGE * PAGES, PAGES))
        for one in (write, read):
            self.a.release_xfer_handle(one)
        self.a.deregister_memory(self.file_reg)
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.initialize_xfer("READ", here, there, self.a.name)

    def test_prepared(self):
        os.pwrite(self.fd, numpy.repeat(numpy.arange(100, 100 + PAGES, dtype=numpy.uint8), PAGE).tobytes(), 0)
        here = self.a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(self.mine), "DRAM")
        there = self.a.prep_xfer_dlist(self.a.name, [(PAGE * i, PAGE, self.fd) for i in range(PAGES)], "FILE")
        read = self.a.make_prepped_xfer("READ", here, [5, 1, 60], there, [7, 63, 8])
        self.assertEqual(finish(self.a, read), "DONE")
        pages = self.mine.reshape(PAGES, PAGE)
        expected = numpy.repeat(numpy.arange(PAGES, dtype=numpy.uint8), PAGE).reshape(PAGES, PAGE)
        for page, source in ((5, 7), (1, 63), (60, 8)):
            expected[page] = 100 + source
        self.assertTrue((pages == expected).all())
        with self.assertRaises(nixlBind.nixlInvalidParamError):
            self.a.make_prepped_xfer("READ", here, [0], there, [PAGES])
        for handle in (here, there):
            self.a.release_dlist_handle(handle)

    def test_what_a_file_refuses(self):
        here = self.a.get_xfer_descs([(self.mine.ctypes.data, PAGE, 0)], "DRAM")
        for rows_there in ([(self.mine.nbytes, PAGE, self.fd)], [(0, PAGE, self.fd + 100)]):
            with self.assertRaises(nixlBind.nixlNotFoundError):
                self.a.initialize_xfer("READ", here, self.a.get_xfer_descs(rows_there, "FILE"), self.a.name)
        read_only = os.open(__file__, os.O_RDONLY)
        self.addCleanup(os.close, read_only)
        self.a.register_memory([(0, PAGE, read_only, "")], "FILE")
        write = self.a.initialize_xfer("WRITE", here, self.a.get_xfer_descs([(0, PAGE, read_only)], "FILE"), self.a.name)
        with self.assertRaises(nixlBind.nixlBackendError):
            finish(self.a, write)


class TwoProcesses(unittest.TestCase):
    def test_pull_by_notification(self):
        """The other process writes what this one asks for by a notification, as prefill does in push mode."""
        with subprocess.Popen([sys.executable, __file__, "--peer"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              env=os.environ) as child:
            try:
                here = agent("decode")
                memory = buffer(0)
                here.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
                child.stdin.write(b"%s %d\n" % (here.get_agent_metadata().hex().encode(), memory.ctypes.data))
                child.stdin.flush()
                # NIXL may log on standard output.
                metadata, base = next(line for line in child.stdout if line.startswith(b"peer ")).split()[1:]
                name = here.add_remote_agent(bytes.fromhex(metadata.decode()))
                here.send_notif(name.decode(), b"5 9")
                got = []
                while not got:
                    got = here.get_new_notifs().get("prefill", [])
                self.assertEqual(got, [b"written"])
                self.assertTrue((memory[9 * PAGE:10 * PAGE] == 5).all())
                local = here.prep_xfer_dlist("", rows(memory), "DRAM")
                remote = here.prep_xfer_dlist(name, numpy.array([(int(base), PAGE, 0, PAGE, PAGES)], numpy.uint64), "DRAM")
                order = numpy.random.default_rng(1).permutation(PAGES)
                handle = here.make_prepped_xfer("READ", local, numpy.arange(PAGES), remote, order, b"bye")
                self.assertEqual(finish(here, handle), "DONE")
                self.assertTrue((memory.reshape(PAGES, PAGE) == order[:, None]).all())
                here.release_xfer_handle(handle)
                self.assertEqual(child.wait(60), 0)
                with self.assertRaises(nixlBind.nixlRemoteDisconnectError):
                    while True:  # until its death is known here
                        here.send_notif(name, b"are you there?")
                        time.sleep(0.01)
                for _ in range(3):
                    with self.assertRaises(nixlBind.nixlRemoteDisconnectError):
                        here.send_notif(name, b"are you there?")
            finally:
                child.kill()


def peer():
    me = agent("prefill")
    memory = buffer()
    me.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    metadata, base = sys.stdin.readline().split()
    name = me.add_remote_agent(bytes.fromhex(metadata)).decode()
    print("peer", me.get_agent_metadata().hex(), memory.ctypes.data, flush=True)
    local = me.prep_xfer_dlist("NIXL_INIT_AGENT", rows(memory), "DRAM")
    remote = me.prep_xfer_dlist(name, numpy.array([(int(base), PAGE, 0, PAGE, PAGES)], numpy.uint64), "DRAM")
    while True:
        for message in me.get_new_notifs().get(name, []):
            if message == b"bye":
                return
            source, target = map(int, message.split())
            handle = me.make_prepped_xfer("WRITE", local, [source], remote, [target], b"written")
            finish(me, handle)


if __name__ == "__main__":
    if sys.argv[1:] == ["--peer"]:
        peer()
        os._exit(0)  # NIXL's own libraries may fail at exit
    result = unittest.main(exit=False).result
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if result.wasSuccessful() else 1)
