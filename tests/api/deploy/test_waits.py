"""Files that a start refused: changed only once they are whole."""

from __future__ import annotations

from pathlib import Path

from api.deploy.waits import LOOK_S, StartFiles


def test_files_are_changed_once_they_differ_and_are_not_written_any_more(tmp_path: Path) -> None:
    now = 0.0
    files = StartFiles(tmp_path, tmp_path / "eplb.toml", clock=lambda: now)
    seen = list[bool]()

    def look() -> None:
        nonlocal now
        now += LOOK_S
        seen.append(files.are_changed)

    look()
    for size in (1, 2, 3):  # as a copy that goes on
        (tmp_path / "weights").write_bytes(b"x" * size)
        look()
    look()

    assert seen == [False, False, False, False, True]
    assert not files.are_changed  # before the next look is due


def test_file_that_is_removed_is_a_change_and_the_same_bytes_are_none(tmp_path: Path) -> None:
    now, config = 0.0, tmp_path / "eplb.toml"
    config.write_text("a = 1")
    files = StartFiles(config, clock=lambda: now)
    now = 2 * LOOK_S
    assert not files.are_changed
    config.unlink()
    now = 4 * LOOK_S
    assert not files.are_changed
    now = 6 * LOOK_S

    assert files.are_changed
    assert str(files) == str(config)
