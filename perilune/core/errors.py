"""Errors meant for people: one line that names the value and, where there is one, the remedy."""


class PeriluneError(Exception):
    """Base of every error a user can cause or act on. The CLI prints it as one line, without a traceback."""


class ConfigError(PeriluneError):
    """A configuration key or value is unknown, out of range, or cannot work on this machine."""


class CheckpointError(PeriluneError):
    """A model directory is incomplete, inconsistent or of a kind Perilune does not serve."""


class EngineError(PeriluneError):
    """The engine failed or has stopped; requests in flight are lost, and the message says why."""


class RequestError(PeriluneError):
    """One request is unacceptable; no other request is disturbed.

    `status` is the HTTP status, `param` the offending request field, `code` a stable machine-readable word.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
