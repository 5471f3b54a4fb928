"""Others' suites over Baton in the place of Gloo (in_place_of_gloo/), unchanged.

    foreign.py torchft [OPTIONS OF pytest]     torchft's tests of its process groups: those that pass over Gloo, and why some are skipped
    foreign.py vllm                            two ranks of vLLM's give the tokens that one gives, and that two give over Gloo
"""
import collections
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent


def environment(over):
    return {**os.environ, "OVER": over, "PYTHONPATH": f"{HERE / 'in_place_of_gloo'}:{os.environ.get('PYTHONPATH', '')}"}


def torchft(*options):
    """Its file of process groups, which makes Gloo's by name, in threads and in processes of their own: what passes over Gloo
    here passes over Baton. For both, the processes come from one that has imported torch, and 10 s for that are 300."""
    import torchft

    suite = pathlib.Path(torchft.__file__).parent / "process_group_test.py"
    passed = {}
    for over in ("gloo", "baton"):
        ran = subprocess.run([sys.executable, __file__, "pytest", "-p", "no:cacheprovider", "--timeout=300", "-v", "-rs", str(suite), *options],
                             env={**environment(over), "PYTHONHASHSEED": "0"},  # on which the names of some tests depend
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1500)
        told = dict(re.findall(r"^\S+?::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", ran.stdout, re.MULTILINE))
        passed[over] = {name for name, how in told.items() if how == "PASSED"}
        print(f"torchft over {over}: {dict(collections.Counter(told.values()))}", flush=True)
    for line in re.findall(r"^SKIPPED \[\d+\] .*", ran.stdout, re.MULTILINE):
        print(re.sub(r"^(SKIPPED \[\d+\]) \S*/", r"\1 ", line))
    missing = sorted(passed["gloo"] - passed["baton"])
    if missing or not passed["gloo"]:
        sys.exit(f"{ran.stdout[-20000:]}\nFAILED  torchft, over Gloo alone: {missing}")
    print(f"ok      torchft: {len(passed['baton'])} passed, all {len(passed['gloo'])} that pass over Gloo here")


def pytest(*options):
    import multiprocessing

    import pytest as runner
    from torchft import process_group

    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["torchft.process_group"])
    process_group.mp.get_context = lambda _: server
    configure = process_group.ProcessGroupBaby.configure

    def patient(self, *arguments, **named):
        given, self._timeout = self._timeout, self._timeout if self._timeout < 10 else 300
        try:
            configure(self, *arguments, **named)
        finally:
            self._timeout = given

    process_group.ProcessGroupBaby.configure = patient
    sys.exit(runner.main(list(options)))


PROMPTS = [list(range(first, first + length)) for first, length in ((300, 5), (400, 40), (500, 130), (900, 17))]


def generate(model, ranks):
    """Prints the tokens, and what the ranks' group is."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, tensor_parallel_size=int(ranks), dtype="float32", enforce_eager=True, max_model_len=256)
    how = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    tokens = [list(out.outputs[0].token_ids) for out in llm.generate([{"prompt_token_ids": one} for one in PROMPTS], how)]
    print("said " + json.dumps([tokens, llm.collective_rpc(group_of)]))


def group_of(worker):
    import torch.distributed as dist
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return [dist.get_backend(group.device_group), group.device_group._get_sequence_number_for_group(),
            type(getattr(group.device_communicator, "dist_module", None)).__name__]  # one rank has no communicator


def vllm():
    with tempfile.TemporaryDirectory() as model:
        # Its random model of the smallest numbers of heads that two ranks can share.
        subprocess.run([sys.executable, HERE.parent / "python/vllm/hybrid_model.py", HERE.parents[1] / "models/kjv-1.8m", model],
                       check=True)
        compare(model)


def compare(model):
    # What two ranks compile when the first request comes, with enforce_eager as well, takes longer than all of this.
    calm = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn", "VLLM_ENGINE_READY_TIMEOUT_S": "600"}
    said = {}
    for name, over, ranks in (("two over Gloo", "gloo", "2"), ("two over Baton", "baton", "2"), ("one rank", "baton", "1")):
        ran = subprocess.run([sys.executable, __file__, "generate", model, ranks], env={**environment(over), **calm},
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
        found = re.search(r"^said (.*)$", ran.stdout, re.MULTILINE)
        if not found:
            sys.exit(f"{ran.stdout[-8000:]}\nFAILED  vLLM, {name}")
        said[name] = json.loads(found.group(1))
        print(f"{name}: {said[name][1]}", flush=True)
    for over in ("Gloo", "Baton"):
        tokens, groups = said[f"two over {over}"]
        assert all(kind == over.lower() and calls > 10 and module == "module" for kind, calls, module in groups), groups
    assert tokens == said["one rank"][0] == said["two over Gloo"][0], said
    print(f"ok      vLLM: two ranks over Baton say what one says, and what two say over Gloo; {groups[0][1]} calls in their group")


if __name__ == "__main__":
    {"torchft": torchft, "pytest": pytest, "vllm": vllm, "generate": generate}[sys.argv[1]](*sys.argv[2:])
