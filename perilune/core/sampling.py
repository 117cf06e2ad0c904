"""How a request wants its tokens chosen."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from perilune.core.errors import RequestError

MAX_LOGPROBS = 20  # alternatives per token; OpenAI's own bound
MAX_STOPS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, validated at birth.

    temperature     0 is greedy; otherwise logits are divided by it before the filters
    top_k           keep the k most likely tokens; 0 keeps all
    top_p           keep the smallest set whose probability reaches top_p
    min_p           drop tokens less likely than min_p times the most likely one
    seed            makes the request reproducible whatever else is in the batch; None draws one
    max_tokens      None: until the context is full
    stop            strings that end the text (never part of it); a single string is accepted
    stop_token_ids  ids that end the request, besides the model's own end tokens
    ignore_eos      do not stop at the model's own end tokens
    logprobs        None: none; n: the chosen token's log-probability and the n most likely ones
    prompt_logprobs the same for each prompt token but the first

    Raises RequestError naming the field. A field's order of application: temperature, top-k, top-p, min-p.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 (use temperature 0 for greedy)", param="top_p")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, None, whole=True)
        _check("seed", self.seed, -(2**63), 2**63 - 1, whole=True)
        _check("max_tokens", self.max_tokens, 1, None, whole=True)
        _check("logprobs", self.logprobs, 0, MAX_LOGPROBS, whole=True)
        _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, whole=True)
        if len(stop) > MAX_STOPS or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(f"stop must be up to {MAX_STOPS} non-empty strings", param="stop")
        if not all(isinstance(t, int) and t >= 0 for t in self.stop_token_ids):
            raise RequestError("stop_token_ids must be token ids", param="stop_token_ids")

    def ending_with(self, end_tokens: Iterable[int]) -> "SamplingParams":
        """These parameters, stopping at the model's own end tokens too (unless ignore_eos)."""
        if self.ignore_eos:
            return self
        return dataclasses.replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *end_tokens})))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _check(name: str, value: float | None, low: float, high: float | None, *, whole: bool = False) -> None:
    if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
        return
    right_type = (
        isinstance(value, int | float) and not isinstance(value, bool) and not (whole and not isinstance(value, int))
    )
    if not right_type or not math.isfinite(value or 0):
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} must be {kind}, not {value!r}", param=name)
    assert value is not None
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {bound}, not {value}", param=name)
