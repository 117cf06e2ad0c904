"""Deltas of one request that have arrived and were not taken yet."""

import asyncio

from perilune.core.messages import Delta


class Inbox:
    """One task takes the deltas."""

    __slots__ = ("_deltas", "_waiter")

    def __init__(self) -> None:
        self._deltas: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: Delta) -> None:
        self._deltas.append(delta)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """All deltas that have arrived; waits for the first."""
        if not self._deltas:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        taken, self._deltas = self._deltas, []
        return taken
