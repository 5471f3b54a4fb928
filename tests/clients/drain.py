"""SIGTERM in the middle of a stream, to a `baton serve` and to a router before one.

usage: drain.py BATON

What is under way ends by itself and new requests get 503; what does not end within --drain gets an error event; a second
signal ends the process at once. The exit status is 0 each time.
"""

import http.client
import json
import signal
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request

import servers

PATIENCE = 120


def stream(url, tokens, choices):
    """An open stream of which the first event has come."""
    at = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname, at.port, timeout=PATIENCE)
    connection.request("POST", "/v1/completions", json.dumps(
        {"prompt": "In the beginning", "max_tokens": tokens, "n": choices, "stream": True, "ignore_eos": True}))
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b"data: ")
    return answer


def status_of_another(url):
    request = urllib.request.Request(url + "/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1}).encode())
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status
    except urllib.error.HTTPError as refused:
        return refused.code


def check(what, good):
    print(("ok: " if good else "WRONG: ") + what)
    if not good:
        sys.exit(1)


def shut_down(server, name, tokens, signals, whole):
    # Many choices: no machine is so slow here, and so quick there, that all of them end before the signal comes.
    answer = stream(server.url, tokens, 1 if whole else 100)
    server.process.send_signal(signal.SIGTERM)
    line = server.process.stdout.readline()
    check(f"{name} says that it drains", line.startswith("draining: "))
    check(f"{name} refuses what comes", signals > 1 or status_of_another(server.url) in (503, 200))
    for _ in range(signals - 1):
        server.process.send_signal(signal.SIGTERM)
    try:
        rest = answer.read().decode()
    except http.client.IncompleteRead as cut:
        rest = cut.partial.decode()
    check(f"{name}: exit status 0", server.process.wait(PATIENCE) == 0)
    if signals > 1:
        return check(f"{name}: a second signal cuts the stream", "[DONE]" not in rest)
    check(f"{name}: the stream has an end", rest.endswith("data: [DONE]\n\n"))
    check(f"{name}: it is {'whole' if whole else 'an error'}", ("shutting down" in rest) != whole)


def main():
    baton = sys.argv[1]
    with tempfile.TemporaryFile("w+") as log:
        for drain, tokens, signals, whole in (("30", 300, 1, True), ("0.2", 100000, 1, False), ("600", 100000, 2, False)):
            flags = ["--model", servers.MODEL, "--drain", drain]
            alone = servers.Server(baton, log, "--role", "all", *flags)
            worker = servers.Server(baton, log, "--role", "decode", *flags)
            router = servers.Server(baton, log, "--role", "router", "--decode", worker.url, "--drain", drain)
            try:
                servers.wait_until_up(router.url)
                shut_down(alone, f"a server with --drain {drain}", tokens, signals, whole)
                shut_down(router, f"a router with --drain {drain}", tokens, signals, whole)
            finally:
                for server in (router, worker, alone):
                    server.stop()


main()
