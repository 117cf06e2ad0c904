"""POST /v1/completions: raw continuation of one or several prompts, with echo and the older form of logprobs."""

import asyncio
import codecs
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.core.messages import Delta
from perilune.core.plan import TokenLogprob
from perilune.server.protocol import CompletionBody, finite, json_response, parse, usage
from perilune.server.service import Generation, Service
from perilune.server.sse import CLIENT_GONE, ClientGone, EventStream, event, race
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # OpenAI's, for this endpoint
QUEUED_PIECES = 64


class LogprobTable:
    """Log-probabilities in the form of this endpoint: parallel lists, with each token's offset in the text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0
        self.rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token: int, entry: TokenLogprob | None, *, shown: bool = True) -> None:
        """`entry` is None for the first token of a prompt, which nothing precedes; `shown`: it is part of the text."""
        top = None if entry is None else {self.spell(t): finite(p) for t, p in entry.top}
        self.rows.append((self.spell(token), None if entry is None else finite(entry.logprob), top, self.offset))
        if shown:
            self.offset += len(self.decoder.decode(self.tokenizer.token_bytes(token)))

    def spell(self, token: int) -> str:
        """The token's text; bytes that are no text of their own are spelled out, so that tokens stay distinct."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    def take(self) -> dict[str, Any] | None:
        """The rows since the last call, or None if there are none."""
        if not self.rows:
            return None
        tokens, logprobs, top, offsets = (list(column) for column in zip(*self.rows))
        self.rows.clear()
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


class Choice:
    """One prompt's continuation as it is generated."""

    def __init__(self, service: Service, index: int, text: str | None, prompt: list[int], body: CompletionBody) -> None:
        self.index = index
        self.echo = bool(body.echo)
        self.silent = self.echo and body.max_tokens == 0  # the engine's one token is dropped
        wanted = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        params = body.sampling(
            service.defaults(),
            max_tokens=service.fit(prompt, 1 if self.silent else wanted, "prompt"),
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if self.echo else None,
        )
        self.generation = Generation(service, prompt, params)
        self.stream = TextStream(service.tokenizer, params.stop, end_ids=params.stop_token_ids)
        self.prompt_text = text if text is not None or not self.echo else service.tokenizer.decode(prompt)
        self.table = LogprobTable(service.tokenizer) if body.logprobs is not None else None

    async def pieces(self) -> AsyncGenerator[tuple[str, dict[str, Any] | None], None]:
        """(new text, log-probabilities of the tokens it came from or None), the echoed prompt first."""
        echoing = self.echo
        prompt_entries: list[TokenLogprob | None] = [None]
        async with contextlib.aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                prompt_entries += delta.prompt_logprobs
                if not delta.tokens:
                    continue
                if echoing:  # a prompt's log-probabilities are complete when its first token comes
                    echoing = False
                    assert self.prompt_text is not None
                    yield self.prompt_text, self._prompt_rows(prompt_entries)
                if self.silent:
                    continue
                text = self.stream.feed(delta.tokens)
                rows = self._rows(delta)
                if self.stream.stopped:
                    self.generation.finish_reason = "stop"
                if text or rows:
                    yield text, rows
                if self.stream.stopped:
                    break
        if text := self.stream.finish():
            yield text, None

    @property
    def finish_reason(self) -> str:
        reason = self.generation.finish_reason
        assert reason is not None, "asked before the choice ended"
        return "length" if self.silent else reason

    @property
    def completion_tokens(self) -> int:
        return 0 if self.silent else self.generation.completion_tokens

    def _rows(self, delta: Delta) -> dict[str, Any] | None:
        if self.table is None:
            return None
        for i in self.stream.kept:
            token = delta.tokens[i]
            self.table.add(token, delta.logprobs[i], shown=not self.table.tokenizer.is_hidden(token))
        return self.table.take()

    def _prompt_rows(self, entries: Sequence[TokenLogprob | None]) -> dict[str, Any] | None:
        if self.table is None:
            return None
        for token, entry in zip(self.generation.prompt, entries, strict=True):
            self.table.add(token, entry)
        return self.table.take()


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    raw = await request.body()
    body = parse(CompletionBody, raw)
    body.check_supported()
    service.check_model(body.model)
    prompts = split_prompts(body.prompt)
    with contextlib.ExitStack() as held:
        held.callback(service.admit(len(prompts)))
        # The caller of this endpoint writes the template itself, control tokens included.
        encoded = await service.offload(
            len(raw),
            lambda: [service.tokenizer.encode(p, allow_special=True) if isinstance(p, str) else p for p in prompts],
        )
        choices = [
            Choice(service, i, p if isinstance(p, str) else None, ids, body)
            for i, (p, ids) in enumerate(zip(prompts, encoded))
        ]
        head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
        }
        if body.stream:
            return EventStream(
                _chunks(choices, head, body.include_usage), service.stopping, held.pop_all().close
            )  # fmt: skip
        try:
            answers = await race(_all(choices), request.receive, service.stopping)
        except ClientGone:
            return Response(status_code=CLIENT_GONE)
        return json_response({**head, "choices": answers, "usage": _usage(choices)})


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: text, a list of texts, token ids or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if _token_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(_token_ids(p) for p in prompt):
            return prompt
    raise RequestError(
        "prompt must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty",
        param="prompt",
        code="invalid_value",
    )


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


async def _all(choices: Sequence[Choice]) -> list[dict[str, Any]]:
    """The answers of all choices; the first failure cancels the rest."""
    tasks = [asyncio.create_task(_whole(c)) for c in choices]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(choice: Choice) -> dict[str, Any]:
    text: list[str] = []
    table: dict[str, list[Any]] = {}
    async with contextlib.aclosing(choice.pieces()) as pieces:
        async for piece, rows in pieces:
            text.append(piece)
            for name, column in (rows or {}).items():
                table.setdefault(name, []).extend(column)
    return {
        "index": choice.index,
        "text": "".join(text),
        "logprobs": table or None,
        "finish_reason": choice.finish_reason,
    }


async def _chunks(
    choices: Sequence[Choice], head: Mapping[str, Any], include_usage: bool
) -> AsyncGenerator[bytes, None]:
    start = msgspec.json.encode(head)[:-1] + b',"choices":['
    end = b'],"usage":null}' if include_usage else b"]}"
    encoder = msgspec.json.Encoder()

    async def frames(choice: Choice) -> AsyncGenerator[bytes, None]:
        def chunk(text: str, rows: dict[str, Any] | None, finish_reason: str | None) -> bytes:
            body = {"index": choice.index, "text": text, "logprobs": rows, "finish_reason": finish_reason}
            return event(start + encoder.encode(body) + end)

        async with contextlib.aclosing(choice.pieces()) as pieces:
            async for text, rows in pieces:
                yield chunk(text, rows, None)
        yield chunk("", None, choice.finish_reason)

    async with contextlib.aclosing(_merged([frames(c) for c in choices])) as merged:
        async for frame in merged:
            yield frame
    if include_usage:
        yield event(start + b'],"usage":' + encoder.encode(_usage(choices)) + b"}")


async def _merged(sources: Sequence[AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
    """Frames of all sources as they come; the first failure, or closing this, ends every source."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]) as only:
            async for frame in only:
                yield frame
        return
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue(QUEUED_PIECES)

    async def drain(source: AsyncGenerator[bytes, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for frame in source:
                    await queue.put(frame)
        except Exception as e:
            await queue.put(e)
        else:
            await queue.put(None)

    tasks = [asyncio.create_task(drain(s)) for s in sources]
    try:
        open_sources = len(tasks)
        while open_sources:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_sources -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _usage(choices: Sequence[Choice]) -> dict[str, Any]:
    generations = [c.generation for c in choices]
    return usage(
        sum(len(g.prompt) for g in generations),
        sum(c.completion_tokens for c in choices),
        sum(g.cached_tokens for g in generations),
        0,
    )
