"""The same pull with NIXL's calls, which baton.nixl has; with `from nixl._api import ...` it runs over NIXL too.

    python3 two_processes_nixl.py target 7000           # on one machine
    python3 two_processes_nixl.py initiator HOST 7000   # on the other, with the same key file in $BATON_KEY_FILE
    python3 two_processes_nixl.py                       # both, here
"""
import random
import subprocess
import sys

from baton.nixl._api import nixl_agent, nixl_agent_config
from baton.nixl._utils import free_passthru, malloc_passthru, ba_buf, verify_transfer

PAGE, PAGES = 4096, 64


def pages(address):
    return [(address + PAGE * page, PAGE, 0) for page in range(PAGES)]


def target(port):
    agent = nixl_agent("target", nixl_agent_config(enable_listen_thread=True, listen_port=int(port)))
    memory = malloc_passthru(PAGE * PAGES)
    ba_buf(memory, PAGE * PAGES)
    registered = agent.register_memory([(memory, PAGE * PAGES, 0, "")], "DRAM")
    while not agent.check_remote_metadata("initiator"):
        pass
    agent.send_notif("initiator", agent.get_serialized_descs(agent.get_xfer_descs(pages(memory), "DRAM")))
    while not agent.check_remote_xfer_done("initiator", b"done"):
        pass
    print("target: the initiator has its pages", flush=True)
    agent.deregister_memory(registered)
    free_passthru(memory)


def initiator(host, port):
    agent = nixl_agent("initiator", nixl_agent_config())
    memory, expected = malloc_passthru(PAGE * PAGES), malloc_passthru(PAGE * PAGES)
    ba_buf(expected, PAGE * PAGES)
    registered = agent.register_memory([(memory, PAGE * PAGES, 0, "")], "DRAM")
    agent.send_local_metadata(host, int(port))
    agent.fetch_remote_metadata("target", host, int(port))
    while not agent.check_remote_metadata("target"):
        pass
    told = {}
    while "target" not in told:
        told = agent.get_new_notifs()
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", pages(memory), "DRAM")
    remote = agent.prep_xfer_dlist("target", agent.deserialize_descs(told["target"][0]))
    pull = agent.make_prepped_xfer("READ", local, range(PAGES), remote, range(PAGES), b"done")
    state = agent.transfer(pull)
    while state == "PROC":
        state = agent.check_xfer_state(pull)
    verify_transfer(memory, expected, PAGE * PAGES)
    print(f"initiator: {state}, {PAGES} pages are right", flush=True)
    for handle in (pull, local, remote):
        handle.release()
    agent.deregister_memory(registered)


def main(role=None, *words):
    if role:
        {"target": target, "initiator": initiator}[role](*words)
        return
    port = str(random.randrange(10_000, 32_000))  # below those that the kernel gives to others
    with subprocess.Popen([sys.executable, __file__, "target", port]):
        initiator("127.0.0.1", port)


main(*sys.argv[1:])
