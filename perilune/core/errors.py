"""Errors meant for people: one line that names the value and, where there is one, the remedy.

Messages quote files and requests through `shown`: a name in a checkpoint may have a million characters or terminal
control codes.
"""

import reprlib
import signal

SHOWN = 80  # characters of a quoted value

_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxlist, _REPR.maxdict, _REPR.maxstring, _REPR.maxother = 3, 6, 4, SHOWN, SHOWN


class PeriluneError(Exception):
    """Base of every error a user can cause or act on. The CLI prints it as one line, without a traceback."""


class ConfigError(PeriluneError):
    """A configuration key or value is unknown, out of range, or cannot work on this machine."""


class CheckpointError(PeriluneError):
    """A model directory is incomplete, inconsistent or of a kind Perilune does not serve.

    `text` is the message without its remedy; `remedy` is empty where the message has none, or has one within.
    """

    def __init__(self, text: str, *, remedy: str = "") -> None:
        super().__init__(f"{text}: {remedy}" if remedy else text)
        self.text, self.remedy = text, remedy


class EngineError(PeriluneError):
    """The engine failed or has stopped; requests in flight are lost, and the message says why.

    retry_seconds  after how many seconds requests may be taken again; None: not known
    """

    def __init__(self, message: str, *, retry_seconds: int | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds


class EngineUnavailable(EngineError):
    """The engine takes no requests now, or has lost this request. The reason is logged once, not per request."""


class RequestError(PeriluneError):
    """One request is unacceptable; no other request is disturbed.

    `status` is the HTTP status, `param` the offending request field, `code` a stable machine-readable word,
    `retry_seconds` after how many seconds the same request may be accepted.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
        retry_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        self.param = param
        self.code = code
        self.status = status


def signal_note(code: int | None) -> str:
    """Words to put after the signal's name for a process that ended with this exit status; "" if no cause is known."""
    if code == -signal.SIGBUS:
        return ", because a file of the model became shorter while it was read: restore the file"
    return ""


def prompt_too_long(least: int, context: int, param: str, *, exact: bool = True) -> RequestError:
    """The error for a prompt of `least` tokens (not `exact`: at least so many) in a context of `context` tokens.

    Agents shorten their conversation when they recognise this error: most by its code, Claude Code by "prompt is too
    long: N tokens > M", litellm by "this model's maximum context length is".
    """
    return RequestError(
        f"prompt is too long: {'' if exact else 'at least '}{least} tokens > {context - 1} maximum: this model's "
        f"maximum context length is {context} tokens, one of them for the answer: shorten the prompt",
        param=param,
        code="context_length_exceeded",
    )


def shown(value: object, limit: int = SHOWN) -> str:
    """`value` for a message: a string as it is, anything else by repr; on one line, printable, at most `limit`
    characters. Control characters and surrogates are escaped; the middle of a longer text becomes "...".
    """
    return _cut(printable(_cut(value if isinstance(value, str) else _REPR.repr(value), limit)), limit)


def printable(text: str) -> str:
    """The text with control characters, line breaks and surrogates escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def quoted(value: object, limit: int = SHOWN) -> str:
    """`shown`, with quotation marks around a string."""
    return f"'{shown(value, limit - 2)}'" if isinstance(value, str) else shown(value, limit)


def sized(nbytes: float) -> str:
    """'2.50 GB' for a message; in MB if below 0.1 GB."""
    return f"{nbytes / 1e9:.2f} GB" if abs(nbytes) >= 1e8 else f"{nbytes / 1e6:.3g} MB"


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    tail = (limit - 3) // 3
    return f"{text[: limit - 3 - tail]}...{text[-tail:]}"
