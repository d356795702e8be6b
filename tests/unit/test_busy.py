"""Busy: the share of the time that GPUs and their processes were at work."""

import time

import pytest
from fake_device import FakeDevice, machine
from test_tune import PROBLEM, tried

from autoflash.busy import Busy, shares_of
from autoflash.child import Failure
from autoflash.worker import Worker


def busy(*calls, gpu_share=0.5):
    counted = Busy()
    for began, ended in calls:
        counted.add(began, ended, gpu_share * (ended - began))
    return counted


def test_the_share_is_of_the_time_from_the_first_call_to_the_last():
    shares = shares_of([busy((10, 12), (13, 14), (18, 20))])
    assert (shares.processes, shares.gpus) == (pytest.approx(0.5), pytest.approx(0.25))


def test_a_gpu_that_waits_for_another_at_the_end_lowers_the_share():
    shares = shares_of([busy((0, 10)), busy((0, 5), gpu_share=1.0)])
    assert (shares.processes, shares.gpus) == (pytest.approx(0.75), pytest.approx(0.5))


def test_where_nothing_was_called_there_is_no_share():
    assert shares_of([Busy()]) is None


def test_a_workers_checks_count_and_what_lies_between_its_calls_does_not():
    worker = Worker(machine().device)
    worker.hello()
    assert worker.busy.seconds == 0
    worker.check(PROBLEM, tried()[0], 0)
    time.sleep(0.3)
    worker.check(PROBLEM, tried()[1], 0)
    worker.close()
    assert worker.busy.seconds > 0
    shares = shares_of([worker.busy])
    assert 0 < shares.gpus <= shares.processes < 0.5


class Clocked(FakeDevice):
    """One whose GPU works ten seconds for every check, whatever the clock says."""

    def __init__(self, faults=()):
        super().__init__(dict(faults))
        self._worked_s = 3.0  # before the first call

    def gpu_s(self):
        return self._worked_s

    def check(self, problem, config, seed, stage=None):
        self._worked_s += 10.0
        return super().check(problem, config, seed, stage)


def faulty():
    return Clocked({tried()[1]: "raise"})


def test_a_gpus_work_is_what_its_device_says_of_each_call_that_does_not_fail():
    worker = Worker(faulty)
    good, bad = tried()[:2]
    worker.check(PROBLEM, good, 0)
    with pytest.raises(Failure):
        worker.check(PROBLEM, bad, 0)
    worker.check(PROBLEM, good, 0)
    worker.close()
    assert worker.busy.gpu_seconds == 20.0 and worker.busy.seconds < 20
