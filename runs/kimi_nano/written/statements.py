"""Sentences that people wrote about places to eat: JSON objects of the facts that a sentence has word for word.

Source: E2E (tuetschek/e2e-dataset, CC BY-SA 4.0: a part of its development and test splits).

Records: {"family", "source", "text", "marks": [[slot, first, end], ...]}, as those of utterances.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.problem import Problem
from runs.kimi_nano.written import utterances

PLACES = "e2e-dataset"
EVERY = 5  # keep every fifth sentence, because they are all alike
MOST_WORDS = 8  # words of a value
Cells = list[tuple[str, str]]
_NAMED: Final = {"eatType": "kind", "priceRange": "price_range", "customer rating": "customer_rating"}


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records, if the repository is there."""
    seen = set()
    for text, cells in _of_places(root / PLACES):
        marks = _marks(text, cells)
        if len(marks) > 1 and text not in seen and "{" not in text:
            seen.add(text)
            yield {"family": "json_extract", "source": PLACES, "text": text, "marks": marks}


def _of_places(root: Path) -> Iterator[tuple[str, Cells]]:
    for file in sorted(root.glob("*set*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            for row in [r for r in csv.DictReader(lines) if "ref" in r][::EVERY]:
                cells = re.findall(r"(\w[\w ]*)\[([^\]]+)\]", row["mr"])
                yield " ".join(row["ref"].split()), [(_NAMED.get(s, s), v) for s, v in cells]


def _marks(text: str, cells: Cells) -> list[list[Any]]:
    """Where the cells are in the text; none if two of them overlap."""
    marks = []
    for slot, value in cells:
        found = list(re.finditer(rf"(?<![\w.,-]){re.escape(value)}(?![\w-]|[.,]\d)", text, re.IGNORECASE))
        clear = len(found) == 1 and len(value.split()) <= MOST_WORDS
        if clear and value in ("high", "low", "average", "moderate"):  # the prices, or the rating?
            clear = ("rat" if "rating" in slot else "pric") in text[found[0].end() :][:16]
        if clear:
            marks.append([slot, found[0].start(), found[0].end()])
    marks.sort(key=lambda m: int(m[1]))
    return [] if any(a[2] > b[1] for a, b in pairwise(marks)) else marks


def problem(record: dict[str, Any], rng: Random, tables: Mapping[str, Any]) -> Problem:
    """A training problem, often with other names and numbers."""
    return utterances.problem(record, rng, {"values": {"values": {}}})
