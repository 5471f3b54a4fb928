"""What happens to a prefill server while a request runs: it is killed, it is stopped, or the wire to it is cut."""
import random
import signal
import subprocess
import threading
import time

KINDS = ("stopped", "cut off", "stopped", "cut off", "killed")  # in turn; after the last a server must start


class Wire:
    """A network of its own for prefill, joined to this machine's by a pair of interfaces that can be cut.
    RuntimeError, with the reason, where that is not allowed. What it made ends with this process."""

    HERE, THERE = "10.78.0.1", "10.78.0.2"

    def __init__(self):
        self.holder = None
        try:
            self.holder = subprocess.Popen(["unshare", "--net", "--uts", "cat"], stdin=subprocess.PIPE)
            enter = self.inside = ["nsenter", "--target", str(self.holder.pid), "--net", "--uts"]
            while self._run(*enter, "true").returncode or self._same():
                if self.holder.poll() is not None:
                    raise RuntimeError("a network namespace cannot be made here: run as root")
                time.sleep(0.01)
            self.name = f"bv{self.holder.pid}"
            for command in (["ip", "link", "add", self.name, "type", "veth", "peer", "name", "kv", "netns",
                             str(self.holder.pid)],
                            ["ip", "addr", "add", self.HERE + "/30", "dev", self.name],
                            ["ip", "link", "set", self.name, "up"],
                            [*enter, "hostname", "prefill"],
                            [*enter, "ip", "link", "set", "lo", "up"],
                            [*enter, "ip", "addr", "add", self.THERE + "/30", "dev", "kv"],
                            [*enter, "ip", "link", "set", "kv", "up"]):
                done = self._run(*command)
                if done.returncode:
                    raise RuntimeError(f"no wire can be made here: {' '.join(command)}: {done.stderr.strip()}")
        except FileNotFoundError as why:
            self.close()
            raise RuntimeError(f"no wire can be made here: {why}") from why
        except RuntimeError:
            self.close()
            raise

    def cut(self, cut=True):
        """What is sent is lost from now on, both ways; nobody is told."""
        self._run(*self.inside, "ip", "link", "set", "kv", "down" if cut else "up")

    def close(self):
        if self.holder is not None:
            self.holder.stdin.close()
            self.holder.wait()
            self.holder = None

    def _same(self):
        """Whether the holder is still in our network."""
        links = [self._run("readlink", f"/proc/{who}/ns/net").stdout for who in ("self", self.holder.pid)]
        return links[0] == links[1]

    @staticmethod
    def _run(*command):
        return subprocess.run(command, capture_output=True, text=True, check=False)


class Faults:
    """Strikes `prefill` once for each question, at a random time of it, and compares the answers. `ask(url, question)`
    gives (status, tokens, seconds); `wire` None: nothing is cut off."""

    def __init__(self, prefill, proxy, wire, ask):
        self.prefill, self.proxy, self.wire, self.ask = prefill, proxy, wire, ask
        self.kinds = KINDS if wire else [kind for kind in KINDS if kind != "cut off"]

    def run(self, asked, expected, agent, seed):
        """(kind, mode, answer, right answer, seconds) of each: from when decode was asked, less what one server took
        in all. Half of the questions go to both servers at once; of the others prefill has answered when it is
        struck."""
        dice, out = random.Random(seed), []
        for i, (question, right) in enumerate(zip(asked, expected)):
            kind, together = self.kinds[i % len(self.kinds)], i // len(self.kinds) % 2 == 0
            self.proxy.agent = agent if together else ""
            # What follows prefill's answer is short: half of it is struck before decode is asked.
            delay = dice.uniform(0, 1.5 * right[2]) if together else max(0, dice.uniform(-0.03, 0.03))
            got, asked_decode = self._strike(question, kind, together, delay)
            out.append((kind, "together" if together else "in turn", got, right, got[2] - asked_decode - right[2]))
            print(f"  {kind}, {out[-1][1]}, after {delay:.3f} s: HTTP {got[0]}, "
                  f"{'equal' if got[1] == right[1] else 'not equal'}, {out[-1][4]:.1f} s more", flush=True)
        self.proxy.agent = ""
        return out

    def _strike(self, question, kind, together, delay):
        """`delay` seconds after both were asked, or after prefill's answer: 0 is before decode is asked. The answer,
        and after how many seconds decode was asked."""
        strike, began, asked = threading.Timer(delay, self._hurt, [kind]), time.monotonic(), [0]

        def answered():
            strike.start() if delay else self._hurt(kind)
            asked[0] = time.monotonic() - began

        self.proxy.answered = answered
        if together:
            strike.start()
        answer = self.ask(self.proxy.url, question)
        self.proxy.answered = lambda: None
        if strike.ident:
            strike.join()
        self._heal(kind)
        return answer, asked[0]

    def _hurt(self, kind):
        if kind == "cut off":
            self.wire.cut()
        else:
            self.prefill.signal(signal.SIGKILL if kind == "killed" else signal.SIGSTOP)

    def _heal(self, kind):
        if kind == "cut off":
            self.wire.cut(False)
        elif kind == "stopped":
            self.prefill.signal(signal.SIGCONT)
        else:
            self.prefill.process.wait()
            self.prefill.start()
        self.prefill.ready()
