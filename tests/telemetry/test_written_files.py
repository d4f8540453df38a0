"""Where commands write: files whole or not at all, devices and pipes written through."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from eplb.errors import ConfigError
from telemetry.written_files import check_own, check_writable, make_own_folder, write_atomically
from tests.support.repository import ROOT

NULL, FULL = (1, 3), (1, 7)  # the kernel's numbers of /dev/null and /dev/full


def device(path: Path, numbers: tuple[int, int]) -> Path:
    if os.geteuid():
        pytest.skip("a device node needs root")
    os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(*numbers))
    return path


def test_device_node_is_written_through_and_stays(tmp_path: Path) -> None:
    path = device(tmp_path / "null", NULL)
    write_atomically(path, b"data")

    assert stat.S_ISCHR(path.stat().st_mode)
    assert list(tmp_path.iterdir()) == [path]


def test_full_device_is_refused_and_stays(tmp_path: Path) -> None:
    path = device(tmp_path / "full", FULL)

    with pytest.raises(ConfigError, match="cannot be written: No space left"):
        write_atomically(path, b"data")
    assert stat.S_ISCHR(path.stat().st_mode)


def test_full_device_is_refused_without_root() -> None:
    with pytest.raises(ConfigError, match="/dev/full cannot be written: No space left"):
        write_atomically(Path("/dev/full"), b"data")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)


def test_pipe_gets_all_bytes_and_stays(tmp_path: Path) -> None:
    path, data = tmp_path / "pipe", os.urandom(300_000)  # more than a pipe holds
    os.mkfifo(path)
    reader = os.open(path, os.O_RDWR)  # as a writer too: else a read before the first byte ends
    parts: list[bytes] = []

    def drain() -> None:
        with os.fdopen(reader, "rb") as file:
            parts.append(file.read(len(data)))

    thread = threading.Thread(target=drain)
    thread.start()
    write_atomically(path, data)
    thread.join()

    assert parts == [data]
    assert stat.S_ISFIFO(path.stat().st_mode)


def test_pipe_that_nobody_reads_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ConfigError, match="no process reads this pipe"):
        write_atomically(tmp_path / "pipe", b"data")


def test_descriptor_of_a_file_is_written_through(tmp_path: Path) -> None:
    script = (
        "from pathlib import Path; from telemetry.written_files import write_atomically\n"
        "print('before', flush=True); write_atomically(Path('/dev/stdout'), b'data')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", script], stdout=out, check=True, env=environment)

    assert (tmp_path / "out").read_bytes() == b"before\ndata"
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert Path("/dev/stdout").is_symlink()


def test_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "link").symlink_to("file")
    write_atomically(tmp_path / "link", b"new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"


def test_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it is a folder, expected a file"):
        write_atomically(tmp_path, b"data")
    with pytest.raises(ConfigError, match=r"--output .* cannot be written"):
        check_writable(tmp_path, "--output")
    check_writable(Path("/dev/null"), "--output")


def test_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    make_own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)  # who is in the group is the operator's choice
    check_own(folder)
    folder.chmod(0o777)

    with pytest.raises(ConfigError, match=r"state has mode 0777, .* chmod o-w"):
        make_own_folder(folder)


def test_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    os.chown(folder, 65534, 65534)

    with pytest.raises(ConfigError, match="state belongs to user 65534, expected user 0"):
        check_own(folder)
