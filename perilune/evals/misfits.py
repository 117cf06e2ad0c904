"""Why a text does not satisfy a JSON schema: an exact judge with the formats of strings, on jsonschema."""

import datetime
import ipaddress
import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any
from urllib.parse import urlsplit

from perilune.core.errors import ConfigError

try:
    import jsonschema
except ImportError as e:
    raise ConfigError("answers are judged by jsonschema: pip install jsonschema") from e


def misfits(text: str, schema: Mapping[str, Any]) -> Iterator[str]:
    """Why a text is not JSON by the schema (Draft 2020-12, formats asserted); nothing if it is. Numbers are exact."""
    try:
        value = json.loads(text, parse_float=_number, parse_constant=_no_constant)
    except (ValueError, RecursionError) as e:
        yield f"no JSON ({e}): {text[-80:]!r}"
        return
    exact = json.loads(json.dumps(schema), parse_float=_number)
    for error in _Exactly(exact, format_checker=FORMATS).iter_errors(value):
        path = "/".join(str(step) for step in error.absolute_path)
        yield f"/{path}: {error.message[:200]} ({error.validator})"


def _multiple(_: Any, unit: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """`multipleOf` without dividing, which takes as many digits as the quotient has."""
    if not isinstance(value, int | Decimal) or isinstance(value, bool) or Decimal(value).is_infinite():
        return
    shares = Fraction(unit)
    _, digits, exponent = Decimal(value).as_tuple()
    assert isinstance(exponent, int)
    whole = int("".join(map(str, digits))) * shares.denominator
    if exponent >= 0:
        rest = whole * pow(10, exponent, shares.numerator) % shares.numerator
    else:
        rest = whole % (shares.numerator * 10**-exponent) if -exponent < _DIGITS else whole
    if rest:
        yield jsonschema.ValidationError(f"{value} is not a multiple of {unit}")


_DIGITS = 10_000  # from this many decimal places on, a number other than 0 counts as no multiple
_Exactly = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"multipleOf": _multiple})


def _number(text: str) -> int | Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:  # an exponent of twenty digits
        return Decimal("-Infinity" if text.startswith("-") else "Infinity")
    return int(value) if value.adjusted() < 400 and value == value.to_integral_value() else value


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


FORMATS = jsonschema.FormatChecker(formats=())


def _checks(form: str) -> Callable[[Callable[[str], Any]], Callable[[str], Any]]:
    """Registers a check of strings, which returns False or raises ValueError for a bad one."""

    def register(check: Callable[[str], Any]) -> Callable[[str], Any]:
        FORMATS.checks(form, ValueError)(lambda v: not isinstance(v, str) or check(v) is not False)
        return check

    return register


_checks("date")(datetime.date.fromisoformat)
_checks("ipv4")(ipaddress.IPv4Address)
_checks("ipv6")(lambda v: ipaddress.IPv6Address(v) and "%" not in v)
_checks("uuid")(lambda v: re.fullmatch(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", v) is not None)
_checks("json-pointer")(lambda v: re.fullmatch(r"(/([^/~]|~[01])*)*", v, re.DOTALL) is not None)


@_checks("date-time")
def _date_time(value: str) -> bool:
    return re.fullmatch(r"\d{4}-\d\d-\d\d[Tt]\S+", value) is not None and _moment(value)


@_checks("time")
def _time(value: str) -> bool:
    return _moment(f"2000-01-01T{value}")


def _moment(value: str) -> bool:
    """RFC 3339, as Python reads it: to the second, with a zone. Fractions past a microsecond are cut."""
    cut = re.sub(r"(\.\d{6})\d+", r"\1", value)
    form = r".{10}[Tt]\d\d:\d\d:\d\d(?:\.\d+)?(?:[Zz]|[+-]\d\d:\d\d)"
    return re.fullmatch(form, cut) is not None and bool(datetime.datetime.fromisoformat(cut))


@_checks("duration")
def _duration(value: str) -> bool:
    if re.fullmatch(r"P\d+W", value):
        return True
    parts = re.fullmatch(r"P((?:\d+Y)?(?:\d+M)?(?:\d+D)?)(T(?:\d+H)?(?:\d+M)?(?:\d+S)?)?", value)
    return parts is not None and bool(parts[1] or parts[2]) and parts[2] != "T"


@_checks("hostname")
def _hostname(value: str) -> bool:
    label = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
    return len(value) <= 253 and re.fullmatch(rf"{label}(\.{label})*", value) is not None


@_checks("email")
def _email(value: str) -> bool:
    local, _, host = value.rpartition("@")
    atom = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
    literal = (
        host.startswith("[") and host.endswith("]") and bool(ipaddress.ip_address(host[1:-1].removeprefix("IPv6:")))
    )
    fits = len(local) <= 64 and len(value) <= 254
    return fits and re.fullmatch(rf"{atom}(\.{atom})*", local) is not None and (literal or _hostname(host))


@_checks("uri")
def _uri(value: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value) is not None and _uri_reference(value)


@_checks("uri-reference")
def _uri_reference(value: str) -> bool:
    return value.isascii() and _iri(value)


@_checks("iri")
def _iri(value: str) -> bool:
    parts = urlsplit(value)
    fine = re.fullmatch(r"(?:[^\x00-\x20\x7f\"<>\\^`{|}%]|%[0-9A-Fa-f]{2})*", value) is not None
    return fine and (parts.port is None or parts.port <= 65535)
