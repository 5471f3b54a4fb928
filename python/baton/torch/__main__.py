"""Compiles the backend ahead of the first group: python3 -m baton.torch"""
import sys

import torch

from . import _build

try:
    where = _build.load(again=True).__file__
except _build.CannotBuild as why:
    sys.exit(f"baton.torch: the backend cannot be compiled: {why}")
print(f"baton.torch: the backend for torch {torch.__version__} is {where}")
