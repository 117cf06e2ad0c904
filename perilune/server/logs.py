"""Log lines on standard error, as text or as one JSON object a line, with the request's id where there is one."""

import json
import logging
import sys
from datetime import UTC, datetime

from perilune.core.errors import printable
from perilune.server.call import within

MAX_MESSAGE_CHARS = 10_000


class JsonLines(logging.Formatter):
    """`time`, `level`, `logger`, `message`; within a request `request_id` and `key` (name); the record's `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MAX_MESSAGE_CHARS],
        }
        if (call := within()) is not None:
            entry |= {"request_id": call.id, "key": call.account.name or None}
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextLines(logging.Formatter):
    """One line each, without control characters, which could be a line of their own or commands to a terminal. A
    traceback follows in its own lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))


def configure(form: str, level: str) -> None:
    """Configures logging of this process by the server's configuration (log_format, log_level)."""
    handler = logging.StreamHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonLines())
    else:
        handler.setFormatter(TextLines("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # These libraries would log URLs and headers of their requests.
    for chatty in ("httpx", "httpcore", "urllib3", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
