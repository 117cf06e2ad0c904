"""The KV blocks of requests: allocation, prefix cache hits and restores from KV tiers, for scheduler and queue."""

from collections.abc import Sequence

from perilune.core.request import Request
from perilune.engine.kv_tiers.offload import Offload
from perilune.kv.blocks import BlockPool
from perilune.kv.prefix import PrefixTree, extend_digests
from perilune.kv.tiers import Tiers


class RequestBlocks:
    """num_blocks blocks of block_size tokens each, shared by all requests of a scheduler.

    prefix_cache  whether blocks of equal prefixes are kept and shared
    tiers         where evicted blocks are stored; None: nowhere
    spare_blocks  with tiers: number of free blocks to keep, which steps take without waiting for a copy
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, prefix_cache: bool, tiers: Tiers | None, spare_blocks: int
    ) -> None:
        self._pool = BlockPool(num_blocks)
        self.tree = PrefixTree(self._pool)
        self._block_size = block_size
        self._prefix_cache = prefix_cache
        self.offload: Offload | None = None
        self._kept: list[Request] = []  # waiting requests with restored blocks, by the time of their restore
        if tiers is not None:
            self.offload = Offload(
                tiers, self.tree, block_size=block_size, blocks=num_blocks, spare_blocks=spare_blocks
            )

    @property
    def total(self) -> int:
        return self._pool.total

    @property
    def num_owned(self) -> int:
        """Number of blocks with a reference."""
        return self._pool.num_referenced

    @property
    def capacity_tokens(self) -> int:
        return self._pool.total * self._block_size

    # ---- of a running request

    def missing(self, request: Request, tokens: int) -> int:
        """Number of blocks missing for the request's first `tokens` positions; 0 or less: none."""
        return -(-tokens // self._block_size) - len(request.blocks)

    def extend(self, request: Request, tokens: int) -> None:
        """Allocates blocks for the request's first `tokens` positions. The caller has checked that they are
        available."""
        missing = -(-tokens // self._block_size) - len(request.blocks)
        if missing > 0:  # a decoding request needs a block once in block_size tokens
            for _ in range(missing):
                request.add_block(self.tree.allocate())

    def lookahead(self, request: Request) -> int:
        """Number of blocks that a running request will need soon: for the rest of its known tokens, and one more."""
        soon = min(request.horizon + self._block_size, request.limit - 1)
        return max(self.missing(request, soon), 0)

    def at_hand(self, blocks: int) -> bool:
        """Whether `blocks` blocks can be allocated now. With tiers only free ones can: cached ones are copied first."""
        if self.offload is None or blocks <= 0:
            return blocks <= self.tree.available
        return self.offload.has_room(blocks) and blocks <= self.tree.available

    def waits(self, blocks: int, *, alone: bool) -> bool:
        """Whether a running request that lacks blocks should wait for copies that free some, instead of preempting the
        last request. `alone`: it is the only running request and would preempt itself."""
        if self.offload is None:
            return False
        if self.offload.leaving and blocks <= self.tree.available + self.offload.leaving:
            return True
        return self.offload.restoring > 0 and alone

    def settle(self, request: Request) -> None:
        """After a commit: releases blocks of rejected drafts, and registers full blocks in the prefix tree."""
        needed = -(-(request.planned + request.drafted) // self._block_size)
        if len(request.blocks) > needed:
            self.tree.release(request.trim(needed))
        if self._prefix_cache and request.computed // self._block_size > request.registered:
            self._register(request)

    # ---- of a waiting request

    def match(self, request: Request) -> list[int]:
        """The cached blocks of the request's prefix; no reference is taken."""
        return self.tree.match(self._readable(request))

    def cached_tokens(self, request: Request) -> int:
        """Number of tokens of a waiting request that are in the prefix cache."""
        return self.tree.count_known(self._readable(request)) * self._block_size

    def lacking(self, request: Request, hits: list[int], reserve: int) -> int:
        """Number of blocks missing for all known tokens of a waiting request and `reserve` more blocks; 0: it fits.

        Its first chunk would need fewer; but if blocks ran out in the middle of a prompt, it would be preempted.
        """
        missing = -(-request.known // self._block_size) - len(hits)
        return max(missing + reserve + self.tree.idle_among(hits) - self.tree.available, 0)

    def find_stored(self, request: Request, hits: list[int]) -> list[bytes]:
        """Digests of the blocks after `hits` that should be restored from a tier for the request."""
        if self.offload is None:
            return []
        return self.offload.find(request, self._readable(request)[len(hits) :])

    def restore(self, request: Request, hits: list[int], stored: list[bytes], planned_steps: int) -> bool:
        """Begins to restore the blocks of `stored`, which follow `hits`, from a tier. `planned_steps` as in
        RequestQueue.take. False: too few blocks are free yet, ask again before the next step."""
        assert self.offload is not None
        request.restoring = self.offload.begin(request, hits, stored, planned_steps)
        if request.restoring:
            self.drop_kept(request)  # kept blocks are among `hits`, to which `begin` has taken references
        return request.restoring

    def take_restored(self, committed_steps: int, running: Sequence[Request]) -> list[Request]:
        """Handles ended copies to and from the tiers; returns the requests that no longer wait for a restore."""
        if self.offload is None:
            return []
        back = self.offload.poll(committed_steps, sum(map(self.lookahead, running)))
        for request, blocks in back:
            request.restoring = False
            if blocks:
                request.kept = blocks
                self._kept.append(request)
        return [request for request, _ in back]

    def drop_kept(self, request: Request) -> None:
        """Releases the restored blocks of a waiting request, which may then be evicted."""
        if request.kept:
            self._kept.remove(request)
            self.tree.release(request.kept)
            request.kept = []

    def take_kept(self, rank: tuple[float, ...] = (), lacking: int = 1) -> bool:
        """For a request of `rank` (empty: a running one) that lacks `lacking` blocks: releases the restored blocks of
        the waiting request of the last rank. False, and nothing is released, if the waiting requests of later ranks
        have fewer than `lacking` such blocks together: these restores would be lost, and the request could not run."""
        later = [request for request in self._kept if request.rank > rank]
        if not later or sum(len(request.kept) for request in later) < lacking:
            return False
        self.drop_kept(max(later, key=lambda request: request.rank))
        return True

    def has_room(self, request: Request, hits: list[int], budget: int) -> bool:
        """Whether the blocks for the first step of a waiting request, of up to `budget` tokens, are free. If not, other
        cached blocks may be evicted, but not its hits."""
        if self.offload is None:
            return True  # `lacking` has checked it: without tiers `allocate` evicts cached blocks at once
        end = min(len(hits) * self._block_size + budget, request.known)
        self.tree.acquire(hits)
        ready = self.offload.has_room(-(-end // self._block_size) - len(hits))
        self.tree.release(hits)
        return ready

    def start(self, request: Request, slot: int, hits: list[int]) -> None:
        """Starts a waiting request in `slot`, with a reference to its hits."""
        first = request.life == 0
        if first and hits:
            request.turn = self.tree.turn(hits[-1]) + 1
        self.tree.acquire(hits)
        self.drop_kept(request)
        request.start(slot, hits, self._block_size)
        if first and self.offload is not None:
            self.offload.count(request)

    # ---- cached

    def adopt(self, tokens: Sequence[int]) -> list[int]:
        """As Scheduler.adopt."""
        digests: list[bytes] = []
        extend_digests(digests, tokens, self._block_size, len(tokens) // self._block_size)
        held = self.tree.match(digests)
        self.tree.acquire(held)
        for digest in digests[len(held) :]:
            if not (self.tree.available if self.offload is None else self.tree.num_free):
                break
            block = self.tree.allocate()
            kept = self.tree.insert(held[-1] if held else None, digest, block)
            assert kept == block, "a digest beyond the longest match is known"
            held.append(block)
        self.tree.release(held)
        return held

    def forget(self, request: Request) -> None:
        """Removes the request's blocks, and all that follow them, from the prefix cache and the tiers: any of them may
        hold the non-finite values that made the request fail."""
        if request.digests:
            first = request.digests[0]
            self.tree.forget(first)
            if self.offload is not None:
                self.offload.forget(first)
            for waiting in [r for r in self._kept if r.digests[0] == first]:
                self.drop_kept(waiting)  # no longer prefix hits: if kept, too few blocks might be left to start it

    def check(self, running: Sequence[Request], waiting: Sequence[Request]) -> None:
        """Asserts that every block is accounted for exactly once. Slow: for tests."""
        assert all(r.kept and r in waiting for r in self._kept), "restored blocks of a request that does not wait"
        elsewhere: list[list[int]] = []
        if self.offload is not None:
            self.offload.check()
            elsewhere = self.offload.tables + [request.kept for request in self._kept]
        self.tree.check([*(r.blocks for r in running), *elsewhere])
        for request in running:
            assert self.missing(request, request.planned + request.drafted) == 0, request
        assert self._prefix_cache or self.tree.num_cached == 0

    def _readable(self, request: Request) -> list[bytes]:
        """Digests of the blocks that a request may take from the cache.

        Not the last token's block: that token is computed in any case, for its logits. Prompt log-probabilities need
        the logits of all tokens, so a request that wants them takes no block.
        """
        if not self._prefix_cache or request.params.prompt_logprobs is not None:
            return []
        blocks = (request.known - 1) // self._block_size
        extend_digests(request.digests, request.tokens, self._block_size, blocks, request.root, request.pictures)
        return request.digests[:blocks]

    def _register(self, request: Request) -> None:
        full = request.computed // self._block_size
        extend_digests(request.digests, request.tokens, self._block_size, full, request.root, request.pictures)
        for index in range(request.registered, full):
            parent = request.blocks[index - 1] if index else None
            own = request.blocks[index]
            block = self.tree.insert(parent, request.digests[index], own, request.turn)
            if block is None:
                return
            if block != own:
                request.swap_block(index, block)
            request.registered = index + 1
