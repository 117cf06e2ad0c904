"""The Python API: a model in this process, driven by the caller's thread."""

import dataclasses
import itertools
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from perilune.core.config import EngineConfig, build
from perilune.core.constraint import Constraint
from perilune.core.errors import ConfigError, EngineError, RequestError
from perilune.core.messages import FIRST_COME, Delta, Media, Picture, Pixels, Submit, pictures_of
from perilune.core.sampling import SamplingParams, best, candidates, sibling
from perilune.core.step import TokenLogprob
from perilune.engine.client import blind, check_pictures, check_prompt, room
from perilune.engine.engine import Engine
from perilune.engine.interrupts import put_off
from perilune.engine.vision.given import Medium, Reader
from perilune.formats.hub import resolve_model
from perilune.grammar.constrain import AnswerFormat, ToolChoice, constrain
from perilune.media import placeholders
from perilune.model.config import KimiConfig
from perilune.text import bad_words
from perilune.text.chat import ChatTemplate, PromptOptions, template_for, with_videos
from perilune.text.history import Video, shown
from perilune.text.stream import ChatStream, Content, Reasoning, TextStream, ToolArguments, ToolStart
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import parse_tools

Prompt = str | Sequence[int]

DROPPED_SECONDS = 10.0  # `__del__` waits at most this long for the close, so that the next LLM finds free memory.


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a prompt.

    `token_ids` include the end token if one ended the text; `text` does not, and is None when the model directory has
    no tokenizer. `logprobs` and `prompt_logprobs` are filled when asked for (the first prompt token has none).
    `closed_by_grammar`: max_tokens was nearly used up, so the grammar replaced sampled tokens to complete the answer's
    form; `finish_reason` is then "length".
    `drafted_tokens` were verified (see EngineConfig.draft), `accepted_tokens` of them became part of `token_ids`.
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    cached_tokens: int
    drafted_tokens: int = field(default=0, compare=False)
    accepted_tokens: int = field(default=0, compare=False)
    closed_by_grammar: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """An assistant turn: reasoning apart from content, tool calls with their native ids."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    completion: Completion

    @property
    def text(self) -> str:
        return self.content

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completion.token_ids

    @property
    def finish_reason(self) -> str:
        reason = self.completion.finish_reason
        return "tool_calls" if self.tool_calls and reason == "stop" else reason


class LLM:
    """A Kimi K2-family model ready to generate. Several may live in one process; `close()` frees everything, as
    dropping the last reference does.

    `model` is a directory, a Hugging Face repository id or "kimi-nano"; keyword arguments are the keys of
    `core.config.EngineConfig`. Calls from several threads are served one after the other; for concurrent users run
    the server.
    """

    def __init__(self, model: str | Path = "kimi-nano", *, progress: bool = False, **config: Any):
        path = resolve_model(str(model), progress=progress, check=KimiConfig.from_directory)
        self.tokenizer = Tokenizer.from_directory(path) if (path / "tiktoken.model").is_file() else None
        if self.tokenizer is not None:
            self.tokenizer.require_size(KimiConfig.from_directory(path).vocab_size, path)
        self._engine: Engine | None = Engine(path, build(EngineConfig, config), progress=progress)
        self._lock, self._process = threading.Lock(), os.getpid()
        self._ids = itertools.count()
        self.path = path
        self.info = self._engine.info
        self.config = self._engine.config
        self._reader = Reader(path, self.info)
        ends = self.tokenizer.stop_ids if self.tokenizer is not None else frozenset[int]()
        self._end_tokens = ends | set(self.info.stop_token_ids)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int = 1,
        best_of: int | None = None,
        constraint: Constraint | None = None,
        cache_keys: Sequence[str] = (),
        pictures: Sequence[Medium] | Sequence[Sequence[Medium]] = (),
        progress: bool = False,
    ) -> list[Completion]:
        """Completions in the order of `prompts`; one prompt (a string or a list of token ids) gives a list of one.

        With `n`, that many per prompt, one after the other: those of prompt p begin at p * n. With `best_of`, that many
        are generated and the n with the highest mean log-probability per token kept, best first; candidate i runs with
        `core.sampling.sibling(params, i)`.

        `constraint` (grammar.constrain) fixes the form of every completion.

        Cached KV is shared only with calls of equal `cache_keys`, such as ("salt:TENANT",).

        `pictures`: a list for one prompt, a list of lists for several. Items are files (bytes, paths, data: URLs), PIL
        images or decoded pictures (media.decoder.Picture), in the order of their placeholders in the prompt
        (`<|media_pad|>`, id info.media_pad): one placeholder per picture, or one per token of it. A video is given as
        {"type": "video", "video": X}; a prompt that is a string has `<|kimi_k25_video_placeholder|>` for it.

        Prompts are raw: a control token's name in a string, such as `<|im_end|>`, becomes that token. Pass what users
        write to `chat`, which encodes such names as plain text.

        Raises RequestError, before anything runs, for a prompt that cannot be served, and EngineError when a request
        fails on the way.
        """
        count = candidates(n, best_of)
        asked, seen = self._with_media(_as_prompts(prompts), pictures)
        tokens = [ids for ids in asked for _ in range(count)]
        wanted = [sibling(p, i) for p in _as_params(params, len(asked)) for i in range(count)]
        unscored = [p.logprobs is None for p in wanted]
        if count > n:
            wanted = [dataclasses.replace(p, logprobs=p.logprobs or 0) for p in wanted]
        streams = [
            TextStream(self.tokenizer, p.stop, end_ids=p.stop_token_ids) if self.tokenizer else None for p in wanted
        ]
        for stream, p in zip(streams, wanted):
            if stream is not None:
                stream.unarmed = p.min_tokens
        if self.tokenizer is None and any(p.stop for p in wanted):
            raise RequestError("stop strings need a tokenizer, and the model directory has none", param="stop")
        parts: list[list[str]] = [[] for _ in tokens]

        def take(i: int, delta: Delta) -> bool:
            stream = streams[i]
            if stream is None:
                return False
            parts[i].append(stream.feed(delta.tokens))
            return stream.stopped

        shared = [found for found in seen for _ in range(count)]
        runs = self._run(tokens, wanted, take, progress, constraint, tuple(cache_keys), shared)
        results = []
        for run, stream, part in zip(runs, streams, parts):
            text = None if stream is None else "".join(part) + stream.finish()
            results.append(run.completion(text))
        if count == n:
            return results
        results = [dataclasses.replace(c, logprobs=()) if bare else c for c, bare in zip(results, unscored)]
        scores = [[record.logprob for record in run.logprobs] for run in runs]
        firsts = range(0, len(results), count)
        return [results[first + i] for first in firsts for i in best(scores[first : first + count], n)]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: ToolChoice = "auto",
        parallel_tool_calls: bool = True,
        answer: AnswerFormat | None = None,
        thinking: bool | None = None,
        thinking_budget: int | None = None,
        preserve_thinking: bool = False,
        continue_final_message: bool | None = None,
        cache_keys: Sequence[str] = (),
    ) -> ChatCompletion:
        """The assistant's next turn of an OpenAI-style conversation.

        Content parts may be pictures and videos: {"type": "image_url", "image_url": {"url": X}}, or short {"type":
        "image", "image": X}, and "video_url" and "video" likewise. X is a data: URL, or, in this library alone, a
        path, a file's bytes, a PIL image or a decoded picture or video.

        Tool calls follow the schemas of `tools`, and the answer's text follows `answer`; reasoning ends after at most
        `thinking_budget` tokens. `thinking` None: the model's default. If the last message is an assistant's, the model
        continues it, unless `continue_final_message` is False; the result has only the new text (text/beginning.py).
        Raises RequestError for a schema that cannot be enforced, and for a thinking mode that the model lacks.
        `cache_keys` as in `generate`.
        """
        tokenizer = self._need_tokenizer()
        template: ChatTemplate = template_for(self.path)
        thinks = template.thinks(thinking)
        options: PromptOptions = {
            "tools": tools,
            "thinking": thinks,
            "preserve_thinking": preserve_thinking,
            "continue_final_message": continue_final_message,
        }
        messages, seen = self._reader.messages(messages)
        prompt = template.read(tokenizer, messages, **options)
        begun = prompt.beginning
        params = params or SamplingParams()
        stream = ChatStream(
            tokenizer,
            thinking=begun.opened,
            tools=tools,
            stop=params.stop,
            first_tool_index=prompt.next_tool_index,
            end_ids=params.stop_token_ids,
            begun=bool(begun.content),
        )
        stream.unarmed = params.min_tokens
        constraint = constrain(
            tokenizer,
            tools=parse_tools(tools),
            choice=tool_choice,
            parallel=parallel_tool_calls,
            first_index=prompt.next_tool_index,
            thinking=begun.thinks,
            answer=answer,
            thinking_budget=thinking_budget,
            begun=begun.content,
        )
        events: list[Any] = []

        def take(_: int, delta: Delta) -> bool:
            events.extend(stream.feed(delta.tokens))
            return stream.stopped

        pictures = [pictures_of(seen)]
        (run,) = self._run([prompt.ids], [params], take, False, constraint, tuple(cache_keys), pictures)
        events.extend(stream.finish())
        reasoning = "".join(e.text for e in events if isinstance(e, Reasoning))
        content = "".join(e.text for e in events if isinstance(e, Content))
        calls: dict[int, ToolCall] = {}
        for e in events:
            if isinstance(e, ToolStart):
                calls[e.index] = ToolCall(e.id, e.name, "")
            elif isinstance(e, ToolArguments):
                call = calls[e.index]
                calls[e.index] = ToolCall(call.id, call.name, call.arguments + e.text)
        for index in stream.incomplete:
            del calls[index]
        return ChatCompletion(reasoning, content, tuple(calls.values()), run.completion(content))

    def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probability (natural log) of token i+1 given tokens 0..i; len(token_ids) - 1 values."""
        if len(token_ids) < 2:
            raise RequestError("score needs at least two tokens", param="token_ids")
        # A request always samples once; that token is thrown away.
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        head = [int(t) for t in token_ids]
        (run,) = self._run([head], [params], lambda i, d: False, False)
        return [p.logprob for p in run.prompt_logprobs]

    def close(self) -> None:
        """Frees weights, cache and threads; the object cannot be used afterwards. Closing twice is harmless."""
        with self._lock:
            if self._engine is not None:
                self._engine.close()
                self._engine = None
                self._reader.close()

    def __del__(self) -> None:
        """Closes an LLM that was dropped without `close`, as when a notebook cell runs again: else other ranks and
        their memory would stay until the process ends. A new thread closes, because the garbage collector may run
        anywhere: inside a lock that `close` takes, or on a thread that `close` joins."""
        engine = self.__dict__.get("_engine")
        if engine is None or self._process != os.getpid():  # a forked child has no threads; its parent has the ranks
            return
        if not sys.is_finalizing():  # then no thread can start, and the process ends anyway
            closing = threading.Thread(target=engine.close, name="perilune-close", daemon=True)
            closing.start()
            closing.join(DROPPED_SECONDS)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        take: Callable[[int, Delta], bool],
        progress: bool,
        constraint: Constraint | None = None,
        cache_keys: tuple[str, ...] = (),
        pictures: Sequence[Sequence[Picture]] | None = None,
    ) -> "list[_Run]":
        """Runs all prompts to their ends. `take(index, delta)` sees every delta and may end its request early."""
        pictures = pictures or [()] * len(prompts)
        for prompt, given, seen in zip(prompts, params, pictures):
            check_prompt(prompt, self.info)
            check_pictures(prompt, seen, self.info)
            if constraint is not None:
                constraint.check_room(room(prompt, given, self.info))
        with self._lock, put_off() as interrupted:
            engine = self._engine
            if engine is None:
                raise ConfigError("this LLM is closed")
            runs = {next(self._ids): _Run(i) for i in range(len(prompts))}
            failure: str | None = None
            try:
                for rid, run in runs.items():
                    ends = self._resolved(params[run.index]).ending_with(self._end_tokens)
                    media = tuple(map(Media.of, pictures[run.index]))
                    ids = tuple(prompts[run.index])
                    engine.submit(Submit(rid, ids, ends, constraint, cache_keys, FIRST_COME, media))
                with _bar(len(prompts), progress) as bar:
                    task = bar.add_task("generating", total=len(prompts))
                    while engine.busy and failure is None:
                        interrupted()
                        deltas = engine.step()
                        for want in engine.wants():
                            patches = pictures[runs[want.rid].index][want.item].patches
                            engine.provide(Pixels(want.rid, want.item, memoryview(patches).cast("B")))
                        for delta in deltas:
                            run = runs[delta.rid]
                            for piece in delta.singly():
                                run.add(piece)
                                # "length": the last token that max_tokens allows completes a stop string.
                                if take(run.index, piece) and run.finish_reason in (None, "length"):
                                    run.finish_reason, run.closed_by_grammar = "stop", False
                                    engine.cancel(delta.rid)
                                if run.finish_reason is not None:
                                    bar.advance(task)
                                    break
                            if run.finish_reason == "error":
                                failure = delta.error
                    engine.check()  # an engine that has lost a rank is not busy either
            finally:
                # Also on Ctrl-C or a failed submit: no request of this call may stay in the engine.
                for rid, run in runs.items():
                    if run.finish_reason is None:
                        engine.cancel(rid)
                while engine.busy:
                    engine.step()
        if failure is not None:
            raise EngineError(failure)
        return list(runs.values())

    def _with_media(
        self, prompts: Sequence[Prompt], given: Sequence[Medium] | Sequence[Sequence[Medium]]
    ) -> tuple[list[list[int]], list[list[Picture]]]:
        """The ids of each prompt, in which every picture's placeholder is repeated once for each of its tokens; and the
        pictures of each prompt."""
        if not given:
            return [self._encode(p) for p in prompts], [[] for _ in prompts]
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise RequestError(f"pictures must be a list, also of one picture, not {type(given).__name__}")
        flat = len(prompts) == 1 and not isinstance(given[0], list | tuple)
        lists: Any = [given] if flat else given
        if len(lists) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts, but pictures for {len(lists)}: give a list for each prompt")
        if (pad := self.info.media_pad) is None:
            raise blind(self.info)
        asked, seen = [], []
        for prompt, items in zip(prompts, lists):
            media = [self._reader.item(item, f"pictures[{i}]") for i, item in enumerate(items)]
            if isinstance(prompt, str):
                prompt = with_videos(prompt, [v for v in map(shown, media) if isinstance(v, Video)])
            seen.append(pictures_of(media))
            asked.append(placeholders.expanded(self._encode(prompt), pad, [p.tokens for p in seen[-1]]))
        return asked, seen

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        return bad_words.resolved(params, self._need_tokenizer()) if params.bad_words else params

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer().encode(prompt, allow_special=True)
        return [int(t) for t in prompt]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(
                f"{self.path} has no tiktoken.model: give prompts and bad words as token ids", param="prompt"
            )
        return self.tokenizer


class _Run:
    """The output of one prompt so far."""

    def __init__(self, index: int):
        self.index = index
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.closed_by_grammar = False

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.drafted_tokens += delta.drafted
        self.accepted_tokens += delta.accepted
        self.closed_by_grammar |= delta.closed_by_grammar

    def completion(self, text: str | None) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            tuple(self.tokens),
            text,
            self.finish_reason,
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
            self.cached_tokens,
            self.drafted_tokens,
            self.accepted_tokens,
            self.closed_by_grammar,
        )


def _bar(total: int, show: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, disable=not show)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    # Rows of an array have __index__ too: an array of two dimensions has several prompts.
    if len(prompts) and all(
        isinstance(p, int) or (hasattr(p, "__index__") and not getattr(p, "ndim", 0)) for p in prompts
    ):
        return [list(prompts)]  # type: ignore[arg-type]  # one prompt of token ids: each was looked at
    return list(prompts)  # type: ignore[arg-type]  # several prompts: none of them is an id


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling parameters: give one or as many as prompts")
    return list(params)
