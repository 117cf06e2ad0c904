"""What is compared when kimi-nano's drafter is mined for. Nothing heavy is imported: every process reads this."""

from dataclasses import dataclass
from pathlib import Path

BASE = "mixture"
WAYS = ("mined", "domains")
LENGTH = 3  # of the chains that are compared
Measured = dict[str, list[tuple[int, int]]]  # by temperature, (tokens, cycles) of each text


@dataclass(frozen=True, slots=True)
class Mining:
    """`share` of the taught tokens are windows; the rest as mine.Rule."""

    share: float
    focus: float
    balance: float


@dataclass(frozen=True, slots=True)
class Job:
    """A draft, of `begin` steps or the bundled one if 0, and ways to go on with it for `steps` steps."""

    answers: Path
    out: Path
    device: str
    seed: int
    begin: int
    steps: int
    chains: int
    rate: float

    @property
    def directory(self) -> Path:
        return self.out / f"begin-{self.begin}-seed-{self.seed}"

    def way(self, way: str, mining: Mining) -> Path:
        return self.directory / f"{way}-{mining.share:g}-{mining.focus:g}-{mining.balance:g}"
