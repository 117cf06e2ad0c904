"""Sentences that people wrote about cells of a table: JSON objects of the cells that a sentence has word for word.

Sources: DART (Yale-LILY/dart, MIT: what its development and test splits say about tables of Wikipedia, nothing from
WebNLG and E2E) and E2E, about places to eat (tuetschek/e2e-dataset, CC BY-SA 4.0: a part of the same splits).

Records: {"family", "source", "text", "marks": [[slot, first, end], ...]}, as those of utterances.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, Final
from xml.etree import ElementTree

from perilune.tasks.problem import Problem
from runs.kimi_nano.written import utterances

TABLES, PLACES = "dart", "e2e-dataset"
EVERY = 5  # sentence about places to eat, which are all alike
MOST_WORDS = 8  # of a value
Cells = list[tuple[str, str]]
# Columns that say little of their own, or more than one thing.
_UNCLEAR: Final = re.compile(
    "notes|source|other|total|re(port|sults?|cord)|change|candidates|time|type|from|status|class.*|.*day.*|manner.*|fam.*"
)
_NAMED: Final = {"eatType": "kind", "priceRange": "price_range", "customer rating": "customer_rating"}
_NUMBER: Final = re.compile(r"[-+]?(0\d+|[\d,]*[,.]\d+|\d{7,})")  # a text, or a number?


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records of the repositories that are there."""
    seen = set()
    for source, text, cells in (*_of_tables(root / TABLES), *_of_places(root / PLACES)):
        marks = _marks(text, cells)
        if len(marks) > 1 and text not in seen and "{" not in text:
            seen.add(text)
            yield {"family": "json_extract", "source": source, "text": text, "marks": marks}


def _of_tables(root: Path) -> Iterator[tuple[str, str, Cells]]:
    for file in sorted(root.glob("data/v1.1.1/*-full-[dt]e*.xml")):
        for entry in ElementTree.parse(file).iter("entry"):
            triples = [str(t.text).split(" | ") for t in entry.iter("mtriple")]
            cells = [(t[1].lower(), t[2]) for t in triples if re.fullmatch("[A-Z]{3,}(_[A-Z]{2,}){,2}", t[1])]
            for said in entry.iter("lex"):
                if said.get("comment", "").startswith("Wiki") and len(dict(cells)) == len(cells):
                    yield TABLES, " ".join(str(said.text).split()), cells


def _of_places(root: Path) -> Iterator[tuple[str, str, Cells]]:
    for file in sorted(root.glob("*set*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            for row in [r for r in csv.DictReader(lines) if "ref" in r][::EVERY]:
                cells = re.findall(r"(\w[\w ]*)\[([^\]]+)\]", row["mr"])
                yield PLACES, " ".join(row["ref"].split()), [(_NAMED.get(s, s), v) for s, v in cells]


def _marks(text: str, cells: Cells) -> list[list[Any]]:
    """Where the cells are in the text; none if two of them overlap."""
    marks = []
    for slot, value in cells:
        found = list(re.finditer(rf"(?<![\w.,-]){re.escape(value)}(?![\w-]|[.,]\d)", text, re.IGNORECASE))
        clear = len(found) == 1 and len(value.split()) <= MOST_WORDS and not _NUMBER.fullmatch(value)
        clear = clear and not _UNCLEAR.fullmatch(slot)
        if clear and value in ("high", "low", "average", "moderate"):  # the prices, or the rating?
            clear = ("rat" if "rating" in slot else "pric") in text[found[0].end() :][:16]
        if clear:
            marks.append([slot, found[0].start(), found[0].end()])
    marks.sort(key=lambda m: int(m[1]))
    return [] if any(a[2] > b[1] for a, b in pairwise(marks)) else marks


def problem(record: dict[str, Any], rng: Random, tables: Mapping[str, Any]) -> Problem:
    """A training problem, often with other names and numbers."""
    return utterances.problem(record, rng, {"values": {"values": {}}})
