"""The vocabulary of a draft: the most frequent tokens of the answers that it learns from."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from perilune.core.errors import ConfigError
from perilune.draft.corpus import Row


def most_frequent(rows: Iterable[Row], size: int, vocabulary: int) -> tuple[int, ...]:
    """The `size` tokens most often drafted in `rows`, by weight, ascending; ties go to the lower id."""
    if not 0 < size <= vocabulary:
        raise ConfigError(f"a draft's vocabulary must have 1 to {vocabulary} tokens, not {size}")
    counts = np.zeros(vocabulary)
    for row in rows:
        np.add.at(counts, np.asarray(row.ids[row.given + 1 :], np.int64), row.weight)
    chosen = np.argsort(-counts, kind="stable")[:size]
    return tuple(sorted(chosen.tolist()))


def mapping(ids: Tensor, vocabulary: int) -> dict[str, Tensor]:
    """A checkpoint's d2t int64 [draft] (target id minus draft id) and t2d bool [vocabulary]; `ids` ascend."""
    ids = ids.cpu()
    return {
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True),
    }
