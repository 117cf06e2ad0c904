"""Regular expressions for the string formats of JSON schemas, and replacements for well-known ones with look-ahead.

An answer that matches satisfies parsers of the format (JSON Schema Draft 2020-12, RFC 3339, RFC 3986, OpenAPI).
"""

from collections.abc import Mapping

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d{2}|00[1-9]\d|000[1-9])"
_LEAP = r"(?:\d{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][48]|[2468]0|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)"
    rf"|02-(?:0[1-9]|1\d|2[0-8]))|{_LEAP}-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?(?:Z|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_HOURS = r"T(?:\d+H(?:\d+M(?:\d+S)?)?|\d+M(?:\d+S)?|\d+S)"
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_PCHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_ICHAR = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2}|[\u00a1-\ud7ff\uf900-\ufdcf\ufdf0-\uffef])"

FORMATS: Mapping[str, str] = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "duration": rf"^P(?:\d+W|(?:\d+Y(?:\d+M(?:\d+D)?)?|\d+M(?:\d+D)?|\d+D)(?:{_HOURS})?|{_HOURS})$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
    "uri-reference": rf"^(?:https?://{_LABEL}(?:\.{_LABEL})*(?::[1-9]\d{{0,3}})?)?(?:/{_PCHAR}*)*(?:\?{_PCHAR}*)?(?:#{_PCHAR}*)?$",
    "iri": rf"^https?://{_LABEL}(?:\.{_LABEL})*(?::[1-9]\d{{0,3}})?(?:/{_ICHAR}*)*(?:\?{_ICHAR}*)?(?:#{_ICHAR}*)?$",
    "idn-hostname": rf"^{_LABEL}(?:\.{_LABEL})*$",
    "idn-email": rf"^{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*$",
    "iri-reference": rf"^(?:/{_PCHAR}*)*(?:\?{_PCHAR}*)?(?:#{_PCHAR}*)?$",
    "relative-json-pointer": r"^(?:0|[1-9]\d{0,9})(?:#|(?:/(?:[^/~\x00-\x1f]|~[01])*)*)$",
    "uri-template": r"^(?:[A-Za-z0-9._~/:?=&-]|\{[A-Za-z_][A-Za-z0-9_]*\})*$",
    "json-pointer": r"^(?:/(?:[^/~\x00-\x1f]|~[01])*)*$",
    "byte": r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?$",
}

MAX_CHARS: Mapping[str, int] = {"hostname": 253, "email": 254, "idn-hostname": 253, "idn-email": 254}

# Formats of OpenAPI that say how a field is shown or sent, not what it holds, or that say nothing about strings.
HINTS = ("password", "binary", "textarea", "markdown", "int32", "int64", "float", "double")

# Expressions with look-ahead, as well-known generators write them -> the same without.
EQUIVALENT: Mapping[str, str] = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
