"""Limits per client, and the addresses that proxies name."""

import pytest

from perilune.core.errors import ConfigError, RequestError
from perilune.server import limits
from perilune.server.limits import Limit, Limiter, Proxies


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_in_flight_are_counted_by_name() -> None:
    limiter, limit = Limiter(), Limit(concurrent=2)
    ends = [limiter.take("a", limit), limiter.take("a", limit)]
    with pytest.raises(RequestError, match="2 of your requests are in flight") as refused:
        limiter.take("a", limit)
    assert refused.value.status == 429 and refused.value.retry_seconds == 1
    limiter.take("b", limit)
    ends.pop()()
    limiter.take("a", limit)


def test_a_rate_refills_steadily_and_says_when() -> None:
    clock = Clock()
    limiter, limit = Limiter(clock), Limit(requests=30)
    for _ in range(30):
        limiter.take("a", limit)()
    with pytest.raises(RequestError, match="30 requests per minute") as refused:
        limiter.take("a", limit)
    assert refused.value.retry_seconds == 2
    clock.now += 1.9
    with pytest.raises(RequestError):
        limiter.take("a", limit)
    clock.now += 0.2
    limiter.take("a", limit)()
    with pytest.raises(RequestError):
        limiter.take("a", limit)


def test_spent_tokens_delay_later_requests() -> None:
    clock = Clock()
    limiter, limit = Limiter(clock), Limit(tokens=600)
    limiter.take("a", limit)()
    limiter.spend("a", "tokens", 600, 1200)  # known only afterwards
    with pytest.raises(RequestError, match="600 tokens per minute") as refused:
        limiter.take("a", limit)
    assert refused.value.retry_seconds == 61
    clock.now += 61
    limiter.take("a", limit)()


def test_names_are_bounded_and_those_with_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_NAMES", 10)
    limiter, limit = Limiter(), Limit(concurrent=1)
    limiter.take("busy", limit)
    for i in range(50):
        limiter.take(f"n{i}", limit)()
    assert len(limiter._counts) == 10
    with pytest.raises(RequestError):
        limiter.take("busy", limit)


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        ("10.1.2.3", "203.0.113.9", "203.0.113.9"),
        ("10.1.2.3", "1.2.3.4, 203.0.113.9, 10.9.9.9", "203.0.113.9"),  # 1.2.3.4 is the client's own claim
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),  # not trusted: its header is not read
        ("10.1.2.3", "", "10.1.2.3"),
        ("10.1.2.3", "203.0.113.9, unknown", "10.1.2.3"),
        ("10.1.2.3", "[2001:db8::1]:443", "2001:db8::1"),
        ("10.1.2.3", "203.0.113.9:5000", "203.0.113.9"),
        ("unix", "203.0.113.9", "203.0.113.9"),
    ],
)
def test_forwarded_addresses_count_only_from_trusted_peers(peer: str, forwarded: str, client: str) -> None:
    assert Proxies(["10.0.0.0/8", "unix"]).client(peer, forwarded) == client


def test_no_proxy_is_trusted_by_default() -> None:
    assert Proxies(()).client("127.0.0.1", "203.0.113.9") == "127.0.0.1"
    assert Proxies(()).client("unix", "203.0.113.9") == "unix"
    with pytest.raises(ConfigError, match="no address or network"):
        Proxies(["proxy.example.org"])
