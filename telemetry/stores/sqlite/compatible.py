"""What a file has beside the tables of its schema version, and programs of that version need not.

A release adds its tables here first, without a new schema version: programs of the release before
go on, and may be started again. A later release makes them part of a version.

Schema 8 took two tables from programs of schema 7 (0.1.0), which may have the file open. For them
there are views of the same names: their ranks report, and follow the switches, until they end.
"""

from __future__ import annotations

# One statement each. A switch that no layer has set is as ``telemetry.live.Control`` has it.
STATEMENTS = (
    """
CREATE TABLE IF NOT EXISTS announced (
    deployment TEXT NOT NULL, component TEXT NOT NULL, name TEXT NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (deployment, component, name))
""",
    """
CREATE TABLE IF NOT EXISTS proposal (
    deployment TEXT NOT NULL, id INTEGER NOT NULL, line TEXT NOT NULL, content BLOB NOT NULL,
    PRIMARY KEY (deployment, id))
""",
    """
CREATE VIEW IF NOT EXISTS rank_state AS SELECT
    deployment, run, rank,
    json_extract(record, '$.time') AS time, json_extract(record, '$.step') AS step,
    json_extract(record, '$.generation') AS generation, json_extract(record, '$.phase') AS phase,
    json_extract(record, '$.plan_id') AS plan_id, json_extract(record, '$.applied') AS applied,
    json_extract(record, '$.sequence') AS sequence, json_extract(record, '$.detail') AS detail
    FROM rank_report WHERE json_extract(record, '$.version') IS NULL
""",
    """
CREATE TRIGGER IF NOT EXISTS rank_state_reported INSTEAD OF INSERT ON rank_state BEGIN
    INSERT OR REPLACE INTO rank_report VALUES (new.deployment, new.run, new.rank, json_object(
        'run', new.run, 'rank', new.rank, 'time', new.time, 'step', new.step,
        'generation', new.generation, 'phase', new.phase, 'plan_id', new.plan_id,
        'applied', new.applied, 'sequence', new.sequence, 'detail', json(new.detail)));
END
""",
    """
CREATE VIEW IF NOT EXISTS control AS SELECT deployment, json_object(
    'movement', json(iif(coalesce(
        json_extract(record, '$.live.movement'), json_extract(record, '$.static.movement'),
        json_extract(record, '$.movement'), 1), 'true', 'false')),
    'observe', json(iif(coalesce(
        json_extract(record, '$.live.observe'), json_extract(record, '$.static.observe'),
        json_extract(record, '$.observe'), 0), 'true', 'false'))) AS switches
    FROM live_settings
""",
    """
CREATE TRIGGER IF NOT EXISTS control_is_read_only INSTEAD OF INSERT ON control BEGIN
    SELECT RAISE(ABORT, 'the store was upgraded; set switches with a program of its version');
END
""",
)
