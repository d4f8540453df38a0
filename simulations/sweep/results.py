"""Results of a sweep on disk: a Parquet file for each finished task, and the table of all of them.

    FOLDER/tasks/DIGEST.parquet    one row, written whole by rename when its task ends
    FOLDER/results.parquet         the rows of one grid, in its order, written when the sweep ends

A sweep that is killed loses the tasks that were running and nothing else. The schema version is in
the metadata of every file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any

from eplb.errors import ConfigError
from eplb.packages import needed_for
from simulations.replay import labelled
from simulations.report import TextTable
from simulations.sweep.grid import SweepTask
from telemetry.written_files import write_atomically

SCHEMA, SCHEMA_KEY = 2, b"eplb.sweep.schema"


@dataclass(frozen=True)
class Row:
    """One task: its configuration, and what its replay gave. Wall times are left out: they vary."""

    task: str  # its digest
    load: str
    model: str | None
    hardware: str | None
    ranks: int
    nodes: int
    slots: int  # slots of a layer, all ranks together
    redundant: int  # redundant slots of each rank
    interval: int  # windows
    policy: str
    dispatch: str
    seed: int
    windows: int
    windows_skipped: int
    windows_idle: int
    noise_floor: float
    objective: str  # of the policy's plans: tokens, time, or both; empty: none has an objective
    failed: str  # why the policy ended before the last window; figures are of those before
    imbalance_mean: float | None  # None: it ended before the first
    imbalance_p95: float | None
    imbalance_p99: float | None
    imbalance_max_layer: float | None
    rebalances: int
    kept: int  # plans that were not worth moving to
    experts_moved: int
    bytes_moved: int  # 0 without a model
    step_us_mean: float | None  # None without hardware, as the next two
    lost_s: float | None
    tokens_per_s_per_rank: float | None

    @property
    def label(self) -> str:
        """The policy, as tables and plots name it."""
        return labelled(self.policy, self.objective)

    @property
    def order(self) -> tuple[float, float, float]:
        """The best first: the most tokens, or without times the lowest imbalance of each group."""
        imbalance = float("inf") if self.imbalance_mean is None else self.imbalance_mean
        tokens = self.tokens_per_s_per_rank
        return -(tokens or 0), self.ranks if tokens is None else 0, imbalance

    def cells(self) -> dict[str, str]:
        """As tables have it, by headings."""

        def shown(figure: float | None, spec: str, missing: str = "-") -> str:
            return missing if figure is None else format(figure, spec)

        return {
            "policy": self.label,
            "EP": str(self.ranks),
            "slots": str(self.slots),
            "every": str(self.interval),
            "dispatch": self.dispatch,
            "seed": str(self.seed),
            "imbalance": shown(self.imbalance_mean, ".3f", "failed"),
            "experts": f"{self.experts_moved:,}",
            "tok/s": shown(self.tokens_per_s_per_rank, ".0f"),
            "p99": shown(self.imbalance_p99, ".3f"),
            "rebalances": str(self.rebalances),
        }


def rows_table(rows: Sequence[Row], most: int) -> TextTable:
    """The best rows, without columns that are empty."""
    cells = [row.cells() for row in rows[:most]]
    shown = [name for name in (cells[0] if cells else ()) if any(one[name] != "-" for one in cells)]
    title = f"the best {most} of {len(rows)}" if len(rows) > most else ""
    return TextTable(shown, [[one[name] for name in shown] for one in cells], title)


class Results:
    """The folder of a sweep.

    Raises:
        ConfigError: the folder cannot be made, or pyarrow is not installed.
    """

    def __init__(self, folder: Path) -> None:
        _arrow()
        self.folder, self.table = folder, folder / "results.parquet"
        self._tasks = folder / "tasks"
        try:
            self._tasks.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise ConfigError(f"{folder} cannot be made: {exc.strerror or exc}") from exc

    def finished(self, tasks: Iterable[SweepTask]) -> dict[str, Row]:
        """Rows of the tasks that are finished, by digest.

        Raises:
            ConfigError: a file that is damaged, or of another schema version.
        """
        found = {}
        for task in tasks:
            if (path := self._path(task.digest)).exists():
                (row,) = read_rows(path)
                found[task.digest] = row
        return found

    def add(self, row: Row) -> None:
        """Keep the row of a task."""
        write_rows(self._path(row.task), [row])

    def _path(self, digest: str) -> Path:
        return self._tasks / f"{digest}.parquet"


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a Parquet file; it is whole or not there.

    Raises:
        ConfigError: the file cannot be written.
    """
    arrow, parquet = _arrow()
    table = arrow.Table.from_pylist([asdict(row) for row in rows], schema=_schema(arrow))
    content = BytesIO()
    parquet.write_table(table, content)
    write_atomically(path, content.getvalue())


def read_rows(path: Path) -> list[Row]:
    """Read a file of ``write_rows``.

    Raises:
        ConfigError: a file that is damaged, of something else, or of another schema version.
    """
    arrow, parquet = _arrow()
    try:
        table = parquet.read_table(path)
    except (OSError, arrow.ArrowException) as exc:
        raise ConfigError(
            f"{path} cannot be read: {exc}; remove it, and its task runs again"
        ) from exc
    found = (table.schema.metadata or {}).get(SCHEMA_KEY, b"none").decode(errors="replace")
    if found != str(SCHEMA):
        raise ConfigError(
            f"{path} has schema version {found}, expected {SCHEMA}: remove it, or name another "
            "folder"
        )
    return [Row(**one) for one in table.to_pylist()]


def _schema(arrow: Any) -> Any:
    kinds = {"str": arrow.string(), "int": arrow.int64(), "float": arrow.float64()}
    columns = []
    for column in fields(Row):
        kind, _, optional = str(column.type).partition(" | ")
        columns.append(arrow.field(column.name, kinds[kind], nullable=bool(optional)))
    return arrow.schema(columns, metadata={SCHEMA_KEY: str(SCHEMA)})


def _arrow() -> tuple[Any, Any]:
    with needed_for("a file of results"):
        import pyarrow
        from pyarrow import parquet
    return pyarrow, parquet
