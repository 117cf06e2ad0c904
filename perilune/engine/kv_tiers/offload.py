"""The scheduler's side of the KV tiers: keeps some GPU blocks free ahead of need, and restores the KV of requests.

A request with blocks in a tier that are not on the GPU leaves the queue while they are copied back; other requests run
meanwhile. When all blocks have arrived and their checksums agree, they enter the prefix tree, and the request returns
to its place in the queue, where they are prefix hits. It references them until it starts: else evictions ahead of need,
and restores of younger requests, would take them. If one block is missing or damaged, none is used.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from perilune.core.messages import EngineStats
from perilune.core.request import Request
from perilune.core.step import StepPlan
from perilune.kv.mover import Name
from perilune.kv.prefix import PrefixTree
from perilune.kv.tiers import DISK, HOST, Tiers
from perilune.kv.worth import Worth

log = logging.getLogger("perilune.kv")

SPARE_SHARE = 8  # At most 1 / 8 of the blocks is kept free ahead of need. A larger part would shrink the GPU's cache.
MAX_RESTORES = 3  # Restores of one request: if others take its blocks each time before it runs, it is computed.
# A restore evicts blocks to host rows, which may first have to be written to files. It waits for that at most this
# share of the time of computing its blocks. Larger: later first tokens if the disk is slow. Smaller: more blocks are
# dropped.
ROOM_SHARE = 0.25
LIMIT_SECONDS = 60.0  # A restore that takes longer is given up, and the request computed: its disk may never answer.


@dataclass(slots=True)
class Restoring:
    """A request waiting for its KV from a tier. `hits`: blocks it found on the GPU and holds a reference to; `blocks`:
    free blocks that the tiers fill. The copy begins when `after` steps are committed: a step in flight may still write
    to these blocks for their last owner."""

    request: Request
    hits: list[int]
    blocks: list[int]
    digests: list[bytes]
    after: int
    begun: float = field(default_factory=time.monotonic)
    sent: bool = False
    given_up: bool = False


@dataclass(slots=True)
class Asking:
    """The request (by arrival number) that waits for free blocks to restore `digests` to. Before `until` they come only
    from evictions that lose no block."""

    arrival: int = -1
    until: float = 0.0
    digests: list[bytes] = field(default_factory=list)


class Offload:
    """Evicts cached blocks to the tiers ahead of need and restores them. Used by the thread that plans.

    spare_blocks  number of free blocks to keep, which steps take without waiting for a copy
    """

    def __init__(self, tiers: Tiers, tree: PrefixTree, *, block_size: int, blocks: int, spare_blocks: int) -> None:
        self._tiers, self._tree, self._block_size = tiers, tree, block_size
        self._spare = min(spare_blocks, blocks // SPARE_SHARE)
        self._restoring: dict[int, Restoring] = {}
        self._tickets = 0
        self._off = False  # whether storing is off, because restoring takes longer than computing
        self._asking = Asking()
        self.worth = Worth()
        self._hits = {HOST: 0, DISK: 0}  # prompt tokens restored from each tier
        self._seconds = 0.0

    @property
    def tables(self) -> list[list[int]]:
        """Blocks held by copies to and from the tiers, for the check that every block has one owner."""
        return [[b] for b in self._tiers.leaving] + [[*r.hits, *r.blocks] for r in self._restoring.values()]

    @property
    def busy(self) -> bool:
        return bool(self._restoring) or self._tiers.busy

    @property
    def leaving(self) -> int:
        """Blocks being copied to a tier, which are free when the copy has ended."""
        return len(self._tiers.leaving)

    @property
    def restoring(self) -> int:
        """Number of restores that have not ended."""
        return len(self._restoring)

    def find(self, request: Request, digests: Sequence[bytes]) -> list[bytes]:
        """The leading digests of these blocks that a tier has and that are faster to restore than to compute."""
        if not digests or request.restores >= MAX_RESTORES or request.refused:
            return []
        asking = self._asking
        if request.arrival == asking.arrival and digests[0] == asking.digests[0] and time.monotonic() < asking.until:
            return asking.digests  # found before: a request that waits for room asks again before every step
        found = self._tiers.match(digests)
        count = self.worth.beginning(found)
        request.refused = bool(found) and not count  # decide once: every plan looks at waiting requests
        return list(digests[:count])

    def has_room(self, blocks: int) -> bool:
        """Whether to take blocks now: `blocks` are free, or no copy is in flight that would free more."""
        if not self._off and blocks <= self._tree.available:
            self._make_room(blocks)
        return self._tree.num_free >= blocks or not self._tiers.leaving

    def begin(self, request: Request, hits: list[int], digests: list[bytes], planned_steps: int) -> bool:
        """Begins to restore the blocks of `digests`, which follow `hits`. `planned_steps`: steps planned so far. False:
        too few blocks are free yet, ask again before the next step."""
        self._tree.acquire(hits)
        if self._asking.arrival != request.arrival:
            patience = ROOM_SHARE * len(digests) * self.worth.block_seconds
            self._asking = Asking(request.arrival, time.monotonic() + patience, digests)
            self._tiers.touch(digests)  # making room must not drop them
        self._make_room(len(digests), patient=time.monotonic() < self._asking.until)
        if self._tree.num_free < len(digests):
            self._tree.release(hits)  # also marks them most recently used, so that other blocks are evicted
            return False
        blocks = [self._tree.allocate() for _ in digests]
        request.restores += 1
        self._asking = Asking()
        self._restoring[self._tickets] = Restoring(request, hits, blocks, digests, planned_steps)
        self._tickets += 1
        return True

    def poll(self, committed_steps: int, soon: int) -> list[tuple[Request, list[int]]]:
        """Handles ended copies and begins others. Returns the requests that go back to the queue, each with the blocks
        of its prefix, which the caller now references; no blocks if the restore failed. `soon`: number of blocks that
        running requests will need."""
        for ticket, restoring in self._restoring.items():
            if not restoring.sent and committed_steps >= restoring.after:
                restoring.sent = self._send(ticket, restoring)
        freed, ended = self._tiers.poll()
        for block in freed:
            self._tree.release((block,))
        back: list[tuple[Request, list[int]]] = []
        for outcome in ended:
            restoring = self._restoring.pop(outcome.ticket)
            request = restoring.request
            known = outcome.complete and self._register(restoring)
            held = [*restoring.hits, *restoring.blocks]
            if outcome.complete:
                self.worth.restored(outcome.host, outcome.disk, outcome.seconds)
                size = self._block_size
                request.restored = outcome.host * size, outcome.disk * size
                self._seconds += outcome.seconds
            if not known or request.finished or restoring.given_up:
                self._tree.release(held)
                held = []
            if not restoring.given_up:
                back.append((request, held))
        back += [(request, []) for request in self._lost(committed_steps)]
        if not self._off:
            self._make_room(max(self._spare, soon), patient=True)
        self._switch()
        return back

    def count(self, request: Request) -> None:
        """Counts the cached tokens with which a request starts, by the tier they were restored from."""
        host = min(request.restored[0], request.computed)
        self._hits[HOST] += host
        self._hits[DISK] += min(request.restored[1], request.computed - host)

    def computed(self, plan: StepPlan, seconds: float) -> None:
        """Learns the time of computing a block from a step of `seconds`, if most of its tokens are prompt tokens."""
        prompts = sum(w.count for w in plan.work if w.count >= self._block_size)
        if prompts >= 2 * self._block_size and 2 * prompts >= plan.tokens:
            self.worth.computed(prompts / self._block_size, seconds)

    def forget(self, first: bytes) -> None:
        self._tiers.forget(first)

    def report(self, stats: EngineStats) -> EngineStats:
        """`stats` with the numbers of the tiers filled in."""
        tiers = self._tiers
        return replace(
            stats,
            tiers=(
                (HOST, self._hits[HOST], tiers.host_blocks, tiers.row_limit),
                (DISK, self._hits[DISK], tiers.disk_blocks, tiers.file_limit),
            ),
            host_blocks_ready=tiers.rows_ready,
            restore_seconds=self._seconds,
            saved_seconds=self.worth.saved_seconds,
            blocks_dropped=tiers.dropped,
            blocks_damaged=tiers.damaged,
        )

    def log_summary(self, stats: EngineStats) -> None:
        """One line about the whole life of the engine."""
        pages = stats.cached_tokens - sum(self._hits.values())
        log.info(
            "KV hits in tokens: %d of %d prompt tokens in pages, %d from host memory, %d from disk; "
            "restores took %.2f s, %.2f s less than computing",
            pages, stats.prompt_tokens, self._hits[HOST], self._hits[DISK], self._seconds, self.worth.saved_seconds,
        )  # fmt: skip

    def check(self) -> None:
        self._tiers.check()

    def _send(self, ticket: int, restoring: Restoring) -> bool:
        """Begins the copy of a restore. False: a tier has dropped one of its blocks since, and none is restored."""
        if len(self._tiers.match(restoring.digests)) < len(restoring.digests):
            return False
        self._tiers.restore(ticket, list(zip(restoring.digests, restoring.blocks)))
        return True

    def _lost(self, committed_steps: int) -> list[Request]:
        """Gives up restores of blocks that a tier has dropped, and those over LIMIT_SECONDS; returns their requests."""
        back = []
        for ticket, restoring in list(self._restoring.items()):
            if not restoring.sent and committed_steps >= restoring.after:
                del self._restoring[ticket]
                self._tree.release([*restoring.hits, *restoring.blocks])
                back.append(restoring.request)
            elif restoring.sent and not restoring.given_up and time.monotonic() - restoring.begun > LIMIT_SECONDS:
                log.warning("restoring %d KV blocks took over %.0f s: computed", len(restoring.blocks), LIMIT_SECONDS)
                restoring.given_up = True
                restoring.request.restores = MAX_RESTORES
                back.append(restoring.request)
        return back

    def _register(self, restoring: Restoring) -> bool:
        """Inserts the restored blocks into the prefix tree, after the hits. False: the tree has forgotten the hits."""
        above = restoring.hits[-1] if restoring.hits else None
        for index, digest in enumerate(restoring.digests):
            block = self._tree.insert(above, digest, restoring.blocks[index], self._tiers.turn(digest))
            if block is None:
                return False
            restoring.blocks[index] = above = block
        return True

    def _make_room(self, blocks: int, *, patient: bool = False) -> None:
        """Evicts cached blocks until `blocks` are free or being copied to a tier. `patient`: stops where an eviction
        would lose a block that a transfer in flight can save (Tiers.loses), if restoring from disk pays."""
        patient = patient and self.worth.pays(DISK)
        while self._tree.num_free + len(self._tiers.leaving) < blocks and not (patient and self._tiers.loses()):
            oldest = self._tree.take_oldest()
            if oldest is None:
                break
            digest, first, turn, block = oldest
            if not self._tiers.evict(Name(digest, first), block, turn):
                self._tree.release((block,))
        self._tiers.flush()

    def _switch(self) -> None:
        """Turns storing off while restoring from host memory takes longer than computing, and on again after that."""
        off = not self.worth.pays(HOST)
        if off != self._off:
            self._off = off
            moved, made = self.worth.tiers[HOST].seconds or 0.0, self.worth.compute.seconds or 0.0
            log.warning(
                "KV tiers are %s: restoring %d tokens takes %.2f ms, computing them %.2f ms",
                "off" if off else "on", self._block_size, moved * 1e3, made * 1e3,
            )  # fmt: skip
