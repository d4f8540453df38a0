"""Windows of the store that plug-ins write samples and maps into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eplb.core.placement import Placement
from eplb.errors import StoreError
from eplb.migration.serialisation import model_from_dict, topology_from_dict
from simulations.shadow.windows import Observed, Skips
from telemetry import file_of, open_store
from telemetry.formats.types import Layers, ReadOptions, resolve
from telemetry.store import RunInfo
from telemetry.windows.folder import Window, WindowFolder
from telemetry.windows.run_windows import folder_of

KEEP = 4096  # windows that one poll may find
PATIENCE = 2  # later complete windows, after which an incomplete one is given up


class StoreSource:
    """Complete windows of the current run, each with the map of its generation.

    A window in which the map changed has the newer one. An incomplete window is waited for until
    two later ones are complete; after that it is skipped and counted.
    """

    def __init__(self, url: str, options: ReadOptions) -> None:
        self.skips, self.notes = Skips(), dict[str, None]()
        self._url, self._options = url, options
        path = file_of(url)
        if path is None and Path(url).suffix:
            path = Path(url) if "://" not in url else None
        if path is not None and not path.is_file():
            raise StoreError(f"there is no store at {path}, expected the file of a deployment")
        self._store = open_store(url, options.deployment)
        self._info: RunInfo | None = None
        self._folder: WindowFolder | None = None
        self._cursor, self._next = 0, 0
        self._maps: dict[int, Placement | None] = {}

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    def group(self) -> tuple[int, int] | None:
        """Ranks and nodes of the current run; None: no run yet."""
        info = self._store.current_run()
        if info is None:
            return None
        topology = topology_from_dict(dict(info.topology))
        return topology.num_ranks, topology.num_nodes

    def poll(self, *, is_last: bool) -> Iterator[Observed]:
        """Give the windows that are complete now."""
        self._follow()
        if self._info is None or self._folder is None:
            return
        while arrived := self._store.samples(self._info.run, after=self._cursor):
            self._folder.add_all([sample for _, sample in arrived])
            self._cursor = arrived[-1][0]
        windows = [one for one in self._folder.windows() if one.index >= self._next]
        for place, window in enumerate(windows):
            later = sum(one.is_complete for one in windows[place + 1 :])
            if not window.is_complete and later < PATIENCE and not is_last:
                return
            self._next = window.index + 1
            if window.is_complete:
                yield self._observed(window)
            else:
                missing = ", ".join(map(str, sorted(window.missing_ranks)[:8]))
                why = f"no samples of every step from ranks {missing}"
                self.skips.add(f"window {window.index}", "an incomplete window", why)

    def _follow(self) -> None:
        """Begin anew where the engine was started again."""
        info = self._store.current_run()
        if info is None or (self._info is not None and info.run == self._info.run):
            return
        model = model_from_dict(dict(info.model))
        topology = topology_from_dict(dict(info.topology))
        if self._info is not None:
            self.notes["the engine was started again; later windows are of its new run"] = None
        self._info, self._cursor, self._next = info, 0, 0
        self._folder = folder_of(info, model, topology, keep=KEEP)
        self._stored = Layers(tuple(model.layer_ids), "model")

    def _observed(self, window: Window) -> Observed:
        rows, layers, notes = resolve(self._stored, self._options)
        self.notes.update(dict.fromkeys(notes))
        generation = max(window.generations)
        if generation not in self._maps:
            found = self._store.placement(generation)
            self._maps[generation] = None if found is None else found.placement
        held = self._maps[generation]
        if held is not None:
            share = held.slot_share[rows]
            held = Placement(held.slot_to_expert[rows], held.num_experts, generation, share)
        else:
            self.notes[f"generation {generation} has no map in the store"] = None
        return Observed(window.tokens[rows], layers, held, f"window {window.index}")
