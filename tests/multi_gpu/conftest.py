"""Shared by tests on several GPUs: a test that hangs shows where this process waits before the time is over."""

import faulthandler
import os
from collections.abc import Iterator

import pytest

HANGING_SECONDS = 30.0
_errors = os.dup(2)  # pytest captures the other one


@pytest.fixture(autouse=True)
def stacks_of_a_hanging_test() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANGING_SECONDS, file=_errors)
    yield
    faulthandler.cancel_dump_traceback_later()
