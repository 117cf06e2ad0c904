"""Questions of people about fairy tales: the training split of FairytaleQA (uci-soe/FairytaleQAData, Apache 2.0), where
the answer occurs in the tale word for word and only once. Questions about single sentences of encyclopedia and news in
QAMR (julianmichael/qamr, MIT) with the same answer by two people; other sentences surround the sentence. Questions
of XQuAD in English (google-deepmind/xquad, CC BY-SA 4.0: 240 paragraphs of encyclopedia, 1,190 questions).

Records: {"family", "source", "text", "question", "first", "end"}: some sentences around the answer, and where in the
text the answer is. A problem shows the sentence with the answer and some of those beside it.
"""

import csv
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

from perilune.tasks.problem import Problem, Reply, pick, user
from perilune.tasks.wordings import careless, phrase
from runs.kimi_nano.written.utterances import PLACED

FAIRYTALES, SENTENCES, ARTICLES = "FairytaleQAData", "qamr", "xquad"
MOST_ASKED = 10  # questions about a sentence
MOST_WORDS = 9  # words of an answer
AROUND = 4  # sentences kept before and after the answer's
LONGEST = 900  # characters of these sentences together
_END: Final = re.compile(r"(?<=[.!?])[\"']*\s+(?=[\"']?[A-Z])")


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The records of the repositories that are there."""
    yield from _of_tales(root)
    yield from _of_sentences(root / SENTENCES / "data")
    yield from _of_articles(root / ARTICLES / "xquad.en.json")


_LATIN: Final = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "``": '"', "''": '"', "`": "'", "--": "-"}


def _written(tokens: list[str]) -> tuple[str, list[int], list[int]]:
    """The sentence as people write it, and where each of its tokens begins and ends."""
    text, begins, ends, open_, glued = "", [], [], False, True
    for token in tokens:
        shown = _LATIN.get(token, token)
        quote = shown == '"'
        tight = re.fullmatch(r"[.,;:?!%)\]]|n't|'\w{1,2}|'", shown) is not None and token != "`"
        text += "" if glued or tight or (quote and open_) else " "
        begins.append(len(text))
        text += shown
        ends.append(len(text))
        glued = shown in ("(", "[", "$") or token == "`" or (quote and not open_)
        open_ ^= quote
    return text, begins, ends


def _of_sentences(data: Path) -> Iterator[dict[str, Any]]:
    if not (data / "wiki-sentences.tsv").is_file():
        return
    known = dict(line.split("\t") for line in (data / "wiki-sentences.tsv").read_text("utf-8").splitlines())
    articles: dict[str, list[str]] = {}
    for name in known:
        articles.setdefault(name.rsplit(":", 2)[0], []).append(name)
    rng, names = Random(SENTENCES), list(known)
    asked: dict[str, dict[tuple[int, int], str]] = {}
    for row in [r for split in ("dev", "test") for r in (data / "filtered" / f"{split}.tsv").read_text().splitlines()]:
        name, _, _, _, _, question, *given = row.split("\t")
        answers = [g.rpartition(":")[2] for g in given]
        spans = [(int(found[0]), int(found[-1])) for a in answers if (found := a.split())]
        inner = [s for s in spans if s[0] <= spans[0][0] and spans[0][1] <= s[1]]
        widest = max(inner, key=lambda s: s[1] - s[0], default=None)
        if len(inner) > 1 and widest and widest[1] - widest[0] < MOST_WORDS and len(question.split()) > 3:
            asked.setdefault(name, {}).setdefault(widest, _written(question.split())[0])
    for name, spans_asked in sorted(asked.items()):
        text, begins, ends = _written(known[name].split())
        near = [n for n in articles[name.rsplit(":", 2)[0]] if n != name]
        chosen = sorted(spans_asked.items(), key=lambda item: -len(item[1]))[:MOST_ASKED]
        for (first, last), question in chosen if len(text) < LONGEST // 2 else ():
            answer = text[begins[first] : ends[last]]
            if len(re.findall(rf"(?<!\w){re.escape(answer)}(?!\w)", text)) != 1 or "{" in text + question:
                continue
            around = [_written(known[n].split())[0] for n in (*near[:2], *rng.sample(names, 4))][
                : 1 + int(rng.random() * 4)
            ]
            cut = int(rng.random() * (len(around) + 1))
            before = "".join([s + " " for s in around[:cut] if answer.lower() not in s.lower()])
            after = "".join([" " + s for s in around[cut:] if answer.lower() not in s.lower()])
            if "{" not in before + after:
                yield {"family": "doc_questions", "source": SENTENCES, "text": before + text + after,
                       "question": question[:1].upper() + question[1:],
                       "first": len(before) + begins[first], "end": len(before) + ends[last]}  # fmt: skip


def _of_tales(root: Path) -> Iterator[dict[str, Any]]:
    data = root / FAIRYTALES / "data-by-train-split"
    for file in sorted((data / "questions" / "train").glob("*-questions.csv")):
        tale = data / "section-stories" / "train" / file.name.replace("-questions", "-story")
        sections = {row["section"]: " ".join(row["text"].split()) for row in _rows(tale)}
        for row in _rows(file):
            text, answer = sections.get(row["cor_section"], ""), " ".join(row["answer1"].split()).strip(" .")
            if row["ex-or-im1"] != "explicit" or not answer or len(answer.split()) > MOST_WORDS or "{" in text:
                continue
            yield from _of_answer(FAIRYTALES, text, row["question"], answer)


def _of_articles(file: Path) -> Iterator[dict[str, Any]]:
    for article in json.loads(file.read_text("utf-8"))["data"] if file.is_file() else ():
        for part in article["paragraphs"]:
            text = " ".join(part["context"].split())
            for asked in part["qas"] if "{" not in text else ():
                answer = " ".join(asked["answers"][0]["text"].split())
                if len(answer.split()) <= MOST_WORDS:
                    yield from _of_answer(ARTICLES, text, asked["question"], answer)


def _of_answer(source: str, text: str, question: str, answer: str) -> Iterator[dict[str, Any]]:
    """The record of a question if its answer occurs once in the text."""
    found = list(re.finditer(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE))
    question = " ".join(question.split()).replace(" ?", "?")
    if len(found) == 1 and "{" not in question:
        part, first = _around(text, found[0].start(), found[0].end())
        if len(part) <= LONGEST:
            yield {"family": "doc_questions", "source": source, "text": part,
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
    key = ("written", record["source"], record["question"], shown)
    return Problem("doc_questions", "train", key, (user(prompt),), Reply(f"{answer}\n{sentence}", answer))
