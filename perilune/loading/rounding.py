"""How much a load option changed the weights, in decibels: SQNR is 10 log10 of signal over error energy."""

import math
import threading

from perilune.formats import int4_compact


class Rounding:
    """The error of compact scales made from a checkpoint's INT4 scales. Threads may call `add` at once."""

    def __init__(self) -> None:
        self.matrices = 0
        self._signal = self._error = self._largest = 0.0
        self._worst_db, self._worst = math.inf, ""
        self._lock = threading.Lock()

    def add(self, name: str, lost: int4_compact.Error) -> None:
        with self._lock:
            self.matrices += 1
            self._signal, self._error = self._signal + lost.signal, self._error + lost.error
            self._largest = max(self._largest, lost.largest)
            if (db := decibels(lost.signal, lost.error)) < self._worst_db:
                self._worst_db, self._worst = db, name

    def __str__(self) -> str:
        return (
            f"{self.matrices:,} matrices, SQNR {decibels(self._signal, self._error):.1f} dB, worst "
            f"{self._worst_db:.1f} dB ({self._worst}), largest change of a weight {100 * self._largest:.1f} %"
        )


def decibels(signal: float, error: float) -> float:
    """10 log10 of the ratio of two energies."""
    if error == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / error) if signal else -math.inf
