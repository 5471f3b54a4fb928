"""Transfers in an asyncio program: one reader of an agent's event descriptor wakes every task that waits on it."""
from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from typing import Any, Coroutine, Dict, Generator, Optional, TypeVar

from .errors import BatonError, NotPostedError

T = TypeVar("T")


class Awaited(Coroutine[Any, Any, T]):
    """What `await` takes, and asyncio.create_task(), gather() and TaskGroup as well: asyncio drives a coroutine by send() and
    throw(). Several tasks may wait for one: each drives a coroutine of its own."""

    _waits: Optional[Dict[Any, Coroutine[Any, Any, T]]] = None  # by task

    def _wait(self) -> Coroutine[Any, Any, T]:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    def send(self, value: Any) -> Any:
        return self._step("send", value)

    def throw(self, *what: Any) -> Any:
        return self._step("throw", *what)

    def _step(self, how: str, *what: Any) -> Any:
        try:
            task = asyncio.current_task()
        except RuntimeError:  # driven by hand, without a loop
            task = None
        if self._waits is None:
            self._waits = {}
        if task not in self._waits:
            self._waits[task] = self._wait()
        try:
            return getattr(self._waits[task], how)(*what)
        except BaseException:  # StopIteration too: the wait is over
            del self._waits[task]
            raise


_watchers: "weakref.WeakKeyDictionary[Any, Dict[int, Any]]" = weakref.WeakKeyDictionary()


class _Watcher:
    """What waits on one agent in one loop: the reader is there while a task does. It reads from a descriptor of its
    own: the agent's may be closed meanwhile, and be another file's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, agent: Any) -> None:
        self.loop, self.agent, self.fd = loop, weakref.ref(agent), -1
        self.waiting: Dict[asyncio.Future[None], Any] = {}

    def add(self, transfer: Any) -> asyncio.Future[None]:
        future = self.loop.create_future()
        if not self.waiting:
            self.fd = transfer.agent._open.with_event_fd(os.dup)
            self.loop.add_reader(self.fd, self.look)
        self.waiting[future] = transfer
        return future

    def drop(self, future: asyncio.Future[None]) -> None:
        if self.waiting.pop(future, None) is not None and not self.waiting:
            self.loop.remove_reader(self.fd)
            fd, self.fd = self.fd, -1
            os.close(fd)

    def look(self) -> None:
        if self.fd < 0:
            return  # no task waits any more
        try:
            os.read(self.fd, 8)
            wake(self.agent(), besides=self)  # what was read here, no other loop sees
        except BlockingIOError:
            pass
        self.tell()

    def tell(self) -> None:
        """The waiters whose transfers have ended."""
        for future, transfer in list(self.waiting.items()):
            try:
                if not transfer.done():
                    continue
                if not future.done():
                    future.set_result(None)
            except BatonError as why:
                if not future.done():
                    future.set_exception(why)
            self.drop(future)


def wake(agent: Any, besides: Any = None) -> None:
    """Wakes all waiters on the agent, in any thread's loop: an event came, or it was closed."""
    for watcher in list(_watchers.get(agent, {}).values()):
        if watcher is not besides and watcher.waiting:
            with contextlib.suppress(RuntimeError):  # that loop is closed
                watcher.loop.call_soon_threadsafe(watcher.tell)


async def wait_for(transfer: Any) -> None:
    """Waits for its end; posts it first if needed. A cancelled wait aborts the transfer: release() fences it."""
    try:
        ended = transfer.done()
    except NotPostedError:
        ended = transfer.post().done()
    if ended:
        return
    try:
        await wait_end(transfer)
    except asyncio.CancelledError:
        transfer.abort()
        raise


async def wait_end(transfer: Any) -> None:
    """Waits for the end of a transfer that was posted, or of a call. A cancelled wait changes nothing."""
    agent = transfer.agent
    if not agent.threaded:
        while not transfer.done():
            await asyncio.sleep(0)
        return
    loop = asyncio.get_running_loop()
    watchers = _watchers.setdefault(agent, {})
    watcher = watchers.get(id(loop))
    if watcher is None or watcher.loop is not loop:
        watcher = watchers[id(loop)] = _Watcher(loop, agent)
    future = watcher.add(transfer)
    loop.call_soon(watcher.look)  # it may have ended before a task watched
    try:
        await future
    finally:
        watcher.drop(future)


async def readable(fd: int, longest: float) -> None:
    """Waits until a descriptor can be read, `longest` seconds at most. It may be closed meanwhile."""
    loop = asyncio.get_running_loop()
    future, own = loop.create_future(), os.dup(fd)

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(own, wake)
    timer = loop.call_later(longest, wake)
    try:
        await future
    finally:
        timer.cancel()
        loop.remove_reader(own)
        os.close(own)
