"""Words to fill problems with. Tuples named NEW_* are kept from training and used in structural problems only.

Made-up words (`made_up`) are in every split: with them a model has to copy what it reads, not recall it.
"""

import re
import tarfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random

from perilune.tasks.problem import pick


def listed(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def lines(name: str) -> str:
    """The text of a file in data/. data.tar.bz2 has them in a third of the bytes; to edit one there:
    `tar xf data.tar.bz2`, then `tar cjf data.tar.bz2 *.txt`."""
    return _texts()[name]


@cache
def _texts() -> dict[str, str]:
    with tarfile.open(Path(__file__).parent / "data/data.tar.bz2") as archive:
        files = [(member.name, archive.extractfile(member)) for member in archive]
        return {name: file.read().decode() for name, file in files if file}


# One list per line of words.txt; of syllables, for `made_up`, from _ONSETS on.
(
    NAMES, WOMEN, NEW_NAMES, SURNAMES, CITIES, OBJECTS, NEW_OBJECTS, CONTAINERS, NOUNS, NEW_NOUNS, ADJECTIVES, PLAIN,
    _ONSETS, _VOWELS, _CODAS, _OPENINGS, _STEMS, _ENDINGS,
) = (tuple(line.split("|")) for line in lines("words.txt").splitlines())  # fmt: skip

_learnt: tuple[str, ...] = ()
_REAL = re.compile(r"[a-z]{4,12}")


def learn(texts: Iterable[str], kept: Iterable[str]) -> int:
    """From now on, in this process, `made_up` also gives words (lowercase runs) of these texts; returns how many.

    For training: copying is learnt from words of every spelling. Words that hold one of `kept` are left out:
    structural problems are made of those.
    """
    global _learnt
    barred = tuple(kept)
    words = sorted({w for text in texts for w in _REAL.findall(text)})
    _learnt = tuple(w for w in words if not any(k in w for k in barred))
    return len(_learnt)


def made_up(rng: Random) -> str:
    """A pronounceable word of two or three syllables that means nothing (but see `learn`)."""
    r = rng.random
    if _learnt and (roll := r()) < 0.7:
        if roll < 0.5:
            return _learnt[int(r() * len(_learnt))]
        return (
            _OPENINGS[int(r() * len(_OPENINGS))]
            + (_STEMS[int(r() * len(_STEMS))] if r() < 0.7 else "")
            + _ENDINGS[int(r() * len(_ENDINGS))]
        )
    word = ""
    for _ in range(2 if r() < 0.6 else 3):
        word += _ONSETS[int(r() * len(_ONSETS))] + _VOWELS[int(r() * len(_VOWELS))]
    return word + _CODAS[int(r() * len(_CODAS))]


def invents_more() -> bool:
    """Whether `learn` was called: names are then made up more often, to learn copying rather than a list of names."""
    return bool(_learnt)


def compound(rng: Random) -> str:
    """A thing in two or three words, e.g. "garden hose": a model must not copy the first word only."""
    words = [any_word(rng), pick(rng, PLAIN)] if rng.random() < 0.8 else [pick(rng, ADJECTIVES), any_word(rng)]
    return " ".join([*words, pick(rng, PLAIN)] if rng.random() < 0.2 else words)


def any_word(rng: Random) -> str:
    roll = rng.random()
    return made_up(rng) if roll < 0.4 else pick(rng, PLAIN) if roll < 0.8 else pick(rng, ADJECTIVES)
