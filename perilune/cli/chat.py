"""`perilune chat`: a conversation in the terminal, with a model of this machine or any OpenAI endpoint."""

import asyncio
import contextlib
import io
import json
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click

from perilune.cli.shared import options, targets
from perilune.cli.shared.pictures import expanded, image_option, media_part, typed_path, video_option
from perilune.client.endpoint import Endpoint, is_url, readable, thinking_switch
from perilune.core.config import EngineConfig, ServerConfig
from perilune.core.errors import ConfigError, EngineError, PeriluneError
from perilune.core.jsonfile import spelled, write_output
from perilune.core.messages import pictures_of
from perilune.core.sampling import SamplingParams
from perilune.engine.client import EngineClient
from perilune.formats.hub import resolve_model
from perilune.media.limits import Limits
from perilune.model.config import KimiConfig
from perilune.server.pictures.parts import found, replaced
from perilune.server.pictures.reader import PictureReader
from perilune.server.service import read_generation_config, sampling_defaults
from perilune.text.chat import ChatTemplate, next_tool_index, template_for
from perilune.text.stream import ChatStream, Content, Event, Reasoning, ToolStart
from perilune.text.tokenizer import Tokenizer
from perilune.text.tools import parse_tools

QUOTES = '"""'
HELP = """\
  /think on|off   think before answering, or not
  /image FILE     a picture that the next question is about; several are possible
  /video FILE     the same with a video
  /system TEXT    set the system prompt; without TEXT, remove it
  /clear          forget the conversation (the system prompt stays)
  /save FILE      write the conversation to FILE as JSON
  /help           this list
  /exit           leave; so does Ctrl-D
A line that ends with \\ goes on in the next one; \"\"\" begins and ends a block of lines.
Ctrl-C interrupts an answer."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer, and the tokens of the prompt and of the answer so far, where known. `cut`: the answer ends
    here, by the token limit."""

    events: Sequence[Event]
    prompt_tokens: int | None = None
    tokens: int | None = None
    cut: bool = False


class Backend(Protocol):
    name: str

    def answer(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], thinking: bool
    ) -> AsyncGenerator[Part, None]: ...


@dataclass(slots=True)
class Local:
    """The engine in a process of its own. `sampling`: the user's values; the rest are the checkpoint's."""

    name: str
    client: EngineClient
    tokenizer: Tokenizer
    template: ChatTemplate
    defaults: Mapping[str, float]
    sampling: Mapping[str, Any]
    pictures: PictureReader

    async def answer(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], thinking: bool
    ) -> AsyncGenerator[Part, None]:
        thinks = self.template.thinks(thinking)
        defaults = sampling_defaults(self.defaults, self.template, thinking=thinks)
        params = SamplingParams(**{**defaults, **self.sampling})
        parts = found(messages)
        self.pictures.check(parts, self.client.info, self.name)
        with self.pictures.budget.share() as share:
            media = await self.pictures.read(parts, share)
            seen = replaced(messages, parts, media)
            prompt = self.template.render_ids(self.tokenizer, seen, tools=tools, thinking=thinks)
            stream = ChatStream(
                self.tokenizer,
                thinking=self.template.opens_thought(thinks),
                tools=tools,
                first_tool_index=next_tool_index(seen),
            )
            count = 0
            async with contextlib.aclosing(self.client.generate(prompt, params, pictures=pictures_of(media))) as deltas:
                async for delta in deltas:
                    if delta.finish_reason == "error":
                        raise EngineError(f"the generation failed: {delta.error}")
                    count += len(delta.tokens)
                    yield Part(stream.feed(delta.tokens), len(prompt), count, delta.finish_reason == "length")
        yield Part(stream.finish(), len(prompt), count)


@dataclass(slots=True)
class Remote:
    name: str
    endpoint: Endpoint
    sampling: Mapping[str, Any]

    async def answer(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], thinking: bool
    ) -> AsyncGenerator[Part, None]:
        body: dict[str, Any] = {"messages": list(messages), **thinking_switch(thinking), **self.sampling}
        if tools:
            body["tools"] = list(tools)
        async with contextlib.aclosing(self.endpoint.stream(body)) as chunks:
            async for chunk in chunks:
                usage = chunk.usage
                cut = chunk.finish_reason == "length"
                prompt, tokens = (usage.prompt, usage.completion) if usage else (None, None)
                yield Part(chunk.events, prompt, tokens, cut)


@dataclass(slots=True)
class Turn:
    """An answer while it arrives: its message, and the times of its tokens."""

    started: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    pieces: int = 0
    prompt_tokens: int | None = None
    tokens: int | None = None
    reasoning: str = ""
    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    cut: bool = False

    def add(self, part: Part) -> None:
        if part.events:
            self.last = time.perf_counter()
            self.first = self.first or self.last
            self.pieces += len(part.events)
        self.prompt_tokens = part.prompt_tokens if part.prompt_tokens is not None else self.prompt_tokens
        self.tokens = part.tokens if part.tokens is not None else self.tokens
        self.cut = self.cut or part.cut
        for e in part.events:
            if isinstance(e, Reasoning):
                self.reasoning += e.text
            elif isinstance(e, Content):
                self.content += e.text
            elif isinstance(e, ToolStart):
                self.calls[e.index] = {"id": e.id, "type": "function", "function": {"name": e.name, "arguments": ""}}
            else:
                self.calls[e.index]["function"]["arguments"] += e.text

    def message(self, *, interrupted: bool) -> dict[str, Any] | None:
        """The message that the conversation keeps; None if empty. Calls of an interrupted answer are not kept, nor one
        that the token limit cut off."""
        calls = [] if interrupted else [self.calls[i] for i in sorted(self.calls)]
        if self.cut:
            calls = [call for call in calls if is_json(call["function"]["arguments"])]
        if not (calls or self.content or self.reasoning):
            return None
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def speed(self) -> str:
        if not self.pieces:
            return "no tokens"
        tokens = self.pieces if self.tokens is None else self.tokens
        about = "about " if self.tokens is None else ""
        line = f"first token after {self.first - self.started:.2f} s, {about}{tokens} tokens"
        if tokens > 1 and self.last > self.first:
            line += f" at {(tokens - 1) / (self.last - self.first):.1f} tok/s"
        return line if self.prompt_tokens is None else f"{self.prompt_tokens} prompt tokens, {line}"


class Printer:
    """Prints an answer as it arrives: thinking dimmed, calls as name(arguments). Colours only on a terminal."""

    def __init__(self) -> None:
        self._kind: type[Event] | None = None

    def show(self, events: Sequence[Event]) -> None:
        for e in events:
            if isinstance(e, ToolStart):
                self.end()
                click.secho(f"{e.name}(", nl=False, fg="cyan")
                self._kind = ToolStart
                continue
            kind = ToolStart if not isinstance(e, Reasoning | Content) else type(e)
            if kind is not self._kind:
                self.end()
                self._kind = kind
            click.secho(e.text, nl=False, dim=kind is Reasoning or None, fg="cyan" if kind is ToolStart else None)

    def end(self) -> None:
        """Ends the current line."""
        if self._kind is not None:
            click.echo(click.style(")", fg="cyan") if self._kind is ToolStart else "")
            self._kind = None


class Chat:
    """The conversation and the commands that change it."""

    def __init__(
        self,
        backend: Backend,
        run: Callable[[Any], Any],
        read: Callable[[str], str],
        *,
        thinking: bool,
        system: str | None,
        tools: Sequence[Mapping[str, Any]],
    ) -> None:
        """`run` runs a coroutine to its end, with Ctrl-C cancelling it; `read` reads a line, EOFError at the end."""
        self.backend = backend
        self.thinking = thinking
        self.system = None if system is None else readable(system)
        self.tools = tools
        self.messages: list[dict[str, Any]] = []
        self.attached: list[dict[str, Any]] = []  # pictures and videos of the next question
        self.failed = False  # whether an answer or a command failed
        self._run = run
        self._read = read

    def loop(self) -> None:
        """Reads lines until /exit, Ctrl-D, or Ctrl-C at the prompt."""
        lines: list[str] = []  # of the message that is being read

        def read(prompt: str) -> str:
            lines.append(self._read(prompt))
            return lines[-1]

        while True:
            lines.clear()
            try:
                text = read_message(read)
            except (EOFError, KeyboardInterrupt) as e:
                click.echo()
                if lines and isinstance(e, EOFError):
                    self._fail("the last message has no end: it was not asked")
                return
            if lines[0].startswith("/"):  # the line, not `text`: a message in triple quotes may begin with a slash
                if not self.command(text):
                    return
            elif text.strip():
                self.ask(readable(text))

    def command(self, text: str) -> bool:
        """Carries out a / command; returns False if the chat should end."""
        name, _, rest = text.partition(" ")
        rest = rest.strip()
        match name:
            case "/exit" | "/quit":
                return False
            case "/help":
                click.echo(HELP)
            case "/think" if rest in ("on", "off"):
                self.thinking = rest == "on"
                click.secho(f"thinking is {rest}", dim=True)
            case "/image" | "/video" if rest:
                file = typed_path(rest)
                try:
                    self.attach(file, media_part(file, is_video=name == "/video"))
                except ConfigError as e:
                    self._fail(str(e))
            case "/system":
                self.system = readable(rest) or None
                click.secho("system prompt set" if rest else "no system prompt", dim=True)
            case "/clear":
                self.messages.clear()
                self.attached.clear()
                click.secho("conversation forgotten", dim=True)
            case "/save" if rest:
                try:
                    whole = {"model": self.backend.name, "messages": self.whole()}
                    write_output(expanded(rest), spelled(whole))
                except (OSError, ValueError) as e:  # ValueError: a NUL in the name
                    self._fail(f"cannot write {rest}: {e.strerror if isinstance(e, OSError) else e}")
                else:
                    click.secho(f"written to {rest}", dim=True)
            case "/image" | "/video" | "/save":
                self._fail(f"{name!r} is no command without a file: {name} FILE")
            case _:
                self._fail(f"{text.strip()!r} is no command; /help lists them")
        return True

    def attach(self, file: Path, medium: dict[str, Any]) -> None:
        """Adds a picture or video, its part of a message, to the next question."""
        self.attached.append(medium)
        click.secho(f"{file.name} goes with the next question", dim=True)

    def _fail(self, text: str) -> None:
        click.secho(f"error: {text}", fg="red", err=True)
        self.failed = True

    def whole(self) -> list[dict[str, Any]]:
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else list(self.messages)

    def ask(self, text: str) -> None:
        """One question, and the answers that follow it: several if the model calls tools in between."""
        known = len(self.messages)
        content = [*self.attached, {"type": "text", "text": text}] if self.attached else text
        self.messages.append({"role": "user", "content": content})
        self.attached = []
        while True:
            answer = self._answer()
            if answer is None:
                if len(self.messages) == known + 1:  # a question without any answer would only confuse the next one
                    self._take_back(known)
                return
            self.messages.append(answer)
            if "tool_calls" not in answer:
                return
            try:
                results = [self._result(call) for call in answer["tool_calls"]]
            except (EOFError, KeyboardInterrupt):
                click.echo()
                self._take_back(known)
                return
            self.messages += results

    def _take_back(self, known: int) -> None:
        """Removes the last question, which is message number `known`, and what followed it."""
        if not isinstance(self.messages[known]["content"], str):
            click.secho("the question is taken back: attach its pictures again", dim=True)
        del self.messages[known:]

    def _answer(self) -> dict[str, Any] | None:
        """The next assistant message, shown as it comes; None if it failed or nothing came before Ctrl-C."""
        turn, printer = Turn(), Printer()

        async def collect() -> None:
            async with contextlib.aclosing(self.backend.answer(self.whole(), self.tools, self.thinking)) as parts:
                async for part in parts:
                    turn.add(part)
                    printer.show(part.events)

        interrupted = False
        try:
            self._run(collect())
        except KeyboardInterrupt:
            interrupted = True
        except PeriluneError as e:
            printer.end()
            self._fail(str(e))
            return None
        printer.end()
        end = "interrupted; " if interrupted else "cut off by the token limit; " if turn.cut else ""
        click.secho(f"[{end}{turn.speed()}]", dim=True)
        return turn.message(interrupted=interrupted)

    def _result(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """The tool message for a call; the user types the result."""
        text = readable(self._read(f"result of {call['function']['name']}> "))
        return {"role": "tool", "tool_call_id": call["id"], "content": text}


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("--system", help="System prompt.")
@image_option
@video_option
@click.option("--thinking/--no-thinking", default=True, help="Think before answering.")
@click.option(
    "--tools",
    "tools_file",
    type=options.FILE,
    help="File with a JSON list of OpenAI tools the model may call; you type their results.",
)
@options.sampling_options
@targets.target_options
@options.engine_options(*options.COMMON)
def command(
    model: str,
    system: str | None,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    thinking: bool,
    tools_file: Path | None,
    access: targets.Access,
    assignments: tuple[str, ...],
    **values: Any,
) -> None:
    """Talk with MODEL, or with an OpenAI-compatible endpoint if MODEL is its http(s) address.

    /help lists the commands. Lines can also come from a pipe, one question each; exit code 1 if one failed.
    """
    engine, sampling = options.split(values)
    wanted = {k: v for k, v in sampling.items() if v is not None}
    SamplingParams(**wanted)  # a wrong value is named before anything is loaded
    tools = read_tools(tools_file) if tools_file is not None else []
    # Read once, before anything is loaded: a pipe, such as the shell's <(...), has its bytes only once.
    media = [(file, media_part(file)) for file in images] + [(file, media_part(file, is_video=True)) for file in videos]
    access.require_server(is_url(model), "http:// address as MODEL")
    if is_url(model):
        if assignments or any(v is not None for v in engine.values()):
            raise ConfigError(f"engine options configure a model run here, but {model} is a running server")
        opened = remote(access.endpoint(model), wanted)
    else:
        config = options.engine_config({**engine, "max_num_seqs": 1}, assignments, {})
        opened = local(model, config, wanted)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    # Between answers the loop does not run; nothing needs it then, because an idle engine sends nothing.
    with asyncio.Runner() as runner:
        backend = runner.run(opened.__aenter__())
        try:
            if sys.stdin.isatty():
                click.secho(f"{backend.name}; /help lists the commands, Ctrl-D leaves", dim=True)
                with contextlib.suppress(ImportError):
                    import readline  # noqa: F401  (line editing and history of input(), where the system has it)
            talk = Chat(backend, runner.run, read_line, thinking=thinking, system=system, tools=tools)
            for file, medium in media:
                talk.attach(file, medium)
            talk.loop()
        finally:
            runner.run(opened.__aexit__(None, None, None))
    if talk.failed and not sys.stdin.isatty():
        raise click.exceptions.Exit(1)


@contextlib.asynccontextmanager
async def local(model: str, config: EngineConfig, sampling: Mapping[str, Any]) -> AsyncIterator[Backend]:
    path = resolve_model(model, progress=sys.stderr.isatty(), check=KimiConfig.from_directory)
    tokenizer, template = Tokenizer.from_directory(path), template_for(path)
    tokenizer.require_size(KimiConfig.from_directory(path).vocab_size, path)
    defaults = read_generation_config(path)
    pictures = PictureReader(Limits.from_directory(path), ServerConfig())
    client = await EngineClient.start(path, config, stop_token_ids=tokenizer.stop_ids)
    try:
        yield Local(path.name, client, tokenizer, template, defaults, sampling, pictures)
    finally:
        await pictures.close()
        await client.close()


@contextlib.asynccontextmanager
async def remote(opened: Endpoint, sampling: Mapping[str, Any]) -> AsyncIterator[Backend]:
    async with opened as endpoint:
        yield Remote(endpoint.model, endpoint, sampling)


def read_message(read: Callable[[str], str]) -> str:
    """A message: one line, lines joined by a final backslash, or the text between two triple quotes."""
    line = read("> ")
    if line.lstrip().startswith(QUOTES):
        line = line.lstrip().removeprefix(QUOTES)
        lines = []
        while not line.rstrip().endswith(QUOTES):
            lines.append(line)
            line = read("... ")
        lines.append(line.rstrip().removesuffix(QUOTES))
        return "\n".join(lines).strip("\n")
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1].removesuffix("\\")
        lines.append(read("... "))
    return "\n".join(lines)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def read_line(prompt: str) -> str:
    """A line of standard input without its end; the prompt only on a terminal. EOFError at the end."""
    if sys.stdin.isatty():
        return input(prompt)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


def read_tools(path: Path) -> list[dict[str, Any]]:
    """The tool list in `path`; ConfigError if it is not there or no list of tools."""
    try:
        tools = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as e:
        why = e.strerror if isinstance(e, OSError) else f"no JSON: {e}"
        raise ConfigError(f"cannot read the tools in {path}: {why}") from e
    if not isinstance(tools, list):
        raise ConfigError(f"{path} must hold a JSON list of tools")
    try:
        parse_tools(tools)
    except PeriluneError as e:
        raise ConfigError(f"{path}: {e}") from e
    return tools
