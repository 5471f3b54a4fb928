"""Ports for servers that come later, or come back."""
import contextlib
import random
import socket


def free_ports(count):
    """The first of so many side by side, below those that the kernel gives to others: they are free until the servers have them."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for number in range(port, port + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port
