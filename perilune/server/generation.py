"""The run of one prompt in the engine, and the bound on runs in flight."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from perilune.core.constraint import Constraint
from perilune.core.errors import EngineUnavailable, RequestError
from perilune.core.messages import FIRST_COME, Delta, EngineInfo, Order, Picture
from perilune.core.sampling import SamplingParams
from perilune.engine.client import check_prompt
from perilune.server.call import Run, current
from perilune.server.errors import GenerationError
from perilune.server.keys import Account
from perilune.server.metrics import Counted, Metrics
from perilune.server.openai.protocol import Predictions


class Engine(Counted, Protocol):
    """The part of engine.client.EngineClient that the server uses."""

    @property
    def retry_seconds(self) -> int | None: ...

    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
        order: Order = FIRST_COME,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[Delta, None]: ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """The input of the engine: token ids, and the pictures that the placeholders among them represent, in order.

    cache_keys  only prompts of one API key with equal cache_keys (the request's cache_salt) share cached KV
    order       priority and deadline
    video_tokens  number of ids that are placeholders of videos
    seen_seconds  time that decoding the pictures took; it counts towards the deadline
    """

    ids: Sequence[int]
    pictures: Sequence[Picture] = ()
    cache_keys: tuple[str, ...] = ()
    order: Order = FIRST_COME
    video_tokens: int = 0
    seen_seconds: float = 0.0


def late(order: Order) -> RequestError:
    """The error that ends a request at its deadline."""
    return RequestError(
        f"the answer was not complete after {order.deadline_seconds:g} s, the request's own deadline",
        param="deadline_seconds",
        code="deadline_exceeded",
        status=504,
    )


class Admission:
    """Bounds the generations in flight: those the engine runs at once and `max_waiting` more."""

    def __init__(self, engine: Engine, metrics: Metrics, max_waiting: int) -> None:
        self.engine = engine
        self.metrics = metrics
        self.limit = engine.info.max_num_seqs + max_waiting
        self.in_flight = 0
        self.draining = False

    def check_open(self) -> None:
        """EngineUnavailable unless generations are taken now."""
        if self.draining:
            raise EngineUnavailable("the server is shutting down: send the request to another one")
        if not self.engine.alive:
            why = "the engine is starting again after a failure: try again shortly"
            raise EngineUnavailable(why, retry_seconds=self.engine.retry_seconds)

    def take(self, count: int, param: str) -> Callable[[], None]:
        """Takes room for `count` generations and returns the function that frees it; RequestError 429 if there is none.

        `param` is the request field that asks for so many.
        """
        if count > self.limit:
            raise RequestError(f"{count} answers in one request, but at most {self.limit} fit: split it", param=param)
        if self.in_flight + count > self.limit:
            raise RequestError(
                f"the server is busy: {self.in_flight} requests in flight, at most {self.limit}; try again shortly",
                code="too_many_requests",
                status=429,
            )
        self.check_open()
        account = current().account
        self._occupy(account, count)
        return lambda: self._occupy(account, -count)

    def _occupy(self, account: Account, count: int) -> None:
        account.take(count)
        self.in_flight += count
        self.metrics.in_flight.inc(count)


def fit(prompt: Sequence[int], max_tokens: int | None, info: EngineInfo, param: str) -> int:
    """How many tokens may follow the prompt: max_tokens, clamped to the rest of the context.

    RequestError about `param` for a prompt that cannot run.
    """
    try:
        check_prompt(prompt, info)
    except RequestError as e:
        raise RequestError(str(e), param=param, code=e.code) from e
    room = info.max_model_len - len(prompt)
    return room if max_tokens is None else min(max_tokens, room)


class Generation:
    """The run of one prompt: counts its tokens and times them.

    A consumer that ends it early for a reason of its own (a stop string) sets `finish_reason` before it closes
    `deltas()`; closing without one counts as cancelled.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        prompt: Prompt,
        params: SamplingParams,
        constraint: Constraint | None,
        first: bool = True,
    ) -> None:
        """`first`: the first answer to its prompt; only this answer counts the prompt's tokens."""
        self.order = left = prompt.order
        if left.deadline_seconds is not None:
            left = dataclasses.replace(left, deadline_seconds=left.deadline_seconds - prompt.seen_seconds)
        self._left = left  # with the time that is left when the engine gets the request
        self.engine = engine
        self.metrics = metrics
        self.prompt = prompt.ids
        self.pictures, self.video_tokens = prompt.pictures, prompt.video_tokens
        self.params = params
        self.constraint = constraint
        self.account = current().account
        self.cache_keys = (*self.account.cache_keys, *prompt.cache_keys)
        self.run = Run(prompt_tokens=len(prompt.ids) if first else 0)
        current().add(self.run, prompt.ids)
        self.finish_reason: str | None = None
        self._closed = False
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.predictions = Predictions()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The engine's deltas; GenerationError if the engine gives up on this request, EngineError if it is down.

        If the request has stop strings, each delta has one token: the consumer looks for them, and tokens after one
        must not be counted.
        """
        run, account = self.run, self.account
        run.started = time.perf_counter()
        account.begin(run.prompt_tokens)
        outcome = "error"
        try:
            generate = self.engine.generate(
                self.prompt, self.params, self.constraint, self.cache_keys, self._left, self.pictures
            )
            async with contextlib.aclosing(generate) as deltas:
                async for delta in deltas:
                    self._time(delta)
                    if delta.cached_tokens and run.prompt_tokens and not run.cached_tokens:
                        run.cached_tokens = delta.cached_tokens
                        account.usage.cached_tokens += delta.cached_tokens
                    self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
                    if delta.finish_reason == "error":
                        raise GenerationError(f"the generation failed: {delta.error}")
                    if delta.finish_reason == "deadline":
                        raise late(self.order)
                    for piece in delta.singly() if self.params.stop else (delta,):
                        self.completion_tokens += len(piece.tokens)
                        account.add_output(len(piece.tokens))
                        if run.prompt:
                            run.ids += piece.tokens
                        self.predictions.add(piece)
                        if piece.finish_reason is not None:
                            self.finish_reason, self._closed = piece.finish_reason, piece.closed_by_grammar
                        yield piece
            outcome = self.finish_reason or "error"
        except (GeneratorExit, asyncio.CancelledError):
            outcome = self.finish_reason or "cancelled"
            raise
        finally:
            run.last, run.finish_reason, run.output_tokens = time.perf_counter(), outcome, self.completion_tokens
            self.metrics.observe(run, len(self.prompt), closed=bool(self.marks))

    @property
    def media_tokens(self) -> dict[str, int]:
        """How many of the prompt's tokens are placeholders of pictures and of videos; no entry for 0."""
        seen = sum(picture.tokens for picture in self.pictures)
        counts = {"image_tokens": seen - self.video_tokens, "video_tokens": self.video_tokens}
        return {name: count for name, count in counts.items() if count}

    def add_reasoning(self, count: int) -> None:
        self.run.reasoning_tokens += count
        self.account.usage.reasoning_tokens += count

    def _time(self, delta: Delta) -> None:
        run = self.run
        run.queue_seconds = run.queue_seconds or delta.queue_seconds
        if count := len(delta.tokens):
            now = time.perf_counter()
            if run.first:
                self.metrics.inter_token.observe((now - run.last) / count)
            else:
                run.first = now
                self.metrics.first_token.observe(now - run.started)
            run.last = now

    @property
    def marks(self) -> dict[str, bool]:
        """Extra field of a choice with finish_reason "length": `closed_by_grammar` if the grammar completed its form (a
        structured answer, a call) where max_tokens ran out."""
        return {"closed_by_grammar": True} if self._closed and self.finish_reason == "length" else {}
