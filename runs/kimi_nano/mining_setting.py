"""What is compared when kimi-nano's drafter is mined for. Nothing heavy is imported: every process reads this.

Settings and expectations were written before the runs. Traffic is a stream of problems: drafts begin on it, go on with
it, and windows are mined from other answers of the same stream, as a server would log them. Two settings:

    rare  doc_questions and programs, which have 6 and 5 % of the tokens that the target was trained on, make about 1 %
          each of the traffic. The drafts begin with 500 steps of it. What traffic rarely has is where a draft is worst.
    even  the traffic is the target's own training mixture; the draft is the bundled one, which is near its capacity.

Expected: in `rare` the worst family gains 10 % or more on the mixture at equal tokens, with 0.3 and with 0.6 mined, and
no family loses 2 % with 0.3; with 0.6 one might. In `even` the worst gains less than 3 %: one seed gave 0.9 and 2.0 %.

Measured: `rare` met the expectation, with 0.6 too (bench/results/mining.jsonl). `even` has not been run completely.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

BASE = "mixture"
WAYS = ("mined", "domains")
LENGTH = 3  # tokens of the chains that are compared
PART = 8000  # answers that one process collects
Measured = list[tuple[int, int]]  # (tokens, cycles) of each held-out text, greedy


@dataclass(frozen=True, slots=True)
class Setting:
    """`weights` of families in the traffic, where they differ from the training mixture; `begin`: steps by which drafts
    are trained first (0: the bundled draft); `steps`: further steps; `mine`: number of answers that are mined."""

    name: str
    weights: tuple[tuple[str, float], ...]
    begin: int
    steps: int
    mine: int


SETTINGS = {
    s.name: s
    for s in (
        Setting("rare", (("doc_questions", 0.01), ("programs", 0.01)), 500, 150, 32000),
        Setting("even", (), 0, 90, 16000),
    )
}


@dataclass(frozen=True, slots=True)
class Mining:
    """`share` of the taught tokens are windows; the rest as mine.Rule."""

    share: float
    focus: float = 2.0
    balance: float = 1.0
    guard: float = 0.5


@dataclass(frozen=True, slots=True)
class Part:
    """Answers that one process collects, to problems that no other part has."""

    directory: Path
    seed: int
    weights: tuple[tuple[str, float], ...]
    rows: int


@dataclass(frozen=True, slots=True)
class Job:
    """A draft and ways to go on with it."""

    setting: Setting
    out: Path
    device: str
    seed: int
    chains: int
    rate: float

    @property
    def directory(self) -> Path:
        return self.out / f"{self.setting.name}-seed-{self.seed}"

    def way(self, way: str, mining: Mining) -> Path:
        return self.directory / f"{way}-{mining.share:g}"

    def answers(self, purpose: str) -> list[Path]:
        return sorted(self.out.glob(f"{self.setting.name}-{purpose}-*"))


def parts(setting: Setting, out: Path, chains: int) -> Iterator[Part]:
    """The answers to begin with (read twice), to go on with (once) and to mine from; an answer has about 58 chains."""
    wanted = {"begin": setting.begin * chains // 116, "more": setting.steps * chains // 55, "mine": setting.mine}
    for purpose, rows in wanted.items():
        for part in range(-(-rows // PART)):
            seed = 1000 * list(SETTINGS).index(setting.name) + 100 * (list(wanted).index(purpose) + 1) + part
            own = min(PART, rows - part * PART)
            yield Part(out / f"{setting.name}-{purpose}-{part}", seed, setting.weights, own)


def take_card(taken: "Synchronized[int]", cards: int) -> None:
    """Called when a process starts, before it uses CUDA: assigns it the next GPU, round robin."""
    with taken.get_lock():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(taken.value % cards)
        taken.value += 1
