"""What the learned score of kv/retention.py keeps of a trace, beside LRU: hit shares of host memory of several sizes.

python -m runs.kv_retention [--rows N,N] [TRACE ...]. Without a trace: generated ones, the same every time. The index
that serves (kv/tiers.py) is played through the trace on the trace's own clock, with a mover that is done at once. A row
holds a block of the trace: 512 tokens of Mooncake's and of generated ones, 64 of Weka's, 16 of Bailian's.
"""

import argparse
import json
import random
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


def rows_of(name: str, sessions: Sequence[Session], sizes: Sequence[int] = ROWS) -> list[dict[str, Any]]:
    ideal = hit_share(sessions, 1 << 20, Lru())
    return [
        {"trace": name, "rows": rows, "ideal": round(ideal, 4), "lru": round(hit_share(sessions, rows, Lru()), 4),
         "learned": round(hit_share(sessions, rows, Retention()), 4)}
        for rows in sizes
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="of host memory")
    parser.add_argument("trace", nargs="*")
    args = parser.parse_args()
    given = {path: sessions_of(read(Path(path))) for path in args.trace}
    for name, sessions in (given or {name: make() for name, make in TRACES.items()}).items():
        for row in rows_of(name, sessions, [int(rows) for rows in args.rows.split(",")]):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
