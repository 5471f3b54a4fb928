#!/usr/bin/env python3
"""`baton serve --device cuda` as real processes, over the fake of the CUDA driver: the answers of the CPU's server,
alone, in a batch, and with the prompt computed on one and continued on the other. What is refused; and what becomes of
requests when a device is lost.

usage: serve_device_test.py BATON MODELS FOLDER, where FOLDER has the fake's libcuda.so.1
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

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
    with ThreadPoolExecutor(len(REQUESTS)) as pool:
        return list(pool.map(lambda one: server.complete(model=server.model, **{"max_tokens": 8, **one}), REQUESTS))


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


def pairs(model, expected):
    for prefill_on, decode_on in (("cuda", "cpu"), ("cpu", "cuda")):
        prefill = serve(model, "--role", "prefill", "--device", prefill_on, environment=CUDA)
        # However slow this machine is, nobody computes again what can be loaded.
        decode = serve(model, "--role", "decode", "--min-remote-tokens", 8, "--load-timeout", 3600, "--load-silence", 0,
                       "--device", decode_on, environment=CUDA)
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
    for wrong in ("gpu", "cuda:", "cuda: 1", "cuda:1 ", "cuda:1\n", "cuda:01", "cuda:+1", "cuda:-0", "CUDA"):
        says("is not a device: write cpu", "--device", wrong)
    says("CUDA device 7", "--device", "cuda:7", environment=CUDA)
    says("tensor-parallel", "--device", "cuda", "-tp", "2")


def page(url):
    """The status and what it says."""
    try:
        with urllib.request.urlopen(url) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def tell_device(pipe, words):
    """What the fake's library is to do; it has done that when this returns."""
    pipe.write_text(words + "\n")
    while pipe.exists():
        time.sleep(0.005)


def is_not_well(url):
    """An engine tells its requests that it has stopped before it tells others."""
    while (said := page(url))[0] == 200:
        time.sleep(0.005)
    check(said[0] == 503 and "the engine has stopped: " in said[1] and "lost to this process" in said[1], url, said)


LONG = [dict(prompt=f"And it came to pass in the {i}th day", max_tokens=40, temperature=0.7, seed=i) for i in range(32)]


def ask_all(server, begun=lambda: None):
    """LONG at once. The answers; what failed is an answer that no other is."""
    def ask(request):
        try:
            return server.complete(model=server.model, **request)[0]["text"]
        except urllib.error.HTTPError as error:
            return f"{error.code} {error.read().decode()}"

    with ThreadPoolExecutor(len(LONG)) as pool:
        answers = pool.map(ask, LONG)
        begun()
        return list(answers)


def running(server):
    return int(re.search(r"^baton_requests_running\S* (\d+)", page(server.url + "/metrics")[1], re.MULTILINE)[1])


def lost_decode(model, folder, words, expected):
    """A device is lost under half of what a router has been asked: all of it is answered, and so is what comes later."""
    pipe = folder / "control"
    os.mkfifo(pipe)
    lost = serve(model, "--device", "cuda", environment={**CUDA, "FAKE_CUDA_CONTROL": str(pipe)})
    good = serve(model)
    for server in (lost, good):
        server.ready.wait()
        check(server.url, server.said)
    router = Server("--role", "router", "--decode", lost.url, good.url)
    router.model = model.name

    def lose():
        while running(lost) == 0:
            time.sleep(0.005)
        tell_device(pipe, words)

    for when, got in (("when it is lost", ask_all(router, lose)), ("later", ask_all(router))):
        wrong = [answer for answer, wanted in zip(got, expected) if answer != wanted]
        check(not wrong, words, when, len(wrong), "of", len(got), "are wrong:", wrong[0] if wrong else "")
    is_not_well(lost.url + "/health")
    for _ in range(3):
        try:
            lost.complete(model=model.name, **LONG[0])
            check(False, "a server whose device is lost answers")
        except urllib.error.HTTPError as error:
            said = error.read().decode()
            check(error.code == 503 and '"code":"engine_stopped"' in said.replace(" ", ""), error.code, said)
    check(lost.process.poll() is None, "it has ended", lost.said)
    for server in (router, good, lost):
        stop(server)


def lost_prefill(model, folder):
    """Prompts go on where they are asked when prefill's device is lost; it says so once it has been asked for one."""
    def ask(server, number):
        prompt = [(7 * i + 13 * number) % 250 + 1 for i in range(100)]  # too long for decode to compute by itself
        return server.complete(model=model.name, prompt=prompt, max_tokens=8, temperature=0)[0]["text"]

    pipe = folder / "control"
    os.mkfifo(pipe)
    prefill = serve(model, "--role", "prefill", "--device", "cuda", environment={**CUDA, "FAKE_CUDA_CONTROL": str(pipe)})
    decode = serve(model, "--role", "decode", "--min-remote-tokens", 8)
    alone = serve(model)
    for server in (prefill, decode, alone):
        server.ready.wait()
        check(server.url, server.said)
    router = Server("--role", "router", "--prefill", prefill.url, "--decode", decode.url)
    router.model = model.name
    check(ask(router, 0) == ask(alone, 0), "before")
    tell_device(pipe, "lose")
    for number in range(1, 6):
        check(ask(router, number) == ask(alone, number), "prompt", number)
    is_not_well(prefill.url + "/health")
    for server in (router, decode, alone, prefill):
        stop(server)


def lost(model, folder):
    lost_prefill(model, folder)
    alone = serve(model)
    expected = ask_all(alone)
    stop(alone)
    lost_decode(model, folder, "lose", expected)
    lost_decode(model, folder, "fail cuLaunchKernel 719", expected)  # once; such an error is for good


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
        same_answers(model, "bf16", "; Baton's own kernel multiplies: BATON_CUBLASLT=none switches it off")
        expected = same_answers(model, "fp32", "")
        pairs(model, expected)
        lost(model, pathlib.Path(folder))
        print(f"{sum(len(answer) for answer in expected)} answers, four times the same")


main()
