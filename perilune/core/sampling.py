"""How a request wants its tokens chosen."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import RequestError, quoted, shown

MAX_WHOLE = 2**63 - 1  # bound of integer fields that have no other: messages and tensors hold int64
MAX_LOGPROBS = 20  # alternatives per token; OpenAI's own bound
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of each stop string: searching for it takes a table with one entry per character
MAX_BIASED = 1024  # tokens in a logit_bias
MAX_ALLOWED = 1 << 20  # ids in allowed_token_ids are smaller; more than any vocabulary of the family
MAX_BAD_WORDS = 512  # texts in bad_words
MAX_BAD_CHARS = 256  # characters of one of them
MAX_BAD_TOKENS = 64  # tokens of one sequence of bad_word_ids, of which there may be 4 for each text
MAX_CANDIDATES = 128  # completions of one prompt in one request

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one request, validated at birth.

    temperature     0 is greedy; otherwise logits are divided by it before the filters
    top_k           keep the k most likely tokens; 0 keeps all
    top_p           keep the smallest set of most likely tokens with a total probability of at least top_p
    min_p           drop tokens less likely than min_p times the most likely one
    presence_penalty    subtracted from the logit of every token generated so far, -2 to 2
    frequency_penalty   subtracted once for each time the token was generated, -2 to 2
    repetition_penalty  divides the positive logits of the tokens of prompt and output, multiplies the negative ones;
                        0.01 to 10, 1 changes nothing
    logit_bias      (id, bias) pairs, or a mapping: added to these tokens' logits, -100 to 100
    allowed_token_ids   the only tokens that can be chosen, end tokens included; None: all. Given as ids, kept as a
                    bitmap: bit i of byte b (0 the lowest) allows token 8 b + i
    bad_words       texts that the output must not hold; `text.bad_words` turns them into bad_word_ids, for which a
                    tokenizer is needed
    bad_word_ids    token sequences of which the output must not hold any: the last token of one cannot be chosen after
                    the others. A prompt's tokens do not count
    min_tokens      output tokens before which neither stop_token_ids nor the model's own end tokens can be chosen, and
                    no stop string ends the text
    seed            makes the request reproducible whatever else is in the batch; None: a random one
    max_tokens      None: until the context is full
    stop            strings that end the text (never part of it); a single string is accepted
    stop_token_ids  ids that end the request, besides the model's own end tokens
    ignore_eos      do not stop at the model's own end tokens
    logprobs        None: none; n: the chosen token's log-probability and the n most likely ones
    prompt_logprobs the same for each prompt token but the first

    Raises RequestError naming the field. Order of application: repetition, frequency and presence penalty, bias,
    min_tokens, allowed_token_ids and bad words, temperature, top-k, top-p, min-p. Log-probabilities are those of the
    model: before all of these.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: Sequence[int] | bytes | None = None
    bad_words: tuple[str, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
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
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))
        object.__setattr__(self, "allowed_token_ids", _allowed(self.allowed_token_ids))
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "bad_word_ids", _bad_word_ids(self.bad_word_ids))
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 (use temperature 0 for greedy)", param="top_p")
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, None, whole=True)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check("min_tokens", self.min_tokens, 0, None, whole=True)
        _check("seed", self.seed, -(2**63), MAX_WHOLE, whole=True)
        _check("max_tokens", self.max_tokens, 1, None, whole=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}", param="min_tokens"
            )
        _check("logprobs", self.logprobs, 0, MAX_LOGPROBS, whole=True)
        _check("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, whole=True)
        if len(stop) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in stop):
            why = f"stop must be up to {MAX_STOPS} non-empty strings of at most {MAX_STOP_CHARS} characters"
            raise RequestError(why, param="stop")
        if not all(_is_id(t) for t in self.stop_token_ids):
            raise RequestError("stop_token_ids must be token ids", param="stop_token_ids")
        if self.min_tokens and self.allowed_token_ids and _within(self.allowed_token_ids, self.stop_token_ids):
            raise RequestError(
                f"allowed_token_ids names end tokens only, and min_tokens, which is {self.min_tokens}, forbids them",
                param="allowed_token_ids",
            )

    def ending_with(self, end_tokens: Iterable[int]) -> "SamplingParams":
        """These parameters, stopping at the model's own end tokens too (unless ignore_eos)."""
        if self.ignore_eos:
            return self
        return dataclasses.replace(self, stop_token_ids=tuple(sorted({*self.stop_token_ids, *end_tokens})))

    def check_ids(self, vocab_size: int) -> None:
        """Raises RequestError if a field names a token that a vocabulary of `vocab_size` does not have."""
        for name, ids in (
            ("logit_bias", (token for token, _ in self.logit_bias)),
            ("allowed_token_ids", _highest(self.allowed_token_ids)),
            ("bad_word_ids", itertools.chain.from_iterable(self.bad_word_ids)),
        ):
            if (beyond := max(ids, default=0)) >= vocab_size:
                raise RequestError(f"{name} names token {beyond}; this model's ids end at {vocab_size - 1}", param=name)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def restricted(self) -> bool:
        """Whether some tokens are never allowed, or not after certain others."""
        return self.allowed_token_ids is not None or bool(self.bad_word_ids)

    @property
    def penalized(self) -> bool:
        """Whether the choice of a token depends on which came before."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


def candidates(n: int, best_of: int | None = None) -> int:
    """How many completions to generate for one prompt if the `n` best of `best_of` are wanted.

    Raises RequestError naming the field. Candidate i runs with `sibling(params, i)`.
    """
    _check("n", n, 1, MAX_CANDIDATES, whole=True)
    if best_of is None:
        return n
    _check("best_of", best_of, 1, MAX_CANDIDATES, whole=True)
    if best_of < n:
        raise RequestError(f"best_of is {best_of}, less than n, which is {n}", param="best_of")
    return best_of


def sibling(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of candidate number `index` of one prompt.

    Number 0 runs as the request alone would. Another one's seed is the finaliser of splitmix64 over
    seed + index * 0x9E3779B97F4A7C15 modulo 2^64, without its lowest bit: as reproducible as the request's. Without a
    seed each candidate gets a random one.
    """
    if index == 0 or params.seed is None:
        return params
    z = (params.seed + index * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return dataclasses.replace(params, seed=(z ^ (z >> 31)) >> 1)


def best(logprobs: Sequence[Sequence[float]], n: int) -> list[int]:
    """The `n` candidates with the highest mean log-probability per token, best first, ties to the lower number.

    `logprobs[i]` are those of candidate i's tokens, its end token included; a candidate without tokens comes last.
    """
    means = [sum(values) / len(values) if values else -math.inf for values in logprobs]
    return sorted(range(len(means)), key=lambda i: -means[i])[:n]


def _bias(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of a logit_bias; JSON knows only strings as keys, so decimal strings are accepted as ids."""
    pairs: list[tuple[int, float]] = []
    try:
        for key, value in given.items() if isinstance(given, Mapping) else given or ():
            pairs.append((int(key) if isinstance(key, str) and key.isdecimal() else key, value))
    except (TypeError, ValueError):
        raise RequestError("logit_bias must map token ids to numbers", param="logit_bias") from None
    if len(pairs) > MAX_BIASED:
        raise RequestError(f"logit_bias has {len(pairs)} tokens, more than {MAX_BIASED}", param="logit_bias")
    for token, value in pairs:
        if not _is_id(token):
            raise RequestError(f"logit_bias: {quoted(token)} is not a token id", param="logit_bias")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise RequestError(
                f"logit_bias of token {token} must be between -100 and 100, not {quoted(value)}", param="logit_bias"
            )
    if len({token for token, _ in pairs}) < len(pairs):
        raise RequestError("logit_bias names a token twice", param="logit_bias")
    return tuple((token, float(value)) for token, value in pairs)


def _allowed(given: Any) -> bytes | None:
    """The ids as a bitmap: a list of a hundred thousand ids would be checked and sent again for every answer."""
    if given is None or isinstance(given, bytes):
        return given
    ids = _sequence(given, "allowed_token_ids")
    if not ids or {*map(type, ids)} != {int} or min(ids) < 0 or max(ids) >= MAX_ALLOWED:
        raise RequestError(
            "allowed_token_ids must be token ids, one at least, or left out: with none nothing could be said",
            param="allowed_token_ids",
        )
    bits = bytearray((max(ids) >> 3) + 1)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def _within(bitmap: Any, ids: Iterable[int]) -> bool:
    """Whether the bitmap allows no tokens but `ids`."""
    bits = bytearray(bitmap)
    for token in ids:
        if token >> 3 < len(bits):
            bits[token >> 3] &= ~(1 << (token & 7))
    return not any(bits)


def _highest(bitmap: Any) -> tuple[int, ...]:
    return (8 * len(bitmap) - 9 + bitmap[-1].bit_length(),) if bitmap else ()


def _bad_words(given: Any) -> tuple[str, ...]:
    words = tuple(given or ())
    fine = not isinstance(given, str) and all(isinstance(w, str) and 0 < len(w) <= MAX_BAD_CHARS for w in words)
    if not fine or len(words) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words must be up to {MAX_BAD_WORDS} texts of 1 to {MAX_BAD_CHARS} characters", param="bad_words"
        )
    return words


def _bad_word_ids(given: Any) -> tuple[tuple[int, ...], ...]:
    sequences = [_sequence(ids, "bad_word_ids") for ids in _sequence(given or (), "bad_word_ids")]
    if len(sequences) > 4 * MAX_BAD_WORDS:
        raise RequestError(f"bad_word_ids must be up to {4 * MAX_BAD_WORDS} sequences", param="bad_word_ids")
    for ids in sequences:
        if not 0 < len(ids) <= MAX_BAD_TOKENS or not all(map(_is_id, ids)):
            raise RequestError(
                f"bad_words: a word must take 1 to {MAX_BAD_TOKENS} tokens, not {len(ids)}", param="bad_words"
            )
    return tuple(dict.fromkeys(sequences))


def _sequence(given: Any, name: str) -> tuple[Any, ...]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, not {given!r}"[:200], param=name)
    return tuple(given)


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and 0 <= token <= MAX_WHOLE


def _check(name: str, value: float | None, low: float, high: float | None, *, whole: bool = False) -> None:
    if value is None and name in ("seed", "max_tokens", "logprobs", "prompt_logprobs"):
        return
    kinds = int if whole else int | float
    if not isinstance(value, kinds) or isinstance(value, bool) or value != value:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} must be {kind}, not {shown(value)}", param=name)
    if not low <= value <= (MAX_WHOLE if high is None else high):
        bound = f"at least {low}" if high is None and value < low else f"between {low} and {high or MAX_WHOLE}"
        raise RequestError(f"{name} must be {bound}, not {shown(value)}", param=name)
