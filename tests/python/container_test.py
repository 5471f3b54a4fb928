#!/usr/bin/env python3
"""Rows 1 to 10 of docs/reported-faults.md in one run, in namespaces of their own as a container has them: what the
sandbox, the network and the limits of a pod refuse. Prints a table; exit status 77 where no namespace can be made.

usage: container_test.py BATON MODEL
"""
# Promise(memory): In a container's sandbox, network and limits (rows 1 to 10 of reported-faults.md), what can be done is
#   done, and the rest says what allows it | run in new pid, mount and network namespaces, under seccomp filters and ulimits
import ctypes
import os
import pathlib
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback

INSIDE = "BATON_CASES"  # any variable that Baton knows: set for the process inside the namespaces
if os.environ.get(INSIDE) != "inside":
    isolate = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not shutil.which("unshare") or not shutil.which("ip"):
        print("skipped: there is no unshare or ip (./run install-deps all)")
        sys.exit(77)
    for more in ([], ["--user", "--map-root-user"]):
        if subprocess.run([*isolate, *more, "true"], capture_output=True, check=False).returncode == 0:
            os.environ[INSIDE] = "inside"
            os.execvp("unshare", [*isolate, *more, sys.executable, *sys.argv])
    print("skipped: namespaces cannot be made here: run as root (in a container: --privileged)")
    sys.exit(77)
del os.environ[INSIDE]

import baton  # noqa: E402
from limits_test import ALLOCATE, BATON, MIB, MODEL, Group, limit_files  # noqa: E402  takes the arguments

LIBC = ctypes.CDLL(None, use_errno=True)
LONG = 200  # seconds, for what hangs
CALLS = {"x86_64": {"process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319, "eventfd2": 290},
         "aarch64": {"process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279, "eventfd2": 19}}


class Skip(Exception):
    pass


def forbid(*calls, error=1):
    """From now on these calls of this process fail."""
    numbers = CALLS.get(os.uname().machine)
    if numbers is None:
        raise Skip(f"no numbers of system calls for {os.uname().machine}")
    program = [(0x20, 0, 0, 0)]  # the number of the call
    for call in calls:
        program += [(0x15, 0, 1, numbers[call]), (0x06, 0, 0, 0x50000 | error)]
    program.append((0x06, 0, 0, 0x7fff0000))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filters = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))
    if LIBC.prctl(38, 1, 0, 0, 0) != 0 or LIBC.prctl(22, 2, filters) != 0:
        raise Skip("this process may not forbid itself a call")


def ip(*words):
    subprocess.run(["ip", *words], check=True)


def new_network():
    assert LIBC.unshare(0x40000000) == 0, "a network namespace cannot be made"
    ip("link", "set", "lo", "up")


def said(command, status=None, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False, **options)
    text = done.stdout + done.stderr
    assert done.returncode == status if status is not None else done.returncode > 0, f"{command}: {done.returncode}\n{text}"
    return text


def until(fact, what):
    end = time.monotonic() + LONG
    while not fact():
        assert time.monotonic() < end, f"it never came: {what}"
        time.sleep(0.01)


def refused(kind, call, *words):
    try:
        made = call()
    except kind as why:
        assert all(word in str(why) for word in words), f"{why} does not say {words}"
        return
    made.close()
    raise AssertionError("made, although it cannot be")


def write(client, name="server", size=65536):
    """Sends a pattern to the remote agent's only memory, whose address is in its message, and reads it back."""
    sent, back = bytearray(range(256)) * (size // 256), bytearray(size)
    client.register(sent)
    client.register(back)
    (_, where), = client.wait_messages(LONG)
    theirs = [(int(where), size, 0)]
    remote = client.prepare(theirs, name)
    client.write(client.prepare([sent]), [0], remote, [0]).wait(LONG)
    client.read(client.prepare([back]), [0], remote, [0]).wait(LONG)
    assert back == sent, "other bytes"
    client.deregister(sent)
    client.deregister(back)


def pair(**options):
    """A write and a read between two agents of this process; what the route is."""
    with baton.Agent("client", **options) as client, baton.Agent("server", **options) as server:
        memory = bytearray(65536)
        server.register(memory)
        client.add_remote(server.metadata())
        server.add_remote(client.metadata())
        server.notify("client", str(baton.memory_of(memory).address).encode())
        write(client)
        return client.explain("server")


def nixl():
    try:
        from nixl import _bindings
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError as why:
        raise Skip(f"the drop-in: {why}") from why
    return nixl_agent, nixl_agent_config, _bindings


# --- the rows -------------------------------------------------------------------------------------


def row_1():
    forbid("process_vm_readv", "process_vm_writev")
    route = pair()
    assert "tcp" in route and "process_vm_readv" in route and "seccomp" in route, route
    return "tcp carries it; explain() names process_vm_readv and seccomp"


def row_2():
    for options, word in (({"listen_host": "10.99.99.99"}, "10.99.99.99"), ({"listen_host": "nosuch.invalid"}, "nosuch.invalid"),
                          ({"listen_host": "0.0.0.0:7000"}, "host alone")):
        refused(baton.BatonError, lambda options=options: baton.Agent("c", **options), word)
    assert "nosuch" in said([BATON, "kv_bw", "--listen", "nosuch:7000"])
    assert "10.99.99.99" in said([BATON, "serve", "--model", MODEL, "--port", "0", "--kv-host", "10.99.99.99", "--role", "prefill"])
    assert "10.99.99.99" in said([BATON, "serve", "--model", MODEL, "--port", "0", "--host", "10.99.99.99"])
    return "agents, kv_bw --listen, serve --kv-host and --host: an error that names the address"


def relay(outside, inside):
    """As a published port: who calls `outside` is at `inside`."""
    listener = socket.create_server(outside)

    def pump(here, there):
        try:
            while data := here.recv(1 << 16):
                there.sendall(data)
        except OSError:
            pass
        for end in (here, there):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def run():
        while True:
            caller = listener.accept()[0]
            there = socket.create_connection(inside)
            for ends in ((caller, there), (there, caller)):
                threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=run, daemon=True).start()


def published_server(ready, told):
    """In a network namespace of its own, behind 10.77.0.2:7001; its own addresses lead nowhere from outside."""
    new_network()
    os.write(ready, b"n")
    os.read(told, 1)
    ip("addr", "add", "10.77.0.2/24", "dev", "inner")
    ip("link", "set", "inner", "up")
    memory = bytearray(65536)
    agents = []
    for number, advertise in enumerate(("", "10.77.0.2:7002")):
        agents.append(baton.Agent(f"server{number}", listen_host="127.0.0.1", serve_metadata=True, advertise=advertise))
    os.environ["BATON_ADVERTISE"] = "10.77.0.2:7003"
    nixl_agent, config, _ = nixl()
    dropped_in = nixl_agent("server2", config(enable_prog_thread=True))
    agents.append(dropped_in.agent.baton)
    for number, agent in enumerate(agents):
        agent.register(memory)
        relay(("10.77.0.2", 7001 + number), ("127.0.0.1", agent.port))
        os.write(ready, len(agent.metadata()).to_bytes(4, "little") + agent.metadata())
    while os.read(told, 1):  # a client has sent its metadata
        number = os.read(told, 1)[0] - ord("0")
        size = int.from_bytes(os.read(told, 4), "little")
        client = agents[number].add_remote(os.read(told, size))
        agents[number].notify(client, str(baton.memory_of(memory).address).encode())


def row_3():
    (from_server, ready), (told, to_server) = os.pipe(), os.pipe()
    server = os.fork()
    if server == 0:
        os.close(from_server)
        os.close(to_server)
        try:
            published_server(ready, told)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(ready)
    os.close(told)
    assert os.read(from_server, 1) == b"n", "no second network namespace"
    ip("link", "add", "outer", "type", "veth", "peer", "name", "inner", "netns", str(server))
    ip("addr", "add", "10.77.0.1/24", "dev", "outer")
    ip("link", "set", "outer", "up")
    os.write(to_server, b"g")
    for number in range(3):
        size = int.from_bytes(os.read(from_server, 4), "little")
        metadata = os.read(from_server, size)
        with baton.Agent("client", listen_host="10.77.0.1") as client:
            if number == 0:
                client.fetch_metadata("server0", "10.77.0.2:7001")
                client.wait_remote("server0", timeout=LONG)
            else:
                client.add_remote(metadata)
            mine = client.metadata()
            os.write(to_server, b"c" + str(number).encode() + len(mine).to_bytes(4, "little") + mine)
            write(client, f"server{number}")
            route = client.explain(f"server{number}")
            assert f"10.77.0.2:{7001 + number}" in route, route
    os.close(to_server)
    assert os.waitpid(server, 0)[1] == 0, "the server failed"
    return "met where it was called; advertise; BATON_ADVERTISE in the drop-in"


def row_4():
    new_network()
    ip("addr", "del", "127.0.0.1/8", "dev", "lo")
    with baton.Agent("client", listen_host="*") as client, baton.Agent("server", listen_host="*", serve_metadata=True) as server:
        memory = bytearray(65536)
        server.register(memory)
        client.fetch_metadata("server", f"[::1]:{server.port}")
        client.wait_remote("server", timeout=LONG)
        server.add_remote(client.metadata())
        server.notify("client", str(baton.memory_of(memory).address).encode())
        write(client)
    with subprocess.Popen([BATON, "write_bw", "-p", "18999"], stdout=subprocess.DEVNULL) as perf:
        try:
            until(lambda: ":4A37 " in pathlib.Path("/proc/net/tcp6").read_text(encoding="utf8"), "write_bw listens")
            said([BATON, "write_bw", "--provider", "tcp", "-p", "18999", "-n", "10", "::1"], 0)
            assert perf.wait(LONG) == 0
        finally:
            perf.kill()
    nixl_agent, config, _ = nixl()
    here = nixl_agent("here", config(enable_listen_thread=True, listen_port=18998))
    there = nixl_agent("there", config())
    there.fetch_remote_metadata("here", "::1", 18998)
    until(lambda: there.check_remote_metadata("here"), "the metadata")
    del here, there
    return "agents, write_bw and the drop-in's fetch_remote_metadata(\"::1\") with their defaults"


def row_5():
    injected = {"BATON_SERVICE_HOST": "10.0.0.7", "BATON_SERVICE_PORT": "8000", "BATON_SERVICE_PORT_HTTP": "8000",
                "BATON_PORT": "tcp://10.0.0.7:8000", "BATON_PORT_8000_TCP": "tcp://10.0.0.7:8000", "BATON_PORT_8000_TCP_PROTO": "tcp",
                "BATON_PORT_8000_TCP_PORT": "8000", "BATON_PORT_8000_TCP_ADDR": "10.0.0.7", "BATON_DECODE_SERVICE_HOST": "10.0.0.8",
                "BATON_DECODE_PORT": "tcp://10.0.0.8:8000"}
    said([BATON, "--version"], 0, env={**os.environ, **injected})
    said([BATON, "info"], 0, env={**os.environ, **injected})
    assert "BATON_LOG" in said([BATON, "info"], 2, env={**os.environ, "BATON_LGO": "info"})
    return "passed over; BATON_LGO is still an error"


def row_6():
    done = said([sys.executable, "-c", ALLOCATE, str(16 * MIB)], 0, preexec_fn=lambda: limit_files(MIB))
    assert "allocated True" in done, done
    limit_files(0)
    assert "ulimit -f" in pair(), "explain() does not name the limit"
    return "no SIGXFSZ; memory without a file; the limit is named"


def row_7():
    forbid("memfd_create")
    route = pair()
    assert "tcp" in route and "memfd_create" in route, route
    forbid("eventfd2")
    refused(baton.BatonError, lambda: baton.Agent("c"), "eventfd", "seccomp")
    return "tcp carries it; without eventfd an error that names it and seccomp"


def row_8():
    try:
        with Group(300 * MIB) as group:
            done = group.run(sys.executable, "-c", ALLOCATE, str(2000 * MIB))
            what = "the cgroup's memory"
    except Exception as why:
        if "cgroup" not in str(why):
            raise
        raise Skip(str(why)) from why
    assert done.returncode == 1 and "left" in done.stderr, f"{done.returncode} {done.stderr}"
    return f"{what} that is left is named, nothing is killed"


def key_of(mode):
    key = pathlib.Path(tempfile.mkdtemp(), "key")
    key.write_text("0123456789abcdef" * 2, encoding="utf8")
    key.parent.chmod(0o755)
    key.chmod(mode)
    return str(key)


def row_9():
    key = key_of(0o440)
    refused(baton.BatonError, lambda: baton.Agent("a", key_file=key_of(0o444)), "key")
    try:
        os.chown(key, 0, 2000)
        os.setgroups([2000])
        os.setgid(1000)
        os.setuid(1000)
    except OSError as why:
        raise Skip(f"another user and group: {why}") from why
    baton.Agent("a", key_file=key).close()
    return "accepted from a member of the group; one that everybody may read is refused"


def row_10():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        refused(baton.BackendError, lambda: baton.Agent("late", listen_host="0.0.0.0", listen_port=port), "in use")
        assert "in use" in said([BATON, "write_bw", "-p", str(port)])
        assert "in use" in said([BATON, "serve", "--model", MODEL, "--host", "0.0.0.0", "--port", str(port)])
        nixl_agent, config, bindings = nixl()
        try:
            nixl_agent("late", config(enable_listen_thread=True, listen_port=port))
        except bindings.nixlBackendError as why:
            assert "in use" in str(why), why
        else:
            raise AssertionError("the drop-in listens at a port that is in use")
    return "BackendError, nixlBackendError and status 1, \"in use\""


ROWS = (("1", "process_vm_* refused (seccomp)", row_1), ("2", "wrong addresses to listen at", row_2),
        ("3", "a published port", row_3), ("4", "IPv6 alone", row_4), ("5", "variables of Kubernetes", row_5),
        ("6", "ulimit -f", row_6), ("7", "memfd_create, eventfd refused", row_7), ("8", "a memory cgroup", row_8),
        ("9", "a key root:fsGroup 0440", row_9), ("10", "a port in use", row_10))


def run(row):
    """In a process of its own: there is no way back from a filter. "ok", "skipped" or "FAILED", and what was seen."""
    seen, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text, status = row(), 0
        except Skip as why:
            text, status = str(why), 77
        except BaseException:
            text, status = traceback.format_exc(), 1
        os.write(tell, text.encode()[:1 << 15])
        os._exit(status)
    os.close(tell)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = os.read(seen, 1 << 16).decode()
    os.close(seen)
    return {0: "ok", 77: "skipped"}.get(status, "FAILED"), text or f"ended with {status}"


def main():
    subprocess.run(["mount", "-t", "tmpfs", "rows", "/mnt"], check=True)
    tempfile.tempdir = "/mnt"
    ip("link", "set", "lo", "up")
    failed = 0
    print(f"{'row':<4}{'try':<34}{'':<9}seen")
    for number, what, row in ROWS:
        outcome, seen = run(row)
        failed += outcome == "FAILED"
        print(f"{number:<4}{what:<34}{outcome:<9}{seen}", flush=True)
    sys.exit(1 if failed else 0)


main()
