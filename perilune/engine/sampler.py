"""Sampling: from logits to tokens and log-probabilities. Logits that are not finite give FAILED, never a token."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from perilune.core.step import Output, Sample, TokenLogprob, Work
from perilune.dist.vocabulary import ONE_RANK, Vocabulary
from perilune.ops.sampling.logprobs import logprobs

LOGIT_BYTES = 64 << 20  # prompt log-probabilities are computed in pieces of at most this many bytes of logits

FAILED = -1  # the token sampled from logits that are not finite

_LOW_64_BITS = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of a request's output token number `index`.

    A hash (splitmix64's finaliser over seed and counter), not a stream: a request gets the same numbers whatever else
    is in the batch, on any device, and again after preemption.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (index + 1) * 0xD1B54A32D192ED03) & _LOW_64_BITS
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _LOW_64_BITS
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _LOW_64_BITS
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def uniforms(seeds: Sequence[int], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """`uniform` of every index: [S, m] for indices [S, m] of requests with these S seeds."""
    z = np.array([s & _LOW_64_BITS for s in seeds], np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15)
    z = z + (indices + 1).astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    for _ in range(2):
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) / (1 << 53)


def on_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """`array` as a tensor on `device`, without waiting for it: one copy, from pinned memory if it is a GPU.

    torch reuses the pinned memory only after the copy is over.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def finite(logits: Tensor) -> Tensor:
    """[S] bool, on the device: the rows that hold neither nan nor infinity. To be called before logits are masked."""
    return torch.isfinite(logits).all(-1)


def sample_tokens(logits: Tensor, samples: Sequence[Sample], vocabulary: Vocabulary = ONE_RANK) -> Tensor:
    """Tokens [S] int64, on the device, for the rows of `logits` [S, V] float32, in which -inf is never chosen; V: this
    rank's columns of `vocabulary`.

    FAILED for a row that holds nan or +inf, or nothing but -inf.

    The host does not wait for the device; sampling parameters and random numbers of all requests go there in one copy.
    """
    if all(s.params.greedy for s in samples):
        return vocabulary.argmax(logits)
    S = len(samples)
    numbers = np.empty(6 * S, np.float32)
    numbers[: 2 * S].view(np.float64)[:] = [uniform(s.seed, s.output_index) for s in samples]
    params = [s.params for s in samples]
    numbers[2 * S : 5 * S].reshape(S, 3, order="F")[:] = [(p.temperature, p.top_p, p.min_p) for p in params]
    numbers[5 * S :].view(np.int32)[:] = [min(p.top_k, 2**31 - 1) for p in params]
    there = on_device(numbers, logits.device)
    temperature, top_p, min_p, top_k = there[2 * S :].view(4, S)
    how = temperature, top_k.view(torch.int32), top_p, min_p
    return vocabulary.sample(logits, how, there[: 2 * S].view(torch.float64))


def to_host(x: Tensor) -> Tensor:
    """Queues a copy of `x` to host memory. From a GPU it is complete once the stream has reached this point."""
    if x.device.type == "cpu":
        return x
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def done_event(device: torch.device) -> torch.cuda.Event | None:
    """An event recorded after everything queued so far on the current stream; None on a CPU."""
    if device.type == "cpu":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


def token_logprobs(
    logits: Tensor, tokens: Tensor, samples: Sequence[Sample]
) -> Callable[[], dict[int, TokenLogprob]] | None:
    """Queues the log-probabilities of the requests that ask for them; None if no request does. The result, called after
    the device has ended the step, gives them by row. One call of the op serves all, with the largest number of
    alternatives asked for.
    """
    rows = [i for i, s in enumerate(samples) if s.params.logprobs is not None]
    if not rows:
        return None
    most = max(samples[i].params.logprobs or 0 for i in rows)
    if len(rows) < len(samples):
        index = on_device(np.array(rows), logits.device)
        logits, tokens = logits.index_select(0, index), tokens.index_select(0, index)
    table = _table(logits, tokens, most)

    def records() -> dict[int, TokenLogprob]:
        return {
            i: TokenLogprob(r.token, r.logprob, r.top[: samples[i].params.logprobs])
            for i, r in zip(rows, _records(table, most))
        }

    return records


def prompt_logprobs(work: Work, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Callable[[], Output]:
    """Queues the log-probabilities of `work.prompt_targets`, from the work's hidden rows [count, D]. The result, called
    after the device has ended the step, gives them."""
    wanted = len(work.prompt_targets)
    targets = on_device(np.array(work.prompt_targets), hidden.device)
    most = work.params.prompt_logprobs or 0
    tables: list[tuple[Tensor, Tensor]] = []
    for rows in _pieces(hidden, wanted, head):
        logits = head(hidden[rows])
        tables.append((_table(logits, targets[rows], most), to_host(torch.isfinite(logits).all())))

    def output() -> Output:
        if not all(bool(good) for _, good in tables):
            return Output(work.rid, error=NOT_FINITE)
        return Output(work.rid, prompt_logprobs=tuple(r for table, _ in tables for r in _records(table, most)))

    return output


NOT_FINITE = "the model produced NaN or infinite logits for this request; its cache was discarded"


def _pieces(hidden: Tensor, wanted: int, head: Callable[[Tensor], Tensor]) -> Iterator[slice]:
    if wanted == 0:
        return
    vocabulary = head(hidden[:1]).shape[-1]
    size = max(1, LOGIT_BYTES // (4 * vocabulary))
    for begin in range(0, wanted, size):
        yield slice(begin, min(begin + size, wanted))


def _table(logits: Tensor, tokens: Tensor, most: int) -> Tensor:
    """[rows, 2 + 2 most] float64, being copied to the host: token, its log-probability, the most likely ids, their
    log-probabilities. float64 holds ids and float32 values alike, so one copy is enough."""
    lp, top_ids, top_lp = logprobs(logits, tokens, most)
    return to_host(torch.cat([x.double() for x in (tokens.unsqueeze(1), lp.unsqueeze(1), top_ids, top_lp)], 1))


def _records(table: Tensor, most: int) -> list[TokenLogprob]:
    return [
        TokenLogprob(int(token), value, tuple(zip(map(int, top[:most]), top[most:])))
        for token, value, *top in table.tolist()
    ]
