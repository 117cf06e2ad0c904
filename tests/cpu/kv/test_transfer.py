"""Moving real bytes: pages to host memory and back, files damaged in every way, and a writer that is killed."""

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from perilune.core.errors import ConfigError
from perilune.kv import disk, transfer
from perilune.kv.copier import CpuCopier
from perilune.kv.disk import HEADER_BYTES, LOCK, Directory, clear
from perilune.kv.host_memory import HostMemory
from perilune.kv.tiers import Copied, Name, Piece, Restored, Stored, Written
from perilune.kv.transfer import Transfer, row_bytes
from perilune.ops.rows import host_rows

MODEL, OTHER = b"m" * 16, b"o" * 16


def checksum(row: np.ndarray, digest: bytes) -> int:
    return int(host_rows.checksums([row], [digest])[0])


def name(number: int) -> Name:
    return Name(number.to_bytes(16, "big"), bytes(16))


def caches(dtype: torch.dtype = torch.float32, width: int = 36) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    pages = torch.randint(0, 200, (3, 50, 4, width * dtype.itemsize), dtype=torch.uint8, generator=g).view(dtype)
    drafts = torch.randint(0, 200, (60, 4, 64), dtype=torch.uint8, generator=g).view(torch.float32)
    return [pages, drafts]


class Rig:
    def __init__(self, root: Path | None = None, model: bytes = MODEL, rows: int = 40, **more) -> None:
        self.caches = caches(**more)
        self.directory = None if root is None else Directory(root, model, row_bytes(self.caches))
        self.mover = Transfer(self.caches, rows, self.directory)
        self.done: list = []  # not asked for yet
        while self.mover.rows < rows:
            time.sleep(0.001)

    def wait(self, kind: type, count: int) -> list:
        deadline = time.monotonic() + 100
        while sum(isinstance(done, kind) for done in self.done) < count:
            self.mover.wait(0.1)
            self.done += self.mover.poll()
            assert time.monotonic() < deadline, self.done
        found = [done for done in self.done if isinstance(done, kind)]
        self.done = [done for done in self.done if not isinstance(done, kind)]
        return found

    def store(self, numbers: range) -> None:
        self.mover.store([(name(n), n, n) for n in numbers])
        assert all(done.error is None for done in self.wait(Stored, len(numbers)))

    def write(self, numbers: range) -> list[Written]:
        for n in numbers:
            self.mover.write(name(n), n)
        return self.wait(Written, len(numbers))

    def restore(self, pieces: list[Piece]) -> Restored:
        self.mover.restore(7, pieces)
        (done,) = self.wait(Restored, 1)
        return done

    def path(self, number: int) -> Path:
        assert self.directory is not None
        return self.directory._path(name(number))


@contextmanager
def rig(*args, **more):
    made = Rig(*args, **more)
    try:
        yield made
    finally:
        made.mover.close()


@pytest.mark.parametrize("dtype, width", [(torch.float32, 36), (torch.bfloat16, 576), (torch.uint8, 640)])
def test_blocks_come_back_to_other_places(dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    """From host memory and from files at once, all layers and the draft model's entries."""
    with rig(tmp_path / "kv", dtype=dtype, width=width) as r:
        before = [c.clone() for c in r.caches]
        r.store(range(20))
        assert all(done.error is None for done in r.write(range(10, 20)))
        for cache in r.caches:
            cache.zero_()
        done = r.restore([Piece(name(n), n if n < 10 else None, 49 - n) for n in range(20)])
        assert done.error is None and not done.bad
        for cache, old in zip(r.caches, before):
            at = cache.dim() - 3
            moved = cache.narrow(at, 30, 20).flip(at)
            assert torch.equal(moved.view(torch.uint8), old.narrow(at, 0, 20).view(torch.uint8))
            assert not cache.narrow(at, 0, 30).view(torch.uint8).any()


@pytest.fixture(params=["compiled", "python"])
def reader(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What reads files: C++, or where there is no compiler Python."""
    if request.param == "python":
        monkeypatch.setattr(host_rows, "file_reader", lambda: None)
    elif host_rows.file_reader() is None:
        pytest.skip("no compiler")
    return str(request.param)


@pytest.mark.parametrize("direct", ["refused", "taken"])
def test_a_file_is_read_past_the_page_cache(
    direct: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is not in there; buffered on file systems that refuse that."""
    if direct == "refused" and reader == "compiled":  # not at addresses that are no multiple of a sector
        monkeypatch.setattr(disk, "_header_of_thread", lambda: memoryview(bytearray(HEADER_BYTES + 1))[1:])
    elif direct == "refused":
        preadv = os.preadv

        def refusing(file: int, *args) -> int:
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return preadv(file, *args)

        monkeypatch.setattr(os, "preadv", refusing)
    with rig(tmp_path / "kv") as r:
        r.store(range(4))
        r.write(range(4))
        before = [cache.clone() for cache in r.caches]
        for n in range(4):
            with r.path(n).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for cache in r.caches:
            cache.zero_()
        assert r.restore([Piece(name(n), None, n) for n in range(4)]).error is None
        for now, then in zip((r.caches[0][:, :4], r.caches[1][:4]), (before[0][:, :4], before[1][:4])):
            assert torch.equal(now.contiguous().view(torch.uint8), then.contiguous().view(torch.uint8))


def in_page_cache(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc, size = ctypes.CDLL(None, use_errno=True), path.stat().st_size
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as held,
    ):
        pages = (ctypes.c_ubyte * (-(-size // mmap.PAGESIZE)))()
        begin = ctypes.c_char.from_buffer(held)
        status = libc.mincore(ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), pages)
        del begin
        assert status == 0
        return sum(page & 1 for page in pages)


@pytest.mark.usefixtures("reader")
def test_reading_past_the_page_cache_leaves_nothing_in_it(tmp_path: Path) -> None:
    """A look whether it has the file must not make the kernel read ahead: of a disk of 1.5 GB/s that left 0.8."""
    with rig(tmp_path / "kv", width=1200) as r:
        r.store(range(2))
        r.write(range(2))
        for n in range(2):
            with r.path(n).open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if in_page_cache(r.path(0)):
            pytest.skip("this file system keeps its files in memory")
        assert r.restore([Piece(name(n), None, n) for n in range(2)]).error is None
        assert [in_page_cache(r.path(n)) for n in range(2)] == [0, 0]


def test_more_files_than_staging_rows(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        before = r.caches[0].view(torch.uint8).clone()
        r.store(range(40))
        r.write(range(40))
        r.caches[0].zero_()
        assert r.restore([Piece(name(n), None, n) for n in range(40)]).error is None
        assert torch.equal(r.caches[0].view(torch.uint8)[:, :40], before[:, :40])


def test_pages_are_given_back_only_after_their_copy() -> None:
    with rig() as r:
        r.mover.store([(name(n), n, n) for n in range(40)])
        r.wait(Copied, 40)
        before = r.caches[0].view(torch.uint8).clone()
        r.caches[0].zero_()  # what the next owner does
        r.wait(Stored, 40)
        assert r.restore([Piece(name(n), n, n) for n in range(40)]).error is None
        assert torch.equal(r.caches[0].view(torch.uint8)[:, :40], before[:, :40])


def test_a_changed_row_of_host_memory_is_found() -> None:
    with rig() as r:
        r.store(range(4))
        r.mover._row(2)[1000] ^= 1
        done = r.restore([Piece(name(n), n, n) for n in range(4)])
        assert done.bad == (name(2).digest,) and "checksum" in str(done.error)


def test_a_row_of_another_block_is_found() -> None:
    with rig() as r:
        r.store(range(4))
        assert r.restore([Piece(name(3), 2, 3)]).bad == (name(3).digest,)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def swap_pages(path: Path) -> None:
    data = path.read_bytes()
    first, second = data[HEADER_BYTES:][:4096], data[HEADER_BYTES:][4096:8192]
    assert first != second
    path.write_bytes(data[:HEADER_BYTES] + second + first + data[HEADER_BYTES + 8192 :])


def replace(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of the content": lambda p: flip(p, HEADER_BYTES + 777),
    "the last byte": lambda p: flip(p, -1),
    "a bit of the magic": lambda p: flip(p, 0),
    "a bit of the stored checksum": lambda p: flip(p, 8 + 16 * 3 + 8),
    "pages that changed places": swap_pages,
    "truncated": lambda p: os.truncate(p, 5000),
    "empty": lambda p: os.truncate(p, 0),
    "longer": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "zeros": lambda p: p.write_bytes(bytes(p.stat().st_size)),
    "missing": lambda p: p.unlink(),
    "a directory": lambda p: replace(p, Path.mkdir),
    "a FIFO": lambda p: replace(p, os.mkfifo),
    "a dangling link": lambda p: replace(p, lambda q: q.symlink_to("nowhere")),
}


@pytest.mark.usefixtures("reader")
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_nothing_hangs(damage: str, tmp_path: Path) -> None:
    with rig(tmp_path / "kv", width=1200) as r:
        r.store(range(3))
        r.write(range(3))
        DAMAGE[damage](r.path(1))
        done = r.restore([Piece(name(n), None, n) for n in range(3)])
        assert done.bad == (name(1).digest,) and done.error and "\n" not in done.error
        assert r.restore([Piece(name(n), None, n) for n in (0, 2)]).error is None


def test_a_block_under_another_name_or_of_another_model_is_refused(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(3))
        r.write(range(3))
        r.path(1).write_bytes(r.path(0).read_bytes())
        assert "another block" in str(r.restore([Piece(name(1), None, 1)]).error)
        kept = r.path(2).read_bytes()
    with rig(tmp_path / "kv", model=OTHER) as r:
        assert r.directory is not None and r.directory.found() == []
        r.path(2).parent.mkdir(parents=True)
        r.path(2).write_bytes(kept)
        assert "another model" in str(r.restore([Piece(name(2), None, 2)]).error)


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(2))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # a write beyond fails as on a full disk
        try:
            (done,) = r.write(range(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert done.error and not done.gone
        assert [p for p in (tmp_path / "kv").rglob("*") if p.is_file()] == [tmp_path / "kv" / LOCK]
        assert r.write(range(2))[0].error is None


def test_a_removed_directory_is_said_to_be_gone(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(1))
        (tmp_path / "kv").rename(tmp_path / "away")
        (done,) = r.write(range(1))
        assert done.gone and done.error


def test_a_writer_killed_in_the_middle_leaves_only_whole_files(tmp_path: Path) -> None:
    script = (
        "import sys, itertools, numpy as np; from pathlib import Path\n"
        "from perilune.kv.disk import Directory; from perilune.kv.tiers import Name\n"
        "from perilune.ops.rows.host_rows import checksums\n"
        "d = Directory(Path(sys.argv[1]), b'm' * 16, 8 << 20)\n"
        "for n in itertools.count():\n"
        "    row = np.full(8 << 20, n % 251, np.uint8); name = Name(n.to_bytes(16, 'big'), bytes(16))\n"
        "    if n == 3: print('go', flush=True)\n"
        "    d.write(name, row.data, int(checksums([row], [name.digest])[0]))\n"
    )
    root = tmp_path / "kv"
    child = subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"go\n"
    deadline = time.monotonic() + 20
    while not list(root.rglob("*.part")) and time.monotonic() < deadline:
        pass
    child.kill()
    child.wait()
    parts = list(root.rglob("*.part"))
    directory = Directory(root, MODEL, 8 << 20)
    assert not list(root.rglob("*.part")) and len(directory.found()) >= 3
    row = np.empty(8 << 20, np.uint8)
    for found in directory.found():
        assert directory.read(found.name, row.data) == checksum(row, found.name.digest)
    directory.close()
    assert child.returncode == -signal.SIGKILL, parts


# ---- directory


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    os.umask(before := os.umask(0))
    with rig(tmp_path / "kv") as r:
        r.store(range(1))
        r.write(range(1))
        for path in (tmp_path / "kv", *(tmp_path / "kv").rglob("*")):
            assert not path.stat().st_mode & 0o077, path
        assert stat.S_IMODE(r.path(0).stat().st_mode) == 0o600
    os.umask(before)


def test_one_engine_at_a_time(tmp_path: Path) -> None:
    first = Directory(tmp_path / "kv", MODEL, 4096)
    with pytest.raises(ConfigError, match="in use by another engine"):
        Directory(tmp_path / "kv", MODEL, 4096)
    with pytest.raises(ConfigError, match="another engine: stop it first"):
        clear(tmp_path / "kv")
    first.close()
    Directory(tmp_path / "kv", MODEL, 4096).close()


def test_a_directory_of_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="holds other files"):
        Directory(tmp_path, MODEL, 4096)
    with pytest.raises(ConfigError, match="no directory of KV blocks"):
        clear(tmp_path)
    file = tmp_path / "thesis.tex"
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (file, file / "kv", tmp_path / "link"):
        with pytest.raises(ConfigError, match="cannot be used: it is no directory; give an empty or a new one"):
            Directory(path, MODEL, 4096)


def test_the_oldest_come_first_and_a_read_counts_as_use(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(4))
        r.write(range(4))
        for n in range(4):
            os.utime(r.path(n), (1e9 + n, 1e9 + n))
        r.restore([Piece(name(1), None, 1)])
        assert r.directory is not None
        found = r.directory.found()
        assert [f.name for f in found] == [name(n) for n in (0, 2, 3, 1)] and found[-1].age_seconds < 60


def test_other_models_blocks_are_cut_to_a_share(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(4))
        r.write(range(4))
        size = r.directory.file_bytes
        for n in range(4):
            os.utime(r.path(n), (1e9 + n, 1e9 + n))
        kept = [r.path(2), r.path(3)]
    other = Directory(tmp_path / "kv", OTHER, 4096)
    assert other.shrink_others(2 * size + 5, [OTHER]) == 2 * size
    assert sorted((tmp_path / "kv").rglob("*.kv")) == sorted(kept)
    other.close()


def test_clearing_deletes_every_models_blocks(tmp_path: Path) -> None:
    for model in (MODEL, OTHER):
        with rig(tmp_path / "kv", model=model) as r:
            r.store(range(3))
            r.write(range(3))
            size = r.directory.file_bytes
    assert clear(tmp_path / "kv") == (6, 6 * size)
    assert [p.name for p in (tmp_path / "kv").rglob("*")] == [LOCK]
    assert clear(tmp_path / "kv") == (0, 0)


def test_directories_with_names_of_files_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "_skipped", [])
    root = tmp_path / "kv"
    with rig(root) as r:
        r.store(range(3))
        r.write(range(1))
        for path in (r.path(1), root / "x.kv", r.path(1).parents[1] / "1-1.part"):
            path.mkdir(parents=True)
            (path / "kept").touch()
    with rig(root) as r:
        assert r.directory is not None and [f.name for f in r.directory.found()] == [name(0)]
        assert r.directory.shrink_others(0, [MODEL]) == 0 == r.directory.shrink_others(0, [OTHER])
        r.store(range(3))
        assert [(d.taken, d.error is None) for d in r.write(range(3))] == [(False, True), (True, False), (False, True)]
        size = r.directory.file_bytes
    assert clear(root) == (2, 2 * size)
    assert caplog.text.count("is no regular file") == 1
    assert len([*root.rglob("kept")]) == 3


def test_a_file_in_place_of_a_folder_of_blocks_takes_their_names(tmp_path: Path) -> None:
    with rig(tmp_path / "kv") as r:
        r.store(range(1))
        r.path(0).parent.touch()
        assert r.write(range(1))[0].taken


def test_every_flipped_bit_of_a_row_changes_its_checksum() -> None:
    row = np.random.default_rng(0).integers(0, 255, 8192, dtype=np.uint8)
    known = checksum(row, b"d" * 16)
    for at in range(0, 8192, 7):
        row[at] ^= 1 << at % 8
        assert checksum(row, b"d" * 16) != known
        row[at] ^= 1 << at % 8
    assert checksum(row, b"d" * 16) == known != checksum(row, b"e" * 16)
    assert transfer.COPIED_ROWS + transfer.READING_THREADS < transfer.STAGED_ROWS  # reads wait for a thread


def test_the_link_is_measured_before_memory_is_pinned_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured meanwhile, a link of 40 GB/s was taken for one of 1, and restores beside steps were paced by that."""
    seen: list[str] = []
    start = HostMemory.start
    monkeypatch.setattr(HostMemory, "start", lambda self: (seen.append("pins"), start(self))[1])
    monkeypatch.setattr(Transfer, "_block_seconds", lambda self, queue, share: seen.append("measures") or 1e-5)
    monkeypatch.setattr(transfer, "copier", lambda caches: CpuCopier([c.data for c in caches]))

    class Gpu(torch.Tensor):
        device = torch.device("cuda")

    monkeypatch.setattr(HostMemory, "_grow", lambda self: setattr(self, "ready", self._limit))
    monkeypatch.setattr(HostMemory, "close", lambda self: None)
    pages = torch.zeros(2, 4, 4, 8)
    mover = Transfer([pages.as_subclass(Gpu)], 3, None)
    mover.close()
    assert seen == ["measures", "measures", "pins"]
