"""The properties that must be equal before one engine reads another's cache: the weights, found through vLLM's
configuration, and the computation with them. The division of the cache into blocks and among workers may differ."""
from __future__ import annotations

import json
from typing import Any, Sequence

from .. import weights
from ..hand_off import KvMemory
from .groups import Group


def identity_of(config: Any, memory: KvMemory, groups: Sequence[Group], digest: str = "") -> str:
    """`digest`: weights_digest(), if it is known."""
    model = config.model_config
    return json.dumps([digest or weights_digest(config), _said_of(model.hf_config), str(model.dtype),
                       str(config.cache_config.cache_dtype), [group.window for group in groups], memory.groups],
                      sort_keys=True)


def weights_digest(config: Any) -> str:
    """The digest of baton.weights; for random weights (load_format "dummy") that word. ValueError: no files were
    found."""
    load = getattr(config, "load_config", None)
    if getattr(load, "load_format", None) == "dummy":
        return "dummy"
    try:
        return weights.weights_digest(config.model_config.model, getattr(config.model_config, "revision", None),
                                      getattr(load, "download_dir", None))
    except ValueError as why:
        raise ValueError(f"{why}, so this engine's KV cannot be distinguished from another checkpoint's: name the checkpoint "
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


def _said_of(configuration: Any) -> Any:
    """A model's configuration, without the version of the library that has read it."""
    if not hasattr(configuration, "to_json_string"):
        return str(configuration)
    said = json.loads(configuration.to_json_string())
    said.pop("transformers_version", None)
    return said
