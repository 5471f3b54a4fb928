"""Programs of others as clients of `baton serve`: program.py BATON VENVS [CLIENT...].

Each client runs against one server, then against a router with a prefill and a decode worker. What is not installed
is skipped, and said; the exit status is 1 if a client failed, 77 if all were skipped. Logs are in build/logs/clients.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import servers

baton, venvs = sys.argv[1], pathlib.Path(sys.argv[2])
logs = pathlib.Path("build/logs/clients")
logs.mkdir(parents=True, exist_ok=True)
offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
           "PYTHONDONTWRITEBYTECODE": "1", "OPENAI_API_KEY": "none"}


def environment(name):
    """Offline, but that aiperf then looks even for a folder in the hub's cache."""
    return {key: value for key, value in offline.items() if name != "aiperf" or key != "HF_HUB_OFFLINE"}


TASKS = {
    "choice": """
task: baton_choice
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{target}}"
metric_list: [{metric: acc}]
""",
    "text": """
task: baton_text
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "x"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}
DOCUMENTS = [
    {"text": "In the beginning God created the", "choices": [" heaven and the earth", " zxq vvj kkp"], "target": 0},
    {"text": "And God said, Let there be", "choices": [" qqxz", " light: and there was light"], "target": 1},
    {"text": "And it came to pass, that when the people", "choices": [" saw", "jjj xx"], "target": 0},
    {"text": "The LORD is my", "choices": [" shepherd; I shall not want", " ppq8 [["], "target": 0},
]


def with_openai(url, folder):
    return [[venvs / "clients/bin/python", "tests/clients/with_openai.py", url, servers.NAME]]


def with_lm_eval(url, folder):
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    given = f"model={servers.NAME},base_url={url}/v1/completions,tokenizer={servers.MODEL},num_concurrent=2,max_length=1000"
    return [[venvs / "clients/bin/lm_eval", "run", "--model", "local-completions", "--model_args", given, "--include_path",
             folder, "--tasks", "baton_choice,baton_text", "--batch_size", batch, "--output_path", folder / "out"]
            for batch in ("1", "4")]


def check_lm_eval(folder):
    for file in (folder / "out").rglob("results_*.json"):
        accuracy = json.loads(file.read_text())["results"]["baton_choice"]["acc,none"]
        # The model was trained on these texts: nonsense is less likely.
        return None if accuracy == 1 else f"lm-eval's accuracy is {accuracy} where it must be 1"
    return "lm-eval wrote no results"


def with_guidellm(url, folder):
    return [[venvs / "guidellm/bin/guidellm", "run", "--backend", json.dumps(
                {"kind": "openai_http", "target": url, "model": servers.NAME, "request_format": kind}),
             "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
             "--tokenizer", f"kind=huggingface_auto,model={servers.MODEL}", "--data",
             "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
             "--output", f"kind=json,path={folder / name}.json", "--disable-console"]
            for name, kind in (("completions", "/v1/completions"), ("chat", "/v1/chat/completions"))]


def check_guidellm(folder):
    for name in ("completions", "chat"):
        report = json.loads((folder / f"{name}.json").read_text())
        for benchmark in report["benchmarks"]:
            counts = benchmark["metrics"]["request_totals"]
            if counts["errored"] or counts["successful"] < 6:
                return f"guidellm's requests: {counts}"
    return None


def with_aiperf(url, folder):
    return [[venvs / "aiperf/bin/aiperf", "profile", "--model", servers.NAME, "--url", url, "--endpoint-type", kind,
             "--streaming", "--tokenizer", os.path.abspath(servers.MODEL), "--request-count", "8", "--concurrency", "2", "--isl", "64",
             "--osl", "16", "--extra-inputs", "ignore_eos:true", "--ui", "none", "--artifact-dir", folder / kind]
            for kind in ("completions", "chat")]


def check_aiperf(folder):
    for kind in ("completions", "chat"):
        report = json.loads(next((folder / kind).rglob("profile_export_aiperf.json")).read_text())
        done, failed = report["request_count"]["avg"], (report.get("error_request_count") or {"avg": 0})["avg"]
        if done != 8 or failed:
            return f"aiperf's {kind}: {done} requests were answered, {failed} failed"
    return None


def with_vllm(url, folder):
    return [[venvs / "vllm/bin/python", "bench/serving/vllm_command.py", "bench", "serve", "--backend", backend, "--base-url", url, "--endpoint", endpoint,
             "--model", servers.NAME, "--tokenizer", servers.MODEL, "--dataset-name", "random", "--random-input-len",
             "64", "--random-output-len", "16", "--num-prompts", "8", "--max-concurrency", "2", "--ignore-eos",
             "--save-result", "--result-dir", folder, "--result-filename", f"{backend}.json"]
            for backend, endpoint in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions"))]


def check_vllm(folder):
    for backend in ("openai", "openai-chat"):
        report = json.loads((folder / f"{backend}.json").read_text())
        if report["completed"] != 8:
            return f"vllm bench serve --backend {backend}: {report['completed']} of 8 requests were answered"
    return None


CLIENTS = {
    "openai": ("clients", with_openai, None),
    "lm-eval": ("clients", with_lm_eval, check_lm_eval),
    "guidellm": ("guidellm", with_guidellm, check_guidellm),
    "aiperf": ("aiperf", with_aiperf, check_aiperf),
    "vllm": ("vllm", with_vllm, check_vllm),
}


def run(name, topology, url):
    """What went wrong, or None."""
    _, commands, check = CLIENTS[name]
    with tempfile.TemporaryDirectory() as folder, open(logs / f"{name}-{topology}.log", "w") as log:
        folder = pathlib.Path(folder)
        for command in commands(url, folder):
            try:
                done = subprocess.run([str(word) for word in command], env=environment(name), stdin=subprocess.DEVNULL, stdout=log,
                                      stderr=subprocess.STDOUT, timeout=300)
            except subprocess.TimeoutExpired:
                return f"not done after 300 s; see {log.name}"
            if done.returncode != 0:
                return f"exit status {done.returncode}; see {log.name}"
        return check(folder) if check else None


wanted = sys.argv[3:] or list(CLIENTS)
if unknown := [name for name in wanted if name not in CLIENTS]:
    sys.exit(f"there is no client {', '.join(unknown)}; there are: {', '.join(CLIENTS)}")
installed = [name for name in wanted if (venvs / CLIENTS[name][0] / "ready").exists()]
for name in wanted:
    if name not in installed:
        print(f"{name:10} skipped: {venvs / CLIENTS[name][0]} is not there; "
              f"./run {'vllm' if name == 'vllm' else 'clients'} installs it")
if not installed:
    sys.exit(77)
failed = 0
for topology, serve in (("server", servers.one_server), ("router", servers.router_with_workers)):
    with open(logs / f"{topology}.log", "w") as log, serve(baton, log) as url:
        for name in installed:
            wrong = run(name, topology, url)
            failed += wrong is not None
            print(f"{name:10} {topology:8} {wrong or 'ok'}", flush=True)
sys.exit(1 if failed else 0)
