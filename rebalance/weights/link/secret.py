"""The one secret of a deployment, and the keys that each part of it gets.

No part holds the secret itself: a key is an HMAC of what it is for. A rank that was taken over
has the keys of its links, and not the token of the HTTP service.

    EPLB_SECRET, or network.secret_file --> host caches, links between hosts and ranks, HTTP, join

Where nothing leaves the host (loopback addresses alone) the host makes a secret for itself, in the
state folder.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from eplb.declared import Setting
from eplb.errors import ConfigError
from eplb.settings.deployment import is_loopback

VARIABLE = "EPLB_SECRET"
FILE_SETTING = "network.secret_file"
# in the state folder
OWN_FILE, TOKEN_FILE, METRICS_TOKEN_FILE = "secret", "http-token", "metrics-token"
LEAST_BYTES, MOST_BYTES = 16, 4096


@dataclass(frozen=True)
class SecretSettings:
    """Where the secret is found."""

    secret_file: Annotated[
        Path | None,
        Setting(
            "file with the secret of the deployment (or EPLB_SECRET); none: only loopback addresses"
        ),
    ] = None


@dataclass(frozen=True)
class Secret:
    """The secret of a deployment; neither text nor log shows it."""

    key: bytes = field(repr=False)
    is_given: bool  # False: this host made it for itself

    def derived(self, purpose: str, num_bytes: int = 32) -> bytes:
        """Give the key for one purpose, at most 32 bytes."""
        return hmac.new(self.key, f"eplb {purpose}".encode(), "sha256").digest()[:num_bytes]

    @property
    def fingerprint(self) -> str:
        """What may be shown, and stored, to find secrets that differ."""
        return self.derived("fingerprint", 8).hex()

    @property
    def http_token(self) -> str | None:
        """What the HTTP service asks for; None: nothing, it is reached from this host alone."""
        return self.derived("http").hex() if self.is_given else None

    @property
    def metrics_token(self) -> str | None:
        """What the address of /metrics asks for; None as for ``http_token``."""
        return self.derived("metrics").hex() if self.is_given else None


def deployment_secret(
    secret_file: Path | None,
    environ: Mapping[str, str],
    *,
    addresses: Mapping[str, str],
    state_dir: Path,
    makes: bool = True,
) -> Secret:
    """Read the secret of a deployment.

    Args:
        secret_file: the setting, if it is set.
        environ: the process environment.
        addresses: where anything of the deployment listens, by the setting that names it.
        state_dir: of this host; holds the secret that the host makes for itself.
        makes: whether a host without a secret makes its own.

    Raises:
        ConfigError: there is none, and an address is not a loopback one; two are given; it is too
            short; or its file cannot be read, or can be read by every user.
    """
    in_environment = environ.get(VARIABLE)
    if in_environment is not None and secret_file is not None:
        raise ConfigError(
            f"a secret is in {VARIABLE} and in {FILE_SETTING} {secret_file}, expected one of them"
        )
    if in_environment is not None:
        return Secret(_check(in_environment.encode(), VARIABLE), is_given=True)
    if secret_file is not None:
        return Secret(_read(secret_file, f"{FILE_SETTING} {secret_file}"), is_given=True)
    for name, address in addresses.items():
        if not is_loopback(address):
            raise ConfigError(
                f"{name} is {address}, which is not a loopback address, and there is no secret: "
                f"expected one of {LEAST_BYTES} bytes or more in {FILE_SETTING} or {VARIABLE}"
            )
    return Secret(_own(state_dir / OWN_FILE, makes=makes), is_given=False)


def write_token(token: str | None, path: Path) -> Path | None:
    """Write a token for this user's programs; None where there is none.

    Raises:
        ConfigError: the file cannot be written.
    """
    if token is None:
        return None
    _write_new(path, f"{token}\n", replace=True)
    return path


def _read(path: Path, where: str) -> bytes:
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            found = file.read(MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{where} cannot be read: {exc.strerror}") from exc
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"{where} has mode {stat.S_IMODE(mode):04o}, expected one that keeps other users out: "
            "0600 or 0640"
        )
    return _check(found, where)


def _check(found: bytes, where: str) -> bytes:
    found = found.strip()
    if not LEAST_BYTES <= len(found) <= MOST_BYTES:
        raise ConfigError(
            f"{where} has {len(found)} bytes, expected {LEAST_BYTES} to {MOST_BYTES}, for example "
            "those that `openssl rand -hex 32` prints"
        )
    return found


def _own(path: Path, *, makes: bool) -> bytes:
    """Read the host's own secret; the first process that needs it writes it."""
    if makes and not path.exists():
        _write_new(path, f"{secrets.token_hex(32)}\n", replace=False)
    return _read(path, f"the host's own secret {path}")


def _write_new(path: Path, text: str, *, replace: bool) -> None:
    """Write a file of mode 0600: all of it appears, or nothing."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        if replace:
            unfinished.replace(path)
            return
        try:
            path.hardlink_to(unfinished)  # fails where another process was first
        except FileExistsError:
            pass
        finally:
            unfinished.unlink()
    except OSError as exc:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"{path} cannot be written: {exc.strerror}") from exc
