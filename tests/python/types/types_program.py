"""Not run: what mypy says of a program over the package. types_test.py compares each line with its comment: `is:` a type
that is revealed, `wrong:` an error."""
from __future__ import annotations

import asyncio

import baton
import baton.nixl
import baton.weights
from baton.nixl._api import nixlBind


def agents() -> None:
    agent = baton.Agent("decode-0", providers=["shm"], settings={"tcp.sockets": 4})
    reveal_type(agent.add_remote(b""))  # is: "str"
    reveal_type(agent.allocate(4096))  # is: mmap
    mine = agent.prepare([(0, 1, 0)])
    reveal_type(agent.messages())  # is: [str, bytes]
    reveal_type(agent.wait_messages(timeout=5))  # is: [str, bytes]
    agent.wait_remote("prefill", [mine], timeout=5)
    agent.wait_remote("prefill", timeout="5")  # wrong: incompatible type "str"
    with agent.read(mine, [3, 1], mine, [7, 8], b"request 5") as transfer:
        transfer.wait(timeout=5)
        reveal_type(transfer.telemetry().bytes)  # is: "int"
    agent.transfer(baton.WRITE, mine, [1], "theirs", [2])  # wrong: incompatible type "str"; expected "DescriptorList"
    agent.add_remote("text")  # wrong: incompatible type "str"; expected "bytes"
    agent.registr()  # wrong: "Agent" has no attribute "registr"
    baton.Agent()  # wrong: Missing positional argument "name"


async def transfers(transfer: baton.Transfer) -> None:
    reveal_type(await transfer)  # is: "None"
    reveal_type(asyncio.create_task(transfer))  # is: Task[None]


def caches(agent: baton.Agent) -> None:
    layout = baton.KvLayout(baton.KvModel("weights")).add_latent([], blocks=1, block_tokens=16, width=8, dtype="bfloat16")
    reveal_type(layout)  # is: "baton.kv.KvLayout"
    reveal_type(layout.groups[0].layers)  # is: "tuple[int, ...]"
    plan = baton.KvPlan(agent, baton.READ, layout, "prefill", layout, share=baton.KvShare(2, 1))
    reveal_type(plan.post([1], [2], tokens=(0, 40)))  # is: "baton.agent.Transfer"
    baton.KvPlan(agent, baton.READ, layout, "prefill", b"")  # wrong: incompatible type "bytes"; expected "KvLayout"
    layout.add_paged([], blocks=1, block_tokens=16, heads=1, head_size=8)  # wrong: Missing named argument "dtype"


async def connectors() -> None:
    with baton.KvConnector("decode-0", allow_pull=True) as connector:
        load = connector.load("baton1:", [1, 2], [3], key="request 1", pull=True)
        reveal_type(await load)  # is: "bytes"
        reveal_type(asyncio.create_task(load))  # is: Task[bytes]
        reveal_type(load.failed_blocks())  # is: [int]
        job = await connector.job()
        reveal_type(job.tokens)  # is: [int]
        reveal_type(connector.next_job())  # is: baton.connector.KvJob
        job.finish(payload="text")  # wrong: incompatible type "str"; expected "bytes"


async def communicators() -> None:
    with baton.Endpoint(providers=["shm"], background=True) as endpoint, \
            baton.Communicator.from_environment(endpoint=endpoint) as comm:
        reveal_type(comm)  # is: "baton.communicator.Communicator"
        reveal_type(comm.rank)  # is: "int"
        work = comm.all_reduce_async(bytearray(4), op="or")
        reveal_type(work)  # is: "baton.work.Work"
        reveal_type(work.done())  # is: "bool"
        await work
        reveal_type(asyncio.create_task(work))  # is: Task[Any]
        reveal_type(comm.split(1))  # is: "Union[baton.communicator.Communicator, None]"
        reveal_type(endpoint.handle)  # is: "bytes"
        comm.receive(bytearray(4), baton.ANY_RANK, tag=3)
        window = baton.Window(comm, size=100)
        reveal_type(window.put_async(b"", 1, add=1))  # is: "baton.work.Work"
        reveal_type(window.signal_value(1))  # is: "int"
        window.signal("1")  # wrong: incompatible type "str"; expected "int"
        comm.send(b"", to="1")  # wrong: incompatible type "str"; expected "int"
        comm.all_reduce(b"", op=5)  # wrong: incompatible type "int"; expected "str"
        baton.Communicator(0)  # wrong: Missing positional argument "ranks"
        baton.Communicator.from_handles(endpoint, ["text"], 5)  # wrong: incompatible type "str"; expected "bytes"


def drop_in() -> None:
    agent = baton.nixl.nixl_agent("alone", baton.nixl.nixl_agent_config(backends=["UCX"]))
    reveal_type(agent.get_agent_metadata())  # is: "bytes"
    reveal_type(agent.get_plugin_list())  # is: [str]
    reveal_type(nixlBind.NIXL_WRITE)  # is: nixl_xfer_op_t
    agent.add_remote_agent(3)  # wrong: incompatible type "int"
    try:
        pass
    except baton.BatonTimeoutError as why:
        reveal_type(why)  # is: "baton.errors.BatonTimeoutError"
    reveal_type(baton.weights.weights_digest)  # is: def (
