"""Which part of each tensor a rank of several holds."""

from pathlib import Path

from perilune.core.errors import ConfigError
from perilune.dist.slicing import Slicing
from perilune.model import names
from perilune.model.config import KimiConfig

MAX_RANKS = 8  # the largest number of ranks that an error proposes

# Names, for errors, of what is split over ranks, by the first letter of the dimension in `names.Entry.shape`.
_UNITS = {"H": "heads", "I": "width of the MLPs or experts", "V": "tokens of the vocabulary"}


def own_cuts(config: KimiConfig, s: Slicing, path: Path) -> dict[str, tuple[slice, ...]]:
    """The region that a rank holds of every tensor that is split; linear layers by their names without ".weight".
    ConfigError if a tensor cannot be split evenly."""
    split = [t for t in names.tensors(config) if t.entry.axis is not None]
    if s.whole_experts:
        split = [t for t in split if names.ROUTED not in t.name]
    if uneven := [t for t in split if t.units % s.ranks]:
        least = min(uneven, key=lambda t: t.units)
        what = _UNITS[least.entry.shape.split()[least.entry.axis or 0][0]]
        fitting = [str(n) for n in range(1, MAX_RANKS + 1) if all(t.units % n == 0 for t in split)]
        numbers = " or ".join(filter(None, (", ".join(fitting[:-1]), fitting[-1])))
        raise ConfigError(
            f"{'ep' if s.whole_experts else 'tp'}={s.ranks}: {path.name}'s {least.units} {what} cannot be shared out "
            f"evenly over {s.ranks} ranks: give {numbers}"
        )
    return {t.name.removesuffix(".weight") if t.entry.linear else t.name: t.part(s.rank, s.ranks) for t in split}
