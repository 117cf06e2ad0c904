"""The ledger of measurements: one flat JSON object per line in bench/results/<bench>.jsonl."""

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.client.endpoint import is_url
from perilune.core.errors import ConfigError

DEFAULT = Path(__file__).parents[2] / "bench/results"  # in the checkout, not in the current directory


def circumstances(ranks: int = 1) -> dict[str, Any]:
    """Hardware, software, commit and date of a row. `gpus`: number of GPUs used, one per rank."""
    import torch  # imported late: a measurement of a server needs it only here

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "gpus": min(torch.cuda.device_count(), ranks) if cuda else 0,
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }


def origin(model: str, assignments: Sequence[str] = ()) -> dict[str, Any]:
    """The circumstances of a run on `model`; for a server elsewhere only the date and our commit."""
    given = dict(assignment.split("=", 1) for assignment in assignments if "=" in assignment)
    ranks = [given[word] for word in ("tp", "ep") if word in given]
    here = circumstances(max((int(n) if n.isdecimal() else sys.maxsize for n in ranks), default=1))
    if is_url(model):
        return dict.fromkeys(here) | {"commit": here["commit"], "date": here["date"], "server": "endpoint"}
    return here | ({"threads": int(given["threads"])} if "threads" in given else {}) | {"server": "private"}


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which lies `share` (0 to 1) of the values, without interpolation; 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


def append(rows: list[dict[str, Any]], directory: Path) -> Path:
    """Adds rows to their bench's file: all of them, or none where the disk is full. One write per call, so that a kill
    leaves no half row."""
    (bench,) = {row["bench"] for row in rows}
    file = directory / f"{bench}.jsonl"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as f:
            size = f.seek(0, os.SEEK_END)
            rest = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows).encode()
            try:
                while rest:  # on a disk that becomes full, the first write is short and the second fails
                    rest = rest[f.write(rest) :]
            except OSError:
                f.truncate(size)  # the next row would be joined to half a row
                raise
    except OSError as e:
        raise ConfigError(f"cannot write the ledger {file}: {e.strerror} (choose another with --ledger)") from e
    return file


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    except OSError:  # not Linux
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _commit() -> str | None:
    """Short hash of the source tree, with + when it has uncommitted changes; None outside a git checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", "-C", here, *args], capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return None
