"""Answers taken apart while they arrive: every way of cutting the ids into pieces must tell the same story."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.text.stops import StopMatcher
from perilune.text.stream import ChatStream, Content, Event, Reasoning, Style, TextStream, ToolArguments, ToolStart
from perilune.text.tokenizer import AddedToken, Tokenizer

NAMES = ("[EOS]", "<|im_end|>", "[EOT]", "<|im_user|>", "<|media_pad|>")
MARKERS = ("<think>", "</think>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>")
MARKERS += ("<|tool_call_argument_begin|>", "<|tool_call_end|>")
BYTES = Tokenizer(
    {bytes([i]): i for i in range(256)},
    {256 + i: AddedToken(name, name in NAMES) for i, name in enumerate(NAMES + MARKERS)},
)
THINK, DONE, SECTION, SECTION_END, CALL, ARGS, CALL_END = (BYTES.special(name) for name in MARKERS)
EOS, USER, RESERVED = BYTES.special("[EOS]"), BYTES.special("<|im_user|>"), 300
NATIVE = "functions.f:0"


def tool(name: str, *properties: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {p: {"type": "string"} for p in properties}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("f", "a"), tool("weather", "city", "unit"), tool("look.up", "query", "unit")]


def ids(*parts: str | int) -> list[int]:
    """Text as single bytes, markers as they are."""
    return [i for p in parts for i in (p.encode() if isinstance(p, str) else (p,))]


def call(header: str = NATIVE, arguments: str = '{"a": 1}') -> list[int]:
    return ids(CALL, header, ARGS, arguments, CALL_END)


def section(*calls: list[int]) -> list[int]:
    return [SECTION, *itertools.chain(*calls), SECTION_END]


def joined(events: Sequence[Event]) -> list[Event]:
    out: list[Event] = []
    for e in events:
        last = out[-1] if out else None
        if isinstance(e, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + e.text)
        elif isinstance(e, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + e.text)
        elif isinstance(e, ToolArguments) and isinstance(last, ToolArguments) and e.index == last.index:
            out[-1] = ToolArguments(last.index, last.text + e.text)
        else:
            out.append(e)
    return out


def run(tokens: Sequence[int], *, thinking: bool = True, tools: Any = TOOLS, **options: Any) -> list[Event]:
    """The events of an answer, which must be the same fed at once and one by one."""
    whole = ChatStream(BYTES, thinking=thinking, tools=tools, **options)
    fed = whole.feed(tokens)
    assert fed == joined(fed)
    events = fed + whole.finish()
    single = ChatStream(BYTES, thinking=thinking, tools=tools, **options)
    pieces = [e for t in tokens for e in single.feed([t])] + single.finish()
    assert joined(pieces) == joined(events)
    return joined(events)


def test_reasoning_then_content() -> None:
    assert run(ids("Let me see.\n\n", DONE, "Grüße 🜁", EOS)) == [Reasoning("Let me see."), Content("Grüße 🜁")]
    assert run(ids(THINK, " T", DONE, "\nA ")) == [Reasoning(" T"), Content("\nA ")]
    assert run(ids("A", EOS), thinking=False) == [Content("A")]
    assert run(ids("\n", THINK, "T", DONE, "A"), thinking=False) == [Reasoning("T"), Content("A")]
    assert run(ids("cut off \n")) == [Reasoning("cut off")]
    assert run([]) == [] and run(ids(DONE, EOS)) == []


def test_white_space_only_content_survives_without_tools() -> None:
    assert run(ids("T", DONE, " \n", EOS)) == [Reasoning("T"), Content(" \n")]
    assert run(ids(" \n", EOS), thinking=False, tools=None) == [Content(" \n")]


def test_tool_calls() -> None:
    second = call("functions.weather:1", ' {"city": "上海"}\n')
    events = run(ids("T\n", DONE, "C\n\n", *section(call(), second), "ignored", EOS))
    assert events == [
        Reasoning("T"),
        Content("C\n\n"),
        ToolStart(0, "functions.f:0", "f"),
        ToolArguments(0, '{"a": 1}'),
        ToolStart(1, "functions.weather:1", "weather"),
        ToolArguments(1, '{"city": "上海"}'),
    ]
    assert run(ids("T", DONE, " \n", *section(call()))) == [Reasoning("T"), *events[2:4]]


def test_arguments_and_text_are_passed_on_as_they_arrive() -> None:
    stream = ChatStream(BYTES, thinking=True, tools=TOOLS)
    assert stream.feed(ids("T ")) == [Reasoning("T")]
    assert stream.feed(ids(" U")) == [Reasoning("  U")]
    assert stream.feed(ids(DONE, "C<")) == [Content("C")]
    assert stream.feed(ids("b>")) == [Content("<b>")]
    assert stream.feed(ids(SECTION, CALL, NATIVE)) == []
    assert stream.feed([ARGS]) == [ToolStart(0, "functions.f:0", "f")]
    assert stream.feed(ids('{"a": ')) == [ToolArguments(0, '{"a":')]
    assert stream.feed(ids("1}", CALL_END)) == [ToolArguments(0, " 1}")]
    assert stream.feed([SECTION_END, EOS]) == [] == stream.finish()
    assert stream.tool_calls == 1 and not stream.stopped and stream.incomplete == []
    assert stream.reasoning_tokens == len("T  U") + 1


def test_section_inside_reasoning_ends_it() -> None:  # failure mode 1
    expected = [Reasoning("T"), ToolStart(0, "functions.f:0", "f"), ToolArguments(0, '{"a": 1}')]
    assert run(ids("T\n", *section(call()), EOS)) == expected


def test_call_without_its_section() -> None:  # failure mode 2
    expected = [ToolStart(0, "functions.f:0", "f"), ToolArguments(0, '{"a": 1}')]
    assert run(ids("T ", *call(), EOS)) == [Reasoning("T"), *expected]
    assert run(ids("C ", *call(), EOS), thinking=False) == [Content("C "), *expected]


@pytest.mark.parametrize(
    ("header", "id"),
    [
        ("functions.weather:0", "functions.weather:0"),
        (" functions.weather:4\n", "functions.weather:4"),
        ("weather:0", "functions.weather:0"),
        ("functions.look.up:2", "functions.look.up:2"),
        ("look.up:2", "functions.look.up:2"),
        ("weather", "functions.weather:0"),
        ("functions.weather : 3", "functions.weather:3"),
        ("functions.undeclared-tool:0", "functions.undeclared-tool:0"),
        ("functions.weather:x", "functions.weather:0"),
        ("functions.weather:" + "9" * 5000, "functions.weather:0"),
    ],
)
def test_header_forms(header: str, id: str) -> None:  # failure modes 3 and 4
    events = run(section(call(header, "{}")))
    assert events == [ToolStart(0, id, id.split(".", 1)[1].rsplit(":", 1)[0]), ToolArguments(0, "{}")]


@pytest.mark.parametrize(
    ("header", "arguments", "start"),
    [
        ("3", '{"city": "Oslo", "unit": "C"}', ToolStart(0, "functions.weather:3", "weather")),
        ("3", '{"query": "x", "unit": "C"}', ToolStart(0, "functions.look.up:3", "look.up")),
        (":1", '{"a": 1}', ToolStart(0, "functions.f:1", "f")),
        ("", '{"city": 1}', ToolStart(0, "functions.weather:0", "weather")),
        ("functions.0", '{"city": 1}', ToolStart(0, "functions.weather:0", "weather")),
    ],
)
def test_bare_counters_find_their_tool(header: str, arguments: str, start: ToolStart) -> None:
    assert run(section(call(header, arguments))) == [start, ToolArguments(0, arguments)]


def test_bare_counter_with_a_single_tool_streams_at_once() -> None:
    stream = ChatStream(BYTES, thinking=False, tools=TOOLS[:1])
    assert stream.feed(ids(SECTION, CALL, "7", ARGS, "{")) == [
        ToolStart(0, "functions.f:7", "f"),
        ToolArguments(0, "{"),
    ]


@pytest.mark.parametrize("arguments", ["{}", '{"nothing": 1}', "[1]", "{broken", "", "[" * 100_000])
def test_bare_counter_that_fits_no_tool_is_dropped(arguments: str) -> None:
    stream = ChatStream(BYTES, thinking=False, tools=TOOLS)
    assert stream.feed(section(call("0", arguments))) + stream.finish() == [] and stream.tool_calls == 0


@pytest.mark.parametrize("header", ["functions.get weather:0", "a:b:3", "<script>:0", "functions.ünï/:1"])
def test_unreadable_headers_are_dropped(header: str) -> None:
    expected = [ToolStart(0, "functions.f:0", "f"), ToolArguments(0, "{}")]
    assert run(section(call(header), call("functions.f:0", "{}"))) == expected


def test_empty_arguments_become_an_empty_object() -> None:
    expected = [ToolStart(0, "functions.f:0", "f"), ToolArguments(0, "{}")]
    assert run(section(call(arguments=""))) == run(section(call(arguments=" \n"))) == expected


def test_counters_are_never_given_twice() -> None:
    calls = section(
        call("functions.f:0"), call("functions.f:2"), call("functions.f:2"), call("f"), call("functions.f:9")
    )
    starts = [e.id for e in run(calls) if isinstance(e, ToolStart)]
    assert starts == ["functions.f:0", "functions.f:2", "functions.f:3", "functions.f:4", "functions.f:9"]
    starts = [e.id for e in run(calls, first_tool_index=2) if isinstance(e, ToolStart)]
    assert starts == ["functions.f:2", "functions.f:3", "functions.f:4", "functions.f:5", "functions.f:9"]


def test_call_without_its_end() -> None:
    stream = ChatStream(BYTES, thinking=False, tools=TOOLS)
    first = ids(CALL, "functions.f:0", ARGS, '{"a": ')
    bare = ids(CALL, "8", ARGS, '{"a": 1}')  # of no tool until its end: it was never begun
    events = joined(
        stream.feed(section(first, bare, call("functions.f:1"), ids(CALL, "functions.f:2"), call("functions.f:3")))
    )
    assert [e.id for e in events if isinstance(e, ToolStart)] == ["functions.f:0", "functions.f:1", "functions.f:3"]
    assert stream.incomplete == [0] and stream.tool_calls == 2
    # The end of the section ends the call, and the end of the output leaves it as it is.
    expected = [ToolStart(0, "functions.f:0", "f"), ToolArguments(0, '{"a":')]
    assert run(ids(SECTION, *first, SECTION_END)) == expected == run(ids(SECTION, *first, EOS))
    assert run(ids(SECTION, CALL, "functions.f:0", EOS)) == [] == run(ids(SECTION, CALL, "functions.f:0", CALL_END))
    assert run(ids(SECTION, CALL, "functions.f:0", ARGS)) == [ToolStart(0, "functions.f:0", "f")]


def test_without_tools_their_markers_never_show() -> None:
    """A model that goes on calling when a client asks for a summary without its tools."""
    calls = section(call(arguments="{}"))
    for none in (None, [], ()):
        events = run(ids("T", DONE, "C", *calls, "!", EOS), tools=none)
        assert events == [Reasoning("T"), Content(f"C{NATIVE}{{}}!")]
    shown = run(ids("C", *calls, EOS), thinking=False, tools=None, style=Style(show_special=True))
    text = f"<|tool_calls_section_begin|><|tool_call_begin|>{NATIVE}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert shown == [Content(f"C{text}<|tool_calls_section_end|>")]


def test_other_control_tokens_never_show() -> None:
    noise = (USER, RESERVED, THINK, DONE, EOS, CALL_END, ARGS, SECTION_END)
    assert run(ids("T", USER, RESERVED, ARGS, DONE, "A", *noise, "B", *noise)) == [Reasoning("T"), Content("AB")]
    arguments = ids('{"a": "', THINK, USER, DONE, '"}')
    assert run(ids(CALL, NATIVE, ARGS, *arguments, CALL_END))[1:] == [ToolArguments(0, '{"a": ""}')]


@pytest.mark.parametrize("spelled", ["<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"])
def test_section_marker_spelled_as_text(spelled: str) -> None:
    expected = [ToolStart(0, "functions.f:0", "f"), ToolArguments(0, '{"a": 1}')]
    assert run(ids("T ", spelled, *call())) == [Reasoning("T"), *expected]
    assert run(ids("\n", spelled, "\n", *call()), thinking=False) == expected
    assert run(ids("C ", spelled, " ", *call()), thinking=False) == [Content("C "), *expected]
    # Quoted, it is text, and so is a call spelled out.
    quote = f"{spelled}<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert run(ids("T", quote, DONE, quote)) == [Reasoning("T" + quote), Content(quote)]
    assert run(ids("write ", spelled), thinking=False) == [Content("write " + spelled)]


def test_stop_strings_end_no_content_within_min_tokens() -> None:
    stream = ChatStream(BYTES, thinking=True, stop=("b",))
    stream.unarmed = 4
    assert stream.feed(ids("b", DONE, "bbbx")) == [Reasoning("b"), Content("bb")]  # </think> is one of the four
    assert stream.stopped and stream.matched == "b"


def test_stop_strings_end_content_only() -> None:
    stream = ChatStream(BYTES, thinking=True, tools=TOOLS, stop=("END", "世界"))
    assert stream.feed(ids("END 世界", DONE)) == [Reasoning("END 世界")]
    assert stream.feed(ids("a EN")) == [Content("a ")]
    assert stream.feed(ids("E")) == [Content("EN")]
    assert stream.kept == (0,) and not stream.stopped
    assert stream.feed(ids("ND rest", EOS)) == [] and stream.stopped
    assert stream.kept == (0, 1)
    assert stream.feed(ids("more")) == [] == stream.finish() and stream.kept == ()
    assert run(ids("T", DONE, "a 世界 b"), stop=("END", "世界")) == [Reasoning("T"), Content("a ")]
    assert run(ids("a EN", *section(call("functions.f:0", "END"))), thinking=False, stop=("END",)) == [
        Content("a EN"),
        ToolStart(0, "functions.f:0", "f"),
        ToolArguments(0, "END"),
    ]
    assert run(ids("a EN", EOS), thinking=False, stop=("END",)) == [Content("a EN")]
    assert run(ids("\n\nEND"), thinking=False, stop=("END",)) == [Content("\n\n")]
    assert run(ids("EN", THINK, "D"), thinking=False, stop=("END",)) == []


def test_end_tokens_do_not_count() -> None:
    stream = ChatStream(BYTES, thinking=False, end_ids=(ord("x"),))
    assert stream.feed(ids("ab", EOS, "cx")) == [Content("abc")]
    assert stream.kept == (0, 1, 3)


def test_split_characters_wait_and_broken_ones_are_replaced() -> None:
    stream = ChatStream(BYTES, thinking=False)
    assert stream.feed(list("世".encode()[:2])) == []
    assert stream.feed([*"世".encode()[2:], 0xE4]) == [Content("世")]
    assert stream.finish() == [Content("\ufffd")]
    assert run([0xE4, DONE, 0xB8]) == [Reasoning("\ufffd"), Content("\ufffd")]


TEXTS = [
    "a",
    " ",
    "\n\n",
    "世",
    "🜁",
    "END",
    "EN",
    "<|tool_calls_section_begin|>",
    "<|tool_call_sec",
    "<|",
    "functions.f:0",
]
TEXTS += ["weather:1", "3", '{"a": 1}', '{"city": "x"}', "functions."]
ATOMS = [*(ids(t) for t in TEXTS), [0xE4], [0xB8], [EOS], [USER], [RESERVED]]
ATOMS += [[m] for m in (THINK, DONE, SECTION, SECTION_END, CALL, ARGS, CALL_END)] * 2
ATOMS += [call(), call("2", '{"city": 1}'), section(call("weather:5"))]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(ATOMS), max_size=24),
    st.booleans(),
    st.sampled_from([None, TOOLS, TOOLS[:1]]),
    st.sampled_from([(), ("END",), ("\n", "世END", "a ")]),
    st.randoms(use_true_random=False),
)
def test_events_do_not_depend_on_how_the_ids_were_cut(
    atoms: list[list[int]], thinking: bool, tools: Any, stop: tuple[str, ...], draw: random.Random
) -> None:
    tokens = list(itertools.chain(*atoms))

    def play(cuts: list[int]) -> tuple[Any, ...]:
        stream = ChatStream(BYTES, thinking=thinking, tools=tools, stop=stop)
        events: list[Event] = []
        kept: list[int] = []
        for low, high in itertools.pairwise([0, *cuts, len(tokens)]):
            events += stream.feed(tokens[low:high])
            kept += [low + k for k in stream.kept]
        events += stream.finish()
        return joined(events), kept, stream.stopped, stream.tool_calls, stream.incomplete, stream.reasoning_tokens

    whole = play([])
    assert play(sorted(draw.randint(0, len(tokens)) for _ in range(draw.randint(1, 8)))) == whole
    assert play(list(range(1, len(tokens)))) == whole
    events, kept, stopped, calls, incomplete, _ = whole
    assert not any(tokens[k] == EOS for k in kept)
    assert calls + len(incomplete) == sum(isinstance(e, ToolStart) for e in events)
    ids_given = [e.id for e in events if isinstance(e, ToolStart)]
    assert len({i.rsplit(":")[-1] for i in ids_given}) == len(ids_given)
    text = "".join(e.text for e in events if isinstance(e, Content))
    shown = "".join(e.name if isinstance(e, ToolStart) else e.text for e in events)
    assert not any(m in shown for m in MARKERS if m != "<|tool_calls_section_begin|>")
    assert not any(s in text for s in stop)
    assert not stopped or stop


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "aab", "世", "abab", "\n"]), max_size=12),
    st.lists(st.sampled_from(["ab", "aab", "abab", "b世", "aaa", "\n\n", "a"]), max_size=3),
    st.randoms(use_true_random=False),
)
def test_stop_matcher_against_a_search_of_the_whole_text(
    parts: list[str], stops: list[str], draw: random.Random
) -> None:
    text = "".join(parts)
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 6)))
    armed_from = draw.choice([0, *cuts])
    found = [(at + len(s), -len(s)) for s in stops for at in range(len(text)) if text.startswith(s, at)]
    ends = [end for end in found if end[0] > armed_from]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    matcher, out = StopMatcher(stops), ""
    for low, high in itertools.pairwise([0, *cuts, len(text)]):
        matcher.armed = low >= armed_from
        out += matcher.push(text[low:high])
    assert (matcher.matched is not None) == bool(ends)
    assert out + matcher.flush() == expected


def test_stop_matcher_holds_back_no_more_than_it_must() -> None:
    matcher = StopMatcher(["abcab!"])
    assert matcher.push("xabcab") == "x" and matcher.pending == "abcab"
    assert matcher.push("c") == "abc" and matcher.pending == "abc"
    assert matcher.push("q") == "abcq" and matcher.pending == ""
    assert StopMatcher([]).push("anything") == "anything"
    assert StopMatcher(["ab", "aab"]).push("xaab") == StopMatcher(["aab", "ab"]).push("xaab") == "x"


def test_plain_text_stream() -> None:
    stream = TextStream(BYTES, ("END",))
    assert stream.feed(ids("a", THINK, USER, CALL, "ü ", RESERVED, EOS)) == (
        "a<think><|tool_call_begin|>ü <|reserved_token_300|>"
    )
    assert stream.kept == tuple(range(8))  # all but the end token; ü is two bytes
    assert stream.feed(ids("E")) == "" and stream.feed(ids("N")) == "" and stream.feed(ids("E")) == "EN"
    assert stream.feed(ids("NDx")) == "" and stream.stopped and stream.kept == (0, 1)
    assert stream.finish() == ""
    late = TextStream(BYTES, ("END",))
    late.unarmed = 5
    assert late.feed(ids("xENDEND")) == "xEND" and late.stopped and late.kept == tuple(range(7))
    held = TextStream(BYTES, ("END",))
    assert held.feed([*ids("xEN"), 0xE4]) == "x"
    assert held.finish() == "EN\ufffd" and not held.stopped


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([*b"aE", 0xE4, 0xB8, 0x96, THINK, USER, RESERVED, EOS]), max_size=20))
def test_plain_text_stream_decodes_like_the_tokenizer(tokens: list[int]) -> None:
    stream = TextStream(BYTES)
    text = "".join(stream.feed([t]) for t in tokens) + stream.finish()
    assert text == BYTES.decode([t for t in tokens if t != EOS], skip_special=True)


def test_golden_call_of_the_real_vocabulary(kimi: Tokenizer) -> None:
    tokens = [163595, 163597, 41937, 1150, 21055, 2800, 25, 15, 163598, 8264, 37666, 1289, 414, 4396, 39556]
    tokens += [16934, 163599, 163596, 163586]
    stream = ChatStream(kimi, thinking=True, tools=[tool("get_weather", "city")])
    assert joined(stream.feed(tokens) + stream.finish()) == [
        ToolStart(0, "functions.get_weather:0", "get_weather"),
        ToolArguments(0, '{"city": "Beijing"}'),
    ]


def test_result_does_not_depend_on_the_tokens_that_spell_it(kimi: Tokenizer) -> None:
    single = {kimi.token_bytes(i): i for i in range(256)}
    byte_ids: Callable[[str], list[int]] = lambda text: [single[bytes([b])] for b in text.encode()]  # noqa: E731
    text = "先想一想。\n 🜁 THE END, my <|tool_call_section_begin|> friend"
    results = []
    for encode in (kimi.encode, byte_ids):
        stream = ChatStream(kimi, thinking=True, tools=TOOLS, stop=(" friend", "nope"))
        tokens = [*encode(text), kimi.special("</think>"), *encode(text), kimi.special("<|im_end|>")]
        results.append(joined([e for t in tokens for e in stream.feed([t])] + stream.finish()))
        assert stream.stopped
    assert results[0] == results[1] == [Reasoning(text), Content(text.removesuffix(" friend"))]
