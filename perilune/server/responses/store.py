"""Finished responses, kept in memory so that a client can continue or fetch them by id."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from perilune.core.errors import RequestError

MAX_RESPONSES = 8192
MAX_BYTES = 256 << 20
_ID_BYTES = 400  # memory of one item's id in the index, about


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as JSON, the chat messages it added to the conversation (the request's own and the answer), the
    request's items, and the ids of all items. `messages` is None where there is no answer: nothing can continue it."""

    response: bytes
    messages: bytes | None
    previous: str | None
    items: bytes
    ids: frozenset[str]

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages or b"") + len(self.items) + _ID_BYTES * len(self.ids)


class _Named(msgspec.Struct):
    id: Any = None


@dataclass(slots=True)
class _Shelf:
    """The responses of one owner, least recently used first, and by an item's id those that have the item."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    holders: dict[str, dict[str, None]] = field(default_factory=dict)
    bytes: int = 0


class ResponseStore:
    """At most `max_responses` responses of at most `max_bytes` together. Each belongs to the API key (`owner`) that
    requested it, and does not exist for any other.

    A response stores only its own turn, so that a conversation of n turns takes n turns of memory, not n squared. Using
    a response marks all that it continues as used after it, so a conversation is dropped from its end. When the store
    is full, the owner with the most responses or bytes loses its least recently used one: no key can evict those of
    others.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}  # by owner; none is empty

    def __len__(self) -> int:
        return sum(len(shelf.entries) for shelf in self._shelves.values())

    @property
    def size_bytes(self) -> int:
        return sum(shelf.bytes for shelf in self._shelves.values())

    def put(
        self,
        owner: str,
        id: str,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any] | msgspec.Raw] | None,
        previous: str | None,
        items: Sequence[msgspec.Raw] = (),
        ids: Iterable[str] = (),
    ) -> None:
        """Stores a response. `messages`: those that it added to the conversation; `previous`: the id of the response
        that it continues; `items`: those that the request sent, with their `ids`."""
        added = None if messages is None else msgspec.json.encode(messages)
        named = frozenset((*ids, *(item["id"] for item in response.get("output", ()))))
        entry = Stored(msgspec.json.encode(response), added, previous, msgspec.json.encode(items), named)
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.entries[id] = entry
        for item in named:
            shelf.holders.setdefault(item, {})[id] = None
        shelf.bytes += entry.size
        self._touch(owner, id)
        while (many := len(self) > self.max_responses) or self.size_bytes > self.max_bytes:
            _, largest = max((len(shelf.entries) if many else shelf.bytes, o) for o, shelf in self._shelves.items())
            self._forget(largest, next(iter(self._shelves[largest].entries)))

    def get(self, owner: str, id: str) -> bytes:
        """The response as JSON; RequestError 404 if the owner has none of this id."""
        self._touch(owner, id)
        return self._entry(owner, id, "response_id").response

    def items(self, owner: str, id: str) -> bytes:
        """The items that the request sent, a JSON list; RequestError 404 as in `get`."""
        self._touch(owner, id)
        return self._entry(owner, id, "response_id").items

    def delete(self, owner: str, id: str) -> None:
        """Deletes a response; responses after it can then no longer be continued. RequestError 404 as in `get`."""
        self._entry(owner, id, "response_id")
        self._forget(owner, id)

    def conversation(self, owner: str, id: str) -> list[bytes]:
        """The chat messages up to and with this response: JSON lists, one per response, for `decoded`.

        RequestError 404 if this response or one it continues is gone, 400 if it has no answer.
        """
        self._touch(owner, id)
        turns: list[bytes] = []
        at: str | None = id
        while at is not None:
            entry = self._entry(owner, at, "previous_response_id")
            if entry.messages is None:
                raise RequestError(
                    f"response {at[:100]!r} was cancelled or failed: continue the one before it",
                    param="previous_response_id",
                    code="response_not_complete",
                )
            turns.append(entry.messages)
            at = entry.previous
        return turns[::-1]

    def holding(self, owner: str, places: Mapping[str, str]) -> list[Stored]:
        """The responses that hold these items, as `found` takes them. `places`: item id -> path in the request, which
        RequestError 404 names if the owner has no response with the item."""
        shelf, ids = self._shelves.get(owner, _Shelf()), dict[str, None]()
        for item, where in places.items():
            if item not in shelf.holders:
                raise RequestError(
                    f"Item with id {item[:100]!r} not found: never stored (store: false), deleted, or dropped for "
                    "newer ones. Send the item itself",
                    param=where,
                    code="item_not_found",
                    status=404,
                )
            ids[next(reversed(shelf.holders[item]))] = None
        self._touch(owner, *ids)
        return [shelf.entries[id] for id in ids]

    def _entry(self, owner: str, id: str, param: str) -> Stored:
        shelf = self._shelves.get(owner)
        entry = None if shelf is None else shelf.entries.get(id)
        if entry is None:
            raise RequestError(
                f"response {id[:100]!r} is not stored here (never was, deleted, or dropped for newer ones): "
                "send the conversation as input",
                param=param,
                code="response_not_found",
                status=404,
            )
        return entry

    def _forget(self, owner: str, id: str) -> None:
        shelf = self._shelves[owner]
        entry = shelf.entries.pop(id)
        shelf.bytes -= entry.size
        for item in entry.ids:
            del shelf.holders[item][id]
            if not shelf.holders[item]:
                del shelf.holders[item]
        if not shelf.entries:
            del self._shelves[owner]

    def _touch(self, owner: str, *ids: str) -> None:
        """Marks responses and all that they continue as used, each after those that continue it."""
        entries = self._shelves.get(owner, _Shelf()).entries
        chains, seen = list[list[str]](), set[str]()
        for id in ids:
            chains.append([])
            at: str | None = id
            while at is not None and at in entries and at not in seen:
                seen.add(at)
                chains[-1].append(at)
                at = entries[at].previous
        for chain in reversed(chains):
            for id in chain:
                entries.move_to_end(id)


def ids_of(items: Sequence[msgspec.Raw]) -> list[str]:
    ids = (msgspec.json.decode(item, type=_Named).id for item in items)
    return [id for id in ids if isinstance(id, str)]


def found(holders: Sequence[Stored], ids: Collection[str]) -> dict[str, Any]:
    """The items of these ids in the responses that ResponseStore.holding returned."""
    parts = (
        part for h in holders for part in (msgspec.json.decode(h.items), msgspec.json.decode(h.response)["output"])
    )
    return {item["id"]: item for part in parts for item in part if isinstance(item["id"], str) and item["id"] in ids}


def decoded(turns: Sequence[bytes]) -> list[Mapping[str, Any]]:
    """The messages of ResponseStore.conversation. Decoded one by one: a single call would stall the event loop."""
    raw = [message for turn in turns for message in msgspec.json.decode(turn, type=list[msgspec.Raw])]
    return [msgspec.json.decode(message) for message in raw]


def encoded(messages: Sequence[Mapping[str, Any]]) -> list[msgspec.Raw]:
    """Messages as JSON that ResponseStore.put takes as it is. One call per message, as in `decoded`."""
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
