"""What the learned score of kv/retention.py keeps of a trace, beside LRU: hit shares of host memory of several sizes.

python -m runs.kv_retention [TRACE ...]. Without a trace: generated ones, the same every time. The index that serves
(kv/tiers.py) is played through the trace on the trace's own clock, with a mover that is done at once.
"""

import json
import random
import sys
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from perilune.bench.trace_formats import sessions_of
from perilune.bench.traces import HASH_TOKENS, Agents, Piece, Session, Turn, generate, read
from perilune.kv.retention import Retention
from perilune.kv.tiers import Copied, Done, Name, Restored, Stored, Tiers
from perilune.kv.tiers import Piece as Block

ROWS = (800, 1600, 3200)  # of HASH_TOKENS tokens: 0.4, 0.8 and 1.6 million tokens
TOKEN_SECONDS = 0.02  # that an answer takes
FIRST_SECONDS = 2.0


class Lru(Retention):
    """All kinds are alike."""

    def chance(self, kind: int) -> float:
        return 1.0


class AtOnce:
    """A mover whose transfers take no time."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._done: list[Done] = []

    def store(self, stores: Sequence[tuple[Name, int, int]]) -> None:
        for _, block, row in stores:
            self._done += [Copied(block), Stored(row)]

    def restore(self, ticket: int, pieces: Sequence[Block]) -> None:
        self._done.append(Restored(ticket, 0.0))

    def write(self, name: Name, row: int) -> None: ...
    def delete(self, name: Name) -> None: ...

    def poll(self) -> list[Done]:
        done, self._done = self._done, []
        return done


def requests(sessions: Sequence[Session]) -> list[tuple[float, list[bytes], list[int], int]]:
    """(time, digests of the prompt's blocks, their tokens, how many more the answer adds) of all turns, by time."""
    found = []
    for session in sessions:
        now, digest, chain, tokens = session.start, b"", list[bytes](), list[int]()
        for index, turn in enumerate(session.turns):
            now += turn.delay
            if turn.whole:
                digest, chain, tokens = b"", [], []
            for piece in (*turn.pieces, Piece(f"answer {session.name} {index}", turn.output_tokens)):
                digest = blake2b(digest + piece.name.encode(), digest_size=16).digest()
                chain.append(digest)
                tokens.append(piece.tokens or len(piece.name) // 4)
            found.append((now, list(chain), list(tokens), 1))
            now += FIRST_SECONDS + TOKEN_SECONDS * turn.output_tokens
    return sorted(found, key=lambda one: one[0])


def hit_share(sessions: Sequence[Session], rows: int, retention: Retention) -> float:
    """Share of prompt tokens that host memory of so many rows has, if the pages keep nothing."""
    now = [0.0]
    tiers = Tiers(AtOnce(rows), rows=rows, clock=lambda: now[0], retention=retention)
    tiers.poll()
    hits = total = 0
    for at, chain, tokens, answered in requests(sessions):
        now[0] = max(now[0], at)
        prompt = len(chain) - answered
        known = len(tiers.match(chain[:prompt]))
        hits, total = hits + sum(tokens[:known]), total + sum(tokens[:prompt])
        turn = 0
        if known:
            tiers.restore(0, [(digest, 0) for digest in chain[:known]])
            tiers.poll()
            tiers.poll()
            turn = tiers.turn(chain[known - 1]) + 1
        for block, digest in reversed(list(enumerate(chain))):
            tiers.evict(Name(digest, chain[0]), block, turn)
        tiers.poll()
        tiers.poll()
    return hits / total


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


TRACES: dict[str, Callable[[], list[Session]]] = {
    "agents": lambda: mixed(48, 0, 1),
    "agents, 300 single questions": lambda: mixed(48, 300, 1),
    "agents, 1500 single questions": lambda: mixed(48, 1500, 1),
    "single questions": lambda: mixed(1, 1500, 2),
}


def rows_of(name: str, sessions: Sequence[Session], sizes: Sequence[int] = ROWS) -> list[dict[str, Any]]:
    ideal = hit_share(sessions, 1 << 20, Lru())
    return [
        {"trace": name, "rows": rows, "ideal": round(ideal, 4), "lru": round(hit_share(sessions, rows, Lru()), 4),
         "learned": round(hit_share(sessions, rows, Retention()), 4)}
        for rows in sizes
    ]  # fmt: skip


def main() -> None:
    given = {path: sessions_of(read(Path(path))) for path in sys.argv[1:]}
    for name, sessions in (given or {name: make() for name, make in TRACES.items()}).items():
        for row in rows_of(name, sessions):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
