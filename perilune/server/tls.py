"""HTTPS: a certificate that can be replaced while the server runs."""

import ssl
from pathlib import Path

from perilune.core.errors import ConfigError


class Certificate:
    """The TLS context of the server. Connections made after `load` get the certificate that `load` has read.

    OpenSSL keeps one certificate per type of key in a context: after RSA is replaced by EC, or EC by RSA, clients could
    still get the old one. So each certificate has a context of its own, which every handshake switches to.
    """

    def __init__(self, cert: str, key: str) -> None:
        """PEM files: the chain, the server's own certificate first, and its key. ConfigError if they cannot be used."""
        self.cert, self.key = Path(cert), Path(key)
        self.load()
        self.context = self._latest
        self.context.sni_callback = self._switch

    def load(self) -> None:
        """Reads the files again. ConfigError if they cannot be used: the old certificate stays in use."""
        context = self._new()
        self._load_into(context)
        self._latest = context

    def _switch(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL calls this in every handshake, with or without a server name."""
        connection.context = self._latest

    @staticmethod
    def _new() -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        locked = False

        def passphrase() -> str:  # without it, OpenSSL would ask on the terminal
            nonlocal locked
            locked = True
            return ""

        try:
            context.load_cert_chain(self.cert, self.key, passphrase)
        except ssl.SSLError as e:
            why = "they must be PEM files of a certificate chain and its private key"
            if locked:
                why = "the key has a passphrase: write it without one"
            elif e.reason == "KEY_VALUES_MISMATCH":
                why = "the key does not belong to the certificate"
            raise ConfigError(f"TLS cannot use {self.cert} and {self.key}: {why}") from None
        except OSError as e:
            raise ConfigError(f"TLS cannot read {self.cert} and {self.key}: {e.strerror}") from None
