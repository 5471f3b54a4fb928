"""./run baselines: what is missing is said, what is wrong is refused, the small server around other engines speaks what serve_bench
asks, and the ratios are what the numbers say.

usage: baselines_test.py BATON
"""
import http.server
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/serving"))
import baselines  # noqa: E402
import peer_server  # noqa: E402

BATON = sys.argv[1]
PROGRAM = [sys.executable, ROOT / "bench/serving/baselines.py", BATON]


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)


def wrong_options_are_refused():
    for options, words in ((["--baseline", "torch,vlm"], '"vlm" is not one of torch, vllm, llama.cpp'),
                           (["--arithmetic", "fp32,fp64"], '"fp64" is not one of auto, fp32, bf16'),
                           (["--arithmetic", ""], "name one of auto"),
                           (["--rounds", "0"], "--rounds must be at least 1"),
                           (["--output-len", "1"], "--output-len must be at least 2"),
                           (["--baseline", "", "--model", "/nowhere"], "no config.json in /nowhere")):
        done = run(*PROGRAM, *options)
        assert done.returncode != 0 and words in done.stderr, (options, done.stderr)


def what_is_missing_is_said_and_baton_measured(folder):
    model = folder / "model"
    done = run(sys.executable, ROOT / "tests/models/random_llama.py", model, "--hidden", 64, "--layers", 2, "--heads", 4,
               "--kv-heads", 2, "--intermediate", 96)
    assert done.returncode == 0, done.stderr
    done = run(*PROGRAM, "--venv", folder / "none", "--model", model, "--out", folder / "out", "--rounds", 1, "--requests", 2,
               "--input-len", 20, "--output-len", 4, "--threads", 1, "--arithmetic", "auto,fp32,bf16")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("without torch: transformers is not installed", "without vllm: it is not installed: ./run vllm",
                  "without llama.cpp: it is not installed: ./run baselines install", "baton bf16: bf16, by ",
                  "round 1: baton bf16", "round 1: baton fp32", ", since the processor "):
        assert words in done.stdout, done.stdout
    said = json.loads((folder / "out/baselines.json").read_text())
    assert {"bf16", "fp32"} <= set(said["rounds"][name][0][0] > 0 and name.removeprefix("baton ") for name in said["rounds"]), said
    assert said["computed"]["bf16"].startswith("bf16, by ") and said["computed"]["fp32"] == "fp32", said


class Counting:
    """An engine whose tokens are those behind the prompt's last."""

    def tokens(self, prompt):
        token = prompt[-1]
        while True:
            token += 1
            yield token


def the_small_server_speaks_what_serve_bench_asks(folder):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), peer_server.handler_of(Counting(), lambda text: [5, 6, 7]))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    report = folder / "report.json"
    command = [BATON, "serve_bench", "--url", url, "--dataset-name", "random", "--input-len", 30, "--output-len", 9,
               "--num-prompts", 3, "--max-concurrency", 1, "--temperature", 0, "--json", report, "--save-detailed"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    said = json.loads(report.read_text())
    assert said["input_lens"] == [30] * 3 and said["output_lens"] == [9] * 3, said
    assert [len(gaps) for gaps in said["itls"]] == [8] * 3, said  # a token is an event
    command[7] = 2000
    assert "a context has 1024 tokens at most" in run(*command).stderr
    server.shutdown()


def ratios_are_of_the_same_round():
    speeds = baselines.speeds_of({"input_lens": [100, 100, 100], "output_lens": [11, 11, 11], "ttfts": [0.5, 1, 2],
                                  "e2els": [1.5, 3, 7]})
    assert speeds == [100, 5], speeds
    rounds = {"baton bf16": [(200, 40), (100, 20), (300, 66)], "baton fp32": [(100, 80), (50, 40), (150, 132)],
              "vllm": [(100, 40), (100, 10), (100, 22)], "llama.cpp": [(100, 10), (100, 10), (100, 30)]}
    rows = {name: values for name, *values in baselines.summary_of(rounds)}
    assert rows["baton bf16"] == [200, 40, {"bf16": [1, 1], "fp32": [0.5, 2]}], rows
    assert rows["vllm"] == [100, 22, {"bf16": [2, 2], "fp32": [1, 4]}], rows
    assert rows["llama.cpp"] == [100, 10, {"bf16": [2, 2.2], "fp32": [1, 4.4]}], rows
    text = baselines.table_of(baselines.summary_of(rounds))
    for words in ("bf16, prefill: 2.00 times the best of vllm, llama.cpp; goal 1.5: reached",
                  "bf16, decode: 2.20 times the best of llama.cpp; goal 2: reached",
                  "fp32, prefill: 1.00 times the best of vllm, llama.cpp; goal 1.5: missed"):
        assert words in text, text
    rounds["vllm"] = [(150, 1)] * 3
    assert "bf16, prefill: 1.33 times the best of vllm, llama.cpp; goal 1.5: missed" in baselines.table_of(baselines.summary_of(rounds))


def who_sends_a_whole_answer_at_once_has_no_row():
    def report(gaps):
        """Two answers of 9 tokens, the first behind 340 ms."""
        return {"output_lens": [9] * 2, "itls": [gaps] * 2, "e2els": [0.34 + sum(gaps)] * 2}
    once, pieces, pairs, each = [3e-6] * 8, [3e-6, 3e-6, 0.02, 3e-6] * 2, [0.02, 3e-6] * 4, [0.009, 0.011] * 4
    for gaps, part in ((once, 1 / 9), (pieces, 3 / 9), (pairs, 5 / 9), (each, 1)):
        assert abs(baselines.part_apart(report(gaps)) - part) < 1e-9, (gaps, baselines.part_apart(report(gaps)))
    # Behind a long prompt tokens may be quick; of a tiny model they are quicker than a packet.
    assert baselines.part_apart({"output_lens": [3], "itls": [[0.002] * 2], "e2els": [60.004]}) == 1
    assert baselines.part_apart({"output_lens": [3], "itls": [[5e-5] * 2], "e2els": [1e-3]}) == 1
    refused = baselines.refused_of({"baton bf16": [1, 1], "vllm": [5 / 9, 1], "llama.cpp": [1, 1 / 9]}, 9)
    assert list(refused) == ["llama.cpp"], refused
    rounds = {"baton bf16": [(200, 40)] * 2, "vllm": [(100, 20)] * 2}
    text = baselines.table_of(baselines.summary_of(rounds), refused)
    words = "no row for llama.cpp: its tokens arrive at once (1 of 9 by themselves; at least 4.5 must)"
    assert words in text and "the best of llama.cpp" not in text and "bf16, prefill: 2.00 times the best of vllm;" in text, text
    assert baselines.table_of([], {"baton bf16": "why"}).endswith("why")


def the_arithmetic_that_fits_is_picked():
    for flags, arithmetic, why in (("avx512f amx_bf16 avx512_bf16", "bf16", "amx_bf16"), ("avx2 avx512_bf16", "bf16", "avx512_bf16"),
                                   ("avx2 fma", "fp32", "does not multiply bf16")):
        picked, said = baselines.fitting_arithmetic(f"processor : 0\nflags\t\t: {flags}\nbugs : none\n")
        assert picked == arithmetic and why in said, (flags, picked, said)
    assert baselines.fitting_arithmetic("Features : asimd\n")[0] == "fp32"


def main():
    ratios_are_of_the_same_round()
    who_sends_a_whole_answer_at_once_has_no_row()
    the_arithmetic_that_fits_is_picked()
    wrong_options_are_refused()
    with tempfile.TemporaryDirectory() as folder:
        the_small_server_speaks_what_serve_bench_asks(pathlib.Path(folder))
        what_is_missing_is_said_and_baton_measured(pathlib.Path(folder))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
