"""Files as memory in the drop-in for NIXL: many pages at once, and what files do that memory does not."""
import asyncio
import contextlib
import gc
import os
import tempfile
import unittest

import numpy

import baton
from baton.nixl import _bindings as nixlBind
from baton.nixl._api import nixl_agent, nixl_agent_config
from helpers import Refusing

PAGE, PAGES = 16384, 2048  # 32 MiB: several jobs for the threads
LONG = 120


class Files(Refusing):
    def setUp(self):
        self.a = nixl_agent("files", nixl_agent_config(backends=["POSIX"], capture_telemetry=True))
        self.memory = numpy.zeros((PAGES, PAGE), numpy.uint8)
        self.registered = self.a.register_memory([(self.memory.ctypes.data, self.memory.nbytes, 0, "")], "DRAM")
        self.file = tempfile.TemporaryFile()
        self.addCleanup(self.file.close)
        self.fd = self.file.fileno()
        self.held = self.a.register_memory([(0, self.memory.nbytes, self.fd, "")], "FILE")

    def lists(self, mine, theirs, fd=None):
        return (self.a.get_xfer_descs([(self.memory.ctypes.data + PAGE * int(i), PAGE, 0) for i in mine], "DRAM"),
                self.a.get_xfer_descs([(PAGE * int(i), PAGE, self.fd if fd is None else fd) for i in theirs], "FILE"))

    def move(self, op, mine, theirs, fd=None):
        return self.a.initialize_xfer(op, *self.lists(mine, theirs, fd), "files")

    def finish(self, handle):
        if self.a.transfer(handle) == "PROC":
            with contextlib.suppress(baton.BatonError):  # told again below
                handle._transfer.wait(LONG)
        self.assertEqual(self.a.check_xfer_state(handle), "DONE")

    def other(self, path, flags):
        fd = os.open(path, flags)
        self.addCleanup(os.close, fd)
        self.a.register_memory([(0, PAGE * PAGES, fd, "")], "FILE")
        return fd

    def test_a_file_that_is_short_full_damaged_or_closed(self):
        os.ftruncate(self.fd, 10 * PAGE + 100)
        self.finish(self.move("READ", range(10), range(10)))
        short = self.move("READ", range(20), range(20))
        self.refused(nixlBind.nixlBackendError, lambda: self.finish(short), f"ends at {10 * PAGE + 100}", "more bytes")
        os.ftruncate(self.fd, 20 * PAGE)
        self.finish(short)  # may be posted again
        full = self.move("WRITE", [0], [0], self.other("/dev/full", os.O_RDWR))
        self.refused(nixlBind.nixlBackendError, lambda: self.finish(full), "No space left")
        damaged = self.move("READ", [0], [0], self.other("/proc/self/mem", os.O_RDONLY))
        self.refused(nixlBind.nixlBackendError, lambda: self.finish(damaged), "Input/output error", "could not be read")
        fd = os.dup(self.fd)
        self.a.register_memory([(0, PAGE, fd, "")], "FILE")
        closed = self.move("WRITE", [0], [0], fd)
        os.close(fd)
        self.finish(closed)  # the agent has the file open itself
        self.refused(nixlBind.nixlBackendError, lambda: self.a.register_memory([(0, PAGE, fd, "")], "FILE"), str(fd))

    def test_by_batons_own_agent(self):
        agent = baton.Agent("own")
        agent.register(self.memory)
        agent.register((0, self.memory.nbytes, self.fd), memory=baton.FILE)
        self.assertTrue(agent.has_remote("own", [(0, PAGE, self.fd)], memory=baton.FILE))
        self.memory[:] = numpy.arange(PAGES, dtype=numpy.uint16).view(numpy.uint8)[:PAGES, None]
        here = agent.prepare([(self.memory.ctypes.data, PAGE, 0, PAGE, PAGES)])
        there = agent.prepare([(0, PAGE, self.fd, PAGE, PAGES)], "own", memory=baton.FILE)
        with agent.write(here, range(PAGES), there, range(PAGES - 1, -1, -1)) as write:
            write.wait(LONG)
            self.assertEqual(write.telemetry().bytes, self.memory.nbytes)
        seen = numpy.frombuffer(os.pread(self.fd, PAGE * PAGES, 0), numpy.uint8).reshape(PAGES, PAGE)
        self.assertTrue((seen[::-1] == self.memory).all())
        with agent.direct(baton.READ, [(self.memory.ctypes.data, PAGE, 0)], [(0, PAGE, self.fd)], "own",
                          memory=baton.FILE).post() as read:
            asyncio.run(self.awaited(read))
        self.assertTrue((self.memory[0] == seen[0]).all())
        self.refused(baton.NotSupportedError, lambda: agent.prepare([(0, PAGE, self.fd)], memory=baton.FILE))
        agent.deregister((0, self.memory.nbytes, self.fd), memory=baton.FILE)
        self.refused(baton.NotFoundError, write.post)
        agent.close()

    @staticmethod
    async def awaited(transfer):
        await asyncio.wait_for(transfer, LONG)

    def test_what_was_released_uses_nothing(self):
        read = self.move("READ", range(PAGES), range(PAGES))
        os.ftruncate(self.fd, PAGES * PAGE)
        self.a.transfer(read)
        read.release()  # waits for what the threads have begun
        self.refused(nixlBind.nixlNotFoundError, lambda: self.a.check_xfer_state(read))
        self.a.deregister_memory(self.held)
        self.a.deregister_memory(self.registered)
        self.refused(nixlBind.nixlNotFoundError, lambda: self.move("READ", [0], [0]))

    def test_nobody_has_it_any_more(self):
        os.ftruncate(self.fd, PAGES * PAGE)  # whatever is written before it is given up
        for _ in range(20):
            self.a.transfer(self.move("WRITE", range(64), range(64)))
        gc.collect()
        self.finish(self.move("READ", [0], [0]))


if __name__ == "__main__":
    unittest.main()
