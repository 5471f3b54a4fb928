"""Loggers by NIXL's name."""
from __future__ import annotations

from logging import Logger, getLogger


def get_logger(name: str = "nixl") -> Logger:
    return getLogger("nixl" if name in ("", "nixl") else f"nixl.{name}")
