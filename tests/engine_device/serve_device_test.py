#!/usr/bin/env python3
"""`baton serve --device cuda` as real processes, over the fake of the CUDA driver: the answers of the CPU's server,
alone, in a batch, and with the prompt computed on one and continued on the other. And what is refused.

usage: serve_device_test.py BATON MODELS FOLDER, where FOLDER has the fake's libcuda.so.1
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "engine_shard"))
from served import BATON, Server, check, serve, stop, write_model  # noqa: E402

# A real cuBLASLt wants more of the driver than the fake has.
CUDA = {"LD_LIBRARY_PATH": sys.argv[3], "BATON_CUBLASLT": "none"}
REQUESTS = [dict(prompt="In the beginning", temperature=0), dict(prompt="And it came to pass " * 3, temperature=0.9, seed=7),
            dict(prompt=["Who art thou", "Let there be light"], temperature=1.3, seed=3),
            dict(prompt="And God said", temperature=0, echo=True, logprobs=2)]
SHAPE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
             head_dim=16, vocab_size=1024, max_position_embeddings=256)


def answers(server):
    """All at once, so that they are batched."""
    out = [None] * len(REQUESTS)

    def ask(i):
        out[i] = server.complete(model=server.model, **{"max_tokens": 8, **REQUESTS[i]})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(REQUESTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return out


def same_answers(model, arithmetic, says):
    alone = serve(model, "--arithmetic", arithmetic)
    expected = answers(alone)
    stop(alone)
    device = serve(model, "--device", "cuda:1", "--arithmetic", arithmetic, environment=CUDA)
    check(device.complete(model=model.name, **{"max_tokens": 8, **REQUESTS[1]}) == expected[1], "one alone")
    got = answers(device)
    check(got == expected, "a batch", "\n", expected, "\n", got)
    check("device: CUDA device 1: Fake GPU" + says + "\n" in device.said, device.said)
    stop(device)
    return expected


def metric(server, name):
    with urllib.request.urlopen(server.url + "/metrics") as page:
        return float(re.search(rf"^baton_{name} (\S+)$", page.read().decode(), re.MULTILINE)[1])


class Small(Server):
    """Three prompts of those below, and what is computed of them."""
    COMMAND = ("serve", "--port", "0", "--blocks", "20")


def with_tiers(model):
    """What the small cache has forgotten comes back from host memory, and changes nothing."""
    prompts = [[(7 * i + 11 * number) % 256 + 1 for i in range(96)] for number in range(4)]
    alone, tiers = (Small("--model", model), Small("--model", model, "--device", "cuda", "--kv-host-mib", 8,
                                                   "--kv-load", "always", environment=CUDA))
    for number, prompt in enumerate(prompts + prompts):
        both = [server.complete(model=model.name, prompt=prompt, max_tokens=4, temperature=0) for server in (alone, tiers)]
        check(both[0] == both[1], number, both)
        while metric(tiers, "kv_tier_blocks_saved_total") < 6 * min(number + 1, len(prompts)):
            check(tiers.process.poll() is None, tiers.said)
    check(metric(tiers, "kv_tier_tokens_total") >= 96 - 16, "nothing was loaded")
    stop(alone)
    stop(tiers)


def pairs(model, expected):
    for prefill_on, decode_on in (("cuda", "cpu"), ("cpu", "cuda")):
        prefill = serve(model, "--role", "prefill", "--device", prefill_on, environment=CUDA)
        decode = serve(model, "--role", "decode", "--min-remote-tokens", 8, "--device", decode_on, environment=CUDA)
        for server in (prefill, decode):
            server.ready.wait()
            check(server.url, server.said)
        router = Server("--role", "router", "--prefill", prefill.url, "--decode", decode.url)
        router.model = model.name
        got = answers(router)
        check(got == expected, prefill_on, "to", decode_on, "\n", expected, "\n", got)
        with urllib.request.urlopen(decode.url + "/metrics") as page:
            loaded = re.search(r"^baton_kv_loaded_tokens_total\S* (\d+)", page.read().decode(), re.MULTILINE)
        check(loaded and int(loaded[1]) > 0, "no KV was loaded from", prefill_on)
        for server in (router, decode, prefill):
            stop(server)


def refused(model):
    def says(words, *flags, environment=None):
        made = subprocess.run([BATON, "serve", "--port", "0", "--model", model, *flags], text=True, timeout=60,
                              capture_output=True, env={**os.environ, **(environment or {})})
        check(made.returncode != 0 and words in made.stderr and made.stderr.count("\n") == 1, flags, made.stderr)

    says("libcuda.so.1", "--device", "cuda", environment={"LD_LIBRARY_PATH": ""})
    says("is no device", "--device", "gpu")
    says("CUDA device 7", "--device", "cuda:7", environment=CUDA)
    says("tensor-parallel", "--device", "cuda", "-tp", "2")
    says("--kv-agent", "--device", "cuda", "--role", "prefill", "--kv-agent", "prefill-0")
    says("--arithmetic int8", "--device", "cuda", "--arithmetic", "int8")


def main():
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder) / "tiny"
        write_model(model, 5, shape=SHAPE)
        refused(model)
        kernels = subprocess.run([BATON, "generate", "--model", model, "--device", "cuda", "--max-tokens", "1", "--quiet"],
                                 text=True, capture_output=True, env={**os.environ, **CUDA})
        if "nvcc" in kernels.stderr:
            print("skipped: this build has no kernels, since nvcc was not found")
            sys.exit(77)
        same_answers(model, "bf16", "; our own kernel multiplies: BATON_CUBLASLT is none")
        expected = same_answers(model, "fp32", "")
        with_tiers(model)
        pairs(model, expected)
        print(f"{sum(len(answer) for answer in expected)} answers, four times the same")


main()
