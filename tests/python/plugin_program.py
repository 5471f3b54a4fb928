"""NIXL's own agent, from its wheel, over Baton's plugin: two agents in one process and in two, reads and writes,
notifications, releases. NIXL_PLUGIN_DIR names the folder with libplugin_BATON.so."""
import ctypes
import os
import subprocess
import sys
import time

import numpy
from nixl._api import nixl_agent, nixl_agent_config

PAGES, SIZE = 64, 4096


def agent(name):
    return nixl_agent(name, nixl_agent_config(backends=["BATON"]))


def rows(memory, indices):
    at = memory.__array_interface__["data"][0]
    return [(at + i * SIZE, SIZE, 0) for i in indices]


def wait(one, handle):
    while one.check_xfer_state(handle) == "PROC":
        time.sleep(0.001)
    assert one.check_xfer_state(handle) == "DONE"


def heard(one, other, count=1):
    got = []
    while len(got) < count:
        got += one.get_new_notifs().get(other, [])
        time.sleep(0.001)
    return got


def move(a, mine, other, theirs):
    """Reads pages of the other's into ours by a prepared transfer, and writes one back by a direct one."""
    local = a.prep_xfer_dlist("NIXL_INIT_AGENT", rows(mine, range(PAGES)), "DRAM")
    remote = a.prep_xfer_dlist(other, theirs, "DRAM")
    read = a.make_prepped_xfer("READ", local, [3, 1, 9], remote, [7, 8, 60], b"read")
    for _ in range(3):
        assert a.transfer(read) in ("PROC", "DONE")
        wait(a, read)
    a.release_xfer_handle(read)
    write = a.initialize_xfer("WRITE", a.get_xfer_descs(rows(mine, [0]), "DRAM"),
                              a.get_xfer_descs([theirs[20]], "DRAM"), other, b"written")
    a.transfer(write)
    wait(a, write)
    a.release_xfer_handle(write)


def said(child):
    """What the other process says; NIXL logs to the same place."""
    for line in child.stdout:
        if line.startswith("serving "):
            return line.split()[1:]
    sys.exit("the other process ended")


def main():
    a, mine = agent("a"), numpy.full((PAGES, SIZE), 1, numpy.uint8)
    a.register_memory([(*rows(mine, [0])[0][:1], PAGES * SIZE, 0, "")], "DRAM")
    a.register_memory([(*rows(mine, [0])[0][:1], SIZE, 0, "")], "DRAM")

    b, theirs = agent("b"), numpy.arange(PAGES * SIZE, dtype=numpy.uint64).astype(numpy.uint8).reshape(PAGES, SIZE)
    theirs[7], theirs[8], theirs[60] = 107, 108, 160
    held = b.register_memory([(*rows(theirs, [0])[0][:1], PAGES * SIZE, 0, "")], "DRAM")
    assert a.add_remote_agent(b.get_agent_metadata()) == b"b"
    assert b.add_remote_agent(a.get_agent_metadata()) == b"a"
    move(a, mine, "b", rows(theirs, range(PAGES)))
    assert (mine[3] == 107).all() and (mine[1] == 108).all() and (mine[9] == 160).all() and (theirs[20] == 1).all()
    assert heard(b, "a", 4) == [b"read"] * 3 + [b"written"]
    b.send_notif("a", b"hello")
    assert heard(a, "b") == [b"hello"]
    b.deregister_memory(held)
    a.remove_remote_agent("b")
    print("in one process: as it should be")

    child = subprocess.Popen([sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)
    metadata, address = said(child)
    assert a.add_remote_agent(bytes.fromhex(metadata)) == b"c"
    mine[:] = 2
    move(a, mine, "c", [(int(address) + i * SIZE, SIZE, 0) for i in range(PAGES)])
    assert (mine[3] == 7).all() and (mine[1] == 8).all() and (mine[9] == 60).all()
    child.stdin.write("look\n")
    child.stdin.flush()
    assert said(child) == ["2"]
    child.wait()
    print("in two processes: as it should be")
    devices()


def devices():
    """Over the fake of the driver where that is the library that is found: pages of devices and of the host."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        cuda.fake_cuda_allocate.restype, cuda.fake_cuda_view.restype = ctypes.c_uint64, ctypes.c_void_p
        cuda.fake_cuda_view.argtypes = [ctypes.c_uint64, ctypes.c_size_t]
    except (OSError, AttributeError):
        print("without the fake driver: no memory of devices")
        return
    a, b = agent("e"), agent("f")
    assert len(a.get_plugin_mem_types("BATON")) == 2, a.get_plugin_mem_types("BATON")
    host = numpy.arange(PAGES * SIZE, dtype=numpy.uint64).astype(numpy.uint8)
    at = [cuda.fake_cuda_allocate(PAGES * SIZE, device) for device in range(2)]
    seen = [numpy.ctypeslib.as_array((ctypes.c_ubyte * (PAGES * SIZE)).from_address(
        cuda.fake_cuda_view(one, PAGES * SIZE))) for one in at]
    where = {"DRAM": (host.ctypes.data, PAGES * SIZE, 0), 0: (at[0], PAGES * SIZE, 0), 1: (at[1], PAGES * SIZE, 1)}
    a.register_memory([(*where["DRAM"], "")], "DRAM")
    a.register_memory([(*where[0], "")], "VRAM")
    b.register_memory([(*where[1], "")], "VRAM")
    assert a.add_remote_agent(b.get_agent_metadata()) == b"f"
    there = a.get_xfer_descs([where[1]], "VRAM")
    for op, here, kind in (("WRITE", "DRAM", "DRAM"), ("READ", 0, "VRAM"), ("WRITE", 0, "VRAM"), ("READ", "DRAM", "DRAM")):
        if op == "WRITE":
            (host if kind == "DRAM" else seen[0])[:] += 5
        move_all = a.initialize_xfer(op, a.get_xfer_descs([where[here]], kind), there, "f", b"")
        a.transfer(move_all)
        wait(a, move_all)
        a.release_xfer_handle(move_all)
        assert (seen[1] == (host if kind == "DRAM" else seen[0])).all(), (op, kind)
    try:
        a.register_memory([(*where[1], "")], "DRAM")
        sys.exit("memory of a device was registered as the host's")
    except Exception:  # which one is NIXL's to choose
        pass
    print("with devices: as it should be")


def serve():
    c, memory = agent("c"), numpy.repeat(numpy.arange(PAGES, dtype=numpy.uint8), SIZE).reshape(PAGES, SIZE)
    c.register_memory([(*rows(memory, [0])[0][:1], PAGES * SIZE, 0, "")], "DRAM")
    print("serving", c.get_agent_metadata().hex(), rows(memory, [0])[0][0], flush=True)
    if not sys.stdin.readline():
        return
    heard(c, "a", 4)
    print("serving", memory[20].min(), flush=True)


if __name__ == "__main__":
    serve() if sys.argv[1:] else main()
    sys.stdout.flush()
    os._exit(0)  # NIXL's own libraries may fail at exit
