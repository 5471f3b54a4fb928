"""Which weights an engine computes with. Two checkpoints of one shape have KV caches that look alike and are not."""
from __future__ import annotations

import concurrent.futures
import glob
import hashlib
import json
import os
import re
from typing import Any, List

_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")  # the first that is there is what counts
_PIECE = 1 << 22
_THREADS = 8  # large checkpoints are many files: SHA-256 takes up to 3 s for a GB of one


def weights_digest(config: Any) -> str:
    """SHA-256 over the model's files of weights, by name and content: all of each is read, once. Links into a
    Hugging Face cache are named by their content's SHA-256 there, and are not read. Weights that are made up
    (load_format "dummy") are told by that word. ValueError where no files are found."""
    if getattr(getattr(config, "load_config", None), "load_format", None) == "dummy":
        return "dummy"
    files = _files(config)
    if not files:
        raise ValueError(f"the weights of {config.model_config.model} are not in files here, so that this engine's KV "
                         "cannot be told from another checkpoint's: name the checkpoint in kv_connector_extra_config, "
                         'as "identity": "...", the same at every engine that has it and only there')
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_sha256, files))
    said = json.dumps([[os.path.basename(path), digest] for path, digest in zip(files, digests)])
    return hashlib.sha256(said.encode()).hexdigest()


def _files(config: Any) -> List[str]:
    model = config.model_config.model
    if os.path.isfile(model):
        return [model]
    folder = model if os.path.isdir(model) else _hub_folder(config)
    for kind in _KINDS if folder else ():
        found = sorted(glob.glob(os.path.join(glob.escape(folder), kind)))
        if found:
            return found
    return []


def _hub_folder(config: Any) -> str:
    """Where the model's files lie that were downloaded by name, or nothing."""
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(config.model_config.model, revision=getattr(config.model_config, "revision", None),
                                 cache_dir=getattr(getattr(config, "load_config", None), "download_dir", None),
                                 local_files_only=True)
    except (ImportError, OSError, ValueError):  # what it raises for a model that is not there derives from these
        return ""


def _sha256(path: str) -> str:
    target = os.path.realpath(path)
    folder, name = os.path.split(target)
    if os.path.islink(path) and os.path.basename(folder) == "blobs" and re.fullmatch("[0-9a-f]{64}", name):
        return name
    digest = hashlib.sha256()
    with open(target, "rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()
