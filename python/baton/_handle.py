"""The library's agent, as long as it may be used."""
from __future__ import annotations

import os
import weakref
from typing import Optional

from ._library import lib


class Handle:
    """The library's agent, until it is closed. Transfers and lists outlive it: the interpreter collects in any order.
    In a forked child it is nobody's: its threads are not there, and its sockets are the parent's."""

    all: "weakref.WeakSet[Handle]" = weakref.WeakSet()

    def __init__(self, value: Optional[int]) -> None:
        self.value, self.why = value, "the agent is closed: make another one"
        self.all.add(self)

    def destroy(self) -> None:
        value, self.value = self.value, None
        if value:
            lib.agent_destroy(value)

    @classmethod
    def forget(cls) -> None:
        """Of a forked child."""
        for one in cls.all:
            one.value, one.why = None, "the agent belongs to the process that this one was forked from: make another one"


os.register_at_fork(after_in_child=Handle.forget)
