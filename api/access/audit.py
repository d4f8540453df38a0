"""The audit: every change with its actor and reason, in a file that is only appended to.

    {"number": 7, ..., "before": HASH OF 6, "hash": HASH OF 7}    one line each

Each line has the hash of the one before it, so a line that was changed, removed or inserted breaks
the chain. Lines that were cut off at the end break nothing: compare the number and hash of the last
line with a copy that is kept elsewhere (``eplb audit --verify`` prints both).

A crash of the host may leave a part of a line at the end. Readers leave it out. The next change
moves it to a file beside the audit, and a line of the audit says so.

A change is written before it is done, and its outcome after it: a disk that is full refuses the
change, and not its record. A pause alone is done all the same. Lines that the file cannot take are
kept in the store, and follow once the file can be written (``AuditLines``).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pwd
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fcntl import LOCK_EX, LOCK_SH, flock
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from api.access.keys import Role
from eplb.declared import Meaning
from eplb.errors import EplbError, StoreError
from telemetry.written_files import make_own_folder, private

if TYPE_CHECKING:
    from telemetry.state.store import StateStore

AUDIT_FILE = "audit.jsonl"  # in the state folder
START = "0" * 64  # the hash before the first line
MOST_BYTES = 16_384  # longest line
MOST_TEXT = 600  # characters of a reason or detail


log = logging.getLogger(__name__)


class AuditError(EplbError):
    """The audit cannot be written or read, or its chain is broken."""


class BrokenChain(AuditError):
    """A line of the audit was changed, removed or inserted."""

    exit_status = 1  # exit status of a command that this error ends


@dataclass(frozen=True)
class AuditEntry:
    """One line."""

    time: Annotated[float, Meaning("seconds since the epoch")]
    deployment: Annotated[str, Meaning("the deployment that is changed")]
    actor: Annotated[str, Meaning("name of a key, or who else it was")]
    role: str
    address: Annotated[str, Meaning("of the client; local: a command on this host")]
    request: Annotated[str, Meaning("the same in both lines of one request")]
    action: Annotated[str, Meaning("method and path, or the command")]
    reason: str
    outcome: Annotated[
        str, Meaning("asked, then the status of the answer; of a command done or failed")
    ]
    number: int = 0
    before: Annotated[str, Meaning("hash of the line before it")] = ""
    hash: str = ""
    detail: Annotated[
        str,
        Meaning("what the request asks, then what was done: values before and after, a plan"),
    ] = ""

    def sealed(self, number: int, before: str) -> AuditEntry:
        """Give it its place in the chain."""
        placed = replace(self, number=number, before=before, hash="")
        return replace(placed, hash=placed.digest())

    def digest(self) -> str:
        """Hash of everything but the hash."""
        fields = asdict(self) | {"hash": ""}
        if not self.detail:  # lines of before the field keep their hash
            del fields["detail"]
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class Audit:
    """The audit of a state folder. Any thread and process may append."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / AUDIT_FILE

    def append(self, entry: AuditEntry) -> AuditEntry:
        """Add a line, and return once it is on the disk.

        A part of a line at the end of the file, which a crash has left, is moved away first.

        Raises:
            AuditError: it cannot be written; nothing was added.
        """
        entry = replace(
            entry,
            reason=entry.reason[:MOST_TEXT],
            action=entry.action[:MOST_TEXT],
            detail=entry.detail[:MOST_TEXT],
        )
        try:
            make_own_folder(self.path.parent)
            with open(self.path, "a+b", opener=private) as file:
                flock(file, LOCK_EX)
                repair = self._move_partial_line(file.fileno(), entry)
                last, end = self._last(file.fileno())
                lines = b""
                for further in (entry,) if repair is None else (repair, entry):
                    last = further.sealed(
                        1 if last is None else last.number + 1, START if last is None else last.hash
                    )
                    lines += json.dumps(asdict(last), separators=(",", ":")).encode() + b"\n"
                try:
                    file.write(lines)
                    file.flush()
                    os.fsync(file.fileno())
                except OSError:
                    os.truncate(file.fileno(), end)  # a torn line would break the chain
                    raise
        except OSError as exc:
            raise AuditError(f"the audit {self.path} cannot be written: {exc}") from exc
        assert last is not None, "a line was added"
        return last

    def _last(self, descriptor: int) -> tuple[AuditEntry | None, int]:
        """The last line, and where the file ends."""
        size = os.fstat(descriptor).st_size
        start = max(0, size - 2 * MOST_BYTES)
        tail = os.pread(descriptor, size - start, start).rstrip(b"\n").rpartition(b"\n")[2]
        return (_entry(tail, "last line") if tail else None), size

    def _move_partial_line(self, descriptor: int, cause: AuditEntry) -> AuditEntry | None:
        """Move what follows the last whole line to a file beside the audit.

        Args:
            descriptor: of the audit, locked.
            cause: the entry that is added next; its time and deployment are those of the repair.

        Returns:
            The entry that says so; None: the file ends with a whole line.
        """
        size = os.fstat(descriptor).st_size
        start = max(0, size - 2 * MOST_BYTES)
        tail = os.pread(descriptor, size - start, start)
        partial = tail[tail.rfind(b"\n") + 1 :]
        if not partial:
            return None
        aside = self.path.with_name(f"{self.path.name}.partial-{uuid.uuid4().hex[:8]}")
        with open(aside, "xb", opener=private) as file:
            file.write(partial)
            file.flush()
            os.fsync(file.fileno())
        os.truncate(descriptor, size - len(partial))
        text = f"a crash left {len(partial)} bytes of a line; they are in {aside.name}"
        log.error("the audit %s: %s", self.path, text)
        return replace(
            cause,
            actor=local_actor(),
            role=Role.ADMIN.label,
            address="local",
            request=uuid.uuid4().hex,
            action="audit repaired",
            reason=text,
            outcome="done",
            detail="",
        )

    def entries(self) -> Iterator[AuditEntry]:
        """Give the lines, oldest first.

        Raises:
            AuditError: a line cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                flock(file, LOCK_SH)
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        return  # a crash has left a part of a line
                    yield _entry(line, f"line {number}")
        except FileNotFoundError:
            return
        except OSError as exc:
            raise AuditError(f"the audit {self.path} cannot be read: {exc}") from exc

    def page(self, before: int | None, limit: int) -> list[AuditEntry]:
        """Return the latest lines before a number, newest first.

        Only these lines are read, and those that the search for the number looks at.

        Raises:
            AuditError: as ``entries``.
        """
        found: list[AuditEntry] = []
        try:
            with self.path.open("rb") as file:
                flock(file, LOCK_SH)
                if not os.fstat(file.fileno()).st_size:  # which cannot be mapped
                    return []
                with mmap(file.fileno(), 0, access=ACCESS_READ) as text:
                    whole = text.rfind(b"\n") + 1  # a crash may have left a part of a line
                    end = whole if before is None else _start_of(text, before, whole)
                    while end and len(found) < limit:
                        start = text.rfind(b"\n", 0, end - 1) + 1
                        found.append(_entry(text[start:end], f"line at byte {start}"))
                        end = start
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise AuditError(f"the audit {self.path} cannot be read: {exc}") from exc
        return found

    def verify(self) -> AuditEntry | None:
        """Follow the whole chain and return its last line; None: there is no line.

        Raises:
            BrokenChain: the first wrong line is named.
            AuditError: it cannot be read.
        """
        before, last = START, None
        for number, entry in enumerate(self.entries(), start=1):
            if entry.number != number:
                raise BrokenChain(f"line {number} has number {entry.number}, expected {number}")
            if entry.before != before:
                raise BrokenChain(f"line {number} follows {entry.before}, expected {before}")
            if entry.digest() != entry.hash:
                raise BrokenChain(
                    f"line {number} was changed: its hash is {entry.digest()}, "
                    f"expected {entry.hash}"
                )
            before, last = entry.hash, entry
        return last


class AuditLines:
    """The audit of one deployment: its file, and the lines that wait for it in the store."""

    def __init__(self, audit: Audit, store: StateStore) -> None:
        self._audit, self._store = audit, store

    def append(self, entry: AuditEntry) -> None:
        """Add a line to the file.

        Raises:
            AuditError: the file cannot be written.
        """
        self._audit.append(entry)

    def keep(self, entry: AuditEntry) -> bool:
        """Add a line to the file, or else to the store; False: neither took it."""
        try:
            self._audit.append(entry)
        except AuditError as exc:
            log.error("%s", exc)
            try:
                self._store.keep_audit_line(json.dumps(asdict(entry)))
            except StoreError as also:
                log.error("lost line of the audit: %s; %s", entry, also)
                return False
        return True

    def catch_up(self) -> None:
        """Move lines that wait to the file, once it takes them; a death may repeat one.

        Raises:
            StoreError: the store cannot be used.
        """
        for number, line in self._store.audit_lines():
            try:
                self._audit.append(_entry(line.encode(), f"line {number} that waits"))
            except AuditError:
                return
            self._store.forget_audit_lines(number)


def words(values: Mapping[str, Any]) -> str:
    """Give values with their names, without those that are not known, as the detail of a line."""
    known = {name: value for name, value in values.items() if value is not None}
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in known.items())


def changed(names: Iterable[str], before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Give values that a change has set, before and after it, as the detail of a line."""
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return ", ".join(f"{name} {json.dumps(old)} -> {json.dumps(new)}" for name, old, new in pairs)


def local_actor() -> str:
    """Return the user of this process and its host, as the audit names them."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


@contextmanager
def noting(state_dir: Path, deployment: str, action: str, reason: str) -> Iterator[None]:
    """Add what a command of this host does to the audit, and how it ended.

    Raises:
        AuditError: it cannot be written.
    """
    entry = AuditEntry(
        time=time.time(),
        deployment=deployment,
        actor=local_actor(),
        role=Role.ADMIN.label,
        address="local",
        request=uuid.uuid4().hex,
        action=action,
        reason=reason,
        outcome="asked",
    )
    audit, outcome = Audit(state_dir), "failed"
    audit.append(entry)
    try:
        yield
        outcome = "done"
    finally:
        audit.append(replace(entry, time=time.time(), outcome=outcome))


def _start_of(text: mmap, number: int, size: int) -> int:
    """Where the first line with that number or a greater one begins: numbers only grow."""
    low, high = 0, size
    while low < high:
        middle = (low + high) // 2
        start, end = text.rfind(b"\n", 0, middle) + 1, text.find(b"\n", middle) + 1
        if _entry(text[start:end], f"line at byte {start}").number >= number:
            high = start
        else:
            low = end
    return low


def _entry(line: bytes, where: str) -> AuditEntry:
    try:
        return AuditEntry(**json.loads(line))
    except (ValueError, TypeError) as exc:
        raise BrokenChain(f"{where} of the audit is no entry: {exc}") from exc
