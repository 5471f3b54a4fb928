"""Prefill pushes four pages into decode's memory as soon as it has computed them. Decode is found by its name, in a
folder that both see; etcd://HOST:PORT does the same between machines."""
import tempfile
import time

import baton

PAGE, PAGES = 4096, 64


def rows(memory):
    """All pages of a buffer: (address, bytes, device, stride, count)."""
    return [(baton.memory_of(memory).address, PAGE, 0, PAGE, PAGES)]


def main():
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}"
        with baton.Agent("prefill", metadata_store=store) as prefill, \
                baton.Agent("decode", metadata_store=store) as decode:
            here, there = prefill.allocate(PAGE * PAGES), decode.allocate(PAGE * PAGES)
            here[:] = b"".join(bytes([page]) * PAGE for page in range(PAGES))
            decode.publish_metadata()
            prefill.follow_metadata("decode")
            while not prefill.has_remote("decode"):
                time.sleep(0.001)

            local, remote = prefill.prepare(rows(here)), prefill.prepare(rows(there), "decode")
            with prefill.write(local, [9, 7, 33, 34], remote, [0, 1, 2, 3], b"request 1"):
                messages = []  # decode needs nothing but the message: it comes behind the last byte
                while not messages:
                    messages = decode.messages()
            print("decode has pages", *(there[PAGE * page] for page in range(4)), end="; ")
            print(*messages[0])


main()
