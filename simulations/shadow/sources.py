"""Windows of an engine, from files and folders, or from the store of a deployment.

A source is polled. Each poll gives the windows that are complete by now, oldest first; the last
poll gives what is left. Watching a folder until it is finished and reading the finished folder go
through the same calls. What cannot be used is skipped and counted, with the reason of the first.

Shapes:  L MoE layers, E experts, P physical slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import SEEK_END
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from eplb.core.bounded_json import decode_json
from eplb.core.model import ModelShape
from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import ConfigError, EplbError, StoreError
from eplb.migration.spares import compact, without_spares
from telemetry import file_of, open_store
from telemetry.formats.bounded import reading
from telemetry.formats.engines import sglang
from telemetry.formats.engines.vllm import MAX_LINE_BYTES, Step, StepLines, current_of
from telemetry.formats.intake import busy_layers, order_of, rank_in
from telemetry.formats.table import (
    OF_REQUESTS,
    STORE_SUFFIXES,
    SUFFIXES,
    kind_of,
    read_file,
    read_files,
    read_load,
    read_placement,
)
from telemetry.formats.types import (
    MOST_DENSE,
    Layers,
    LoadFile,
    ReadOptions,
    resolve,
    rows_in_order,
)
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader, model_and_topology
from telemetry.state.store import names_store


@dataclass(frozen=True, eq=False)
class ObservedWindow:
    """One window as an engine reports it."""

    tokens: NDArray[np.int64]  # [L, E]
    layers: Layers
    held: Placement | None  # the map that served; None: not known
    where: str


@dataclass
class Skips:
    """What was not used, by item, with its kind and a sentence."""

    by_item: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, item: str, kind: str, why: str) -> None:
        """Note an item, once."""
        self.by_item[item] = kind, why

    def counts(self) -> dict[str, dict[str, Any]]:
        """Count and first example of each kind."""
        found: dict[str, dict[str, Any]] = {}
        for item, (kind, why) in self.by_item.items():
            first = why if item in why else f"{item}: {why}"
            one = found.setdefault(kind, {"count": 0, "first": first})
            one["count"] += 1
        return found


@dataclass(frozen=True)
class RunSystem:
    """What serves, where a source tells it."""

    topology: Topology
    model: ModelShape


class WindowSource(Protocol):
    """Where windows come from."""

    skips: Skips
    notes: dict[str, None]  # notes of readers, each once

    def poll(self, *, is_last: bool) -> Iterator[ObservedWindow]:
        """Give the windows that are new."""

    def system(self) -> RunSystem | None:
        """Ranks and model; None: the source does not tell."""

    def close(self) -> None:
        """Release what the source holds open."""


@dataclass(frozen=True)
class SourceOptions:
    """How files become windows."""

    read: ReadOptions  # its max_windows is that of one file
    input_format: str | None = None
    window_steps: int = 100  # lines of a ``.jsonl`` in a window
    num_ranks: int | None = None  # files of one dump with a file for each rank


def open_source(places: Sequence[str], options: SourceOptions) -> WindowSource:
    """The source of these places: files and folders, or one store.

    Raises:
        ConfigError: a store among other places, or a place that does not exist.
    """
    is_store = [names_store(one) or Path(one).suffix in STORE_SUFFIXES for one in places]
    if any(is_store):
        if len(places) > 1:
            raise ConfigError(f"a store and {len(places) - 1} other places, expected it alone")
        return StoreSource(places[0], options.read)
    missing = [one for one in places if not Path(one).exists()]
    if missing:
        raise ConfigError(f"{missing[0]} does not exist, expected a file, a folder or a store")
    return FileSource([Path(one) for one in places], options)


MAP_SUFFIXES = {".yaml", ".yml"}
DUMP_FOLDERS = ("meta_info.json", "*manifest.json")  # one of these inside: the folder is one dump


class Part(NamedTuple):
    """What a file is of: one stage of a pipeline, and one rank of it; each file of the same, next.

    Files of all parts together are one dump.
    """

    layers: tuple[int, ...]  # with tokens; empty: of all
    rank: str  # "": of all


class FileSource:
    """Windows of files and of the files in folders, sub-folders that are one dump included.

    Files are taken in the order of the numbers in their names. While a folder is watched, a file is
    read once its size and time have stayed the same from one poll to the next; lines of a
    ``.jsonl`` are read as they come, each once it is complete. Files of stages and of ranks are
    joined as those of a folder are: the n-th file of each is of the n-th dump.
    """

    def __init__(self, places: Sequence[Path], options: SourceOptions) -> None:
        self.skips, self.notes = Skips(), dict[str, None]()
        self._places, self._options = places, options
        self._stamps: dict[Path, tuple[int, int]] = {}  # sizes and times at the previous poll
        self._tried: dict[Path, tuple[int, int]] = {}  # sizes and times when they were read
        self._used: set[Path] = set()
        self._lines: dict[Path, LineWindows] = {}
        self._waiting: dict[Part, list[Path]] = {}  # for the files of other parts
        self._requests: list[Path] = []  # of one recording of routing, given with the last poll
        self._num_hidden: int | None = None  # rows of files whose rows are hidden layers
        self._map: Placement | None = None  # map of the latest file that holds a placement alone

    def poll(self, *, is_last: bool) -> Iterator[ObservedWindow]:
        """Give the windows of files that are new and complete."""
        new: list[tuple[Path, Part | Placement | None]] = []
        for path in sorted(self._found(), key=order_of):
            if path.suffix == ".jsonl" and self._options.input_format in (None, "vllm-load"):
                yield from self._of_lines(path, is_last=is_last)
            elif self._is_ready(path, is_last=is_last):
                new.append((path, kind := self._kind_of(path)))
                if isinstance(kind, Part):
                    self._waiting.setdefault(kind, [])
        for path, kind in new:
            if isinstance(kind, Placement):
                self._map = kind
            elif kind is not None:
                self._waiting[kind].append(path)
                yield from self._of_whole_dumps(is_last=is_last)
        if is_last:
            yield from self._of_whole_dumps(is_last=True)
            if self._requests:
                yield from self._of_files(self._requests)
                self._requests = []
            for path in (path for paths in self._waiting.values() for path in paths):
                why = f"not each of {len(self._waiting)} ranks or stages has a file of this dump"
                self.skips.add(str(path), "ranks missing", why)

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
                if is_dump or path.suffix.lower() in SUFFIXES | MAP_SUFFIXES:
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

    def _kind_of(self, path: Path) -> Part | Placement | None:
        """The part of a load, or the map that a file is; None: it cannot be read."""
        self._tried[path], options = _stamp(path), self._options
        self.skips.by_item.pop(str(path), None)
        if path.is_dir():
            return Part((), "")
        name = sglang.DUMP_FILE.fullmatch(path.name)
        if name is not None and name["rank"] is not None:
            rank = int(name["rank"][:9])
            for each in range(max(rank + 1, options.num_ranks or 0)):
                self._waiting.setdefault(Part((), str(each)), [])
            return Part((), str(rank))
        try:
            if (options.input_format or kind_of(path, options.read)[0]) in OF_REQUESTS:
                self._requests.append(path)
                return None
            _, file = read_file(path, options.read, options.input_format)
            if not isinstance(file, LoadFile):
                return read_placement(str(path), options.read, options.input_format).placement
        except EplbError as exc:
            self.skips.add(str(path), "not readable", str(exc))
            return None
        self._num_hidden = file.layers.num_hidden if file.layers.axis == "hidden" else None
        return Part(busy_layers(file), rank_in(path.name))

    def _of_whole_dumps(self, *, is_last: bool) -> Iterator[ObservedWindow]:
        """The n-th files of all parts, where each has one; those without tokens are of none."""
        parts = list(self._waiting)
        if not parts:
            return
        layers = [layer for stage in {part.layers for part in parts} for layer in stage]
        if len(set(layers)) < len(layers):  # they overlap: no stages of one pipeline
            groups = [[part for part in parts if part.layers == it.layers] for it in parts]
        else:
            groups = [parts]
        for group in groups:
            stage_layers = {layer for part in group for layer in part.layers}
            while all(self._waiting[part] for part in group):
                if not (is_last or self._has_all(stage_layers)):
                    break
                yield from self._of_files([self._waiting[part].pop(0) for part in group])

    def _has_all(self, layers: set[int]) -> bool:
        """Whether stages with these layers are the whole model, as far as it is known."""
        stated = self._options.read.layer_ids
        if not layers or stated is not None or self._num_hidden is None:
            return not layers or layers >= set(stated or ())
        first = min(layers)
        return first <= MOST_DENSE and layers == set(range(first, self._num_hidden))

    def _of_files(self, paths: list[Path]) -> Iterator[ObservedWindow]:
        """Windows of one file or folder, or of the files of all ranks and stages."""
        name, options = str(paths[0]), self._options
        try:
            if len(paths) > 1:
                file = read_files(paths, options.read, options.input_format)
            else:
                file = read_load(name, options.read, options.input_format)
        except EplbError as exc:
            self.skips.add(name, "not readable", str(exc))
            return
        self._used.update(paths)
        self.notes.update(dict.fromkeys(file.notes))
        held = self._map if file.current is None else file.current.placement
        for index, tokens in enumerate(file.history.tokens):
            yield ObservedWindow(tokens, file.layers, held, f"{paths[0].name} window {index}")

    def _of_lines(self, path: Path, *, is_last: bool) -> Iterator[ObservedWindow]:
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


class LineWindows:
    """The windows of a ``.jsonl`` that an engine appends to, from where the previous poll ended.

    A window has a fixed number of lines of load. It ends sooner where the map changes, so that each
    window was counted under one map. A window of less than half its lines is skipped and counted.
    """

    def __init__(self, path: Path, options: ReadOptions, steps: int, skips: Skips) -> None:
        self._path, self._options, self._steps, self._skips = path, options, steps, skips
        self._lines = StepLines(options)
        self._offset = self._number = 0
        self._sum: NDArray[np.int64] | None = None
        self._held: NDArray[np.int64] | None = None
        self._count = self._first = 0
        self.notes: tuple[str, ...] = ()

    def poll(self, *, is_last: bool) -> Iterator[ObservedWindow]:
        """Give the windows that the lines complete which came since the previous poll."""
        for line in self._new_lines(is_last=is_last):
            self._number += 1
            if line.isspace():
                continue
            where = f"{self._path.name} line {self._number}"
            try:
                with reading(self._path, "a line of load"):
                    record = decode_json(line, max_bytes=MAX_LINE_BYTES)
                    step = self._lines.take(record, f"line {self._number}")
            except EplbError as exc:
                self._skips.add(where, "line not readable", str(exc))
                continue
            if step is not None:
                yield from self._add(step)
        if is_last:
            yield from self._end()

    def _new_lines(self, *, is_last: bool) -> Iterator[bytes]:
        """Complete lines; in the last poll what is left, too."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, SEEK_END)
                if size < self._offset:
                    why = f"{self._path} has {size} bytes, expected {self._offset} or more"
                    self._skips.add(str(self._path), "cut off after it was read", why)
                    return
                file.seek(self._offset)
                while line := file.readline(MAX_LINE_BYTES + 1):
                    if not (is_last or line.endswith(b"\n") or len(line) > MAX_LINE_BYTES):
                        return
                    self._offset += len(line)
                    yield line
        except OSError as exc:
            why = f"{self._path} cannot be read: {exc.strerror}"
            self._skips.add(str(self._path), "not readable", why)

    def _add(self, step: Step) -> Iterator[ObservedWindow]:
        if self._held is not None and not np.array_equal(self._held, step.held):
            yield from self._end()
        if self._sum is None:
            self._sum, self._held = np.zeros_like(step.tokens), step.held
            self._count, self._first = 0, self._number
        self._sum = self._sum + step.tokens
        self._count += 1
        if self._count == self._steps:
            yield from self._end()

    def _end(self) -> Iterator[ObservedWindow]:
        """The window that was filled, if it has enough lines."""
        tokens, held = self._sum, self._held
        self._sum = self._held = None
        if tokens is None or held is None:
            return
        where = f"{self._path.name} lines from {self._first}"
        if 2 * self._count < self._steps:
            why = f"{self._count} lines, expected {self._steps} or at least half"
            self._skips.add(where, "a short window", why)
            return
        try:
            rows, layers, self.notes = resolve(rows_in_order(len(held)), self._options)
        except ConfigError as exc:
            self._skips.add(where, "not readable", f"{self._path}: {exc}")
            return
        placement = self._placement(held[rows], where)
        if placement is not None:
            yield ObservedWindow(tokens[rows], layers, placement, where)

    def _placement(self, held: NDArray[np.int64], where: str) -> Placement | None:
        """The map; None and noted where it lacks experts, as between two sizes of a group."""
        placement, notes = current_of(held, self._lines.sizes["num_experts"])
        if placement is None:
            self._skips.add(where, "a map that lacks experts", notes[0])
        return placement


PATIENCE = 2  # later complete windows, after which an incomplete one is given up
BATCH_WINDOWS = 64  # whose samples are read at a time, if ranks write one for each
NO_MAP = "has no map in the store"


class StoreSource:
    """Complete windows of the current run, each with the map of its generation.

    Spare slots, which every rank keeps empty in every layer, are no place for experts: topology and
    maps are given without them, as the controller plans.
    A window in which the map changed has the newer one. An incomplete window is waited for until
    two later ones are complete; after that it is skipped and counted.
    """

    def __init__(self, url: str, options: ReadOptions) -> None:
        self.skips, self.notes = Skips(), dict[str, None]()
        self._options = options
        path = file_of(url)
        if path is not None and not path.is_file():
            raise StoreError(f"there is no store at {path}, expected the file of a deployment")
        self._store = open_store(url, options.deployment)
        self._reader: RunReader | None = None
        self._next = self._spares = 0
        self._maps: dict[int, Placement | None] = {}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def system(self) -> RunSystem | None:
        """Ranks and model of the current run, without spare slots; None: no run yet."""
        info = self._store.current_run()
        if info is None:
            return None
        model, topology = model_and_topology(info)
        committed = self._store.committed()
        if committed is not None and committed.placement.num_slots == topology.num_slots:
            self._spares = _spares(committed.placement, topology)
            topology = without_spares(topology, self._spares)
        return RunSystem(topology, model)

    def poll(self, *, is_last: bool) -> Iterator[ObservedWindow]:
        """Give the windows that are complete now."""
        reader = self._follow()
        if reader is None:
            return
        for _ in reader.read(BATCH_WINDOWS * reader.topology.num_ranks):
            yield from self._complete(reader, is_last=False)
        yield from self._complete(reader, is_last=is_last)

    def _complete(self, reader: RunReader, *, is_last: bool) -> Iterator[ObservedWindow]:
        windows = [window for window in reader.folder.windows() if window.index >= self._next]
        for place, window in enumerate(windows):
            later = sum(one.is_complete for one in windows[place + 1 :])
            if not window.is_complete and later < PATIENCE and not is_last:
                return
            if self._next and window.index > self._next:
                first, last = self._next, window.index - 1
                why = f"no samples at all of windows {first}..{last}"
                self.skips.add(f"window {first}", "missing windows", why)
            self._next = window.index + 1
            if window.is_complete:
                yield self._observed(window)
            else:
                missing = ", ".join(map(str, sorted(window.missing_ranks)[:8]))
                why = f"no samples of every step from ranks {missing}"
                self.skips.add(f"window {window.index}", "an incomplete window", why)

    def _follow(self) -> RunReader | None:
        """Begin anew where the engine was started again."""
        info = self._store.current_run()
        if info is not None and (self._reader is None or info.run != self._reader.run.run):
            if self._reader is not None:
                self.notes["the engine was started again; later windows are of its new run"] = None
            self._reader, self._next = RunReader(self._store, info), 0
            self._topology = self._reader.topology
            self._stored = Layers(tuple(self._reader.model.layer_ids), "model")
        return self._reader

    def _observed(self, window: Window) -> ObservedWindow:
        rows, layers, notes = resolve(self._stored, self._options)
        self.notes.update(dict.fromkeys(notes))
        held = self._map(max(window.generations))
        if held is not None:
            share = held.slot_share[rows]
            slots = held.slot_to_expert[rows]
            held = Placement(slots, held.num_experts, held.generation, share)
        return ObservedWindow(window.tokens[rows], layers, held, f"window {window.index}")

    def _map(self, generation: int) -> Placement | None:
        """The map of a generation without spare slots; None and noted where there is none."""
        if generation in self._maps:
            return self._maps[generation]
        found = self._store.placement(generation)
        held = None if found is None else found.placement
        if held is None:
            self.notes[f"generation {generation} {NO_MAP}"] = None
        elif self._spares and held.num_slots == self._topology.num_slots:
            try:
                held, _ = compact(held, self._topology, self._spares)
            except EplbError as exc:
                self.notes[f"the map of generation {generation} is not used: {exc}"] = None
                held = None
        self._maps[generation] = held
        return held


def _spares(placement: Placement, topology: Topology) -> int:
    """Slots that every rank with slots keeps empty in every layer."""
    empty = placement.slot_to_expert == EMPTY
    on_rank = [
        int(empty[:, topology.slots_on(rank)].sum(axis=1).min())
        for rank in range(topology.num_ranks)
        if topology.slots_of_rank[rank]
    ]
    return min(on_rank, default=0)
