"""Generators of training problems, drawn millions of times: "second to last" of a list of one item failed once in a
million problems, and ended a training on two GPUs."""

import random
import time

import pytest

from perilune.tasks.documents import BUILT_IN
from perilune.tasks.families import FAMILIES, PICTURES, check, learn_words
from perilune.tasks.problem import answer_of
from perilune.tasks.tools import forget_pools

MINUTES = 20.0  # of one core


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words are drawn as in a training process."""
    monkeypatch.setattr("perilune.tasks.words._learnt", ())
    learn_words(BUILT_IN)


def test_no_generator_fails_and_every_reply_is_right(learnt: None, share: float) -> None:
    rng, ends, drawn = random.Random(time.time_ns()), time.monotonic() + 60 * MINUTES * share, 0
    families = [*FAMILIES.values(), *PICTURES.values()]
    while time.monotonic() < ends:
        state = rng.getstate()
        for family in families:
            for _ in range(2 if family.name in PICTURES else 100):
                problem = family.sample(rng, "train", rng.random() < 0.65)
                assert check(problem, answer_of(problem.reply)), (state, problem)
                drawn += 1
    forget_pools()
    print(f"{drawn:,} problems")
