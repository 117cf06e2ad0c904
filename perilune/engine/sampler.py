"""From logits to the step's outputs: the sampled tokens, their log-probabilities, and errors instead of NaNs."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from perilune.core.plan import Output, TokenLogprob, Work
from perilune.ops.logprobs import logprobs
from perilune.ops.sample import sample

LOGIT_BYTES = 64 << 20  # prompt log-probabilities are computed in pieces of at most this many bytes of logits

_MASK = (1 << 64) - 1


def uniform(seed: int, draw: int) -> float:
    """The random number in [0, 1) of a request's output token number `draw`.

    A hash (splitmix64's finaliser over seed and counter), not a stream: the same request draws the same numbers
    whatever else is in the batch, on any device, and again after preemption.
    """
    z = (seed * 0x9E3779B97F4A7C15 + (draw + 1) * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        z ^= z >> 31
    return (z >> 11) / (1 << 53)


def choose(logits: Tensor, work: tuple[Work, ...]) -> tuple[Tensor, Tensor]:
    """Tokens [S] int64 and finite [S] bool, on the device, for the rows of `logits` [S, V] float32."""
    device, params = logits.device, [w.params for w in work]
    finite = torch.isfinite(logits).all(-1)
    if all(p.greedy for p in params):
        return logits.argmax(-1), finite
    tokens = sample(
        logits,
        torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.top_k for p in params], dtype=torch.int32, device=device),
        torch.tensor([p.top_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([p.min_p for p in params], dtype=torch.float32, device=device),
        torch.tensor([uniform(w.seed, w.draw) for w in work], dtype=torch.float64, device=device),
    )
    return tokens, finite


def token_logprobs(logits: Tensor, tokens: Tensor, work: tuple[Work, ...]) -> dict[int, TokenLogprob]:
    """By rid, for the works that asked. One call for all: the number of alternatives is the largest asked for."""
    rows = [i for i, w in enumerate(work) if w.params.logprobs is not None]
    if not rows:
        return {}
    most = max(work[i].params.logprobs or 0 for i in rows)
    found = _records(logits[rows], tokens[rows], most)
    return {
        work[i].rid: TokenLogprob(r.token, r.logprob, r.top[: work[i].params.logprobs]) for i, r in zip(rows, found)
    }


def prompt_logprobs(work: Work, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> Output:
    """Log-probabilities of `work.prompt_targets`, from the work's hidden rows [count, D]."""
    wanted = len(work.prompt_targets)
    targets = torch.tensor(work.prompt_targets, device=hidden.device)
    most = work.params.prompt_logprobs or 0
    found: list[TokenLogprob] = []
    for rows in _pieces(hidden, wanted, head):
        logits = head(hidden[rows])
        if not bool(torch.isfinite(logits).all()):
            return Output(work.rid, error=NOT_FINITE)
        found += _records(logits, targets[rows], most)
    return Output(work.rid, prompt_logprobs=tuple(found))


NOT_FINITE = "the model produced NaN or infinite logits for this request; its cache was discarded"


def _pieces(hidden: Tensor, wanted: int, head: Callable[[Tensor], Tensor]) -> Iterator[slice]:
    if wanted == 0:
        return
    vocabulary = head(hidden[:1]).shape[-1]
    size = max(1, LOGIT_BYTES // (4 * vocabulary))
    for begin in range(0, wanted, size):
        yield slice(begin, min(begin + size, wanted))


def _records(logits: Tensor, tokens: Tensor, most: int) -> list[TokenLogprob]:
    chosen, ids, values = (t.tolist() for t in logprobs(logits, tokens, most))
    return [
        TokenLogprob(token, value, tuple(zip(i, v))) for token, value, i, v in zip(tokens.tolist(), chosen, ids, values)
    ]
