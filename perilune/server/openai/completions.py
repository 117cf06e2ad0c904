"""POST /v1/completions: raw continuation of one or several prompts, with echo and the older form of logprobs."""

import codecs
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.core.messages import Delta, EngineInfo
from perilune.core.sampling import SamplingParams, best, candidates, sibling
from perilune.core.step import TokenLogprob
from perilune.server.answer_format import enforced
from perilune.server.generation import Generation, Prompt, fit
from perilune.server.openai.protocol import (
    CompletionBody,
    Predictions,
    finite,
    json_response,
    named,
    prompt_logprob_table,
    usage,
)
from perilune.server.service import ModelText, Service
from perilune.server.sse import DONE, EventStream, error_event, event, gathered, merged, race
from perilune.text.stream import TextStream
from perilune.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16  # as OpenAI's, for this endpoint


class LogprobTable:
    """Log-probabilities in the form of this endpoint: parallel lists, with each token's offset in the text."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False) -> None:
        """`as_ids`: tokens are spelled as protocol.named does."""
        self.tokenizer = tokenizer
        self.as_ids = as_ids
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.offset = 0
        self.rows: list[tuple[str, float | None, dict[str, float] | None, int]] = []

    def add(self, token: int, entry: TokenLogprob | None, *, shown: bool = True) -> None:
        """`entry` is None for the first token of a prompt, which nothing precedes; `shown`: it is part of the text.

        As in OpenAI's API, the token itself is among the likeliest, so there may be one more than was asked for.
        """
        likely = () if entry is None else (*entry.top, (token, entry.logprob))
        top = {self.spell(t): finite(p) for t, p in likely} or None
        start = self.offset
        if shown:
            raw = self.tokenizer.token_bytes(token)
            text = self.decoder.decode(raw)
            # One character more than the token alone: U+FFFD for an incomplete one before it.
            start += max(len(text) - len(codecs.utf_8_decode(raw, "replace")[0]), 0)
            self.offset += len(text)
        self.rows.append((self.spell(token), None if entry is None else finite(entry.logprob), top, start))

    def spell(self, token: int) -> str:
        """The token's text; one that is not UTF-8 by itself is spelled byte by byte, so that tokens stay distinct."""
        if self.as_ids:
            return named(token)
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
    """One continuation of a prompt as it is generated."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        body: CompletionBody,
        prompt_text: str,
        generation: Generation,
    ) -> None:
        self.body = body
        self.echo = bool(body.echo)
        self.silent = body.silent
        self.generation = generation
        params = generation.params
        self.stream = TextStream(tokenizer, params.stop, end_ids=params.stop_token_ids, style=body.stream_style)
        self.stream.unarmed = params.min_tokens
        self.prompt_text = prompt_text
        self.prompt_logprobs: list[TokenLogprob] = []
        self.logprobs: list[float] = []
        self.ids: list[int] = []
        self.table = None
        if body.logprobs is not None:
            self.table = LogprobTable(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))

    async def pieces(self) -> AsyncGenerator[tuple[str, dict[str, Any] | None], None]:
        """(new text, log-probabilities of the tokens it came from or None), the echoed prompt first."""
        echoing = self.echo
        async with contextlib.aclosing(self.generation.deltas()) as deltas:
            async for delta in deltas:
                self.prompt_logprobs += delta.prompt_logprobs
                self.logprobs += [entry.logprob for entry in delta.logprobs]
                if not delta.tokens:
                    continue
                if echoing:  # the prompt's log-probabilities are complete before the first token comes
                    echoing = False
                    yield self.prompt_text, self._prompt_rows()
                if self.silent:
                    continue
                self.ids += delta.tokens
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
            shown = self.body.skip_special_tokens is False or not self.table.tokenizer.is_hidden(token)
            self.table.add(token, delta.logprobs[i], shown=shown)
        return self.table.take()

    def _prompt_rows(self) -> dict[str, Any] | None:
        if self.table is None:
            return None
        trimmed = [dataclasses.replace(e, top=e.top[: self.body.logprobs]) for e in self.prompt_logprobs]
        for token, entry in zip(self.generation.prompt, [None, *trimmed], strict=True):
            self.table.add(token, entry)
        self.table.offset += len(self.table.decoder.decode(b"", True))  # the answer's text is decoded apart
        return self.table.take()


async def completions(request: Request) -> Response:
    service: Service = request.app.state.service
    body, size = await service.receive(request, CompletionBody)
    prompts = await service.offload(size, lambda: split_prompts(body.prompt))
    text, info = service.text, service.engine.info
    count = candidates(body.wanted, body.best_of)
    with contextlib.ExitStack() as held:
        held.callback(service.admission.take(len(prompts) * count, "prompt" if len(prompts) > 1 else "n"))
        asked = await service.offload(size, lambda: [_read(body, p, count, text, info) for p in prompts])
        groups = []
        for prompt in asked:
            answer = None if body.silent else body.answer_format()
            constraint = None if answer is None else await enforced(text.tokenizer, prompt.params, answer=answer)
            siblings = [sibling(prompt.params, i) for i in range(count)]
            runs = [
                Generation(
                    service.engine,
                    service.metrics,
                    Prompt(prompt.ids, cache_keys=body.cache_keys, order=body.order),
                    params,
                    constraint,
                    first=not i,
                )
                for i, params in enumerate(siblings)
            ]
            groups.append([Choice(text.tokenizer, body, prompt.text, run) for run in runs])
        choices = [choice for group in groups for choice in group]
        head = {
            "id": body.response_id("cmpl"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.model,
            **service.fingerprint,
        }
        if body.stream:
            chunks, release = _chunks(groups, head, body), held.pop_all().close
            return EventStream(chunks, service.stopping, release, failure=error_event, encode=bytes, end=DONE)
        answers = await race(gathered([_whole(c, text.tokenizer) for c in choices]), request.receive, service.stopping)
        if count > body.wanted:
            answers = _best(groups, answers, body.wanted)
        numbered = [{"index": i, **answer} for i, answer in enumerate(answers)]
        return json_response({**head, "choices": numbered, "usage": _usage(groups)})


@dataclasses.dataclass(frozen=True, slots=True)
class _Prompt:
    """One prompt of a request. `text`: the text that `echo` puts before the answer; "" without echo."""

    text: str
    ids: list[int]
    params: SamplingParams


def _read(body: CompletionBody, given: str | list[int], count: int, text: ModelText, info: EngineInfo) -> _Prompt:
    """Reads a prompt, text or token ids, for `count` continuations."""
    context = text.context(info) if body.truncate_prompt_tokens is None else None

    def check(tokens: int) -> None:
        if context is not None:
            context.check(len(given), "prompt", tokens)

    if isinstance(given, str):
        check(0)
        # allow_special: clients of this endpoint write the template themselves, including control tokens.
        ids = text.tokenizer.encode(given, allow_special=True, check=check)
    else:
        ids = given
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    wanted = 1 if body.silent else asked
    kept = body.truncated(ids, wanted, info.max_model_len)
    if info.media_pad is not None and info.media_pad in kept:
        raise RequestError(
            "the prompt has the placeholder of a picture, which only the chat APIs fill: leave it out",
            param="prompt",
            code="unsupported_media",
        )
    params = body.sampling(
        text.defaults(),
        max_tokens=fit(kept, wanted, info, "prompt"),
        logprobs=0 if body.logprobs is None and count > body.wanted else body.logprobs,
        prompt_logprobs=body.scored_prompt,
    )
    params = text.prepared(params, info)
    if not body.echo:
        return _Prompt("", kept, params)
    whole = isinstance(given, str) and len(kept) == len(ids)
    return _Prompt(given if isinstance(given, str) and whole else text.tokenizer.decode(kept), kept, params)


def _best(groups: Sequence[Sequence[Choice]], answers: Sequence[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    """From each group the `n` answers with the highest mean log-probability, best first."""
    chosen, rest = [], iter(answers)
    for group in groups:
        own = [next(rest) for _ in group]
        chosen += [own[i] for i in best([choice.logprobs for choice in group], n)]
    return chosen


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


async def _whole(choice: Choice, tokenizer: Tokenizer) -> dict[str, Any]:
    text: list[str] = []
    table: dict[str, list[Any]] = {}
    async with contextlib.aclosing(choice.pieces()) as pieces:
        async for piece, rows in pieces:
            text.append(piece)
            for name, column in (rows or {}).items():
                table.setdefault(name, []).extend(column)
    answer: dict[str, Any] = {"text": "".join(text), "logprobs": table or None, "finish_reason": choice.finish_reason}
    answer |= choice.generation.marks
    if choice.body.return_token_ids:
        answer |= {"prompt_token_ids": choice.generation.prompt, "token_ids": choice.ids}
    if (likeliest := choice.body.prompt_logprobs) is not None:
        answer["prompt_logprobs"] = prompt_logprob_table(tokenizer, choice.prompt_logprobs, likeliest)
    return answer


async def _chunks(
    groups: Sequence[Sequence[Choice]], head: Mapping[str, Any], body: CompletionBody
) -> AsyncGenerator[bytes, None]:
    start = msgspec.json.encode(head)[:-1] + b',"choices":['
    end = b'],"usage":null}' if body.include_usage else b"]}"
    encoder = msgspec.json.Encoder()

    async def frames(index: int, choice: Choice) -> AsyncGenerator[bytes, None]:
        sent: int | None = None  # number of the choice's ids that were sent

        def chunk(text: str, rows: dict[str, Any] | None, finish_reason: str | None, **more: Any) -> bytes:
            nonlocal sent
            made = {"index": index, "text": text, "logprobs": rows, "finish_reason": finish_reason, **more}
            if body.return_token_ids:
                if sent is None:
                    sent, made["prompt_token_ids"] = 0, choice.generation.prompt
                made["token_ids"], sent = choice.ids[sent:], len(choice.ids)
            if body.continuous_usage:
                return event(start + encoder.encode(made) + b'],"usage":' + encoder.encode(_usage(groups)) + b"}")
            return event(start + encoder.encode(made) + end)

        async with contextlib.aclosing(choice.pieces()) as pieces:
            async for text, rows in pieces:
                yield chunk(text, rows, None)
        yield chunk("", None, choice.finish_reason, **choice.generation.marks)

    choices = [choice for group in groups for choice in group]
    async with contextlib.aclosing(merged([frames(i, c) for i, c in enumerate(choices)])) as all_frames:
        async for frame in all_frames:
            yield frame
    if body.include_usage:
        yield event(start + b'],"usage":' + encoder.encode(_usage(groups)) + b"}")


def _usage(groups: Sequence[Sequence[Choice]]) -> dict[str, Any]:
    """Each prompt counts once. All generated tokens count, also those of answers that best_of drops."""
    firsts = [group[0].generation for group in groups]
    return usage(
        sum(len(g.prompt) for g in firsts),
        sum(choice.completion_tokens for group in groups for choice in group),
        sum(g.cached_tokens for g in firsts),
        0,
        Predictions.total(choice.generation.predictions for group in groups for choice in group),
    )
