"""Processes with deadlines: what a call can come to, and that nothing of them is left behind."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from child_services import Service, broken_service
from fake_device import SHORT, machine

from autoflash.bench import Pace
from autoflash.child import Child, ChildError, Failure
from autoflash.config import Config
from autoflash.errors import DeviceError
from autoflash.problem import Problem
from autoflash.rounds import rounds_of
from autoflash.worker import LimitReached, Worker

PROBLEM = Problem("prefill", "bf16", 1, 4, 2, 64, 128, 128)
PACE = Pace(0.0, 1e5)
GOOD, BAD, ALSO_GOOD = (Config.of("prefill", {"BLOCK_M": block}) for block in (64, 128, 32))


@pytest.fixture
def child():
    child = Child(Service)
    yield child
    child.close()


def alive(pid):
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def dies(pid, within_s=10.0):
    end = time.monotonic() + within_s
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not alive(pid)


def test_a_call_gives_what_the_method_returns(child):
    assert child.call("add", 2, 3, deadline_s=10) == 5
    assert child.call("pid", deadline_s=10) == child.pid != os.getpid()


def test_the_process_goes_on_with_the_call_that_comes_next(child):
    assert child.call("note", "a", deadline_s=9, then=("note", ("b",))) == 1
    assert child.call("note", "b", deadline_s=9) == 2  # the one that was sent along
    assert child.call("note", "c", deadline_s=9) == 3


def test_another_call_than_the_process_went_on_with_gets_its_own_answer(child):
    assert child.call("note", "a", deadline_s=9, then=("note", ("b",))) == 1
    assert child.call("add", 1, 2, deadline_s=9) == 3
    assert child.call("note", "b", deadline_s=9) == 3  # made anew


@pytest.mark.parametrize("then", [("abort", ()), ("sleep", ()), ("fail", (True,))])
def test_what_the_process_went_on_with_fails_when_it_is_called_and_no_other_call(child, then):
    assert child.call("add", 1, 2, deadline_s=9, then=then) == 3
    assert child.call("add", 3, 4, deadline_s=0.5) == 7
    with pytest.raises(Failure):
        child.call(then[0], *then[1], deadline_s=0.5)
    assert child.call("add", 1, 2, deadline_s=9, then=then) == 3
    with pytest.raises(Failure):
        child.call(then[0], *then[1], deadline_s=0.5)


def test_a_failure_arrives_with_its_status_and_the_process_goes_on(child):
    with pytest.raises(Failure) as failure:
        child.call("fail", deadline_s=10)
    assert (failure.value.status, failure.value.reason) == ("correctness", "out is off")
    assert child.call("add", 2, 3, deadline_s=10) == 5 and child.starts == 1


def test_a_fatal_failure_costs_the_process_and_the_next_call_has_a_new_one(child):
    with pytest.raises(Failure):
        child.call("fail", True, deadline_s=10)
    assert child.pid is None
    assert child.call("add", 2, 3, deadline_s=10) == 5 and child.starts == 2


def test_a_call_beyond_its_deadline_is_a_timeout_and_its_process_is_killed(child):
    pid = child.call("pid", deadline_s=10)
    started = time.monotonic()
    with pytest.raises(Failure) as failure:
        child.call("sleep", deadline_s=0.5)
    assert failure.value.status == "timeout"
    assert time.monotonic() - started < 5 and not alive(pid)


def test_a_process_that_aborts_is_a_runtime_failure_naming_the_signal(child):
    with pytest.raises(Failure, match="died of SIGABRT") as failure:
        child.call("abort", deadline_s=10)
    assert failure.value.status == "runtime" and failure.value.fatal


def test_a_service_out_of_host_memory_is_a_failure_and_its_process_is_given_up(child):
    with pytest.raises(Failure, match=r"^runtime: out of host memory$") as failure:
        child.call("run_out_of_memory", deadline_s=10)
    assert failure.value.chance and child.pid is None


def test_the_last_line_of_a_dead_process_is_told(child):
    with pytest.raises(Failure, match="exited with 7: LLVM ERROR: unreachable"):
        child.call("exit_with_a_word", deadline_s=10)


def test_a_users_mistake_arrives_as_itself_and_our_own_as_a_traceback(child):
    with pytest.raises(DeviceError, match="no such GPU"):
        child.call("refuse", deadline_s=10)
    with pytest.raises(ChildError, match="KeyError: 'missing'"):
        child.call("mistake", deadline_s=10)


def test_a_service_that_cannot_be_made_says_why():
    with pytest.raises(ChildError, match="ValueError: cannot be made"):
        Child(broken_service).call("anything", deadline_s=10)


def test_fifty_failing_candidates_leave_nothing_alive(child):  # case S07
    for _ in range(50):
        with pytest.raises(Failure):
            child.call("fail_with_something_large", deadline_s=10)
    assert child.call("large_things_alive", deadline_s=10) == 0


def test_a_deadline_kills_what_the_process_started_too(child):
    grandchild = child.call("start_a_process", deadline_s=10)
    with pytest.raises(Failure):
        child.call("sleep", deadline_s=0.5)
    assert dies(grandchild)


def test_the_death_of_the_parent_ends_a_busy_child_and_its_compiler(tmp_path):
    told = tmp_path / "pids"
    script = (
        "from pathlib import Path\n"
        "from autoflash.child import Child\n"
        "from child_services import Service\n"
        "child = Child(Service)\n"
        f"told = Path({str(told)!r})\n"
        "pid = child.call('pid', deadline_s=30)\n"
        "told.with_suffix('.child').write_text(str(pid))\n"
        "child.call('start_a_process_and_sleep', told, deadline_s=1000)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment)
    end = time.monotonic() + 30
    while not (told.is_file() and told.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    pids = [int(path.read_text()) for path in (told, told.with_suffix(".child"))]
    assert all(alive(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert all(dies(pid) for pid in pids)


def fake_worker(faults, limit_s=lambda: float("inf")):
    return Worker(machine(faults).device, SHORT, limit_s)


def test_a_new_process_gets_the_problem_and_the_armed_configs_of_the_dead_one():
    worker = fake_worker({BAD: "abort@sample"})
    worker.prepare(PROBLEM, 0)
    for config in (GOOD, BAD, ALSO_GOOD):
        worker.arm(config, PACE)
    [((before,), _)] = worker.sample([[GOOD]])
    with pytest.raises(Failure, match="SIGABRT"):
        worker.sample([[BAD]])
    worker.sample([[ALSO_GOOD]])  # the fake refuses what is not armed
    [((after,), _)] = worker.sample([[GOOD]])
    worker.close()
    assert worker.starts == 2 and abs(before - after) < 1


def test_a_call_whose_process_was_killed_from_outside_is_made_once_more(tmp_path):
    worker = fake_worker({BAD: f"killed once {tmp_path / 'once'}@sample"})
    worker.prepare(PROBLEM, 0)
    for config in (GOOD, BAD):
        worker.arm(config, PACE)
    ((taken, braked),) = worker.sample([[BAD, GOOD]])
    assert min(taken) > 0 and not braked
    worker.close()
    assert worker.starts == 2


@pytest.mark.parametrize("fault", ["abort", "hang", "out_of_bounds"])
def test_who_is_screened_is_not_to_blame_for_who_is_made_ready_meanwhile(fault):
    worker = fake_worker({BAD: f"{fault}@ahead"})
    worker.prepare(PROBLEM, 0)
    assert worker.screen(GOOD, 3, 1e5, 1e9, ahead=[BAD]).samples_us
    assert worker.starts == 2
    worker.close()


def test_what_was_promised_of_one_problem_is_asked_anew_of_the_next():
    worker = fake_worker({})
    worker.prepare(PROBLEM, 0)
    worker.screen(GOOD, 3, 1e5, 0.001, ahead=[ALSO_GOOD], go_on=True)  # none is as fast there
    worker.prepare(replace(PROBLEM, batch=2), 0)
    assert not worker.screen(ALSO_GOOD, 3, 1e5, 1e9).dropped
    worker.close()


def test_who_fails_by_itself_fails_whoever_is_made_ready_meanwhile():
    worker = fake_worker({BAD: "abort@screen", ALSO_GOOD: "raise@screen"})
    worker.prepare(PROBLEM, 0)
    with pytest.raises(Failure, match="SIGABRT"):
        worker.screen(BAD, 3, 1e5, 1e9, ahead=[GOOD])
    before = worker.starts
    with pytest.raises(Failure, match="planted"):
        worker.screen(ALSO_GOOD, 3, 1e5, 1e9, ahead=[GOOD])
    worker.close()
    assert worker.starts == before + 1  # it died with the last try and started again since


def test_a_worker_screens_the_next_one_while_its_last_answer_is_read():
    worker = fake_worker({BAD: "abort@screen"})
    worker.prepare(PROBLEM, 0)
    alone = {c: worker.screen(c, 3, 1e5, 1e9).samples_us for c in (GOOD, ALSO_GOOD)}
    assert worker.screen(GOOD, 3, 1e5, 1e9, [ALSO_GOOD, BAD], True).samples_us == alone[GOOD]
    assert worker.screen(ALSO_GOOD, 3, 1e5, 1e9, [BAD], True).samples_us == alone[ALSO_GOOD]
    with pytest.raises(Failure, match="SIGABRT"):
        worker.screen(BAD, 3, 1e5, 1e9)
    assert worker.screen(GOOD, 3, 1e5, 1e9, [BAD], True).samples_us == alone[GOOD]
    worker.prepare(PROBLEM, 0)  # another than the process went on with
    assert worker.screen(ALSO_GOOD, 3, 1e5, 1e9).samples_us == alone[ALSO_GOOD]
    worker.close()
    assert worker.starts == 3


def test_who_kills_its_process_in_a_round_is_found_out():
    worker = fake_worker({BAD: "abort@sample"})
    worker.prepare(PROBLEM, 0)
    for config in (GOOD, BAD, ALSO_GOOD):
        worker.arm(config, PACE)
    rows, failed = rounds_of(worker, [[GOOD, BAD, ALSO_GOOD]] * 2, PACE)
    assert [set(row) for row in rows] == [{GOOD, ALSO_GOOD}] and set(failed) == {BAD}
    assert "SIGABRT" in failed[BAD].reason
    rows, failed = rounds_of(worker, [[ALSO_GOOD, GOOD]] * 2, PACE)
    worker.close()
    assert [set(row) for row in rows] == [{GOOD, ALSO_GOOD}] * 2 and not failed


def test_a_worker_killed_while_it_waits_is_started_again():
    worker = fake_worker({})
    worker.hello()
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.check(PROBLEM, GOOD, 0).correct
    worker.close()


def test_a_candidate_whose_process_is_killed_twice_is_told_so():
    worker = fake_worker({BAD: "killed"})
    with pytest.raises(Failure, match=r"^runtime: killed from outside: its process got SIGKILL"):
        worker.check(PROBLEM, BAD, 0)
    worker.close()
    assert worker.starts == 2


def test_after_an_illegal_access_the_next_candidate_finds_a_working_device():
    worker = fake_worker({BAD: "out_of_bounds"})
    with pytest.raises(Failure, match="illegal memory access"):
        worker.check(PROBLEM, BAD, 0)
    assert worker.check(PROBLEM, GOOD, 0).correct
    worker.close()
    assert worker.starts == 2


def test_a_limit_reached_in_a_call_is_no_fault_of_the_candidate():
    end = time.monotonic() + 30
    worker = fake_worker({BAD: "hang"}, lambda: end - time.monotonic())
    worker.hello()
    end = time.monotonic() + 0.5
    with pytest.raises(LimitReached):
        worker.check(PROBLEM, BAD, 0)
    with pytest.raises(LimitReached):
        worker.check(PROBLEM, GOOD, 0)  # nothing is begun any more
    worker.close()
