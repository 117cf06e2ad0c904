"""What a speculator knows of one request: its text, the chain behind it, and what matches say in the chain's place."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perilune.core.step import MAX_DRAFTS
from perilune.speculation.policy import Cell, Worth, model_cell, suffix_cell
from perilune.speculation.suffix import Guess, Trail

LAG = 32  # tokens that matches may be behind and still be learned from

Chain = tuple[tuple[int, float], ...]  # drafted tokens, and how sure of each the draft model was
Lesson = tuple[int, Cell, int, bool]  # as Acceptance.learn


@dataclass(slots=True)
class Mind:
    trail: Trail | None  # its text, if matches are looked for
    known: int  # its tokens
    lag: list[int] = field(default_factory=list)  # the last of them, which the trail has not seen yet
    chain: Chain = ()  # of the draft model, behind the known tokens
    instead: list[Guess | None] = field(default_factory=list)  # what matches foretell in the place of each
    behind: list[Guess] = field(default_factory=list)  # what they foretell behind it
    planned: tuple[Cell, ...] | None = None  # the drafts in flight; None: the chain, as far as the step took it
    worth: Worth | None = None  # of its chains
    _told: list[Cell] | None = None

    @property
    def ready(self) -> Trail | None:
        """The trail if it has seen all of the text."""
        return self.trail if self.trail is not None and not self.trail.behind and not self.lag else None

    @property
    def told(self) -> list[Cell]:
        """What the chain's drafts are told apart by; found out when it is first asked for."""
        if self._told is None:
            self._told = [
                model_cell("eagle3", i, sure, None if guess is None else guess.token == token)
                for i, ((token, sure), guess) in enumerate(zip(self.chain, self.instead))
            ]
        return self._told

    def compare(self, chain: Chain) -> None:
        """Takes note of a chain behind the known tokens, and of what matches say in its place."""
        self.chain, self._told, self.instead, self.behind = chain, None, [None] * len(chain), []
        if chain and (trail := self.ready) is not None:
            self.instead, self.behind = trail.compare(MAX_DRAFTS - len(chain), [token for token, _ in chain])

    def lessons(self, rid: int, came: Sequence[int]) -> list[Lesson]:
        """What the tokens that came say about the chain, as far as it was right."""
        found = []
        for (token, _), cell, true in zip(self.chain, self.told, came):
            found.append((rid, cell, token, token == true))
            if token != true:
                break
        return found

    def rouse(self) -> None:
        """Tells the trail of the latest tokens, from which nothing is learned."""
        if self.trail is not None:
            self.trail.skip(self.lag)
        self.lag.clear()

    def catch_up(self, rid: int) -> list[Lesson]:
        """Tells the trail of the latest tokens; what they say about what it had foretold."""
        found: list[Lesson] = []
        if len(self.lag) > LAG:
            self.rouse()
        if self.trail is not None:
            for token in self.lag:
                if (guess := self.trail.foretold()) is not None:
                    found.append((rid, cells([guess])[0], guess.token, guess.token == token))
                self.trail.append(token)
        self.lag.clear()
        return found


def cells(guesses: Sequence[Guess]) -> list[Cell]:
    """What suffix drafts are told apart by."""
    return [suffix_cell(g.length, g.share, g.alone) for g in guesses]
