"""Access keys: names, roles and salted hashes in one file; a key itself is shown once.

    eplb_NAME_SECRET    the name finds the line, the secret is compared with its hash

A secret has 256 random bits, so one salted SHA-256 is enough: there is nothing to guess, and a
request must not cost what a password's hash costs.

    viewer     reads
    operator   reads, and rebalances, pauses and resumes
    admin      also changes settings
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from fcntl import LOCK_EX, flock
from pathlib import Path

from eplb.errors import ConfigError
from telemetry.written_files import check_own, make_own_folder, private

KEYS_FILE = "access-keys.json"  # in the state folder
VERSION = 1
NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
PREFIX = "eplb"


class Role(IntEnum):
    """What a key may do; each role may do what those before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """Its name in files, answers and commands."""
        return self.name.lower()


ROLES = {role.label: role for role in Role}
ADMIN = Role.ADMIN.label


@dataclass(frozen=True)
class AccessKey:
    """One line of the file."""

    name: str
    role: str
    salt: str
    sha256: str  # digest of salt and secret
    created: float  # seconds since the epoch

    def __post_init__(self) -> None:
        texts = (self.name, self.role, self.salt, self.sha256)
        if not all(isinstance(text, str) for text in texts) or self.role not in ROLES:
            raise ValueError(f"a key of name {self.name!r} and role {self.role!r}")


@dataclass(frozen=True)
class Actor:
    """Who sends a request."""

    name: str
    role: Role


def _has_admin(keys: Mapping[str, AccessKey]) -> bool:
    return any(key.role == ADMIN for key in keys.values())


def _hash(salt: str, secret: str) -> str:
    return hashlib.sha256(f"{salt}:{secret}".encode()).hexdigest()


class AccessKeys:
    """The keys of a state folder. A change by another process applies at the next request."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / KEYS_FILE
        self._stamp: tuple[int, int, int] | None = None
        self._keys: Mapping[str, AccessKey] = {}

    @property
    def exists(self) -> bool:
        """Whether there is a file of keys, even one without any."""
        return self.path.exists()

    def all(self) -> list[AccessKey]:
        """Return the keys, by name.

        Raises:
            ConfigError: the file cannot be read, others may read it, or it is none of keys.
        """
        self._refresh()
        return sorted(self._keys.values(), key=lambda key: key.name)

    def actor(self, token: str) -> Actor | None:
        """Return whose key this is; None: nobody's."""
        self._refresh()
        prefix, _, rest = token.partition("_")
        name, _, secret = rest.partition("_")
        key = self._keys.get(name) if prefix == PREFIX else None
        # A name that is not there takes as long as a secret that is wrong.
        expected = key.sha256 if key else "0" * 64
        is_right = hmac.compare_digest(_hash(key.salt if key else "", secret), expected)
        return Actor(key.name, ROLES[key.role]) if key is not None and is_right else None

    def add(self, name: str, role: str, *, force: bool = False) -> str:
        """Add a key and return it; it is in no file.

        Args:
            force: add it though no admin has a key.

        Raises:
            ConfigError: the name cannot be used or is taken, there is no such role, or the service
                would ask for keys and no admin have one.
        """
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"the name of a key is {name!r}, expected 1 to 40 of a-z, 0-9 and -, "
                "the first none of -"
            )
        if role not in ROLES:
            raise ConfigError(f"the role is {role!r}, expected one of: {', '.join(ROLES)}")
        salt, secret = secrets.token_hex(16), secrets.token_hex(32)
        with self._changing() as keys:
            if name in keys:
                raise ConfigError(f"there is a key {name!r}, expected another name")
            if not (force or role == ADMIN or _has_admin(keys)):
                raise ConfigError(
                    f"the key {name!r} is of a {role} and no admin has a key, expected --role "
                    f"{ADMIN} first, or --force: with a key the service is closed to all others"
                )
            keys[name] = AccessKey(name, role, salt, _hash(salt, secret), time.time())
        return f"{PREFIX}_{name}_{secret}"

    def remove(self, name: str) -> None:
        """Remove a key: requests with it are refused from now on.

        Raises:
            ConfigError: there is no such key, or it is the last one of an admin.
        """
        with self._changing() as keys:
            removed = keys.pop(name, None)
            if removed is None:
                known = ", ".join(sorted(keys)) or "none"
                raise ConfigError(f"there is no key {name!r}, expected one of: {known}")
            if removed.role == ADMIN and not _has_admin(keys):
                raise ConfigError(
                    f"{name!r} is the last key of an admin, without which the service is closed to "
                    f"all, expected another one first (eplb keys add NAME --role {ADMIN}); to open "
                    f"the service to every user of this host, remove {self.path}"
                )

    @contextmanager
    def _changing(self) -> Iterator[dict[str, AccessKey]]:
        """Change the keys while no other process does, and write them in one piece."""
        make_own_folder(self.path.parent)
        with open(f"{self.path}.lock", "w", opener=private) as lock:
            flock(lock, LOCK_EX)
            self._stamp = None
            self._refresh()
            keys = dict(self._keys)
            yield keys
            record = {"version": VERSION, "keys": [asdict(key) for key in keys.values()]}
            new = Path(f"{self.path}.new")
            with open(new, "w", opener=private) as file:
                json.dump(record, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
            self._stamp = None

    def _refresh(self) -> None:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            self._stamp, self._keys = None, {}
            return
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp == self._stamp:
            return
        check_own(self.path, "the file of access keys")
        if found.st_mode & 0o077:
            raise ConfigError(
                f"{self.path} has mode {found.st_mode & 0o777:o}, expected 600: others can read it"
            )
        try:
            record = json.loads(self.path.read_text())
            if record["version"] != VERSION:
                raise ConfigError(
                    f"{self.path} is of version {record['version']!r}, expected {VERSION}"
                )
            keys = [AccessKey(**line) for line in record["keys"]]
            self._keys = {key.name: key for key in keys}
        except OSError as exc:
            raise ConfigError(f"{self.path} cannot be read: {exc}") from exc
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(
                f"{self.path} is damaged: found {exc!r}, expected the JSON that `eplb keys add` "
                "writes. Restore a copy of it, or remove it and add the keys again: without the "
                "file the service is open to this host alone"
            ) from exc
        self._stamp = stamp
