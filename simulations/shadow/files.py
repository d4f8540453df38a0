"""Windows from files: single ones, those of a watched folder, and folders that are one dump.

Files are taken in the order of the numbers in their names. While a folder is watched, a file is
read once its size and time have stayed the same from one poll to the next; lines of a ``.jsonl``
are read as they come, each once it is complete.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eplb.core.placement import Placement
from eplb.errors import EplbError
from simulations.shadow.lines import LineWindows
from simulations.shadow.windows import Observed, Skips, SourceOptions
from telemetry.formats.bounded import reading
from telemetry.formats.engines import sglang
from telemetry.formats.table import read
from telemetry.formats.types import LoadFile

SUFFIXES = {".pt", ".json", ".csv", ".npz", ".npy", ".yaml", ".yml"}
DUMP_FOLDERS = ("meta_info.json", "*manifest.json")  # one of these inside: the folder is one dump
NUMBER = re.compile(r"\d+(?:\.\d+)?")


class FileSource:
    """Windows of files and of the files in folders, sub-folders that are one dump included."""

    def __init__(self, places: Sequence[Path], options: SourceOptions) -> None:
        self.skips, self.notes = Skips(), dict[str, None]()
        self._places, self._options = places, options
        self._stamps: dict[Path, tuple[int, int]] = {}  # as of the previous poll
        self._tried: dict[Path, tuple[int, int]] = {}  # as they were when they were read
        self._used: set[Path] = set()
        self._lines: dict[Path, LineWindows] = {}
        self._map: Placement | None = None  # of the latest file that holds a placement alone

    def poll(self, *, is_last: bool) -> Iterator[Observed]:
        """Give the windows of files that are new and complete."""
        found = sorted(self._found(), key=_order)
        rank_files: list[Path] = []
        for path in found:
            if path.suffix == ".jsonl" and self._options.input_format in (None, "vllm-load"):
                yield from self._of_lines(path, is_last=is_last)
            elif self._is_ready(path, is_last=is_last):
                if path.is_file() and sglang.RANK_FILE.fullmatch(path.name):
                    rank_files.append(path)
                else:
                    yield from self._of_file([path])
        yield from self._of_ranks(rank_files, is_last=is_last)

    def system(self) -> None:
        """Files do not tell the nodes."""

    def close(self) -> None:
        """No file stays open between polls."""

    def _found(self) -> Iterator[Path]:
        for place in self._places:
            if place.is_file() or _is_one_dump(place):
                yield place
                continue
            for path in place.iterdir():
                if path.name.startswith("."):
                    continue
                is_dump = path.is_dir() and (_is_one_dump(path) or any(path.glob("*.pt")))
                if is_dump or path.suffix.lower() in SUFFIXES | {".jsonl"}:
                    yield path

    def _is_ready(self, path: Path, *, is_last: bool) -> bool:
        """Whether a file is to be read, and is not being written now."""
        stamp = _stamp(path)
        before, self._stamps[path] = self._stamps.get(path), stamp
        is_new = self._tried.get(path) != stamp
        if is_new and path in self._used:  # its windows would be counted twice
            why = f"{path} was written again after it was read"
            self.skips.add(str(path), "changed after it was read", why)
            return False
        return is_new and (is_last or before == stamp)

    def _of_ranks(self, paths: list[Path], *, is_last: bool) -> Iterator[Observed]:
        """Dumps of one file a rank: the n-th file of every rank is of the n-th dump."""
        by_rank: dict[int, list[Path]] = {}
        for path in paths:
            match = sglang.RANK_FILE.fullmatch(path.name)
            assert match is not None, "matched before"
            by_rank.setdefault(int(match["rank"][:9]), []).append(path)
        num_ranks = self._options.num_ranks or max(by_rank, default=-1) + 1
        while by_rank and all(by_rank.get(rank) for rank in range(num_ranks)):
            yield from self._of_file([by_rank[rank].pop(0) for rank in range(num_ranks)])
        if is_last:
            for path in (one for rest in by_rank.values() for one in rest):
                why = f"not every one of {num_ranks} ranks has a file of this dump"
                self.skips.add(str(path), "ranks missing", why)

    def _of_file(self, paths: list[Path]) -> Iterator[Observed]:
        """Windows of one file, of a folder, or of the files of all ranks."""
        for path in paths:
            self._tried[path] = _stamp(path)
        name = str(paths[0])
        self.skips.by_item.pop(name, None)
        try:
            if len(paths) > 1:
                with reading(paths[0], "a dump"):
                    found: Any = sglang.read_rank_files(paths, self._options.read)
            else:
                found = read(name, self._options.read, self._options.input_format)
        except EplbError as exc:
            self.skips.add(name, "not readable", str(exc))
            return
        self._used.update(paths)
        self.notes.update(dict.fromkeys(found.notes))
        if not isinstance(found, LoadFile):
            self._map = found.placement
            return
        held = self._map if found.current is None else found.current.placement
        for index, tokens in enumerate(found.history.tokens):
            yield Observed(tokens, found.layers, held, f"{paths[0].name} window {index}")

    def _of_lines(self, path: Path, *, is_last: bool) -> Iterator[Observed]:
        if path not in self._lines:
            self._lines[path] = LineWindows(
                path, self._options.read, self._options.window_steps, self.skips
            )
        yield from self._lines[path].poll(is_last=is_last)
        self.notes.update(dict.fromkeys(self._lines[path].notes))


def _is_one_dump(path: Path) -> bool:
    return path.is_dir() and any(any(path.glob(name)) for name in DUMP_FOLDERS)


def _stamp(path: Path) -> tuple[int, int]:
    """Size and time of a file; of a folder, of all its files."""
    try:
        stats = [one.stat() for one in (path.iterdir() if path.is_dir() else [path])]
    except OSError:
        return -1, -1
    return sum(one.st_size for one in stats), max((one.st_mtime_ns for one in stats), default=0)


def _order(path: Path) -> tuple[list[float], str]:
    """By the numbers in the name: load_9 before load_10."""
    return [float(one) for one in NUMBER.findall(path.stem[:100])], path.name
