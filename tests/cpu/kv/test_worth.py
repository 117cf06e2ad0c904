"""Restore or compute, by what both took."""

import pytest

from perilune.kv.tiers import DISK, HOST
from perilune.kv.worth import RETRY_AFTER_RESTORES, TRUSTED_MEASUREMENTS, Worth


def measured(compute: float, host: float, disk: float) -> Worth:
    worth = Worth()
    for _ in range(TRUSTED_MEASUREMENTS):
        worth.computed(10, 10 * compute)
        worth.restored(10, 0, 10 * host)
        worth.restored(10, 10, 10 * (host + disk))
    return worth


def test_what_is_not_measured_is_tried() -> None:
    assert Worth().beginning([HOST, DISK]) == 2
    worth = Worth()
    worth.computed(1, 1.0)
    worth.restored(1, 0, 100.0)
    assert worth.pays(HOST), "one measurement is no reason"
    for _ in range(TRUSTED_MEASUREMENTS):
        worth.restored(1, 0, 100.0)
    assert worth.pays(HOST), "computing was measured once"


def test_a_slow_disk_is_left_alone_and_host_memory_is_not() -> None:
    worth = measured(compute=1.0, host=0.01, disk=3.0)
    assert worth.pays(HOST) and not worth.pays(DISK)
    assert worth.beginning([HOST, HOST, DISK, HOST]) == 2
    assert worth.beginning([DISK]) == 0


def test_a_refused_tier_is_tried_again_now_and_then() -> None:
    worth = measured(compute=1.0, host=0.01, disk=3.0)
    tried = [worth.beginning([DISK]) for _ in range(3 * RETRY_AFTER_RESTORES)]
    assert sum(tried) == 3
    for _ in range(9):
        worth.restored(0, 1, 0.1)
    assert worth.pays(DISK), "the disk has become quick"


def test_one_outlier_changes_nothing() -> None:
    worth = measured(compute=1.0, host=0.01, disk=0.1)
    worth.restored(1, 0, 50.0)
    worth.computed(1, 1e-9)
    assert worth.pays(HOST) and worth.pays(DISK)


def test_seconds_saved_are_those_of_computing_less_those_of_the_restore() -> None:
    worth = Worth()
    worth.restored(10, 0, 1.0)
    assert worth.saved_seconds == 0.0, "nothing is known of computing"
    worth.computed(4, 2.0)
    worth.restored(10, 0, 1.0)
    assert worth.saved_seconds == pytest.approx(4.0)
    assert [*worth.tiers[HOST].latest] == [0.1, 0.1]
