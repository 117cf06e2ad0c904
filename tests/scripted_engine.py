"""The test double of the engine process: speaks engine/wire.py, plays token ids, computes nothing.

    python -m tests.scripted_engine [options] serve kimi-nano --port 0    `perilune serve` with this engine
    python -m tests.scripted_engine [options] FD                         the engine, as engine/client.py starts it

Without a script an answer is made of ordinary ids that depend on the prompt, as many as max_tokens allows or
--answer-tokens says. A script (--script FILE) has one JSON object per line: "tokens", the ids of an answer with its end
token, "after", the ids that the prompt must end with (absent: any prompt), and "holds", lists of ids each of which must
occur somewhere in the prompt. The first line that fits is played; a prompt that fits none gets a computed answer.
Penalties, sampling and grammars have no effect. With --media-pad pictures are taken, counted on standard error, and not
looked at.

A step takes --step-ms and, for each 1,000 prompt tokens that were not in the (simulated) prefix cache, --prefill-ms.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import select
import socket
import sys
import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perilune.core.config import EngineConfig
from perilune.core.messages import Cancel, Delta, EngineInfo, EngineStats, Failed, Shutdown, Submit
from perilune.core.step import TokenLogprob
from perilune.engine import wire

STATS_SECONDS = 0.5
CONTROL_SLOTS = 256  # ids at the end of a vocabulary that are no ordinary text
COMPUTED_STEP = 7919  # between two ids of a computed answer: a prime, so that all ordinary ids come


class Line(msgspec.Struct):
    """One line of a script."""

    tokens: tuple[int, ...]
    after: tuple[int, ...] = ()
    holds: tuple[tuple[int, ...], ...] = ()

    def fits(self, prompt: Sequence[int], packed: bytes) -> bool:
        """`packed`: the prompt as 4-byte ids, which is searched 100 times faster than a tuple."""
        if self.after and tuple(prompt[-len(self.after) :]) != self.after:
            return False
        return all(_occurs(array("i", ids).tobytes(), packed) for ids in self.holds)


@dataclass(slots=True)
class Running:
    """A request, the ids of its answer that were not sent yet, and how many it may still get."""

    request: Submit
    rest: Iterator[int]
    left: int
    cached: int = 0
    began: bool = False


class PrefixCache:
    """Which beginnings of prompts, in whole blocks, were seen: at most `blocks` digests, the oldest dropped first."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.seen: OrderedDict[bytes, None] = OrderedDict()

    def take(self, prompt: Sequence[int], keys: Sequence[str]) -> int:
        """Number of the prompt's tokens that were cached; then caches all its whole blocks."""
        hits, hitting = 0, True
        digest = hashlib.blake2b(json.dumps(keys).encode(), digest_size=16).digest()
        for end in range(self.block_size, len(prompt), self.block_size):
            ids = array("i", prompt[end - self.block_size : end]).tobytes()
            digest = hashlib.blake2b(digest + ids, digest_size=16).digest()
            hitting = hitting and digest in self.seen
            hits += hitting
            self.seen[digest] = None
            self.seen.move_to_end(digest)
        while len(self.seen) > self.blocks:
            self.seen.popitem(last=False)
        return hits * self.block_size


class ScriptedEngine:
    """Requests in, deltas out: the engine's side of the messages, without a model."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.script = _read_script(options.script) if options.script else []
        blocks = max(2, options.cache_tokens // options.block_size)
        self.cache = PrefixCache(blocks, options.block_size)
        self.info = EngineInfo(
            model="scripted",
            max_model_len=options.context,
            vocab_size=options.vocab,
            stop_token_ids=(),
            num_blocks=blocks,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            media_pad=options.media_pad,
            pids=(os.getpid(),),
            choices=(("engine", "scripted", "a test double: the answers mean nothing"),),
        )
        self.waiting: deque[Submit] = deque()
        self.running: dict[int, Running] = {}
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = self.steps = self.pictures = 0
        self.step_seconds = 0.0

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def cancel(self, rid: int) -> None:
        self.running.pop(rid, None)
        self.waiting = deque(r for r in self.waiting if r.rid != rid)

    def step(self) -> list[Delta]:
        """One step: waiting requests join as far as there is room, and each running one gets its next tokens."""
        computed = 0
        while self.waiting and len(self.running) < self.options.max_num_seqs:
            request = self.waiting.popleft()
            self.running[request.rid] = begun = self._begin(request)
            computed += len(request.prompt) - begun.cached
        seconds = (self.options.step_ms + self.options.prefill_ms * computed / 1000) / 1000
        if seconds:
            time.sleep(seconds)
        self.step_seconds += seconds
        self.steps += bool(self.running)
        deltas = [self._advance(r) for r in self.running.values()]
        for delta in deltas:
            if delta.finish_reason is not None:
                del self.running[delta.rid]
        return deltas

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            blocks_total=self.cache.blocks,
            blocks_cached=len(self.cache.seen),
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
            steps=self.steps,
            step_seconds=self.step_seconds,
        )

    def _begin(self, request: Submit) -> Running:
        cached = self.cache.take(request.prompt, (*request.cache_keys, *(p.digest.hex() for p in request.pictures)))
        if request.pictures:
            self.pictures += len(request.pictures)
            print(f"pictures: {self.pictures}", file=sys.stderr, flush=True)
        self.prompt_tokens += len(request.prompt)
        self.cached_tokens += cached
        room = self.options.context - len(request.prompt)
        left = min(room, request.params.max_tokens or room)
        return Running(request, self._answer(request), left, cached)

    def _answer(self, request: Submit) -> Iterator[int]:
        packed = array("i", request.prompt).tobytes() if self.script else b""
        for line in self.script:
            if line.fits(request.prompt, packed):
                return iter(line.tokens)
        ordinary = self.options.vocab - CONTROL_SLOTS
        first = sum(request.prompt) % ordinary
        ids = itertools.islice(itertools.count(first, COMPUTED_STEP), self.options.answer_tokens)
        ends = request.params.stop_token_ids[:1] if self.options.answer_tokens is not None else ()
        return itertools.chain((id % ordinary for id in ids), ends)

    def _advance(self, r: Running) -> Delta:
        params = r.request.params
        tokens = tuple(itertools.islice(r.rest, min(self.options.width, r.left)))
        r.left -= len(tokens)
        end = next((i for i, t in enumerate(tokens, 1) if t in params.stop_token_ids), None)
        reason = "length" if r.left == 0 else None
        if end is not None or not tokens:  # a script that ends without an end token stops as well
            tokens, reason = tokens[:end], "stop"
        self.generated_tokens += len(tokens)
        drafted = len(tokens) - 1 if len(tokens) > 1 else 0
        delta = Delta(r.request.rid, tokens, finish_reason=reason, drafted=drafted, accepted=drafted)
        if params.logprobs is not None:
            delta.logprobs = tuple(_logprob(t, params.logprobs) for t in tokens)
        if not r.began:
            r.began, delta.cached_tokens = True, r.cached
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = tuple(_logprob(t, params.prompt_logprobs) for t in r.request.prompt[1:])
        return delta


class Link:
    """The engine's blocking end of the socket. Frames are read by large pieces: no call of the system per field."""

    def __init__(self, fd: int) -> None:
        self.sock = socket.socket(fileno=fd)
        self.data = bytearray()

    def frame(self) -> bytes:
        """The next frame's body; EOFError when the other side has closed."""
        while True:
            if len(self.data) >= wire.HEADER.size:
                end = wire.HEADER.size + wire.body_length(bytes(self.data[: wire.HEADER.size]))
                if len(self.data) >= end:
                    body = bytes(self.data[wire.HEADER.size : end])
                    del self.data[:end]
                    return body
            piece = self.sock.recv(1 << 20)
            if not piece:
                raise EOFError
            self.data += piece

    @property
    def ready(self) -> bool:
        """Whether bytes have come: those of a frame, which then is there soon."""
        return bool(self.data or select.select([self.sock], [], [], 0)[0])


def play(options: argparse.Namespace, link: Link) -> None:
    """The loop of engine/process.py: take what arrived, step, send what came out, until Shutdown or EOF."""
    msgspec.msgpack.decode(link.frame(), type=tuple[str, EngineConfig])
    try:
        engine = ScriptedEngine(options)
    except (OSError, msgspec.DecodeError) as e:
        link.sock.sendall(wire.encode([Failed(f"the script {options.script} cannot be read: {e}")]))
        return
    link.sock.sendall(wire.encode([engine.info]))
    sent_at = 0.0
    while True:
        while not engine.busy or link.ready:
            for message in wire.decode(link.frame()):
                if isinstance(message, Submit):
                    engine.waiting.append(message)
                elif isinstance(message, Cancel):
                    engine.cancel(message.rid)
                elif isinstance(message, Shutdown):
                    return
        out: list[Delta | EngineStats] = [*engine.step()]
        now = time.monotonic()
        if now - sent_at >= STATS_SECONDS or not engine.busy:
            out.append(engine.stats())
            sent_at = now
        link.sock.sendall(wire.encode(out))


def command(*options: str) -> list[str]:
    """What EngineClient.start takes as its command to run this engine with these options."""
    return [sys.executable, "-m", "tests.scripted_engine", *options]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="scripted_engine", description="an engine that plays token ids")
    p.add_argument("--vocab", type=int, default=None, help="ids of the vocabulary [default: those of the served model]")
    p.add_argument("--context", type=int, default=262_144, help="tokens of prompt and answer together")
    p.add_argument("--max-num-seqs", type=int, default=256, help="requests that run at once")
    p.add_argument("--block-size", type=int, default=64, help="tokens of a block of the simulated prefix cache")
    p.add_argument("--cache-tokens", type=int, default=4 << 20, help="tokens that the simulated prefix cache holds")
    p.add_argument("--media-pad", type=int, default=None, help="id of the placeholder of pictures [default: sees none]")
    p.add_argument("--sees", action="store_true", help="with serve: --media-pad with the model's own placeholder")
    p.add_argument("--script", type=Path, default=None, help="recorded answers")
    p.add_argument("--answer-tokens", type=int, default=None, help="length of computed answers [default: max_tokens]")
    p.add_argument("--width", type=int, default=1, help="tokens of a request per step")
    p.add_argument("--step-ms", type=float, default=0.0, help="time of a step")
    p.add_argument("--prefill-ms", type=float, default=0.0, help="time per 1,000 prompt tokens not in the cache")
    p.add_argument("run", nargs=argparse.REMAINDER, help="a socket's FD, or: serve MODEL and options of that verb")
    return p


def serve(options: argparse.Namespace, own: Sequence[str]) -> None:
    """`perilune serve` as it is, but for the command of the engine."""
    from perilune.cli import serve as verb
    from perilune.cli.main import main as cli
    from perilune.formats.hub import resolve_model
    from perilune.text.tokenizer import Tokenizer

    if options.vocab is None:
        model = next((a for a in options.run[1:] if not a.startswith("-")), "kimi-nano")
        tokenizer = Tokenizer.from_directory(resolve_model(model, progress=False))
        own = [*own, "--vocab", str(tokenizer.vocab_size)]
        if options.sees:
            own = [*own, "--media-pad", str(tokenizer.special("<|media_pad|>"))]
    verb.run = functools.partial(verb.run, engine_command=command(*own))
    sys.argv = ["perilune", *options.run]
    cli()


def main() -> None:
    options = parser().parse_args()
    if options.run[:1] == ["serve"]:
        serve(options, sys.argv[1 : sys.argv.index("serve")])
        return
    try:
        play(options, Link(int(options.run[0])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the server is gone


def _occurs(ids: bytes, packed: bytes) -> bool:
    at = packed.find(ids)
    while at > 0 and at % 4:  # found across the border of two ids
        at = packed.find(ids, at + 1)
    return at >= 0


def _logprob(token: int, count: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, ((token, -0.5),)[:count])


def _read_script(path: Path) -> list[Line]:
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().splitlines() if line.strip()]


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)
