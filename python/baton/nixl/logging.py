"""Loggers by NIXL's name. They say what NIXL's do, and where: on standard output, from INFO or $NIXL_LOG_LEVEL on."""
from __future__ import annotations

import logging as _logging
import os
import sys

_LEVELS = {"TRACE": _logging.DEBUG, "DEBUG": _logging.DEBUG, "INFO": _logging.INFO, "WARN": _logging.WARNING,
           "ERROR": _logging.ERROR, "FATAL": _logging.CRITICAL}


def get_logger(name: str = "nixl") -> _logging.Logger:
    """The first call sets up the logger "nixl", unless the program has."""
    ours = _logging.getLogger("nixl")
    if not ours.handlers:
        handler = _logging.StreamHandler(sys.stdout)
        handler.setFormatter(_logging.Formatter("%(asctime)s %(name)s %(levelname)s %(filename)s:%(lineno)d: %(message)s"))
        ours.addHandler(handler)
        ours.propagate = False
        said = os.environ.get("NIXL_LOG_LEVEL", "")
        ours.setLevel(_LEVELS.get(said.upper(), _logging.INFO))
        if said and said.upper() not in _LEVELS:
            ours.warning("NIXL_LOG_LEVEL is %r: there are %s", said, ", ".join(_LEVELS))
    return ours if name in ("", "nixl") else _logging.getLogger("nixl." + name.lstrip("_"))
