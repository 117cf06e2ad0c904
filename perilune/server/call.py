"""The record of one HTTP request: its id, its key, and what logs, metrics and traces report about it.

The record of the running task is a context variable, because log lines and errors are made far from the request.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from perilune.server.keys import Account, Grant

MAX_TOOLS = 128  # names of called tools that are kept for one answer, at most
MAX_NAME_CHARS = 128
_ID = re.compile(r"[!-~]{1,128}")


@dataclass(slots=True)
class Run:
    """One generation of a request, for logs and traces. Times are time.perf_counter(); 0.0: not yet.

    prompt_tokens  0 for further answers to the same prompt, which is computed once
    ids, prompt    token ids, kept only for an audit log with text
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    queue_seconds: float = 0.0
    finish_reason: str | None = None
    tools: list[str] = field(default_factory=list)
    prompt: Sequence[int] = ()
    ids: list[int] = field(default_factory=list)

    def add_tool(self, name: str) -> None:
        if len(self.tools) < MAX_TOOLS:
            self.tools.append(name[:MAX_NAME_CHARS])


@dataclass(slots=True, eq=False)
class Call:
    """One request. `error`: what the client got instead of an answer, or what ended its stream. `trace`: the request
    headers traceparent and tracestate."""

    account: Account
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    client: str | None = None  # its address
    method: str = ""
    route: str = ""
    status: int = 0
    started: float = field(default_factory=time.perf_counter)
    ended: float = 0.0
    started_ns: int = field(default_factory=time.time_ns)  # Unix time in ns at `started`
    keeps_text: bool = False
    runs: list[Run] = field(default_factory=list)
    error: Exception | None = None
    trace: dict[str, str] = field(default_factory=dict)

    def add(self, run: Run, prompt: Sequence[int]) -> None:
        if self.keeps_text:
            run.prompt = prompt
        self.runs.append(run)

    def apart(self, route: str) -> "Call":
        """A call for background work that this one starts: the same client, key and id."""
        made = Call(self.account, self.id, self.client, self.method, route, keeps_text=self.keeps_text)
        made.trace = self.trace
        return made

    def total(self, name: str) -> int:
        return sum(getattr(run, name) for run in self.runs)


_current: ContextVar[Call] = ContextVar("call")


def current() -> Call:
    """The call of this task; outside of a request an empty one, which no log or metric reports."""
    return _current.get(None) or Call(Account(Grant("")))


def within() -> Call | None:
    """The call of this task, None outside of a request."""
    return _current.get(None)


@contextlib.contextmanager
def entered(call: Call) -> Iterator[None]:
    token = _current.set(call)
    try:
        yield
    finally:
        _current.reset(token)


def request_id(given: str | None) -> str:
    """The client's x-request-id if it is 1 to 128 printable ASCII characters without spaces, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex
