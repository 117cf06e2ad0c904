"""How much memory this process may still use: what the machine has left and what its control groups allow."""

import os
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")


def available_bytes(groups: Path = _GROUPS, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can still be allocated: the smaller of MemAvailable and the room below the tightest limit of the
    control groups (version 2, or 1) above this process. Page cache that the kernel can drop counts as room."""
    try:
        line = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
        free = int(line.split()[1]) * 1024
    except (OSError, StopIteration, ValueError):  # not Linux: take what is installed
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([free, *_rooms(groups)])


def _rooms(groups: Path) -> list[int]:
    """Bytes below the limit of each group that has one."""
    rooms = []
    for folder, limit, usage in _group_files(groups):
        try:
            most = int((folder / limit).read_text())  # ValueError: "max"
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        given_back = int(stat.get("inactive_file", stat.get("total_inactive_file", 0)))
        rooms.append(max(most - used + given_back, 0))
    return rooms


def _group_files(groups: Path) -> list[tuple[Path, str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = []
    for line in ["0::/", "0:memory:/", *lines]:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = groups / "memory" if controllers else groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = top / path.lstrip("/")
        found += [(place, *names) for place in (folder, *folder.parents) if place == top or top in place.parents]
    return list(dict.fromkeys(found))
