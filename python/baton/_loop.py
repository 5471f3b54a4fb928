"""Transfers in an asyncio program: one reader of an agent's event descriptor wakes all who wait on it."""
from __future__ import annotations

import asyncio
import os
import weakref
from typing import Any, Dict

from .errors import BatonError, NotPostedError

_watchers: "weakref.WeakKeyDictionary[Any, Dict[int, Any]]" = weakref.WeakKeyDictionary()


class _Watcher:
    """What waits on one agent in one loop: the reader is there while somebody does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, agent: Any) -> None:
        self.loop, self.fd = loop, agent.event_fd
        self.waiting: Dict[asyncio.Future, Any] = {}

    def add(self, transfer: Any) -> asyncio.Future:
        future = self.loop.create_future()
        if not self.waiting:
            self.loop.add_reader(self.fd, self.look)
        self.waiting[future] = transfer
        return future

    def drop(self, future: asyncio.Future) -> None:
        if self.waiting.pop(future, None) is not None and not self.waiting:
            self.loop.remove_reader(self.fd)

    def look(self) -> None:
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            pass
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


async def wait_for(transfer: Any) -> None:
    """Until it has ended; posts it if nobody has. A cancelled wait aborts the transfer: release() fences it."""
    try:
        ended = transfer.done()
    except NotPostedError:
        ended = transfer.post().done()
    if ended:
        return
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
    loop.call_soon(watcher.look)  # it may have ended before anybody watched
    try:
        await future
    except asyncio.CancelledError:
        transfer.abort()
        raise
    finally:
        watcher.drop(future)
