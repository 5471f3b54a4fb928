"""Memory of CUDA devices from Python, over a fake of the driver: agents and the drop-in for NIXL, buffers as
frameworks have them. Device memory is mapped without rights: whatever part of Python or
of the library touched it by the processor would end this program."""
import ctypes
import gc
import unittest
import weakref

import baton
from baton.nixl._api import nixl_agent, nixl_agent_config, nixlBind

CUDA = ctypes.CDLL("libcuda.so.1")
CUDA.fake_cuda_allocate.restype, CUDA.fake_cuda_allocate.argtypes = ctypes.c_uint64, [ctypes.c_size_t, ctypes.c_int]
CUDA.fake_cuda_view.restype, CUDA.fake_cuda_view.argtypes = ctypes.c_void_p, [ctypes.c_uint64, ctypes.c_size_t]
CUDA.fake_cuda_free.argtypes = [ctypes.c_uint64]
CUDA.fake_cuda_violations.restype = ctypes.c_size_t
SIZE, PAGE = 1 << 16, 4096


class Block:
    """Memory of a device. `view`: its bytes, for the test alone."""

    def __init__(self, seed, device=0):
        self.address, self.device = CUDA.fake_cuda_allocate(SIZE, device), device
        self.view = (ctypes.c_ubyte * SIZE).from_address(CUDA.fake_cuda_view(self.address, SIZE))
        self.view[:] = pattern(seed)

    def row(self, page=0, size=SIZE):
        return self.address + page * PAGE, size, self.device

    def __bytes__(self):
        return bytes(self.view)


def pattern(seed):
    return bytes((i * 7 + seed) % 251 for i in range(SIZE))


class Tensor:
    """A block, as torch has it."""

    def __init__(self, block):
        self.block, self.device = block, type("device", (), {"type": "cuda", "index": block.device})()
        self.data_ptr, self.get_device = (lambda: block.address), (lambda: block.device)
        self.element_size, self.numel, self.is_contiguous = (lambda: 2), (lambda: SIZE // 2), (lambda: True)


class CudaArray:
    """A block by CUDA's array interface."""

    def __init__(self, block):
        self.device = block.device
        self.__cuda_array_interface__ = {"shape": (SIZE // 4,), "typestr": "<f4", "data": (block.address, False),
                                         "strides": None, "version": 3}


class Speaks:
    """A block by DLPack."""

    def __init__(self, block):
        self.block, self.shape = block, (ctypes.c_int64 * 2)(16, SIZE // 16)
        self.tensor = baton.buffers._DLTensor(block.address, 2, block.device, 2, 1, 8, 1, self.shape, None, 0)
        self.streams = []

    def __dlpack_device__(self):
        return 2, self.block.device

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.tensor), b"dltensor", None)


class Agents(unittest.TestCase):
    def setUp(self):
        self.a, self.b = baton.Agent("alpha", require="tcp"), baton.Agent("beta", require="tcp")
        self.mine, self.theirs, self.host = Block(1), Block(2, device=1), bytearray(pattern(3))

    def tearDown(self):
        self.a.close()
        self.b.close()
        for block in (self.mine, self.theirs):
            CUDA.fake_cuda_free(block.address)
        self.assertEqual(CUDA.fake_cuda_violations(), 0)

    def meet(self):
        self.a.add_remote(self.b.metadata())

    def test_pages_of_devices_and_of_the_host(self):
        self.assertTrue(baton.memory_supported(baton.VRAM))
        self.a.register(self.mine.row(), memory=baton.VRAM)
        self.a.register(self.host)
        self.b.register(self.theirs.row(), memory=baton.VRAM)
        self.meet()
        rows = [(block.address, PAGE, block.device, PAGE, SIZE // PAGE) for block in (self.mine, self.theirs)]
        near, far = self.a.prepare(rows[:1], memory=baton.VRAM), self.a.prepare(rows[1:], "beta", baton.VRAM)
        expected = bytearray(bytes(self.theirs))
        expected[9 * PAGE:10 * PAGE] = bytes(self.mine)[5 * PAGE:6 * PAGE]
        self.a.write(near, [5], far, [9], b"there").wait(60)
        self.assertEqual(bytes(self.theirs), expected)
        # The kinds of both sides, without lists; and back to the host.
        self.a.direct(baton.READ, [self.host], [self.theirs.row()], "beta", memory=baton.VRAM).post().wait(60)
        self.assertEqual(self.host, expected)
        self.a.direct(baton.WRITE, [self.mine.row()], [self.theirs.row()], "beta", memory=baton.VRAM,
                      local_memory=baton.VRAM).post().wait(60)
        self.assertEqual(bytes(self.theirs), bytes(self.mine))
        self.assertTrue(self.a.has_remote("beta", [self.theirs.row()], baton.VRAM))
        self.assertFalse(self.a.has_remote("beta", [self.theirs.row()]))
        self.a.deregister(self.mine.row(), memory=baton.VRAM)
        with self.assertRaises(baton.NotFoundError):
            self.a.deregister(self.mine.row(), memory=baton.VRAM)

    def test_a_plan_between_a_device_and_the_host(self):
        """Rows of K and V of 256 bytes, two heads: [token][head] in blocks of 16 here, [head][token] in blocks of 32 there."""
        self.a.register(self.mine.row(), memory=baton.VRAM)
        self.b.register(self.host)
        self.meet()
        how = dict(heads=2, head_size=64, dtype="bfloat16", layers=1, pair="joined", one_tensor=True)
        mine = baton.KvLayout("model").add_paged([self.mine.row()], blocks=8, block_tokens=16, memory=baton.VRAM, **how)
        theirs = baton.KvLayout("model").add_paged([self.host], blocks=4, block_tokens=32, order="HND", **how)
        before, source = bytes(self.host), bytes(self.mine)
        here, there = [7, 0, 3, 4], [2, 1]
        plan = baton.KvPlan(self.a, baton.WRITE, mine, "beta", baton.KvLayout.decode(theirs.encode()))
        with plan.post(here, there) as transfer:
            transfer.wait(60)
        expected = bytearray(before)
        for token in range(64):
            for head in range(2):
                at = there[token // 32] * 16384 + (head * 32 + token % 32) * 256
                start = here[token // 16] * 8192 + (token % 16 * 2 + head) * 256
                expected[at:at + 256] = source[start:start + 256]
        self.assertEqual(self.host, expected)
        # Without a word on the kind it would be the host's memory, which is not registered there.
        with self.assertRaisesRegex(baton.NotFoundError, "registered DRAM range"):
            wrong = baton.KvLayout("model").add_paged([self.mine.row()], blocks=8, block_tokens=16, **how)
            baton.KvPlan(self.a, baton.WRITE, wrong, "beta", theirs)

    def test_buffers_say_what_they_are(self):
        for face in (Tensor, CudaArray, Speaks):
            with self.subTest(face.__name__):
                mine, theirs = face(self.mine), face(self.theirs)
                self.assertEqual(baton.memory_of(theirs)[:3], self.theirs.row())
                self.mine.view[:] = pattern(len(face.__name__))
                self.a.register(mine)
                self.b.register(theirs)
                self.a.add_remote(self.b.partial_metadata([theirs]))
                self.assertTrue(self.a.has_remote("beta", [theirs]))
                self.a.direct(baton.WRITE, [mine], [theirs], "beta").post().wait(60)
                self.assertEqual(bytes(self.theirs), bytes(self.mine))
                with self.assertRaisesRegex(ValueError, "of one kind"):
                    self.a.register(mine, self.host)
                with self.assertRaisesRegex(ValueError, "VRAM, not DRAM"):
                    self.a.register(mine, memory=baton.DRAM)
                self.a.deregister(mine)
                self.b.deregister(theirs)

    def test_dlpack_is_asked_on_no_stream(self):
        speaks = Speaks(self.mine)
        self.assertEqual(baton.memory_of(speaks)[:3], self.mine.row())
        self.assertEqual(speaks.streams, [-1])

    def test_a_buffer_is_kept_until_it_is_deregistered(self):
        tensor = Tensor(self.mine)
        kept = weakref.ref(tensor)
        self.a.register(tensor)
        del tensor
        gc.collect()
        self.assertIsNotNone(kept())
        self.a.deregister(self.mine.row(), memory=baton.VRAM)
        gc.collect()
        self.assertIsNone(kept())

    def test_what_is_not_of_its_kind_is_refused(self):
        with self.assertRaisesRegex(baton.InvalidParamError, "register them as VRAM, with device 0"):
            self.a.register(self.mine.row())
        with self.assertRaisesRegex(baton.InvalidParamError, "register memory of the host as DRAM"):
            self.a.register((baton.memory_of(self.host).address, 64, 0), memory=baton.VRAM)
        with self.assertRaisesRegex(baton.InvalidParamError, "CUDA device 1, not of device 0"):
            self.b.register((self.theirs.address, 64, 0), memory=baton.VRAM)
        self.assertEqual(self.a.stats()["registered"] + self.b.stats()["registered"], 0)

class Nixl(unittest.TestCase):
    def setUp(self):
        self.a, self.b = (nixl_agent(name, nixl_agent_config(backends=["UCX", "POSIX"])) for name in ("a", "b"))
        self.mine, self.theirs, self.host = Block(1), Block(2, device=1), bytearray(pattern(3))

    def tearDown(self):
        self.a._agent.close()
        self.b._agent.close()
        for block in (self.mine, self.theirs):
            CUDA.fake_cuda_free(block.address)
        self.assertEqual(CUDA.fake_cuda_violations(), 0)

    def finish(self, handle):
        state = self.a.transfer(handle)
        while state == "PROC":
            state = self.a.check_xfer_state(handle)
        self.assertEqual(state, "DONE")
        self.a.release_xfer_handle(handle)

    def test_strings_tuples_and_tensors(self):
        self.assertEqual(self.a.get_plugin_mem_types("UCX"), ["DRAM_SEG", "VRAM_SEG"])
        self.assertEqual(self.a.get_backend_mem_types("UCX"), ["DRAM_SEG", "VRAM_SEG"])
        self.assertEqual(self.a.get_plugin_mem_types("POSIX"), ["DRAM_SEG", "FILE_SEG"])
        self.a.register_memory([(*self.mine.row(), "")], "VRAM")
        tensor = Tensor(self.theirs)
        descs = self.b.register_memory(tensor)
        self.assertEqual(descs.getType(), nixlBind.VRAM_SEG)
        self.assertEqual(self.a.add_remote_agent(self.b.get_partial_agent_metadata(descs, True)), b"b")
        there = self.a.get_xfer_descs([tensor])
        self.assertEqual(there.getType(), nixlBind.VRAM_SEG)
        self.assertEqual(there[0], self.theirs.row())
        self.assertTrue(self.a.check_remote_metadata("b", there))
        as_dram = self.a.get_xfer_descs([self.theirs.row()], "DRAM")
        self.assertFalse(self.a.check_remote_metadata("b", as_dram))
        here = self.a.get_xfer_descs([self.mine.row()], "VRAM")
        self.finish(self.a.initialize_xfer("WRITE", here, there, "b"))
        self.assertEqual(bytes(self.theirs), bytes(self.mine))

        pages = [self.theirs.row(page, PAGE) for page in range(SIZE // PAGE)]
        local = self.a.prep_xfer_dlist("", [self.mine.row(page, PAGE) for page in range(SIZE // PAGE)], "cuda")
        remote = self.a.prep_xfer_dlist("b", pages, "VRAM")
        self.theirs.view[:] = pattern(9)
        expected = bytearray(bytes(self.mine))
        expected[2 * PAGE:3 * PAGE] = bytes(self.theirs)[7 * PAGE:8 * PAGE]
        self.finish(self.a.make_prepped_xfer("READ", local, [2], remote, [7]))
        self.assertEqual(bytes(self.mine), expected)
        # Into the host's.
        self.a.register_memory(self.host)
        here = self.a.get_xfer_descs(self.host)
        self.finish(self.a.initialize_xfer("READ", here, there, "b"))
        self.assertEqual(self.host, bytes(self.theirs))
        self.b.deregister_memory(descs)

    def test_refusals_are_nixls(self):
        with self.assertRaisesRegex(nixlBind.nixlBackendError, "register them as VRAM"):
            self.a.register_memory([(*self.mine.row(), "")], "DRAM")
        with self.assertRaisesRegex(nixlBind.nixlBackendError, "not of device 1"):
            self.a.register_memory([(self.mine.address, 64, 1, "")], "VRAM")
        with self.assertRaises(nixlBind.nixlNotFoundError):
            self.a.prep_xfer_dlist("", [self.mine.row()], "VRAM")
        for face in (CudaArray, Speaks):
            self.assertEqual(self.a.get_reg_descs(face(self.mine)).getType(), nixlBind.VRAM_SEG)


if __name__ == "__main__":
    unittest.main()
