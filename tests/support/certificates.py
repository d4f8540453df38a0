"""Certificates of authorities that exist for one test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from rebalance.weights.link.tls import Certificate, TlsFiles


class Authority:
    """Signs certificates and writes them as files."""

    def __init__(self, folder: Path, name: str = "deployment") -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._name, self._ca = folder, name, trustme.CA()
        self.file = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, *addresses: str, expired: bool = False) -> TlsFiles:
        """Give the files of a host with these addresses."""
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        issued = self._ca.issue_cert(*addresses, not_after=until)
        prefix = f"{self._name}-{'-'.join(addresses)}{'-expired' * expired}"
        chain, key = self._folder / f"{prefix}.pem", self._folder / f"{prefix}.key"
        key.touch(0o600)
        chain.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return TlsFiles(Certificate(chain, key), self.file)
