"""Limits of each client, the client's address behind proxies, and the memory that all bodies together may take.

A client is an API key (keys.py) or an address (middleware.py). A Meter counts its requests in flight and its usage.
"""

import ctypes
import ipaddress
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from perilune.core.errors import ConfigError, RequestError

BACKLOG_CONNECTIONS = 2048  # not yet accepted
MAX_NAMES = 100_000  # addresses with meters; one more replaces the least recently used without requests in flight
MINUTE_SECONDS, DAY_SECONDS = 60, 86_400
SMALL_BYTES = 64 << 10  # bodies up to this size share SMALL_SHARE of the budget, which large ones never take
SMALL_SHARE = 1 / 8
MAPPED_BYTES = 1 << 20  # malloc uses mmap for blocks from this size on. Smaller: more page faults.
_M_MMAP_THRESHOLD = -3  # the parameter of mallopt(3)
UNIX = "unix"  # name of a Unix socket's peer in the list of trusted proxies
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Clock = Callable[[], float]


class LimitReached(RequestError):
    """A client's limit is reached: 429. The same request may pass `wait_seconds` from now."""

    def __init__(self, message: str, wait_seconds: float) -> None:
        seconds = max(math.ceil(wait_seconds), 1)
        message = f"{message}: try again in {seconds} s"
        super().__init__(message, code="rate_limit_exceeded", status=429, retry_seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Limits of one client; None: no limit. `concurrent`: an address' requests, or a key's answers, in flight."""

    concurrent: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None

    @property
    def rates(self) -> dict[str, tuple[int, int]]:
        """(amount, seconds) of each limited rate, by name."""
        rates = {
            "requests_per_minute": (self.requests_per_minute, MINUTE_SECONDS),
            "tokens_per_minute": (self.tokens_per_minute, MINUTE_SECONDS),
            "tokens_per_day": (self.tokens_per_day, DAY_SECONDS),
        }
        return {name: (amount, seconds) for name, (amount, seconds) in rates.items() if amount is not None}

    @property
    def bounds(self) -> bool:
        return self != Limit()


class Bucket:
    """A token bucket: up to `amount` may be spent at once, and it refills evenly over `seconds`. Its level may be
    negative, because the tokens of an answer are counted after they were generated."""

    __slots__ = ("_at", "_clock", "_level", "amount", "seconds")

    def __init__(self, amount: int, seconds: float, clock: Clock) -> None:
        self.amount = amount
        self.seconds = seconds
        self._clock = clock
        self._level, self._at = float(amount), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self.amount / self.seconds, self.amount)
        self._at = now
        return self._level

    def spend(self, count: int) -> None:
        self._level = self.level - count

    def wait_seconds(self) -> float:
        """Seconds until 1 may be spent; 0.0: now."""
        return max(1 - self.level, 0.0) * self.seconds / self.amount


class Meter:
    """What one client has in flight and has used. Belongs to one event loop. `who` and `what` are words of errors:
    "this API key" may have at most 4 "answers" in flight."""

    __slots__ = ("_clock", "_concurrent", "_rates", "_tokens", "_what", "_who", "in_flight")

    def __init__(self, who: str, what: str, limit: Limit, clock: Clock = time.monotonic) -> None:
        self.in_flight = 0
        self._who, self._what, self._clock = who, what, clock
        self._rates: dict[str, Bucket] = {}
        self.renew(limit)

    def renew(self, limit: Limit) -> None:
        """Changes the limits; one that has not changed keeps its level."""
        before, self._rates = self._rates, {}
        for name, (amount, seconds) in limit.rates.items():
            kept = before.get(name)
            if kept is None or kept.amount != amount:
                kept = Bucket(amount, seconds, self._clock)
            self._rates[name] = kept
        self._concurrent = limit.concurrent
        self._tokens = tuple(bucket for name, bucket in self._rates.items() if name.startswith("tokens"))

    def admit(self) -> None:
        """Counts a request; LimitReached if a rate has no room for it now."""
        for name, bucket in self._rates.items():
            if wait := bucket.wait_seconds():
                raise LimitReached(f"{self._who} may use {bucket.amount} {name.replace('_', ' ')}", wait)
        if requests := self._rates.get("requests_per_minute"):
            requests.spend(1)

    def take(self, count: int) -> None:
        """Takes room for `count` more in flight; LimitReached if there is none. `take(-count)` releases it."""
        limit = self._concurrent
        if limit is not None and count > limit:
            why = f"{self._who} may have {limit} {self._what} in flight, and this request asks for {count}: split it"
            raise RequestError(why, code="rate_limit_exceeded", status=429)
        if count > 0 and limit is not None and self.in_flight + count > limit:
            raise LimitReached(f"{self._who} may have {limit} {self._what} in flight, and has {self.in_flight}", 1)
        self.in_flight += count

    @property
    def full(self) -> bool:
        return self._concurrent is not None and self.in_flight >= self._concurrent

    def spend(self, tokens: int) -> None:
        """Counts tokens. Those beyond a limit delay later requests."""
        for bucket in self._tokens:
            bucket.spend(tokens)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* of the limits per minute."""
        found = []
        for kind in ("requests", "tokens"):
            if (bucket := self._rates.get(f"{kind}_per_minute")) is not None:
                level = max(int(bucket.level), 0)
                full_seconds = (bucket.amount - bucket.level) * bucket.seconds / bucket.amount
                for word, value in (
                    ("limit", str(bucket.amount)),
                    ("remaining", str(level)),
                    ("reset", f"{math.ceil(full_seconds)}s"),
                ):
                    found.append((f"x-ratelimit-{word}-{kind}".encode(), value.encode()))
        return found


class Limiter:
    """One limit for each of any number of addresses, in bounded memory."""

    def __init__(self, limit: Limit, clock: Clock = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._meters: dict[str, Meter] = {}

    def take(self, name: str) -> Callable[[], None]:
        """Counts a request of `name`; LimitReached beyond a limit. Call the result once, when the request has ended."""
        meter = self._meter(name)
        meter.take(1)
        try:
            meter.admit()
        except LimitReached:
            meter.take(-1)
            raise
        return lambda: meter.take(-1)

    def _meter(self, name: str) -> Meter:
        meter = self._meters.pop(name, None) or Meter("your address", "requests", self._limit, self._clock)
        self._meters[name] = meter  # moved to the end: the first names are the least recently used
        if len(self._meters) > MAX_NAMES:
            idle = next((n for n, m in self._meters.items() if not m.in_flight and n != name), None)
            if idle is not None:
                del self._meters[idle]
        return meter


def keep_bodies_apart() -> None:
    """Makes malloc use mmap for every block of MAPPED_BYTES or more, so that bodies take only the memory that
    BodyBudget counts, and freeing them returns it. By default glibc puts blocks of up to 32 MB on its heap once one of
    them was freed: three bodies of 31 MB that grew at once fragmented the heap and took up to 200 MB. No effect without
    glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


class BodyBudget:
    """The bytes of all bodies in memory. Small bodies have their own share, so that any number of large ones leaves
    room for ordinary requests."""

    def __init__(self, limit_bytes: int, largest_bytes: int) -> None:
        """`largest_bytes`: one body of this size always fits an empty budget."""
        self._limits = (int(limit_bytes * SMALL_SHARE), max(int(limit_bytes * (1 - SMALL_SHARE)), largest_bytes))
        self._held = [0, 0]  # bytes of small and of large bodies

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
    """The part of the budget that one body holds. RequestError 413 if the body has more than `limit` bytes."""

    def __init__(self, budget: BodyBudget, limit: int) -> None:
        self._budget, self._limit, self._size = budget, limit, 0
        self.released = False

    def hold(self, size: int) -> None:
        """Holds `size` bytes, the whole body, instead of the part held before."""
        if size > self._limit:
            raise RequestError(
                f"the body is larger than {self._limit / 2**20:g} MiB: send less (serve --max-body-mb N allows more)",
                code="body_too_large",
                status=413,
            )
        self._budget.give(self._size)
        try:
            self._budget.take(size)
        except RequestError:
            self._budget.take(self._size)
            raise
        self._size = size

    def grow(self, size: int) -> None:
        """`size` bytes of a body without a declared length have come. The held part doubles when it is too small."""
        if size > self._size:
            self.hold(max(size, min(max(2 * size, 1024), self._limit)))

    def release(self) -> None:
        """Releases the held part; calling it again has no effect."""
        self.released = True
        self._budget.give(self._size)
        self._size = 0


class Proxies:
    """Trusted proxies: peers from these addresses and networks may name their client in X-Forwarded-For. "unix": the
    peers of a Unix socket may."""

    def __init__(self, trusted: Iterable[str]) -> None:
        """ConfigError for a name that is no address or network."""
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
        """The client's address: `peer`, or if `peer` is trusted, the last untrusted address of `forwarded`.

        `peer` is "unix" for a Unix socket. Entries to the left of that address are the client's own claims and are not
        read.
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
    """The address of an entry of X-Forwarded-For, without its port; None if the entry is no address."""
    text = entry.strip().strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None
