"""Windows of a deployment's store: samples that ranks or plug-ins wrote, with the maps they served.

Spare slots, which every rank keeps empty in every layer, are no place for experts: topology and
maps are given without them, as the controller plans.
"""

from __future__ import annotations

from collections.abc import Iterator

from eplb.core.placement import EMPTY, Placement
from eplb.core.topology import Topology
from eplb.errors import EplbError, StoreError
from eplb.migration.spares import compact, without_spares
from simulations.shadow.windows import Observed, Skips, System
from telemetry import file_of, open_store
from telemetry.formats.types import Layers, ReadOptions, resolve
from telemetry.load.folder import Window
from telemetry.load.reader import RunReader, model_and_topology

PATIENCE = 2  # later complete windows, after which an incomplete one is given up
BATCH_WINDOWS = 64  # whose samples are read at a time, if ranks write one for each
NO_MAP = "has no map in the store"


class StoreSource:
    """Complete windows of the current run, each with the map of its generation.

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

    def system(self) -> System | None:
        """Ranks and model of the current run, without spare slots; None: no run yet."""
        info = self._store.current_run()
        if info is None:
            return None
        model, topology = model_and_topology(info)
        committed = self._store.committed()
        if committed is not None and committed.placement.num_slots == topology.num_slots:
            self._spares = _spares(committed.placement, topology)
            topology = without_spares(topology, self._spares)
        return System(topology, model)

    def poll(self, *, is_last: bool) -> Iterator[Observed]:
        """Give the windows that are complete now."""
        reader = self._follow()
        if reader is None:
            return
        for _ in reader.read(BATCH_WINDOWS * reader.topology.num_ranks):
            yield from self._complete(reader, is_last=False)
        yield from self._complete(reader, is_last=is_last)

    def _complete(self, reader: RunReader, *, is_last: bool) -> Iterator[Observed]:
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

    def _observed(self, window: Window) -> Observed:
        rows, layers, notes = resolve(self._stored, self._options)
        self.notes.update(dict.fromkeys(notes))
        held = self._map(max(window.generations))
        if held is not None:
            share = held.slot_share[rows]
            slots = held.slot_to_expert[rows]
            held = Placement(slots, held.num_experts, held.generation, share)
        return Observed(window.tokens[rows], layers, held, f"window {window.index}")

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
