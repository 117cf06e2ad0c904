"""Errors about images and videos; callers add the name of the request's field."""

from perilune.core.errors import RequestError


def refused(why: str, what: str = "image") -> RequestError:
    """400: something is wrong with the image, or the video, itself."""
    return RequestError(f"the {what} cannot be used: {why}", code=f"invalid_{what}")


def busy(why: str) -> RequestError:
    """503: the same image may be accepted later."""
    return RequestError(why, status=503, code="image_decoder_unavailable", retry_seconds=5)
