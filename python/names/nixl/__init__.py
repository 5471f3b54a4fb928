"""The names `nixl`, `nixl._api`, `nixl._bindings`, `nixl._utils` and `nixl.logging`, for programs that import NIXL
by them and cannot be changed: put this folder's parent on PYTHONPATH."""
import sys

from baton.nixl import *  # noqa: F401,F403
from baton.nixl import _api, _bindings, _utils, logging

for _module in (_api, _bindings, _utils, logging):
    sys.modules[f"{__name__}.{_module.__name__.rsplit('.', 1)[1]}"] = _module
