"""Forecasts a replay of agents' sessions on one H200, without a GPU: hits, throughput and times to first tokens, with
KV tiers and without. Scheduler, pacer, prefix cache and tiers are those of the engine; times of steps and copies come
from tables. `perilune bench replay agents --shape kimi-k2.5` measures the same.

python -m runs.kv_forecast [--sessions 64 --turns 15 --begin-after 13 --kv-blocks 5400 --kv-host-gb 28]. A line of JSON
with tiers, one without.
"""

import argparse
import heapq
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from perilune.bench import replay, traces
from perilune.bench.trace_formats import sessions_of
from perilune.core.config import EngineConfig
from perilune.core.messages import Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Output, StepPlan, StepResult
from perilune.engine.scheduler import Scheduler
from perilune.engine.step_times.pacing import Pacer
from perilune.kv.mover import Copied, Done, Name, Piece, Restored, Stored
from perilune.kv.tiers import Tiers

BLOCK_TOKENS, STEP_TOKENS, VOCABULARY = 64, 8192, 160_000
# Kimi K2.5 on one H200, bf16: tokens of a step and us of a layer without attention (bench/results), attention's seconds
# for a pair of tokens in prompts and for a token of context in decoding, and what a step takes outside the layers.
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1000, 2000, 4000, 10_000)
MICROSECONDS = (131, 279, 768, 1863, 2500, 2800, 3500, 3820, 5300, 7930, 17_330)
PAIR_SECONDS, CONTEXT_SECONDS, OUTSIDE_SECONDS = 6.68e-11, 2.9e-10, 0.75e-3
KV_BYTES = 576 * 2  # of a token and layer
STORE_GB_S, RESTORE_GB_S, RESTORE_SECONDS, CHECK_SECONDS = 20.0, 33.0, 0.001, 0.002
WINDOW_BLOCKS = 32


@dataclass(slots=True)
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def layer_seconds(tokens: int) -> float:
    """Seconds of a layer without attention, for a step of `tokens` tokens."""
    tokens = min(tokens, TOKENS[-1])
    at = next(i for i in range(len(TOKENS) - 1) if tokens <= TOKENS[i + 1])
    share = math.log(tokens / TOKENS[at]) / math.log(TOKENS[at + 1] / TOKENS[at])
    ratio: float = (MICROSECONDS[at + 1] / MICROSECONDS[at]) ** share
    return 1e-6 * MICROSECONDS[at] * ratio


def step_seconds(parts: Sequence[tuple[int, int]], layers: int) -> float:
    """Seconds of a step; `parts` has (tokens computed, tokens before them) of each request."""
    taken = layer_seconds(sum(count for count, _ in parts))
    for count, start in parts:
        taken += count * (start + count / 2) * PAIR_SECONDS if count > 1 else (start + 1) * CONTEXT_SECONDS
    return layers * taken + OUTSIDE_SECONDS


class Link:
    """A Mover that copies one block after another in each direction, at a fixed speed."""

    def __init__(self, rows: int, block_gb: float, clock: Clock) -> None:
        self.rows, self.clock, self.restored = rows, clock, 0
        self._store, self._restore = block_gb / STORE_GB_S, block_gb / RESTORE_GB_S
        self._out = self._in = 0.0  # when each direction is free
        self._coming: list[tuple[float, int, Done]] = []
        self._count = 0

    @property
    def next(self) -> float:
        return self._coming[0][0] if self._coming else math.inf

    def _later(self, at: float, done: Done) -> None:
        self._count += 1
        heapq.heappush(self._coming, (at, self._count, done))

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        self._out = max(self._out, self.clock.now)
        for first in range(0, len(stores), WINDOW_BLOCKS):
            window = stores[first : first + WINDOW_BLOCKS]
            self._out += len(window) * self._store
            for _, block, row in window:
                self._later(self._out, Copied(block))
                self._later(self._out + CHECK_SECONDS, Stored(row))

    def restore(self, ticket: int, pieces: Sequence[Piece]) -> None:
        taken = len(pieces) * self._restore + RESTORE_SECONDS
        self._in = max(self._in, self.clock.now) + taken
        self.restored += len(pieces)
        self._later(self._in, Restored(ticket, taken))

    def write(self, name: Name, row: int) -> None:
        raise AssertionError("there is no disk")

    def delete(self, name: Name) -> None: ...

    def poll(self) -> list[Done]:
        done = []
        while self.next <= self.clock.now:
            done.append(heapq.heappop(self._coming)[2])
        return done


class Player:
    """Plays sessions at once, without waiting between turns, on a scheduler; steps take the seconds of a table."""

    def __init__(self, sessions: Sequence[traces.Session], layers: int, scheduler: Scheduler, link: Link) -> None:
        self.scheduler, self.link, self.clock, self.layers = scheduler, link, link.clock, layers
        self.sessions, self.calls = sessions, list[replay.Call]()
        self._ids = [list[int]() for _ in sessions]
        self._said = [list[tuple[int, int]]() for _ in sessions]
        self._random = random.Random(5)

    def _say(self, session: int, turn: int, *, warm_up: bool) -> replay.Call:
        call, said = replay.Call(session, turn, self.clock.now, warm_up=warm_up), self._said[session]
        for piece in self.sessions[session].turns[turn].pieces:
            rng = random.Random(piece.name)
            self._ids[session] += [rng.randrange(VOCABULARY) for _ in range(piece.tokens)]
            said.append((hash((said[-1][0] if said else 0, piece.name)), piece.tokens))
        call.prompt, call.prompt_tokens = list(said), len(self._ids[session])
        self.calls.append(call)
        return call

    def adopt(self) -> None:
        """The cache takes the first turn of each session as computed."""
        for session in range(len(self.sessions)):
            call = self._say(session, 0, warm_up=True)
            while len(self.scheduler.adopt(self._ids[session])) < len(self._ids[session]) // BLOCK_TOKENS:
                self.scheduler.take_transfers()
                self.clock.now += replay.ADOPT_SECONDS
            call.arrivals = [(self.clock.now, 0)]

    def _ask(self, session: int, turn: int) -> None:
        self._say(session, turn, warm_up=False)
        tokens = self.sessions[session].turns[turn].output_tokens
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self.scheduler.submit(Submit(len(self.calls) - 1, tuple(self._ids[session]), params), 0, self.clock.now)

    def play(self) -> None:
        """Plans a step while the one before runs, as the engine does."""
        for session in range(len(self.sessions)):
            self._ask(session, 1)
        flying: tuple[StepPlan, float] | None = None
        free, committed = self.clock.now, self.clock.now  # when the device is free; when the last step was committed
        while self.scheduler.has_work or flying is not None:
            self.scheduler.take_transfers()
            plan, before = self.scheduler.plan(), flying
            flying = None
            if plan is not None:
                begin = max(self.clock.now, free)
                free = begin + step_seconds([(w.count, w.start) for w in plan.work], self.layers)
                flying = plan, free
            if before is not None:
                ran, end = before
                self.clock.now = max(self.clock.now, end)
                self._commit(ran, self.clock.now - committed)
                committed = self.clock.now
            elif plan is None:
                self.clock.now = max(min(self.link.next, self.clock.now + 0.005), self.clock.now + 1e-6)
                committed = self.clock.now

    def _commit(self, plan: StepPlan, interval: float) -> None:
        drawn = tuple(Output(w.rid, (self._random.randrange(VOCABULARY),)) for w in plan.work if w.sample)
        deltas = self.scheduler.commit(StepResult(plan.step, drawn))
        if self.scheduler.pacer is not None:
            decoding = sum(w.count == 1 for w in plan.work)
            self.scheduler.pacer.record(plan.tokens, decoding, plan.tokens - decoding, interval)
        if self.scheduler.offload is not None:
            self.scheduler.offload.computed(plan, interval)
        for delta in deltas:
            call = self.calls[delta.rid]
            call.cached += delta.cached_tokens
            if delta.tokens:
                call.arrivals.append((self.clock.now, len(delta.tokens)))
                self._ids[call.session] += delta.tokens
            if delta.finish_reason is not None:
                self._end(call)

    def _end(self, call: replay.Call) -> None:
        said = self._said[call.session]
        call.answer = hash((said[-1][0], "answer"))
        said.append((call.answer, call.tokens))
        if call.turn + 1 < len(self.sessions[call.session].turns):
            self._ask(call.session, call.turn + 1)


def forecast(
    sessions: Sequence[traces.Session], layers: int, kv_blocks: int, host_gb: float, seqs: int
) -> dict[str, Any]:
    """Keys of a row of `bench replay`. host_gb: 0 is without tiers."""
    clock, usual = Clock(), EngineConfig()
    block_gb = BLOCK_TOKENS * layers * KV_BYTES / 1e9
    link = Link(int(host_gb / block_gb), block_gb, clock)
    tiers = Tiers(link, rows=link.rows, clock=clock) if link.rows else None
    pacer = Pacer(usual.decode_stretch, STEP_TOKENS, usual.prompt_patience)
    for tokens in (256, 1024, 4096, STEP_TOKENS):  # the sizes that the engine measures at its start
        pacer.times.record(tokens, step_seconds([(tokens, 0)], layers))
    scheduler = Scheduler(
        num_blocks=kv_blocks, block_size=BLOCK_TOKENS, max_num_seqs=seqs, max_step_tokens=STEP_TOKENS,
        max_model_len=1 << 20, tiers=tiers, pacer=pacer,
    )  # fmt: skip
    player = Player(sessions, layers, scheduler, link)
    with patch.object(time, "monotonic", clock):
        if tiers is not None:
            tiers.poll()  # all memory is pinned
        player.adopt()
        player.play()
        scheduler.check_integrity()
    row = replay.summary(player.calls, replay.Options(speed=0.0, warm_up=True, adopt=True))
    stats = scheduler.stats()
    return row | {
        "blocks_dropped": stats.blocks_dropped, "preemptions": stats.preemptions,
        "restored_gb": round(link.restored * block_gb, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--begin-after", type=int, default=13)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--kv-blocks", type=int, default=5400)
    parser.add_argument("--kv-host-gb", type=float, default=28.0)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    args = parser.parse_args()
    made = sessions_of(traces.generate(traces.Agents(sessions=args.sessions, turns=args.turns)), scale=args.scale)
    begun = [traces.begun(session, args.begin_after) for session in made]
    for host_gb in (args.kv_host_gb, 0.0):
        row = forecast(begun, args.layers, args.kv_blocks, host_gb, args.max_num_seqs)
        print(json.dumps({"kv_host_gb": host_gb} | row), flush=True)


if __name__ == "__main__":
    main()
