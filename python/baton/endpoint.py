"""Endpoints, which the communicators of a process share, and the rendezvous where ranks meet."""
from __future__ import annotations

import ctypes
import weakref
from typing import Any, List, Mapping, NamedTuple, Optional, Set

from . import _library
from ._handle import Closing, Handle
from ._library import call, defaults, lib, take
from .agent import _reached, _text, _within


class EndpointHandle(Handle):
    """The library's endpoint, which is there as long as memory of it is used, though it was closed."""

    def __init__(self, value: Optional[int] = None) -> None:
        super().__init__(value, "endpoint")
        self._memory: Set[int] = set()  # addresses
        self._later: Optional[int] = None  # the endpoint that was closed, and is still needed

    def destroy(self) -> None:
        with self._destroying:
            if self.value and self._memory:
                self._later, self.value = self.value, None
            else:
                super().destroy()

    def allocate(self, size: int) -> int:
        address = self.handle_of(lib.endpoint_allocate, size)
        self._memory.add(address)
        return address

    def free(self, address: int) -> None:
        with self._destroying:
            value = self.value or self._later
            self._memory.discard(address)
            if value:
                lib.endpoint_free(value, address, None)
            if self._later and not self._memory:
                value, self._later = self._later, None
                lib.endpoint_close(value)

    def _forget(self) -> None:
        super()._forget()
        self._later = None


class Endpoint(Closing):
    """Connections, memory and a thread, which the communicators of a process share. `background`: the thread advances
    calls while the program computes; a call that is waited for at once then takes some microseconds longer.
    `pool_bytes`: the size of the pieces in which memory for peers is allocated; 0: the default. The other arguments
    are as for an Agent."""

    def __init__(self, *, providers: Optional[List[str]] = None, require: str = "", key_file: str = "", listen_host: str = "",
                 listen_port: int = 0, background: bool = False, settings: Optional[Mapping[str, Any]] = None,
                 advertise: str = "", pool_bytes: int = 0) -> None:
        self._open, self.background = EndpointHandle(), background
        options = defaults(_library.EndpointOptions, lib.endpoint_options_init)
        _reached(options, providers, require, key_file, listen_host, listen_port, settings, advertise)
        options.background, options.pool_bytes = background, _within(pool_bytes, 2 ** 64 - 1, "pool_bytes")
        self._open.make(lib.endpoint_open, ctypes.byref(options))
        weakref.finalize(self, self._open.destroy)

    @property
    def handle(self) -> bytes:
        """The identity and address of this process, for others to make communicators with: 96 bytes, without a secret in them."""
        out = (ctypes.c_uint8 * 96)()
        self._open.call(lib.endpoint_handle, out)
        return bytes(out)

    def allocate(self, size: int) -> "ctypes.Array[ctypes.c_char]":
        """`size` bytes, zeros: a buffer (numpy.frombuffer() makes an array of it) that calls need not copy on its way. It
        stays until nothing refers to it any more, also behind close()."""
        address = self._open.allocate(_within(size, 2 ** 63 - 1, "size"))
        memory = (ctypes.c_char * size).from_address(address)
        weakref.finalize(memory, self._open.free, address)
        return memory

    @property
    def event_fd(self) -> int:
        """Readable when there is something to do, once progress() has returned False; not to be read."""
        return self._open.ask(lib.endpoint_event_fd)

    def progress(self) -> bool:
        """Advances all its communicators by a bounded amount. Returns whether anything happened: if not, a loop of the
        program's own may sleep on the event_fd, some milliseconds at most."""
        return bool(self._open.ask(lib.endpoint_progress))

    def close(self) -> None:
        """Its communicators go on until they are closed."""
        self._open.destroy()


class Rendezvous(Closing):
    """The server where ranks meet: one of them, or the launcher, opens it and passes its `address` to the others.
    `listen`: "HOST:PORT"; "": a free port of loopback; "*": one of every interface. `ranks`: how many come; 0: as
    many as the first one says."""

    def __init__(self, ranks: int = 0, listen: str = "", key_file: str = "") -> None:
        self._open = Handle(None, "rendezvous")
        handle, address = ctypes.c_void_p(), _library.Bytes()
        call(lib.rendezvous_open, _text(listen, "listen"), _within(ranks, 2 ** 32 - 1, "ranks"),
             _text(key_file, "key_file"), ctypes.byref(handle), ctypes.byref(address))
        self._open.value, self.address = handle.value, take(address).decode()
        weakref.finalize(self, self._open.destroy)

    def close(self) -> None:
        """When all ranks have met, or no more will."""
        self._open.destroy()


class Place(NamedTuple):
    """This process's rank and the size of its group."""

    rank: int
    ranks: int
    rendezvous: str
    local_rank: int
    local_ranks: int
    generation: int
    serves: bool


def place_from_environment() -> Place:
    """The place as the launcher's variables give it: torchrun, Open MPI, MPICH, Intel MPI, Slurm, `baton launch`, or
    BATON_RANK, BATON_RANKS and BATON_RENDEZVOUS. NotFoundError: no launcher started this process."""
    out, rendezvous = _library.Place(ctypes.sizeof(_library.Place)), _library.Bytes()
    call(lib.place_from_environment, ctypes.byref(out), ctypes.byref(rendezvous))
    where = take(rendezvous).decode()
    return Place(out.rank, out.ranks, where, out.local_rank, out.local_ranks, out.generation, bool(out.serves))
