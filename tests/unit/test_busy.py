"""Busy: the share of the time that GPUs were at work."""

import time

import pytest
from fake_device import machine
from test_tune import PROBLEM, tried

from autoflash.busy import Busy, busy_share
from autoflash.worker import Worker


def busy(*calls):
    counted = Busy()
    for began, ended in calls:
        counted.add(began, ended)
    return counted


def test_the_share_is_of_the_time_from_the_first_call_to_the_last():
    assert busy_share([busy((10, 12), (13, 14), (18, 20))]) == pytest.approx(0.5)


def test_a_gpu_that_waits_for_another_at_the_end_lowers_the_share():
    assert busy_share([busy((0, 10)), busy((0, 5))]) == pytest.approx(0.75)


def test_where_nothing_was_called_there_is_no_share():
    assert busy_share([Busy()]) is None


def test_a_workers_checks_count_and_what_lies_between_its_calls_does_not():
    worker = Worker(machine().device)
    worker.hello()
    assert worker.busy.seconds == 0
    worker.check(PROBLEM, tried()[0], 0)
    time.sleep(0.3)
    worker.check(PROBLEM, tried()[1], 0)
    worker.close()
    assert worker.busy.seconds > 0
    assert busy_share([worker.busy]) < 0.5
