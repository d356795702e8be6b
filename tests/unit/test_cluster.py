"""A Ray cluster: types apart, nodes lost, one writer; on a stand-in for Ray, and on Ray itself."""

import importlib.util
import os
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_device import GPU, SHORT, FakeCompiler
from fake_fleet import Calls, FleetDevice, Here, HerePool, other_type
from fake_ray import FakeRay, RayError, Ref, done
from interpreted_card import interpreted_card
from test_tune import DECODE, PROBLEM, stored, workload

from autoflash.actors import Site
from autoflash.child import Failure
from autoflash.cluster import Cluster, ClusterPool, tune_on_ray
from autoflash.effort import EFFORTS, Effort
from autoflash.errors import AutoflashError, DeviceError
from autoflash.pool import TritonCompiler, Urgency
from autoflash.problem import Problem
from autoflash.store import Store
from autoflash.tune import Machine

OTHER = other_type()
SHAPES = [PROBLEM, DECODE, Problem("prefill", "bf16", 1, 4, 4, 64, 256, 256)]


class Begun(Here):
    """One whose service is made at once."""

    def __init__(self, service, environment):
        super().__init__(service)
        self._service, self.starts = service(), 1


class Opened:
    """Opens the fakes of a test one after another, in the order of their nodes."""

    def __init__(self, *devices):
        self._devices = list(devices)

    def __call__(self):
        return self._devices.pop(0)()


@pytest.fixture
def calls(monkeypatch):
    calls = Calls()
    monkeypatch.setattr("autoflash.actors.Child", Begun)
    monkeypatch.setattr("autoflash.tune.CompilePool", partial(HerePool, calls))
    return calls


def search(tmp_path, devices, *problems, **asked):
    machine = Machine(device=Opened(*devices), compiler=FakeCompiler, deadlines=SHORT)
    options = {"effort": "quick", "db": tmp_path / "tune.db", "machine": machine}
    return tune_on_ray(workload(*problems), "here", **options | asked)


def test_every_gpu_of_every_node_has_an_actor_on_its_node_and_the_cluster_is_left(
    calls, tmp_path, monkeypatch
):
    ray = FakeRay({"a": 2, "idle": 0, "b": 1}).install(monkeypatch)
    devices = [partial(FleetDevice, calls, index) for index in range(3)]
    (result,) = search(tmp_path, devices, *SHAPES)
    assert [decision.problem for decision in result.decisions] == SHAPES
    cards = [actor for actor in ray.actors if actor.options.get("num_gpus")]
    sites = [actor for actor in ray.actors if not actor.options.get("num_gpus")]
    assert [(actor.node, actor.options["num_gpus"]) for actor in cards] == [
        ("a", 1),
        ("a", 1),
        ("b", 1),
    ]
    assert [actor.node for actor in sites] == ["a", "b"]
    assert set(ray.killed) == set(ray.actors) and ray.addresses == ["here", "left"]
    closed = {node: arguments for node, name, arguments in ray.noted if name == "close"}
    assert closed["a"] in ((), (True,)) and result.trials > 0


def test_gpu_types_have_winners_of_their_own_and_compile_on_their_own_nodes(
    calls, tmp_path, monkeypatch
):
    ray = FakeRay({"a": 1, "b": 1}).install(monkeypatch)
    devices = [partial(FleetDevice, calls, 0), partial(FleetDevice, calls, 1, gpu=OTHER)]
    first, second = search(tmp_path, devices, PROBLEM, DECODE)
    assert {first.gpu, second.gpu} == {GPU, OTHER}
    compiled = [(node, arguments[-2]) for node, name, arguments in ray.noted if name == "compile"]
    assert {node for node, gpu in compiled if gpu == GPU} == {"a"}
    assert {node for node, gpu in compiled if gpu == OTHER} == {"b"}
    with Store.open(tmp_path / "tune.db", readonly=True) as store:
        assert len(store.winners(GPU)) == len(store.winners(OTHER)) == 2


def test_a_lost_node_gives_its_problem_to_the_others_and_blames_no_candidate(
    calls, tmp_path, monkeypatch, capsys
):
    ray = FakeRay({"a": 1, "b": 1}).install(monkeypatch)

    def is_lost(node):
        checks = sum(name == "call" and of == "b" for of, name, _ in list(ray.noted))
        return node == "b" and checks > 20

    ray.is_lost = is_lost
    devices = [partial(FleetDevice, calls, index, check_s=0.01) for index in range(2)]
    (result,) = search(tmp_path, devices, *SHAPES)
    assert [decision.problem for decision in result.decisions] == SHAPES
    said = capsys.readouterr().err
    assert "GPU 0 of host-b: The node b is gone.; the others go on without it" in said
    assert stored(tmp_path / "tune.db", "SELECT DISTINCT status FROM trials") == [("correct",)]


def test_a_node_that_does_not_answer_or_has_another_version_is_left_out(
    calls, tmp_path, monkeypatch, capsys
):
    FakeRay({"a": 1, "b": 1}).install(monkeypatch)
    versions, about = iter(["0.0.1"]), Site.about

    async def older(self):
        version, environment = await about(self)
        return next(versions, version), environment

    monkeypatch.setattr(Site, "about", older)
    (result,) = search(tmp_path, [partial(FleetDevice, calls, 1)], PROBLEM)
    assert len(result.decisions) == 1
    assert "host-a: has autoflash 0.0.1" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_or_has_no_gpu_is_told_in_a_line(tmp_path, monkeypatch):
    FakeRay({"a": 0}).install(monkeypatch)
    with pytest.raises(DeviceError, match="at here has no node with a GPU"):
        search(tmp_path, [], PROBLEM)
    with pytest.raises(DeviceError, match="no Ray cluster answers at nowhere: Could not find"):
        tune_on_ray(workload(PROBLEM), "nowhere", db=tmp_path / "tune.db")


def test_without_ray_a_line_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(AutoflashError, match=r"pip install 'autoflash\[ray\]'"):
        tune_on_ray(workload(PROBLEM), "auto", db=tmp_path / "tune.db")


class SiteOf:
    """A site that gives these answers, and notes what it is hurried to."""

    def __init__(self, *answers):
        self._answers, self.hurried = list(answers), []
        self.compile = SimpleNamespace(remote=lambda *_: self._answers.pop(0))
        self.hurry = SimpleNamespace(remote=lambda job, urgency: self.hurried.append(urgency))


def lost():
    ref = done(None)
    ref._future = type(ref._future)()
    ref._future.set_exception(RayError("The node is gone."))
    return ref


def pool_of(*sites):
    return ClusterPool(Cluster(FakeRay({})), {GPU.identity: sites})


def submitted(pool, urgency=Urgency.AHEAD):
    return pool.submit([PROBLEM], None, GPU, urgency, None)


def test_a_binary_is_there_once_every_node_has_answered_and_right_if_any_compiled_it():
    wrong = (False, Failure("compile", "no compiler"))
    unanswered = Ref(type(done(0)._future)())
    future = submitted(pool_of(SiteOf(done(wrong)), SiteOf(unanswered)))
    assert not future.done()
    unanswered._future.set_result((True, "resources"))
    assert future.result(5) == "resources"
    with pytest.raises(Failure, match="no compiler"):
        submitted(pool_of(SiteOf(done(wrong)), SiteOf(done(wrong)))).result(5)
    assert submitted(pool_of(SiteOf(lost()), SiteOf(done((True, "there"))))).result(5) == "there"
    with pytest.raises(DeviceError, match="a node of the cluster: The node is gone"):
        submitted(pool_of(SiteOf(lost()))).result(5)


def test_every_node_is_hurried_but_only_to_more_than_it_was():
    sites = [SiteOf(Ref(type(done(0)._future)())) for _ in range(2)]
    pool = pool_of(*sites)
    future = submitted(pool)
    for urgency in (Urgency.AHEAD, Urgency.SOON, Urgency.AHEAD, Urgency.NOW, Urgency.NOW):
        pool.hurry(future, urgency)
    assert [site.hurried for site in sites] == [[Urgency.SOON, Urgency.NOW]] * 2
    pool.close()
    assert future.cancelled()


TINY = Effort("tiny", 2, 2, (1,), 2, 3, 0, 0, prolonged_s=0.0)
HERE = str(Path(__file__).parent)


@pytest.fixture
def cluster(monkeypatch):
    """A local Ray cluster of one node that is said to have two GPUs."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray = pytest.importorskip("ray", reason="Ray is not installed: the stand-in alone is tested")
    paths = {"PYTHONPATH": os.pathsep.join([HERE, *(path for path in sys.path if path)])}
    ray.init(
        address="local",
        num_cpus=2,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": paths},
        object_store_memory=100 << 20,
    )
    yield ray
    ray.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_a_local_cluster_compiles_checks_and_decides(cluster, tmp_path, monkeypatch):
    monkeypatch.setitem(EFFORTS, "tiny", TINY)
    monkeypatch.setenv("AUTOFLASH_CACHE", str(tmp_path / "cache"))
    problems = [
        Problem("prefill", "bf16", 1, 2, 2, 32, 64, 64),
        Problem("decode", "bf16", 2, 2, 1, 32, 1, 64),
    ]
    machine = Machine(
        device=interpreted_card,
        compiler=partial(TritonCompiler, with_cases=False),
        compile_processes=1,
    )
    db = tmp_path / "tune.db"
    (result,) = tune_on_ray(workload(*problems), "local", db=db, machine=machine, effort="tiny")
    assert [decision.problem for decision in result.decisions] == problems
    assert stored(db, "SELECT DISTINCT status FROM trials") == [("correct",)]
    assert stored(db, "SELECT count(*) FROM trials WHERE registers > 0")[0][0] == result.trials
