"""Letters beyond ASCII in problems of the training; thoughts that quote the prompt."""

import random
import re
from itertools import pairwise

from perilune.tasks.families import FAMILIES, check, problems
from perilune.tasks.letters import accented, beyond_ascii
from perilune.tasks.problem import answer_of

NUMBER_LINE = re.compile(r"\d+\. ")


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


def test_a_thought_about_a_call_begins_with_words_of_the_request() -> None:
    for split in ("heldout", "structural", "wide"):
        for p in problems("tool_call", split, 60, thinking=True) + problems("tools_multi", split, 60, thinking=True):
            last = p.messages[-1]
            if last["role"] != "user" or not p.reply.tool_calls:
                continue
            names = [call.name for call in p.reply.tool_calls]
            lines = p.reply.reasoning.split("\n")
            quotes = [NUMBER_LINE.sub("", a, count=1) for a, b in pairwise(lines) if b in names]
            assert len(quotes) == len(names), p
            places = [last["content"].find(quote) for quote in quotes]
            assert -1 not in places, (quotes, last)
            assert places == sorted(places) and len(set(places)) == len(places), (quotes, last)
