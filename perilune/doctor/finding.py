"""What a check of a model directory found out, for people."""

from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "warning"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect, in one line each: what is the case, and what to do about it.

    wrong    the model cannot be served, or would answer wrongly
    warning  it works, with a difference that users should know
    """

    severity: Severity
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.text}: {self.remedy}"
