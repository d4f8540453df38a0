"""``eplb journal``: the journals of all ranks of a state folder as one table, for a post-mortem."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from api.cli.config import Configured
from api.cli.options import AsJson, with_options
from api.terminal.printable import plain_table, print_plain, printable
from eplb.errors import ConfigError, counted
from rebalance.protocol.journal import JOURNAL_FOLDER, Entry, read_journals

HASH_FROM = 10**12  # numbers above are hashes
VOTES = ("vote cast", "verdict")
STYLES = {
    "swap ordered": "cyan",
    "committed": "green",
    "aborted": "yellow",
    "abort requested": "yellow",
    "frozen": "yellow",
    "death detected": "red",
    "survivor report": "red",
    "recovery": "magenta",
}


@with_options
def journal(
    configured: Configured,
    state_dir: Annotated[
        Path | None, typer.Argument(help="The state folder; else that of the configuration.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=0, max=65_536, help="One rank only.")] = None,
    last: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="Number of entries, the latest.")
    ] = 200,
    votes: Annotated[bool, typer.Option(help="Show votes and verdicts too.")] = True,
    json_output: AsJson = False,
) -> None:
    """Show the journal entries of all ranks by time: plans, votes, swaps, deaths, recoveries."""
    folder = (state_dir or configured.settings().deployment.state_dir) / JOURNAL_FOLDER
    if not folder.is_dir():
        raise ConfigError(f"there is no journal in {folder}, expected one file for each rank")
    entries, num_torn = read_journals(folder)
    if rank is not None and rank not in {entry.rank for entry in entries}:
        raise ConfigError(f"rank {rank} has no entry in {folder}, expected a rank that served")
    chosen = [
        entry
        for entry in entries
        if rank in (None, entry.rank) and (votes or entry.what not in VOTES)
    ]
    if json_output:
        typer.echo(json.dumps([asdict(entry) for entry in chosen[-last:]], indent=1))
        return
    notes = [f"{len(chosen[-last:])} of {counted(len(chosen), 'line')}"]
    if dropped := num_dropped(entries):
        notes.append(f"{dropped} dropped")
    if num_torn:
        notes.append(f"{counted(num_torn, 'torn line')} skipped")
    print_plain(render(chosen[-last:]), ", ".join(notes))


def render(entries: Sequence[Entry]) -> Table:
    """Give entries as a table, a rule between two starts."""
    table = plain_table(("time", "rank", "step", "gen", "plan"))
    table.add_column("what", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for number, entry in enumerate(entries):
        is_new_run = not number or entry.run != entries[number - 1].run
        if is_new_run:
            table.add_row(
                "", "", "", "", "", Text(f"start {printable(entry.run)}", style="bold"), ""
            )
        clock = datetime.fromtimestamp(entry.time, UTC).strftime("%H:%M:%S.%f")[:-3]
        place = (entry.rank, entry.step, entry.generation, entry.plan_id or "")
        style = STYLES.get(entry.what, "")
        shown = Text(printable(entry.what)), Text(detail_of(entry))
        table.add_row(clock, *map(str, place), *shown, style=style)
    return table


def detail_of(entry: Entry) -> str:
    """Give the detail of an entry as text."""
    fields = (f"{name}={_shown(value)}" for name, value in entry.detail.items())
    return printable("  ".join(fields))


def num_dropped(entries: Sequence[Entry]) -> int:
    """Count the entries missing from the files: each rank numbers its entries from its start."""
    numbers: dict[tuple[str, int], list[int]] = {}
    for entry in entries:
        numbers.setdefault((entry.run, entry.rank), []).append(entry.number)
    return sum(max(found) - min(found) + 1 - len(found) for found in numbers.values())


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    # A prefix of a hash is enough to distinguish two.
    is_hash = isinstance(value, int) and abs(value) > HASH_FROM
    return f"{value:x}"[:8] if is_hash else str(value)
