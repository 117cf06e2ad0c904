"""Limits per client, and the addresses that proxies name."""

import pytest

from perilune.core.errors import ConfigError, RequestError
from perilune.server import limits
from perilune.server.limits import Limit, Limiter, Meter, Proxies


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_in_flight_are_counted_by_name() -> None:
    limiter = Limiter(Limit(concurrent=2))
    ends = [limiter.take("a"), limiter.take("a")]
    with pytest.raises(RequestError, match="your address may have 2 requests in flight, and has 2") as refused:
        limiter.take("a")
    assert refused.value.status == 429 and refused.value.retry_seconds == 1
    limiter.take("b")
    ends.pop()()
    limiter.take("a")


def test_a_rate_refills_steadily_and_says_when() -> None:
    clock = Clock()
    limiter = Limiter(Limit(requests_per_minute=30), clock)
    for _ in range(30):
        limiter.take("a")()
    with pytest.raises(RequestError, match="30 requests per minute") as refused:
        limiter.take("a")
    assert refused.value.retry_seconds == 2
    clock.now += 1.9
    with pytest.raises(RequestError):
        limiter.take("a")
    clock.now += 0.2
    limiter.take("a")()
    with pytest.raises(RequestError):
        limiter.take("a")


def test_spent_tokens_delay_later_requests() -> None:
    clock = Clock()
    meter = Meter("this API key", "answers", Limit(tokens_per_minute=600), clock)
    meter.admit()
    meter.spend(1200)  # known only afterwards
    with pytest.raises(RequestError, match="600 tokens per minute") as refused:
        meter.admit()
    assert refused.value.retry_seconds == 61
    clock.now += 61
    meter.admit()


def test_a_refused_request_holds_no_room() -> None:
    clock = Clock()
    limiter = Limiter(Limit(concurrent=1, requests_per_minute=60), clock)
    for _ in range(60):
        limiter.take("a")()
    for _ in range(3):
        with pytest.raises(RequestError, match="60 requests per minute: try again in 1 s"):
            limiter.take("a")
    clock.now += 2
    end = limiter.take("a")
    with pytest.raises(RequestError, match="1 requests in flight, and has 1"):
        limiter.take("a")
    end()
    limiter.take("a")()


def test_changed_limits_count_at_once_and_others_keep_their_level() -> None:
    meter = Meter("this API key", "answers", Limit(concurrent=3, requests_per_minute=1, tokens_per_minute=3), Clock())
    meter.take(3), meter.admit()
    meter.renew(Limit(concurrent=1, requests_per_minute=1, tokens_per_minute=4))
    assert [v for k, v in meter.headers() if b"remaining" in k] == [b"0", b"4"]
    for _ in range(3):
        assert meter.full
        meter.take(-1)  # even where more are in flight than the new limit
    assert not meter.full


def test_names_are_bounded_and_those_with_requests_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_NAMES", 10)
    limiter = Limiter(Limit(concurrent=1))
    limiter.take("busy")
    for i in range(50):
        limiter.take(f"n{i}")()
    assert len(limiter._meters) == 10
    with pytest.raises(RequestError):
        limiter.take("busy")


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
