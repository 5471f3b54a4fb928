"""The library's agents, connectors, endpoints and communicators, as long as they may be used."""
from __future__ import annotations

import ctypes
import os
import threading
import time
import weakref
from typing import Any, Dict, List, Optional, TypeVar

from ._library import Bytes, Error, call, lib, take
from .errors import InvalidParamError, error_of


# The prefix of the library's functions for this handle, and the function that frees it.
_PREFIXES = {"agent": ("agent", "destroy"), "connector": ("kv_connector", "destroy"), "endpoint": ("endpoint", "close"),
             "rendezvous": ("rendezvous", "close"), "communicator": ("comm", "destroy"), "window": ("window", "destroy"),
             "experts": ("experts", "destroy"), "session": ("kv_session", "destroy")}


Self = TypeVar("Self", bound="Closing")


class Closing:
    """What `with` closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class Handle:
    """The library's agent, connector, endpoint or communicator, until it is closed. Transfers and lists outlive it: the interpreter collects in any
    order. It is destroyed when no thread is inside a call any more, also at the end of the interpreter, which daemon threads
    do not notice. In a forked child it is unusable: its threads are not there, and its sockets are the parent's."""

    all: "weakref.WeakSet[Handle]" = weakref.WeakSet()

    def __init__(self, value: Optional[int], what: str = "agent") -> None:
        self.value, self.what, self.why = value, what, f"the {what} is closed: make another one"
        self._prefix, self._end = _PREFIXES[what]
        self._inside: List[int] = []  # threads; what is done with it is one step for the interpreter
        self._destroying = threading.RLock()
        self.all.add(self)

    def make(self, function: Any, *arguments: Any) -> None:
        """Has a function make it, which gives it in its last argument but the error."""
        made = ctypes.c_void_p()
        call(function, *arguments, ctypes.byref(made))
        self.value = made.value

    def ask(self, function: Any, *arguments: Any) -> Any:
        """Calls a function of the library that takes an agent first."""
        me = threading.get_ident()
        try:
            self._inside.append(me)  # and only then looks whether it is closed: destroy() does it the other way round
            if self.value is None:
                raise InvalidParamError(self.why)
            return function(self.value, *arguments)
        finally:
            if me in self._inside:  # Ctrl-C may have come before the first line
                self._inside.remove(me)

    def call(self, function: Any, *arguments: Any) -> int:
        """Calls a function whose last argument is an error, and raises that error. Returns 0 or 1."""
        error = Error(ctypes.sizeof(Error))
        result = self.ask(function, *arguments, ctypes.byref(error))
        if result < 0:
            raise error_of(result, error.text.decode(errors="replace"))
        return result

    def number_of(self, function: Any, *arguments: Any, kind: Any = ctypes.c_uint64) -> int:
        """The number that a function gives in its last argument but the error; of a handle that it does not give, 0."""
        out = kind()
        self.call(function, *arguments, ctypes.byref(out))
        return out.value or 0

    def handle_of(self, function: Any, *arguments: Any) -> int:
        return self.number_of(function, *arguments, kind=ctypes.c_void_p)

    def bytes_of(self, function: Any, *arguments: Any) -> bytes:
        """The bytes that a function gives in its last argument but the error."""
        out = Bytes()
        self.call(function, *arguments, ctypes.byref(out))
        return take(out)

    def counters_of(self, function: Any, kind: Any, *arguments: Any) -> Dict[str, int]:
        """The counters that a function writes into a structure of this kind, by name."""
        out = kind(ctypes.sizeof(kind))
        self.call(function, ctypes.byref(out), *arguments)
        return {name: getattr(out, name) for name, *_ in kind._fields_[1:]}

    def with_event_fd(self, function: Any) -> Any:
        """The result of a function on the agent's event descriptor, which stays open during the call."""
        return self.ask(lambda agent: function(getattr(lib, f"{self._prefix}_event_fd")(agent)))

    def drop(self, function: Any, *arguments: Any) -> None:
        """Releases something; does nothing if it was already released with the agent."""
        try:
            self.ask(function, *arguments)
        except InvalidParamError:
            pass

    def destroy(self) -> None:
        with self._destroying:
            value, self.value = self.value, None
            me = threading.get_ident()  # in a signal handler, say
            while any(thread != me for thread in list(self._inside)):
                time.sleep(0.0005)
            if value:
                getattr(lib, f"{self._prefix}_{self._end}")(value)

    def _forget(self) -> None:
        self.value = None
        self.why = f"the {self.what} belongs to the process that this one was forked from: make another one"
        self._inside, self._destroying = [], threading.RLock()

    @classmethod
    def forget(cls) -> None:
        """In a forked child."""
        for one in cls.all:
            one._forget()


os.register_at_fork(after_in_child=Handle.forget)
