"""An OpenAI-compatible server as its clients see it: chat answers, whole or streamed, with the time of every chunk."""

import asyncio
import contextlib
import html
import ipaddress
import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx
import msgspec

from perilune.core.errors import ConfigError, PeriluneError
from perilune.text.stream import Content, Event, Reasoning, ToolArguments, ToolStart

CONNECT_SECONDS = 10.0
READ_SECONDS = 600.0  # silence before the first token of a long prompt may last minutes on a CPU
MAX_EVENT = 16 << 20  # bytes of one server-sent event
MAX_ANSWER_BYTES = 64 << 20  # of an answer that is not streamed
MAX_MESSAGE = 400  # characters of a server's own error message that are passed on
_MARKUP = re.compile(r"(?is)<!--.*?(?:-->|$)|<(script|style)\b.*?(?:</\1>|$)|<[^>]*(?:>|$)")


class EndpointError(PeriluneError):
    """The endpoint cannot be reached, refuses, or answers what no OpenAI-compatible server would.

    `status` is the HTTP status of a refusal; None when there was no proper answer at all.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts by the server. `reasoning` is None where the server does not count thinking separately, `cached`
    where it does not report cached prompt tokens."""

    prompt: int
    completion: int
    reasoning: int | None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one streamed event brought; `at` is time.perf_counter() when its bytes arrived."""

    at: float
    events: tuple[Event, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None
    closed_by_grammar: bool = False  # by `perilune serve`: the grammar completed the answer because max_tokens ran out


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer sent whole. `ids` are those of `tool_calls`."""

    content: str
    reasoning: str
    tool_calls: tuple[tuple[str, str], ...]  # (name, arguments as the model wrote them)
    finish_reason: str | None
    usage: Usage | None
    ids: tuple[str, ...] = ()
    closed_by_grammar: bool = False


class Endpoint:
    """A server at `url`; an address without a path gets /v1. An async context manager; entering it asks what is served.

    After entering, `model` is the model's name there, `max_model_len` its context if the server says so (else None),
    `owner` what the server calls itself in its list of models ("" if nothing), and `marks` fields that a
    ledger row about it must have: random weights, declared acceptance.
    All methods raise EndpointError; nothing is retried.
    """

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = READ_SECONDS
    ) -> None:
        self.base = _base(url)
        self.root = self.base.removesuffix("/v1")
        self.model = model or ""
        self.max_model_len: int | None = None
        self.owner = ""
        self.marks: dict[str, Any] = {}
        self._timeout = timeout
        self._tokenizes = True
        # A compressed stream arrives in large blocks: the times of its chunks would mean nothing.
        headers = {"accept-encoding": "identity"}
        if api_key is not None:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
            limits=httpx.Limits(
                max_connections=None
            ),  # callers bound their own concurrency; waiting here would be timed
            trust_env=not _loopback(self.base),  # a proxy cannot reach this machine's own ports
        )

    async def __aenter__(self) -> Self:
        try:
            await self._choose_model()
        except BaseException:
            await self._http.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(self, body: Mapping[str, Any]) -> Reply:
        """The answer to a /v1/chat/completions body, `model` filled in."""
        parsed = _decode(await self._call("POST", f"{self.base}/chat/completions", {**body, "model": self.model}))
        if parsed.error is not None:
            raise EndpointError(f"{self.base} failed: {_message(parsed.error)}")
        if not parsed.choices or (message := parsed.choices[0].message) is None:
            raise EndpointError(f"{self.base} sent an answer without a message: is it an OpenAI-compatible server?")
        calls = [(c.id or "", c.function) for c in message.tool_calls or () if c.function is not None]
        return Reply(
            content=message.content or "",
            reasoning=message.thoughts,
            tool_calls=tuple((f.name or "", f.arguments or "") for _, f in calls),
            finish_reason=parsed.choices[0].finish_reason,
            usage=_usage(parsed.usage),
            ids=tuple(id for id, _ in calls),
            closed_by_grammar=bool(parsed.choices[0].closed_by_grammar),
        )

    async def continued(self, prompt: Sequence[int], body: Mapping[str, Any]) -> tuple[int, ...]:
        """The tokens that follow `prompt`, the end token included, by /v1/completions; `body` has other fields."""
        request = {**body, "model": self.model, "prompt": list(prompt), "return_token_ids": True}
        parsed = _decode(await self._call("POST", f"{self.base}/completions", request))
        if parsed.error is not None:
            raise EndpointError(f"{self.base} failed: {_message(parsed.error)}")
        if not parsed.choices or (ids := parsed.choices[0].token_ids) is None:
            raise EndpointError(f"{self.base} does not return token ids (return_token_ids): perilune serve and vLLM do")
        return tuple(ids)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[Chunk, None]:
        """The answer as it arrives, the server's token counts asked for. Close the generator to cancel the request."""
        request = {**body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        begun: set[int] = set()
        finished = False
        with self._transport():
            async with self._http.stream("POST", f"{self.base}/chat/completions", **_json(request)) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, await self._body(response))
                async for at, data in events(response.aiter_bytes()):
                    if data == "[DONE]":
                        finished = True
                        continue  # to the end of the body, so that the connection can be used again
                    parsed = _decode(data)
                    if parsed.error is not None:
                        raise EndpointError(f"{self.base} failed: {_message(parsed.error)}")
                    choice = parsed.choices[0] if parsed.choices else _Choice()
                    finished = finished or choice.finish_reason is not None
                    yield Chunk(
                        at,
                        _events(choice.delta, begun),
                        choice.finish_reason,
                        _usage(parsed.usage),
                        bool(choice.closed_by_grammar),
                    )
        if not finished:
            raise EndpointError(f"{self.base} ended a stream before the answer was complete")

    async def count(self, messages: Sequence[Mapping[str, Any]]) -> int | None:
        """Tokens of a conversation as the server renders it; None if it has no /tokenize."""
        if not self._tokenizes:
            return None
        body = {"model": self.model, "messages": list(messages)}
        try:
            found = json.loads(await self._call("POST", f"{self.root}/tokenize", body))["count"]
        except EndpointError as e:
            if e.status not in (400, 404, 405, 422):
                raise
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # something else answers under that path
        else:
            if isinstance(found, int):
                return found
        self._tokenizes = False
        return None

    async def _choose_model(self) -> None:
        """Fills in model, max_model_len and owner from GET /v1/models."""
        wanted = self.model
        try:
            data = json.loads(await self._call("GET", f"{self.base}/models"))["data"]
            listed = {m["id"]: m for m in data if isinstance(m["id"], str)}
        except EndpointError as e:
            if e.status in (404, 405) and wanted:  # some gateways do not list what they serve
                return
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as e:
            raise EndpointError(f"{self.base}/models is no list of models: is it an OpenAI-compatible server?") from e
        if not wanted and len(listed) != 1:
            raise EndpointError(f"{self.base} serves {_few(listed)}: choose one with --model-name")
        if wanted and wanted not in listed:
            raise EndpointError(f"{self.base} does not serve {wanted!r} but {_few(listed)}: choose with --model-name")
        self.model = wanted or next(iter(listed))
        entry = listed[self.model]
        length, owner = entry.get("max_model_len"), entry.get("owned_by")
        self.max_model_len = length if isinstance(length, int) and length > 0 else None
        self.owner = owner if isinstance(owner, str) else ""
        for name, kind in (("tp", int), ("ep", int), ("exchange", str)):
            if isinstance(value := entry.get(name), kind):
                self.marks[name] = value[:MAX_MESSAGE] if isinstance(value, str) else value
        if isinstance(made := entry.get("synthetic"), str):
            self.marks["synthetic"] = made[:MAX_MESSAGE]
        if isinstance(declared := entry.get("declared_acceptance"), int | float):
            self.marks |= {"acceptance": "declared", "acceptance_length": declared}

    async def _call(self, method: str, url: str, body: Any = None) -> bytes:
        with self._transport():
            async with self._http.stream(method, url, **(_json(body) if body is not None else {})) as response:
                content = await self._body(response)
        if response.status_code != 200:
            raise self._refusal(response.status_code, content)
        return content

    async def _body(self, response: httpx.Response) -> bytes:
        content = bytearray()
        async for piece in response.aiter_bytes():
            content += piece
            if len(content) > MAX_ANSWER_BYTES:
                raise EndpointError(f"{self.base} sent an answer of more than {MAX_ANSWER_BYTES >> 20} MiB")
        return bytes(content)

    @contextlib.contextmanager
    def _transport(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout) as e:
            reason = " ".join(str(e).split()) or "no answer"
            raise EndpointError(f"cannot connect to {self.base}: {reason}; is the server running?") from e
        except httpx.TimeoutException as e:
            raise EndpointError(f"{self.base} was silent for {self._timeout:g} s: raise --timeout") from e
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            reason = " ".join(str(e).split()) or type(e).__name__
            raise EndpointError(f"the connection to {self.base} broke: {reason}") from e

    def _refusal(self, status: int, body: bytes) -> EndpointError:
        try:
            parsed = json.loads(body)
            text = _message(parsed["error"] if isinstance(parsed, dict) and "error" in parsed else parsed)
        except (ValueError, RecursionError):
            text = _text(body[: 4 * MAX_MESSAGE].decode(errors="replace")) or "no reason given"
        remedy = "; give the right key with --api-key-file" if status in (401, 403) else ""
        return EndpointError(f"{self.base} answered {status}: {text}{remedy}", status=status)


def is_url(model: str) -> bool:
    return model.startswith(("http://", "https://"))


async def events(pieces: AsyncIterable[bytes]) -> AsyncGenerator[tuple[float, str], None]:
    """(arrival time, data) of each server-sent event, however the bytes are cut."""
    rest = b""
    data: list[bytes] = []
    held = 0
    async for piece in pieces:
        now = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
                held += len(line)
            elif not line and data:
                yield now, b"\n".join(data).decode(errors="replace")
                data, held = [], 0
        if held + len(rest) > MAX_EVENT:
            raise EndpointError(f"the server sent an event of more than {MAX_EVENT >> 20} MiB")


class _Details(msgspec.Struct):
    reasoning_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _Details | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct):
    """A whole message, or what a chunk adds to one. Servers spell the thought in two ways."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def thoughts(self) -> str:
        return self.reasoning_content or self.reasoning or ""


class _Choice(msgspec.Struct):
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None
    closed_by_grammar: bool | None = None
    token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


def _decode(data: str | bytes) -> _Answer:
    try:
        return msgspec.json.decode(data, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        shown = _shorten((data if isinstance(data, str) else data[:400].decode(errors="replace"))[:400])[:80]
        raise EndpointError(f"the server sent what is no OpenAI-compatible answer ({e}): {shown!r}") from e


def _events(delta: _Message | None, begun: set[int]) -> tuple[Event, ...]:
    if delta is None:
        return ()
    found: list[Event] = []
    if thoughts := delta.thoughts:
        found.append(Reasoning(thoughts))
    if delta.content:
        found.append(Content(delta.content))
    for call in delta.tool_calls or ():
        function = call.function or _Function()
        if call.index not in begun:
            begun.add(call.index)
            found.append(ToolStart(call.index, call.id or "", function.name or ""))
        if function.arguments:
            found.append(ToolArguments(call.index, function.arguments))
    return tuple(found)


def _usage(usage: _Usage | None) -> Usage | None:
    if usage is None or usage.completion_tokens is None:
        return None
    details = usage.completion_tokens_details
    prompt = usage.prompt_tokens_details
    return Usage(
        usage.prompt_tokens or 0,
        usage.completion_tokens,
        details.reasoning_tokens if details else None,
        prompt.cached_tokens if prompt else None,
    )


def readable(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs. Python decodes bytes of a terminal, a pipe or an argument
    that are not UTF-8 to such halves; no request can carry them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _json(body: Any) -> dict[str, Any]:
    """The arguments of httpx that send `body`."""
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        content = text.encode()
    except UnicodeEncodeError:
        content = readable(text).encode()
    return {"content": content, "headers": {"content-type": "application/json"}}


def _message(error: Any) -> str:
    """The words of an error object, whichever of the usual shapes it has."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    try:
        return _shorten(error if isinstance(error, str) else json.dumps(error))
    except RecursionError:
        return "an error nested too deep to be shown"


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + " ..."


def _text(page: str) -> str:
    """A plain text, or the first line of text of an HTML page; either may be cut off."""
    if page.lstrip().startswith("<"):
        lines = html.unescape(_MARKUP.sub("\n", page)).splitlines()
        page = next((line for line in lines if line.strip()), "")
    return _shorten(page)


def _few(names: Mapping[str, Any]) -> str:
    shown = _shorten(", ".join(sorted(names)[:5]))
    return (shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")) if names else "nothing"


def _base(url: str) -> str:
    """The address with /v1 if it has no path of its own; ConfigError if it is no plain http(s) address."""
    try:
        parsed = httpx.URL(url)
        host = parsed.host
    except (httpx.InvalidURL, UnicodeError) as e:  # UnicodeError: a name that begins with xn-- and is none
        raise ConfigError(f"{url!r} is no valid address: {e}") from e
    if parsed.scheme not in ("http", "https") or not host or (parsed.port or 0) > 65535:
        raise ConfigError(f"{url!r} is no address of a server: write http://HOST:PORT/v1")
    if parsed.userinfo:
        raise ConfigError("the address must not carry a password: use --api-key-file")
    if parsed.query or parsed.fragment:
        raise ConfigError(f"{url!r} must be a base address such as http://HOST:PORT/v1, without ? or #")
    base = str(parsed).rstrip("/")
    return base if parsed.path.strip("/") else f"{base}/v1"


def _loopback(url: str) -> bool:
    host = httpx.URL(url).host
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def thinking_switch(thinking: bool) -> dict[str, Any]:
    """Body fields that turn thinking on or off: Kimi's own, and the one of servers that pass template arguments on."""
    return {
        "thinking": {"type": "enabled" if thinking else "disabled"},
        "chat_template_kwargs": {"thinking": thinking},
    }


async def gather(work: Sequence[Any]) -> list[Any]:
    """All results; the first failure cancels the rest and is raised, not as an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(w) for w in work]
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from None
    return [t.result() for t in tasks]
