"""Decides which rank encodes which picture and when, and which embeddings are kept. Pure policy: no tensors.

A prompt that has been computed up to a picture waits for the embeddings of the picture; the request keeps its slot and
its blocks, and other requests run. Only pictures of running requests are encoded, and none that the prefix cache
covers. Their pixels are requested from the server shortly before, for at most one picture more than there are ranks.

Each rank encodes one picture at a time. Between two steps each rank computes a slice of its picture, which takes no
longer than a decode step, by the measured times of earlier slices and steps. The embeddings go into a cache by digest,
on all ranks. When the cache is full, embeddings that no running request needs are dropped, the least recently used
first, then those that the requests of the last priority need. So the first request always gets its next picture.
"""

import math
import statistics
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from perilune.core.errors import RequestError
from perilune.core.messages import Media, Want
from perilune.core.request import NO_BARRIER, Placed, Request
from perilune.core.step import Slice
from perilune.engine.vision.cells import RUN_SECONDS, Cells, Sizes
from perilune.media import placeholders

STEP_SHARE = 0.7  # A slice takes at most this share of a decode step: measured times vary.
FIRST_STEP_SECONDS = 0.003  # assumed duration of a decode step until one was measured
IDLE_SECONDS = 0.05  # Length of a slice while no request decodes. Longer: a new request waits longer.
FIRST_FLOP_SECONDS = 1e-11  # assumed until a slice was measured: 0.1 TFLOP/s
LEAST_FLOP_SECONDS = 1e-15  # 1,000 TFLOP/s: a faster measurement is a clock error
RECENT_STEPS = 32  # decode steps of which the median time is taken
DIGEST_BYTES = 32
MAX_SIDE_PATCHES = 512


@dataclass(slots=True)
class _Job:
    """A picture that a rank encodes; the cells before `cursor` are planned."""

    placed: Placed
    cells: Cells
    patches: memoryview | None  # until the first slice
    cursor: int = 0


class Encoder:
    """Pictures of one engine.

    pad          id of the placeholder token
    row_bytes    bytes of one token's embedding
    cache_bytes  bytes of embeddings that are kept, at most
    max_frames   frames of a chunk of video at most; a chunk counts as a picture here
    """

    def __init__(
        self, sizes: Sizes, *, pad: int, row_bytes: int, cache_bytes: int, ranks: int = 1, max_frames: int = 1
    ) -> None:
        self.pad = pad
        self._max_frames = max_frames
        self._sizes, self._row_bytes, self._room = sizes, row_bytes, cache_bytes
        self._cache_bytes = cache_bytes
        self._live: dict[int, Request] = {}  # unfinished requests with pictures
        self._users: Counter[bytes] = Counter()  # by digest: unfinished requests that have the picture
        self._cached: OrderedDict[bytes, int] = OrderedDict()  # bytes by digest, the least recently used first
        self._jobs: dict[int, _Job] = {}  # by rank
        self._late = False  # whether the last step had prompts and therefore no slice
        self._idle_ranks = list(range(ranks - 1, -1, -1))
        self._ranks = ranks
        self._asked: dict[bytes, tuple[int, int]] = {}  # by digest: (rid, item) of pixels that were requested
        self._pixels: dict[bytes, memoryview] = {}  # by digest: pixels that have come and are not being encoded yet
        self._wants: list[Want] = []
        self._flop_seconds, self._measured = FIRST_FLOP_SECONDS, False
        self._steps: deque[float] = deque(maxlen=RECENT_STEPS)
        self.encoded = 0
        self.seconds = 0.0

    # ---- requests

    def place(self, prompt: Sequence[int], pictures: Sequence[Media]) -> tuple[Placed, ...]:
        """The positions of the pictures in the prompt. RequestError for a picture that the model cannot encode."""
        for picture in pictures:
            frames, rows, columns = grid = picture.grid
            if (
                not 1 <= frames <= self._max_frames
                or rows % 2
                or columns % 2
                or not 2 <= min(rows, columns) <= max(rows, columns) <= MAX_SIDE_PATCHES
            ):
                raise RequestError(
                    f"a picture of {grid} patches: up to {self._max_frames} frames and even sides from 2 to "
                    f"{MAX_SIDE_PATCHES} are possible"
                )
            if picture.tokens != rows * columns // 4 or len(picture.digest) != DIGEST_BYTES:
                raise RequestError(f"a picture of {grid} patches with {picture.tokens} tokens: it has a fourth as many")
            if (size := picture.tokens * self._row_bytes) > self._cache_bytes:
                raise RequestError(
                    f"a picture of {picture.tokens} tokens takes {size / 1e6:.1f} MB, and the cache for pictures has "
                    f"{self._cache_bytes / 1e6:.1f}: send a smaller one, or start the engine with more vision_cache_gb"
                )
        found = placeholders.spans(prompt, self.pad, [picture.tokens for picture in pictures])
        return tuple(Placed(s.item, s.start, s.stop, p.digest, p.grid) for s, p in zip(found, pictures))

    def open(self, request: Request) -> None:
        self._live[request.rid] = request
        self._users.update({p.digest for p in request.pictures})

    def close(self, request: Request) -> None:
        if self._live.pop(request.rid, None) is None:
            return
        for digest in {p.digest for p in request.pictures}:
            self._users[digest] -= 1
            if not self._users[digest]:
                del self._users[digest]
                self._pixels.pop(digest, None)
        for digest, (rid, _) in list(self._asked.items()):
            if rid == request.rid:  # another request with the same picture requests the pixels again
                del self._asked[digest]

    @property
    def busy(self) -> bool:
        """Whether a slice could be planned, or embeddings dropped."""
        return bool(self._live or self._jobs)

    def look(self, running: Sequence[Request]) -> None:
        """Sets `barrier` of each request: the first position that needs a picture which is not encoded yet."""
        for request in running if self._live else ():
            if request.pictures:
                missing = (p for p in request.pictures if p.stop > request.planned and p.digest not in self._cached)
                first = next(missing, None)
                before = request.barrier
                request.barrier = NO_BARRIER if first is None else max(first.start, request.planned)
                if request.barrier > before:
                    request.ready = time.monotonic()

    def align(self, request: Request, count: int) -> int:
        """How many of the request's next `count` positions a step takes: if they end inside a picture that begins after
        the first of them, only those before the picture."""
        end = request.planned + count
        for p in request.pictures:
            if request.planned < p.start < end < p.stop:
                return p.start - request.planned
        return count

    # ---- pixels

    def wants(self) -> list[Want]:
        """Requests for the pixels that the server should send now, each returned once."""
        asked = set(self._asked.values())
        wants, self._wants = [w for w in self._wants if (w.rid, w.item) in asked], []
        return wants

    @property
    def awaiting(self) -> bool:
        """Whether requested pixels have not come yet."""
        return bool(self._asked)

    def provide(self, rid: int, item: int, patches: memoryview) -> None:
        """As Engine.provide."""
        for digest, asked in self._asked.items():
            if asked == (rid, item):
                placed = self._live[rid].pictures[item]
                if patches.nbytes != (size := math.prod(placed.grid) * self._sizes.patch):
                    raise RequestError(f"picture {item} has {patches.nbytes} bytes of pixels instead of {size}")
                del self._asked[digest]
                self._pixels[digest] = patches.cast("B")
                return

    # ---- a step

    def plan(self, running: Sequence[Request], prompts: bool) -> tuple[tuple[Slice, ...], tuple[bytes, ...]]:
        """(slices that ranks encode before the step's work, digests of embeddings to drop after it). `running`: in
        order of priority, with the step's work planned; `prompts`: the step computes prompt tokens."""
        dropped = [job.placed.digest for job in self._jobs.values() if job.placed.digest not in self._users]
        for rank, job in list(self._jobs.items()):
            if job.placed.digest in dropped:
                self._end(rank)
                self._room += self._bytes(job.placed)
        needed = self._needed(running)
        if len(self._asked) + len(self._pixels) > self._ranks:
            now = {p.digest for _, p in needed}  # dropped pixels are requested again when a request needs them
            self._pixels = {digest: patches for digest, patches in self._pixels.items() if digest in now}
        encoding = {job.placed.digest for job in self._jobs.values()}
        for i, (rid, placed) in enumerate(needed):
            digest = placed.digest
            if digest in self._cached:
                self._cached.move_to_end(digest)
            elif digest not in encoding:
                if digest not in self._pixels:
                    self._ask(rid, placed)
                elif self._idle_ranks:
                    if not self._make_room(self._bytes(placed), [p.digest for _, p in needed[:i]], needed, dropped):
                        break
                    cells = Cells(self._sizes, math.prod(placed.grid))
                    self._jobs[self._idle_ranks.pop()] = _Job(placed, cells, self._pixels.pop(digest))
                    encoding.add(digest)
        budget, late = IDLE_SECONDS, self._late
        self._late = False
        if any(r.planned >= r.prompt_len for r in running):  # some request decodes
            budget = STEP_SHARE * (statistics.median_low(self._steps) if self._steps else FIRST_STEP_SECONDS)
            if prompts and not late:  # steps with prompts are long: only every second one has a slice
                self._late = True
                return (), tuple(dropped)
        return tuple(self._slices(budget)), tuple(dropped)

    def record(self, flops: float, runs: int, seconds: float) -> None:
        """Takes the measured seconds of slices on rank 0, of `flops` operations in `runs` runs."""
        self.seconds += seconds
        measured = max(max(seconds - runs * RUN_SECONDS, 0.0) / flops, LEAST_FLOP_SECONDS)
        if not self._measured:
            self._flop_seconds = max(seconds / flops, LEAST_FLOP_SECONDS)
        elif measured >= self._flop_seconds:
            self._flop_seconds = measured  # slower than assumed: not averaged, long slices delay all requests
        elif seconds > 2 * runs * RUN_SECONDS:  # shorter slices measure launches, not operations
            self._flop_seconds = (measured + self._flop_seconds) / 2
        self._measured = True

    def record_step(self, seconds: float) -> None:
        """Takes the measured seconds of a decode step without slices."""
        self._steps.append(seconds)

    def _needed(self, running: Sequence[Request]) -> list[tuple[int, Placed]]:
        """(rid, picture) that running requests will need, by priority and position. At most one picture more than there
        are ranks is not encoded yet."""
        found: list[tuple[int, Placed]] = []
        missing: set[bytes] = set()
        for request in running:
            if not request.pictures or request.planned >= request.pictures[-1].stop:
                continue
            for p in request.pictures:
                if p.stop <= request.planned:
                    continue
                if p.digest not in self._cached:
                    if len(missing) > self._ranks:
                        break
                    missing.add(p.digest)
                found.append((request.rid, p))
        return found

    def _ask(self, rid: int, placed: Placed) -> None:
        if placed.digest not in self._asked and len(self._asked) + len(self._pixels) <= self._ranks:
            self._asked[placed.digest] = rid, placed.item
            self._wants.append(Want(rid, placed.item))

    def _make_room(
        self, wanted: int, before: list[bytes], needed: list[tuple[int, Placed]], dropped: list[bytes]
    ) -> bool:
        """Drops embeddings, but none of `before`, until `wanted` bytes are free, and reserves them. False: too few."""
        last_first = {p.digest: None for _, p in reversed(needed)}
        unneeded = [digest for digest in self._cached if digest not in last_first]
        victims = [*unneeded, *(d for d in last_first if d in self._cached and d not in before)]
        while self._room < wanted and victims:
            victim = victims.pop(0)
            self._room += self._cached.pop(victim)
            dropped.append(victim)
        if self._room < wanted:
            return False
        self._room -= wanted
        return True

    def _slices(self, budget: float) -> list[Slice]:
        """The next slice of every job, of `budget` seconds."""
        found = []
        for rank, job in sorted(self._jobs.items()):
            p, start = job.placed, job.cursor
            job.cursor = job.cells.within(start, budget, self._flop_seconds)
            found.append(Slice(rank, p.digest, p.grid, start, job.cursor, job.patches))
            job.patches = None
            if job.cursor == job.cells.total:
                self._end(rank)
                self._cached[p.digest] = self._bytes(p)
                self.encoded += 1
        return found

    def _end(self, rank: int) -> None:
        del self._jobs[rank]
        self._idle_ranks.append(rank)
        self._idle_ranks.sort(reverse=True)

    def _bytes(self, placed: Placed) -> int:
        return (placed.stop - placed.start) * self._row_bytes

    def check(self) -> None:
        """Asserts that bytes and users are counted exactly. Slow: for tests."""
        held = sum(self._cached.values()) + sum(self._bytes(job.placed) for job in self._jobs.values())
        assert held + self._room == self._cache_bytes and self._room >= 0, (held, self._room)
        assert self._users == Counter(d for r in self._live.values() for d in {p.digest for p in r.pictures})
        assert len(self._asked) + len(self._pixels) <= self._ranks + 1
        assert len(self._jobs) + len(self._idle_ranks) == self._ranks
