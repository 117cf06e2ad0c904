"""Letters beyond ASCII in problems of the training."""

import random
import re

from perilune.tasks.families import FAMILIES, check
from perilune.tasks.letters import accented, beyond_ascii
from perilune.tasks.problem import answer_of


def test_problems_beyond_ascii_stay_right() -> None:
    rng = random.Random(3)
    changed = 0
    for name, family in FAMILIES.items():
        for _ in range(80):
            before = family.sample(rng, "train", True)
            made = beyond_ascii(rng, before)
            assert made.key == before.key and made.tools == before.tools
            assert check(made, answer_of(made.reply)), made
            prompt = "\n".join(str(m) for m in made.messages)
            for word in re.findall(r"\w*[^\x00-\x7f\W]\w*", made.reply.content):
                assert word in prompt, (word, made)
            changed += made != before
            assert name != "programs" or made == before
    assert changed > 150


def test_accents_keep_a_words_length() -> None:
    rng = random.Random(4)
    for word in ("Tromso", "Ozturk", "Zoe", "bdf"):
        made = accented(rng, word)
        assert len(made) == len(word) and (made != word) == (word != "bdf")
