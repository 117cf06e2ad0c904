"""API keys: the key file, the limits of each key and what each key has used.

A key file holds one key and nothing else, or TOML with a table [[key]] per key (docs/operations.md). Keys are compared
by their SHA-256: they are random and long (`perilune key`), so a slow password hash would add no protection.
"""

import hashlib
import hmac
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from perilune.core.errors import ConfigError, RequestError, quoted
from perilune.core.files import open_regular
from perilune.core.sampling import MAX_WHOLE
from perilune.server.limits import Clock, Limit, Meter

MAX_KEYS = 1000  # comparing a key with all of them takes 0.1 ms
MAX_FILE_BYTES = 1 << 20
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_COUNTS = tuple(f.name for f in fields(Limit))


@dataclass(frozen=True, slots=True)
class Grant:
    """What one [[key]] of the key file allows; None: no limit.

    digests      SHA-256 of the accepted keys: two while a new key replaces an old one
    expires      the key is refused from this time on
    models       names of served models it may use
    cache_group  keys of one group share cached KV; other keys share none
    operator     it may read /metrics, and the usage of all keys
    """

    name: str
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    tokens_per_day: int | None = None
    concurrent: int | None = None
    models: tuple[str, ...] | None = None
    expires: datetime | None = None
    cache_group: str | None = None
    operator: bool = False

    @property
    def limit(self) -> Limit:
        return Limit(**{name: getattr(self, name) for name in _COUNTS})


@dataclass(slots=True)
class Usage:
    """Counts since the server's start. `cached_tokens` are part of `input_tokens`, `reasoning_tokens` of
    `output_tokens`."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Account:
    """The state of one key: its limits, its answers in flight and its usage. Belongs to the event loop."""

    def __init__(self, grant: Grant, clock: Clock = time.monotonic) -> None:
        self.usage = Usage()
        self.grant = grant
        self._meter = Meter("this API key", "answers", grant.limit, clock)

    def renew(self, grant: Grant) -> None:
        """Applies a new version of the key's entry."""
        self.grant = grant
        self._meter.renew(grant.limit)

    @property
    def in_flight(self) -> int:
        """Answers that have not ended."""
        return self._meter.in_flight

    @property
    def name(self) -> str:
        """ "" for requests to a server without keys."""
        return self.grant.name

    @property
    def cache_keys(self) -> tuple[str, ...]:
        """The cache keys of this API key's requests (Submit.cache_keys), to which a request may add a salt."""
        if not self.name:
            return ()
        group = self.grant.cache_group
        return (f"key:{self.name}",) if group is None else (f"group:{group}",)

    def admit(self) -> None:
        """Counts a request; LimitReached if the key has no room for it now."""
        self._meter.admit()
        self.usage.requests += 1

    @property
    def full(self) -> bool:
        """Whether no further answer may begin before one ends."""
        return self._meter.full

    def check_model(self, model: str) -> None:
        if self.grant.models is not None and model not in self.grant.models:
            raise RequestError(
                f"this API key may not use the model {model!r}", param="model", code="model_not_allowed", status=403
            )

    def take(self, count: int) -> None:
        self._meter.take(count)

    def begin(self, prompt_tokens: int) -> None:
        """Counts an answer that begins; `prompt_tokens` 0: the prompt was counted with another answer."""
        self.usage.input_tokens += prompt_tokens
        self._meter.spend(prompt_tokens)

    def add_output(self, count: int) -> None:
        self.usage.output_tokens += count
        self._meter.spend(count)

    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._meter.headers()


class Keyring:
    """The accounts of all keys: those of a key file, that of one key, or one for all requests if there are no keys."""

    def __init__(self, key: str | None = None, file: str | None = None) -> None:
        """ConfigError for a file that cannot be used."""
        self.file = None if file is None else Path(file)
        self.since = int(time.time())
        self.open = Account(Grant("", operator=True))  # for all requests if there are no keys, else for OPEN paths
        self._accounts: dict[str, Account] = {}
        if key is not None:
            self._take([_only(key, "api_key")])
        self.load()
        if self.locked:
            self.open.renew(Grant(""))  # requests without a key are no operator's

    def load(self) -> None:
        """Reads the file again. ConfigError if it cannot be used: earlier keys stay. Answers in flight go on."""
        if self.file is not None:
            self._take(read_grants(self.file))

    def _take(self, grants: Iterable[Grant]) -> None:
        accounts = {}
        for grant in grants:
            account = accounts[grant.name] = self._accounts.get(grant.name) or Account(grant)
            account.renew(grant)
        self._accounts = accounts

    @property
    def locked(self) -> bool:
        return bool(self._accounts)

    @property
    def accounts(self) -> list[Account]:
        return list(self._accounts.values()) or [self.open]

    def find(self, given: str) -> Account | None:
        """The account of a key, None for a wrong one; RequestError 401 for one that has expired.

        Takes the same time for every wrong key: the digest is compared with all digests.
        """
        if not given:  # no key at all, though a file may have the digest of ""
            return None
        asked, found = digest(given), None
        for account in self._accounts.values():
            for known in account.grant.digests:
                if hmac.compare_digest(asked, known):
                    found = account
        if found is not None and found.grant.expires is not None and found.grant.expires <= datetime.now(UTC):
            raise RequestError(
                f"this API key expired on {found.grant.expires:%Y-%m-%d %H:%M} UTC: ask for a new one",
                code="expired_api_key",
                status=401,
            )
        return found


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def read_grants(path: Path) -> list[Grant]:
    """The keys of a file. ConfigError, which never quotes a key, names what is wrong and where."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_FILE_BYTES + 1)
        text = raw.decode()
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "it is not UTF-8 text"
        raise ConfigError(f"cannot read the API key file {path}: {why}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"the API key file {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    if len(words := text.split()) == 1 and not words[0].startswith("["):
        return [_only(words[0], f"the API key file {path}")]
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as e:  # ValueError: also numbers of thousands of digits
        raise ConfigError(
            f"the API key file {path} must hold one key without spaces, or a TOML table [[key]] per key "
            f"(make one with `perilune key NAME`): {_place(str(e))}"
        ) from None
    entries = tables.get("key")
    if set(tables) != {"key"} or not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"the API key file {path} must hold a table [[key]] per key, and nothing else")
    if not 0 < len(entries) <= MAX_KEYS:
        raise ConfigError(f"the API key file {path} holds {len(entries)} keys: 1 to {MAX_KEYS} can be served")
    grants = [_grant(entry, f"the API key file {path}, [[key]] number {i}") for i, entry in enumerate(entries, 1)]
    names = [g.name for g in grants]
    digests = [d for g in grants for d in g.digests]
    if repeated := {n for n in names if names.count(n) > 1}:
        raise ConfigError(f"the API key file {path} has two keys of the name {min(repeated)!r}: give each its own")
    if len(set(digests)) < len(digests):
        raise ConfigError(f"the API key file {path} has the same sha256 twice: make a new key")
    return grants


def _only(key: str, where: str) -> Grant:
    """The grant of a server's single key. ConfigError for one that no client can send."""
    if not key or any(c.isspace() for c in key):
        raise ConfigError(f"{where} must be one key without spaces")
    if not key.isascii():
        raise ConfigError(f"{where} holds a key with a character beyond ASCII, which no header can carry")
    return Grant("default", (digest(key),), operator=True)


def readable_by_others(path: Path) -> bool:
    return bool(os.stat(path).st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _place(message: str) -> str:
    """Where a TOML error is; not the rest of the message, which may quote the file."""
    found = re.search(r"at (line \d+|end of document)", message)
    return f"not TOML at {found[1]}" if found else "not TOML"


def _grant(entry: dict[str, Any], where: str) -> Grant:
    known = {f.name for f in fields(Grant)} - {"digests"} | {"sha256"}
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"{where}: unknown field {quoted(unknown[0])}; known: {', '.join(sorted(known))}")
    name, sums = entry.get("name"), entry.get("sha256")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"{where}: name must be 1 to 64 letters, digits, '.', '_' or '-'")
    sums = [sums] if isinstance(sums, str) else sums
    if not isinstance(sums, list) or not sums or not all(isinstance(s, str) and _DIGEST.fullmatch(s) for s in sums):
        raise ConfigError(f"{where}: sha256 must be the 64 hex digits that `perilune key` prints, or a list of such")
    for limit in _COUNTS:
        if limit in entry and (type(entry[limit]) is not int or not 1 <= entry[limit] <= MAX_WHOLE):
            raise ConfigError(f"{where}: {limit} must be a whole number of at least 1, and of 64 bits")
    models, group = entry.get("models"), entry.get("cache_group")
    if models is not None and not (isinstance(models, list) and all(isinstance(m, str) for m in models)):
        raise ConfigError(f"{where}: models must be a list of names")
    if group is not None and not (isinstance(group, str) and NAME.fullmatch(group)):
        raise ConfigError(f"{where}: cache_group must be 1 to 64 letters, digits, '.', '_' or '-'")
    if not isinstance(entry.get("operator", False), bool):
        raise ConfigError(f"{where}: operator must be true or false")
    return Grant(
        name,
        tuple(bytes.fromhex(s) for s in sums),
        models=None if models is None else tuple(models),
        expires=_moment(entry.get("expires"), where),
        cache_group=group,
        operator=entry.get("operator", False),
        **{limit: entry.get(limit) for limit in _COUNTS},
    )


def _moment(value: Any, where: str) -> datetime | None:
    """The time at which a key expires. A date means its first moment; times without a zone are UTC."""
    if isinstance(value, datetime):
        try:
            return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)
        except OverflowError:
            why = "expires must be in the years 1 to 9999 of UTC: leave it out for a key that does not expire"
            raise ConfigError(f"{where}: {why}") from None
    if isinstance(value, date):
        return datetime(value.year, value.month, value.day, tzinfo=UTC)
    if value is not None:
        raise ConfigError(f"{where}: expires must be a TOML date or time without quotation marks, as 2027-01-31")
    return None
