"""The scheduler with KV tiers: scheduler_rig.py with a runner that checks every position of block tables,
and a mover that copies its KV at random times."""

import random
from types import SimpleNamespace

import pytest

from perilune.core.messages import Order
from perilune.core.request import Request
from perilune.core.sampling import SamplingParams
from perilune.engine.kv_tiers.offload import Offload
from perilune.kv.blocks import BlockPool
from perilune.kv.prefix import PrefixTree, extend_digests
from perilune.kv.tiers import Copied, Name, Restored, Stored, Tiers, Written
from tests.cpu.engine.scheduler_rig import Rig
from tests.cpu.engine.test_pacing import Granted


class Mover:
    """Moves the runner's KV; what is queued happens in random order, when `work` says so."""

    def __init__(self, rows: int, rng: random.Random, faults: float) -> None:
        self.rows, self.rng, self.faults = rows, rng, faults
        self.runner = None
        self.held: dict = {}
        self.files: dict = {}
        self.queue: list = []
        self.done: list = []
        self.restores = True

    def store(self, stores):
        self.queue += [("store", *s) for s in stores]

    def restore(self, ticket, pieces):
        self.queue.append(("restore", ticket, list(pieces)))

    def write(self, name, row):
        self.queue.append(("write", name, row))

    def delete(self, name):
        self.files.pop(name.digest, None)

    def poll(self):
        self.work(self.rng.randrange(4))
        done, self.done = self.done, []
        return done

    def work(self, count):
        for _ in range(min(count, len(self.queue))):
            work = self.queue.pop(self.rng.randrange(len(self.queue)))
            getattr(self, f"_{work[0]}")(*work[1:])

    def _store(self, name, block, row):
        size = self.runner.block_size
        self.held[row] = [self.runner.kv.get((block, i)) for i in range(size)]
        self.done += [Copied(block), Stored(row)]

    def _restore(self, ticket, pieces):
        if not self.restores:
            return self.restore(ticket, pieces)
        bad = [p.name.digest for p in pieces if p.row is None and p.name.digest not in self.files]
        if self.rng.random() < self.faults:
            bad.append(pieces[-1].name.digest)
        for piece in pieces:
            states = self.files.get(piece.name.digest) if piece.row is None else self.held[piece.row]
            for i, state in enumerate(states or ()):
                self.runner.kv[piece.block, i] = -1 if bad else state  # half a restore must never be read
        return self.done.append(Restored(ticket, 0.0, tuple(bad), "damaged" if bad else None))

    def _write(self, name, row):
        self.files[name.digest] = self.held[row]
        self.done.append(Written(name))


class TieredRig(Rig):
    """As Rig; no request has to run while KV is being copied."""

    def __init__(self, *, seed=0, rows=20, disk=True, faults=0.0, **more) -> None:
        self.mover = Mover(rows, random.Random(seed), faults)
        tiers = Tiers(self.mover, rows=rows, files=() if disk else None, file_limit=40)
        super().__init__(tiers=tiers, **more)
        self.mover.runner = self.runner
        self.tiers = tiers

    def tick(self, between=lambda: None):
        self.scheduler.take_transfers()
        self.scheduler.check_integrity()
        return super().tick(between)

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def finish(self) -> None:
        ticks = 0
        while self.scheduler.has_work or self.flying is not None or self.scheduler.offload.busy:
            self.tick()
            ticks += 1
            assert ticks < 20_000, "requests wait for ever"
        super().finish()

    def oldest(self) -> int:
        return self.scheduler._running[0].rid  # an older one may have come back from a restore since, and wait

    def may_wait(self) -> bool:
        return self.scheduler.offload.busy


def ask(rig, rid, prompt, **params):
    rig.submit(rid, prompt, max_tokens=4, **params)
    rig.finish()
    rig.expect(rid)
    return rig.answers[rid].cached


PROMPTS = [[s * 7 + i % 5 for i in range(20)] for s in range(6)]


def served(num_blocks: int, **more) -> TieredRig:
    """A rig without a disk that has answered PROMPTS."""
    rig = TieredRig(num_blocks=num_blocks, rows=40, disk=False, **more)
    for rid, prompt in enumerate(PROMPTS):
        ask(rig, rid, prompt)
    return rig


def test_what_left_the_pool_comes_back() -> None:
    rig = TieredRig(num_blocks=12, rows=40, disk=False)
    for rid, prompt in enumerate(PROMPTS):
        assert ask(rig, rid, prompt) == 0
    assert [ask(rig, 10 + rid, prompt) for rid, prompt in enumerate(PROMPTS)] == [16] * 6
    stats = rig.scheduler.stats()
    assert stats.tiers[0][1] == stats.cached_tokens == 6 * 16 and stats.waiting == 0
    assert ask(rig, 20, PROMPTS[0], keys=("salt:a",)) == 0, "the keys name other blocks"
    assert ask(rig, 21, PROMPTS[0], keys=("salt:a",)) == 16


def test_room_for_a_prompt_is_not_made_of_its_own_hits() -> None:
    rig = TieredRig(num_blocks=12, rows=40, disk=False)
    for rid, prompt in enumerate([*PROMPTS, PROMPTS[0], PROMPTS[1]], 10):
        ask(rig, rid, prompt)  # the last two are in host memory as well: they are evicted without a copy
    assert ask(rig, 2, [*PROMPTS[0], *range(16)]) == 20  # the least recently used blocks


def test_others_go_on_while_a_request_is_being_restored() -> None:
    rig = served(16)
    rig.mover.restores = False
    rig.submit(10, PROMPTS[0], max_tokens=4)
    rig.submit(11, [3, 3, 3], max_tokens=4)
    rig.ticks(20)
    rig.expect(11)
    assert not rig.answers[10].tokens and rig.scheduler.stats().waiting == 1
    rig.mover.restores = True
    rig.finish()
    rig.expect(10, cached=16)


def test_a_copy_into_blocks_waits_for_the_steps_that_may_still_write_them() -> None:
    """A request that ended in step N is computed once more in N + 1, which was planned before: its blocks are free."""
    mover = Mover(8, random.Random(0), 0.0)
    mover.runner = SimpleNamespace(kv={}, block_size=4)
    tiers = Tiers(mover, rows=8)
    tree = PrefixTree(BlockPool(8))
    offload = Offload(tiers, tree, block_size=4, blocks=8, spare_blocks=0)
    tiers.poll()
    assert tiers.evict(Name(b"d" * 16, b"d" * 16), 5)
    while tiers.leaving:
        tiers.poll()
    request = Request(1, 0, [1] * 5, 5, SamplingParams(), 0, 9)
    assert offload.begin(request, [], [b"d" * 16], planned_steps=7)
    for committed in (5, 6):
        assert offload.poll(committed, 0) == [] and not mover.queue, "step 7 is in flight"
    (back,) = [ended for _ in range(20) for ended in offload.poll(7, 0)]
    assert back == (request, [0]), "with the reference to its block"
    tree.check([[0]])


def test_values_that_are_not_finite_are_forgotten_in_every_tier() -> None:
    rig = served(12, errors={10: 1})
    digests: list[bytes] = []
    extend_digests(digests, PROMPTS[0], 4, 4)
    assert all(rig.tiers.match([digest]) for digest in digests)
    rig.submit(10, PROMPTS[0], max_tokens=4)
    rig.finish()
    assert rig.answers[10].error and rig.answers[10].cached == 16
    assert not any(rig.tiers.match([digest]) for digest in digests)
    assert rig.scheduler.blocks.tree.match(digests) == []


def test_a_restore_that_fails_is_computed() -> None:
    rig = served(12, faults=1.0)
    assert ask(rig, 10, PROMPTS[0]) < 16
    assert rig.scheduler.stats().blocks_damaged > 0


def test_a_disk_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = served(16)
    rig.mover.restores = False
    rig.submit(10, PROMPTS[0], max_tokens=4)
    while not rig.scheduler.offload.restoring:
        rig.tick()
    monkeypatch.setattr("perilune.engine.kv_tiers.offload.LIMIT_SECONDS", 0.0)
    rig.ticks(30)
    rig.expect(10)
    rig.mover.restores = True  # it answers after all: nothing is lost, nothing is used twice
    rig.finish()


def begin_continued_sessions(*, computing_takes: float) -> TieredRig:
    """Sessions of 10 blocks with 6 rows on the way to the disk, each asked for once: pages hold two of them."""
    rig = TieredRig(num_blocks=24, rows=6, max_step_tokens=8)
    rig.mover.poll = lambda: (rig.mover.work(8), rig.mover.done, setattr(rig.mover, "done", []))[1]
    for rid in range(4):
        ask(rig, rid, [rid] * 40)
    rig.scheduler.offload.worth.computed(1, computing_takes)
    return rig


def test_a_restore_waits_for_the_files_of_what_leaves_the_pages_for_it() -> None:
    """Its room takes more rows than there are. They were dropped without files, and half of the restored session too:
    of 8 continued sessions of 60,000 tokens 3 to 25 % were found."""
    rig = begin_continued_sessions(computing_takes=1000.0)
    dropped = rig.tiers.dropped
    assert [ask(rig, 10 + n, [n % 4] * 40) for n in range(8)] == [36] * 8
    assert rig.tiers.dropped == dropped == 0
    assert not rig.scheduler.stats().preemptions


def test_a_restore_does_not_wait_for_files_longer_than_computing_takes() -> None:
    rig = begin_continued_sessions(computing_takes=1e-6)
    rig.mover._write = lambda *work: rig.mover.queue.append(("write", *work))  # the disk never answers
    for rid in range(4):
        assert ask(rig, 10 + rid, [rid] * 40) <= 36
    assert rig.tiers.dropped and rig.scheduler.has_work is False
    rig.mover._write = lambda name, row: Mover._write(rig.mover, name, row)
    rig.finish()


def test_a_request_cancelled_while_it_is_restored_leaves_nothing() -> None:
    rig = served(12)
    rig.mover.restores = False
    rig.submit(10, PROMPTS[0], max_tokens=4)
    while not rig.scheduler.offload.restoring:
        rig.tick()
    rig.cancel(10)
    assert not rig.scheduler.has_work
    rig.mover.restores = True
    assert ask(rig, 11, PROMPTS[0]) == 16


@pytest.mark.parametrize("seed", range(40))
def test_random_sessions_through_thrashing_tiers(seed: int) -> None:
    """Sessions that go on and share beginnings, several requests of a text at once, priorities, deadlines, values that
    are not finite, restores that stall or are given up, on a pool for two sessions: every answer is that of the model
    alone, none waits for ever, and after every call each block, row and slot is accounted for."""
    rng, trails, ended, now = random.Random(seed), random.Random(seed), set(), 0.0
    drafts, wild, ranked, pacer = rng.random() < 0.5, rng.random() < 0.6, rng.random() < 0.3, Granted(64)
    rig = TieredRig(
        pacer=pacer if (paced := rng.random() < 0.6) else None,
        seed=seed,
        rows=rng.choice([3, 12, 60]),
        disk=rng.random() < 0.6,
        faults=rng.choice([0.0, 0.2]),
        num_blocks=rng.choice([16, 18, 24]),
        max_num_seqs=rng.choice([1, 2, 4]),
        max_step_tokens=rng.choice([8, 64]),
        overlapped=rng.random() < 0.8,
        errors={rid: rng.randrange(4) for rid in range(400) if rng.random() < 0.25} if wild else {},
        rng=trails,
        trails=trails if drafts else None,
        drafter=(lambda prompt, at: [rng.randrange(29) for _ in range(3)]) if drafts else None,
    )
    if wild or ranked or paced:
        rig.may_wait, rig.ranked = (lambda: True), True
    root = [rng.randrange(29) for _ in range(20)]
    texts = [root[: 4 * rng.randrange(6)] + [rng.randrange(29) for _ in range(15)] for _ in range(5)]
    asked: dict[int, int] = {}
    for _ in range(200):
        now += 1.0
        pacer.tokens = rng.choice([0, 0, 3, 64])
        what, live = rng.random(), list(rig.order)
        if what < 0.2 and len(live) < 8:
            text = rng.randrange(5)
            for rid in range(len(rig.answers), len(rig.answers) + rng.choice([1, 1, 3])):
                order = Order(rng.randrange(3), rng.choice([None, rng.uniform(2, 60)])) if ranked else Order()
                rig.submit(rid, texts[text], max_tokens=rng.randrange(1, 8), order=order, now=now)
                asked[rid] = text
        elif what < 0.24 and live:
            rig.cancel(victim := rng.choice(live))
            ended.add(victim)
        elif what < 0.27:
            ended.update(rig.expire(now))
        elif what < 0.33 and wild:
            rig.mover.restores = what > 0.29
        elif what < 0.34 and wild:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("perilune.engine.kv_tiers.offload.LIMIT_SECONDS", 0.0)
                rig.tick()
        else:
            rig.tick()
        for rid in [r for r in asked if rig.answers[r].finish is not None]:
            text, answer = asked.pop(rid), rig.answers[rid]
            if not answer.error and rig.prompts[rid] == tuple(texts[text]):
                grown = [*texts[text], *answer.tokens, rng.randrange(29)]
                texts[text] = grown if len(grown) < 50 else root[:8]
    pacer.tokens, rig.mover.restores = 64, True
    rig.finish()
    for rid, answer in rig.answers.items():
        if rid not in ended and not answer.error:
            rig.expect(rid)


def paused(num_blocks: int, max_tokens: int) -> tuple[TieredRig, Granted]:
    """PROMPTS are in host memory, request 10 decodes, and others' prompts wait."""
    pacer = Granted(64)
    rig = TieredRig(num_blocks=num_blocks, rows=40, disk=False, pacer=pacer)
    rig.may_wait = lambda: True
    for rid, prompt in enumerate(PROMPTS):
        ask(rig, rid, prompt)
    rig.submit(10, [3, 3, 3], max_tokens=max_tokens)
    rig.tick()
    pacer.tokens = 0
    return rig, pacer


def test_restored_blocks_are_kept_until_the_request_starts() -> None:
    """Neither copies that free blocks ahead of need nor restores of younger requests evict them."""
    rig, pacer = paused(num_blocks=18, max_tokens=30)
    asked = (11, 12, 13, 14, 15)
    rig.mover.restores = False
    for rid in asked:
        rig.submit(rid, PROMPTS[rid - 11], max_tokens=4)
        rig.ticks(4)
    requests = [rig.scheduler._live[rid] for rid in asked]
    assert [r.restoring for r in requests] == [True, True, False, False, False], "there is room for two"
    rig.mover.restores = True
    rig.ticks(8)
    assert [len(r.kept) for r in requests] == [4, 4, 0, 0, 0]
    pacer.tokens = 64
    rig.finish()
    assert [r.restores for r in requests] == [1] * 5
    for rid in asked:
        rig.expect(rid, cached=16)
    assert rig.scheduler.stats().tiers[0][1] == 5 * 16


def test_a_running_request_takes_restored_blocks_of_the_youngest_that_waits() -> None:
    rig, pacer = paused(num_blocks=16, max_tokens=40)
    rig.mover.restores = False
    for rid in (11, 12):
        rig.submit(rid, PROMPTS[rid - 11], max_tokens=4)
    while rig.scheduler.offload.restoring < 2:
        rig.tick()
    rig.mover.restores = True
    older, younger = (rig.scheduler._live[rid] for rid in (11, 12))
    while len(rig.answers[10].tokens) < 38:
        rig.tick()
    assert (len(older.kept), older.restores, len(younger.kept), younger.restores) == (4, 1, 0, 1)
    assert rig.scheduler.stats().preemptions == 0
    pacer.tokens = 64
    rig.finish()
    rig.expect(10)
    rig.expect(11, cached=16)
    rig.expect(12)


def test_a_request_cancelled_after_its_restore_keeps_nothing() -> None:
    rig, _ = paused(num_blocks=16, max_tokens=20)
    rig.submit(11, PROMPTS[0], max_tokens=4)
    rig.ticks(10)
    (request,) = rig.scheduler._queue.requests
    assert len(request.kept) == 4
    rig.cancel(11)
    assert not request.kept
    rig.scheduler.check_integrity()
    rig.finish()


def test_restored_blocks_that_would_not_suffice_stay() -> None:
    rig, pacer = paused(num_blocks=16, max_tokens=20)
    rig.submit(11, PROMPTS[0], max_tokens=4)
    rig.ticks(10)
    (request,) = rig.scheduler._queue.requests
    blocks = rig.scheduler.blocks
    assert not blocks.take_kept(lacking=5) and len(request.kept) == 4
    rig.submit(12, [9] * 52, max_tokens=2, order=Order(0, 60.0))  # fits only without them
    pacer.tokens = 64
    rig.finish()
    assert rig.ended[-2:] == [12, 11]
    rig.expect(12)


@pytest.mark.parametrize("chained", [False, True])
def test_a_restore_begins_while_the_pacer_lets_prompts_wait(chained: bool) -> None:
    rig, pacer = paused(num_blocks=16, max_tokens=40)
    rig.trails = SimpleNamespace(random=lambda: not chained, choice=min)
    rig.submit(11, PROMPTS[0], max_tokens=4)
    rig.ticks(20)
    stats = rig.scheduler.stats()
    assert rig.scheduler._queue.requests[0].restored == (16, 0) and stats.waiting == 1 and not rig.answers[11].tokens
    assert rig.plans[-1].work[0].chained == chained
    pacer.tokens = 64
    rig.finish()
    rig.expect(11, cached=16)


def test_a_request_whose_kv_is_quicker_computed_asks_once() -> None:
    """Looked at before each step while it waits, it is one refusal: the 64th restores, to measure the tier again."""
    rig = served(12)
    worth = rig.scheduler.offload.worth
    worth.tiers["host"].seconds, worth.compute.seconds = 1.0, 1e-3
    request = Request(1, 0, PROMPTS[0], 20, SamplingParams(), 0, 30)
    assert [rig.scheduler.blocks.find_stored(request, []) for _ in range(100)] == [[]] * 100
    assert worth.refusals["host"] == 1


def test_a_second_restore_of_a_waiting_request_keeps_each_block_once() -> None:
    """Blocks after the restored ones may reach a tier while it waits: then it restores those, too."""
    rig, _ = paused(num_blocks=18, max_tokens=40)
    digests: list[bytes] = []
    extend_digests(digests, PROMPTS[0], 4, 4)
    blocks, find = rig.scheduler.blocks, rig.scheduler.offload.find
    rig.scheduler.offload.find = lambda request, missing: find(request, missing)[:2]  # as if the others were in none
    rig.submit(11, PROMPTS[0], max_tokens=4)
    request = rig.scheduler._live[11]
    while len(request.kept) < 4:
        rig.tick()
    assert request.restores == 2 and blocks._kept == [request]
    assert request.kept == blocks.tree.match(digests)
    rig.cancel(11)
    rig.finish()


def test_restored_blocks_that_are_forgotten_do_not_hold_up_their_request() -> None:
    """A request that fails takes the beginning that it shares from the cache: a prompt of over half the pool must not
    keep blocks that are no hits any more."""
    pacer = Granted(64)
    rig = TieredRig(num_blocks=16, rows=60, disk=False, pacer=pacer, errors={10: 12})
    rig.may_wait = lambda: True
    whole = [n % 5 for n in range(36)]
    ask(rig, 0, whole)
    for rid, prompt in enumerate(PROMPTS, 1):
        ask(rig, rid, prompt)
    rig.submit(10, whole[:6], max_tokens=20)
    rig.tick()
    pacer.tokens = 0
    rig.submit(11, whole, max_tokens=4)
    for _ in range(2000):
        rig.tick()
        if not rig.scheduler.has_work:
            break
    assert rig.answers[10].error
    rig.expect(11)
