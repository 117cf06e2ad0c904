"""Shared by tests of kimi-nano's training."""

from collections.abc import Iterator

import pytest

from perilune.tasks import words


@pytest.fixture(autouse=True, scope="module")
def words_end_with_a_module() -> Iterator[None]:
    """What a training of these tests learns from passages (`words.learn_words`) is of the process: problems that later
    tests of the process make would be others."""
    before = words._learnt
    yield
    words._learnt = before
