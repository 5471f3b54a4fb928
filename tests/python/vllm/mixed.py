"""Pairs of vLLM (with baton.vllm) and `baton serve`: either is prefill, either decode, behind one proxy, and behind
`baton serve --role router`; then two vLLM behind that router, with their own NixlConnector and with ours. They round
differently, so that answers are compared where the two alone write the same; how many those are is said, and half have
to be. A hand-off that was refused would give the right text as well: each has to have come.

usage: mixed.py [--requests N] [--dtype float32,bfloat16] [--two nixl,baton] [--seed N] [--model FOLDER] [--logs FOLDER]
"""
import argparse
import os
import pathlib
import random
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from pairs import LEASE, ROOT, Pair  # noqa: E402
from proxy import Proxy, post  # noqa: E402
from servers import Server  # noqa: E402

# The library that pairing_peer loads, for a Python that was started without it.
if "LD_LIBRARY_PATH" not in os.environ or str(ROOT / "build/release/capi") not in os.environ["LD_LIBRARY_PATH"]:
    os.environ["LD_LIBRARY_PATH"] = str(ROOT / "build/release/capi")
    os.environ["PYTHONPATH"] = f"{ROOT}/python:{HERE}"
    os.execv(sys.executable, [sys.executable, *sys.argv])
import pairing_peer  # noqa: E402

PORT = 18900
HOW = ("in turn", "together", "router")
BINARY = str(ROOT / "build/release/baton")


def questions(seed, count):
    """Prompts of 40 to 900 tokens: of less, of just, and of more than a block of vLLM's."""
    dice = random.Random(seed)
    return [{"model": "m", "prompt": [dice.randrange(260, 1000) for _ in range(dice.choice((40, 128, 129, 300, 900)))],
             "max_tokens": 8, "ignore_eos": True, "temperature": 0, "return_token_ids": True} for _ in range(count)]


def ask(url, question):
    """(tokens or what was answered instead, its usage)"""
    status, answer = post(url, question)
    if status != 200:
        return (status, answer), {}
    return answer["choices"][0]["token_ids"], (answer.get("usage") or {}).get("prompt_tokens_details") or {}


class Vllm(Server):
    def __init__(self, name, port, dtype, arguments):
        self.DTYPE = dtype
        connector, environment = Pair._baton(name, port + 50, None, "baton.vllm")
        super().__init__(f"mixed-{name}", arguments.model, port, arguments.logs, connector, environment)
        self.log.unlink(missing_ok=True)  # what an earlier run loaded does not count
        # What one question leaves behind must not answer the next.
        self.command.append("--no-enable-prefix-caching")
        self.agent, self.address, self.counted = name, f"127.0.0.1:{port + 50}", 0

    def lost(self, asked, details):
        """How many hand-offs to it did not come, since it was asked last."""
        time.sleep(2.5)  # so that its log has the last of them
        loads, before = self.rate()[0], self.counted
        self.counted = loads
        return len(asked) - (loads - before)


class Baton(pairing_peer.Server):
    def __init__(self, name, arguments):
        super().__init__(BINARY, name, "--kv-lease", str(LEASE), model=arguments.model)
        self.agent = name

    def lost(self, asked, details):
        for one in details:
            if one.get("kv_load_error"):
                print("  not loaded:", one["kv_load_error"])
        return sum(one.get("kv_loaded_tokens") != (len(question["prompt"]) - 1) // 16 * 16
                   for question, one in zip(asked, details))


def pair(what, prefill, decode, asked, alone):
    """How many answers are wrong, or were computed at decode after all."""
    wrong, proxy = 0, Proxy(prefill.url, decode.url, "", prefill.address)
    router = router_before(prefill, decode)
    for how in HOW:
        proxy.agent = prefill.agent if how == "together" else ""
        answers = [ask(router.url if how == "router" else proxy.url, question) for question in asked[how]]
        lost = decode.lost(asked[how], [details for _, details in answers])
        compared = [(got, right, question) for (got, _), right, question in zip(answers, alone[how], asked[how]) if right]
        for got, right, question in compared:
            if got != right:
                print(f"  {what}, {how}: {len(question['prompt'])} tokens: {got}, not {right}")
        differ = sum(got != right for got, right, _ in compared)
        print(f"{what}, {how}: {len(compared) - differ} of {len(compared)} answers equal; {lost} of {len(answers)} "
              "computed at decode", flush=True)
        wrong += differ + abs(lost)
    proxy.close()
    return wrong + left_behind(router, len(asked["router"]))


def router_before(prefill, decode):
    """Prefill takes as long as it takes: this machine may be busy."""
    return pairing_peer.Router(BINARY, [prefill.url], [decode.url])


def left_behind(router, asked):
    """How many of the prompts that it was asked it did not drive through a pair. Ends it."""
    handed, not_handed = router.metric("handed_over_total"), router.metric("not_handed_over_total")
    router.close()
    if (handed, not_handed) != (asked, 0):
        print(f"  the router drove {handed} of {asked} prompts through the pair, and {not_handed} in vain")
    return asked - handed + not_handed


def two(over, arguments):
    """Two vLLM behind the router, with a connector that the router knows nothing of, or with ours."""
    asked = questions(arguments.seed + 11, arguments.requests)
    with Pair(f"router-{over}", over, PORT + 200, arguments) as servers:
        alone = [ask(servers.prefill.url, question)[0] for question in asked]  # decode is to have none of it
        time.sleep(2.5)
        before = servers.decode.rate()[0]
        router = router_before(servers.prefill, servers.decode)
        answers = [ask(router.url, question)[0] for question in asked]
        wrong = left_behind(router, len(asked))
        time.sleep(2.5)  # so that decode's log has the last of them
        loads = servers.decode.rate()[0] - before
        differ = sum(got != right for got, right in zip(answers, alone))
        print(f"two vLLM over {over}, router: {len(asked) - differ} of {len(asked)} answers equal; {loads} loads", flush=True)
        held = servers.leaks()
        print(f"blocks are left in use at {held or 'none'}", flush=True)
        return wrong + differ + abs(len(asked) - loads) + len(held)


def mixed(dtype, arguments):
    asked = {how: questions(arguments.seed + i, arguments.requests) for i, how in enumerate(HOW)}
    servers = []
    try:
        ours = [Baton(f"baton-{dtype}-{end}", arguments) for end in ("prefill", "decode")]
        servers += ours
        theirs = Vllm(f"vllm-{dtype}", PORT, dtype, arguments).start()
        servers.append(theirs)
        theirs.ready()
        alone, same = {}, 0
        for how in HOW:
            both = [(ask(ours[0].url, one)[0], ask(theirs.url, one)[0]) for one in asked[how]]
            alone[how] = [a if a == b else None for a, b in both]
            same += sum(right is not None for right in alone[how])
        print(f"vLLM in {dtype} and Baton, each alone: {same} of {len(HOW) * arguments.requests} answers the same", flush=True)
        wrong = 2 * same < len(HOW) * arguments.requests
        wrong += pair(f"prefill Baton, decode vLLM in {dtype}", ours[0], theirs, asked, alone)
        wrong += pair(f"prefill vLLM in {dtype}, decode Baton", theirs, ours[1], asked, alone)
        held = [server.name for server in (theirs,) if server.held(LEASE + 30)]
        held += [server.agent for server in ours if server.free_blocks() != 128]
        print(f"blocks are left in use at {held or 'none'}", flush=True)
        return wrong + len(held)
    finally:
        for server in servers:
            server.close()


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=20)
    options.add_argument("--dtype", default="float32,bfloat16")
    options.add_argument("--two", default="nixl,baton", help="also these pairs of vLLM alone; '' for none")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--model", default=str(ROOT / "models/kjv-1.8m"))
    options.add_argument("--logs", default=str(ROOT / "build/logs/vllm"))
    arguments = options.parse_args()
    os.makedirs(arguments.logs, exist_ok=True)
    wrong = sum(mixed(dtype, arguments) for dtype in arguments.dtype.split(",") if dtype)
    wrong += sum(two(over, arguments) for over in arguments.two.split(",") if over)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
