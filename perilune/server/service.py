"""What every endpoint works with: the engine, the model's text side, and the bound on requests in flight."""

import asyncio
import contextlib
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from perilune.core.config import ServerConfig
from perilune.core.constraint import Constraint
from perilune.core.errors import CheckpointError, EngineError, RequestError, quoted
from perilune.core.files import read_regular
from perilune.core.messages import Delta, EngineInfo, EngineStats
from perilune.core.sampling import SamplingParams
from perilune.engine.client import check_prompt
from perilune.server.errors import GenerationError
from perilune.server.metrics import Metrics
from perilune.server.openai.protocol import Predictions
from perilune.text import bad_words
from perilune.text.chat import ChatTemplate
from perilune.text.tokenizer import Tokenizer

log = logging.getLogger("perilune.server")

T = TypeVar("T")
OFFLOAD_BYTES = 16_384


class Engine(Protocol):
    """What the server needs of engine.client.EngineClient."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def alive(self) -> bool: ...
    def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
    ) -> AsyncGenerator[Delta, None]: ...


class Service:
    """One served model. Belongs to one event loop.

    The engine belongs to whoever started it and is not closed here. `stop` ends every request in flight with a clear
    error, so that a server that must go is not held up by long answers.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        config: ServerConfig,
        generation_config: dict[str, float] | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.template = template
        self.config = config
        self.model = config.served_model_name or engine.info.model
        self.generation_config = generation_config or {}
        self.metrics = Metrics(lambda: engine.stats, lambda: engine.alive)
        self.stopping = asyncio.Event()
        self.started = int(time.time())
        self.in_flight = 0

    def stop(self) -> None:
        self.stopping.set()

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise RequestError(
                f"the model {name[:200]!r} is not served here; this server has {self.model!r}",
                param="model",
                code="model_not_found",
                status=404,
            )

    def defaults(self, *, thinking: bool | None = None) -> dict[str, float]:
        return sampling_defaults(self.generation_config, self.template, thinking=thinking)

    def admit(self, count: int, param: str) -> Callable[[], None]:
        """Takes room for `count` generations and returns what gives it back; RequestError 429 when there is none.

        `param` is the request field that asks for so many.
        """
        room = self.engine.info.max_num_seqs + self.config.max_waiting
        if count > room:
            raise RequestError(f"{count} answers in one request, but at most {room} fit: split it", param=param)
        if self.in_flight + count > room:
            raise RequestError(
                f"the server is busy: {self.in_flight} requests in flight, at most {room}; try again shortly",
                code="too_many_requests",
                status=429,
            )
        if not self.engine.alive:
            raise EngineError("the engine has stopped: see the server's log, then restart it")
        self._occupy(count)
        return lambda: self._occupy(-count)

    def _occupy(self, count: int) -> None:
        self.in_flight += count
        self.metrics.in_flight.inc(count)

    async def prepared(self, params: SamplingParams) -> SamplingParams:
        """As the engine takes them: bad words as token ids. RequestError for ids that the model does not have."""
        size = sum(map(len, params.bad_words))
        params = await self.offload(size, lambda: bad_words.resolved(params, self.tokenizer))
        params.check_ids(self.engine.info.vocab_size)
        return params

    def fit(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> int:
        """How many tokens may follow the prompt: what was asked for, clamped to what the context still holds."""
        try:
            check_prompt(prompt, self.engine.info)
        except RequestError as e:
            raise RequestError(str(e), param=param, code=e.code) from e
        room = self.engine.info.max_model_len - len(prompt)
        return room if max_tokens is None else min(max_tokens, room)

    async def offload(self, size: int, work: Callable[[], T]) -> T:
        """Runs `work` here if its input is small, else on a thread: a long prompt must not stall everyone's stream."""
        return work() if size < OFFLOAD_BYTES else await asyncio.to_thread(work)


class Generation:
    """One prompt on its way through the engine: counts its tokens and times them.

    A consumer that ends it early for a reason of its own (a stop string) sets `finish_reason` before it closes
    `deltas()`; closing without one counts as cancelled.
    """

    def __init__(
        self,
        service: Service,
        prompt: Sequence[int],
        params: SamplingParams,
        constraint: Constraint | None,
        cache_keys: tuple[str, ...],
    ) -> None:
        self.service = service
        self.prompt = prompt
        self.params = params
        self.constraint = constraint
        self.cache_keys = cache_keys
        self.finish_reason: str | None = None
        self._closed = False
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.predictions = Predictions()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """The engine's deltas; GenerationError if the engine gives up on this request, EngineError if it is down.

        With stop strings, which the consumer looks for, one token at a time: none is counted after the end.
        """
        metrics = self.service.metrics
        started = time.perf_counter()
        last = 0.0
        outcome = "error"
        try:
            generate = self.service.engine.generate(self.prompt, self.params, self.constraint, self.cache_keys)
            async with contextlib.aclosing(generate) as deltas:
                async for delta in deltas:
                    now = time.perf_counter()
                    if count := len(delta.tokens):
                        if last:
                            metrics.inter_token.observe((now - last) / count)
                        else:
                            metrics.first_token.observe(now - started)
                        last = now
                    self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
                    if delta.finish_reason == "error":
                        raise GenerationError(f"the generation failed: {delta.error}")
                    if delta.finish_reason == "cancelled":
                        raise EngineError("the engine is shutting down")
                    for piece in delta.singly() if self.params.stop else (delta,):
                        self.completion_tokens += len(piece.tokens)
                        self.predictions.add(piece)
                        if piece.finish_reason is not None:
                            self.finish_reason, self._closed = piece.finish_reason, piece.closed_by_grammar
                        yield piece
            outcome = self.finish_reason or "error"
        except (GeneratorExit, asyncio.CancelledError):
            outcome = self.finish_reason or "cancelled"
            raise
        finally:
            metrics.whole.observe(time.perf_counter() - started)
            metrics.finished.labels(outcome).inc()
            metrics.closed_by_grammar.inc(len(self.marks))

    @property
    def marks(self) -> dict[str, bool]:
        """What a choice says besides finish_reason "length": `closed_by_grammar` if its form (a structured answer, a
        call) is complete, but only because the grammar completed it where max_tokens ran out."""
        return {"closed_by_grammar": True} if self._closed and self.finish_reason == "length" else {}


def sampling_defaults(
    generation_config: Mapping[str, float], template: ChatTemplate | None = None, *, thinking: bool | None = None
) -> dict[str, float]:
    """Sampling parameters of requests that bring none: the checkpoint's own, else the vendor's advice for the mode.

    `template` says which member's advice, K2.6's without one; `thinking` is None for raw completions, which have no
    mode.
    """
    if thinking is None:
        return dict(generation_config)
    temperature, top_p = (template or ChatTemplate()).sampling_defaults(thinking=thinking)
    return {"temperature": temperature, "top_p": top_p, **generation_config}


def read_generation_config(directory: Path) -> dict[str, float]:
    """Sampling defaults of a checkpoint's generation_config.json; empty when the file or the keys are absent."""
    path = directory / "generation_config.json"
    try:
        data = json.loads(read_regular(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} cannot be read: {e.strerror if isinstance(e, OSError) else e}") from e
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    found: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value = data.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise CheckpointError(f"{path}: {name} must be a number, not {quoted(value)}")
        found[name] = value
    try:
        SamplingParams(**found)  # type: ignore[arg-type]  # numbers; it refuses a top_k with a fraction
    except RequestError as e:
        raise CheckpointError(f"{path}: {e}") from e
    return found
