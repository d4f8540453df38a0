"""Queries of the SQLite store, and conversion between its rows and the types of LoadStore.

Every query takes the deployment first.
"""

from __future__ import annotations

from typing import Any

from eplb.core.load import LoadSample
from eplb.migration.serialisation import placement_from_bytes
from telemetry.records.rollup_codec import rollup_to_bytes
from telemetry.records.sample_codec import sample_to_bytes
from telemetry.records.task_codec import result_from_text
from telemetry.retention.rollup import Rollup
from telemetry.store import CommittedPlacement, Event, Lease, RunInfo, Task
from telemetry.stores.commit_rules import details_from_text, details_to_text

Row = tuple[Any, ...]

_OF_RUN = "run, time, window_steps, model, topology, window_seconds"
RUN = f"SELECT {_OF_RUN} FROM run WHERE deployment = ?"
INSERT_RUN = f"INSERT INTO run (deployment, {_OF_RUN}) VALUES (?, ?, ?, ?, ?, ?, ?)"
RANK_STATES = "SELECT record FROM rank_report WHERE deployment = ? AND run = ? ORDER BY rank"
REPLACE_RANK_STATE = "INSERT OR REPLACE INTO rank_report VALUES (?, ?, ?, ?)"
INSERT_SAMPLE = (
    "INSERT INTO sample (deployment, run, rank, sequence, time, first_step, last_step, "
    "generation, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (deployment, run, rank, sequence) DO NOTHING"
)
SAMPLES = (
    "SELECT cursor, record FROM sample WHERE deployment = ? AND run = ? AND cursor > ? "
    "ORDER BY cursor LIMIT ?"
)
# The index is named because SQLite would rather walk through all samples in the order asked for.
SAMPLES_BETWEEN = (
    "SELECT cursor, record FROM sample WHERE cursor IN ("
    "SELECT cursor FROM sample INDEXED BY sample_in_time WHERE deployment = ? "
    "AND time >= ? AND time < ? AND cursor > ? ORDER BY cursor LIMIT ?) ORDER BY cursor"
)
SAMPLE_COUNTS = (
    "SELECT rank, sum(num_samples) FROM ("
    "SELECT rank, count(*) AS num_samples FROM sample WHERE deployment = ? AND run = ? "
    "GROUP BY rank UNION ALL "
    "SELECT rank, num_samples FROM pruned WHERE deployment = ? AND run = ?"
    ") GROUP BY rank ORDER BY rank"
)
_OLDEST = (
    "SELECT cursor FROM sample INDEXED BY sample_in_time "
    "WHERE deployment = ? AND time < ? ORDER BY time, cursor LIMIT ?"
)
COUNT_PRUNED = (
    "INSERT INTO pruned SELECT deployment, run, rank, count(*) FROM sample "
    f"WHERE cursor IN ({_OLDEST}) GROUP BY run, rank "
    "ON CONFLICT DO UPDATE SET num_samples = num_samples + excluded.num_samples"
)
PRUNE = f"DELETE FROM sample WHERE cursor IN ({_OLDEST})"
INSERT_ROLLUP = (
    "INSERT INTO rollup (deployment, seconds, start, run, phase, num_samples, record) "
    "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
ROLLUPS = (
    "SELECT id, record FROM rollup WHERE deployment = ? AND seconds = ? AND start > ? "
    "ORDER BY start, run, phase LIMIT ? OFFSET ?"
)
PRUNE_ROLLUPS = "DELETE FROM rollup WHERE deployment = ? AND seconds = ? AND start <= ?"
LEASE = (
    "SELECT holder, token, expires, ttl_s, since, renewals, kind FROM held_lease "
    "WHERE deployment = ? AND kind = ?"
)
REPLACE_LEASE = (
    "INSERT OR REPLACE INTO held_lease (deployment, holder, token, expires, ttl_s, since, "
    "renewals, kind) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
LIVE = "SELECT record FROM live_settings WHERE deployment = ?"
REPLACE_LIVE = "INSERT OR REPLACE INTO live_settings VALUES (?, ?)"
LATEST_HASH = (
    "SELECT generation, hash FROM placement WHERE deployment = ? ORDER BY generation DESC LIMIT 1"
)
OPEN_PLAN = "SELECT plan_id FROM migration WHERE deployment = ? AND state = 'open'"
PLACEMENT = "SELECT record, time, plan_id, reason FROM placement WHERE deployment = ?"
RESERVE_PLAN_IDS = "UPDATE deployment SET last_plan_id = max(last_plan_id, ?) WHERE name = ?"
LAST_PLAN_ID = "SELECT last_plan_id FROM deployment WHERE name = ?"
EVENTS = (
    "SELECT id, time, kind, detail FROM event WHERE deployment = ? AND id > ? ORDER BY id LIMIT ?"
)
LATEST_EVENTS = (
    "SELECT id, time, kind, detail FROM event WHERE deployment = ? AND id < ? "
    "ORDER BY id DESC LIMIT ?"
)
PRUNE_EVENTS = (
    "DELETE FROM event WHERE deployment = :deployment AND id <= ("
    "SELECT id FROM event WHERE deployment = :deployment ORDER BY id DESC LIMIT 1 OFFSET :keep)"
)
TASK = "SELECT id, time, kind, request, state, result FROM task WHERE deployment = ?"
REPLACE_REPORT = "INSERT OR REPLACE INTO last_words VALUES (?, ?, ?, ?, ?)"
REPORTS = (
    "SELECT words FROM last_words WHERE deployment = ? AND run = ? AND membership = ? ORDER BY rank"
)
ANNOUNCED = "SELECT record FROM announced WHERE deployment = ?"
REPLACE_ANNOUNCED = "INSERT OR REPLACE INTO announced VALUES (?, ?, ?, ?)"
DROP_ANNOUNCED = "DELETE FROM announced WHERE deployment = ? AND component = ? AND name = ?"
PROPOSALS = "SELECT line FROM proposal WHERE deployment = ? ORDER BY id"
PROPOSAL_CONTENT = "SELECT content FROM proposal WHERE deployment = ? AND id = ?"
INSERT_PROPOSAL = "INSERT INTO proposal VALUES (?, ?, ?, ?)"
PUT_PROPOSAL = "UPDATE proposal SET line = ? WHERE deployment = ? AND id = ?"
DROP_PROPOSAL = "DELETE FROM proposal WHERE deployment = ? AND id = ?"
RECOVERY = "SELECT record FROM recovery WHERE deployment = ? ORDER BY membership DESC LIMIT 1"
INSERT_RECOVERY = "INSERT INTO recovery VALUES (?, ?, ?)"
TASKS = f"{TASK} AND state = ? AND id > ? ORDER BY id LIMIT ?"


def run_row(info: RunInfo) -> Row:
    """Return a run as the values of RUN."""
    model, topology = details_to_text(info.model), details_to_text(info.topology)
    return info.run, info.time, info.window_steps, model, topology, info.window_seconds


def run_of(row: Row) -> RunInfo:
    """Return a run of a row of RUN."""
    run, started, window_steps, model, topology, window_seconds = row
    details = details_from_text(model), details_from_text(topology)
    return RunInfo(run, started, *details, window_steps, window_seconds)


def sample_row(sample: LoadSample, version: int) -> Row:
    """Return a sample as the values of INSERT_SAMPLE, its record in that version."""
    return (
        sample.deployment,
        sample.run,
        sample.rank,
        sample.sequence,
        sample.time,
        sample.first_step,
        sample.last_step,
        sample.generation,
        sample_to_bytes(sample, version),
    )


def rollup_row(rollup: Rollup) -> Row:
    """Return a roll-up as the values of INSERT_ROLLUP, all but the deployment."""
    record = rollup_to_bytes(rollup)
    start, run, phase = rollup.start, rollup.run, rollup.phase
    return rollup.seconds, start, run, phase, rollup.num_samples, record


def lease_row(lease: Lease) -> Row:
    """Return a lease as the values of LEASE."""
    return tuple(vars(lease).values())


def lease_of(row: Row | None) -> Lease | None:
    """Return a lease of a row of LEASE."""
    return Lease(*row) if row else None


def placement_of(row: Row) -> CommittedPlacement:
    """Return a committed placement of a row of PLACEMENT."""
    record, *rest = row
    return CommittedPlacement(placement_from_bytes(record), *rest)


def event_of(row: Row) -> Event:
    """Return an event of a row of EVENTS."""
    *plain, detail = row
    return Event(*(*plain, details_from_text(detail)))


def task_of(row: Row) -> Task:
    """Return a task of a row of TASK."""
    task_id, submitted, kind, request, state, result = row
    asked, ended = details_from_text(request), result_from_text(result)
    return Task(task_id, submitted, kind, asked, state, ended)
