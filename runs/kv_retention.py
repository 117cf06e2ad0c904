"""What host memory keeps of a trace, beside least recently used (LRU) and beside the best that any policy could keep.

python -m runs.kv_retention [OPTION ...] [TRACE ...] (--help says the options). Without a trace: generated ones, the
same every time. The index that serves (kv/tiers.py) replays the trace on the trace's own clock; its copies take no
time. A block has HASH_TOKENS tokens. Pages hold the blocks of running requests and the most recently used of others;
host memory has rows for a share of all blocks that the trace ever computes.

possible  hit share of prompt blocks with an unlimited cache
ideal     hit share of one cache as large as both, which knows the trace: it drops the block with the latest next use
          (Belady; a prefix is never used later than what follows it, so no chain loses its middle, and with blocks of
          one size no policy has more hits)
lru       hit share of pages and host memory that each drop the least recently used, also of blocks that both have
"""

import argparse
import heapq
import json
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from perilune.bench.trace_formats import sessions_of
from perilune.bench.traces import HASH_TOKENS, Agents, Piece, Session, Turn, generate, read
from perilune.core.errors import ConfigError
from perilune.kv.mover import Copied, Done, Name, Restored, Stored, Written
from perilune.kv.mover import Piece as Block
from perilune.kv.tiers import HOST, Tiers

SHARES = (0.1, 0.25, 0.5)  # rows of host memory over all blocks of the trace
PAGES = 0.25  # idle blocks in pages over rows of host memory
TOKEN_SECONDS = 0.02  # seconds per token of an answer
FIRST_SECONDS = 2.0
NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class Visit:
    """One request: digests of the full blocks of its prompt and answer, of which the first `prompt` are asked for."""

    start: float
    end: float
    chain: tuple[bytes, ...]
    prompt: int


def visits(sessions: Sequence[Session]) -> list[Visit]:
    """The visits of all turns, in order of their starts."""
    found = []
    for session in sessions:
        now, said = session.start, list[Piece]()
        for index, turn in enumerate(session.turns):
            now += turn.delay
            said = [*([] if turn.whole else said), *turn.pieces]
            prompt = len(_blocks(said))
            said = [*said, Piece(f"answer {session.name} {index}", turn.output_tokens)]
            end = now + FIRST_SECONDS + TOKEN_SECONDS * turn.output_tokens
            if prompt:
                found.append(Visit(now, end, _blocks(said), prompt))
            now = end
    return sorted(found, key=lambda visit: visit.start)


def _blocks(said: Sequence[Piece]) -> tuple[bytes, ...]:
    """Digests of the full blocks of a text; each covers everything before it, too."""
    found, digest, filled = list[bytes](), b"", 0
    for piece in said:
        tokens, begun = piece.tokens or len(piece.name) // 4, 0
        while tokens > begun:
            taken = min(HASH_TOKENS - filled, tokens - begun)
            digest = blake2b(digest + f"{piece.name} {begun} {taken}".encode(), digest_size=16).digest()
            begun, filled = begun + taken, (filled + taken) % HASH_TOKENS
            if not filled:
                found.append(digest)
    return tuple(found)


def moments(given: Sequence[Visit]) -> Iterator[tuple[float, bool, Visit]]:
    """(time, whether it starts, visit) of all starts and ends, by time; at equal times, ends come first."""
    both = [(visit.start, True, number, visit) for number, visit in enumerate(given)]
    both += [(visit.end, False, number, visit) for number, visit in enumerate(given)]
    for time, starts, _, visit in sorted(both, key=lambda one: one[:3]):
        yield time, starts, visit


def share(given: Sequence[Visit], hits: int) -> float:
    return hits / sum(visit.prompt for visit in given)


def ideal(given: Sequence[Visit], capacity: int) -> float:
    """Hit share of a cache of `capacity` blocks that knows the future; blocks of running requests need no room."""
    order = list(moments(given))
    coming: dict[bytes, int] = {}
    after: list[list[int]] = []  # for each moment, when each block of the chain is asked for next
    for number in range(len(order) - 1, -1, -1):
        _, starts, visit = order[number]
        after.append([coming.get(digest, NEVER) for digest in visit.chain])
        if starts:
            coming |= dict.fromkeys(visit.chain[: visit.prompt], number)
    after.reverse()
    held, running, hits = dict[bytes, int](), Counter[bytes](), 0
    latest: list[tuple[int, int, bytes]] = []  # (minus the next use, minus the depth, digest), some of them outdated
    for (_, starts, visit), nexts in zip(order, after):
        if starts:
            hits += _known(visit, lambda digest: digest in held or running[digest] > 0)
            running.update(visit.chain)
            for digest in visit.chain:
                held.pop(digest, None)
            continue
        running.subtract(visit.chain)
        for depth, (digest, following) in enumerate(zip(visit.chain, nexts)):
            if not running[digest]:
                held[digest] = following
                heapq.heappush(latest, (-following, -depth, digest))
        while len(held) > capacity:
            following, _, digest = heapq.heappop(latest)
            if held.get(digest) == -following:
                del held[digest]
    return share(given, hits)


def _known(visit: Visit, has: Callable[[bytes], bool]) -> int:
    """Number of leading blocks of the prompt that `has` knows."""
    return next((count for count in range(visit.prompt) if not has(visit.chain[count])), visit.prompt)


class Pages:
    """Blocks on the GPU: those of running requests, and up to `limit` others. What is dropped goes to `evict`, with the
    end of a chain before its beginning."""

    def __init__(self, limit: int, evict: Callable[[bytes], None]) -> None:
        self._limit, self._evict = limit, evict
        self._running, self._idle = Counter[bytes](), OrderedDict[bytes, None]()

    def has(self, digest: bytes) -> bool:
        return digest in self._running or digest in self._idle

    def begin(self, visit: Visit) -> None:
        for digest in visit.chain:
            self._running[digest] += 1
            self._idle.pop(digest, None)

    def finish(self, visit: Visit) -> None:
        for digest in reversed(visit.chain):
            self._running[digest] -= 1
            if not self._running[digest]:
                del self._running[digest]
                self._idle[digest] = None
        while len(self._idle) > self._limit:
            self._evict(self._idle.popitem(last=False)[0])


def lru(given: Sequence[Visit], pages_limit: int, rows: int) -> float:
    """Hit share if pages and host memory each keep the most recently used blocks."""
    host: OrderedDict[bytes, None] = OrderedDict()

    def keep(digest: bytes) -> None:
        host[digest] = None
        host.move_to_end(digest)
        if len(host) > rows:
            host.popitem(last=False)

    pages, hits = Pages(pages_limit, keep), 0
    for _, starts, visit in moments(given):
        if not starts:
            pages.finish(visit)
            continue
        known = _known(visit, lambda digest: pages.has(digest) or digest in host)
        for digest in reversed(visit.chain[:known]):
            if digest in host:
                host.move_to_end(digest)
        hits += known
        pages.begin(visit)
    return share(given, hits)


class AtOnce:
    """A mover with copies of 0 s; it counts the files that it writes."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.written = Counter[bytes]()  # how often a block was written
        self._done: list[Done] = []

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        for _, block, row in stores:
            self._done += [Copied(block), Stored(row)]

    def restore(self, ticket: int, pieces: Sequence[Block]) -> None:
        self._done.append(Restored(ticket, 0.0))

    def write(self, name: Name, row: int) -> None:
        self.written[name.digest] += 1
        self._done.append(Written(name))

    def delete(self, name: Name) -> None: ...

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done


def served(given: Sequence[Visit], pages_limit: int, rows: int, files: int = 0) -> dict[str, Any]:
    """Hit share of the index that serves; with files, also of the disk, files written, and how many of them were ever
    read."""
    now, number = given[0].start, 0
    mover = AtOnce(rows)
    tiers = Tiers(mover, rows=rows, files=[] if files else None, file_limit=files, clock=lambda: now)
    tiers.poll()
    turns: dict[bytes, tuple[int, bytes]] = {}  # of blocks in pages: the turn, the first digest of the chain

    def evict(digest: bytes) -> None:
        nonlocal number
        number += 1
        turn, first = turns.pop(digest)
        tiers.evict(Name(digest, first), number, turn)
        tiers.poll()
        tiers.poll()

    pages = Pages(pages_limit, evict)
    hits, disk_hits, read_back = 0, 0, set[bytes]()
    for at, starts, visit in moments(given):
        now = at
        if not starts:
            pages.finish(visit)
            continue
        here = _known(visit, pages.has)
        found = tiers.match(visit.chain[here : visit.prompt])
        known = here + len(found)
        stored = visit.chain[here:known]
        turn = turns[visit.chain[here - 1]][0] + 1 if here else 0
        if stored:
            from_disk = {digest for digest, tier in zip(stored, found) if tier != HOST}
            disk_hits += len(from_disk)
            read_back |= from_disk
            tiers.restore(0, [(digest, 0) for digest in stored])
            turns |= {digest: (tiers.turn(digest), visit.chain[0]) for digest in stored}
            turn = turns[stored[-1]][0] + 1
            tiers.poll()
            tiers.poll()
        hits += known
        for digest in visit.chain[known:]:
            turns.setdefault(digest, (turn, visit.chain[0]))
        pages.begin(visit)
    row: dict[str, Any] = {"kept": share(given, hits)}
    if files:
        writes = sum(mover.written.values())
        row |= {"from_disk": share(given, disk_hits), "writes": writes, "written_blocks": len(mover.written)}
        row |= {"read_back": len(read_back), "writes_per_hit": round(writes / max(disk_hits, 1), 2)}
    return row


def mixed(agents: int, single: int, seed: int) -> list[Session]:
    """Sessions of agents, and single questions of others among them."""
    made = sessions_of(generate(Agents(sessions=agents, seed=seed, start_seconds=10)))
    rng, end = random.Random(seed), max(session.start for session in made) + 400
    for number in range(single):
        name, length = f"question {number}", int(rng.lognormvariate(8.5, 1.0))
        parts = range(0, length, HASH_TOKENS)
        pieces = tuple(Piece(f"{name} {part}", min(HASH_TOKENS, length - part)) for part in parts)
        made.append(Session(name, rng.random() * end, (Turn(pieces, 300),)))
    return sorted(made, key=lambda session: session.start)


def tool_agents(count: int, seed: int) -> list[Session]:
    """Requests with the published figures of Mooncake's toolagent trace (FAST '25): 6.6 a second, prompts of 8,600
    tokens and answers of 180 on average, 59 % of the prompt tokens known from before. Here: 40 programs, each with a
    system prompt of its own, asked by Zipf's law; a third of the requests go on with a conversation."""
    rng = random.Random(seed)
    prompts = [max(round(rng.lognormvariate(7.85, 0.5)) // HASH_TOKENS, 1) for _ in range(40)]
    weights = [1 / (rank + 1) for rank in range(40)]
    found, at, number = list[Session](), 0.0, 0
    while number < count:
        (program,) = rng.choices(range(40), weights)
        turns = 1 + (rng.random() < 0.12) * rng.randrange(1, 7)
        shared = tuple(Piece(f"program {program} {part}", HASH_TOKENS) for part in range(prompts[program]))
        made = []
        for turn in range(turns):
            new = max(round(rng.lognormvariate(7.74, 0.9)), 1)
            own = tuple(
                Piece(f"tool {number} {part}", min(HASH_TOKENS, new - part)) for part in range(0, new, HASH_TOKENS)
            )
            made.append(
                Turn((*(shared if not turn else ()), *own), round(rng.lognormvariate(4.8, 0.9)), 8.0 * (turn > 0))
            )
            number += 1
        found.append(Session(f"tool agent {number}", at, tuple(made)))
        at += rng.expovariate(7.4) * turns
    return found


TRACES: dict[str, Callable[[], list[Session]]] = {
    "agents": lambda: mixed(48, 0, 1),
    "agents, 300 single questions": lambda: mixed(48, 300, 1),
    "agents, 1500 single questions": lambda: mixed(48, 1500, 1),
    "single questions": lambda: mixed(1, 1500, 2),
    "tool agents": lambda: tool_agents(4000, 3),
}


def rows_of(
    name: str, sessions: Sequence[Session], shares: Sequence[float] = SHARES, pages: float = PAGES, disk: float = 0.0
) -> Iterator[dict[str, Any]]:
    """A row for each share; `disk`: files for each row of host memory."""
    given = visits(sessions)
    blocks = len({digest for visit in given for digest in visit.chain})
    possible = ideal(given, NEVER)
    for part in shares:
        rows = max(int(blocks * part), 1)
        in_pages, files = int(rows * pages), int(rows * disk)
        row: dict[str, Any] = {
            "trace": name, "requests": len(given), "blocks": blocks, "rows": rows, "pages": in_pages,
            "possible": possible, "ideal": ideal(given, rows + in_pages + files),
            "lru": lru(given, in_pages, rows),
            **served(given, in_pages, rows, files),
        }  # fmt: skip
        yield {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}


def _table_line(row: dict[str, Any]) -> str:
    shares = (f"{row[name]:.1%}" for name in ("possible", "ideal", "lru", "kept"))
    return f"| {Path(row['trace']).name} | {row['blocks']:,} | {row['rows']:,} | {' | '.join(shares)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="rows of host memory, of all blocks")
    parser.add_argument("--pages", type=float, default=PAGES, help="idle blocks in pages for each row")
    parser.add_argument("--disk", type=float, default=0.0, help="files for each row")
    parser.add_argument("--apart", type=float, help="seconds between the starts of sessions; default: as in the trace")
    parser.add_argument("--markdown", action="store_true", help="a table instead of lines of JSON")
    parser.add_argument("--sessions", type=int, help="at most")
    parser.add_argument("trace", nargs="*")
    args = parser.parse_args()
    try:
        shares = [float(part) for part in args.shares.split(",")]
        given = {path: sessions_of(read(Path(path)))[: args.sessions] for path in args.trace}
    except (ValueError, ConfigError) as e:
        parser.error(str(e))
    if min(shares) <= 0 or args.pages < 0 or args.disk < 0:
        parser.error("--shares must be above 0, --pages and --disk at least 0")
    if args.markdown:
        print("| trace | blocks | in host memory | possible | ideal | LRU | kept |\n|---|---|---|---|---|---|---|")
    for name, sessions in (given or {name: make() for name, make in TRACES.items()}).items():
        if args.apart is not None:
            sessions = [Session(s.name, number * args.apart, s.turns) for number, s in enumerate(sessions)]
        for row in rows_of(name, sessions, shares, args.pages, args.disk):
            print(_table_line(row) if args.markdown else json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
