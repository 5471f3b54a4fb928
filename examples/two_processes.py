"""Decode pulls pages out of prefill's memory; prefill hears of it, and may use them for the next request. In two processes:

    python3 two_processes.py prefill 0.0.0.0:7000       # on one machine; 127.0.0.1: only for this one
    python3 two_processes.py decode HOST:7000           # on the other, with the same key file in $BATON_KEY_FILE
    python3 two_processes.py                            # both, here
"""
import subprocess
import sys

import baton

PAGE, PAGES, PATIENCE = 4096, 64, 60


def prefill(host, port):
    memory = bytearray(b"".join(bytes([page]) * PAGE for page in range(PAGES)))
    with baton.Agent("prefill", listen_host=host, listen_port=port, serve_metadata=True) as agent:
        agent.register(memory)
        print(f"prefill listens on {host}:{agent.port}", flush=True)
        (decode, request), = agent.wait_messages(PATIENCE)
        agent.wait_remote(decode, timeout=PATIENCE)  # its metadata, by which it is answered
        agent.notify(decode, b"%d" % baton.memory_of(memory).address)
        (decode, request), = agent.wait_messages(PATIENCE)
        print(f"prefill heard from {decode}: {request.decode()}", flush=True)


def decode(where):
    memory = bytearray(4 * PAGE)
    with baton.Agent("decode") as agent:
        agent.register(memory)
        agent.send_metadata(where)
        agent.fetch_metadata("prefill", where)
        agent.wait_remote("prefill", timeout=PATIENCE)
        agent.notify("prefill", b"where are the pages?")
        (_, address), = agent.wait_messages(PATIENCE)

        # All pages, prepared once, as rows of (address, bytes, device, stride, count); a request names some by number.
        remote = agent.prepare([(int(address), PAGE, 0, PAGE, PAGES)], "prefill")
        local = agent.prepare([(baton.memory_of(memory).address, PAGE, 0, PAGE, 4)])
        with agent.read(local, [0, 1, 2, 3], remote, [9, 7, 33, 34], b"request 1 is here") as pull:
            pull.wait(PATIENCE)
        print("decode has pages", *(memory[PAGE * page] for page in range(4)), flush=True)


def main(role=None, where="127.0.0.1:0"):
    if role == "prefill":
        host, _, port = where.rpartition(":")
        prefill(host.strip("[]"), int(port))
    elif role == "decode":
        decode(where)
    else:
        with subprocess.Popen([sys.executable, __file__, "prefill"], stdout=subprocess.PIPE, text=True) as child:
            decode(child.stdout.readline().split()[-1])
            print(child.stdout.read(), end="")


main(*sys.argv[1:])
