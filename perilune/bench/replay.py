"""Replays a trace of requests; measures latencies, and the share of prompt tokens that came from a cache.

Hit share is the share of prompt tokens that were not computed. The ideal share is that of a cache that evicts nothing:
at a request's first token, it holds all earlier prompts and all answers that have ended. Times count from sending a
request.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from perilune.bench.ledger import percentile
from perilune.bench.traces import Piece, Session, Turn
from perilune.client.endpoint import Endpoint
from perilune.core.errors import ConfigError, PeriluneError, RequestError
from perilune.core.messages import Delta, EngineStats, Submit
from perilune.core.sampling import SamplingParams
from perilune.engine.engine import Engine
from perilune.kv.tiers import HOST

WORDS = ["stone", "river", "glass", "light", "north", "paper", "green", "seven", "table", "under", "house", "water"]
STALLED_SECONDS = 5.0  # a wait for pinned memory, or for free blocks, ends after this time without progress
ADOPT_SECONDS = 0.001  # between two checks for free blocks
Report = Callable[[str], None]


@dataclass(slots=True)
class Call:
    """One request: its times (time.perf_counter), those of the answer's pieces, and token counts."""

    session: int
    turn: int
    begin: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens)
    prompt_tokens: int = 0
    cached: int = 0
    says_cached: bool = True  # False: the endpoint does not say how many tokens were cached
    prompt: list[tuple[int, int]] = field(default_factory=list)  # by piece: (hash of all text up to its end, tokens)
    answer: int = 0  # hash of prompt and answer
    ideal: float = 0.0  # share of the prompt that a cache without eviction would have
    error: str | None = None
    warm_up: bool = False  # before the clock starts
    cut: bool = False  # the replay ended before the answer did

    @property
    def ttft(self) -> float:
        return self.arrivals[0][0] - self.begin

    @property
    def tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1][0] - self.begin

    @property
    def inter_token(self) -> float | None:
        """Seconds per token after the first; None if there is none."""
        more = self.tokens - self.arrivals[0][1]
        return (self.arrivals[-1][0] - self.arrivals[0][0]) / more if more else None


class Conversation(Protocol):
    async def ask(self, turn: Turn, call: Call) -> None:
        """Asks the next turn, and fills in the call as the answer arrives."""
        ...

    async def adopt(self, turn: Turn, call: Call) -> None:
        """Marks the turn's prompt as cached without computing it; there is no answer. ConfigError if impossible."""
        ...


class Target(Protocol):
    def conversation(self, seed: int) -> Conversation: ...


@dataclass(frozen=True, slots=True)
class Options:
    """concurrency   sessions at once; None: as the trace has them
    speed            factor of the trace's clock; 0: no waiting between turns
    ttft_limit, inter_token_limit   most seconds of a good request
    seconds          no turn begins later
    end_seconds      when unfinished requests are ended; their tokens until then count
    warm_up          play the first turns of all sessions before the clock starts
    adopt            mark warm-up prompts as cached without computing them: with random weights, KV is random anyway
    """

    concurrency: int | None = None
    speed: float = 1.0
    ttft_limit: float = 5.0
    inter_token_limit: float = 0.1
    seconds: float = float("inf")
    end_seconds: float = float("inf")
    warm_up: bool = False
    adopt: bool = False


# ---- the two kinds of target


class Local:
    """An engine in this process. Asynchronous context manager; leaving it does not close the engine."""

    def __init__(self, engine: Engine, encode: Callable[[str], list[int]] | None = None) -> None:
        self.engine = engine
        self._encode = encode or (lambda text: _made(text, max(len(text) // 4, 1), engine.info.vocab_size))
        self._pool = ThreadPoolExecutor(1, "perilune-replay")
        self._incoming: list[Submit] = []
        self._inboxes: dict[int, asyncio.Queue[tuple[float, Delta]]] = {}
        self._wake = asyncio.Event()
        self._rids = 0

    async def __aenter__(self) -> "Local":
        self._task = asyncio.create_task(self._loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._pool.shutdown()

    def conversation(self, seed: int) -> "LocalConversation":
        return LocalConversation(self)

    def ids(self, piece: Piece) -> list[int]:
        return self._encode(piece.text) if piece.text is not None else _made(
            piece.name, piece.tokens, self.engine.info.vocab_size
        )  # fmt: skip

    async def generate(self, prompt: list[int], output_tokens: int, call: Call) -> list[int]:
        rid, self._rids = self._rids, self._rids + 1
        inbox = self._inboxes[rid] = asyncio.Queue()
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        self._incoming.append(Submit(rid, tuple(prompt), params))
        self._wake.set()
        out: list[int] = []
        while True:
            at, delta = await inbox.get()
            out += delta.tokens
            call.cached += delta.cached_tokens
            if delta.tokens:
                call.arrivals.append((at, len(delta.tokens)))
            if delta.finish_reason is not None:
                del self._inboxes[rid]
                call.error = delta.error
                return out

    async def adopt(self, prompt: list[int]) -> None:
        """Marks all full blocks of a prompt as cached."""
        await asyncio.get_running_loop().run_in_executor(self._pool, self._adopt, prompt)

    def _adopt(self, prompt: list[int]) -> None:
        size, scheduler = self.engine.config.block_size, self.engine.scheduler
        assert size is not None
        known, since = 0, time.perf_counter()
        while (now := len(scheduler.adopt(prompt))) < len(prompt) // size:
            if now > known:
                known, since = now, time.perf_counter()
            elif time.perf_counter() - since > STALLED_SECONDS:
                raise ConfigError(f"the cache has no room for a session of {len(prompt)} tokens: give more kv_blocks")
            self.engine.step()  # copies blocks of other sessions to a tier, which frees them
            time.sleep(ADOPT_SECONDS)

    async def _loop(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._incoming or self.engine.busy:
                try:
                    at, deltas = await asyncio.get_running_loop().run_in_executor(self._pool, self._step)
                except Exception as e:  # any exception: every waiting request must end
                    at, line = time.perf_counter(), f"the engine failed: {e!r}".splitlines()[0]
                    deltas = [Delta(rid, finish_reason="error", error=line) for rid in self._inboxes]
                for delta in deltas:
                    self._inboxes[delta.rid].put_nowait((at, delta))

    def _step(self) -> tuple[float, list[Delta]]:
        incoming, self._incoming = self._incoming, []
        refused = []
        for submit in incoming:
            try:
                self.engine.submit(submit)
            except RequestError as e:
                refused.append(Delta(submit.rid, finish_reason="error", error=str(e)))
        deltas = self.engine.step()
        return time.perf_counter(), refused + deltas


class LocalConversation:
    def __init__(self, target: Local) -> None:
        self._target = target
        self._ids: list[int] = []

    async def adopt(self, turn: Turn, call: Call) -> None:
        self._say(turn)
        await self._target.adopt(self._ids)
        call.prompt_tokens, call.arrivals = len(self._ids), [(time.perf_counter(), 0)]

    def _say(self, turn: Turn) -> None:
        if turn.whole:
            self._ids = []
        for piece in turn.pieces:
            self._ids += self._target.ids(piece)

    async def ask(self, turn: Turn, call: Call) -> None:
        self._say(turn)
        room = self._target.engine.info.max_model_len - len(self._ids)
        if room < 1:
            call.error = (
                f"the context of {self._target.engine.info.max_model_len} tokens is full: try a smaller --scale"
            )
            return
        call.prompt_tokens = len(self._ids)
        self._ids += await self._target.generate(self._ids, min(turn.output_tokens, room), call)


class Remote:
    """Any OpenAI-compatible endpoint, by chat completions. Text made from a piece's name has one word per token."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    def conversation(self, seed: int) -> "RemoteConversation":
        return RemoteConversation(self.endpoint)


class RemoteConversation:
    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._messages: list[dict[str, str]] = []

    async def adopt(self, turn: Turn, call: Call) -> None:
        raise ConfigError("an endpoint's cache cannot be filled without computing")

    async def ask(self, turn: Turn, call: Call) -> None:
        if turn.whole:
            self._messages = []
        for role, pieces in groupby(turn.pieces, lambda piece: piece.role):
            said = " ".join(p.text if p.text is not None else " ".join(_words(p)) for p in pieces)
            self._messages.append({"role": role, "content": said})
        body = {"messages": self._messages, "max_tokens": turn.output_tokens, "temperature": 0, "ignore_eos": True}
        if self._endpoint.owner not in ("perilune", "vllm", "sglang"):
            del body["ignore_eos"]
        answer: list[str] = []
        usage, call.says_cached = None, False
        async for chunk in self._endpoint.stream(body):
            said = "".join(getattr(event, "text", "") for event in chunk.events)
            usage = chunk.usage or usage
            if chunk.events:
                answer.append(said)
                call.arrivals.append((chunk.at, 1))
        if usage is not None:
            call.prompt_tokens, call.cached = usage.prompt, usage.cached or 0
            call.says_cached = usage.cached is not None
            _spread(call, usage.completion)
        self._messages.append({"role": "assistant", "content": "".join(answer)})


def _made(name: str, tokens: int, vocab: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(vocab // 16, vocab * 15 // 16) for _ in range(tokens)]  # control tokens are at the ends


def _words(piece: Piece) -> list[str]:
    rng = random.Random(piece.name)
    return [rng.choice(WORDS) for _ in range(piece.tokens)]


def _spread(call: Call, tokens: int) -> None:
    """Adds tokens to the last arrival, up to the server's count: pieces of a stream may hold several tokens."""
    if call.arrivals and tokens > len(call.arrivals):
        at, _ = call.arrivals[-1]
        call.arrivals[-1] = at, 1 + tokens - len(call.arrivals)


# ---- playing


class _Player:
    """A session: its conversation, and hashes of its texts."""

    def __init__(self, target: Target, number: int, session: Session) -> None:
        self.session, self._number = session, number
        self._conversation = target.conversation(number)
        self._text, self._said, self._turn = 0, list[tuple[int, int]](), 0
        self.asking: Call | None = None  # the call that has not ended

    async def ask(self, *, warm_up: bool = False, adopt: bool = False) -> Call:
        """Plays the next turn. `adopt`: only mark its prompt as cached."""
        turn = self.session.turns[self._turn]
        call = Call(self._number, self._turn, warm_up=warm_up)
        self._turn += 1
        if turn.whole:
            self._text, self._said = 0, []
        for piece in turn.pieces:
            self._text = hash((self._text, piece.name))
            self._said.append((self._text, piece.tokens or max(len(piece.name) // 4, 1)))
        call.prompt = list(self._said)
        call.begin, self.asking = time.perf_counter(), call
        try:
            await (self._conversation.adopt if adopt else self._conversation.ask)(turn, call)
        except PeriluneError as e:
            call.error = str(e)
        if call.error is None and call.arrivals:
            call.answer = self._text = hash((self._text, "answer", self._number))
            self._said.append((self._text, call.tokens))
        self.asking = None
        return call


async def play(
    target: Target,
    sessions: Sequence[Session],
    options: Options,
    report: Report,
    started: Callable[[], None] = lambda: None,
) -> list[Call]:
    """All calls, in the order in which they ended. A failed call ends its session. `started` is called when the clock
    starts."""
    free = asyncio.Semaphore(options.concurrency or len(sessions))
    calls: list[Call] = []
    total = sum(len(session.turns) - options.warm_up for session in sessions)
    players = [_Player(target, number, session) for number, session in enumerate(sessions)]
    begin = time.perf_counter()

    async def turn(player: _Player, *, warm_up: bool = False) -> bool:
        """Plays a turn; returns whether the session goes on."""
        call = await player.ask(warm_up=warm_up, adopt=warm_up and options.adopt)
        calls.append(call)
        if call.error is not None or not call.arrivals:
            report(f"{player.session.name}, turn {call.turn + 1}: {call.error or 'no answer'}")
            return False
        if not warm_up:
            _progress(calls, len(sessions) * options.warm_up, total, begin, report)
        return True

    async def warm(player: _Player) -> bool:
        async with free:
            return await turn(player, warm_up=True)

    async def one(player: _Player) -> None:
        session = player.session
        await _pause(session.start - (time.perf_counter() - begin) * options.speed, options.speed)
        async with free:
            for index in range(options.warm_up, len(session.turns)):
                if index > options.warm_up:
                    await _pause(session.turns[index].delay, options.speed)
                if time.perf_counter() - begin > options.seconds or not await turn(player):
                    return

    if options.warm_up:
        going = await asyncio.gather(*(warm(player) for player in players))
        players = [player for player, goes_on in zip(players, going) if goes_on]
        wall = time.perf_counter() - begin
        how = "taken as cached" if options.adopt else "computed"
        report(f"what {len(players)} sessions had said before was {how} in {wall:.0f} s; now the clock starts")
    begin = time.perf_counter()
    started()
    tasks = [asyncio.create_task(one(player)) for player in players]
    limit = None if options.end_seconds == float("inf") else options.end_seconds
    ended, late = await asyncio.wait(tasks, timeout=limit, return_when=asyncio.FIRST_EXCEPTION)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in ended:
        task.result()
    for player in players if late else ():
        if player.asking is not None:
            player.asking.cut = True
            calls.append(player.asking)
    return calls


async def _pause(seconds: float, speed: float) -> None:
    if speed > 0 and seconds > 0:
        await asyncio.sleep(seconds / speed)


def judge(calls: Sequence[Call]) -> None:
    """Sets `ideal` of calls that were answered."""
    known: dict[int, float] = {}  # by hash of a text: when it was computed
    for call in calls:
        for text, _ in call.prompt:
            known[text] = min(known.get(text, call.arrivals[0][0]), call.arrivals[0][0])
        if not call.cut:
            known[call.answer] = call.arrivals[-1][0]
    for call in calls:
        found, total = 0, sum(tokens for _, tokens in call.prompt)
        for text, tokens in call.prompt:
            if not known.get(text, call.arrivals[0][0]) < call.arrivals[0][0]:
                break
            found += tokens
        call.ideal = found / total


def _progress(calls: Sequence[Call], before: int, total: int, begin: float, report: Report) -> None:
    """`before`: calls of the warm-up, which come first."""
    count = len(calls) - before
    if count % max(total // 20, 1) == 0 or count == total:
        wall, counted = time.perf_counter() - begin, calls[before:]
        hits = f": hits {shares(counted)[0]:.1%}" if any(c.says_cached and c.error is None for c in counted) else ""
        report(f"{count} of {total} requests in {wall:.0f} s{hits}")


# ---- results


def shares(calls: Sequence[Call]) -> tuple[float, float]:
    """(hit share, ideal share) of all prompt tokens."""
    total = sum(call.prompt_tokens for call in calls) or 1
    # An endpoint that counts no tokens: by the trace's own lengths.
    lengths = [call.prompt_tokens or sum(tokens for _, tokens in call.prompt) for call in calls]
    ideal = sum(c.ideal * length for c, length in zip(calls, lengths)) / (sum(lengths) or 1)
    return sum(c.cached for c in calls) / total, ideal


def summary(calls: Sequence[Call], options: Options) -> dict[str, Any]:
    """The keys of a ledger row that follow from the calls; times in seconds."""
    good = [call for call in calls if call.error is None and call.arrivals]
    judge(good)
    good = [call for call in good if not call.warm_up]
    cut = sum(call.cut for call in calls)
    failed = sum(call.error is not None or not (call.arrivals or call.cut) for call in calls)
    if not good:
        return {"requests": 0, "failed": failed, "cut": cut}
    hit, ideal = shares(good)
    wall = max(c.arrivals[-1][0] for c in good) - min(c.begin for c in good)
    between = [gap for c in good if (gap := c.inter_token) is not None]
    later = [c.ttft for c in good if c.turn]
    kept = [
        c for c in good if c.ttft <= options.ttft_limit and (c.inter_token or 0.0) <= options.inter_token_limit
    ]  # fmt: skip
    found: dict[str, Any] = {"requests": len(good), "failed": failed, "cut": cut}
    said = any(c.says_cached for c in good)
    found |= {"prompt_tokens": sum(c.prompt_tokens for c in good), "hit_share": hit if said else None}
    found["ideal_share"] = ideal
    for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        found[f"ttft_{name}_s"] = percentile([c.ttft for c in good], share)
        found[f"inter_token_{name}_s"] = percentile(between, share)
    found["ttft_later_turns_p50_s"] = percentile(later, 0.5) if later else None
    slowest = percentile([c.seconds / c.tokens for c in good], 0.9)
    found["interactivity"] = 1 / slowest if slowest else 0.0
    found["tokens_per_s"] = sum(c.tokens for c in good) / wall
    found["input_tokens_per_s"] = sum(c.prompt_tokens for c in good) / wall
    asked = sum(not call.warm_up for call in calls)  # failed ones, too: they lower the share of good requests
    found["goodput_requests_per_s"], found["good_share"] = len(kept) / wall, len(kept) / asked
    found["ttft_limit_s"], found["inter_token_limit_s"] = options.ttft_limit, options.inter_token_limit
    found["wall_s"] = wall
    return {k: round(v, 5) if isinstance(v, float) else v for k, v in found.items()}


def tier_shares(before: EngineStats, after: EngineStats) -> dict[str, float]:
    """Hit share by tier, of the prompt tokens between two readings."""
    total = after.prompt_tokens - before.prompt_tokens or 1
    earlier = {name: tokens for name, tokens, _, _ in before.tiers}
    found = {name: (tokens - earlier.get(name, 0)) / total for name, tokens, _, _ in after.tiers}
    pages = (after.cached_tokens - before.cached_tokens) / total - sum(found.values())
    return {"pages": round(pages, 5)} | {name: round(share, 5) for name, share in found.items()}


def describe(row: dict[str, Any]) -> str:
    """A few lines for people."""
    failed = ", ".join(f"{row[name]} {name}" for name in ("failed", "cut") if row.get(name))
    if not row.get("requests"):
        return f"no request was answered{f', {failed}' if failed else ''}"
    tiers = ", ".join(f"{name} {share:.1%}" for name, share in (row.get("hit_share_by_tier") or {}).items())
    restores = ""
    if row.get("restore_s"):
        restores = f"; restores took {row['restore_s']:.2f} s, computing {row['restore_s'] + row['saved_s']:.2f}"

    hits = "not known (the endpoint's usage has no cached_tokens)"
    if row["hit_share"] is not None:
        hits = f"{row['hit_share']:.1%} of prompt tokens"

    later = ""
    if row["ttft_later_turns_p50_s"] is not None:
        later = f"; of later turns p50 {row['ttft_later_turns_p50_s'] * 1e3:.1f} ms"

    def times(name: str) -> str:
        return ", ".join(f"{p} {row[f'{name}_{p}_s'] * 1e3:.1f}" for p in ("p50", "p90", "p99")) + " ms"

    return "\n".join(
        (
            f"  requests        {row['requests']} in {row['wall_s']:.1f} s{f', {failed}' if failed else ''}",
            f"  cache hits      {hits}, {row['ideal_share']:.1%} possible{f' ({tiers})' if tiers else ''}{restores}",
            f"  first token     {times('ttft')}{later}",
            f"  between tokens  {times('inter_token')}",
            f"  tokens/s        {row['tokens_per_s']:.1f} of answers, {row['input_tokens_per_s']:.1f} of prompts",
            f"  interactivity   {row['interactivity']:.1f} tokens/s (1 / p90 of a request's seconds for each token)",
            f"  goodput         {row['goodput_requests_per_s']:.2f} requests/s: {row['good_share']:.0%} had the first "
            f"token within {row['ttft_limit_s']:g} s and others within {row['inter_token_limit_s']:g} s each",
        )
    )


async def host_memory(stats: Callable[[], EngineStats], report: Report) -> None:
    """Waits until the host memory of the KV tiers is pinned (about a minute), or STALLED_SECONDS without progress.
    Blocks that are evicted earlier would be dropped."""
    limit = next((most for name, _, _, most in stats().tiers if name == HOST), 0)
    ready, since, begin = stats().host_blocks_ready, time.perf_counter(), time.perf_counter()
    if ready < limit:
        report(f"waiting for host memory: {ready} of {limit} blocks can be used")
    while ready < limit and time.perf_counter() - since < STALLED_SECONDS:
        await asyncio.sleep(0.1)
        if (now := stats().host_blocks_ready) > ready:
            ready, since = now, time.perf_counter()
    if limit:
        report(f"host memory for {ready} blocks, after {time.perf_counter() - begin:.0f} s")


async def measure(
    target: Target, sessions: Sequence[Session], options: Options, report: Report
) -> tuple[dict[str, Any], list[Call]]:
    """(keys of a ledger row, the calls)"""
    engine = target.engine if isinstance(target, Local) else None
    readings: list[EngineStats] = []

    def read() -> None:
        if engine is not None:
            readings.append(engine.stats())

    if engine is not None:
        await host_memory(engine.stats, report)
    calls = await play(target, sessions, options, report, read)
    row = summary(calls, options)
    if engine is not None:
        read()
        before, after = readings
        row["hit_share_by_tier"] = tier_shares(before, after)
        row["restore_s"] = round(after.restore_seconds - before.restore_seconds, 4)
        row["blocks_dropped"] = after.blocks_dropped
        row["saved_s"] = round(after.saved_seconds - before.saved_seconds, 4)
    return row, calls
