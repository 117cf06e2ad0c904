"""Background responses: started by one request; polled, streamed and cancelled by others.

A job counts among the generations in flight like a request that waits for its answer, so the number of jobs is bounded,
and a draining server waits for them. A job is logged and audited when it ends, separately from the request that
started it.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol

from perilune.core.errors import EngineError, RequestError
from perilune.server import errors
from perilune.server.call import Call
from perilune.server.service import Service
from perilune.server.sse import named_event

# Limit of the kept events of all jobs. Above it, the largest job of the key with the most bytes loses its first events.
EVENT_BYTES = 64 << 20
MAX_ENDED_JOBS = 256  # ended jobs with events kept for clients that reconnect


class Answer(Protocol):
    """The part of responses.api.Answer that a job needs."""

    head: dict[str, Any]
    owner: str
    read: Any

    def events(self) -> AsyncGenerator[dict[str, Any], None]: ...
    def state(self) -> dict[str, Any]: ...
    def end(self, status: str, error: str | None = None) -> dict[str, Any]: ...


class Job:
    """A background response. `events`: the kept events; the first of them has sequence number `first`."""

    def __init__(self, answer: Answer, *, keeps_events: bool) -> None:
        self.answer = answer
        self.keeps_events = keeps_events
        self.events: deque[bytes] = deque()
        self.first = 0
        self.bytes = 0
        self.complete = False  # whether the answer is complete and stored
        self.ended = False
        self.task: asyncio.Task[None]
        self.news = asyncio.Event()

    def notify(self) -> None:
        """Wakes all streams that follow the job."""
        news, self.news = self.news, asyncio.Event()
        news.set()

    def check(self, after: int) -> None:
        """RequestError if the event after number `after` is no longer kept, or the response ended before it."""
        if after + 1 < self.first:
            raise _gone(after + 1, self.first)
        if self.ended and after >= self.first + len(self.events):
            raise RequestError(
                f"starting_after is {after}, and the last event has number {self.first + len(self.events) - 1}",
                param="starting_after",
                code="invalid_value",
            )

    async def follow(self, after: int) -> AsyncGenerator[bytes, None]:
        """The events after number `after`, as they come. RequestError if the next one is no longer kept."""
        at = after + 1
        while True:
            if at < self.first:
                raise _gone(at, self.first)
            if at - self.first < len(self.events):
                yield self.events[at - self.first]
                at += 1
            elif self.ended:
                return
            else:
                await self.news.wait()


class Jobs:
    """All jobs of a server. Belongs to the event loop."""

    def __init__(self, service: Service, event_bytes: int = EVENT_BYTES) -> None:
        self.service = service
        self.event_bytes = event_bytes
        self._jobs: dict[tuple[str, str], Job] = {}  # by owner and id; ended jobs stay while their events are kept
        self._bytes = 0

    def start(self, answer: Answer, call: Call, release: Callable[[], None], *, keeps_events: bool) -> Job:
        """Starts a job. `call`: the job's own Call, to which its generations are added. Calls `release` at the end."""
        job = Job(answer, keeps_events=keeps_events)
        self._jobs[answer.owner, answer.head["id"]] = job
        job.task = asyncio.create_task(self._run(job, call, release))
        return job

    def find(self, owner: str, id: str) -> Job | None:
        return self._jobs.get((owner, id))

    def running(self, owner: str, id: str) -> Job | None:
        job = self.find(owner, id)
        return None if job is None or job.ended else job

    async def cancel(self, job: Job) -> None:
        """Ends a job; no effect on an ended one."""
        await asyncio.sleep(0)  # let a new task begin: cancelled before that, it would never release its room
        job.task.cancel()
        await asyncio.gather(job.task, return_exceptions=True)

    def forget(self, owner: str, id: str) -> None:
        if (job := self._jobs.pop((owner, id), None)) is not None:
            self._bytes -= job.bytes

    async def _run(self, job: Job, call: Call, release: Callable[[], None]) -> None:
        failure: str | None = None
        try:
            await self._make(job)
        except asyncio.CancelledError:
            if not job.complete:
                self._keep(job, {"type": "response.cancelled", "response": job.answer.end("cancelled")})
        except Exception as error:
            call.error = error
            errors.log_failure("a response in the background", error)
            failure = errors.describe(error)[1]["error"]["message"]
            self._keep(job, {"type": "response.failed", "response": job.answer.end("failed", failure)})
        finally:
            release()
            job.ended = True
            job.notify()
            self.service.report(call)
            self._drop_ended()

    async def _make(self, job: Job) -> None:
        """Collects the answer's events, until its end or until the server stops."""

        async def consume() -> None:
            async with contextlib.aclosing(job.answer.events()) as events:
                async for event in events:
                    self._keep(job, event)
            job.complete = True

        work, stop = asyncio.create_task(consume()), asyncio.create_task(self.service.stopping.wait())
        try:
            await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise EngineError("the server is shutting down")
            work.result()
        finally:
            for task in (work, stop):
                task.cancel()
            await asyncio.gather(work, stop, return_exceptions=True)

    def _keep(self, job: Job, event: dict[str, Any]) -> None:
        if not job.keeps_events:
            return
        event.setdefault("sequence_number", job.first + len(job.events))
        made = named_event(event)
        job.events.append(made)
        job.bytes += len(made)
        self._bytes += len(made)
        while self._bytes > self.event_bytes:
            owned: dict[str, list[Job]] = {}
            for (owner, _), kept in self._jobs.items():
                owned.setdefault(owner, []).append(kept)
            largest = max(max(owned.values(), key=lambda jobs: sum(j.bytes for j in jobs)), key=lambda j: j.bytes)
            size = len(largest.events.popleft())
            largest.first += 1
            largest.bytes -= size
            self._bytes -= size
        job.notify()

    def _drop_ended(self) -> None:
        """Drops ended jobs that keep no events. While more than MAX_ENDED_JOBS are left, drops the oldest of the key
        with the most. Responses stay in the store."""
        ended: dict[str, list[str]] = {}
        for (owner, id), job in list(self._jobs.items()):
            if job.ended and job.keeps_events:
                ended.setdefault(owner, []).append(id)
            elif job.ended:
                self.forget(owner, id)
        while sum(map(len, ended.values())) > MAX_ENDED_JOBS:
            largest = max(ended, key=lambda o: len(ended[o]))
            self.forget(largest, ended[largest].pop(0))


def _gone(at: int, first: int) -> RequestError:
    return RequestError(
        f"event {at} is not kept any more, the first one that is has number {first}: get the response whole",
        param="starting_after",
        code="events_gone",
    )
