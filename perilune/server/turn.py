"""From a validated chat body to assistant turns under way: what every chat API of the server builds on."""

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perilune.core.errors import RequestError
from perilune.core.sampling import candidates, sibling
from perilune.core.step import TokenLogprob
from perilune.server.answer_format import check_strict, enforced, tool_choice
from perilune.server.openai.protocol import ChatBody, Predictions, usage
from perilune.server.service import Generation, Service
from perilune.text.beginning import Beginning
from perilune.text.chat import PromptOptions, next_tool_index
from perilune.text.stream import ChatStream, Content, Event, Reasoning
from perilune.text.tools import Tool, parse_tools


class Turn:
    """An assistant turn as it is generated: tokens in, events of the turn out, with what its answer reports."""

    def __init__(
        self, generation: Generation, stream: ChatStream, *, ends: frozenset[int], echo: Sequence[Event] = ()
    ) -> None:
        """`ends`: ids that close a thought. `echo`: what the answer gives back of the prompt, first."""
        self.generation = generation
        self.stream = stream
        self.reasoning_tokens = 0
        self.ids: list[int] = []  # of the tokens so far, the end token included
        self.prompt_logprobs: list[TokenLogprob] = []
        self._ends = ends
        self._echo = list(echo)

    async def events(self) -> AsyncGenerator[tuple[list[Event], list[TokenLogprob]], None]:
        """Per delta of the engine: what it adds to the turn, and the log-probabilities of the tokens it came from."""
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
                    # The stream counts the marker that ends a thought as part of it; a client is not told of markers.
                    closed = any(delta.tokens[i] in self._ends for i in kept)
                    self.reasoning_tokens += thought - closed
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
        return usage(len(g.prompt), g.completion_tokens, g.cached_tokens, self.reasoning_tokens, g.predictions)


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of one request, admitted; `release` gives their room back and must be called when they have ended."""

    turns: Sequence[Turn]
    release: Callable[[], None]

    def usage(self) -> dict[str, Any]:
        """Of all turns together; they share their prompt."""
        first = self.turns[0].generation
        return usage(
            len(first.prompt),
            sum(t.generation.completion_tokens for t in self.turns),
            first.cached_tokens,
            sum(t.reasoning_tokens for t in self.turns),
            Predictions.total(t.generation.predictions for t in self.turns),
        )


async def begin(service: Service, size: int, body: ChatBody) -> Turns:
    """Renders, constrains and admits `body.n` turns; nothing is generated before their events are asked for.

    `size` is the body's length in bytes, which decides where the work is done. RequestError for everything that is
    wrong with the request, 429 if the server is full.
    """
    body.check_supported()
    count = candidates(1 if body.n is None else body.n)
    with contextlib.ExitStack() as held:
        held.callback(service.admit(count, "n"))
        declared, tools = parse_tools(body.tools), parse_tools(body.declared_tools)
        check_strict(declared)
        choice = tool_choice(body.tool_choice, declared)
        answer = body.answer_format()
        if choice not in ("auto", "none"):
            answer = None  # a call that has to be made leaves the format no text to apply to
        thinking = service.template.thinks(body.think())
        budget = body.thinking_budget() if thinking else None
        defaults = service.defaults(thinking=thinking)
        if service.config.vendor_strict:
            check_vendor(body, defaults)
        prompt = await prompt_ids(service, size, body, tools)
        begun = service.template.beginning(body.messages, **body.prompt_options())
        if body.add_generation_prompt is False and not begun.given:
            raise RequestError(
                "add_generation_prompt: false leaves no answer to begin: leave it out, or end the messages with one of "
                "the assistant's and send continue_final_message: true",
                param="add_generation_prompt",
            )
        wanted = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
        prompt = body.truncated(prompt, wanted, service.engine.info.max_model_len)
        params = body.sampling(
            defaults,
            max_tokens=service.fit(prompt, wanted, "messages"),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        params = await service.prepared(params)
        first_index = next_tool_index(body.messages)
        constraint = await enforced(
            service.tokenizer,
            params,
            tools=declared,
            choice=choice,
            parallel=body.parallel_tool_calls is not False,
            first_index=first_index,
            thinking=begun.thinks,
            opens=begun.opened,
            answer=answer,
            budget=budget,
            begun=begun.content,
        )
        m = service.tokenizer.markers
        ends = frozenset({m.think_end, *((m.section_begin, m.call_begin) if tools else ())} - {None})
        echo = _echoed(begun) if body.echo else ()
        turns = []
        unscored = dataclasses.replace(params, prompt_logprobs=None)
        for i in range(count):
            own = sibling(unscored if i else params, i)
            stream = ChatStream(
                service.tokenizer,
                thinking=begun.opened,
                tools=tools,
                stop=params.stop,
                first_tool_index=first_index,
                end_ids=params.stop_token_ids,
                begun=bool(begun.content),
                **body.stream_style,
            )
            generation = Generation(service, prompt, own, constraint, body.cache_keys)
            turns.append(Turn(generation, stream, ends=ends, echo=echo))
        return Turns(turns, held.pop_all().close)


def check_vendor(body: ChatBody, recommended: Mapping[str, float]) -> None:
    """RequestError for sampling other than the vendor's own API allows: its verifier expects these to be refused."""
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


async def prompt_ids(service: Service, size: int, body: ChatBody, tools: Sequence[Tool] | None = None) -> list[int]:
    """Token ids of the conversation; `tools` are the body's, where they are already parsed.

    `size` is as in `begin`, whose prompt this is, up to its end where the assistant's answer begins.
    """
    declared = parse_tools(body.declared_tools) if tools is None else tools
    options: PromptOptions = {**body.prompt_options(), "tools": declared}
    return await service.offload(
        size,
        lambda: service.template.render_ids(service.tokenizer, body.messages, **options),
    )
