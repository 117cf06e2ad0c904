"""Turns messages into a prompt: control tokens as separate pieces; all client text is plain text between them.

The grammar of a turn is the same in the whole family; what its members write differently is data (text/family.py,
docs/formats.md section 5.4).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack

from perilune.core.errors import CheckpointError, RequestError
from perilune.text.beginning import Beginning, beginning
from perilune.text.family import K26, Member, NotOfTheFamily, member_named, recognise
from perilune.text.history import Image, Turn, Video, next_counter, read_turns
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Declared, Tool, declaration, parse_tools

PLACEHOLDER = "<|media_pad|>"
VIDEO_PLACEHOLDER = "<|kimi_k25_video_placeholder|>"  # plain text, which the vendor's templates write for a video
_ROLE_TOKENS = {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}


@dataclass(frozen=True, slots=True)
class Special:
    """A control token, by name, `count` times in a row."""

    name: str
    count: int = 1


Piece = Special | str
_THINK, _THOUGHT = Special("<think>"), Special("</think>")


class PromptOptions(TypedDict, total=False):
    """Keyword arguments of every rendering method."""

    tools: Declared  # None, the default: none
    thinking: bool | None  # False: the prompt ends in an empty thought (instant mode); None: the model's default
    preserve_thinking: bool | None  # True: reasoning is kept everywhere, not only in the tool loop in progress
    add_generation_prompt: bool  # True, the default: the prompt ends where the assistant's answer begins
    continue_final_message: bool | None  # the answer continues the last message; None, the default: the message decides


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A conversation as the model reads it, and what the parser of its answer needs to know.

    ids              token ids up to where the answer begins or goes on
    beginning        the part of the answer that the ids hold
    next_tool_index  the counter of the next tool call's id
    """

    ids: list[int]
    beginning: Beginning
    next_tool_index: int


class ChatTemplate:
    """The prompts of one member. Methods take OpenAI chat messages and PromptOptions.

    They raise RequestError naming the message and the field that cannot be used. A model is in one of three states:
    it thinks in a thought the prompt opens (`thinks` and `opens_thought`), it thinks and opens its thought by itself
    (`thinks` alone), or it does not think.
    """

    def __init__(self, member: Member = K26) -> None:
        self.member = member

    @property
    def name(self) -> str:
        return self.member.name

    def thinks(self, requested: bool | None) -> bool:
        """Whether the model will think; None: the request does not say.

        RequestError if the request contradicts the model: not to think for one that always does, or the reverse.
        """
        match self.member.thinking, requested:
            case "always", False:
                raise RequestError(
                    f"thinking cannot be disabled: {self.name} always thinks; leave the switch out", param="thinking"
                )
            case "never", True:
                raise RequestError(
                    f"thinking cannot be enabled: {self.name} does not think; leave the switch out", param="thinking"
                )
        return self.member.thinking != "never" and requested is not False

    def opens_thought(self, thinking: bool) -> bool:
        """Whether a prompt ends inside an open <think>, given that the model will think or not.

        False for a model that will think and writes <think> by itself: its answer begins like any other.
        """
        return thinking and self.member.opens_thought

    def preserves(self, requested: bool | None) -> bool:
        """Whether reasoning of earlier turns stays in the prompt; RequestError if the model was not trained for it."""
        if self.member.preserve == "never" and requested:
            raise RequestError(
                f"{self.name} was not made to keep the reasoning of earlier turns: leave out preserve_thinking",
                param="preserve_thinking",
            )
        return self.member.preserve == "always" or bool(requested)

    def sampling_defaults(self, *, thinking: bool) -> tuple[float, float]:
        """(temperature, top_p) that the vendor recommends."""
        return self.member.sampling if thinking else self.member.instant_sampling

    def read(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, Any]],
        check: Callable[[int, int], None] = lambda chars, tokens: None,
        **options: Unpack[PromptOptions],
    ) -> RenderedPrompt:
        """The prompt as token ids, and what the parser of the answer needs; reads every message once.

        `check(characters, tokens so far)` is called before and during tokenization, and may refuse the prompt.

        A last message of the assistant's is continued, unless there is no generation prompt or the options or the
        message say otherwise (text/beginning.py).
        """
        tools, turns, begun = self._read(messages, options)
        ids: list[int] = []
        pieces = self._pieces(tools, turns, begun, options)
        chars = sum(len(p) for p in pieces if isinstance(p, str))
        check(chars, 0)

        def counted(before: int, count: int) -> None:
            check(chars, before + count)

        for p in pieces:
            if isinstance(p, Special):
                ids += [tokenizer.special(p.name)] * p.count
            else:
                ids += tokenizer.encode(p, check=partial(counted, len(ids)))
        return RenderedPrompt(ids, begun, next_counter(turns))

    def pieces(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]) -> list[Piece]:
        """The prompt as control tokens and plain text; no two texts are neighbours."""
        return self._pieces(*self._read(messages, options), options)

    def _read(
        self, messages: Sequence[Mapping[str, Any]], options: PromptOptions
    ) -> tuple[Sequence[Tool], list[Turn], Beginning]:
        """The declared tools, the turns, and the beginning of the answer."""
        tools, turns = parse_tools(options.get("tools")), read_turns(messages)
        begun = beginning(
            self.member,
            messages,
            turns[-1],
            thinking=self._thinking(options),
            continued=options.get("continue_final_message"),
            default=options.get("add_generation_prompt", True),
        )
        return tools, turns, begun

    def _thinking(self, options: PromptOptions) -> bool:
        return self.member.thinking != "never" and self.thinks(options.get("thinking"))

    def _pieces(
        self, tools: Sequence[Tool], turns: Sequence[Turn], begun: Beginning, options: PromptOptions
    ) -> list[Piece]:
        has_thoughts, thinking = self.member.thinking != "never", self._thinking(options)
        earlier = turns[:-1] if begun.given else turns
        finished = -1 if self.preserves(options.get("preserve_thinking")) else _last_final_answer(earlier)
        out: list[Piece] = []
        if tools:
            out += _message("system", "tool_declare", [declaration(tools, self.member.tools)])
        if self.member.default_system is not None and turns[0].role != "system":
            out += [*_message("system", "system", [self.member.default_system]), self.member.after_default_system]
        for i, turn in enumerate(earlier):
            body = _body(turn)
            if turn.role == "assistant":
                if has_thoughts:
                    # Clients that keep the raw text send the thought inside the content: do not write it twice.
                    turn = turn.with_thought_apart()
                    body = [_THINK, turn.reasoning if thinking and i > finished else "", _THOUGHT, *_body(turn)]
                body += _calls(turn)
            elif turn.role == "tool":
                body = [f"## Return of {turn.answers}\n", *body]
            out += _message(turn.role, turn.name, body)
        if begun.given or options.get("add_generation_prompt", True):
            out += [Special("<|im_assistant|>"), begun.name, Special("<|im_middle|>")]
            if begun.opened:
                out += [_THINK, begun.reasoning]
            elif has_thoughts and not begun.thinks:
                out += [_THINK, begun.reasoning, _THOUGHT]
            out += [begun.content]
        return _joined(out)

    def render_text(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]) -> str:
        """The prompt as one string, for display and tests: a control token looks like its name in a text."""
        return "".join(p.name * p.count if isinstance(p, Special) else p for p in self.pieces(messages, **options))

    def render_ids(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], **options: Unpack[PromptOptions]
    ) -> list[int]:
        return self.read(tokenizer, messages, **options).ids


class NoChatTemplate(ChatTemplate):
    """For checkpoints that can be served without chat: every rendering raises CheckpointError with `reason`."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def _read(self, messages: Sequence[Mapping[str, Any]], options: PromptOptions) -> NoReturn:
        raise CheckpointError(self._reason)


def template_for(model_dir: Path, name: str | None = None) -> ChatTemplate:
    """The chat template of a model directory: the one named (see family.MEMBERS), else the recognised member's.

    ConfigError for an unknown name, CheckpointError if the files that show it cannot be read. For a checkpoint
    of another family the template itself raises when used.
    """
    if name is not None:
        return ChatTemplate(member_named(name))
    try:
        return ChatTemplate(recognise(model_dir))
    except NotOfTheFamily as e:
        return NoChatTemplate(str(e))


def next_tool_index(messages: Sequence[Mapping[str, Any]]) -> int:
    """The counter of the next tool call's id in a conversation. Takes messages as sent."""
    return next_counter(read_turns(messages))


def _last_final_answer(turns: Sequence[Turn]) -> int:
    """Index of the last assistant turn without tool calls, -1 if none: up to there, reasoning is dropped."""
    return max((i for i, t in enumerate(turns) if t.role == "assistant" and not t.calls), default=-1)


def _message(role: str, name: str, body: Sequence[Piece]) -> list[Piece]:
    token = _ROLE_TOKENS.get(role, "<|im_system|>")
    return [Special(token), name, Special("<|im_middle|>"), *body, Special("<|im_end|>")]


def _body(turn: Turn) -> list[Piece]:
    """The parts of a message; a picture's placeholder is repeated once for each of its tokens (docs/formats.md 4.3)."""
    out: list[Piece] = []
    for part in turn.parts:
        match part:
            case Image(tokens):
                out += [*_media("image", tokens), "\n"]
            case Video(chunks):
                for time, tokens in chunks:
                    out += [time, *_media("video", tokens)]
                out.append("\n")
            case _:
                out.append(part)
    return out


def _media(word: str, tokens: int) -> list[Piece]:
    pads = Special(PLACEHOLDER, tokens)
    return [Special("<|media_begin|>"), word, Special("<|media_content|>"), pads, Special("<|media_end|>")]


def with_videos(prompt: str, videos: Sequence[Video]) -> str:
    """A raw prompt with each video in the place of its VIDEO_PLACEHOLDER: one PLACEHOLDER for each chunk.

    RequestError if the numbers of videos and placeholders differ.
    """
    before, *texts = prompt.split(VIDEO_PLACEHOLDER)
    if len(texts) != len(videos):
        raise RequestError(f"the prompt has {len(texts)} times {VIDEO_PLACEHOLDER}, and videos are {len(videos)}",
                           param="pictures")  # fmt: skip
    media = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    shown = ["".join(time + media for time, _ in video.chunks) for video in videos]
    return before + "".join(video + text for video, text in zip(shown, texts))


def _calls(turn: Turn) -> list[Piece]:
    if not turn.calls:
        return []
    out: list[Piece] = [Special("<|tool_calls_section_begin|>")]
    for call in turn.calls:
        out += [Special("<|tool_call_begin|>"), call.id, Special("<|tool_call_argument_begin|>"), call.arguments]
        out += [Special("<|tool_call_end|>")]
    return [*out, Special("<|tool_calls_section_end|>")]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    out: list[Piece] = []
    for p in pieces:
        if isinstance(p, str) and out and isinstance(out[-1], str):
            out[-1] += p
        elif p != "":
            out.append(p)
    return out
