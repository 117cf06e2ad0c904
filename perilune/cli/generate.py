"""`perilune generate`: one prompt answered in the terminal, streamed."""

import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from perilune.cli.shared import options
from perilune.cli.shared.pictures import image_option, read_media, video_option
from perilune.core.config import EngineConfig
from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Picture, Video, pictures_of
from perilune.core.sampling import SamplingParams
from perilune.engine.client import EngineClient, check_prompt
from perilune.formats.hub import resolve_model
from perilune.media.decoder import Decoder
from perilune.media.limits import Limits
from perilune.model.config import KimiConfig
from perilune.server.generation import Prompt
from perilune.server.service import read_generation_config, sampling_defaults
from perilune.text.chat import template_for
from perilune.text.history import shown
from perilune.text.stream import ChatStream, Event, Reasoning, TextStream, ToolStart
from perilune.text.tokenizer import Tokenizer


@dataclass
class Speed:
    """The numbers of tokens, and when they came (time.perf_counter())."""

    prompt: int = 0
    tokens: int = 0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0

    def count(self, tokens: int) -> None:
        self.last = time.perf_counter()
        if not self.tokens:
            self.first = self.last
        self.tokens += tokens

    def __str__(self) -> str:
        line = f"{self.prompt} prompt tokens, first token after {self.first - self.started:.2f} s, {self.tokens} tokens"
        if self.tokens > 1 and self.last > self.first:
            line += f" at {(self.tokens - 1) / (self.last - self.first):.1f} tokens/s"
        return line


@click.command()
@click.argument("model", default="kimi-nano")
@click.option("-p", "--prompt", help="The question; default: standard input.")
@click.option("--system", help="System prompt.")
@image_option
@video_option
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--thinking/--no-thinking", default=None, help="Think before answering.  [default: the model's own way]")
@options.sampling_options
@click.option("--top-k", type=int, help="Sample from this many of the likeliest tokens.")
@click.option("--min-p", type=float, help="Drop tokens below this times the likeliest's probability.")
@click.option("--presence-penalty", type=float, help="Lower logits of generated tokens by this, -2 to 2.")
@click.option(
    "--frequency-penalty", type=float, help="Lower logits of generated tokens by this per occurrence, -2 to 2."
)
@click.option(
    "--repetition-penalty", type=float, help="Lower logits of tokens of prompt and answer by this factor; 1: off."
)
@click.option("--min-tokens", type=int, help="Tokens before which the answer cannot end.")
@click.option("--stop", multiple=True, help="End before this text; repeatable.")
@options.engine_options(*options.COMMON)
def command(
    model: str,
    prompt: str | None,
    system: str | None,
    images: tuple[Path, ...],
    videos: tuple[Path, ...],
    raw: bool,
    thinking: bool | None,
    assignments: tuple[str, ...],
    **values: Any,
) -> None:
    """Answer one prompt with MODEL.

    The answer goes to standard output; the thinking, dimmed, and the speed go to standard error.
    """
    if prompt is None:
        if sys.stdin.isatty():
            raise click.UsageError("give --prompt, or the prompt on standard input")
        prompt = sys.stdin.read()
    if not prompt:
        raise RequestError("the prompt is empty: give --prompt, or the prompt on standard input", param="prompt")
    if raw and (images or videos or system is not None or thinking is not None):
        raise click.UsageError("--system, --thinking, --image and --video go with the chat template, not with --raw")
    files = [(read_media(file)[0], False) for file in images]
    files += [(read_media(file, is_video=True)[0], True) for file in videos]
    engine, sampling = options.split(values)
    config = options.engine_config({**engine, "max_num_seqs": 1}, assignments, {})
    path = resolve_model(model, progress=sys.stderr.isatty(), check=KimiConfig.from_directory)
    tokenizer = Tokenizer.from_directory(path)
    tokenizer.require_size(KimiConfig.from_directory(path).vocab_size, path)
    template = template_for(path)
    thinks = None if raw else template.thinks(thinking)
    defaults = sampling_defaults(read_generation_config(path), template, thinking=thinks)
    params = SamplingParams(**{**defaults, **{k: v for k, v in sampling.items() if v is not None}})
    media = list[Picture | Video]()
    if files:
        with Decoder(Limits.from_directory(path)) as decoder:
            media = [decoder.decode_video(data) if is_video else decoder.decode(data) for data, is_video in files]
    if raw:
        ids = tokenizer.encode(prompt, allow_special=True)
        stream: TextStream | ChatStream = TextStream(tokenizer, params.stop)
    else:
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        messages.append({"role": "user", "content": [*map(shown, media), {"type": "text", "text": prompt}]})
        assert thinks is not None
        ids = template.render_ids(tokenizer, messages, thinking=thinks)
        stream = ChatStream(tokenizer, thinking=template.opens_thought(thinks), stop=params.stop)
    asyncio.run(answer(path, config, tokenizer, Prompt(ids, pictures_of(media)), params, stream))


async def answer(
    path: Path,
    config: EngineConfig,
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams,
    stream: TextStream | ChatStream,
) -> None:
    client = await EngineClient.start(path, config, stop_token_ids=tokenizer.stop_ids)
    try:
        check_prompt(prompt.ids, client.info)
        printer = Printer()
        speed = Speed(prompt=len(prompt.ids), started=time.perf_counter())
        async with contextlib.aclosing(client.generate(prompt.ids, params, pictures=prompt.pictures)) as deltas:
            async for delta in deltas:
                if delta.finish_reason == "error":
                    raise EngineError(f"the generation failed: {delta.error}")
                if delta.tokens:
                    speed.count(len(delta.tokens))
                printer.show(stream.feed(delta.tokens))
                if stream.stopped:
                    break
        printer.show(stream.finish())
        click.echo()
        click.secho(str(speed), dim=True, err=True)
    finally:
        await client.close()


class Printer:
    """Prints what a stream gives: plain text, or the events of a chat turn."""

    def __init__(self) -> None:
        self.thinking = False

    def show(self, new: str | Sequence[Event]) -> None:
        if isinstance(new, str):
            click.echo(new, nl=False)
            return
        for e in new:
            if isinstance(e, Reasoning):
                click.secho(e.text, nl=False, dim=True, err=True)
                self.thinking = True
                continue
            if self.thinking:
                click.echo("\n", err=True)
                self.thinking = False
            if isinstance(e, ToolStart):
                click.secho(f"{e.id} ", nl=False, bold=True)
            else:
                click.echo(e.text, nl=False)
