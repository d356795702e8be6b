"""Cluster: the GPUs of a Ray cluster on one workload, an actor each; this process alone writes.

Every node compiles for its own GPUs: what is compiled elsewhere is not in its cache.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from autoflash import __version__
from autoflash.actors import Answer, Card, Site
from autoflash.cards import open_card
from autoflash.check import Stage
from autoflash.child import START_DEADLINE_S, Call
from autoflash.config import Config
from autoflash.errors import AutoflashError, DeviceError
from autoflash.fleet import Post, started, tune_with
from autoflash.gpu import Gpu
from autoflash.pool import Pool, Urgency, cancel
from autoflash.problem import Problem
from autoflash.records import Resources
from autoflash.tune import Machine, TuneResult, options_for
from autoflash.worker import Worker
from autoflash.workload import Workload

SLACK_S = 30.0  # beyond a call's own deadline, until the node counts as lost
MANY = 100_000  # compiles that a site may be asked for at once


def tune_on_ray(
    workload: Workload,
    address: str,
    *,
    db: Path | None = None,
    machine: Machine | None = None,
    **asked: Any,
) -> list[TuneResult]:
    """Search on every GPU of the Ray cluster at `address`, `auto` for the one this host is in.

    Each node has autoflash of this very version installed. GPUs of one type share a run, each type
    has winners of its own; a GPU or node that is lost gives its problem back. `asked` is as
    `options_for` takes it. Raises AutoflashError where Ray is not installed, DeviceError where no
    cluster answers or none of its GPUs does, and as `tune` does.
    """
    machine = machine or Machine(device=partial(open_card, 0))  # Ray shows a card its own GPU alone
    options = options_for(**asked)
    hire = partial(_hire, address, machine, options.done)
    return tune_with(workload, hire, options, db)


class RemoteChild:
    """A child of a card's actor: see `Child` for what its methods promise.

    Raises DeviceError when the actor or its node is lost.
    """

    def __init__(
        self,
        cluster: "Cluster",
        node: "Node",
        name: str,
        service: Callable[[], Any],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._cluster, self._name = cluster, name
        options = {"num_gpus": 1, "num_cpus": 0, "max_concurrency": 2}
        self._actor = cluster.actor(Card, node, options, service, dict(environment or {}))
        self._pid: int | None = None
        self._killed = False
        self.starts = 0

    @property
    def pid(self) -> int | None:
        return self._pid

    def call(
        self, method: str, *arguments: Any, deadline_s: float, then: Call | None = None
    ) -> Any:
        """As `Child.call`; `then` is not begun before it is called."""
        self._killed = False
        asked = self._actor.call.remote(method, arguments, deadline_s)
        told = self._cluster.get(asked, START_DEADLINE_S + deadline_s + SLACK_S, self._name)
        (answered, value), self._pid, self.starts = told
        if answered:
            return value
        raise value

    def kill(self) -> None:
        if not self._killed:  # asked again and again until a call has ended
            self._killed = True
            self._actor.kill.remote()

    def close(self) -> None:
        with suppress(DeviceError):
            self._cluster.get(self._actor.close.remote(), SLACK_S, self._name)
        self._cluster.ray.kill(self._actor)
        self._pid = None


class ClusterPool:
    """Compiles on every node that has a GPU of the type; see `Pool`."""

    def __init__(self, cluster: "Cluster", sites: Mapping[object, Sequence[Any]]) -> None:
        self._cluster, self._sites = cluster, sites  # by the identity of their GPUs
        self._numbers, self._lock = count(), Lock()
        self._jobs: dict[Future[Resources], tuple[int, Gpu, Urgency]] = {}

    def submit(
        self,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        urgency: Urgency,
        stage: Stage | None,
    ) -> Future[Resources]:
        future: Future[Resources] = Future()
        job = next(self._numbers)
        with self._lock:
            self._jobs[future] = (job, gpu, urgency)
        answers: list[Answer] = []
        sites = self._sites[gpu.identity]

        def note(asked: Future[Answer]) -> None:
            with self._lock:
                answers.append(self._cluster.answer(asked))
                settled = len(answers) == len(sites) and self._jobs.pop(future, None)
            if settled:  # and not cancelled
                _settle(future, answers)

        for site in sites:
            asked = site.compile.remote(job, urgency, tuple(problems), config, gpu, stage)
            asked.future().add_done_callback(note)
        return future

    def hurry(self, future: Future[Resources], urgency: Urgency) -> None:
        with self._lock:
            asked = self._jobs.get(future)
            if asked is None or asked[2] <= urgency:
                return
            job, gpu, _ = asked
            self._jobs[future] = (job, gpu, urgency)
        for site in self._sites[gpu.identity]:
            site.hurry.remote(job, urgency)

    def close(self) -> None:
        with self._lock:
            unsettled, self._jobs = self._jobs, {}
        for future in unsettled:
            cancel(future)


def _settle(future: Future[Resources], answers: Sequence[Answer]) -> None:
    """What any node compiled is right, and what none could is wrong."""
    right = [value for answered, value in answers if answered]
    if right:
        future.set_result(right[0])
    else:
        future.set_exception(answers[0][1])


@dataclass(frozen=True)
class Node:
    """A node of the cluster with so many GPUs."""

    id: str
    host: str
    gpus: int


class Cluster:
    """What is asked of Ray."""

    def __init__(self, ray: Any) -> None:
        self.ray = ray

    def nodes(self) -> list[Node]:
        """The living nodes that have a GPU, by name."""
        alive = [node for node in self.ray.nodes() if node["Alive"]]
        found = [
            Node(node["NodeID"], node["NodeManagerHostname"], int(node["Resources"].get("GPU", 0)))
            for node in alive
        ]
        return sorted((node for node in found if node.gpus), key=lambda node: (node.host, node.id))

    def actor(self, of: type, node: Node, options: Mapping[str, Any], *arguments: Any) -> Any:
        """An actor on this very node."""
        on_node = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        strategy = on_node(node.id, soft=False)
        remote = self.ray.remote(of).options(**options, scheduling_strategy=strategy)
        return remote.remote(*arguments)

    def get(self, asked: Any, timeout_s: float, name: str) -> Any:
        """What was asked for. Raises DeviceError where the actor does not answer."""
        try:
            return self.ray.get(asked, timeout=timeout_s)
        except self.ray.exceptions.RayError as error:
            raise _lost(name, error) from None

    def answer(self, asked: Future[Answer]) -> Answer:
        """That of a site, or that it was lost."""
        try:
            return asked.result()
        except self.ray.exceptions.RayError as error:
            return False, _lost("a node of the cluster", error)


def _lost(name: str, error: Exception) -> DeviceError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return DeviceError(f"{name}: {lines[-1] if lines else type(error).__name__}")


def _hire(
    address: str,
    machine: Machine,
    done: Callable[[], bool],
    stack: ExitStack,
    left_s: Callable[[], float],
) -> tuple[list[Post], Pool]:
    """A worker for every GPU that answers, and the pool of their nodes."""
    assert machine.device is not None
    cluster = stack.enter_context(_connected(address))
    sites: dict[str, Any] = {}
    workers: dict[str, Worker] = {}
    of_worker: dict[str, str] = {}
    for node in cluster.nodes():
        site = cluster.actor(Site, node, {"num_cpus": 0, "max_concurrency": MANY}, machine)
        stack.enter_context(_closed(cluster, site, done))
        try:
            version, environment = cluster.get(site.about.remote(), START_DEADLINE_S, node.host)
        except DeviceError as error:
            print(f"{error}; the node is left out", file=sys.stderr, flush=True)
            continue
        if version != __version__:
            told = f"{node.host}: has autoflash {version}, not {__version__}; it is left out"
            print(told, file=sys.stderr, flush=True)
            continue
        sites[node.id] = site
        for number in range(node.gpus):
            name = f"GPU {number} of {node.host}"
            child = partial(RemoteChild, cluster, node, name)
            device, deadlines = machine.device, machine.deadlines
            workers[name] = Worker(device, deadlines, left_s, environment, child)
            of_worker[name] = node.id
    if not workers:
        raise DeviceError(f"the Ray cluster at {address} has no node with a GPU that can be used")
    posts = started(workers, stack)
    of_type: dict[object, dict[str, Any]] = {}
    for post in posts:
        node_id = of_worker[post.name]
        of_type.setdefault(post.gpu.identity, {})[node_id] = sites[node_id]
    pool = ClusterPool(cluster, {type_: list(there.values()) for type_, there in of_type.items()})
    return posts, stack.enter_context(closing(pool))


@contextmanager
def _connected(address: str) -> Iterator[Cluster]:
    """The cluster, left again unless this process was in one before."""
    try:
        import ray  # pyright: ignore[reportMissingImports] - an extra
        import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise AutoflashError("--ray needs Ray: pip install 'autoflash[ray]'") from None
    own = not ray.is_initialized()
    if own:
        try:
            ray.init(address=address, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise _lost(f"no Ray cluster answers at {address}", error) from None
    try:
        yield Cluster(ray)
    finally:
        if own:
            ray.shutdown()


@contextmanager
def _closed(cluster: Cluster, site: Any, done: Callable[[], bool]) -> Iterator[None]:
    """The site, emptied in the end if the search is done, else left to the next."""
    finished = False
    try:
        yield
        finished = done()
    finally:
        with suppress(DeviceError):
            cluster.get(site.close.remote(finished), SLACK_S, "a node of the cluster")
        cluster.ray.kill(site)
