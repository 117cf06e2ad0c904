"""Records of all kinds in one file, and the problems drawn from them.

A line of the file (JSON lines, xz) is [kind, record]: `kind` is the module that wrote the record, `record` an object
with "family" and "source", with "table", a name under which the records of that kind refer to it, or with "plain", a
text that is learnt as it is.
"""

import json
import lzma
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any, Final

from perilune.tasks.calls import distinct
from perilune.tasks.families import Family
from perilune.tasks.problem import Problem
from runs.kimi_nano.written import functions, intents, prose, questions, statements, stories, utterances

KINDS: Final[Mapping[str, ModuleType]] = {
    "stories": stories, "utterances": utterances, "questions": questions, "statements": statements, "prose": prose,
    "functions": functions,
}  # fmt: skip
FILE: Final = "written.jsonl.xz"
# Source: what it is, its licence.
SOURCES: Final[Mapping[str, tuple[str, str]]] = {
    stories.GSM8K: ("[GSM8K](https://github.com/openai/grade-school-math)'s training problems", "MIT"),
    stories.MAWPS: (
        "[MAWPS](https://github.com/sroy9/mawps), a training fold of it in "
        "[SVAMP](https://github.com/arkilpatel/SVAMP)'s repository",
        "MIT",
    ),
    questions.FAIRYTALES: (
        "the training split of [FairytaleQA](https://github.com/uci-soe/FairytaleQAData)",
        "Apache 2.0",
    ),
    questions.SENTENCES: ("[QAMR](https://github.com/julianmichael/qamr)'s questions about sentences", "MIT"),
    questions.ARTICLES: ("[XQuAD](https://github.com/google-deepmind/xquad)'s English questions", "CC BY-SA 4.0"),
    statements.PLACES: ("part of [E2E](https://github.com/tuetschek/e2e-dataset)", "CC BY-SA 4.0"),
    intents.CLINC: ("[CLINC150](https://github.com/clinc/oos-eval) requests", "CC BY 3.0"),
    utterances.TABLES: ("[Restaurant8k](https://github.com/PolyAI-LDN/task-specific-datasets)", "CC BY 4.0"),
    utterances.SNIPS: ("[SNIPS](https://github.com/sonos/nlu-benchmark) voice commands", "CC0"),
    utterances.HOME: ("[requests to a robot at home](https://github.com/xliuhw/NLU-Evaluation-Data)", "CC BY 4.0"),
    prose.ORDERS: (
        "[Taskmaster-4](https://github.com/google-research-datasets/Taskmaster)'s dialogues",
        "CC BY 4.0",
    ),
    prose.STORYBOOK: ("stories of the [African Storybook](https://github.com/global-asp/asp-source)", "CC BY"),
    prose.TASKS: (
        "tasks of P3 in [Self-Instruct](https://github.com/yizhongw/self-instruct)'s sample, of sets under MIT, CC BY "
        "or CC BY-SA",
        "Apache 2.0",
    ),
    functions.FUNCTIONS: (
        "requests of the [Berkeley Function Calling Leaderboard](https://github.com/ShishirPatil/gorilla)",
        "Apache 2.0",
    ),
    utterances.DIALOGUES: (
        "the training split of [Schema-Guided Dialogue](https://github.com/google-research-datasets/"
        "dstc8-schema-guided-dialogue)",
        "CC BY-SA 4.0",
    ),
}
# Share of a family's training problems that are written ones, where there are at least ENOUGH records: fewer are drawn
# in proportion, so that none is seen too often.
SHARE: Final = 0.4
ENOUGH: Final = 8000
EVENING: Final = 0.5  # a source of n records is drawn with weight n ** EVENING: large sources do not hide small ones


def write(root: Path, path: Path) -> Counter[str]:
    """Reads all kinds below `root` into the file `path`, written whole; the number of records by kind and source."""
    counts: Counter[str] = Counter()
    partial = path.with_name(f".{path.name}")
    with lzma.open(partial, "wt", preset=6) as file:
        for kind, module in KINDS.items():
            for record in module.read(root):
                file.write(json.dumps([kind, record], separators=(",", ":"), ensure_ascii=False) + "\n")
                counts[f"{kind}: {record.get('source', 'tables')}"] += 1
    partial.replace(path)
    return counts


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, record) of every line."""
    with lzma.open(path, "rt") as file:
        for line in file:
            kind, record = json.loads(line)
            yield kind, record


def plain(records: Iterable[tuple[str, dict[str, Any]]]) -> list[tuple[str, str]]:
    """(source, text) of the texts among the records."""
    return [(record["source"], record["plain"]) for _, record in records if "plain" in record]


class Written:
    """Problems of one file, by family."""

    def __init__(self, records: Iterable[tuple[str, dict[str, Any]]]) -> None:
        self._tables: dict[str, dict[str, Any]] = defaultdict(dict)
        found: dict[str, dict[str, list[tuple[str, dict[str, Any]]]]] = defaultdict(lambda: defaultdict(list))
        for kind, record in records:
            if "table" in record:
                self._tables[kind][record["table"]] = record
            elif "family" in record:
                found[record["family"]][record["source"]].append((kind, record))
        self._found = {
            family: (list(sources.values()), [len(s) ** EVENING for s in sources.values()])
            for family, sources in found.items()
        }

    def count(self, family: str) -> int:
        return sum(map(len, self._found[family][0])) if family in self._found else 0

    def sources(self) -> dict[str, int]:
        """The number of records of every source."""
        every = (record["source"] for sources, _ in self._found.values() for found in sources for _, record in found)
        return dict(sorted(Counter(every).items()))

    def draw(self, family: str, rng: Random) -> Problem:
        """A problem of a family that has records."""
        sources, weights = self._found[family]
        while True:
            kind, record = rng.choice(rng.choices(sources, weights)[0])
            made: Problem = KINDS[kind].problem(record, rng, self._tables[kind])
            if distinct(made):
                return made

    def mixed(self, families: Mapping[str, Family]) -> dict[str, Family]:
        """The same families; SHARE of the training problems that they draw are written ones."""
        return {name: self._mixed(f) for name, f in families.items()}

    def _mixed(self, family: Family) -> Family:
        share = SHARE * min(1.0, self.count(family.name) / ENOUGH)
        if not share:
            return family
        generated: Callable[[Random, str, bool], Problem] = family.sample

        def sample(rng: Random, split: str, thinking: bool) -> Problem:
            if split != "train" or rng.random() >= share:
                return generated(rng, split, thinking)
            return replace(self.draw(family.name, rng), thinking=thinking)

        return replace(family, sample=sample)
