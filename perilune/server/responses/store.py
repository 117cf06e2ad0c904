"""Finished responses, kept in memory so that a client can continue or fetch them by id."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from perilune.core.errors import RequestError

MAX_RESPONSES = 8192
MAX_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as JSON, and the chat messages it added to the conversation: the request's own and the answer."""

    response: bytes
    messages: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)


class ResponseStore:
    """At most `max_responses` responses of at most `max_bytes` together; the least recently used go first.

    A response holds only its own turn, so that a conversation of n turns costs n turns and not n squared. Using one
    makes everything it continues more recent than itself: a conversation is forgotten from its end.
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self.max_responses = max_responses
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[str, Stored] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self,
        id: str,
        response: Mapping[str, Any],
        messages: Sequence[Mapping[str, Any] | msgspec.Raw],
        previous: str | None,
    ) -> None:
        """Keeps a response; `messages` are those that it added to the conversation, `previous` what it continues."""
        entry = Stored(msgspec.json.encode(response), msgspec.json.encode(messages), previous)
        self._entries[id] = entry
        self.bytes += entry.size
        self._touch(id)
        while len(self._entries) > self.max_responses or self.bytes > self.max_bytes:
            _, oldest = self._entries.popitem(last=False)
            self.bytes -= oldest.size

    def get(self, id: str) -> bytes:
        """The response as JSON; RequestError 404 if it is unknown."""
        self._touch(id)
        return self._entry(id, "response_id").response

    def delete(self, id: str) -> None:
        """Forgets a response; what continues it can then no longer be continued. RequestError 404 if it is unknown."""
        self.bytes -= self._entry(id, "response_id").size
        del self._entries[id]

    def conversation(self, id: str) -> list[bytes]:
        """The chat messages up to and with this response: JSON lists, one per response, for `decoded`.

        RequestError 404 if this response or one it continues is gone.
        """
        self._touch(id)
        turns: list[bytes] = []
        at: str | None = id
        while at is not None:
            entry = self._entry(at, "previous_response_id")
            turns.append(entry.messages)
            at = entry.previous
        return turns[::-1]

    def _entry(self, id: str, param: str) -> Stored:
        entry = self._entries.get(id)
        if entry is None:
            raise RequestError(
                f"response {id[:100]!r} is not stored here (never was, deleted, or dropped for newer ones): "
                "send the conversation as input",
                param=param,
                code="response_not_found",
                status=404,
            )
        return entry

    def _touch(self, id: str | None) -> None:
        while id is not None and id in self._entries:
            self._entries.move_to_end(id)
            id = self._entries[id].previous


def decoded(turns: Sequence[bytes]) -> list[Mapping[str, Any]]:
    """The messages of ResponseStore.conversation. One call per message: one for all would stall the event loop."""
    raw = [message for turn in turns for message in msgspec.json.decode(turn, type=list[msgspec.Raw])]
    return [msgspec.json.decode(message) for message in raw]


def encoded(messages: Sequence[Mapping[str, Any]]) -> list[msgspec.Raw]:
    """Messages as JSON that ResponseStore.put takes as it is. One call per message, as in `decoded`."""
    return [msgspec.Raw(msgspec.json.encode(message)) for message in messages]
