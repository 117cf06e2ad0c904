"""The Unix socket of `perilune serve --uds`."""

import socket
import stat
from pathlib import Path

import pytest

from perilune.cli.serve import listening
from perilune.core.config import ServerConfig
from perilune.core.errors import ConfigError


def test_the_socket_is_private_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with listening(ServerConfig(uds=str(path))) as sock:
        assert sock.getsockname() == str(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        with pytest.raises(ConfigError, match="another process serves"), listening(ServerConfig(uds=str(path))):
            pass
        assert path.is_socket()
    assert not path.exists()


def test_a_socket_that_a_killed_server_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with listening(ServerConfig(uds=str(path))):
        pass
    path.write_text("precious")
    for wrong in (path, tmp_path):
        with pytest.raises(ConfigError, match="it exists and is no socket; c"), listening(ServerConfig(uds=str(wrong))):
            pass
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match="--uds"), listening(ServerConfig(uds=str(tmp_path / ("x" * 200)))):
        pass
