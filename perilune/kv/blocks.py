"""KV blocks by number: free list and reference counts. Policy only: their memory is kv/pages.py."""

_FREE = -1


class BlockPool:
    """A fixed number of blocks. A block is free, referenced, or idle.

    An idle block has no reference, but is not free. The caller that releases the last reference decides: either
    the block stays idle and keeps its content (a cached prefix) until it is referenced again, or the caller calls
    `free`. Every operation is O(1).
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, num_blocks
        self._references = [_FREE] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the block freed last is allocated first
        self._referenced = 0

    @property
    def total(self) -> int:
        return len(self._references)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_referenced(self) -> int:
        return self._referenced

    def references(self, block: int) -> int:
        """Number of references to the block; 0: it is idle or free."""
        return max(self._references[block], 0)

    def allocate(self) -> int:
        """Takes a free block and returns it with one reference. The caller has checked `num_free`."""
        assert self._free, "no free block"
        block = self._free.pop()
        self._references[block] = 1
        self._referenced += 1
        return block

    def retain(self, block: int) -> None:
        """Adds a reference to a referenced or idle block."""
        count = self._references[block]
        assert count >= 0, f"block {block} is free"
        self._referenced += count == 0
        self._references[block] = count + 1

    def release(self, block: int) -> bool:
        """Removes a reference; true if it was the last one, so that the block is idle now."""
        count = self._references[block]
        assert count > 0, f"block {block} has no reference to release"
        self._references[block] = count - 1
        self._referenced -= count == 1
        return count == 1

    def free(self, block: int) -> None:
        assert self._references[block] == 0, f"block {block} has {self._references[block]} references"
        self._references[block] = _FREE
        self._free.append(block)

    def check(self) -> None:
        """Asserts that the counters agree with the free list."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert all(self._references[b] == _FREE for b in self._free)
        assert sum(r == _FREE for r in self._references) == len(self._free)
        assert sum(r > 0 for r in self._references) == self._referenced
        assert all(r >= _FREE for r in self._references)
