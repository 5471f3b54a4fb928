"""./run serving: what is missing is said, what is wrong is refused, each server is asked in turns, and the table is of what
`vllm bench serve` reported. A stand-in for that command reports what it was asked, as vLLM 0.32 writes it.

usage: serving_test.py BATON
"""
import http.server
import itertools
import json
import pathlib
import subprocess
import sys
import tempfile
import threading
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/serving"))
import peer_server  # noqa: E402
import serving  # noqa: E402

PROGRAM = [sys.executable, ROOT / "bench/serving/serving.py", sys.argv[1]]
STAND_IN = f"""#!{sys.executable}
import json, pathlib, sys, urllib.request
given = dict(zip(sys.argv, sys.argv[1:]))
body = json.dumps({{"model": "m", "prompt": "In the beginning", "max_tokens": 2}}).encode()
said = urllib.request.urlopen(urllib.request.Request(given["--base-url"] + given["--endpoint"], body,
                                                     {{"Content-Type": "application/json"}}))
assert json.load(said)["usage"]["completion_tokens"] == 2
count, times = int(given["--num-prompts"]), ("ttft", "tpot", "e2el")
report = {{"completed": count, "failed": 0, "total_input_tokens": 20 * count, "load": given["--dataset-name"],
          **{{f"{{what}}_{{key}}_ms": 4.0 for what in ("median", "p99") for key in times}}}}
(pathlib.Path(given["--result-dir"]) / given["--result-filename"]).write_text(json.dumps(report))
"""


def run(*command):
    return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)


def wrong_options_are_refused():
    for options, words in ((["--servers", "torch,vlm"], '"vlm" is not one of baton, baton-pd, vllm'),
                           (["--arithmetic", "fp64"], "invalid choice: 'fp64'"),
                           (["--rounds", "0"], "0 is not 1 or more"),
                           (["--output-len", "1"], "--output-len must be at least 2"),
                           (["--model", "/nowhere"], "no config.json in /nowhere"),
                           (["--venv", "/nowhere"], "no `vllm bench serve`: it is not installed: ./run vllm installs it")):
        done = run(*PROGRAM, *options)
        assert done.returncode != 0 and words in done.stderr, (options, done.stderr)


def servers_are_asked_in_turns(folder):
    python = folder / "venv/vllm/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    (folder / "venv/vllm/ready").touch()
    for options, load in (((), "random"), (("--rate", 5), "prefix_repetition")):
        done = run(*PROGRAM, "--servers", "baton,baton-pd,llama.cpp", "--venv", folder / "venv", "--model", ROOT / "models/kjv-1.8m",
                   "--out", folder / "out", "--rounds", 2, "--requests", 2, "--threads", 1, "--arithmetic", "fp32", *options)
        assert done.returncode == 0, done.stdout + done.stderr
        turns = [line for line in done.stdout.splitlines() if line.startswith("round")]
        assert turns == ["round 1: baton", "round 1: baton-pd", "round 2: baton-pd", "round 2: baton"], done.stdout
        assert "without llama.cpp: it is not installed: ./run serving install" in done.stdout, done.stdout
        assert json.loads((folder / "out/baton-1.json").read_text())["load"] == load
        summary = json.loads((folder / "out/serving.json").read_text())["summary"]
        assert [(row["name"], row["prefill"], row["decode"]) for row in summary] == [("baton", 5000, 250), ("baton-pd", 5000, 250)], summary


def the_small_server_streams_a_token_at_a_time():
    handler = peer_server.handler_of(lambda prompt: itertools.count(prompt[-1] + 1), lambda text: [5, 6, len(text)])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    assert urllib.request.urlopen(url + "/health").status == 200
    for count, words in ((3, None), (2000, "a context has 1024 tokens at most")):
        try:
            body = json.dumps({"prompt": "seven.!", "max_tokens": count, "stream": True}).encode()
            said = urllib.request.urlopen(urllib.request.Request(url + "/v1/completions", body)).read().decode()
            events = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("data: {")]
            assert [event["choices"][0]["text"] for event in events[:-1]] == [" 8", " 9", " 10"], said
            assert events[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3} and said.endswith("data: [DONE]\n\n"), said
        except urllib.error.HTTPError as error:
            assert words and words in error.read().decode()
    server.shutdown()


def ratios_are_of_the_medians_of_the_rounds():
    def report(ttft, tpot):
        return {"completed": 2, "total_input_tokens": 200, "median_ttft_ms": ttft, "p99_ttft_ms": 2 * ttft, "median_tpot_ms": tpot,
                "p99_tpot_ms": 2 * tpot, "median_e2el_ms": 100.0, "p99_e2el_ms": 100.0}
    rows = serving.summary_of({"baton": [report(10, 4), report(50, 5), report(20, 20)], "vllm": [report(40, 2.5)] * 3})
    assert [(row["prefill"], row["decode"]) for row in rows] == [(5000, 200), (2500, 400)], rows
    first, second = serving.table_of(rows).splitlines()[1:]
    assert "20.00 /   40.00" in first and first.split()[-3:] == ["1.00"] * 3, first
    assert second.split()[-3:] == ["2.00", "0.50", "1.00"], second


def main():
    ratios_are_of_the_medians_of_the_rounds()
    the_small_server_streams_a_token_at_a_time()
    wrong_options_are_refused()
    with tempfile.TemporaryDirectory() as folder:
        servers_are_asked_in_turns(pathlib.Path(folder))
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
