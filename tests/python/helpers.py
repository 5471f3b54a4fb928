"""What several tests do: calls in threads and in a forked child, waits, and calls that are refused."""
import concurrent.futures
import os
import time
import traceback
import types
import unittest
import warnings


def in_threads(work, arguments):
    """work(argument) for each in a thread of its own, all at once; raises what the first of them raised."""
    with concurrent.futures.ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(work, arguments))


def in_child(body):
    """Runs it in a forked child, which ends there without the interpreter's end; it must raise nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
        child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "the child failed"


def until(condition, seconds=60):
    """Waits for what must happen sooner or later."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


class FakeTensor:
    """As torch's, over an array of numpy's: of types that numpy lacks, too."""

    def __init__(self, words, dtype="float32", contiguous=True, device="cpu"):
        self.words, self.dtype, self.shape, self.device = words, f"torch.{dtype}", words.shape, types.SimpleNamespace(type=device)
        self.data_ptr, self.numel, self.element_size = (lambda: words.ctypes.data), (lambda: words.size), (lambda: words.itemsize)
        self.stride = lambda: tuple(step // words.itemsize for step in words.strides)
        self.is_contiguous = lambda: contiguous


class Refusing(unittest.TestCase):
    def refused(self, kind, call, *words):
        """The text of the exception of this kind, with these words in it, that call() raises."""
        with self.assertRaises(kind) as raised:
            call()
        for word in words:
            self.assertIn(word, str(raised.exception))
        return str(raised.exception)
