"""A KV connector for vLLM, chosen by configuration: decode pulls the KV of a prompt from prefill, layer by layer,
checks every block, and computes the prompt itself when prefill is gone or silent.

    --kv-transfer-config '{"kv_connector": "BatonConnector", "kv_connector_module_path": "baton.vllm",
                           "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'

docs/vllm.md is the manual. Here is what is vLLM's: connector.py (what it calls), scheduler.py (which blocks of which
request), groups.py (layers that share block tables), packing.py (how its kernels pack a block), identity.py (what two
engines must have in common). The hand-off itself is any engine's: baton.hand_off.
"""
from typing import Any


def __getattr__(name: str) -> Any:  # so that the rest can be imported where there is no vLLM
    if name == "BatonConnector":
        from .connector import BatonConnector
        return BatonConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
