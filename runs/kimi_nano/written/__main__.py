"""python -m runs.kimi_nano.written DIRECTORY OUT: records of the data sets cloned into DIRECTORY, as the file OUT."""

import argparse
import sys
from pathlib import Path

from runs.kimi_nano.written.records import write


def main(arguments: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Records of sentences that people wrote, for training kimi-nano.")
    p.add_argument("directory", type=Path, help="with the cloned repositories; one that is not there is left out")
    p.add_argument("out", type=Path, help="the file to write, e.g. written.jsonl.xz")
    o = p.parse_args(arguments)
    if not o.directory.is_dir():
        p.error(f"{o.directory} is no directory: clone the data sets into it")
    counts = write(o.directory, o.out)
    for name, count in sorted(counts.items()):
        print(f"{count:8,} {name}")
    if not counts:
        print(f"{o.directory} has none of the data sets", file=sys.stderr)
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main())
