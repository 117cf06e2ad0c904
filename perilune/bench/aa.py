"""The protocol of Artificial Analysis: how long a user of an endpoint waits, and how fast the answer then comes.

A unique prompt per request (so that neither a prefix cache nor a drafter has seen it), streamed, default temperature,
medians over requests. Times count from sending the request. Per request:

    TTFT                       the first token of any kind, reasoning included
    output speed               (tokens - 1) / (end - TTFT)
    time to first answer token the first token that is not reasoning
    end-to-end 500             time to 500 answer tokens: time to first answer token + 499 / answer speed, which is
                               an extrapolation where fewer were produced; `extrapolated` counts those requests
"""

import contextlib
import random
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from perilune.client.endpoint import Chunk, Endpoint, EndpointError, gather, thinking_switch
from perilune.core.errors import ConfigError
from perilune.text.stream import Reasoning

ANSWER_TOKENS = 500
EXTENDED = ("perilune", "vllm", "sglang")  # names of servers that accept the extension ignore_eos
MARGIN = 0.02  # share by which a prompt may be shorter than asked for
MAX_COUNTS = 12  # token counts asked for until a prompt has the right length; usually 1 to 4
SLACK = 32  # tokens of context left free beside prompt and output
_FIRST_ESTIMATE = 1.6  # tokens per word, until a server has counted some

_WORDS = """\
harbour lantern valley engine orchard letter bridge winter garden signal river market station copper forest window
crossed followed repaired described measured carried remembered painted opened divided counted guarded
quiet narrow distant golden broken early northern patient heavy simple curious hollow silver open"""
_NOUNS, _VERBS, _ADJECTIVES = (line.split() for line in _WORDS.splitlines())


@dataclass(frozen=True, slots=True)
class Sample:
    """One request, in seconds since it was sent. `answer_at` is None if it ended in its reasoning."""

    first_at: float
    answer_at: float | None
    end_at: float
    prompt_tokens: int
    tokens: int
    answer_tokens: int
    counted: bool  # by the server; if not, each streamed piece counts as one token

    @property
    def speed(self) -> float | None:
        """Output tokens per second after the first; None if there were fewer than two."""
        return _rate(self.tokens, self.end_at - self.first_at)

    @property
    def end_to_end(self) -> float | None:
        """Seconds until 500 answer tokens; None if there was no answer, or too short a stream to have a speed."""
        if self.answer_at is None:
            return None
        speed = _rate(self.answer_tokens, self.end_at - self.answer_at) or self.speed
        return self.answer_at + (ANSWER_TOKENS - 1) / speed if speed else None


def sample(sent: float, chunks: Sequence[Chunk]) -> Sample:
    """The figures of one stream; EndpointError if it brought no token at all."""
    pieces = [(c.at, isinstance(e, Reasoning)) for c in chunks for e in c.events]
    if not pieces:
        raise EndpointError("the endpoint streamed an answer without any token")
    usage = next((c.usage for c in reversed(chunks) if c.usage is not None), None)
    answers = [at for at, thinking in pieces if not thinking]
    tokens = usage.completion if usage else len(pieces)
    if not answers:
        answer_tokens = 0
    elif usage and usage.reasoning is not None:
        answer_tokens = tokens - usage.reasoning
    else:
        answer_tokens = round(tokens * len(answers) / len(pieces))
    # The last counted token is the end token. It has no text, so its time is that of the chunk with the finish reason.
    end = max(at for at in (pieces[-1][0], *(c.at for c in chunks if c.finish_reason is not None)))
    return Sample(
        first_at=pieces[0][0] - sent,
        answer_at=answers[0] - sent if answers else None,
        end_at=end - sent,
        prompt_tokens=usage.prompt if usage else 0,
        tokens=tokens,
        answer_tokens=answer_tokens,
        counted=usage is not None,
    )


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians over requests; a figure that no request has is None."""
    return {
        "ttft_s": _median(s.first_at for s in samples),
        "output_tokens_per_s": _median(s.speed for s in samples),
        "ttfat_s": _median(s.answer_at for s in samples),
        "e2e_500_s": _median(s.end_to_end for s in samples),
        "prompt_tokens": _median(s.prompt_tokens for s in samples if s.counted),
        "output_tokens": _median(s.tokens for s in samples),
        "answer_tokens": _median(s.answer_tokens for s in samples),
        "samples": len(samples),
        "answered": sum(s.answer_at is not None for s in samples),
        "extrapolated": sum(s.end_to_end is not None and s.answer_tokens < ANSWER_TOKENS for s in samples),
        "token_count": "server" if all(s.counted for s in samples) else "streamed pieces",
    }


class Prompts:
    """Unique prompts of about `tokens` tokens, counted by the server if it can."""

    def __init__(self, endpoint: Endpoint, tokens: int) -> None:
        self.tokens = tokens
        self._endpoint = endpoint
        self._per_word = _FIRST_ESTIMATE
        self._fixed_tokens = 0.0  # tokens of the question and the chat template

    async def calibrate(self) -> None:
        """Learns tokens per word from two short unmeasured requests, which also warm the connection up.

        Both begin with the same nonce: two nonces can differ by several tokens, as much as these few words take.
        """
        many, nonce = max(2, min(200, self.tokens // 8)), secrets.token_hex(8)
        counts = []
        for words in (many // 2, many):
            reply = await self._endpoint.complete({"messages": ask(words, nonce), "max_tokens": 2})
            counts.append(reply.usage.prompt if reply.usage is not None else 0)
        if counts[1] > counts[0] > 0:
            self._per_word = (counts[1] - counts[0]) / (many - many // 2)
            self._fixed_tokens = max(0.0, counts[1] - self._per_word * many)

    def uncounted(self) -> list[dict[str, Any]]:
        """Messages of a prompt that was never sent before, of about `tokens` tokens, without asking the server."""
        return ask(max(1, round((self.tokens - self._fixed_tokens) / self._per_word)), secrets.token_hex(8))

    async def new(self) -> list[dict[str, Any]]:
        """Messages of a prompt that was never sent before. If the server counts: at most `tokens` tokens, and at least
        98 % of them wherever some number of words gives that, else the most words that fit. Otherwise about `tokens`.
        """
        nonce = secrets.token_hex(8)
        goal = self.tokens * (1 - MARGIN / 2)
        words = max(1, round((goal - self._fixed_tokens) / self._per_word))
        counted: dict[int, int] = {}  # words -> tokens; a text of more words begins with that of fewer
        low = 0  # the most words that fit
        for _ in range(MAX_COUNTS):
            messages = ask(words, nonce)
            count = await self._endpoint.count(messages)
            if count is None or (1 - MARGIN) * self.tokens <= count <= self.tokens:
                return messages
            counted[words] = count
            low = max((w for w, n in counted.items() if n <= self.tokens), default=0)
            high = min((w for w, n in counted.items() if n > self.tokens), default=None)
            if high == low + 1:
                break
            # As soon as this text has two counts, use its own tokens per word: the calibration had another text.
            first, last = (low, high) if low and high else (min(counted), max(counted))
            slope = (counted[last] - counted[first]) / (last - first) if first < last else self._per_word
            words = max(low + 1, words + round((goal - count) / (slope or self._per_word)))
            if high is not None:
                words = min(words, high - 1)
        if not low:
            raise ConfigError(f"{self.tokens} tokens are too few for the question itself: raise --prompt-tokens")
        return ask(low, nonce)


def ask(words: int, nonce: str) -> list[dict[str, Any]]:
    """Messages with one question about `words` words of text, which begins with `nonce` and is made from it."""
    rng = random.Random(nonce)
    text: list[str] = []
    while len(text) < words:
        one, two = rng.sample(_NOUNS, 2)
        text += f"The {rng.choice(_ADJECTIVES)} {one} {rng.choice(_VERBS)} the {rng.choice(_ADJECTIVES)} {two}.".split()
    question = "Explain in detail, sentence by sentence, what happens in this text, and how it could go on."
    return [{"role": "user", "content": f"Text {nonce}: {' '.join(text[:words])}\n\n{question}"}]


def fit(prompt_tokens: int, output_tokens: int, context: int | None) -> int:
    """The prompt length that leaves room for the output; ConfigError if there is none."""
    if context is None:
        return prompt_tokens
    room = context - output_tokens - SLACK
    if room < SLACK:
        raise ConfigError(
            f"the served context holds {context} tokens, too few for a prompt and {output_tokens} output tokens: "
            "lower --output-tokens"
        )
    return min(prompt_tokens, room)


async def measure(
    endpoint: Endpoint,
    *,
    prompt_tokens: int,
    output_tokens: int,
    runs: int,
    parallel: int,
    ignore_eos: bool | None,
    thinking: bool | None,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """The row of `runs` rounds of `parallel` simultaneous requests.

    ignore_eos  request the full output, past end tokens; None: if the server is one of EXTENDED
    thinking    None leaves the choice to the server
    """
    length = fit(prompt_tokens, output_tokens, endpoint.max_model_len)
    if length < prompt_tokens:
        report(
            f"the served context holds {endpoint.max_model_len} tokens: the prompt is {length} tokens instead of "
            f"{prompt_tokens}"
        )
    if ignore_eos is None:
        ignore_eos = endpoint.owner.lower() in EXTENDED
    options: dict[str, Any] = {"max_tokens": output_tokens}
    if ignore_eos:
        options["ignore_eos"] = True
    if thinking is not None:
        options |= thinking_switch(thinking)
    prompts = Prompts(endpoint, length)
    await prompts.calibrate()
    samples: list[Sample] = []
    for run in range(1, runs + 1):
        asked = [await prompts.new() for _ in range(parallel)]
        done = await gather([request(endpoint, {"messages": m, **options}) for m in asked])
        samples += done
        report(f"run {run}/{runs}: {describe(summary(done))}")
    return {
        "bench": "aa",
        "model": endpoint.model,
        "asked_prompt_tokens": prompt_tokens,
        "asked_output_tokens": output_tokens,
        "parallel": parallel,
        "runs": runs,
        "ignore_eos": ignore_eos,
        "thinking": thinking,
        **summary(samples),
        **endpoint.marks,
        "method": "streamed, unique prompts, default temperature, medians; two short unmeasured requests first",
    }


def describe(figures: dict[str, Any]) -> str:
    def show(name: str, unit: str) -> str:
        return "none" if figures[name] is None else f"{figures[name]:,.2f} {unit}"

    text = (
        f"TTFT {show('ttft_s', 's')}, output speed {show('output_tokens_per_s', 'tok/s')}, "
        f"first answer token {show('ttfat_s', 's')}, end-to-end 500 {show('e2e_500_s', 's')}"
    )
    if figures["extrapolated"]:
        text += f" (extrapolated from {figures['answer_tokens']:g} answer tokens)"
    return text


async def request(endpoint: Endpoint, body: dict[str, Any]) -> Sample:
    sent = perf_counter()
    async with contextlib.aclosing(endpoint.stream(body)) as stream:
        chunks = [chunk async for chunk in stream]
    return sample(sent, chunks)


def _rate(tokens: int, seconds: float) -> float | None:
    return (tokens - 1) / seconds if tokens > 1 and seconds > 0 else None


def _median(values: Any) -> float | None:
    known = [v for v in values if v is not None]
    return round(statistics.median(known), 4) if known else None
