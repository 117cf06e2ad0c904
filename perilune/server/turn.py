"""From a validated chat body to running assistant turns; used by every chat API."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from perilune.core.errors import RequestError
from perilune.core.messages import EngineInfo, Picture, Video, pictures_of
from perilune.core.sampling import MAX_WHOLE, SamplingParams, candidates, sibling
from perilune.core.step import TokenLogprob
from perilune.grammar.constrain import AnswerFormat, forces
from perilune.server.answer_format import Calls, check_strict, enforced, tool_choice
from perilune.server.body import Context
from perilune.server.generation import Generation, Prompt, fit, late
from perilune.server.openai.protocol import ChatBody, Predictions, usage
from perilune.server.pictures.parts import found, replaced
from perilune.server.service import ModelText, Service
from perilune.server.sse import race
from perilune.text.beginning import Beginning
from perilune.text.chat import PromptOptions, RenderedPrompt
from perilune.text.stream import ChatStream, Content, Event, Reasoning, ToolStart
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Declared, Form, Tool, parse_tools

Forms = Mapping[str, Form]
NO_FORMS: Forms = {}


class Turn:
    """An assistant turn while it is generated: turns tokens into events, and counts them for the usage."""

    def __init__(
        self, generation: Generation, stream: ChatStream, *, ends: frozenset[int], echo: Sequence[Event] = ()
    ) -> None:
        """`ends`: ids that close a thought. `echo`: events for the part of the prompt that the answer repeats first."""
        self.generation = generation
        self.stream = stream
        self.reasoning_tokens = 0
        self.ids: list[int] = []  # of the tokens so far, the end token included
        self.prompt_logprobs: list[TokenLogprob] = []
        self._ends = ends
        self._echo = list(echo)

    async def events(self) -> AsyncGenerator[tuple[list[Event], list[TokenLogprob]], None]:
        """Per delta of the engine: the events that it adds to the turn, and the log-probabilities of its tokens."""
        if self._echo:
            yield self._echo, []
        async with contextlib.aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                self.prompt_logprobs += delta.prompt_logprobs
                self.ids += delta.tokens
                before = self.stream.reasoning_tokens
                events = self.stream.feed(delta.tokens)
                kept = self.stream.kept
                if thought := self.stream.reasoning_tokens - before:
                    # The stream counts the marker that ends a thought as part of it; clients do not count markers.
                    closed = any(delta.tokens[i] in self._ends for i in kept)
                    self.reasoning_tokens += thought - closed
                    self.generation.add_reasoning(thought - closed)
                for event in events:
                    if isinstance(event, ToolStart):
                        self.generation.run.add_tool(event.name)
                if self.stream.stopped:
                    self.generation.finish_reason = "stop"
                logprobs = [delta.logprobs[i] for i in kept] if delta.logprobs else []
                if events or logprobs:
                    yield events, logprobs
                if self.stream.stopped:
                    break
        if events := self.stream.finish():
            yield events, []

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        assert reason is not None, "asked before the turn ended"
        return "tool_calls" if self.stream.tool_calls and reason == "stop" else reason

    def usage(self) -> dict[str, Any]:
        g = self.generation
        return usage(
            len(g.prompt), g.completion_tokens, g.cached_tokens, self.reasoning_tokens, g.predictions, g.media_tokens
        )


@dataclass(frozen=True, slots=True)
class Turns:
    """The admitted turns of one request. `release` frees their room and must be called when they have ended."""

    turns: Sequence[Turn]
    release: Callable[[], None]

    def usage(self) -> dict[str, Any]:
        """The usage object of all turns together; their prompt counts once."""
        first = self.turns[0].generation
        return usage(
            len(first.prompt),
            sum(t.generation.completion_tokens for t in self.turns),
            first.cached_tokens,
            sum(t.reasoning_tokens for t in self.turns),
            Predictions.total(t.generation.predictions for t in self.turns),
            first.media_tokens,
        )


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A chat body, rendered and tokenized: the work that takes time in proportion to the conversation is done.

    ids        the prompt's token ids, including the beginning of the answer if the client sent one
    beginning  the part of the answer that is in the ids
    calls      the tool calls that the answer may have
    shown      tools declared in the prompt
    answer     the form of the answer's text; None: free
    budget     tokens that the thought may take; None: no bound
    """

    ids: list[int]
    beginning: Beginning
    calls: Calls
    shown: Sequence[Tool]
    answer: AnswerFormat | None
    budget: int | None
    params: SamplingParams


def read(
    body: ChatBody, text: ModelText, info: EngineInfo, *, vendor_strict: bool, forms: Forms = NO_FORMS
) -> ReadRequest:
    """Validates and renders a conversation. RequestError names the field that is wrong.

    `forms`: by tool name, the grammar of a tool that takes text instead of JSON arguments.

    Takes about 70 ms per MB of text: to be called on a thread if the body is large (Service.offload).
    """
    declared = tuple(dataclasses.replace(t, form=forms.get(t.name)) for t in parse_tools(body.tools))
    check_strict(declared)
    choice = tool_choice(body.tool_choice, declared)
    shown = () if choice == "none" else declared
    # If a call is required, the answer has no text to which a format could apply.
    answer, free = body.answer_format(), not forces(choice)
    thinking = text.template.thinks(body.think())
    budget = body.thinking_budget() if thinking else None
    budget = None if budget is None else min(budget, MAX_WHOLE)  # the engine's messages hold 64-bit integers
    defaults = text.defaults(thinking=thinking)
    if vendor_strict:
        check_vendor(body, defaults)
    context = text.context(info)
    head = shown if body.head_tools is body.tools else body.head_tools
    prompt = rendered(body, text, head, context if body.truncate_prompt_tokens is None else None)
    if body.add_generation_prompt is False and not prompt.beginning.given:
        raise RequestError(
            "add_generation_prompt: false leaves no answer to begin: leave it out, or end the messages with one of "
            "the assistant's and send continue_final_message: true",
            param="add_generation_prompt",
        )
    wanted = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    ids = body.truncated(prompt.ids, wanted, info.max_model_len)
    params = body.sampling(
        defaults,
        max_tokens=fit(ids, text.default_max_tokens if wanted is None else wanted, info, "messages"),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    calls = Calls(declared, choice, body.parallel_tool_calls is not False, prompt.next_tool_index)
    params = text.prepared(params, info)
    return ReadRequest(ids, prompt.beginning, calls, shown, answer if free else None, budget, params)


def rendered(body: ChatBody, text: ModelText, tools: Declared, context: Context | None = None) -> RenderedPrompt:
    """The prompt of a body's messages; `tools` are those that the model sees. Takes as long as `read`.

    `context`: a prompt too long for it is refused before tokenization, or before tokenization ends.
    """
    options: PromptOptions = {**body.prompt_options(), "tools": tools}
    if context is None:
        return text.template.read(text.tokenizer, body.messages, **options)

    def check(chars: int, tokens: int) -> None:
        context.check(chars, "messages", tokens)

    return text.template.read(text.tokenizer, body.messages, check, **options)


async def see(
    service: Service, request: Request, body: ChatBody, held: contextlib.ExitStack
) -> Sequence[Picture | Video]:
    """Decodes the pictures and videos of a body and replaces them in its messages by their tokens; `held` counts their
    memory.

    RequestError names the part that is wrong. A client that leaves meanwhile ends the work (ClientGone).
    """
    if not (parts := found(body.messages)):
        return ()
    if body.truncate_prompt_tokens is not None:
        raise RequestError(
            "truncate_prompt_tokens does not go with pictures, which it could cut in two: leave it out",
            param="truncate_prompt_tokens",
        )
    service.pictures.check(parts, service.engine.info, service.model)
    share = held.enter_context(service.pictures.budget.share())
    media = await race(service.pictures.read(parts, share), request.receive, service.stopping)
    body.messages = replaced(body.messages, parts, media)
    return media


async def prompt_tokens(service: Service, request: Request, size: int, body: ChatBody) -> int:
    """Number of tokens of a body's prompt, pictures and videos included. RequestError as `see` and `rendered`.

    `size`: bytes of the conversation; a large one is read on a thread (Service.offload).
    """
    with contextlib.ExitStack() as held:
        await see(service, request, body, held)
        return await service.offload(size, lambda: len(rendered(body, service.text, body.head_tools).ids))


async def _seen_in_time(
    service: Service, request: Request, body: ChatBody, held: contextlib.ExitStack
) -> tuple[Sequence[Picture | Video], float]:
    """As `see`, and the seconds that it took; RequestError 504 at the request's deadline."""
    order, began = body.order, time.monotonic()
    try:
        async with asyncio.timeout(order.deadline_seconds):
            media = await see(service, request, body, held)
    except TimeoutError:
        raise late(order) from None
    seconds = time.monotonic() - began if media else 0.0
    if order.deadline_seconds is not None and seconds >= order.deadline_seconds:
        raise late(order)
    return media, seconds


async def begin(service: Service, request: Request, size: int, body: ChatBody, forms: Forms = NO_FORMS) -> Turns:
    """Reads, constrains and admits `body.n` turns; nothing is generated before their events are asked for.

    `size`: bytes of the conversation; a large one is read on a thread (Service.offload). RequestError for everything
    that is wrong with the request, 429 if the server is full.
    """
    text, info = service.text, service.engine.info
    with contextlib.ExitStack() as held:
        held.callback(service.admission.take(candidates(1 if body.n is None else body.n), "n"))
        media, seconds = await _seen_in_time(service, request, body, held)
        strict = service.config.vendor_strict
        asked = await service.offload(size, lambda: read(body, text, info, vendor_strict=strict, forms=forms))
        constraint = await enforced(
            text.tokenizer,
            asked.params,
            answer=asked.answer,
            calls=asked.calls,
            begun=asked.beginning,
            budget=asked.budget,
        )
        videos = sum(medium.tokens for medium in media if isinstance(medium, Video))
        prompt = Prompt(asked.ids, pictures_of(media), body.cache_keys, body.order, videos, seconds)
        generations = [
            Generation(service.engine, service.metrics, prompt, params, constraint, first=not i)
            for i, params in enumerate(_siblings(asked.params, 1 if body.n is None else body.n))
        ]
        return Turns([_turn(g, asked, body, text.tokenizer) for g in generations], held.pop_all().close)


def _siblings(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Sampling parameters of `count` answers to one prompt; only the first asks for prompt log-probabilities."""
    unscored = dataclasses.replace(params, prompt_logprobs=None)
    return [sibling(unscored if i else params, i) for i in range(count)]


def _turn(generation: Generation, asked: ReadRequest, body: ChatBody, tokenizer: Tokenizer) -> Turn:
    m, begun = tokenizer.markers, asked.beginning
    ends = frozenset({m.think_end, *((m.section_begin, m.call_begin) if asked.shown else ())} - {None})
    stream = ChatStream(
        tokenizer,
        thinking=begun.opened,
        tools=asked.shown,
        stop=asked.params.stop,
        first_tool_index=asked.calls.first_index,
        end_ids=asked.params.stop_token_ids,
        begun=bool(begun.content),
        style=body.stream_style,
    )
    stream.unarmed = asked.params.min_tokens
    return Turn(generation, stream, ends=ends, echo=_echoed(begun) if body.echo else ())


def check_vendor(body: ChatBody, recommended: Mapping[str, float]) -> None:
    """RequestError for sampling parameters that the vendor's own API refuses: its verifier of servers expects that."""
    allowed = {
        "temperature": recommended["temperature"],
        "top_p": recommended["top_p"],
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "n": 1,
    }
    for name, value in allowed.items():
        if getattr(body, name) not in (None, value):
            raise RequestError(
                f"{name} must be {value:g} for this model in this mode, not {getattr(body, name):g}: leave it out",
                param=name,
                code="invalid_value",
            )


def _echoed(begun: Beginning) -> list[Event]:
    thought: list[Event] = [Reasoning(begun.reasoning)] if begun.reasoning else []
    return thought + ([Content(begun.content)] if begun.content else [])
