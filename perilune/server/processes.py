"""Prometheus metrics of the engine's processes, read from /proc at each scrape; on Linux only."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_CPU_FIELDS = slice(11, 13)  # utime and stime, counted after the name, which may have spaces


@dataclass(frozen=True, slots=True)
class Process:
    resident_bytes: int
    cpu_seconds: float
    open_files: int


def read(pid: int, root: Path = Path("/proc")) -> Process | None:
    """The use of resources by a process; None if there is no such process, or no /proc."""
    folder = root / str(pid)
    try:
        pages = int((folder / "statm").read_text().split()[1])
        ticks = (folder / "stat").read_text().rpartition(")")[2].split()[_CPU_FIELDS]
        files = len(os.listdir(folder / "fd"))
    except (OSError, ValueError, IndexError):
        return None
    return Process(pages * os.sysconf("SC_PAGE_SIZE"), sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), files)


class ProcessesCollector(Collector):
    """`pids` returns the current process ids of all ranks; their labels are engine (rank 0), rank1, rank2, ..."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.pids = pids

    def collect(self) -> Iterable[Metric]:
        label = ("process",)
        resident = GaugeMetricFamily(
            "perilune_process_resident_memory_bytes", "Resident memory of the engine's processes.", labels=label
        )
        cpu = CounterMetricFamily("perilune_process_cpu_seconds", "CPU time of the engine's processes.", labels=label)
        files = GaugeMetricFamily("perilune_process_open_fds", "Open files of the engine's processes.", labels=label)
        for rank, pid in enumerate(self.pids()):
            if (found := read(pid)) is not None:
                name = [f"rank{rank}" if rank else "engine"]
                resident.add_metric(name, found.resident_bytes)
                cpu.add_metric(name, found.cpu_seconds)
                files.add_metric(name, found.open_files)
        yield from (resident, cpu, files)
