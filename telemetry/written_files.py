"""Files written whole or not at all; devices, pipes and descriptors written through.

What a deployment keeps on a host is of one user: folders of mode 0700, files of 0600.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tempfile
from pathlib import Path

from eplb.errors import ConfigError

STATE_FOLDER = "the state folder"
STREAM = re.compile(r"(?:/proc/self|/proc/\d+|/dev)/fd/(\d+)")


def stream_of(path: Path) -> int | str | None:
    """What is written through and never replaced: a descriptor, or a device, pipe or socket.

    None: a regular file, or none yet. /dev/stdout is a link to a descriptor, whatever that is.
    """
    seen = path
    for _ in range(8):
        if (descriptor := STREAM.fullmatch(str(seen.absolute()))) is not None:
            return int(descriptor[1])
        if not seen.is_symlink():
            break
        seen = seen.parent / seen.readlink()
    return str(path) if path.exists() and not path.is_file() and not path.is_dir() else None


def check_writable(path: Path, option: str) -> None:
    """Refuse a file that could not be written, before a long run.

    Raises:
        ConfigError: it is a folder, or in none that can be written.
    """
    stream = stream_of(path)
    if isinstance(stream, int):
        return
    if path.is_dir() or not os.access(stream or path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written, expected a file in a folder")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, or leave what was there; a device, a pipe or a descriptor is written through.

    Raises:
        ConfigError: the file cannot be written, or takes only a part.
    """
    unfinished = None
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder, expected a file")
        if (stream := stream_of(path)) is not None:
            _write_through(stream, data)
            return
        target = path.resolve()  # a link stays a link
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", delete=False
        ) as file:
            unfinished = Path(file.name)
            file.write(data)
        unfinished.chmod(0o666 & ~_umask())
        unfinished.replace(target)
    except OSError as exc:
        if unfinished is not None:
            unfinished.unlink(missing_ok=True)
        why = "no process reads this pipe" if exc.errno == errno.ENXIO else exc.strerror
        raise ConfigError(f"{path} cannot be written: {why}") from exc


def _write_through(stream: int | str, data: bytes) -> None:
    # Not blocking: the opening of a pipe that nobody reads would wait without end.
    descriptor = (
        os.dup(stream) if isinstance(stream, int) else os.open(stream, os.O_WRONLY | os.O_NONBLOCK)
    )
    try:
        if isinstance(stream, str):
            os.set_blocking(descriptor, True)
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def private(path: str, flags: int) -> int:
    """Open a file, which is for this user alone where it is new."""
    return os.open(path, flags, 0o600)


def make_own_folder(path: Path, what: str = STATE_FOLDER) -> None:
    """Make a folder for this user alone, unless it is there; then ``check_own``.

    Raises:
        OSError: it cannot be made.
        ConfigError: as ``check_own``.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_own(path, what)


def check_own(path: Path, what: str = STATE_FOLDER) -> None:
    """Refuse a file or folder that another user could have written; nothing is there: none is.

    Root may write anywhere. A group is let in where its folder says so.

    Raises:
        ConfigError: it is of another user, or every user may write to it.
    """
    try:
        seen = path.stat()
    except OSError:
        return  # who opens it tells
    if seen.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{what} {path} belongs to user {seen.st_uid}, expected user {os.geteuid()}, who runs "
            "this, or root: keys and settings in it would be that user's"
        )
    if seen.st_mode & stat.S_IWOTH:
        raise ConfigError(
            f"{what} {path} has mode {stat.S_IMODE(seen.st_mode):04o}, expected one that keeps "
            f"other users from writing: chmod o-w {path}"
        )


def file_digest(path: Path) -> str:
    """A file's hash as a remark; nothing for a folder, whose manifest has it."""
    if not path.is_file() or stream_of(path) is not None:
        return ""
    with path.open("rb") as file:
        return f" (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
