"""From a submitted request to the scheduler: checks, a seed, and the compiled grammar of a constrained answer."""

import random
from collections.abc import Callable

from perilune.core.errors import EngineError, RequestError
from perilune.core.messages import Delta, EngineInfo, Submit
from perilune.engine.client import check_pictures, room
from perilune.engine.masks import Grammars

COMPILE_WAIT_SECONDS = 0.05  # With nothing else to compute, a step waits this long for a grammar to compile.


class Admission:
    """`schedule(request, seed)` puts a request into the scheduler; it raises RequestError if that can never run."""

    def __init__(
        self, info: EngineInfo, grammars: Grammars, seed: int | None, schedule: Callable[[Submit, int], None]
    ) -> None:
        self._info, self._grammars, self._schedule = info, grammars, schedule
        self._seeds = random.Random(seed)

    def submit(self, request: Submit) -> None:
        """As Engine.submit."""
        if request.params.bad_words:
            raise RequestError("bad_words need a tokenizer: give bad_word_ids", param="bad_words")
        request.params.check_ids(self._info.vocab_size)
        if request.pictures:
            check_pictures(request.prompt, request.pictures, self._info)
        seed = self._seeds.getrandbits(63) if request.params.seed is None else request.params.seed
        if request.constraint is not None:
            request.constraint.check_room(room(request.prompt, request.params, self._info))
            self._grammars.compile(request, seed)
            return
        self._schedule(request, seed)
        if (session := self._grammars.unformed(request.params, self._info.vocab_size)) is not None:
            self._grammars.open(request.rid, session)

    def schedule_compiled(self, *, idle: bool) -> list[Delta]:
        """Schedules the requests with compiled grammars; a request with a grammar that failed gets its last Delta.
        `idle`: nothing else can be computed, so wait up to COMPILE_WAIT_SECONDS for a grammar."""
        deltas: list[Delta] = []
        if not self._grammars.compiling:
            return deltas
        for compiled, request, seed in self._grammars.compiled(COMPILE_WAIT_SECONDS if idle else 0.0):
            try:
                session = compiled.result()
                self._schedule(request, seed)
            except (RequestError, EngineError) as e:
                deltas.append(Delta(request.rid, finish_reason="error", error=str(e)))
            else:
                self._grammars.open(request.rid, session)
        return deltas
