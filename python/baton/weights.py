"""Identifies the weights that an engine computes with: two checkpoints of one shape have caches of equal shape and
different KV."""
from __future__ import annotations

import concurrent.futures
import glob
import hashlib
import json
import os
import re
from typing import List, Optional

_KINDS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")  # the first that is there is what counts
_PIECE = 1 << 22
_THREADS = 8  # large checkpoints are many files: SHA-256 takes up to 3 s for a GB of one


def weights_digest(model: str, revision: Optional[str] = None, download_dir: Optional[str] = None) -> str:
    """SHA-256 over the model's files of weights, by name and content: all of each is read, once. `model` is a folder, a
    file, or a name of the Hugging Face hub whose files are in this machine's cache of it; links into that cache are
    named by their content's SHA-256 there, and are not read. ValueError where no files are found."""
    files = _files(model, revision, download_dir)
    if not files:
        raise ValueError(f"the weights of {model} are not in files here")
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        digests = list(pool.map(_sha256, files))
    said = json.dumps([[os.path.basename(path), digest] for path, digest in zip(files, digests)])
    return hashlib.sha256(said.encode()).hexdigest()


def checkpoint_digest(weights: str, model: str, revision: Optional[str] = None,
                      download_dir: Optional[str] = None) -> str:
    """SHA-256 over weights_digest() of the same model and its config.json: what engines of every make can say.
    ValueError where it is no folder, or has none."""
    folder = model if os.path.isdir(model) else _hub_folder(model, revision, download_dir)
    path = os.path.join(folder or model, "config.json")
    if not os.path.isfile(path):
        raise ValueError(f"{model} has no config.json here")
    return hashlib.sha256(json.dumps([weights, _sha256(path)]).encode()).hexdigest()


def _files(model: str, revision: Optional[str], download_dir: Optional[str]) -> List[str]:
    if os.path.isfile(model):
        return [model]
    folder = model if os.path.isdir(model) else _hub_folder(model, revision, download_dir)
    for kind in _KINDS if folder else ():
        found = sorted(glob.glob(os.path.join(glob.escape(folder), kind)))
        if found:
            return found
    return []


def _hub_folder(model: str, revision: Optional[str], download_dir: Optional[str]) -> str:
    """The folder of a model that was downloaded by name, or None."""
    try:
        from huggingface_hub import snapshot_download
        return snapshot_download(model, revision=revision, cache_dir=download_dir, local_files_only=True)
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
