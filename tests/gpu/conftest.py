"""Shared by tests on a GPU: an owner of the memory that kernels keep between launches, for ops called by themselves."""

from collections.abc import Iterator

import pytest

from perilune.ops.harness import workspace


@pytest.fixture(autouse=True)
def workspaces() -> Iterator[workspace.Workspaces]:
    with workspace.owned() as owner:
        yield owner
