"""How long a chain to ask a draft model for, before its confidence is known: by what chains were lately worth, and now
and then to see whether the text has become easier."""

from collections.abc import Sequence

from perilune.speculation.policy import Worth, best_chain

PROBE = 3  # tokens of a chain that is asked for to see how it would do
PROBE_FIRST, PROBE_LAST = 4, 64  # steps without a chain until then: at first, and at most, doubling
SEEN, MEMORY = 6.0, 32.0  # chains that what others were worth counts for with a new request; remembered


class Lengths:
    """`longest`: tokens that the model can draft. Where chains do not pay, they are asked for ever more rarely."""

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._worth: Worth | None = None  # of all requests' chains
        self._paying: tuple[int, int] | None = None  # requests, and how long chains pay for them
        self._unasked, self._patience = 0, PROBE_FIRST  # steps without a chain; after which one is asked for
        self._probing = False  # the chain last asked for was to see how it would do

    @property
    def knows(self) -> bool:
        return self._worth is not None

    def hope(self, worth: Sequence[float]) -> None:
        """What chains are taken to be worth until there have been some."""
        self._worth = Worth(worth, 1.0, MEMORY)

    def of_request(self) -> Worth:
        """A new request's chains: as worth as others' until some of its own were seen."""
        assert self._worth is not None
        return Worth(self._worth.by_length, SEEN, MEMORY)

    def saw(self, worths: Sequence[tuple[Sequence[float], Worth | None]]) -> None:
        """What chains just drafted are worth, each with its request's."""
        self._paying = None
        for worth, own in worths:
            if self._worth is not None:
                self._worth.saw(worth)
            if own is not None:
                own.saw(worth)
        if self._probing and sum(max(worth) for worth, _ in worths) > 0:
            self._patience = 1  # it may have become easier: look again

    def known(self, requests: int) -> int | None:
        """What `ask` last said of so many requests, while nothing new is known and it was not nothing."""
        return self._paying[1] if self._paying is not None and self._paying[0] == requests else None

    def left_out(self) -> None:
        """The model drafts nothing; as soon as it may, it is asked."""
        self._unasked = self._patience = PROBE_FIRST
        self._paying = None

    def ask(self, worths: Sequence[Worth], lost: float, trying: bool) -> int:
        """Tokens of the chains behind a step that draws for requests whose chains are worth so much, where it takes
        `lost` tokens to wait for them. `trying`: there shall be some in any case."""
        length = best_chain([worth.by_length for worth in worths], lost)
        if trying:
            length = max(length, min(PROBE, self._longest))
        self._probing = not length
        if length:
            self._unasked, self._patience = 0, PROBE_FIRST
            self._paying = None if trying else (len(worths), length)
            return length
        self._unasked += 1
        if self._unasked < self._patience:
            return 0
        self._unasked, self._patience = 0, min(2 * self._patience, PROBE_LAST)
        return min(PROBE, self._longest)
