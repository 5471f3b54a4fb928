"""Decode pulls four pages out of prefill's memory. Both live in this process; in yours, the metadata travels by
whatever means the two have."""
import asyncio

import baton

PAGE, PAGES = 4096, 64


def rows(memory):
    """All pages of a buffer: (address, bytes, device, stride, count)."""
    return [(baton.memory_of(memory).address, PAGE, 0, PAGE, PAGES)]


async def main():
    there = bytearray(b"".join(bytes([page]) * PAGE for page in range(PAGES)))
    here = bytearray(PAGE * PAGES)
    with baton.Agent("prefill") as prefill, baton.Agent("decode") as decode:
        prefill.register(there)
        decode.register(here)
        decode.add_remote(prefill.metadata())

        # All pages, prepared once; a request names some of them by number.
        local = decode.prepare(rows(here))
        remote = decode.prepare(rows(there), "prefill")
        with decode.read(local, [0, 1, 2, 3], remote, [9, 7, 33, 34], b"request 1") as pull:
            await pull

        messages = []
        while not messages:
            messages = prefill.messages()
        print("decode has pages", *(here[PAGE * page] for page in range(4)), end="; ")
        print("prefill heard of", messages[0][1])


asyncio.run(main())
