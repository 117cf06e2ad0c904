"""`perilune chat`: commands, multi-line input, interruption, and what the conversation keeps."""

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from perilune.cli import chat, generate
from perilune.cli.chat import Chat, Part, Turn, read_message
from perilune.cli.shared import pictures
from perilune.core.errors import ConfigError, EngineError, RequestError
from perilune.text.stream import Content, Event, Reasoning, ToolArguments, ToolStart
from tests.fake_endpoint import FakeEndpoint, chunk, refusal, usage

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Scripted:
    """Answers with the next script: events, exceptions to raise, or calls to make. Keeps what it was asked."""

    name = "scripted"

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self.scripts = list(scripts)
        self.asked: list[list[dict[str, Any]]] = []
        self.thinking: list[bool] = []
        self.closed = 0

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], thinking: bool
    ) -> AsyncGenerator[Part, None]:
        self.asked.append([dict(m) for m in messages])
        self.thinking.append(thinking)
        try:
            for count, step in enumerate(self.scripts.pop(0), 1):
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, Event):
                    yield Part([step], 10, count)
                else:
                    step()
                    await asyncio.sleep(5)
        finally:
            self.closed += 1


def talk(backend: Scripted, *lines: str, system: str | None = None) -> tuple[Chat, list[str]]:
    """Feeds the lines to a chat until the end of input; returns it and the prompts it showed."""
    prompts: list[str] = []
    rest = list(lines)

    def read(prompt: str) -> str:
        prompts.append(prompt)
        if not rest:
            raise EOFError
        return rest.pop(0)

    with asyncio.Runner() as runner:
        conversation = Chat(backend, runner.run, read, thinking=True, system=system, tools=[TOOL])
        conversation.loop()
    assert not rest, f"unread: {rest}"
    return conversation, prompts


def test_reasoning_is_shown_and_handed_back(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Scripted([Reasoning("2 and"), Reasoning(" 2"), Content("It is"), Content(" 4")], [Content("Yes")])
    conversation, _ = talk(backend, "2+2?", "", "   ", "Sure?", system="Be kind")
    first, second = backend.asked
    assert first == [{"role": "system", "content": "Be kind"}, {"role": "user", "content": "2+2?"}]
    answer = {"role": "assistant", "content": "It is 4", "reasoning_content": "2 and 2"}
    assert second == [*first, answer, {"role": "user", "content": "Sure?"}]
    assert conversation.messages[-1] == {"role": "assistant", "content": "Yes"}
    shown = capsys.readouterr().out
    assert re.match(
        r"2 and 2\nIt is 4\n\[10 prompt tokens, first token after [0-9.]+ s, 4 tokens at [0-9.]+ tok/s\]\nYes\n", shown
    )
    assert "\x1b" not in shown, "no colours when it is no terminal"


def test_thinking_is_dimmed_on_a_terminal() -> None:
    @click.command()
    def show() -> None:
        printer = chat.Printer()
        printer.show([Reasoning("hm"), Content("ja"), ToolStart(0, "i", "f"), ToolArguments(0, "{}")])
        printer.end()

    shown = CliRunner().invoke(show, color=True).output
    assert "\x1b[2mhm" in shown and "\x1b[2mja" not in shown
    assert click.unstyle(shown) == "hm\nja\nf({})\n"


def test_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    backend = Scripted([Content("a")], [Content("b")], [Content("c")])
    file = tmp_path / "c.json"
    talk(
        backend,
        "one",
        "/think off",
        "/system  Be brief ",
        "two",
        f"/save {file}",
        "/clear",
        "/think on",
        "/system",
        "three",
        "/think maybe",
        "/frobnicate",
        "/save",
        f"/save {tmp_path}/no/such/dir",
        "/help",
    )
    assert backend.thinking == [True, False, True]
    assert backend.asked[1][0] == {"role": "system", "content": "Be brief"} and len(backend.asked[1]) == 4
    assert backend.asked[2] == [{"role": "user", "content": "three"}]
    saved = json.loads(file.read_text())
    assert saved["model"] == "scripted"
    assert saved["messages"] == [*backend.asked[1], {"role": "assistant", "content": "b"}]
    printed = capsys.readouterr()
    assert [line.split(" is no command")[0] for line in printed.err.splitlines()] == [
        "error: '/think maybe'",
        "error: '/frobnicate'",
        "error: '/save'",
        f"error: cannot write {tmp_path}/no/such/dir: No such file or directory",
    ]
    for command in ("/think", "/system", "/clear", "/save", "/help", "/exit"):
        assert command in printed.out


def test_text_in_quotes_is_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Scripted([Content("a")], [Content("b")])
    talk(backend, '"""/exit"""', '"""', "/etc/hosts is", "a file", '"""', "/think off")
    asked = [message["content"] for message in backend.asked[1] if message["role"] == "user"]
    assert asked == ["/exit", "/etc/hosts is\na file"] and not capsys.readouterr().err


def test_a_conversation_is_saved_into_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        talk(Scripted(), "/system Be brief", f"/save {pipe}")
        assert json.loads(os.read(reader, 1 << 16))["messages"] == [{"role": "system", "content": "Be brief"}]
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_exit_leaves_the_rest_unread() -> None:
    with pytest.raises(AssertionError, match="unread: \\['never'\\]"):
        talk(Scripted(), "/exit", "never")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["plain"], "plain"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "  two", '"""'], "one\n  two"),
        (['"""one', "", 'two"""'], "one\n\ntwo"),
        (['"""all in one"""'], "all in one"),
        (['"""', "/exit \\", '"""'], "/exit \\"),
    ],
)
def test_multi_line_input(lines: list[str], message: str) -> None:
    prompts: list[str] = []
    rest = list(lines)

    def read(prompt: str) -> str:
        prompts.append(prompt)
        return rest.pop(0)

    assert read_message(read) == message and not rest
    assert prompts == ["> "] + ["... "] * (len(lines) - 1)


@pytest.mark.parametrize("line", ["cut\\", '"""cut'])
def test_a_message_without_its_end_is_a_failure(line: str) -> None:
    assert talk(Scripted(), line)[0].failed


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_interrupts_the_answer_and_keeps_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    backend = Scripted([Reasoning("hm"), Content("It is"), interrupt, Content("never")], [Content("fine")])
    conversation, _ = talk(backend, "one", "two")
    assert "It is\n[interrupted; 10 prompt tokens" in capsys.readouterr().out
    partial = {"role": "assistant", "content": "It is", "reasoning_content": "hm"}
    assert backend.asked[1] == [{"role": "user", "content": "one"}, partial, {"role": "user", "content": "two"}]
    assert backend.closed == 2, "the interrupted answer was cancelled where it comes from"
    assert conversation.messages[-1]["content"] == "fine"


def test_ctrl_c_before_the_first_token_takes_the_question_back() -> None:
    backend = Scripted([interrupt], [Content("fine")])
    talk(backend, "one", "two")
    assert backend.asked[1] == [{"role": "user", "content": "two"}]


def test_ctrl_c_within_a_tool_call_drops_the_call() -> None:
    backend = Scripted([Content("wait"), ToolStart(0, "x", "add"), ToolArguments(0, '{"a'), interrupt], [Content("k")])
    talk(backend, "one", "two")
    assert backend.asked[1][1] == {"role": "assistant", "content": "wait"}


def test_ctrl_c_at_the_prompt_leaves() -> None:
    def read(prompt: str) -> str:
        raise KeyboardInterrupt

    Chat(Scripted(), lambda work: None, read, thinking=True, system=None, tools=[]).loop()


@pytest.mark.parametrize("error", [EngineError("the engine stopped"), RequestError("the prompt has 9 tokens")])
def test_a_failed_answer_is_one_line_and_takes_the_question_back(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = Scripted([Content("par"), error], [Content("fine")])
    talk(backend, "one", "two")
    assert capsys.readouterr().err == f"error: {error}\n"
    assert backend.asked[1] == [{"role": "user", "content": "two"}]


def test_the_user_plays_the_tools(capsys: pytest.CaptureFixture[str]) -> None:
    calls = [ToolStart(0, "functions.add:0", "add"), ToolArguments(0, '{"a": '), ToolArguments(0, "1}")]
    more = [ToolStart(1, "functions.add:1", "add"), ToolArguments(1, "{}")]
    backend = Scripted([*calls, *more], [Content("3")])
    conversation, prompts = talk(backend, "1+2?", "three", "four")
    assert 'add({"a": 1})\nadd({})\n[' in capsys.readouterr().out
    assert prompts == ["> ", "result of add> ", "result of add> ", "> "]
    _, answer, *results = backend.asked[1]
    assert [c["id"] for c in answer["tool_calls"]] == ["functions.add:0", "functions.add:1"]
    assert answer["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert results == [
        {"role": "tool", "tool_call_id": "functions.add:0", "content": "three"},
        {"role": "tool", "tool_call_id": "functions.add:1", "content": "four"},
    ]
    assert conversation.messages[-1] == {"role": "assistant", "content": "3"}


def test_a_call_that_the_token_limit_cut_off_is_not_answered(fake: FakeEndpoint, tmp_path: Path) -> None:
    (tools := tmp_path / "tools.json").write_text(json.dumps([TOOL]))

    def call(index: int, arguments: str) -> dict[str, Any]:
        made = {"index": index, "id": f"c{index}", "type": "function"}
        return chunk(tool_calls=[{**made, "function": {"name": "add", "arguments": arguments}}])

    cut = [(0.0, call(0, '{"a": 1}')), (0.0, call(1, '{"a": ')), (0.0, chunk(finish="length"))]
    fake.answer = lambda body: cut if len(fake.bodies) == 1 else [(0.0, chunk(content="k", finish="stop"))]
    result = invoke(fake.url, "--tools", str(tools), lines="1+2?\nthree\nfour\n")
    assert "[cut off by the token limit; first token" in result.stdout and result.exit_code == 0
    _, answer, given = fake.bodies[1]["messages"]
    assert [c["id"] for c in answer["tool_calls"]] == ["c0"] and given["content"] == "three"
    assert fake.bodies[2]["messages"][-1] == {"role": "user", "content": "four"}
    cut.pop(0)
    fake.bodies.clear()
    invoke(fake.url, "--tools", str(tools), lines="1+2?\nfour\n")
    assert fake.bodies[1]["messages"] == [{"role": "user", "content": "four"}], "nothing is left of the answer"


def test_leaving_a_tool_without_result_takes_the_question_back() -> None:
    backend = Scripted([ToolStart(0, "i", "add"), ToolArguments(0, "{}")])
    conversation, _ = talk(backend, "1+2?")
    assert conversation.messages == []


def test_speed() -> None:
    turn = Turn(started=10.0, first=10.5, last=12.5, pieces=9, prompt_tokens=7, tokens=41)
    assert turn.speed() == "7 prompt tokens, first token after 0.50 s, 41 tokens at 20.0 tok/s"
    turn.tokens = turn.prompt_tokens = None
    assert turn.speed() == "first token after 0.50 s, about 9 tokens at 4.0 tok/s"
    assert Turn().speed() == "no tokens"


def invoke(*args: str, lines: str = "") -> Result:
    return CliRunner().invoke(chat.command, args, input=lines)


def test_an_endpoint_can_be_the_model(fake: FakeEndpoint, tmp_path: Path) -> None:
    fake.answer = lambda body: [
        (0.0, chunk(reasoning_content="hm")),
        (0.0, chunk(content="ja")),
        (0.0, chunk(finish="stop")),
        (0.0, usage(11, 5, 1)),
        (0.0, "[DONE]"),
    ]
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([TOOL]))
    result = invoke(fake.url, "--tools", str(tools), "--temperature", "0", "--no-thinking", lines="one\ntwo\n")
    assert result.exit_code == 0 and result.stdout.startswith("hm\nja\n[11 prompt tokens, ")
    assert "5 tokens" in result.stdout
    first, second = fake.bodies
    assert first["temperature"] == 0 and first["tools"] == [TOOL] and first["thinking"] == {"type": "disabled"}
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    fake.answer = lambda body: refusal(400, "too long")
    result = invoke(fake.url, lines="one\n")
    assert result.exit_code == 1 and "error: " in result.stderr and "answered 400: too long" in result.stderr


def test_bytes_of_a_pipe_that_are_no_text(fake: FakeEndpoint) -> None:
    fake.answer = lambda body: [(0.0, chunk(content="ja")), (0.0, chunk(finish="stop"))]
    lines = b"/system d\xe9\ncaf\xe9?\n/image d\xe9\nand?\n"
    result = CliRunner().invoke(chat.command, [fake.url], input=lines, catch_exceptions=False)
    asked = [message["content"] for message in fake.bodies[-1]["messages"]]
    assert asked == ["d\ufffd", "caf\ufffd?", "ja", "and?"] and "cannot read the picture d" in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("http://127.0.0.1:9",), "cannot connect"),
        (("http://127.0.0.1:9", "--set", "threads=1"), "is a running server"),
        (("kimi-nano", "--model-name", "x"), "belong to a running server"),
        (("kimi-nano", "--timeout", "9"), "--timeout belong to a running server"),
        (("kimi-nano", "--temperature", "-1"), "temperature must be"),
        (("/no/such/dir",), "does not exist"),
        (("kimi-nano", "--tools", "/no/such/file"), "cannot read the tools"),
    ],
)
def test_errors_before_the_first_question(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exception is not None and words in str(result.exception) and "\n" not in str(result.exception)


def test_a_key_that_no_header_can_carry(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text("sk-1\u2026\n")
    file.chmod(0o600)
    result = invoke("http://127.0.0.1:9", "--api-key-file", str(file))
    assert isinstance(result.exception, ConfigError) and "has a character beyond ASCII" in str(result.exception)


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": "function"}]', "nonsense", "[" * 99_999])
def test_tools_files_are_checked(text: str, tmp_path: Path) -> None:
    file = tmp_path / "tools.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="tools"):
        chat.read_tools(file)


def test_lines_of_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("one\r\n\nlast"))
    read: Callable[[str], str] = chat.read_line
    assert [read("> ") for _ in range(3)] == ["one", "", "last"]
    with pytest.raises(EOFError):
        read("> ")


def test_pictures_go_with_the_next_question(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = tmp_path / "a b.png"
    image.write_bytes(b"\x89PNG rest")
    (tmp_path / "text.png").write_text("no picture")
    backend = Scripted([Content("a")], [Content("b")])
    lines = (f"/image {image}", f"/image {image}", "What?", f"/image {tmp_path}/text.png", "/image", "And?")
    conversation, _ = talk(backend, *lines)
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORyByZXN0"}}
    assert backend.asked[0] == [{"role": "user", "content": [part, part, {"type": "text", "text": "What?"}]}]
    assert backend.asked[1][-1] == {"role": "user", "content": "And?"}
    shown = capsys.readouterr()
    assert "a b.png goes with the next question" in shown.out and conversation.failed
    assert (
        f"error: {tmp_path}/text.png is no picture: PNG, JPEG, WebP" in shown.err
        and "'/image' is no command without a file: /image FILE" in shown.err
    )


@pytest.mark.parametrize(
    "script", [[EngineError("it stopped")], [interrupt], [ToolStart(0, "i", "add"), ToolArguments(0, "{}")]]
)
def test_a_question_that_is_taken_back_says_that_its_pictures_are(
    script: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (image := tmp_path / "a.png").write_bytes(b"\x89PNG rest")
    conversation, _ = talk(Scripted(script), f"/image {image}", "What?")
    assert conversation.messages == conversation.attached == []
    assert "the question is taken back: attach its pictures again\n" in capsys.readouterr().out


def test_a_video_and_paths_as_terminals_write_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image, video = tmp_path / "a b.png", tmp_path / "it's.mp4"
    image.write_bytes(b"\x89PNG rest")
    video.write_bytes(b"\0\0\0 ftypmp42")
    backend = Scripted([Content("a")])
    typed = (f"'{image}'", str(image).replace(" ", "\\ "), f'"{image}"')
    lines = (*(f"/image {path}" for path in typed), f"/video {video}", f"/image {video}", f"/video {image}", "What?")
    conversation, _ = talk(backend, *lines)
    parts = backend.asked[0][0]["content"]
    assert [p["type"] for p in parts] == [*["image_url"] * 3, "video_url", "text"]
    assert parts[3]["video_url"]["url"] == "data:video/mp4;base64,AAAAIGZ0eXBtcDQy"
    shown = capsys.readouterr()
    assert "it's.mp4 is no picture: it is a video, for --video or /video" in shown.err
    assert "a b.png is no video: it is a picture, for --image or /image" in shown.err and conversation.failed


@pytest.mark.parametrize("name", ["~no-such-user/a", "~$a", "a" * 300, "a\0b"])
def test_names_that_no_file_can_have_are_one_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    conversation, _ = talk(Scripted([Content("a")]), f"/image {name}", f"/video {name}", f"/save {name}/b", "What?")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("error: cannot read the picture") and second.startswith("error: cannot read the video")
    assert third.startswith("error: cannot write") and [m["content"] for m in conversation.messages] == ["What?", "a"]


@pytest.mark.parametrize("verb", [chat.command, generate.command])
def test_a_file_without_an_end_is_read_up_to_the_bound(verb: click.Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_FILE_BYTES", 1 << 20)
    arguments = ["-p", "x"] if verb is generate.command else []
    result = CliRunner().invoke(verb, ["/no/model", "--image", "/dev/zero", *arguments])
    assert isinstance(result.exception, ConfigError) and str(result.exception) == (
        "/dev/zero has more than 1 MB: make it smaller"
    )


def test_a_picture_from_a_pipe_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shell's --image <(...)."""
    backend = Scripted([Content("a")])

    @contextlib.asynccontextmanager
    async def opened(*given: Any) -> AsyncIterator[Scripted]:
        yield backend

    monkeypatch.setattr(chat, "remote", opened)
    ours, theirs = os.pipe()
    os.write(theirs, b"\x89PNG rest")
    os.close(theirs)
    try:
        arguments = ["http://127.0.0.1:1", "--image", f"/dev/fd/{ours}"]
        result = CliRunner().invoke(chat.command, arguments, input="What?\n", catch_exceptions=False)
    finally:
        os.close(ours)
    assert result.exit_code == 0, result.output
    assert backend.asked[0][0]["content"][0]["image_url"]["url"] == "data:image/png;base64,iVBORyByZXN0"


@pytest.mark.parametrize(("name", "says"), [("gone.png", "cannot read the picture"), ("text.png", "is no picture")])
def test_a_bad_picture_is_one_line_before_anything_is_loaded(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "text.png").write_text("x")
    for verb in (chat.command, generate.command):
        arguments = ["-p", "x"] if verb is generate.command else []
        result = CliRunner().invoke(verb, ["/no/model", "--image", str(tmp_path / name), *arguments])
        assert isinstance(result.exception, ConfigError) and says in str(result.exception)
