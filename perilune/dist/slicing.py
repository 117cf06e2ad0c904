"""Which part of a model a rank holds.

Tensor parallel (Megatron-LM): attention by heads, MLPs and experts by their intermediate width, embedding and lm_head
by rows of the vocabulary. Expert parallel instead gives each rank whole routed experts; all else stays tensor parallel.
"""

from dataclasses import dataclass

from perilune.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Slicing:
    """Rank `rank` of `ranks`. ConfigError if there is no such rank."""

    rank: int = 0
    ranks: int = 1
    whole_experts: bool = False  # expert parallel: experts E * rank // ranks up to E * (rank + 1) // ranks, excluded

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ConfigError(f"rank {self.rank} of {self.ranks}: ranks count from 0")

    def part(self, size: int) -> slice:
        """This rank's part of `size` equal units, such as heads or rows. ConfigError if they cannot be divided
        evenly."""
        if size % self.ranks:
            raise ConfigError(f"{size} units cannot be split evenly over {self.ranks} ranks")
        own = size // self.ranks
        return slice(self.rank * own, (self.rank + 1) * own)

    def experts(self, count: int) -> slice:
        """This rank's of `count` routed experts, with `whole_experts`. ConfigError if a rank would have none."""
        if self.ranks > count:
            raise ConfigError(f"{count} experts cannot be shared out over {self.ranks} ranks: run fewer ranks")
        return slice(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)


WHOLE = Slicing()
