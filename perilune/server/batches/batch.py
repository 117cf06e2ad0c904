"""Batches: answers the requests of a file, into a file, while other requests leave room in the engine.

Answers are appended to ID.output and ID.errors beside the batch's record; a restarted server continues after the
answers that are there. When all lines are answered, or the batch is cancelled, expires or fails, both become files.
"""

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from perilune.core.errors import RequestError
from perilune.server import errors
from perilune.server.batches.files import FileStore, new_id, read_records, write_whole
from perilune.server.batches.protocol import BatchBody, Line, read_line, record
from perilune.server.call import Call, entered
from perilune.server.keys import Account
from perilune.server.limits import BodyBudget, BodyShare, LimitReached
from perilune.server.openai.protocol import MAX_PRIORITIES
from perilune.server.service import JSON, Service
from perilune.text.tools import show

MAX_LINES = 50_000
MAX_BATCHES = 100  # unfinished batches per key
MAX_RECORDS = 1000  # batches per key, ended ones included; the oldest are deleted
MAX_ERRORS = 20  # errors that are reported about one input file
POLL_SECONDS = 0.05  # between checks for room in the engine
RETRY_SECONDS = 1.0  # after a 429 or 503
MAX_LOST_RUNS = 3  # A request lost so often in a failing engine is not tried again: it may cause the failures.
MAX_WAIT_SECONDS = 30.0  # longest wait until a key's limits are checked again
ANSWERS = ("output", "errors")  # suffixes of the two files of a batch: answers, and errors
ENDED = ("completed", "failed", "expired", "cancelled")
Endpoint = Callable[[Request], Awaitable[Response]]
log = logging.getLogger("perilune.server")


class Batch:
    """One unfinished batch. `record` is its JSON object, with the server's private data under "own"."""

    def __init__(self, store: FileStore, owner: str, about: dict[str, Any]) -> None:
        self.store = store
        self.owner = owner
        self.record = about
        self.done: set[str] = set()  # custom ids of answered requests
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return str(self.record["id"])

    @property
    def ended(self) -> bool:
        return self.record["status"] in ENDED

    @property
    def expired(self) -> bool:
        return bool(time.time() >= self.record["expires_at"])

    def shown(self) -> dict[str, Any]:
        return {name: value for name, value in self.record.items() if name != "own"}

    def move(self, status: str) -> None:
        """Changes the status and writes the record. Nothing changes if the disk is full."""
        changed = {**self.record, "status": status}
        if f"{status}_at" in changed:
            changed[f"{status}_at"] = int(time.time())
        write_whole(self.path("json"), msgspec.json.encode(changed))
        self.record = changed

    def delete(self) -> None:
        for end in ("json", *ANSWERS):
            self.path(end).unlink(missing_ok=True)

    def append(self, line: Mapping[str, Any], *, failed: bool) -> None:
        """Appends an answer to its file; RequestError if the limit of bytes is reached."""
        data = msgspec.json.encode(line) + b"\n"
        self.store.reserve(self.owner, len(data))
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        with open(os.open(self.path("errors" if failed else "output"), flags, 0o600), "wb") as file:
            file.write(data)
        self.done.add(line["custom_id"])
        self.record["request_counts"]["failed" if failed else "completed"] += 1

    def recover(self, found: Mapping[str, tuple[int, list[str]]]) -> None:
        """Restores the state from the result of `answered`, after a restart."""
        for end, (size, ids) in found.items():
            self.store.reserve(self.owner, size)
            self.done.update(ids)
            self.record["request_counts"]["completed" if end == "output" else "failed"] = len(ids)

    def finish(self, status: str) -> None:
        """Turns the answers into files and ends the batch. If the server ends in between, `resume` completes it; if
        the disk is full, another call does."""
        own = self.record["own"]
        final = own.setdefault("final", status)
        if "files" not in own:
            own["files"] = {end: new_id("file") for end in ANSWERS if self.path(end).is_file()}
            try:
                self.move("cancelling" if final == "cancelled" else "finalizing")
            except BaseException:
                del own["files"]
                raise
        for end, id in own["files"].items():
            if self.path(end).is_file():
                about = {"filename": f"{self.id}_{end}.jsonl", "purpose": "batch_output"}
                self.store.keep(self.owner, id, self.path(end), about, own["expiry_seconds"])
            self.record["output_file_id" if end == "output" else "error_file_id"] = id
        self.move(final)

    def fail(self, found: list[dict[str, Any]]) -> None:
        if "final" not in self.record["own"]:
            self.record["errors"] = {"object": "list", "data": found}
        self.finish("failed")

    def path(self, end: str) -> Path:
        return self.store.folder(self.owner) / f"{self.id}.{end}"


class Seat:
    """One of the slots for batch requests that are computed. A request that waits for its key's limits gives it back:
    otherwise batches of other keys would wait too."""

    def __init__(self, seats: asyncio.Semaphore) -> None:
        self._seats = seats
        self._held = False

    async def take(self) -> None:
        await self._seats.acquire()
        self._held = True

    def give(self) -> None:
        """Calling it again has no effect."""
        if self._held:
            self._held = False
            self._seats.release()


class Batches:
    """All batches of a server. Belongs to the event loop.

    At most max_num_seqs // 2 requests of batches are computed at a time, with the lowest priority. One begins only
    while the server has fewer than max_num_seqs requests in flight and no limit of its key is reached.
    """

    def __init__(self, service: Service, store: FileStore, endpoints: Mapping[str, Endpoint], app: Any) -> None:
        self.service = service
        self.store = store
        self._endpoints = endpoints
        self._app = app
        self._max_seats = max(service.engine.info.max_num_seqs // 2, 1)
        self._seats = asyncio.Semaphore(self._max_seats)
        self._batches: dict[str, dict[str, Batch]] = {}  # by owner and id, oldest first
        for owner in store.owners():
            found = [Batch(store, owner, about) for about in read_records(store.folder(owner), "batch")]
            self._batches[owner] = {b.id: b for b in sorted(found, key=lambda b: b.record["created_at"])}
        store.in_use = self.reads

    def resume(self) -> None:
        """Continues the unfinished batches of an earlier server process. Call it once, in the event loop."""
        for batches in self._batches.values():
            for batch in batches.values():
                if not batch.ended:
                    self._start(batch)

    async def close(self) -> None:
        """Stops working; unfinished batches stay on disk, for `resume`."""
        tasks = [b.task for batches in self._batches.values() for b in batches.values() if b.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    def create(self, owner: str, body: BatchBody) -> Batch:
        """Starts a batch. RequestError if the file does not exist or the key has too many batches."""
        self.store.get(owner, body.input_file_id, "input_file_id")
        own = self._batches.setdefault(owner, {})
        if sum(not b.ended for b in own.values()) >= MAX_BATCHES:
            raise RequestError(
                f"{MAX_BATCHES} batches have not ended: wait for one, or cancel one",
                code="too_many_batches",
                status=429,
                retry_seconds=60,
            )
        batch = Batch(self.store, owner, record(new_id("batch"), body, int(time.time())))
        batch.move("validating")
        own[batch.id] = batch
        for old in [b for b in own.values() if b.ended][: max(len(own) - MAX_RECORDS, 0)]:
            own.pop(old.id).delete()
        self._start(batch)
        return batch

    def list(self, owner: str) -> list[Batch]:
        return [*self._batches.get(owner, {}).values()]

    def get(self, owner: str, id: str) -> Batch:
        """RequestError 404 if the owner has no such batch."""
        found = self._batches.get(owner, {}).get(id)
        if found is None:
            raise RequestError(f"there is no batch {show(id)}", param="batch_id", code="batch_not_found", status=404)
        return found

    def reads(self, owner: str, file: str) -> bool:
        """Whether an unfinished batch reads a file."""
        return any(b.record["input_file_id"] == file and not b.ended for b in self.list(owner))

    async def cancel(self, batch: Batch) -> None:
        """Cancels a batch; its answers so far are kept. No effect on a batch that has ended or is finalizing."""
        await asyncio.sleep(0)  # lets a new task enter the `try` of `_run`, which finishes a cancelled batch
        if batch.ended or batch.task is None or "final" in batch.record["own"]:
            return
        batch.move("cancelling")  # and no `await` before `cancel`: the task could set another
        batch.task.cancel()
        await asyncio.gather(batch.task, return_exceptions=True)

    # ---- the work

    def _start(self, batch: Batch) -> None:
        batch.task = asyncio.create_task(self._run(batch))

    async def _run(self, batch: Batch) -> None:
        try:
            await self._work(batch)
        except asyncio.CancelledError:
            if batch.record["status"] != "cancelling":
                raise  # the server ends
            batch.finish("cancelled")
        except Exception as e:
            while isinstance(e, ExceptionGroup):  # raised by the TaskGroup of lines
                e = e.exceptions[0]
            if not isinstance(e, RequestError):
                log.error("batch %s failed: %s", batch.id, e, exc_info=e)
                e = RequestError("the server has a fault, which its log describes", code="server_error")
            while not batch.ended:
                with contextlib.suppress(OSError, RequestError):
                    batch.fail([_error(e, None)])
                    return
                await asyncio.sleep(RETRY_SECONDS)  # the disk may have room again

    async def _work(self, batch: Batch) -> None:
        batch.recover(await asyncio.to_thread(answered, batch))
        if batch.record["status"] in ("cancelling", "finalizing"):  # the earlier server ended inside `finish`
            batch.finish("cancelled")
            return
        self.store.get(batch.owner, batch.record["input_file_id"], "input_file_id")
        path, endpoint = self.store.path(batch.owner, batch.record["input_file_id"]), batch.record["endpoint"]
        if batch.record["status"] == "validating":
            wrong, total = await asyncio.to_thread(_validated, path, endpoint)
            if wrong:
                batch.fail(wrong)
                return
            batch.record["request_counts"]["total"] = total
            batch.move("in_progress")
        begun = asyncio.Semaphore(self._max_seats)  # requests of this batch that are computed or wait to be tried again
        async with asyncio.TaskGroup() as group:
            with open(path, "rb") as file:
                for raw in file:
                    await asyncio.sleep(0)  # lets a new task begin, so that the next `_room` counts it as in flight
                    if not raw.strip() or (line := read_line(raw, endpoint)).custom_id in batch.done:
                        continue
                    await begun.acquire()
                    seat = Seat(self._seats)
                    account = await self._seated(batch, seat)
                    task = group.create_task(self._one(batch, line, account, seat))
                    task.add_done_callback(functools.partial(_ended, seat, begun))
        batch.finish("expired" if batch.expired else "completed")

    async def _one(self, batch: Batch, line: Line, account: Account, seat: Seat) -> None:
        """Answers a line, for which `seat` is taken. If there is no room, or the engine is down, it is tried again
        until the batch expires."""
        lost = 0  # times that the engine ended while it had the request
        while not batch.expired:
            call = Call(account, method="POST", route=batch.record["endpoint"])
            call.keeps_text = self.service.config.audit_text
            status, body = await self._answered(call, line)
            lost += status == 503 and any(run.started for run in call.runs)
            if not _may_pass(status, call.error) or lost == MAX_LOST_RUNS:
                self.service.report(call)
                response = {"status_code": status, "request_id": call.id, "body": body}
                batch.append(_answer(line, response, None), failed=status != 200)
                return
            seat.give()
            await asyncio.sleep(RETRY_SECONDS)
            account = await self._seated(batch, seat)
        about = {"code": "batch_expired", "message": "the request was not answered within the batch's 24 h"}
        batch.append(_answer(line, None, about), failed=True)

    async def _seated(self, batch: Batch, seat: Seat) -> Account:
        """Takes the seat when a request of the batch may begin, or the batch has expired. RequestError if its key was
        removed."""
        while True:
            await seat.take()
            try:
                account, wait = self._room(batch)
            except RequestError:
                seat.give()
                raise
            if not wait:
                return account
            seat.give()
            await asyncio.sleep(wait)

    def _room(self, batch: Batch) -> tuple[Account, float]:
        """The batch's account, and seconds until it is worth asking again; 0.0: a request may begin."""
        account = next((a for a in self.service.keys.accounts if a.name == batch.owner), None)
        if account is None:
            raise RequestError("the API key of the batch is not served any more", code="invalid_api_key")
        service = self.service
        engine_free = service.admission.in_flight < service.engine.info.max_num_seqs
        if batch.expired:
            return account, 0.0
        if account.full or not (engine_free and service.engine.alive and not service.admission.draining):
            return account, POLL_SECONDS
        try:
            account.admit()
        except RequestError as e:
            return account, min(e.retry_seconds or 1, MAX_WAIT_SECONDS)
        return account, 0.0

    async def _answered(self, call: Call, line: Line) -> tuple[int, Any]:
        """Status and body of a request's answer."""
        body = msgspec.json.encode({**line.body, "priority": MAX_PRIORITIES})
        scope = {
            "type": "http",
            "method": "POST",
            "path": line.url,
            "headers": [(b"content-type", JSON.encode())],
            "query_string": b"",
            "app": self._app,
            "body_share": BodyShare(BodyBudget(len(body), len(body)), len(body)),
        }
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            return await asyncio.Event().wait()  # never returns: there is no client that could disconnect

        with entered(call):
            try:
                response = await self._endpoints[line.url](Request(scope, receive))
                return response.status_code, msgspec.Raw(bytes(response.body))
            except Exception as e:
                call.error = e
                errors.log_failure(f"a request of a batch to {line.url}", e)
                return errors.describe(e)


def _ended(seat: Seat, begun: asyncio.Semaphore, task: asyncio.Task[None]) -> None:
    """Called when the task of a request has ended, also if it was cancelled before it began."""
    seat.give()
    begun.release()


def _may_pass(status: int, error: Exception | None) -> bool:
    """Whether the same request may be answered later."""
    if status == 429:  # an `n` above the key's limit never fits
        return isinstance(error, LimitReached) or getattr(error, "code", None) == "too_many_requests"
    return status == 503


def answered(batch: Batch) -> dict[str, tuple[int, list[str]]]:
    """By file: its bytes, and the custom ids of its answers. Truncates an incomplete last line. Blocks on the disk."""
    found = {}
    for end in ANSWERS:
        if not batch.path(end).is_file():
            continue
        size, ids = 0, []
        with open(batch.path(end), "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    size += len(line)
                    ids.append(msgspec.json.decode(line)["custom_id"])
        os.truncate(batch.path(end), size)
        found[end] = (size, ids)
    return found


def _validated(path: Path, endpoint: str) -> tuple[list[dict[str, Any]], int]:
    """(Errors in an input file, up to MAX_ERRORS; number of its lines.) Blocks on the disk."""
    wrong: list[dict[str, Any]] = []
    seen: set[str] = set()
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                line = read_line(raw, endpoint)
                if line.custom_id in seen:
                    raise RequestError(
                        f"custom_id {show(line.custom_id)} comes twice", param="custom_id", code="duplicate_custom_id"
                    )
                seen.add(line.custom_id)
                if len(seen) > MAX_LINES:
                    raise RequestError(f"a batch has at most {MAX_LINES} lines: split it", code="too_many_lines")
            except RequestError as e:
                wrong.append(_error(e, number))
                if len(wrong) == MAX_ERRORS or e.code == "too_many_lines":
                    break
    if not seen and not wrong:
        wrong.append(_error(RequestError("the file has no lines", code="empty_file"), None))
    return wrong, len(seen)


def _error(e: RequestError, line: int | None) -> dict[str, Any]:
    return {"code": e.code, "message": str(e), "param": e.param, "line": line}


def _answer(line: Line, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> dict[str, Any]:
    return {"id": new_id("batch_req"), "custom_id": line.custom_id, "response": response, "error": error}
