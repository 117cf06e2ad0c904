"""Shared by tests on several GPUs: what hangs, a test or its fixtures, shows where this process waits."""

import faulthandler
import os
from collections.abc import Iterator

import pytest

HANGING_SECONDS = 30.0
_errors = os.dup(2)  # pytest captures the other one


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    faulthandler.dump_traceback_later(HANGING_SECONDS, file=_errors)
    yield
    faulthandler.cancel_dump_traceback_later()
