"""Questions of people about fairy tales: the training split of FairytaleQA (uci-soe/FairytaleQAData, Apache 2.0), where
the answer stands in the tale word for word and only once.

Records: {"family", "source", "text", "question", "first", "end"}: some sentences around the answer, and where in the
text the answer is. A problem shows the sentence with the answer and some of those beside it.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.problem import Problem, Reply, pick, user
from perilune.tasks.wordings import careless, phrase
from runs.kimi_nano.written.utterances import PLACED

FAIRYTALES = "FairytaleQAData"
MOST_WORDS = 9  # of an answer
AROUND = 4  # sentences kept before and after
LONGEST = 900  # characters of them
_END: Final = re.compile(r"(?<=[.!?])[\"']*\s+(?=[\"']?[A-Z])")


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records, if the repository is there."""
    data = root / FAIRYTALES / "data-by-train-split"
    for file in sorted((data / "questions" / "train").glob("*-questions.csv")):
        tale = data / "section-stories" / "train" / file.name.replace("-questions", "-story")
        sections = {row["section"]: " ".join(row["text"].split()) for row in _rows(tale)}
        for row in _rows(file):
            text, answer = sections.get(row["cor_section"], ""), " ".join(row["answer1"].split()).strip(" .")
            if row["ex-or-im1"] != "explicit" or not answer or len(answer.split()) > MOST_WORDS or "{" in text:
                continue
            found = list(re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE))
            question = " ".join(row["question"].split()).replace(" ?", "?")
            if len(found) == 1 and "{" not in question:
                part, first = _around(text, found[0].start(), found[0].end())
                if len(part) <= LONGEST:
                    yield {"family": "doc_questions", "source": FAIRYTALES, "text": part,
                           "question": question[:1].upper() + question[1:], "first": first,
                           "end": first + len(answer)}  # fmt: skip


def _rows(file: Path) -> list[dict[str, str]]:
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", errors="replace", newline="") as lines:
        return list(csv.DictReader(lines))


def _bounds(text: str) -> list[int]:
    """Where the sentences of a text begin, and its end."""
    return [0, *[m.end() for m in _END.finditer(text)], len(text)]


def _around(text: str, first: int, end: int) -> tuple[str, int]:
    """The sentences of text[first:end] with some before and after, and where the part begins in them."""
    bounds = _bounds(text)
    one = max(i for i, b in enumerate(bounds) if b <= first)
    last = min(i for i, b in enumerate(bounds) if b >= end)
    begin, stop = bounds[max(0, one - AROUND)], bounds[min(len(bounds) - 1, last + AROUND)]
    while stop - begin > LONGEST and stop > bounds[last]:
        stop = bounds[bounds.index(stop) - 1]
    while stop - begin > LONGEST and begin < bounds[one]:
        begin = bounds[bounds.index(begin) + 1]
    return text[begin:stop].rstrip(), first - begin


def problem(record: dict[str, Any], rng: Random, tables: Mapping[str, Any]) -> Problem:
    """A training problem: as many sentences as are drawn, at least two that lead to the answer."""
    text, first, end = record["text"], record["first"], record["end"]
    bounds, answer = _bounds(text), text[first:end]
    one = max(i for i, b in enumerate(bounds[:-1]) if b <= first)
    last = min(i for i, b in enumerate(bounds) if b >= end)
    begin = bounds[max(0, one - 2 - int(rng.random() * 3))]
    stop = bounds[min(len(bounds) - 1, last + int(rng.random() * 4))]
    shown, sentence = text[begin:stop].strip(), text[bounds[one] : bounds[last]].strip()
    form = phrase(rng, pick(rng, PLACED))
    prompt = form.format(t=shown, q=careless(rng, record["question"]))
    key = ("written", FAIRYTALES, record["question"], shown)
    return Problem("doc_questions", "train", key, (user(prompt),), Reply(f"{answer}\n{sentence}", answer))
