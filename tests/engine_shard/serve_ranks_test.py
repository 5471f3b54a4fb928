#!/usr/bin/env python3
"""`baton serve --tensor-parallel-size N` as real processes: the answers of one process, and an end for
everybody when a rank dies.

usage: serve_ranks_test.py BATON MODELS
"""
# Promise(serving): A mixture served with its experts shared out to two processes gives the tokens of one | dispatch and combine
#   of every layer, whose sums have the bits of one rank
import concurrent.futures
import http.client
import json
import os
import pathlib
import signal
import socket
import tempfile
import urllib.request

from served import Server, check, serve, stop, write_model

REQUESTS = [dict(prompt="In the beginning", temperature=0), dict(prompt="And it came to pass " * 12, temperature=0.9, seed=7),
            dict(prompt=["Who art thou", "Let there be light"], n=2, temperature=1.3, seed=3),
            dict(prompt="And God said", temperature=0, echo=True, logprobs=2)]


def answers(server):
    """All at once, so that they are batched."""
    with concurrent.futures.ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda request: server.complete(model=server.model, **request), REQUESTS))


HELD = []


def free_port():
    """One that nobody gets by chance: a server that asks for it shares it with our socket, which does not listen."""
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    probe.bind(("127.0.0.1", 0))
    HELD.append(probe)
    return probe.getsockname()[1]


def same_answers(model, degrees=(("--tensor-parallel-size", 2), ("-tp", 4)), more=()):
    for arithmetic in ("fp32", "bf16"):
        alone = serve(model, "--arithmetic", arithmetic)
        expected = answers(alone)
        for i, request in enumerate(REQUESTS):
            check(alone.complete(model=model.name, **request) == expected[i], "one at a time", i, arithmetic)
        stop(alone)
        for flags in degrees:
            ranks = serve(model, "--arithmetic", arithmetic, *flags, *more)
            got = answers(ranks)
            check(got == expected, flags, arithmetic, "\n", expected, "\n", got)
            check(len(ranks.children()) == flags[1], "ranks of", flags, ranks.children())
            stop(ranks)


def same_answers_of_experts(model):
    write_model(model.parent / "experts", 2, experts=True)
    same_answers(model.parent / "experts", (("-tp", 2),))


def same_answers_of_experts_apart(model):
    same_answers(model.parent / "experts", (("-tp", 2),), ("--enable-expert-parallel",))
    gone = Server("--model", model.parent / "experts", "-tp", 4, "--enable-expert-parallel")
    check(gone.wait() != 0 and "6 experts, which 4 ranks cannot share evenly" in gone.said, gone.said)


def by_hand(model):
    """Two processes that nobody forked, as on two machines; and one that was started otherwise."""
    alone = serve(model)
    expected = answers(alone)
    stop(alone)
    place = {"BATON_RANKS": "2", "BATON_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    ranks = [serve(model, "-tp=2", environment={**place, "BATON_RANK": str(rank)}) for rank in range(2)]
    check(answers(ranks[0]) == expected, "ranks started by hand")
    stop(ranks[0])
    check(ranks[1].wait() == 0, "the other rank ends with rank 0:", ranks[1].said)

    place["BATON_RENDEZVOUS"] = f"127.0.0.1:{free_port()}"
    ranks = [serve(model, "-tp", 2, "--token-budget", 64 + rank, environment={**place, "BATON_RANK": str(rank)})
             for rank in range(2)]
    for rank in ranks:
        check(rank.wait() == 1, "other settings:", rank.said)
        check('--token-budget is "64" at rank 0 and "65" at rank 1' in rank.said, rank.said)

    place["BATON_RANK"] = "0"
    wrong = serve(model, "-tp", 4, environment=place)
    check(wrong.wait() == 1 and "started 2 ranks" in wrong.said, wrong.said)


def dead_ranks(model):
    """Whichever rank is killed, idle or in the middle of a stream: everything ends, and says why."""
    for victim in (0, 1):
        for busy in (False, True):
            server = serve(model, "-tp", 2)
            server.complete(model=model.name, prompt="In the beginning", max_tokens=1)
            children = server.children()
            if busy:
                body = json.dumps({"model": model.name, "prompt": "And", "max_tokens": 480, "ignore_eos": True,
                                   "stream": True}).encode()
                call = urllib.request.Request(server.url + "/v1/completions", body,
                                              {"Content-Type": "application/json"})
                stream = urllib.request.urlopen(call)
                check(stream.readline().startswith(b"data: "), "a stream")
            os.kill(children[victim], signal.SIGKILL)
            if busy:
                try:
                    stream.read()  # to an end of some kind: nobody waits for ever
                except (OSError, http.client.HTTPException):
                    pass
            check(server.wait() != 0, "a server without all of its ranks:", server.said)
            check(f"rank {victim} was killed by signal 9" in server.said, server.said)
            check(not any(pathlib.Path(f"/proc/{pid}").exists() for pid in children), "left behind:", children)


def refusals(model):
    for flags, what in ((("-tp", 3), "3 does not divide the model's 4 KV heads"),
                        (("-tp", 3, "--role", "decode"), "3 does not divide the model's 4 KV heads"),
                        (("-tp", 3, "--role", "prefill"), "3 does not divide the model's 4 KV heads"),
                        (("-tp", 2, "--role", "decode", "--kv-port", 65535), "--kv-port 65535"),
                        (("-tp", 0), "--tensor-parallel-size"),
                        (("-tp", "two"), "--tensor-parallel-size")):
        server = serve(model, *flags)
        check(server.wait() != 0 and what in server.said, flags, server.said)
        check(len(server.said.splitlines()) <= 2, "more than one line:", server.said)
    gone = Server("--model", model.parent / "none", "-tp", 2)
    check(gone.wait() != 0 and "there is no model directory" in gone.said, gone.said)


with tempfile.TemporaryDirectory() as folder:
    model = pathlib.Path(folder) / "random"
    write_model(model, 1)
    for test in (refusals, same_answers, same_answers_of_experts, same_answers_of_experts_apart, by_hand, dead_ranks):
        test(model)
        print(test.__name__, "ok", flush=True)
