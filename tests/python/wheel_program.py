"""What a library that brings its own C++ library might break: another one in the process, exceptions that it throws and
catches, threads that come and go, a forked child. Run with the wheel, by wheel_test."""
import concurrent.futures
import ctypes
import os
import resource
import subprocess
import sys
import traceback

import baton

PAGE, PAGES = 4096, 16
THREADS = 8


def foreign_library():
    """The system's C++ library, for everybody to see, as other packages bring it: a name of it that Baton's has too."""
    try:
        ctypes.CDLL("libstdc++.so.6", ctypes.RTLD_GLOBAL)
    except OSError:
        print("no other libstdc++ here")


def pull(number):
    """Two agents, and pages from one to the other."""
    there, here = bytearray(bytes([number]) * PAGE * PAGES), bytearray(PAGE * PAGES)
    with baton.Agent(f"prefill {number}") as prefill, baton.Agent(f"decode {number}") as decode:
        prefill.register(there)
        decode.register(here)
        decode.add_remote(prefill.metadata())
        rows = [[(baton.memory_of(memory).address, PAGE, 0, PAGE, PAGES)] for memory in (here, there)]
        local, remote = decode.prepare(rows[0]), decode.prepare(rows[1], f"prefill {number}")
        with decode.read(local, list(range(PAGES)), remote, list(range(PAGES)), b"") as transfer:
            transfer.wait(60)
    assert here == there


def pull_in_threads():
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(pull, range(1, THREADS + 1)))


def words_of_failure(kibibytes):
    """What an agent says that has so much more address space: where it throws depends on that."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (kibibytes << 10), most[1]))
    try:
        baton.Agent("short of memory").close()
        return ""
    except baton.BatonError as why:
        return str(why)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, most)


def exceptions():
    """std::bad_alloc of an operator new, std::system_error of a thread's constructor: both end as results. In a young
    process, which has nothing to spare."""
    first = baton.Agent("first")
    said = [words_of_failure(kibibytes) for kibibytes in range(0, 40 << 10, 64)]
    assert any("no memory" in words for words in said), said
    assert any("no thread" in words for words in said), said
    first.close()


def in_a_child(what):
    child = os.fork()
    if child == 0:
        try:
            what()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0, what


foreign_library()
if len(sys.argv) > 1:
    exceptions()
else:
    pull_in_threads()
    in_a_child(lambda: pull(99))
    pull(100)
    subprocess.run([sys.executable, __file__, "exceptions"], check=True)
    print("beside others, in threads, in a child, short of memory: ok")
