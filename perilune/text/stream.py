"""Generated ids to what a client sees: reasoning, content and tool calls, while the tokens arrive.

The state machine reads ids. A marker's name spelled out in ordinary tokens is text: it may be a quotation, and a
quotation must never become a call. One exception: models misspell the section marker as text in front of a real call
marker; that spelling is taken out of the text.

    REASONING --</think>--> CONTENT --section begin--> BETWEEN --call begin--> HEADER --argument begin--> ARGUMENTS
        '---section or call begin (the model forgot </think>)--> BETWEEN, HEADER       BETWEEN <--call or section end--'
"""

import enum
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from perilune.text.detokenizer import Detokenizer
from perilune.text.stops import StopMatcher
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import Declared, Tool, parse_tools


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class ToolStart:
    """A tool call begins. `index` counts this answer's calls from 0; `id` is native, functions.NAME:COUNTER."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """More of a call's arguments: the model's own JSON text."""

    index: int
    text: str


Event = Reasoning | Content | ToolStart | ToolArguments


@dataclass(frozen=True, slots=True)
class Style:
    """Which tokens give text, besides those of the answer itself.

    keep_stop     the stop string, or the token of `end_ids`, that ended the answer
    show_special  tokens flagged special, except the tokenizer's end tokens
    """

    keep_stop: bool = False
    show_special: bool = False


PLAIN = Style()


class TextStream:
    """Plain completions: ids to text, ended by stop strings. Without a `style`, special and end tokens give no text.

    After each `feed`, `kept` holds the offsets of the fed ids that belong to the answer: not end tokens, and nothing
    after a stop string. `stopped` is true once a stop string was complete; the caller then cancels the request. The
    next `unarmed` ids cannot complete a stop string; set it to the request's min_tokens before the first `feed`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        end_ids: Collection[int] = (),
        style: Style = PLAIN,
    ) -> None:
        self._tokenizer = tokenizer
        self._show_special = style.show_special
        self._ends = _ends(tokenizer, end_ids, style.keep_stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(stop, keep=style.keep_stop)
        self.unarmed = 0
        self.kept: tuple[int, ...] = ()

    @property
    def stopped(self) -> bool:
        return self._stops.matched is not None

    def feed(self, ids: Sequence[int]) -> str:
        """The text that is now certain."""
        if ids and not self._stops.active and self._tokenizer.all_ordinary(ids) and self._ends.isdisjoint(ids):
            self.kept = tuple(range(len(ids)))
            return self._detokenizer.push_ordinary(ids)
        text, kept = "", []
        for offset, id in enumerate(ids):
            if self.stopped:
                break
            self._stops.armed = self.unarmed <= 0
            self.unarmed -= 1
            if id in self._ends:
                continue
            kept.append(offset)
            if self._show_special or not self._tokenizer.is_hidden(id):
                text += self._stops.push(self._detokenizer.push(id))
        self.kept = tuple(kept)
        return text

    def finish(self) -> str:
        """The text that was held back; no more ids may follow."""
        if self.stopped:
            return ""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()


def _ends(tokenizer: Tokenizer, end_ids: Collection[int], keep_stop: bool) -> frozenset[int]:
    """Ids that end an answer and are no part of it."""
    return tokenizer.stop_ids if keep_stop else tokenizer.stop_ids | frozenset(end_ids)


class _Mark(enum.Enum):
    THINK_BEGIN = enum.auto()
    THINK_END = enum.auto()
    SECTION_BEGIN = enum.auto()
    SECTION_END = enum.auto()
    CALL_BEGIN = enum.auto()
    ARGUMENT_BEGIN = enum.auto()
    CALL_END = enum.auto()


class _State(enum.Enum):
    REASONING = enum.auto()
    CONTENT = enum.auto()
    BETWEEN = enum.auto()  # in the tool section outside of calls, or after it: text is dropped
    HEADER = enum.auto()
    ARGUMENTS = enum.auto()


# The section marker written as text, and its misspelling.
_SPELLED = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
_SPELLED_AT_END = re.compile(r"<\|tool_calls?_section_begin\|>\s*\Z")
_NAME = re.compile(r"[\w.-]+")
_COUNTER = re.compile(r"[0-9]{1,9}")


class ChatStream:
    """Reasoning, content and tool calls of one answer.

    thinking: the prompt ended inside `<think>`. tools: what the request declared; without any, tool markers have no
    meaning. stop: stop strings, looked for in content only. first_tool_index: tool calls already in the conversation
    (`chat.next_tool_index`). end_ids: ids that end this request besides the tokenizer's end tokens. begun: the prompt
    holds the beginning of the content. unarmed, style: as in TextStream; markers with a meaning here are never text.
    Control tokens give no text anywhere else, arguments included.

    Reasoning loses trailing white space; content that is only white space is dropped if a tool section follows.
    A call's counter is the model's own unless it repeats one or is below first_tool_index. Arguments are passed
    on as they arrive and cannot be taken back. If the next call begins before a call's end marker, the unfinished
    call's index is listed in `incomplete`: an answer sent whole leaves it out, and `tool_calls` does not count it. A
    call cut off by the end of the output is kept as far as it came. A call without a tool's name in its header gets the
    name of the declared tool that its arguments fit; if none fits, or its header cannot be read, it is dropped.

    `kept` and `stopped` are as in TextStream. `reasoning_tokens` counts the ids of the reasoning, with the marker that
    ended it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        thinking: bool,
        tools: Declared = None,
        stop: Sequence[str] = (),
        first_tool_index: int = 0,
        end_ids: Collection[int] = (),
        begun: bool = False,
        style: Style = PLAIN,
    ) -> None:
        self._tokenizer = tokenizer
        self._show_special = style.show_special
        self._ends = _ends(tokenizer, end_ids, style.keep_stop)
        self._detokenizer = Detokenizer(tokenizer)
        self._tools = {tool.name: tool for tool in parse_tools(tools)}
        self._marks = _read_marks(tokenizer, bool(self._tools))
        self._stops = StopMatcher(stop, keep=style.keep_stop)
        self.unarmed = 0
        self._state = _State.REASONING if thinking else _State.CONTENT
        self._held = ""  # text of this state that may still have to be dropped
        self._content_begun = begun
        self._header = ""
        self._counter: int | None = None  # of the call's id, as the header has it
        self._call: int | None = None  # index of the call in progress; None: its tool is not known yet
        self._arguments_begun = False
        self._raw = False  # whether the arguments are text, passed on with all white space
        self._first = first_tool_index
        self._started = 0  # calls begun
        self._used: set[int] = set()  # counters in the ids of these calls
        self._events: list[Event] = []
        self.incomplete: list[int] = []
        self.stopped = False
        self.kept: tuple[int, ...] = ()
        self.reasoning_tokens = 0

    @property
    def matched(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        return self._stops.matched

    @property
    def tool_calls(self) -> int:
        """Calls begun so far that were not abandoned."""
        return self._started - len(self.incomplete)

    def feed(self, ids: Sequence[int]) -> list[Event]:
        """The events that are now certain; adjacent ones of one kind are joined."""
        if ids and not self._stops.active and self._tokenizer.all_ordinary(ids) and self._ends.isdisjoint(ids):
            self.kept = tuple(range(len(ids)))
            if self._state is _State.REASONING:
                self.reasoning_tokens += len(ids)
            self._text(self._detokenizer.push_ordinary(ids))
            return self._flush_events()
        kept = []
        for offset, id in enumerate(ids):
            if self.stopped:
                break
            self._stops.armed = self.unarmed <= 0
            self.unarmed -= 1
            if id in self._ends:
                continue
            kept.append(offset)
            self.reasoning_tokens += self._state is _State.REASONING
            self._take(id)
        self.kept = tuple(kept)
        return self._flush_events()

    def finish(self) -> list[Event]:
        """The events that were held back; no more ids may follow."""
        if not self.stopped:
            self._text(self._detokenizer.flush())
        if not self.stopped:
            if self._state in (_State.REASONING, _State.CONTENT):
                self._leave_prose(for_tools=False)
            elif self._state is _State.ARGUMENTS and self._call is None:
                self._start_inferred_call()
        return self._flush_events()

    # --- tokens ---

    def _take(self, id: int) -> None:
        mark = self._marks.get(id)
        if mark is None:
            if self._show_special or not self._tokenizer.is_special(id):
                self._text(self._detokenizer.push(id))
        else:
            self._text(self._detokenizer.flush())
            if not self.stopped:
                self._on_mark(mark)

    def _on_mark(self, mark: _Mark) -> None:
        match mark:
            case _Mark.THINK_END:
                if self._state is _State.REASONING:
                    self._leave_prose(for_tools=False)
                    self._state = _State.CONTENT
            case _Mark.THINK_BEGIN:
                # Before any content it opens the reasoning; anywhere else it is dropped.
                if self._state is _State.CONTENT and not self._content_begun and not self._unsaid().strip():
                    self._held = ""
                    self._stops.flush()
                    self._state = _State.REASONING
            case _Mark.SECTION_BEGIN | _Mark.CALL_BEGIN:
                if self._state in (_State.REASONING, _State.CONTENT):
                    self._leave_prose(for_tools=True)
                elif self._state is _State.ARGUMENTS and self._call is not None:
                    self.incomplete.append(self._call)
                self._header = ""
                self._state = _State.HEADER if mark is _Mark.CALL_BEGIN else _State.BETWEEN
            case _Mark.ARGUMENT_BEGIN:
                if self._state is _State.HEADER:
                    self._read_header()
            case _Mark.CALL_END | _Mark.SECTION_END:
                if self._state is _State.ARGUMENTS:
                    self._end_call()
                if self._state in (_State.ARGUMENTS, _State.HEADER):
                    self._state = _State.BETWEEN

    def _text(self, text: str) -> None:
        match self._state:
            case _State.REASONING:
                self._prose(text)
            case _State.CONTENT:
                self._prose(self._stops.push(text))
                if self._stops.matched is not None:
                    self._leave_prose(for_tools=False)
                    self.stopped = True
            case _State.HEADER:
                self._header += text
            case _State.ARGUMENTS:
                self._argument_text(text)
            case _State.BETWEEN:
                pass

    # --- reasoning and content ---

    def _unsaid(self) -> str:
        return self._held + self._stops.pending

    def _prose(self, text: str) -> None:
        if not text:
            return
        self._held += text
        end = _spelled_marker(self._held) if self._tools else len(self._held)
        if self._state is _State.REASONING:
            end = len(self._held[:end].rstrip())
        elif not self._content_begun and not self._held[:end].strip():
            end = 0
        self._say(self._held[:end])
        self._held = self._held[end:]

    def _leave_prose(self, *, for_tools: bool) -> None:
        text, self._held = self._held, ""
        if self._state is _State.CONTENT:
            text += self._stops.flush()
        if for_tools:
            text = _SPELLED_AT_END.sub("", text)
        if self._state is _State.REASONING:
            text = text.rstrip()
        elif for_tools and not self._content_begun and not text.strip():
            text = ""
        self._say(text)

    def _say(self, text: str) -> None:
        if not text:
            return
        if self._state is _State.REASONING:
            self._events.append(Reasoning(text))
        else:
            self._content_begun = True
            self._events.append(Content(text))

    # --- tool calls ---

    def _read_header(self) -> None:
        self._held, self._arguments_begun, self._call = "", False, None
        self._state = _State.ARGUMENTS
        name, self._counter = _split_header(self._header, self._tools)
        if name is None and len(self._tools) == 1:
            name = next(iter(self._tools))
        if name is not None and _NAME.fullmatch(name):
            self._start_call(name)
        elif name is not None:
            self._state = _State.BETWEEN

    def _start_call(self, name: str) -> None:
        counter = self._counter
        if counter is None or counter < self._first or counter in self._used:
            counter = self._first + self._started
            while counter in self._used:
                counter += 1
        self._used.add(counter)
        self._raw = name in self._tools and self._tools[name].form is not None
        self._call, self._started = self._started, self._started + 1
        self._events.append(ToolStart(self._call, f"functions.{name}:{counter}", name))

    def _argument_text(self, text: str) -> None:
        self._held += text
        if self._call is None:
            return
        if self._raw:
            body = self._held
        else:
            if not self._arguments_begun:
                self._held = self._held.lstrip()
            body = self._held.rstrip()
        if body:
            self._events.append(ToolArguments(self._call, body))
            self._arguments_begun = True
            self._held = self._held[len(body) :]

    def _end_call(self) -> None:
        if self._call is None:
            self._start_inferred_call()
        if self._call is not None and not self._arguments_begun:
            self._events.append(ToolArguments(self._call, "" if self._raw else "{}"))

    def _start_inferred_call(self) -> None:
        text = self._held.strip()
        name = _fitting_tool(text, self._tools)
        if name is not None:
            self._start_call(name)
            self._held = ""
            self._argument_text(text)

    def _flush_events(self) -> list[Event]:
        if len(self._events) < 2:
            events, self._events = self._events, []
            return events
        joined: list[Event] = []
        for event in self._events:
            match (joined[-1] if joined else None), event:
                case Reasoning(a), Reasoning(b):
                    joined[-1] = Reasoning(a + b)
                case Content(a), Content(b):
                    joined[-1] = Content(a + b)
                case ToolArguments(i, a), ToolArguments(j, b) if i == j:
                    joined[-1] = ToolArguments(i, a + b)
                case _:
                    joined.append(event)
        self._events = []
        return joined


def _read_marks(tokenizer: Tokenizer, tools: bool) -> dict[int, _Mark]:
    """By id: the markers that have a meaning in this answer."""
    m = tokenizer.markers
    think = {m.think_begin: _Mark.THINK_BEGIN, m.think_end: _Mark.THINK_END}
    calls = {
        m.section_begin: _Mark.SECTION_BEGIN,
        m.section_end: _Mark.SECTION_END,
        m.call_begin: _Mark.CALL_BEGIN,
        m.argument_begin: _Mark.ARGUMENT_BEGIN,
        m.call_end: _Mark.CALL_END,
    }
    meant = think | calls if tools else think
    return {id: mark for id, mark in meant.items() if id is not None}


def _spelled_marker(text: str) -> int:
    """Where a section marker spelled out as text begins at the end of `text`, whole or in part; else its length."""
    if whole := _SPELLED_AT_END.search(text):
        return whole.start()
    begin = text.rfind("<")
    if begin >= 0 and any(marker.startswith(text[begin:]) for marker in _SPELLED):
        return begin
    return len(text)


def _split_header(header: str, declared: Collection[str]) -> tuple[str | None, int | None]:
    """(name, counter) of `functions.NAME:N`, `NAME:N` or `NAME`; the name is None for a bare counter or nothing."""
    head = header.strip().removeprefix("functions.")
    if head in declared:
        return head, None
    if not head or _COUNTER.fullmatch(head):
        return None, int(head) if head else None
    name, colon, counter = head.rpartition(":")
    if not colon:
        return head, None
    return name.strip() or None, int(counter) if _COUNTER.fullmatch(counter.strip()) else None


def _fitting_tool(arguments: str, declared: Mapping[str, Tool]) -> str | None:
    """The declared tool with most of the arguments' names among its properties, if any has one."""
    try:
        data = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    best, most = None, 0
    for name, tool in declared.items():
        properties = tool.parameters.get("properties")
        shared = len(data.keys() & properties.keys()) if isinstance(properties, Mapping) else 0
        if shared > most:
            best, most = name, shared
    return best
