"""The certificate that the HTTP service shows, and a handshake in memory that proves it usable."""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from eplb.errors import ConfigError


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, files in PEM format."""

    chain: Path  # the certificate, then those between it and the authority's
    key: Path  # without a passphrase

    def load(self, context: ssl.SSLContext) -> None:
        """Have a context show it.

        Raises:
            ConfigError: a file cannot be read, other users can read the key, or they do not belong
                together.
        """
        _check_readable(self.chain, "certificate")
        _check_readable(self.key, "key")
        mode = self.key.stat().st_mode
        if mode & stat.S_IRWXO:
            raise ConfigError(
                f"key {self.key} has mode {stat.S_IMODE(mode):04o}, expected one that keeps other "
                "users out: 0600 or 0640"
            )
        try:
            context.load_cert_chain(self.chain, self.key, password=self._no_passphrase)
        except ssl.SSLError as exc:
            if exc.reason == "KEY_VALUES_MISMATCH":
                raise ConfigError(
                    f"key {self.key} does not fit certificate {self.chain}, expected its own"
                ) from exc
            raise ConfigError(
                f"certificate {self.chain} or key {self.key} cannot be loaded: {refusal(exc)}, "
                "expected PEM files"
            ) from exc

    def _no_passphrase(self) -> str:
        raise ConfigError(f"key {self.key} has a passphrase, expected none")

    def check(self) -> str:
        """Find out whether it can be used, whoever signed it; returns the end of its validity.

        Raises:
            ConfigError: a file cannot be used, or it is expired.
        """
        client, server = (
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
        )
        self.load(server)
        client.load_verify_locations(self.chain)
        client.check_hostname = False  # names that browsers use are not known here
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            return _handshake_in_memory(client, server)
        except ssl.SSLError as exc:
            raise ConfigError(
                f"certificate {self.chain}: {refusal(exc)}, expected one that is valid now"
            ) from exc


def _check_readable(path: Path, what: str) -> None:
    try:
        path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{what} {path} cannot be read: {exc.strerror}, expected a PEM file"
        ) from exc


def _handshake_in_memory(client: ssl.SSLContext, server: ssl.SSLContext) -> str:
    """Let two contexts shake hands; returns until when the server's certificate is valid.

    Raises:
        ssl.SSLError: the client refuses the certificate.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    giving = server.wrap_bio(to_server, to_client, server_side=True)
    left = [asking, giving]
    while left:
        for end in tuple(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:  # the other end's turn
                continue
    shown = asking.getpeercert() or {}
    return str(shown.get("notAfter", "unknown"))


def refusal(exc: ssl.SSLError) -> str:
    """Return why a certificate is refused, as text."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {exc.verify_message.rstrip('.')}"
    return (exc.reason or str(exc)).replace("_", " ").lower()
