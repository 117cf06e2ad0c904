"""Texts of people, learnt as plain text, from which a model learns what words mean: the tales of FairytaleQA, GSM8K's
training problems with their solutions, the dialogues of Schema-Guided Dialogue's training split, those of Taskmaster-4
(google-research-datasets/Taskmaster, CC BY 4.0), the stories of the African Storybook that are CC BY
(global-asp/asp-source), and tasks of P3 in the sample of yizhongw/self-instruct (Apache 2.0), of the data sets in P3.

Records: {"source", "plain"}.
"""

import csv
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from runs.kimi_nano.written.questions import FAIRYTALES
from runs.kimi_nano.written.stories import GSM8K
from runs.kimi_nano.written.utterances import DIALOGUES

ORDERS, STORYBOOK, TASKS = "Taskmaster", "asp-source", "self-instruct"
# Data sets under MIT, CC BY, CC BY-SA or Apache 2.0: these licences allow training on the texts.
P3: Final = (
    "adversarial_qa_dbert", "adversarial_qa_dbidaf", "adversarial_qa_droberta", "common_gen", "commonsense_qa",
    "cosmos_qa", "dbpedia_14", "duorc_ParaphraseRC", "duorc_SelfRC", "kilt_tasks_hotpotqa", "qasc", "quarel", "quartz",
    "quoref", "ropes", "social_i_qa", "wiki_bio", "wiki_hop_original", "wiqa",
)  # fmt: skip
LONGEST: Final = 4000  # characters of a task of P3


def read(root: Path) -> Iterator[dict[str, Any]]:
    """The texts of the repositories that are there."""
    for source, found in (
        (FAIRYTALES, _tales(root)), (GSM8K, _solutions(root)), (DIALOGUES, _dialogues(root)), (ORDERS, _orders(root)),
        (STORYBOOK, _storybook(root)), (TASKS, _tasks(root)),
    ):  # fmt: skip
        for text in dict.fromkeys(found):
            yield {"source": source, "plain": text}


def _tales(root: Path) -> Iterator[str]:
    for file in sorted((root / FAIRYTALES / "data-by-train-split" / "section-stories" / "train").glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            yield "\n".join(row["text"].replace('""', '"').strip('"') for row in csv.DictReader(lines))


def _solutions(root: Path) -> Iterator[str]:
    file = root / GSM8K / "grade_school_math" / "data" / "train.jsonl"
    for line in file.read_text("utf-8").splitlines() if file.is_file() else ():
        given = json.loads(line)
        yield f"{given['question']}\n{re.sub('<<.*?>>', '', given['answer']).replace('####', 'Answer:')}"


def _dialogues(root: Path) -> Iterator[str]:
    for file in sorted((root / DIALOGUES / "train").glob("dialogues_*.json")):
        for dialogue in json.loads(file.read_text("utf-8")):
            yield "\n".join(f"{turn['speaker'].title()}: {turn['utterance']}" for turn in dialogue["turns"])


def _orders(root: Path) -> Iterator[str]:
    for file in sorted((root / ORDERS / "TM-4-2024" / "data").glob("data_*.json")):
        for dialogue in json.loads(file.read_text("utf-8")):
            yield "\n".join(f"{said['speaker'].title()}: {said['text']}" for said in dialogue["utterances"])


def _storybook(root: Path) -> Iterator[str]:
    for file in sorted((root / STORYBOOK / "en").glob("*.md")):
        text = file.read_text("utf-8")
        if re.search(r"^\* License: \[CC-BY\]", text, re.MULTILINE):
            pages = re.split(r"^##$", re.sub(r"^(# |\* .*)", "", text, flags=re.MULTILINE), flags=re.MULTILINE)
            yield "\n".join(filter(None, (" ".join(page.split()) for page in pages)))


def _tasks(root: Path) -> Iterator[str]:
    """Each row of a data set in one of its wordings: all wordings have the same rows."""
    folder = root / TASKS / "data" / "finetuning" / "t0_train_50k" / "data_per_template"
    for name in P3:
        files = [f.read_text("utf-8").splitlines() for f in sorted(folder.glob(f"{name}_*.jsonl"))]
        for i, row in enumerate(zip_longest(*files)):
            if line := row[i % len(files)]:
                task = json.loads(line)
                text = f"{task['prompt'].strip()}\n{task['completion'].removesuffix('<|endoftext|>').strip()}"
                if len(text) <= LONGEST:
                    yield text
