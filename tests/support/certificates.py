"""Certificates of authorities that exist for one test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from api.config.certificate import Certificate


class Authority:
    """Signs certificates and writes them as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._ca = folder, trustme.CA()
        self.file = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, address: str, *, expired: bool = False) -> Certificate:
        """Give a certificate for an address, and its key."""
        until = datetime.now(UTC) - timedelta(days=1) if expired else None
        issued = self._ca.issue_cert(address, not_after=until)
        prefix = f"{address}{'-expired' * expired}"
        chain, key = self._folder / f"{prefix}.pem", self._folder / f"{prefix}.key"
        key.touch(0o600)
        chain.write_bytes(b"".join(one.bytes() for one in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key))
        return Certificate(chain, key)
