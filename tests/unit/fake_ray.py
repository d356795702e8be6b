"""The few calls of Ray that a search makes, in this process: actors are objects with threads."""

import asyncio
import inspect
import sys
from concurrent.futures import Future, ThreadPoolExecutor, TimeoutError
from types import ModuleType


class RayError(Exception):
    pass


class Ref:
    def __init__(self, future):
        self._future = future

    def future(self):
        return self._future


class Actor:
    """A handle: `handle.method.remote(...)` is a reference to what the method gives."""

    def __init__(self, ray, of, options, arguments):
        self._ray, self.options = ray, options
        self.node = options["scheduling_strategy"]
        self._threads = ThreadPoolExecutor(64)
        self._made = of(*arguments)  # here and now: in the order of asking

    def __getattr__(self, name):
        method = type("Method", (), {})()
        method.remote = lambda *arguments: Ref(self._threads.submit(self._do, name, arguments))
        return method

    def _do(self, name, arguments):
        self._ray.noted.append((self.node, name, arguments))
        if self._ray.is_lost(self.node):
            raise RayError(f"The actor died.\nThe node {self.node} is gone.\n")
        answer = getattr(self._made, name)(*arguments)
        return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


class Remote:
    def __init__(self, ray, of):
        self._ray, self._of = ray, of

    def options(self, **options):
        remote = Remote(self._ray, self._of)
        remote.remote = lambda *arguments: self._ray.made(self._of, options, arguments)
        return remote


class FakeRay(ModuleType):
    """`gpus` by node; a node whose name is in `lost` answers nothing any more."""

    def __init__(self, gpus):
        super().__init__("ray")
        self._gpus, self.lost = gpus, set()
        self.noted, self.actors, self.killed, self.addresses = [], [], [], []
        self.exceptions = ModuleType("ray.exceptions")
        self.exceptions.RayError = RayError
        self.util = ModuleType("ray.util")
        self.util.scheduling_strategies = ModuleType("ray.util.scheduling_strategies")
        self.util.scheduling_strategies.NodeAffinitySchedulingStrategy = lambda id, soft: id

    def install(self, monkeypatch):
        for module in (self, self.util, self.util.scheduling_strategies, self.exceptions):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return self

    def is_lost(self, node):
        return node in self.lost

    def made(self, of, options, arguments):
        self.actors.append(Actor(self, of, options, arguments))
        return self.actors[-1]

    def is_initialized(self):
        return False

    def init(self, address, **_):
        if address == "nowhere":
            raise ConnectionError("Could not find any running Ray instance.")
        self.addresses.append(address)

    def shutdown(self):
        self.addresses.append("left")

    def nodes(self):
        return [
            {
                "NodeID": node,
                "NodeManagerHostname": f"host-{node}",
                "Alive": node not in self.lost,
                "Resources": {"CPU": 8.0} | ({"GPU": float(count)} if count else {}),
            }
            for node, count in self._gpus.items()
        ]

    def remote(self, of):
        return Remote(self, of)

    def get(self, ref, timeout):
        try:
            return ref.future().result(timeout)
        except TimeoutError:
            raise RayError("Get timed out") from None

    def kill(self, actor):
        self.killed.append(actor)


def done(value):
    """A reference to a value that is there."""
    future = Future()
    future.set_result(value)
    return Ref(future)
