"""Renders chat templates for `baton`: Jinja2 as transformers' apply_chat_template sets it up, on descriptor 0.

A request is its length in four bytes and JSON: [template, variables], or [template, null] to compile it alone. An
answer is a length, "t" for text or "e" for an error, and UTF-8. Arguments: seconds of a request, bytes of memory.
"""
import codecs
import contextlib
import ctypes
import functools
import json
import os
import resource
import signal
import struct
import sys
import traceback
import unicodedata  # noqa: F401: for "\\N{...}"
from datetime import datetime


MOST_WORDS = 4096  # of an error


def read(size):
    parts = []
    while size:
        parts.append(os.read(0, min(size, 1 << 20)))
        if not parts[-1]:
            os._exit(0)  # the server has ended
        size -= len(parts[-1])
    return b"".join(parts)


def answer(kind, data):
    for part in (len(data) + 1).to_bytes(4, "little") + kind, data:
        left = memoryview(part)
        while left:
            left = left[os.write(0, left):]


try:
    import jinja2.constants
    import jinja2.debug  # noqa: F401
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    answer(b"e", str(error).encode())
    sys.exit(1)


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_say"), [], [], body).set_lineno(line)

    def _say(self, caller):
        return caller()


class Namespace(jinja2.utils.Namespace):
    def __init__(*args, **kwargs):
        self, args = args[0], args[1:]
        jinja2.utils.Namespace.__init__(self)
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name, value):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError("underscore-prefixed attribute")
        jinja2.utils.Namespace.__setitem__(self, name, value)


class RaisedByTemplate(jinja2.exceptions.TemplateError):
    pass


def raise_exception(message):
    raise RaisedByTemplate(message)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=[Generation, jinja2.ext.loopcontrols])
environment.filters["tojson"] = tojson
environment.globals["raise_exception"] = raise_exception
environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
environment.globals["namespace"] = Namespace


@functools.lru_cache(maxsize=8)
def compiled(source):
    return environment.from_string(source)


def confine(memory):
    """Limits memory, and leaves no files, sockets or processes to what breaks out of Jinja's sandbox."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # the kernel ends this process rather than the server
    datetime.now().strftime("%c")  # reads the time zone: nothing is opened later
    for name in "ascii", "latin-1", "unicode-escape":
        codecs.lookup(name)
    for what, most in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0),
                       (resource.RLIMIT_NOFILE, 0), (resource.RLIMIT_NPROC, 0)):
        least = min(one for one in (most, resource.getrlimit(what)[1]) if one != resource.RLIM_INFINITY)
        resource.setrlimit(what, (least, least))
    if os.uname().machine != "x86_64":
        return
    # read write mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn mremap madvise getpid setitimer exit
    # gettimeofday futex clock_gettime exit_group getrandom; the rest fails with EPERM.
    allowed = (0, 1, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 38, 60, 96, 202, 228, 231, 318)
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, 0xc000003e), (give, 0, 0, 0), (load, 0, 0, 0)]  # of x86-64 alone
    program += [(equal, len(allowed) - i, 0, call) for i, call in enumerate(allowed)]
    program += [(give, 0, 0, 0x50001), (give, 0, 0, 0x7fff0000)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    pointer = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(filters))
    prctl = ctypes.CDLL(None).prctl
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    prctl(22, 2, pointer)  # PR_SET_SECCOMP; where the kernel has none, the limits above hold


def line_of(error):
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__)
             if frame.f_code.co_filename == "<template>"]
    return f"line {lines[-1]}: " if lines else ""


def respond(request, memory):
    try:
        source, variables = json.loads(request)
        template = compiled(source)
        return b"t", b"" if variables is None else template.render(variables).encode()
    except RaisedByTemplate as raised:
        error = str(raised)
    except jinja2.exceptions.TemplateSyntaxError as wrong:
        error = f"line {wrong.lineno}: {wrong.message}"
    except MemoryError:
        error = f"it needs more than {memory >> 20} MiB of memory"
    except Exception as other:
        error = f"{line_of(other)}{type(other).__name__}: {other}"
    return b"e", error[:MOST_WORDS].encode(errors="replace")


def serve(seconds, memory):
    while True:
        # Nothing of a request is kept while the next one is read.
        request = [read(int.from_bytes(read(4), "little"))]
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of the processor: then the kernel kills this process
        said = list(respond(request.pop(), memory))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer(said[0], said.pop())


for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)  # the server says when to end
confine(int(sys.argv[2]))
answer(b"t", b"")
serve(float(sys.argv[1]), int(sys.argv[2]))
