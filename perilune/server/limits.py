"""Limits per client, which client a connection speaks for, and the memory that all bodies may take.

A client is a name: an address (middleware.py) or the name of a key. One Limiter counts any number of names, in bounded
memory.
"""

import ipaddress
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from perilune.core.errors import ConfigError, RequestError

MAX_NAMES = 100_000  # with counts at a time; names beyond that push out names without requests in flight
WINDOW_SECONDS = 60.0
SMALL_BYTES = 64 << 10  # bodies up to this size share SMALL_SHARE of the budget, which large ones never take
SMALL_SHARE = 1 / 8
UNIX = "unix"  # the peer of a Unix socket, in a list of trusted proxies
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Limit:
    """None: no bound. `concurrent` requests in flight; `requests` and `tokens` per minute, refilled steadily."""

    concurrent: int | None = None
    requests: int | None = None
    tokens: int | None = None

    @property
    def bounds(self) -> bool:
        return (self.concurrent, self.requests, self.tokens) != (None, None, None)


@dataclass(slots=True)
class _Count:
    in_flight: int = 0
    used: dict[str, tuple[float, float]] = field(default_factory=dict)  # by unit: (used of the window, when)


class Limiter:
    """Belongs to one event loop. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[str, _Count] = {}

    def take(self, name: str, limit: Limit) -> Callable[[], None]:
        """Counts a request of `name` and returns what ends it, to be called once; RequestError 429 beyond a limit."""
        count = self._count(name)
        if limit.concurrent is not None and count.in_flight >= limit.concurrent:
            raise _refusal(f"{count.in_flight} of your requests are in flight, at most {limit.concurrent} may be", 1)
        for unit, rate, cost in (("requests", limit.requests, 1.0), ("tokens", limit.tokens, 0.0)):
            if rate is None:
                continue
            used = self._used(count, unit, rate)
            if used + max(cost, 1.0) > rate:
                seconds = math.ceil((used + max(cost, 1.0) - rate) * WINDOW_SECONDS / rate)
                raise _refusal(f"your limit of {rate} {unit} per minute is used up", seconds)
        if limit.requests is not None:
            self.spend(name, "requests", limit.requests, 1)
        count.in_flight += 1

        def end() -> None:
            count.in_flight -= 1

        return end

    def spend(self, name: str, unit: str, rate: int, cost: float) -> None:
        """Counts `cost` of a unit with a limit of `rate` per minute. What is beyond the limit delays later requests."""
        count = self._count(name)
        count.used[unit] = (self._used(count, unit, rate) + cost, self._clock())

    def _used(self, count: _Count, unit: str, rate: int) -> float:
        used, since = count.used.get(unit, (0.0, 0.0))
        return max(used - (self._clock() - since) * rate / WINDOW_SECONDS, 0.0)

    def _count(self, name: str) -> _Count:
        count = self._counts.pop(name, None) or _Count()
        self._counts[name] = count  # last: the first names are those not seen for longest
        if len(self._counts) > MAX_NAMES:
            idle = next((n for n, c in self._counts.items() if not c.in_flight and n != name), None)
            if idle is not None:
                del self._counts[idle]
        return count


def _refusal(why: str, seconds: int) -> RequestError:
    return RequestError(
        f"{why}: try again in {seconds} s", code="rate_limit_exceeded", status=429, retry_seconds=seconds
    )


class BodyBudget:
    """The bytes of all bodies in memory. Small bodies have a share of their own, so that large ones, however many,
    leave room for ordinary requests."""

    def __init__(self, limit_bytes: int, largest_bytes: int) -> None:
        """`largest_bytes`: one body of this size always fits an empty budget."""
        self._limits = (int(limit_bytes * SMALL_SHARE), max(int(limit_bytes * (1 - SMALL_SHARE)), largest_bytes))
        self._held = [0, 0]  # by small, large bodies

    @property
    def held(self) -> int:
        return sum(self._held)

    def take(self, size: int) -> None:
        """RequestError 503 if there is no room for `size` bytes."""
        kind = int(size > SMALL_BYTES)
        if self._held[kind] + size > self._limits[kind]:
            raise RequestError(
                "the bodies of other requests fill the memory for them: try again in 2 s",
                code="server_busy",
                status=503,
                retry_seconds=2,
            )
        self._held[kind] += size

    def give(self, size: int) -> None:
        self._held[int(size > SMALL_BYTES)] -= size


class BodyShare:
    """What one body holds of the budget; `limit` is the most bytes it may have. RequestError 413 beyond."""

    def __init__(self, budget: BodyBudget, limit: int) -> None:
        self._budget, self._limit, self._size = budget, limit, 0
        self.released = False

    def hold(self, size: int) -> None:
        """The body has `size` bytes in all."""
        if size > self._limit:
            raise RequestError(
                f"the body is larger than {self._limit / 2**20:g} MiB", code="body_too_large", status=413
            )
        self._budget.give(self._size)
        held, self._size = self._size, 0
        try:
            self._budget.take(size)
        except RequestError:
            self._budget.take(held)
            self._size = held
            raise
        self._size = size

    def grow(self, size: int) -> None:
        """`size` bytes have come of a body without a declared length: what it holds doubles when they need more."""
        if size > self._size:
            self.hold(max(size, min(max(2 * size, 1024), self._limit)))

    def release(self) -> None:
        """Gives it back; more calls change nothing."""
        self.released = True
        self._budget.give(self._size)
        self._size = 0


class Proxies:
    """Addresses and networks that may name the client they speak for in X-Forwarded-For; "unix" for a Unix socket."""

    def __init__(self, trusted: Iterable[str]) -> None:
        """ConfigError for what is no address or network."""
        self._unix = False
        self._networks: list[Network] = []
        for name in trusted:
            if name == UNIX:
                self._unix = True
                continue
            try:
                self._networks.append(ipaddress.ip_network(name))
            except ValueError as e:
                raise ConfigError(
                    f"trusted_proxies: {name!r} is no address or network: write 10.0.0.7, 10.0.0.0/8 or unix"
                ) from e

    def client(self, peer: str, forwarded: str) -> str:
        """The client's address: `peer`, or where that is trusted the last address of `forwarded` that is not.

        `peer` is "unix" for a Unix socket. Entries to the left of the first untrusted address are the client's own
        claims and are not read.
        """
        client = peer
        for entry in reversed(forwarded.split(",")):
            if not self._trusts(client):
                break
            if (address := _address(entry)) is None:
                break
            client = address
        return client

    def _trusts(self, name: str) -> bool:
        if name == UNIX:
            return self._unix
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return any(address in network for network in self._networks)


def _address(entry: str) -> str | None:
    """The address of an entry of X-Forwarded-For, without its port; None if it is none."""
    text = entry.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
