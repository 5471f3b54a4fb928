"""Which weights a vLLM computes with, as its configuration says where they lie."""
from __future__ import annotations

from typing import Any

from .. import weights


def weights_digest(config: Any) -> str:
    """That of baton.weights. Weights that are made up (load_format "dummy") are told by that word. ValueError where
    no files are found."""
    load = getattr(config, "load_config", None)
    if getattr(load, "load_format", None) == "dummy":
        return "dummy"
    try:
        return weights.weights_digest(config.model_config.model, getattr(config.model_config, "revision", None),
                                      getattr(load, "download_dir", None))
    except ValueError as why:
        raise ValueError(f"{why}, so that this engine's KV cannot be told from another checkpoint's: name the checkpoint "
                         'in kv_connector_extra_config, as "identity": "...", the same at every engine that has it and '
                         "only there") from None


def checkpoint_of(config: Any, digest: str) -> str:
    """The same with its config.json, as engines of other makes say it; "" where vLLM computes with something else."""
    model, load = config.model_config, getattr(config, "load_config", None)
    if digest == "dummy" or getattr(model, "hf_overrides", None):
        return ""
    try:
        return weights.checkpoint_digest(digest, model.model, getattr(model, "revision", None),
                                         getattr(load, "download_dir", None))
    except ValueError:
        return ""
