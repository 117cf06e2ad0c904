"""API keys: the file, the limits of each, and that no key sees anything of another's."""

import asyncio
import functools
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from perilune.cli import key as key_verb
from perilune.core.config import ServerConfig, build
from perilune.core.errors import ConfigError, RequestError
from perilune.grammar import matcher as matching
from perilune.server import keys
from perilune.server.keys import Account, Grant, Keyring, digest
from perilune.server.limits import Bucket, LimitReached
from perilune.server.reload import Watched
from perilune.server.responses.store import ResponseStore
from tests.serving import CHAT, HELLO, TEXT, Reply, Served, serve, served

RESPONSES = "/v1/responses"


def entry(name: str, **limits: Any) -> str:
    """A [[key]] for the key `plk-NAME`."""
    lines = [f'name = "{name}"', f'sha256 = "{hashlib.sha256(f"plk-{name}".encode()).hexdigest()}"']
    lines += [f"{k} = {v}" for k, v in limits.items()]
    return "\n".join(["[[key]]", *lines, ""])


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer plk-{name}"}


def form(reference: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": reference}}}


async def ask(s: Served, name: str, path: str = CHAT, **body: Any) -> Reply:
    s.client.headers = bearer(name)
    default: dict[str, Any] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "ab"}, RESPONSES: {"input": "Hi"}}[path]
    return await s.client.post(path, {**default, **body})


def write(path: Path, *entries: str) -> str:
    path.write_text("\n".join(entries))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.toml"


def with_keys(test: Callable[[Served], Coroutine[Any, Any, None]], file: Path, *entries: str, **setup: Any) -> None:
    serve(test, api_key_file=write(file, *entries), **setup)


keyed = functools.partial(served, by=with_keys, takes=["file"])


# ---- the file


def test_the_verb_makes_a_key_that_its_entry_lets_in(file: Path) -> None:
    made = [CliRunner().invoke(key_verb.command, [name]) for name in ("alice", "bob")]
    file.write_text("".join(m.stdout for m in made))
    ring = Keyring(file=str(file))
    for m, name in zip(made, ("alice", "bob")):
        secret = m.stderr.split()[-1]
        found = ring.find(secret)
        assert found is not None and found.name == name and secret not in m.stdout and len(secret) >= 40
        assert ring.find(secret[:-1]) is None and ring.find("") is None
    with pytest.raises(ConfigError, match="NAME"):
        CliRunner().invoke(key_verb.command, ["a b"], catch_exceptions=False, standalone_mode=False)


def test_a_file_with_one_line_is_one_key_that_may_do_everything(file: Path) -> None:
    file.write_text("s3cret\n")
    ring = Keyring(file=str(file))
    found = ring.find("s3cret")
    assert found is not None and found.grant.operator and found.name == "default"
    assert not ring.open.grant.operator


SUM = "0" * 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "one key without spaces|nothing else"),
        ("hunter2 hunter3", "one key without spaces"),
        ("hunter2\u2026", "a character beyond ASCII"),
        ('[[key]]\nname = "a"\nsha256 = "hunter2"', "number 1: sha256 must be"),
        (f'[[key]]\nsha256 = "{SUM}"', "name must be"),
        (f'[[key]]\nname = "a\\nb"\nsha256 = "{SUM}"', "name must be"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\nrate = 3', "unknown field 'rate'; known: cache_group"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\nconcurrent = 0', "concurrent must be a whole number"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\ntokens_per_day = true', "tokens_per_day"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\nexpires = "2027"', "without quotation marks"),
        (entry("a", expires="9999-12-31T23:59:59-05:00"), "in the years 1 to 9999"),
        (entry("a", tokens_per_day="9" * 400), "tokens_per_day must be a whole number"),
        (entry("a", tokens_per_day="9" * 5000), "not TOML"),
        (entry("a", models="[" * 5000 + "]" * 5000), "not TOML"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\nmodels = "m"', "models must be a list"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\ncache_group = 1', "cache_group"),
        (f'[[key]]\nname = "a"\nsha256 = "{SUM}"\noperator = 1', "operator must be"),
        ('[[key]]\nname = "a"\nsha256 = hunter2', "not TOML at line 3"),
        (entry("a") + entry("a"), "two keys of the name 'a'"),
        (entry("a") + entry("a").replace('"a"', '"b"'), "same sha256 twice"),
        ("key = 3", "a table"),
        (entry("a") + "[other]", "nothing else"),
    ],
)
def test_what_is_wrong_with_a_file_is_named_without_its_secrets(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as refused:
        Keyring(file=str(file))
    assert "hunter" not in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["", " ", "hunter 2", "hunter2\n"])
def test_an_empty_key_does_not_let_requests_without_one_in(key: str, file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^api_key must be one key without spaces$"):
        Keyring(key)
    file.write_text(f'[[key]]\nname = "a"\nsha256 = "{keys.digest("").hex()}"\n')
    assert Keyring(file=str(file)).find("") is None


def test_a_file_is_bounded_and_regular(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "MAX_KEYS", 2)
    with pytest.raises(ConfigError, match="holds 3 keys"):
        Keyring(file=write(file, *(entry(f"k{i}") for i in range(3))))
    monkeypatch.setattr(keys, "MAX_FILE_BYTES", 100)
    with pytest.raises(ConfigError, match="larger than"):
        Keyring(file=str(file))
    os.mkfifo(file.with_name("fifo"))
    with pytest.raises(ConfigError, match="cannot read"):
        Keyring(file=str(file.with_name("fifo")))


def test_every_digest_is_compared_and_by_a_comparison_of_constant_time(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, seen = Keyring(file=write(file, *(entry(n) for n in "abc"))), []
    real = keys.hmac.compare_digest

    def counted(one: bytes, other: bytes) -> bool:
        seen.append((one, other))
        return real(one, other)

    monkeypatch.setattr(keys.hmac, "compare_digest", counted)
    for name in "axc":
        ring.find(f"plk-{name}")
    assert len(seen) == 9 and all(len(one) == len(other) == 32 for one, other in seen)


def test_a_changed_file_is_read_again_and_a_bad_one_is_not(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    ring = Keyring(file=write(file, entry("a", requests_per_minute=5), entry("b")))
    watched = Watched("API key file", [file], ring.load)
    a = ring.find("plk-a")
    assert a is not None
    a.admit()
    with caplog.at_level(logging.INFO):
        watched.poll()
        assert not caplog.records
        write(file, entry("a", requests_per_minute=5, concurrent=1), entry("cc"))
        watched.poll()
        assert ring.find("plk-b") is None and ring.find("plk-cc") is not None
        assert ring.find("plk-a") is a and a.usage.requests == 1 and a.grant.concurrent == 1
        assert (b"x-ratelimit-remaining-requests", b"4") in a.headers(), "a reload must not refill a limit"
        file.write_text("half a fi")
        watched.poll()
        watched.poll()
        assert ring.find("plk-cc") is not None
        file.unlink()
        watched.poll()
        assert ring.find("plk-cc") is not None
        watched.poll(force=True)
    said = [r.levelname for r in caplog.records]
    assert said == ["INFO", "ERROR", "ERROR", "ERROR"] and "plk" not in caplog.text


def test_a_file_that_becomes_readable_is_read(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another mode or owner changes neither the time of the contents nor the size."""
    ring = Keyring(file=write(file, entry("a")))
    new = file.with_name("new")
    write(new, entry("b"))

    def load() -> None:  # as root, tests can read every file
        if not file.stat().st_mode & 0o400:
            raise ConfigError("Permission denied")
        ring.load()

    watched = Watched("API key file", [file], load)
    new.chmod(0o000)
    new.rename(file)
    watched.poll()
    assert "Permission denied" in caplog.text and ring.find("plk-a") is not None
    file.chmod(0o600)
    watched.poll()
    assert ring.find("plk-a") is None and ring.find("plk-b") is not None


def test_two_sums_let_two_keys_in_while_one_replaces_the_other(file: Path) -> None:
    sums = [digest(f"plk-{n}").hex() for n in ("old", "new")]
    file.write_text(f'[[key]]\nname = "a"\nsha256 = {sums}\n')
    ring = Keyring(file=str(file))
    assert ring.find("plk-old") is ring.find("plk-new") is not None


# ---- limits


def test_a_bucket_refills_evenly_and_may_be_in_debt() -> None:
    now = [0.0]
    bucket = Bucket(60, 60, lambda: now[0])
    bucket.spend(60)
    assert bucket.wait_seconds() == pytest.approx(1.0)
    bucket.spend(30)
    assert bucket.wait_seconds() == pytest.approx(31.0)
    now[0] = 31.0
    assert bucket.wait_seconds() == 0.0
    now[0] = 1e6
    assert bucket.level == 60


def test_a_day_of_tokens_is_a_limit_of_its_own() -> None:
    now = [0.0]
    account = Account(Grant("a", tokens_per_minute=100, tokens_per_day=150), lambda: now[0])
    account.admit()
    account.begin(100)
    account.add_output(60)
    with pytest.raises(LimitReached, match="100 tokens per minute"):
        account.admit()
    now[0] = 120.0
    with pytest.raises(LimitReached, match="150 tokens per day") as refused:
        account.admit()
    assert refused.value.retry_seconds > 3600


def test_limits_answer_429_with_the_seconds_to_wait(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "Account", functools.partial(Account, clock=lambda: 1000.0))  # no time passes

    async def test(s: Served) -> None:
        first = await ask(s, "rate")
        assert first.status == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await ask(s, "rate")).status == 200
        refused = await ask(s, "rate")
        assert refused.status == 429 and refused.error["code"] == "rate_limit_exceeded"
        assert refused.headers["retry-after"] == "30" and "2 requests per minute" in refused.error["message"]
        assert (await s.client.get("/v1/models")).status == 200, "only what costs something is counted"

        assert (await ask(s, "tokens")).status == 200
        refused = await ask(s, "tokens")
        assert refused.status == 429 and "10 tokens per minute" in refused.error["message"]
        assert refused.headers["x-ratelimit-remaining-tokens"] == "0"
        s.client.headers = {"x-api-key": "plk-tokens"}
        claude = await s.client.post("/v1/messages", {"messages": HELLO, "max_tokens": 5})
        assert claude.status == 429 and claude.json["error"]["type"] == "rate_limit_error"

        assert (await ask(s, "free")).status == 200, "a limit is one key's"

    texts = entry("rate", requests_per_minute=2), entry("tokens", tokens_per_minute=10), entry("free")
    serve(test, api_key_file=write(file, *texts))


@keyed(entry("a", concurrent=2), entry("b"), hold=1)
async def test_answers_in_flight_are_limited_by_key(s: Served) -> None:
    calls = [asyncio.create_task(ask(s, "a")) for _ in range(2)]
    await s.hangs(2)
    refused = await ask(s, "a")
    assert refused.status == 429 and "2 answers in flight" in refused.error["message"]
    assert (await ask(s, "a", n=2)).status == 429
    other = asyncio.create_task(ask(s, "b"))
    await s.hangs(3)
    s.engine.release.set()
    for call in (*calls, other):
        assert (await call).status == 200
    assert (await ask(s, "a", n=2)).status == 200
    refused = await ask(s, "a", n=3)
    assert refused.status == 429 and refused.error["message"].endswith("asks for 3: split it")


@keyed(entry("other", models='["x"]'), entry("mine", models='["m"]'), entry("late", expires="2020-01-02"))
async def test_a_key_is_bound_to_models_and_to_a_time(s: Served) -> None:
    for path in (CHAT, TEXT, RESPONSES):
        for name in ({}, {"model": "m"}):
            refused = await ask(s, "other", path, **name)
            assert refused.status == 403 and refused.error["code"] == "model_not_allowed"
            assert refused.error["type"] == "permission_error"
    assert (await s.client.get("/v1/models")).json["data"] == []
    assert (await ask(s, "mine")).status == 200
    late = await ask(s, "late")
    assert late.status == 401 and late.error["code"] == "expired_api_key" and "2020-01-02" in late.error["message"]
    assert late.headers["www-authenticate"] == "Bearer"
    assert not s.engine.seen[1:]


def test_times_without_a_zone_are_utc(file: Path) -> None:
    soon = datetime.now(UTC) + timedelta(minutes=5)
    for text in (f"{soon:%Y-%m-%dT%H:%M:%S}", f"{soon:%Y-%m-%d %H:%M:%S}Z"):
        assert Keyring(file=write(file, entry("a", expires=text))).find("plk-a") is not None
    past = soon - timedelta(minutes=6)
    with pytest.raises(RequestError, match="expired"):
        Keyring(file=write(file, entry("a", expires=f"{past:%Y-%m-%dT%H:%M:%S}"))).find("plk-a")


# ---- what keys cannot see


IN_GROUPS = entry("a"), entry("b"), entry("c", cache_group='"team"'), entry("d", cache_group='"team"')


@keyed(*IN_GROUPS)
async def test_keys_share_cached_kv_only_in_a_group(s: Served) -> None:
    for path in (CHAT, TEXT, RESPONSES):
        for name, salt, expected in (
            ("a", None, ("key:a",)),
            ("b", None, ("key:b",)),
            ("b", "a", ("key:b", "salt:a")),
            ("c", None, ("group:team",)),
            ("d", None, ("group:team",)),
        ):
            assert (await ask(s, name, path, cache_salt=salt)).status == 200
            assert s.engine.cache_keys[-1] == expected


@keyed(*IN_GROUPS, answer='{"unheard_of":1}')
async def test_keys_share_compiled_grammars_only_in_a_group(s: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that has been compiled for another key takes as long as a new one."""
    compiled: list[str] = []
    matcher = matching.Matcher

    def counted(known: Any, grammar: str, group: str) -> Any:
        compiled.append(group)
        return matcher(known, grammar, group)

    monkeypatch.setattr(matching, "Matcher", counted)
    schema = {"type": "object", "properties": {"unheard_of": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for name, count, group in (("a", 1, "key:a"), ("a", 0, "key:a"), ("b", 1, "key:b"), ("c", 1, "group:team"),
                               ("d", 0, "group:team")):  # fmt: skip
        compiled.clear()
        assert (await ask(s, name, response_format=form)).status == 200
        assert compiled == [group] * count
        constraint = s.engine.constraints[-1]
        assert constraint is not None and constraint.group == group  # so it is in the engine's process


@keyed(entry("a"), entry("b", cache_group='"a"'), answer="</think>Hello")
async def test_stored_responses_do_not_exist_for_other_keys(s: Served) -> None:
    made = (await ask(s, "a", RESPONSES)).json
    mine, item = made["id"], {"type": "item_reference", "id": made["output"][0]["id"]}
    absent = mine[:-1] + ("0" if mine[-1] != "0" else "1")
    for id in (mine, absent):
        s.client.headers = bearer("b")
        for method in ("GET", "DELETE"):
            reply = await s.client.request(method, f"{RESPONSES}/{id}", [b""])
            assert reply.status == 404 and reply.error["message"].replace(id, "") == (
                "response '' is not stored here (never was, deleted, or dropped for newer ones): "
                "send the conversation as input"
            )
        assert (await ask(s, "b", RESPONSES, previous_response_id=id)).status == 404
    refused = await ask(s, "b", RESPONSES, input=[item])
    assert refused.status == 404 and "not found" in refused.error["message"]
    s.client.headers = bearer("a")
    assert (await s.client.get(f"{RESPONSES}/{mine}")).json["id"] == mine
    assert (await ask(s, "a", RESPONSES, previous_response_id=mine)).status == 200
    more = {"role": "user", "content": "More"}
    assert (await ask(s, "a", RESPONSES, input=[item, more])).status == 200


def test_a_key_cannot_push_out_the_responses_of_another() -> None:
    store = ResponseStore(max_responses=10)
    store.put("small", "s", {"id": "s"}, [], None)
    for i in range(50):
        store.put("big", f"b{i}", {"id": i}, [{"content": "x" * 50}], None)
    assert len(store) == 10 and store.get("small", "s") == b'{"id":"s"}'


@keyed(entry("a"), entry("root", operator="true"), answer="ab</think>Hel")
async def test_usage_is_a_keys_own_and_all_are_the_operators(s: Served) -> None:
    assert (await ask(s, "a", TEXT, prompt="abc", n=2)).status == 200
    prompt = 3
    body = {"messages": HELLO, "stream": True}
    s.client.headers = bearer("a")
    chat = await s.client.post(CHAT, body)
    assert chat.status == 200
    (shown,) = (await s.client.get("/v1/usage")).json["data"]
    chat_prompt = len(s.engine.seen[-1][0])
    assert shown["key"] == "a" and shown["requests"] == 2 and shown["in_flight"] == 0
    assert shown["input_tokens"] == prompt + chat_prompt, "two answers to one prompt read it once"
    assert shown["cached_tokens"] == 6 and shown["output_tokens"] == 3 * 7
    assert shown["reasoning_tokens"] == 2
    assert (await s.client.get("/metrics")).status == 403
    s.client.headers = bearer("root")
    everything = (await s.client.get("/v1/usage")).json
    assert [u["key"] for u in everything["data"]] == ["a", "root"] and everything["since"] > 1e9
    page = (await s.client.get("/metrics")).text
    assert f'perilune_key_tokens_total{{key="a",kind="input"}} {prompt + chat_prompt}.0' in page
    assert 'perilune_key_requests_total{key="root"} 0.0' in page


@served()
async def test_usage_of_a_server_without_keys(s: Served) -> None:
    await s.client.post(TEXT, {"prompt": "abc"})
    (shown,) = (await s.client.get("/v1/usage")).json["data"]
    assert shown["key"] is None and shown["requests"] == 1 and shown["input_tokens"] == 3


@keyed(entry("a", concurrent=1), hold=1)
async def test_a_client_that_leaves_gives_its_room_back(s: Served) -> None:
    leave = asyncio.Event()
    s.client.headers = bearer("a")
    call = asyncio.create_task(s.client.post(CHAT, {"messages": HELLO, "stream": True}, leave=leave))
    await s.hangs()
    leave.set()
    await call
    s.engine.hold = None
    assert (await ask(s, "a")).status == 200


# ---- secrets, peers and files


def test_no_error_of_the_configuration_shows_a_key() -> None:
    assert "s3cret" not in repr(ServerConfig(api_key="s3cret"))
    with pytest.raises(ConfigError, match="api_key must be a string, not int") as refused:
        build(ServerConfig, {"api_key": 53535353})
    assert "5353" not in str(refused.value)


_opened: list[tuple[str, Any]] = []
_watching = False


def _audit(event: str, args: Any) -> None:
    if _watching and event in ("open", "socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.exec"):
        _opened.append((event, args))


def test_no_request_names_a_file_or_a_peer() -> None:
    """Whatever a body says, nothing is opened and nothing is connected to."""
    files = ["file:///etc/passwd", "/etc/passwd", "http://192.0.2.1/x", "../../etc/passwd"]
    refused: list[int] = []

    async def test(s: Served) -> None:
        global _watching
        await ask(s, "a")  # what is imported late is imported now
        for name in files:
            part = {"type": "image_url", "image_url": {"url": name}}
            for body in (
                {"messages": [{"role": "user", "content": [part]}]},
                {"messages": HELLO, "model": name},
                {"messages": HELLO, "kv_transfer_params": {"remote_host": name, "remote_port": 1}},
                {"messages": HELLO, "lora_path": name},
                {"messages": HELLO, "chat_template": name},
                {"messages": HELLO, "tools": [{"type": "mcp", "server_url": name}]},
                {"messages": HELLO, "response_format": form(name)},
            ):
                _watching = True
                try:
                    reply = await s.client.post(CHAT, body)
                finally:
                    _watching = False
                refused.append(reply.status)
                assert 400 <= reply.status < 500, (body, reply.text)

    sys.addaudithook(_audit)
    serve(test)
    assert len(refused) == 28 and not _opened
