"""A KV connector for vLLM, chosen by configuration: decode pulls the KV of a prompt from prefill, layer by layer,
checks every block, and computes the prompt itself when prefill is gone or silent.

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

docs/vllm.md is the manual. Reading order: connector.py (what vLLM calls), scheduler.py (which blocks), service.py (the
thread), prefill.py and decode.py (the two ends of a hand-off), worker.py (who reads from whom), memory.py (where blocks
lie, and how they are cut), layout.py (what is in one).
"""


def __getattr__(name):  # so that the rest can be imported where there is no vLLM
    if name == "BatonConnector":
        from .connector import BatonConnector
        return BatonConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
