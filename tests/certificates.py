"""Certificates for tests, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="the openssl command is not installed")


def make(directory: Path, name: str, *, passphrase: str | None = None, rsa: bool = False) -> tuple[Path, Path]:
    """(certificate, key) of a server named `name` at 127.0.0.1, which is its own authority."""
    cert, key = directory / "cert.pem", directory / "key.pem"
    algorithm = "rsa:2048" if rsa else "ec -pkeyopt ec_paramgen_curve:prime256v1"
    kind = f"req -x509 -newkey {algorithm} -days 2 -addext subjectAltName=IP:127.0.0.1"
    secret = ["-nodes"] if passphrase is None else ["-passout", f"pass:{passphrase}"]
    files = ["-keyout", str(key), "-out", str(cert)]
    command = ["openssl", *kind.split(), "-subj", f"/CN={name}", *secret, *files]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key
