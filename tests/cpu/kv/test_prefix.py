"""The prefix tree: digests, matching, adoption, eviction order, forgetting."""

import random
from hashlib import blake2b
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.kv.blocks import BlockPool
from perilune.kv.prefix import PrefixTree, extend_digests, root_of

BLOCK = 2


def names(tokens):
    digests = []
    extend_digests(digests, tokens, BLOCK, len(tokens) // BLOCK)
    return digests


class Holder:
    """A request as far as the tree is concerned: takes what is cached, computes and registers the rest."""

    def __init__(self, tree, tokens):
        self.tree, self.digests = tree, names(tokens)
        self.blocks = tree.match(self.digests)
        self.hits = len(self.blocks)
        assert tree.count_known(self.digests) == self.hits
        tree.acquire(self.blocks)
        self.blocks += [tree.allocate() for _ in self.digests[self.hits :]]
        self.registered = self.hits

    def register(self):
        for i in range(self.registered, len(self.blocks)):
            block = self.tree.insert(self.blocks[i - 1] if i else None, self.digests[i], self.blocks[i])
            if block is None:
                return self
            self.blocks[i] = block
            self.registered = i + 1
        return self

    def release(self):
        self.tree.release(self.blocks)
        self.blocks = []
        return self


def tree_of(blocks):
    pool = BlockPool(blocks)
    return PrefixTree(pool), pool


def test_digests_depend_on_every_key_and_on_their_order():
    """No keys give the digests of the token ids alone; keys are not joined, and none looks like a block's digest."""
    groups = [(), ("a",), ("b",), ("a", "b"), ("b", "a"), ("ab",), ("a", ""), ("", "a"), ("",), ("a\0b",)]
    chains = []
    for keys in groups:
        digests = []
        extend_digests(digests, [1, 2, 3, 4], BLOCK, 2, root_of(keys))
        again = []
        extend_digests(again, [1, 2], BLOCK, 1, root_of(keys))
        extend_digests(again, [1, 2, 3, 4], BLOCK, 2, root_of(keys))
        assert again == digests
        chains += digests
    assert len(set(chains)) == len(chains) == 2 * len(groups)
    assert chains[:2] == names([1, 2, 3, 4])
    assert root_of(("a",)) == root_of(("a",)) and root_of(()) == b""


def test_digests_name_the_whole_prefix():
    a, b = names([1, 2, 3, 4, 5]), names([9, 2, 3, 4])
    assert len(a) == 2 and len(b) == 2
    assert not set(a) & set(b)  # equal second blocks after different first ones
    assert names([1, 2, 7, 7])[0] == a[0]
    step_by_step = []
    for blocks in range(3):
        extend_digests(step_by_step, [1, 2, 3, 4, 5], BLOCK, blocks)
    assert step_by_step == a
    ids = b"\1\0\0\0\2\0\0\0"  # little-endian 32-bit, whatever the machine
    assert a[0] == blake2b(ids, digest_size=16).digest()


def test_digests_name_the_pictures_from_the_block_in_which_they_begin():
    def chain(changed=0, calls=(6,)):
        shown = (1, 2), (2, 3), (3, 8), (8, 9), (9, 12)
        pictures = [SimpleNamespace(start=a, stop=b, digest=bytes([a == changed])) for a, b in shown]
        digests = []
        for blocks in calls:
            extend_digests(digests, [7] * 12, BLOCK, blocks, pictures=pictures)
        return digests

    assert chain() == chain(calls=range(7))
    for start in (1, 2, 3, 8, 9):
        assert [a == b for a, b in zip(chain(), chain(start))] == [i < start // BLOCK for i in range(6)]


def test_digests_refuse_unfilled_blocks():
    with pytest.raises(AssertionError):
        extend_digests([], [1, 2, 3], BLOCK, 2)


def test_match_finds_the_longest_chain():
    tree, _ = tree_of(8)
    first = Holder(tree, [1, 2, 3, 4, 5, 6]).register()
    assert tree.match(names([1, 2, 3, 4, 9, 9])) == first.blocks[:2]
    assert tree.match(names([3, 4])) == []
    first.release()
    assert tree.num_cached == 3
    assert Holder(tree, [1, 2, 3, 4]).hits == 2
    assert tree.num_cached == 1


def test_unregistered_blocks_go_back_at_once():
    tree, pool = tree_of(4)
    Holder(tree, [1, 2, 3, 4]).release()
    assert (pool.num_free, tree.num_cached) == (4, 0)


def test_same_block_computed_twice_is_kept_once():
    tree, pool = tree_of(8)
    a, b = Holder(tree, [1, 2, 3, 4]), Holder(tree, [1, 2, 3, 4, 5, 6])
    assert not set(a.blocks) & set(b.blocks)
    a.register()
    own = b.blocks[2]
    b.register()
    assert b.blocks == [*a.blocks, own]
    tree.check([a.blocks, b.blocks])
    assert pool.num_free == 5
    a.release(), b.release()
    tree.check([])
    assert tree.num_cached == 3


def test_eviction_of_a_chains_middle_is_impossible():
    tree, _ = tree_of(4)
    chain = Holder(tree, [1, 2, 3, 4, 5, 6, 7, 8]).register()
    blocks = list(chain.blocks)
    chain.release()
    evicted = []
    for left in (3, 2, 1, 0):
        evicted.append(tree.allocate())
        assert tree.match(names([1, 2, 3, 4, 5, 6, 7, 8])) == blocks[:left]
    assert evicted == blocks[::-1]


def test_eviction_is_least_recently_used_first():
    tree, _ = tree_of(4)
    system = [1, 2]
    a = Holder(tree, [*system, 3, 4]).register()
    a.release()
    b = Holder(tree, [5, 6]).register()
    b.release()
    Holder(tree, system).release()  # the shared beginning is used again, the end of `a` is not
    first, second, third = [5, 6], system, [*system, 3, 4]
    tree.allocate()  # the fourth block, still free
    tree.allocate()
    assert len(tree.match(names(third))) == 1
    tree.allocate()
    assert tree.match(names(first)) == []
    assert len(tree.match(names(second))) == 1


def test_referenced_blocks_are_never_evicted():
    tree, _ = tree_of(3)
    chain = Holder(tree, [1, 2, 3, 4, 5, 6]).register()
    assert tree.available == 0
    chain.release()
    holder = Holder(tree, [1, 2, 3, 4])
    assert tree.available == 1
    assert tree.allocate() not in holder.blocks
    assert tree.available == 0
    with pytest.raises(AssertionError, match="every block is referenced"):
        tree.allocate()


def test_forget_takes_all_that_follows_and_leaves_holders_alone():
    tree, pool = tree_of(8)
    a = Holder(tree, [1, 2, 3, 4, 5, 6]).register()
    b = Holder(tree, [1, 2, 3, 4, 7, 8])
    c = Holder(tree, [9, 9]).register()
    a.release(), c.release()
    tree.forget(a.digests[0])
    assert tree.match(a.digests) == []
    assert tree.num_cached == 1
    assert pool.num_free == 4  # all but the one of `c` and the three that stay with `b`
    tree.check([b.blocks])
    assert b.register().registered == 2  # nothing is hung onto a forgotten chain
    assert tree.match(b.digests) == []
    fresh = Holder(tree, [1, 2, 3, 4]).register()
    assert fresh.hits == 0
    b.release(), fresh.release()
    tree.check([])
    assert tree.num_cached == 3
    tree.forget(a.digests[2])  # unknown by now
    tree.check([])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_random_histories_keep_the_books(seed):
    rng = random.Random(seed)
    tree, pool = tree_of(rng.randint(4, 12))
    holders = []
    for _ in range(60):
        roll = rng.random()
        tokens = [rng.randint(0, 1) for _ in range(2 * rng.randint(1, 4))]
        if roll < 0.45 and tree.available >= len(tokens) // 2:
            holders.append(Holder(tree, tokens))
        elif roll < 0.7 and holders:
            rng.choice(holders).register()
        elif roll < 0.95 and holders:
            holders.pop(rng.randrange(len(holders))).release()
        elif holders:
            tree.forget(rng.choice(holders).digests[0])
        tree.check([h.blocks for h in holders])
    for holder in holders:
        holder.release()
    tree.check([])
    assert pool.num_free + tree.num_cached == pool.total
