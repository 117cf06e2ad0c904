"""The prefix cache: which KV blocks hold which token prefixes, so that a shared beginning of prompts is computed once.

A full block is named by a chained digest: a hash of its predecessor's digest, its own token ids and the pictures that
lie in it, so it depends on all tokens and pictures before. In place of a predecessor, the first block has the digest
of the request's cache keys (`root_of`), such as its tenant's salt.
The tree has at most one block per digest: a request that has computed a known block takes the known one instead
(`insert`). A request that references a block references all its predecessors. Its blocks are released last to first, so
a block becomes idle before its predecessor. The queue of idle blocks, in the order in which they became idle, is
therefore both least recently used first and leaf first: eviction is O(1) and never removes a block before those that
follow it.
"""

import itertools
import struct
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from perilune.kv.blocks import BlockPool

_DIGEST_BYTES = 16


def root_of(keys: Sequence[str]) -> bytes:
    """The parent digest of the first block of a request with these cache keys: 16 bytes; b"" without keys."""
    if not keys:
        return b""
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"cache keys")  # `person`: differs from every block's digest
    for key in keys:
        encoded = key.encode("utf-8", "surrogatepass")
        digest.update(struct.pack("<Q", len(encoded)) + encoded)
    return digest.digest()


class Extent(Protocol):
    """A picture at positions start .. stop - 1. All its token ids are equal, so `digest` (32 bytes) identifies it."""

    @property
    def start(self) -> int: ...
    @property
    def stop(self) -> int: ...
    @property
    def digest(self) -> bytes: ...


def extend_digests(
    digests: list[bytes],
    tokens: Sequence[int],
    block_size: int,
    blocks: int,
    root: bytes = b"",
    pictures: Sequence[Extent] = (),
) -> None:
    """Appends to `digests` until it has those of the first `blocks` full blocks of `tokens` (ids in 0 .. 2**32 - 1).
    `root` and `pictures`, by position, must be the same in every call for one chain."""
    assert blocks * block_size <= len(tokens), (blocks, block_size, len(tokens))
    layout = struct.Struct(f"<{block_size}I")
    turn = 0
    for index in range(len(digests), blocks):
        first, end = index * block_size, (index + 1) * block_size
        ids = layout.pack(*tokens[first:end])
        while turn < len(pictures) and pictures[turn].stop <= first:
            turn += 1
        for picture in itertools.islice(pictures, turn, None):
            if picture.start >= end:
                break
            ids += struct.pack("<Q", picture.start) + picture.digest
        parent = digests[-1] if digests else root
        digests.append(blake2b(parent + ids, digest_size=_DIGEST_BYTES).digest())


@dataclass(slots=True, eq=False, repr=False)
class _Node:
    digest: bytes
    block: int
    parent: "_Node | None"
    first: bytes  # digest of the first block of its chain
    turn: int  # index of the conversation's turn that computed it, as far as the cache knows (kv/retention.py)
    children: "dict[bytes, _Node]" = field(default_factory=dict)


class PrefixTree:
    """Allocates and releases the pool's blocks, and caches registered ones as long as it can.

    A registered block without references stays cached until a new block is needed and none is free: then it is evicted.
    An unregistered block is free as soon as it has no references.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_digest: dict[bytes, _Node] = {}
        self._by_block: dict[int, _Node] = {}
        self._idle: OrderedDict[int, _Node] = OrderedDict()  # by block, in the order in which they became idle

    @property
    def num_cached(self) -> int:
        """Registered blocks without references."""
        return len(self._idle)

    @property
    def num_free(self) -> int:
        """Blocks that are neither referenced nor cached."""
        return self._pool.num_free

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return self._pool.num_free + len(self._idle)

    def allocate(self) -> int:
        """A block with one reference and arbitrary content. The caller has checked `available`."""
        if not self._pool.num_free:
            assert self._idle, "every block is referenced"
            node = next(iter(self._idle.values()))
            assert not node.children, f"block {node.block} would leave a hole in its chain"
            self._remove(node)
        return self._pool.allocate()

    def turn(self, block: int) -> int:
        """The turn with which a cached block was registered."""
        return self._by_block[block].turn

    def take_oldest(self) -> tuple[bytes, bytes, int, int] | None:
        """Unregisters the cached block that `allocate` would evict next. Returns (its digest, the digest of the first
        block of its chain, its turn, the block), with a reference to the block. None: nothing is cached."""
        node = next(iter(self._idle.values()), None)
        if node is None:
            return None
        assert not node.children, f"block {node.block} would leave a hole in its chain"
        self.acquire((node.block,))
        self._remove(node)
        return node.digest, node.first, node.turn, node.block

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of this chain; no reference is taken."""
        blocks: list[int] = []
        for digest in digests:
            node = self._by_digest.get(digest)
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def count_known(self, digests: Sequence[bytes]) -> int:
        """How many blocks `match` would return, by binary search: no block is known without those before it."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._by_digest)

    def idle_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks are cached without a reference, so that `acquire` makes them unavailable."""
        return sum(block in self._idle for block in blocks)

    def acquire(self, blocks: Sequence[int]) -> None:
        """Takes a reference to each block of a matched chain."""
        for block in blocks:
            self._pool.retain(block)
            self._idle.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Releases one reference to each block of a request's table, given in table order."""
        for block in reversed(blocks):  # last first, so that eviction is leaf first: see the module's docstring
            if self._pool.release(block):
                node = self._by_block.get(block)
                if node is None:
                    self._pool.free(block)
                else:
                    self._idle[block] = node

    def insert(self, parent: int | None, digest: bytes, block: int, turn: int = 0) -> int | None:
        """Registers a full, computed block that the caller references, after `parent` (None: first of its chain).
        `turn` is for the tiers (kv/retention.py).

        Returns the block that the caller references from now on: its own, or the one already known by this digest, in
        which case its own is released. None if the parent was forgotten: then no block after it can be registered.
        """
        above = None if parent is None else self._by_block.get(parent)
        if above is None and parent is not None:
            return None
        assert block not in self._by_block, f"block {block} is registered already"
        node = self._by_digest.get(digest)
        if node is not None:
            assert node.parent is above, "two chains with one digest"
            self.acquire((node.block,))
            self.release((block,))
            return node.block
        node = _Node(digest, block, above, digest if above is None else above.first, turn)
        self._by_digest[digest] = self._by_block[block] = node
        if above is not None:
            above.children[digest] = node
        return block

    def forget(self, digest: bytes) -> None:
        """Unregisters the block of this digest, if known, and all that follow it: no request will find them again.

        Referenced blocks stay with the requests that reference them.
        """
        node = self._by_digest.get(digest)
        if node is None:
            return
        order = [node]
        for above in order:  # `order` grows in the loop, up to all descendants, predecessors first
            order.extend(above.children.values())
        for below in reversed(order):
            self._remove(below)

    def _remove(self, node: _Node) -> None:
        del self._by_digest[node.digest], self._by_block[node.block]
        if node.parent is not None:
            del node.parent.children[node.digest]
        if self._idle.pop(node.block, None) is not None:
            self._pool.free(node.block)

    def check(self, tables: Sequence[Sequence[int]]) -> None:
        """Asserts that the pool, the tree and the block tables of all holders account for every block exactly once."""
        self._pool.check()
        held = Counter(block for table in tables for block in table)
        assert all(self._pool.references(block) == held[block] for block in range(self._pool.total)), "lost references"
        assert self._pool.num_free + len(self._idle) + len(held) == self._pool.total, "lost blocks"
        chains: dict[int, Sequence[int]] = {}
        for table in tables:
            assert len(set(table)) == len(table), "a block twice in one table"
            for index, block in enumerate(table):
                if held[block] > 1:
                    chain = table[: index + 1]
                    assert chains.setdefault(block, chain) == chain, f"block {block} shared after different beginnings"
        age = {block: index for index, block in enumerate(self._idle)}
        for node in self._by_digest.values():
            assert self._by_block[node.block] is node
            assert (node.block in age) == (self._pool.references(node.block) == 0)
            if node.parent is not None:
                assert self._by_digest[node.parent.digest] is node.parent, "a hole in a chain"
                assert node.parent.children[node.digest] is node
                if node.parent.block in age:
                    assert age[node.block] < age[node.parent.block], "a chain would lose its middle first"
        assert len(self._by_block) == len(self._by_digest)
