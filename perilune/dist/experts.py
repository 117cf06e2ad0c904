"""Expert parallelism: restricts the router's choice to the experts that one rank holds."""

from perilune.dist.slicing import Slicing
from perilune.ops.moe.chosen import Chosen


def own(chosen: Chosen, slicing: Slicing, experts: int) -> Chosen:
    """Restricts `chosen` (among all `experts`) to this rank's experts; id 0 is its first one. In place of experts on
    other ranks a row gets unchosen experts of this rank with weight 0, so that shapes do not depend on routing. Ids are
    distinct within a row; a rank with fewer experts than a token chooses returns all of its own."""
    first, last = (experts * rank // slicing.ranks for rank in (slicing.rank, slicing.rank + 1))
    ids = chosen.ids.long()
    weights = chosen.weights.new_zeros(len(ids), experts).scatter_(1, ids, chosen.weights)[:, first:last]
    marked = chosen.weights.new_zeros(len(ids), experts).scatter_(1, ids, 1.0)[:, first:last]
    places = marked.topk(min(ids.shape[1], last - first), sorted=True)[1]
    return Chosen(places.int(), weights.gather(1, places))
