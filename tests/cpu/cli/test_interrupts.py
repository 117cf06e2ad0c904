"""Ctrl-C at given points of a command: code 130, no traceback, none is lost, and no process is left. Each case is a
process that sends SIGINT to itself where the test says."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
START = """
import os, signal, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(3):  # the handler runs between two instructions
        time.sleep(0)
class At:  # a module is about to be imported
    def find_spec(self, name, path=None, target=None):
        if name == POINT and not self.done:
            self.done = True
            before()
    done = False
before = interrupt
sys.meta_path.insert(0, At())
sys.argv = ["perilune", *sys.argv[2:]]
POINT = {point!r}
{more}
from perilune.cli.main import main
main()
"""


def check(point: str, *args: str, more: str = "", code: int = 130) -> None:
    """Runs `args` with an interrupt ahead of the import of module `point`; `more` is code that runs before."""
    mark, program = uuid.uuid4().hex, START.format(point=point, more=more)
    with tempfile.TemporaryFile("w+") as said:  # a pipe would be waited for until all its writers have ended
        done = subprocess.run(
            [sys.executable, "-c", program, point, *args],
            stdout=said, stderr=said, env={**os.environ, "MARK": mark}, timeout=120, start_new_session=True,
        )  # fmt: skip
        left = [pid for pid in os.listdir("/proc") if pid.isdigit() and mark in _environment(pid)]
        said.seek(0)
        text = said.read()
    assert done.returncode == code and not left, (done, left, text)
    assert not text.strip(), text


def _environment(pid: str) -> str:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return Path("/proc", pid, "environ").read_text(errors="replace")
    return ""


@pytest.mark.parametrize(
    ("point", "args"),
    [
        ("click", ("serve",)),
        ("click.core", ("bench", "decode")),
        ("perilune.core.errors", ("chat",)),
        ("perilune.cli.serve", ("serve",)),
        ("rich", ("serve",)),
        ("perilune.cli.bench.group", ("bench", "decode")),
        ("torch", ("bench", "decode")),
    ],
)
def test_while_modules_are_imported(point: str, args: tuple[str, ...]) -> None:
    check(point, *args)


@pytest.mark.parametrize(("point", "args"), [("torch", ("bench", "decode")), ("rich", ("chat",))])
def test_where_an_import_discards_it(point: str, args: tuple[str, ...]) -> None:
    """As torch's C++ does: the exception is cleared, and the command goes on."""
    more = """
def before():
    try:
        interrupt()
    except KeyboardInterrupt:
        print("discarded")
"""
    check(point, *args, more=more)


RUNS = """
import secrets
def token(size):
{where}
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.01)
    print("it was lost")
secrets.token_urlsafe = token
"""


@pytest.mark.parametrize(
    "where",
    [
        "    interrupt()",
        "    type('Gone', (), {'__del__': lambda self: interrupt()})()",
        "    import weakref; some = At(); ref = weakref.ref(some, lambda ref: interrupt()); del some",
    ],
)
def test_while_a_command_runs(where: str) -> None:
    """Python prints and forgets what a finalizer or a callback raises."""
    check("", "key", "alice", more=RUNS.format(where=where))


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_removes_temporary_files(name: str, tmp_path: Path) -> None:
    more = "import tempfile\n" + RUNS.replace(
        "{where}",
        f"""
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        os.kill(os.getpid(), signal.{name})
        time.sleep(9)""",
    )
    done = subprocess.run([sys.executable, "-c", START.format(point="", more=more), "", "key", "alice"], timeout=120)
    assert done.returncode == 128 + signal.Signals[name] and not list(tmp_path.iterdir()), done


def test_another_one_while_the_process_ends() -> None:
    more = RUNS.format(where="    interrupt()") + "import atexit\natexit.register(interrupt)\n"
    check("", "key", "alice", more=more)


@pytest.mark.parametrize("point", ["perilune.server.app", "perilune.server.responses.api", "perilune.grammar.matcher"])
def test_while_a_server_starts(point: str) -> None:
    """Its engine's process has been started by then."""
    check(point, "serve", "kimi-nano", "--port", "0")


def test_sigterm_while_a_server_starts() -> None:
    more = "def before(): os.kill(os.getpid(), signal.SIGTERM)"
    check("perilune.server.responses.api", "serve", "kimi-nano", "--port", "0", more=more, code=143)


@pytest.mark.parametrize("what", ["tokenizer.Tokenizer.from_directory", "constrain.warm_up"])
def test_while_a_server_prepares(what: str) -> None:
    """What takes seconds with a large vocabulary is not waited for, and a second Ctrl-C changes nothing."""
    more = f"""
from perilune.engine import client
from perilune.grammar import constrain
from perilune.text import tokenizer
def hangs(*args):
    os.kill(os.getpid(), signal.SIGHUP)  # a reload, which comes too early
    interrupt()
    time.sleep(90)
killed = client._Process.kill
async def kill(self, *args):
    interrupt()
    await killed(self, *args)
    interrupt()
client._Process.kill = kill
{what} = hangs
"""
    check("", "serve", "kimi-nano", "--port", "0", more=more)
