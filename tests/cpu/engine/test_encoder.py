"""When pictures are encoded, and which rows are kept: the policy with a clock of its own, no tensors."""

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from perilune.core.errors import RequestError
from perilune.core.messages import Media, Submit
from perilune.core.sampling import SamplingParams
from perilune.core.step import Output, StepPlan, StepResult
from perilune.engine.scheduler import Scheduler
from perilune.engine.step_times.pacing import Pacer
from perilune.engine.vision.cells import Cells, Sizes
from perilune.engine.vision.encoder import Encoder

PAD = 9
K25 = Sizes(layers=27, patch=588, width=1152, inner=4304, out=7168)
SMALL = Sizes(layers=2, patch=12, width=4, inner=4, out=4)
LARGEST = Media(b"a" * 32, (1, 128, 128), 4096)  # of 1,792 x 1,792 pixels


def media(seed: int, rows: int = 4, columns: int = 4) -> Media:
    return Media(bytes([seed]) * 32, (1, rows, columns), rows * columns // 4)


def prompt(*pictures: Media, text: int = 3) -> tuple[int, ...]:
    return (*(t for p in pictures for t in (*[1] * text, *[PAD] * p.tokens)), 2)


@dataclass
class Machine:
    """Runs the scheduler's plans at once, by a clock that only they move."""

    scheduler: Scheduler
    encoder: Encoder
    sizes: Sizes
    step_seconds: float = 0.003
    token_seconds: float = 5e-6
    flop_seconds: float = 1 / (0.4 * 729e12)
    run_seconds: float = 5e-5
    clock: float = 0.0
    times: dict[int, list[float]] = field(default_factory=dict)  # of each request's tokens
    plans: list[StepPlan] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)  # digests of the pixels asked for
    rows: set[bytes] = field(default_factory=set)  # digests of the pictures that the device has rows of
    cursors: dict[bytes, int] = field(default_factory=dict)

    def step(self) -> bool:
        self.send()
        plan = self.scheduler.plan()
        if len(self.plans) % 7 == 0:
            self.scheduler.check_integrity()
        if plan is None:
            return False
        self.run(plan)
        return True

    def send(self) -> None:
        for want in self.encoder.wants():
            placed = self.encoder._live[want.rid].pictures[want.item]
            self.sent.append(placed.digest)
            _, rows, columns = placed.grid
            self.encoder.provide(want.rid, want.item, memoryview(bytes(rows * columns * self.sizes.patch)))

    def run(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        self.encode(plan)
        before = self.clock
        if plan.work:
            self.clock += self.step_seconds + plan.tokens * self.token_seconds
        outputs = tuple(Output(w.rid, (5,)) for w in plan.work if w.sample)
        for delta in self.scheduler.commit(StepResult(plan.step, outputs)):
            self.times.setdefault(delta.rid, []).append(self.clock)
        if plan.work and not plan.slices and all(w.output_index for w in plan.work):
            self.encoder.record_step(self.clock - before)

    def encode(self, plan: StepPlan) -> None:
        slowest = 0.0
        for own in plan.slices:
            cells = Cells(self.sizes, own.grid[1] * own.grid[2])
            assert self.cursors.get(own.digest, 0) == own.start < own.stop <= cells.total
            assert (own.patches is not None) == (own.start == 0)
            self.cursors[own.digest] = own.stop
            if own.stop == cells.total:
                self.rows.add(own.digest)
                del self.cursors[own.digest]
            flops, runs = cells.flops(own.start, own.stop), len(list(cells.runs(own.start, own.stop)))
            seconds = flops * self.flop_seconds + runs * self.run_seconds
            slowest = max(slowest, seconds)
            if own.rank == 0:
                self.encoder.record(flops, runs, seconds)
        self.clock += slowest
        for w in plan.work:
            for digest, first, at, count in w.media:
                assert digest in self.rows, "a step needs rows that are not there"
                assert set(w.tokens[at : at + count]) == {PAD} and first >= 0
        for digest in plan.dropped:
            self.rows.discard(digest)
            self.cursors.pop(digest, None)


def machine(sizes: Sizes = SMALL, *, cache: int = 1 << 40, ranks: int = 1, **how: Any) -> Machine:
    encoder = Encoder(sizes, pad=PAD, row_bytes=1, cache_bytes=cache, ranks=ranks)
    limits = {"num_blocks": 4096, "block_size": 16, "max_num_seqs": 64, "max_step_tokens": 256, "max_model_len": 40_000}
    scheduler = Scheduler(**(limits | how))  # type: ignore[arg-type]
    scheduler.encoder = encoder
    return Machine(scheduler, encoder, sizes)


def submit(on: Machine, rid: int, *pictures: Media, tokens: int = 4, **how: Any) -> None:
    given = SamplingParams(max_tokens=tokens)
    on.scheduler.submit(Submit(rid, how.get("prompt", prompt(*pictures)), given, pictures=pictures), 0)


def drain(on: Machine) -> None:
    idle, most = 0, 20_000
    while on.scheduler.has_work:
        idle = 0 if on.step() else idle + 1
        most -= 1
        assert idle < 4 and most, "no progress"


@pytest.mark.parametrize(
    ("speed", "group"),
    [(1.0, 0), (0.25, 0), (8.0, 0), (1.0, 1024), (8.0, 1024)],
    ids=["an H200's speed", "four times slower", "eight times faster", "a GPU's cells", "a faster GPU's cells"],
)
def test_others_do_not_wait_for_pictures(speed: float, group: int) -> None:
    """Three answers go on while two pictures of the largest kind are encoded, which takes 0.33 s by itself."""
    on = machine(replace(K25, group=group))
    on.flop_seconds /= speed
    for rid in range(3):
        submit(on, rid, tokens=2000)
    while on.clock < 0.3:
        on.step()
    calm = statistics.median(b - a for a, b in zip(on.times[0], on.times[0][1:]))
    begin = on.clock
    submit(on, 100, LARGEST)
    submit(on, 101, Media(b"b" * 32, LARGEST.grid, LARGEST.tokens))
    while 101 not in on.times:
        on.step()
    gaps = [b - a for rid in range(3) for a, b in zip(on.times[rid], on.times[rid][1:]) if b > begin]
    assert len(gaps) > 100
    assert statistics.quantiles(gaps, n=100)[98] <= 2 * statistics.median(gaps)
    encoding = [s for p in on.plans for s in p.slices]
    cells = Cells(on.sizes, 16384)
    alone = 2 * cells.flops(0, cells.total) * on.flop_seconds
    assert len(encoding) > alone / (on.step_seconds * 0.85), "slices as long as steps"
    assert max(gaps) <= 2 * calm + 256 * on.token_seconds  # the last: a chunk of the pictures' own prompts
    assert on.clock - begin < 3 * alone + 0.3, "and the pictures get their share"


def test_a_prompt_does_not_wait_while_its_picture_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the pacer is given: only time in which the prompt could be computed counts, and requests that decode."""
    asked: list[tuple[int, float]] = []

    class Noted(Pacer):
        def prompt_tokens(self, decoding: int, prompts: Sequence[tuple[int, int, float]]) -> int:
            asked.extend((decoding, waited) for _, _, waited in prompts)
            return super().prompt_tokens(decoding, prompts)

    on = machine(K25, pacer=Noted(2.0, 256, 2.0))
    monkeypatch.setattr(time, "monotonic", lambda: on.clock)
    for rid in range(2):
        submit(on, rid, tokens=2000)
    while on.clock < 0.1:
        on.step()
    begin = on.clock
    asking = Submit(100, prompt(LARGEST), SamplingParams(max_tokens=4), pictures=(LARGEST,))
    on.scheduler.submit(asking, 0, on.clock)
    asked.clear()
    while not any(w.rid == 100 and w.media for w in on.plans[-1].work):
        on.step()
    assert on.clock - begin > 0.15, "encoding takes longer"
    assert asked and max(waited for _, waited in asked) < 0.02 and {decoding for decoding, _ in asked} == {2}


def test_a_prompt_goes_on_when_its_picture_is_encoded_while_steps_are_chained() -> None:
    on = machine()
    submit(on, 0, tokens=2000)
    on.step()
    submit(on, 1, media(1))
    plan = on.scheduler.plan()
    while plan is not None and 1 not in on.times and len(on.plans) < 100:
        on.send()
        chained = on.scheduler.plan_chained(0)
        on.run(plan)
        plan = chained or on.scheduler.plan()
    assert 1 in on.times, "the prompt waits until the other request has ended"
    assert any(w.chained and p.slices for p in on.plans for w in p.work)


def test_alone_a_picture_is_encoded_in_few_slices() -> None:
    on = machine(K25)
    submit(on, 0, LARGEST)
    drain(on)
    slices = [s for p in on.plans for s in p.slices]
    assert len(slices) < 20, "0.17 s in slices of 0.05 s, after a few short ones that measure"
    assert on.encoder.encoded == 1


def test_a_layer_longer_than_a_step_is_cut_by_rows() -> None:
    cells = Cells(K25, 16384)
    layer = cells.seconds(1, 1 + 2 * 16384 // 64, 1 / (0.4 * 729e12))
    assert layer > 0.005
    for start in range(1, cells.total - 1, 97):
        stop = cells.within(start, 0.003, 1 / (0.4 * 729e12))
        assert cells.seconds(start, stop, 1 / (0.4 * 729e12)) <= 0.003 and stop > start
    assert cells.within(5, 0.0, 1.0) == 6, "at least one cell"
    assert cells.within(0, 1.0, 1e-30) == 1, "pixels are copied in a slice of their own"


def test_cells_compute_every_row_of_every_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(1)
    for _ in range(50):
        sizes, patches = Sizes(rng.randint(1, 4), 12, 4, 8, 6), 4 * rng.randint(1, 40)
        monkeypatch.setattr(Cells, "GROUP_PATCHES", rng.randint(1, 50))
        cells, at, done = Cells(sizes, patches), 0, list[tuple[str, int, int]]()
        flops = 0.0
        while at < cells.total:
            stop = min(at + rng.randint(1, 9), cells.total)
            for run in cells.runs(at, stop):
                done += [(run.kind, run.layer, row) for row in range(run.first, run.end)]
            flops += cells.flops(at, stop)
            at = stop
        layers = [(kind, i) for i in range(sizes.layers) for kind in ("project", "mix")]
        whole = [("begin", 0), *layers, ("finish", sizes.layers)]
        assert done == [(kind, layer, row) for kind, layer in whole for row in range(patches)]
        assert flops == pytest.approx(cells.flops(0, cells.total))


def test_a_picture_of_many_requests_is_encoded_and_sent_once() -> None:
    on = machine()
    for rid in range(5):
        submit(on, rid, media(1), media(2))
    drain(on)
    assert on.sent == [media(1).digest, media(2).digest] and on.encoder.encoded == 2
    submit(on, 9, media(1), media(2))  # its KV is cached, but for the last token
    submit(on, 10, media(2), media(3))
    drain(on)
    assert on.sent[2:] == [media(3).digest]


def test_requests_without_pictures_overtake_nothing_and_wait_for_none() -> None:
    on = machine(K25)
    submit(on, 0, LARGEST)
    submit(on, 1)
    while 1 not in on.times:
        on.step()
    assert 0 not in on.times and on.encoder.encoded == 0


def test_cancelling_gives_up_what_nothing_else_needs() -> None:
    on = machine(K25)
    submit(on, 0, LARGEST)
    submit(on, 1, tokens=50)
    for _ in range(5):
        on.step()
    assert on.encoder._jobs
    on.scheduler.cancel(0)
    on.step()
    assert on.plans[-1].dropped == (LARGEST.digest,) and not on.encoder._jobs and not on.cursors
    drain(on)
    submit(on, 2, LARGEST)
    submit(on, 3, LARGEST)
    for _ in range(5):
        on.step()
    on.scheduler.cancel(2)  # which was asked for the pixels
    drain(on)
    assert len(on.times[3]) == 4 and on.encoder.encoded == 1


def test_pixels_asked_of_a_request_that_ends_are_asked_of_another() -> None:
    on = machine()
    submit(on, 0, media(1))
    submit(on, 1, media(1))
    assert on.step()
    (want,) = on.encoder.wants()
    assert (want.rid, want.item) == (0, 0) and on.encoder.awaiting
    on.scheduler.cancel(0)
    on.encoder.provide(0, 0, memoryview(b"late"))  # the answer of a request that is gone
    drain(on)
    assert on.sent == [media(1).digest] and len(on.times[1]) == 4


def test_pixels_for_requests_that_were_preempted_make_way() -> None:
    """Else a request that holds all blocks would wait for a picture, and the others for its blocks."""
    on = machine()
    for rid in range(3):
        submit(on, rid, media(rid + 1))
    requests, pixels, asked = list(on.encoder._live.values()), memoryview(bytes(16 * SMALL.patch)), list[int]()
    for running in (requests[:2], *[requests[2:]] * 3):
        on.encoder.plan(running, False)
        for want in on.encoder.wants():
            asked.append(want.rid)
            on.encoder.provide(want.rid, want.item, pixels)
        on.encoder.check()
    assert asked == [0, 1, 2] and media(3).digest in on.encoder._cached


def test_pixels_that_do_not_fit_the_grid_are_refused() -> None:
    on = machine()
    submit(on, 0, media(1))
    on.step()
    on.encoder.wants()
    with pytest.raises(RequestError, match="100 bytes of pixels instead of 192"):
        on.encoder.provide(0, 0, memoryview(bytes(100)))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (Media(b"a" * 32, (1, 3, 4), 3), "even sides"),
        (Media(b"a" * 32, (2, 4, 4), 4), "even sides"),
        (Media(b"a" * 32, (1, 514, 2), 257), "even sides"),
        (Media(b"a" * 32, (1, 4, 4), 5), "a fourth as many"),
        (Media(b"a" * 31, (1, 4, 4), 4), "a fourth as many"),
        (Media(b"a" * 32, (1, 8, 8), 16), "vision_cache_gb"),
    ],
)
def test_impossible_pictures_are_refused(wrong: Media, says: str) -> None:
    on = machine(cache=10)
    with pytest.raises(RequestError, match=says):
        submit(on, 0, wrong)
    with pytest.raises(RequestError, match="media item 0"):
        submit(on, 0, media(1), prompt=(1, PAD, PAD, 2))
    with pytest.raises(RequestError, match="media item 0, which does not exist"):
        submit(on, 0, prompt=(1, PAD, 2))
    assert not on.scheduler.has_work
    on.scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_any_traffic_ends_with_every_row_in_its_place(seed: int) -> None:
    """Few blocks, so that requests are preempted; a cache for few pictures; cancelled requests; one to four ranks."""
    rng = random.Random(seed)
    on = machine(
        cache=rng.randint(8, 20), ranks=rng.choice((1, 2, 4)), num_blocks=rng.randint(6, 12), block_size=8,
        max_num_seqs=4, max_step_tokens=rng.choice((5, 16, 64)), max_model_len=48, prefix_cache=rng.random() < 0.8,
    )  # fmt: skip
    live, ended = dict[int, int](), list[int]()
    for rid in range(60):
        chosen = [media(rng.randint(1, 5), 2 * rng.randint(1, 2), 4) for _ in range(rng.randint(0, 4))]
        chosen = [Media(bytes([p.grid[1]]) + p.digest[1:], p.grid, p.tokens) for p in chosen]
        count, ids = rng.randint(1, 20), prompt(*chosen, text=rng.randint(1, 4))
        submit(on, rid, *chosen, tokens=count, prompt=ids)
        live[rid] = min(count, min(48, 8 * on.scheduler.stats().blocks_total + 1) - len(ids))
        for _ in range(rng.randint(0, 6)):
            on.step()
        if rng.random() < 0.2:
            victim = rng.choice(list(live))
            on.scheduler.cancel(victim)
            ended.append(victim)
    drain(on)
    for rid, count in live.items():
        assert rid in ended or len(on.times[rid]) == count
    assert on.encoder.encoded > 5
    if seed == 0:
        assert on.scheduler.stats().preemptions


def test_chunks_end_before_a_picture_that_fits_the_next_one() -> None:
    on = machine(max_step_tokens=20, prefix_cache=False)
    wide, long = media(1, 8, 8), media(2, 4, 30)
    for rid in range(2):
        submit(on, rid, wide, long, prompt=(*[1] * 10, *[PAD] * 16, *[1] * 4, *[PAD] * 30, 2))
        drain(on)
    cuts = [(w.start, w.count) for p in on.plans for w in p.work if w.rid == 1]  # no picture was waited for
    assert cuts[:4] == [(0, 10), (10, 20), (30, 20), (50, 11)]


def test_ranks_encode_at_the_same_time() -> None:
    on = machine(K25, ranks=4)
    on.step_seconds = 0.0
    submit(on, 0, *(Media(bytes([i]) * 32, (1, 64, 64), 1024) for i in range(8)))
    drain(on)
    assert {s.rank for p in on.plans for s in p.slices} == {0, 1, 2, 3}
    assert max(len(p.slices) for p in on.plans) == 4
    one = machine(K25)
    one.step_seconds = 0.0
    submit(one, 0, *(Media(bytes([i]) * 32, (1, 64, 64), 1024) for i in range(8)))
    drain(one)
    assert on.clock < 0.5 * one.clock
