"""A compiler for pools that compiles nothing, importable without torch."""

import time

from autoflash.records import Resources


class IdleCompiler:
    def compile(self, *asked: object) -> Resources:
        return Resources(registers=1)


class StuckCompiler:
    def compile(self, *asked: object) -> Resources:
        time.sleep(1000)
        raise AssertionError("nobody kills it")
