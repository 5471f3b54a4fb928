"""The other process of a test: a megabyte whose page i is full of i, metadata and address on standard output, then
a line for each message. Lives until it is killed or its standard input ends."""
import sys
import threading

import baton


def main():
    agent = baton.Agent(sys.argv[1], require=sys.argv[2] if sys.argv[2:] else "")
    memory = bytearray(b"".join(bytes([page]) * 4096 for page in range(256)))
    agent.register(memory)
    print(agent.metadata().hex(), baton.memory_of(memory).address, sep="\n", flush=True)
    ended = threading.Event()

    def listen():
        while not ended.is_set():
            for sender, message in agent.messages():
                print(f"{sender}: {message.decode()}", flush=True)
            ended.wait(0.001)

    thread = threading.Thread(target=listen)
    thread.start()
    sys.stdin.read()
    ended.set()
    thread.join()
    agent.close()


main()
