#!/usr/bin/env python3
"""Prefill and decode servers of different tensor-parallel degrees, behind a router, as real processes: the answers
of one process, with KV tiers and a store below them too; and 200 with the same text when a rank of prefill is killed while its KV is awaited.

usage: serve_degrees_test.py BATON MODELS
"""
import concurrent.futures
import http.client
import json
import os
import pathlib
import re
import signal
import tempfile
import time
import urllib.request

from served import Server, Store, check, serve, stop, write_model

BLOCKS = 64  # of each server's cache, as served.Server has it
BEGINNING = "And it came to pass in those days that there went out a decree " * 4
# Some prompts begin alike, some are longer than a step, and together they do not fit into the cache.
REQUESTS = [dict(prompt=BEGINNING + f"from the {i} kings", temperature=i % 3 * 0.6, seed=i, max_tokens=150) for i in range(10)]
REQUESTS += [dict(prompt=f"{i} In the beginning was the word, and the word was with " * 3, temperature=0) for i in range(4)]
REQUESTS += [dict(prompt="Who art thou", temperature=0.9, seed=3), dict(prompt=["Let there be light", BEGINNING], n=2, seed=8)]
SMALL_STEPS = ("--token-budget", 48, "--min-remote-tokens", 16)


def get(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read().decode()


def metric(server, name):
    """As of a moment ago: an answer may be quicker than its counters."""
    return float(re.search(rf"^baton_{name} (\S+)$", get(server.url + "/metrics"), re.M)[1])


def wait_until(true, *servers):
    """For as long as it takes: a test that hangs is ended from outside."""
    while not true():
        for server in servers:
            check(server.process.poll() is None, "a server has ended:", server.said)
        time.sleep(0.01)


def post(url, model, request):
    body = json.dumps({"model": model, "max_tokens": 24, "ignore_eos": True, **request}).encode()
    call = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call) as answer:
        return [(choice["text"], choice["finish_reason"]) for choice in json.load(answer)["choices"]]


class Asked:
    """Requests under way, each on a thread of its own."""

    def __init__(self, url, model, requests):
        pool = concurrent.futures.ThreadPoolExecutor(len(requests))
        self.asked = [pool.submit(self.ask, url, model, each) for each in requests]

    @staticmethod
    def ask(*what):
        try:
            return post(*what)
        except (OSError, http.client.HTTPException) as error:  # any status but 200, too
            return error

    def wait(self):
        return [each.result() for each in self.asked]


def answers(url, model):
    """Some alone, then all at once."""
    return [post(url, model.name, request) for request in REQUESTS[:3]] + Asked(url, model.name, REQUESTS).wait()


def pair(model, prefill_ranks, decode_ranks, *flags):
    """Prefill, decode and a router in front of them, which knows both."""
    prefill = serve(model, "--role", "prefill", "-tp", prefill_ranks, *SMALL_STEPS, *flags)
    # However slow this machine is, nobody computes again what can be loaded.
    decode = serve(model, "--role", "decode", "-tp", decode_ranks, "--load-timeout", 3600, "--load-silence", 0, *SMALL_STEPS,
                   *flags)
    router = Server("--role", "router", "--prefill", prefill.up().url, "--decode", decode.up().url)
    return prefill, decode, router.up()


def address_of(prefill):
    return json.loads(get(prefill.url + "/v1/baton/address"))["address"]


def idle(server):
    return metric(server, "kv_blocks_free") == BLOCKS and metric(server, "kv_blocks_quarantined") == 0


def same_answers(model, expected):
    for arithmetic, degrees in (("fp32", (2, 1)), ("fp32", (1, 2)), ("fp32", (2, 2)), ("bf16", (2, 1))):
        prefill, decode, router = pair(model, *degrees, "--arithmetic", arithmetic)
        check(address_of(prefill).startswith("baton-ranks1:" if degrees[0] > 1 else "baton1:"), address_of(prefill))
        got = answers(router.url, model)
        check(got == expected[arithmetic], degrees, arithmetic, "\n", expected[arithmetic], "\n", got)
        wait_until(lambda: idle(prefill) and idle(decode), prefill, decode)
        for what in ("kv_loaded_tokens_total", "prefix_cached_tokens_total", "preemptions_total"):
            check(metric(decode, what) > 0, degrees, what)
        check(metric(decode, "kv_loads_failed_total") == 0, degrees, "loads failed:", decode.said)
        check(metric(prefill, "prefill_jobs_total") > 0, degrees)
        for server in (router, decode, prefill):
            stop(server)


def tiers_change_nothing(model, expected):
    """KV in the host memory and on the disk of every rank; and found again after a restart."""
    for arithmetic in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            flags = ("-tp", 2, "--token-budget", 48, "--arithmetic", arithmetic, "--kv-host-mib", 2,
                     "--kv-disk", folder, "--kv-disk-gib", 0.05)
            for _ in range(2):
                server = serve(model, *flags).up()
                check("at each of 2 ranks: 1 MiB of host memory" in server.said, server.said)
                while True:  # until something was saved in time, and loaded
                    check(answers(server.url, model) == expected[arithmetic], arithmetic, "with tiers")
                    if metric(server, "kv_tier_tokens_total") > 0:
                        break
                stop(server)
            ranks = sorted(path.name for path in pathlib.Path(folder).iterdir())
            check(ranks == ["rank-0-of-2", "rank-1-of-2"], ranks)


def a_store_serves_two_servers(model, expected):
    """Two ranks keep their KV in another process, and others find it there."""
    store = Store().up()
    flags = ("-tp", 2, "--token-budget", 48, "--kv-store", store.url)
    first = serve(model, *flags).up()
    check(answers(first.url, model) == expected, "the first server with a store")
    wait_until(lambda: metric(first, "kv_tier_blocks_saved_total") > 0, first, store)
    stop(first)
    second = serve(model, *flags).up()
    while True:  # until one was saved in time
        check(answers(second.url, model) == expected, "from a store")
        if metric(second, "kv_tier_tokens_total") > 0:
            break
    check(metric(second, r'kv_tier_blocks_loaded_total\{tier="peer"\}') > 0, get(second.url + "/metrics"))
    for server in (second, store):
        stop(server)


def ask_of(prefill, decode, model, requests):
    """The requests at decode, while prefill does not answer; returns when KV is awaited."""
    asked = Asked(decode.url, model.name,
                  [{**each, "kv_transfer_params": {"prefill": prefill.address}} for each in requests])
    # A machine that is slow enough takes a stopped process for a dead one.
    wait_until(lambda: metric(decode, "requests_loading") > 0 or metric(decode, "kv_loads_failed_total") > 0, decode)
    return asked


def dead_prefill_ranks(model, expected):
    """Decode waits for KV that one rank of prefill does not send; then that rank is killed."""
    for victim, decode_ranks in ((1, 1), (0, 1), (1, 2)):
        prefill, decode, router = pair(model, 2, decode_ranks)
        prefill.address = address_of(prefill)
        ranks = prefill.children()
        request = {**REQUESTS[0], "kv_transfer_params": {"prefill": prefill.address}}
        check(post(decode.url, model.name, request) == expected[0], "before")
        wait_until(lambda: metric(decode, "kv_loaded_tokens_total") > 0, decode)
        os.kill(ranks[victim], signal.SIGSTOP)
        asked = ask_of(prefill, decode, model, REQUESTS[10:14])  # none of which is cached
        os.kill(ranks[victim], signal.SIGKILL)
        check(asked.wait() == expected[10:14], "rank", victim, "is killed:", asked.wait(), expected[10:14])
        wait_until(lambda: metric(decode, "kv_loads_failed_total") > 0, decode)
        check(prefill.wait() != 0 and f"rank {victim} was killed by signal 9" in prefill.said, prefill.said)
        check(Asked(router.url, model.name, REQUESTS).wait() == expected, "without a prefill server")
        wait_until(lambda: idle(decode), decode)
        for server in (router, decode):
            stop(server)


def dead_decode_rank(model, expected):
    """A rank of decode is killed while it waits for KV: prefill keeps nothing of it, and serves the next one."""
    for prefill_ranks in (1, 2):
        prefill, decode, router = pair(model, prefill_ranks, 2)
        prefill.address = address_of(prefill)
        stop(router)
        first = (prefill.children() or [prefill.process.pid])[0]
        os.kill(first, signal.SIGSTOP)
        asked = ask_of(prefill, decode, model, REQUESTS[:1])
        os.kill(decode.children()[1], signal.SIGKILL)
        asked.wait()  # to an end of some kind
        check(decode.wait() != 0 and "rank 1 was killed by signal 9" in decode.said, decode.said)
        os.kill(first, signal.SIGCONT)
        wait_until(lambda: idle(prefill), prefill)
        again = serve(model, "--role", "decode", *SMALL_STEPS).up()
        request = {**REQUESTS[0], "kv_transfer_params": {"prefill": prefill.address}}
        check(post(again.url, model.name, request) == expected[0], "the next decode server")
        wait_until(lambda: metric(again, "kv_loaded_tokens_total") > 0, again)
        for server in (again, prefill):
            stop(server)


with tempfile.TemporaryDirectory() as folder:
    model = pathlib.Path(folder) / "random"
    write_model(model, 1)
    expected = {}
    for arithmetic in ("fp32", "bf16"):
        alone = serve(model, "--arithmetic", arithmetic).up()
        expected[arithmetic] = answers(alone.url, model)
        stop(alone)
    one = expected["fp32"]
    for test, known in ((same_answers, expected), (tiers_change_nothing, expected), (a_store_serves_two_servers, one),
                        (dead_prefill_ranks, one[3:]), (dead_decode_rank, one[3:])):  # of REQUESTS
        test(model, known)
        print(test.__name__, "ok", flush=True)
