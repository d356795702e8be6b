"""Services for tests of Child; importable by its processes without torch."""

import os
import subprocess
import sys
import time
import weakref

from autoflash.child import Failure
from autoflash.errors import DeviceError


class Large:
    """Stands for a tensor: what must not stay alive."""


class Service:
    def __init__(self):
        self._seen, self._words = [], []

    def add(self, one, other):
        return one + other

    def note(self, word):
        """How many words there are with this one."""
        self._words.append(word)
        return len(self._words)

    def pid(self):
        return os.getpid()

    def fail(self, fatal=False):
        raise Failure("correctness", "out is off", fatal)

    def refuse(self):
        raise DeviceError("no such GPU")

    def mistake(self):
        return {}["missing"]

    def sleep(self):
        time.sleep(1000)

    def abort(self):
        os.abort()

    def run_out_of_memory(self):
        raise MemoryError

    def exit_with_a_word(self):
        print("LLVM ERROR: unreachable", file=sys.stderr, flush=True)
        os._exit(7)

    def start_a_process(self):
        """The id of a grandchild that would run for long, as a compiler that never ends."""
        return subprocess.Popen(["sleep", "1000"]).pid

    def start_a_process_and_sleep(self, told):
        told.write_text(str(self.start_a_process()))
        time.sleep(1000)

    def fail_with_something_large(self):
        """A failure whose frames, and whose cause's frames, hold on to something."""
        held = Large()
        self._seen.append(weakref.ref(held))
        try:
            self._deeper(held)
        except RuntimeError as error:
            raise Failure("runtime", str(error)) from error

    def large_things_alive(self):
        return sum(reference() is not None for reference in self._seen)

    def _deeper(self, held):
        also = [Large() for _ in range(3)]
        self._seen += [weakref.ref(thing) for thing in also]
        raise RuntimeError("planted")


def broken_service():
    raise ValueError("cannot be made")
