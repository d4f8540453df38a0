"""TLS of links: each side shows a certificate of the deployment's authority, for its own address.

The shared secret still authenticates a member (``handshake``), inside the encrypted connection. The
certificates are checked against a private authority, so a stranger's is refused before that.

    TlsFiles --> server_context, client_context --> wrapped by listener.py and frames.connect
             --> check: a handshake in memory, which shows what a peer would refuse
"""

from __future__ import annotations

import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from eplb.errors import ConfigError

LEAST_VERSION = ssl.TLSVersion.TLSv1_3  # both sides are ours


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
        _load_authority(client, self.chain)
        client.check_hostname = False  # names that browsers use are not known here
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        try:
            return _met_in_memory(client, server, None)
        except ssl.SSLError as exc:
            raise ConfigError(
                f"certificate {self.chain}: {refusal(exc)}, expected one that is valid now"
            ) from exc


@dataclass(frozen=True)
class TlsFiles:
    """What a link needs; the names of the files may differ from host to host."""

    certificate: Certificate  # of this host
    authority: Path  # certificates that those of other hosts are accepted by

    def server_context(self) -> ssl.SSLContext:
        """For connections that are accepted.

        Raises:
            ConfigError: a file cannot be used.
        """
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        # A ticket would make a connection readable that no message has arrived on.
        context.num_tickets = 0
        return context

    def client_context(self) -> ssl.SSLContext:
        """For connections that are opened; the peer's certificate must name its address.

        Raises:
            ConfigError: a file cannot be used.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = LEAST_VERSION
        self.certificate.load(context)
        _load_authority(context, self.authority)
        return context

    def check(self, address: str) -> str:
        """Find out whether peers will accept this host; returns the end of the validity.

        Raises:
            ConfigError: a file cannot be used, or the certificate is expired, of another
                authority, for another address or for another purpose.
        """
        try:
            return _met_in_memory(self.client_context(), self.server_context(), address)
        except ssl.SSLError as exc:
            raise ConfigError(
                f"certificate {self.certificate.chain}: {refusal(exc)}, expected one for {address} "
                f"that {self.authority} accepts for both ends of a connection"
            ) from exc


def _load_authority(context: ssl.SSLContext, authority: Path) -> None:
    """Load the certificates that peers are accepted by.

    Raises:
        ConfigError: the file cannot be read, or has none.
    """
    _check_readable(authority, "authority")
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError as exc:
        raise ConfigError(
            f"authority {authority} cannot be loaded: {refusal(exc)}, expected a PEM file of "
            "certificates"
        ) from exc


def _check_readable(path: Path, what: str) -> None:
    try:
        path.read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"{what} {path} cannot be read: {exc.strerror}, expected a PEM file"
        ) from exc


def _met_in_memory(client: ssl.SSLContext, server: ssl.SSLContext, address: str | None) -> str:
    """Let two contexts meet; returns until when the server's certificate is valid.

    Raises:
        ssl.SSLError: one refuses the other.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname=address)
    gives = server.wrap_bio(to_server, to_client, server_side=True)
    left = [asks, gives]
    while left:
        for end in tuple(left):
            try:
                end.do_handshake()
                left.remove(end)
            except ssl.SSLWantReadError:  # the other end's turn
                continue
    found = asks.getpeercert() or {}
    return str(found.get("notAfter", "unknown"))


def refusal(exc: OSError) -> str:
    """Return the cause of a TLS failure as text; other failures unchanged."""
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"the certificate is refused: {exc.verify_message.rstrip('.')}"
    if isinstance(exc, ssl.SSLError):
        reason = (exc.reason or str(exc)).replace("_", " ").lower()
        if "alert" in reason:
            return f"the other side refused the certificate or the connection: {reason}"
        if reason in ("wrong version number", "http request", "record layer failure"):
            return f"the other side does not use TLS: {reason}"
        return reason
    return str(exc)
