"""Scores the loss of each chain of known answers by the trainer's own forward pass, all chains at once."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from perilune.core.errors import ConfigError
from perilune.draft.batch import Batch
from perilune.draft.capture import Capture
from perilune.draft.collect import LEAST_ANSWER
from perilune.draft.corpus import Row
from perilune.draft.trainee import Trainee
from perilune.loading.eagle3 import read_tensors
from perilune.model.eagle3_config import Eagle3Config
from perilune.model.kimi_k2 import KimiK2
from perilune.model.names import DRAFT_HEAD


def reopen(draft: Path, model: KimiK2) -> Trainee:
    """Loads the draft of a directory as a Trainee, on the device of its target `model`."""
    config, tensors, head = Eagle3Config.from_directory(draft), read_tensors(draft), model.weights.lm_head
    if head.format != "dense":
        raise ConfigError("mining needs the target's lm_head as floating-point numbers: load it with rest_dtype=dtype")
    vocabulary = None
    if config.draft_vocab_size != config.vocab_size:
        vocabulary = (tensors["d2t"].long() + torch.arange(config.draft_vocab_size)).tolist()
    return Trainee(
        config,
        model.weights.embed,
        head.weight,
        seed=0,
        vocabulary=vocabulary,
        own_head=DRAFT_HEAD in tensors,
        start=tensors,
    )


def score(
    trainee: Trainee,
    capture: Capture,
    rows: Sequence[Row],
    length: int,
    *,
    chains: int = 16384,
    advance: Callable[[int], None] = lambda rows: None,
) -> list[tuple[float, ...]]:
    """For each row, the losses of its chains of `length`, as mine.Scored.lost; () if an answer is too short.

    A chain's loss is the number of leading tokens of the text that are the target's likeliest, minus the number that
    the draft gets right. At least 0: if the draft gets more right, which needs temperature 1, that is by chance.
    """
    found: list[tuple[float, ...]] = [()] * len(rows)
    usable = [i for i, row in enumerate(rows) if row.given and len(row.ids) - row.given >= LEAST_ANSWER]
    usable.sort(key=lambda i: len(rows[i].ids))  # less padding
    for numbers in _parts(usable, rows, capture, chains):
        some = [rows[i] for i in numbers]
        lost = _lost(trainee, capture, some, length).tolist()
        begin = 0
        for i, row in zip(numbers, some):
            end = begin + len(row.ids) - row.given - 1
            found[i] = tuple(lost[begin:end])
            begin = end
        advance(len(some))
    return found


def _parts(usable: Sequence[int], rows: Sequence[Row], capture: Capture, chains: int) -> Iterator[list[int]]:
    """Parts of `usable`: each has about `chains` chains and fits one capture."""
    begin = 0
    while begin < len(usable):
        fit = capture.rows_that_fit([len(rows[i].ids) for i in usable[begin : begin + chains]])
        end, count = begin, 0
        while end < len(usable) and end - begin < max(fit, 1) and count < chains:
            count += len(rows[usable[end]].ids) - rows[usable[end]].given - 1
            end += 1
        yield list(usable[begin:end])
        begin = end


@torch.no_grad()
def _lost(trainee: Trainee, capture: Capture, rows: Sequence[Row], length: int) -> Tensor:
    """[M] the tokens that each chain loses."""
    captured = capture([row.ids for row in rows])
    batch = Batch.of(rows, captured.aux.device)
    likeliest = F.linear(captured.hidden[batch.taught], trainee.head).argmax(-1)
    following = batch.tokens.roll(-1)
    accepted = reachable = torch.ones_like(batch.begin, dtype=torch.bool)
    lost = torch.zeros_like(batch.begin)
    with torch.autocast(captured.aux.device.type, torch.bfloat16, enabled=captured.aux.is_cuda):
        for step in trainee.unrolled(batch, captured.aux, length):
            truth = following[step.token]
            accepted = accepted & (step.valid > 0) & (trainee.likeliest(step.logits) == truth)
            reachable = reachable & (step.valid > 0) & (likeliest[batch.lesson[step.token]] == truth)
            lost += reachable.long() - accepted.long()
    return lost.clamp_min(0)
