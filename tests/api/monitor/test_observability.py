"""The dashboard and the alert rules ask only for metrics, labels and values that /metrics gives."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser
import pytest
import yaml
from typer.testing import CliRunner

from api.cli.main import app
from api.metrics.definitions import Metric, ServiceFigures, metrics_of
from api.metrics.exposition import metric_families, metrics_text
from api.metrics.observability import ALERTS, DASHBOARD
from api.monitor.monitor import Monitor
from api.monitor.reader import BackgroundReader
from api.monitor.state import Leadership
from api.processes.supervision import ProcessState, ProcessView, SupervisionView
from eplb import Topology
from telemetry.load.drift import Drift
from telemetry.load.folder import Window
from tests.support.readings import changed, read
from tests.support.stores import MemoryStore

TARGET_LABELS = {"instance", "job"}  # Prometheus adds them itself
HISTOGRAM_PARTS = ("_bucket", "_count", "_sum")
# What an operator must see, whatever else a dashboard shows.
SHOWN = {
    "eplb_balancedness",
    "eplb_balancedness_predicted",
    "eplb_rank_load_ratio_max",
    "eplb_drift_score",
    "eplb_rebalances_total",
    "eplb_rebalance_phase",
    "eplb_migrated_bytes_total",
    "eplb_telemetry_lag_seconds",
    "eplb_ranks_alive",
    "eplb_progress_age_seconds",
    "eplb_pace_part",
    "eplb_migration_slowdown",
    "eplb_pace_judgements_total",
}
ALERTED = {
    "eplb_balancedness",
    "eplb_controller_leads",
    "eplb_layers_pending",
    "eplb_telemetry_lag_seconds",
    "eplb_placement_mismatch_ranks",
    "eplb_rebalances_total",
    "eplb_anomalies_total",
    "eplb_progress_age_seconds",
}


def metrics() -> dict[str, Metric]:
    """Every metric by name, with the figures of a run of which all is known."""
    kinds = "controller", "checker", "host_cache", "http"
    processes = (ProcessView(k, k, ProcessState.RUNNING, 0.1, False, 0, "") for k in kinds)
    tokens = np.ones((1, 2), dtype=np.int64)
    none: frozenset[int] = frozenset()
    seen = changed(
        read(MemoryStore("d")),
        latest=Window("a", 0, 0, 1, "mixed", none, none, tokens, tokens),
        scale=Topology.uniform(num_nodes=1, ranks_per_node=2, slots_per_rank=1),
        layer_ids=(0,),
        swap_pauses_ms=(1.0,),
        controller=Leadership("one", 9.0, "", turn_age_s=1.0),
        supervision=SupervisionView(tuple(processes)),
    )
    drift = Drift(np.zeros(1), 0.0, 0.0)
    found = metrics_of(
        seen,
        "rank",
        drift=drift,
        backend="memory",
        received=tokens,
        of_service=ServiceFigures(0, 0, 0),
    )
    return {metric.name: metric for metric in found}


KNOWN = metrics()


def labels_of(name: str) -> set[str]:
    """Labels of a series, or an error that names what is not there."""
    for part in HISTOGRAM_PARTS:
        base = name.removesuffix(part)
        if base != name and base in KNOWN and KNOWN[base].kind == "histogram":
            return {*KNOWN[base].labels, "deployment"} | ({"le"} if part == "_bucket" else set())
    assert name in KNOWN, f"{name} is not among the metrics"
    assert KNOWN[name].kind != "histogram", f"{name} is a histogram, expected one of its parts"
    return {*KNOWN[name].labels, "deployment"}


def panels() -> Iterator[dict[str, Any]]:
    yield from (p for p in json.loads(DASHBOARD.read_text())["panels"] if p["type"] != "row")


def dashboard_expressions() -> list[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    shown = [target["expr"] for panel in panels() for target in panel["targets"]]
    return shown + [one["expr"] for one in dashboard["annotations"]["list"]]


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def parts(expr: Any) -> Iterator[Any]:
    """Every node of a parsed expression."""
    yield expr
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        child = getattr(expr, name, None)
        if child is not None:
            yield from parts(child)
    for argument in getattr(expr, "args", ()):
        yield from parts(argument)


def selectors(text: str) -> list[Any]:
    found = [one for one in parts(promql_parser.parse(text)) if hasattr(one, "matchers")]
    assert found, f"{text} asks for no metric"
    return found


def grouped_by(text: str) -> set[str]:
    """Labels that aggregations and matches between vectors name."""
    labels: set[str] = set()
    for one in parts(promql_parser.parse(text)):
        modifier = getattr(one, "modifier", None)
        labels |= set(getattr(modifier, "labels", None) or ())
        matching = getattr(modifier, "matching", None)
        labels |= set(getattr(matching, "labels", None) or ())
    return labels


EXPRESSIONS = dashboard_expressions() + [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_dashboard_expressions_use_existing_metrics(text: str) -> None:
    for selector in selectors(text):
        known = labels_of(selector.name)
        assert grouped_by(text) <= known
        for matcher in selector.matchers.matchers:
            assert matcher.name in known, f"{selector.name} has no label {matcher.name}"
            assert_has_value(selector.name, matcher)


def assert_has_value(name: str, matcher: Any) -> None:
    """A value that no series has would make a panel that is empty for ever."""
    if matcher.name == "deployment":
        assert matcher.value == "$deployment"
        return
    at = KNOWN[name].labels.index(matcher.name)
    values = {series[at] for series in KNOWN[name].figures}
    for wanted in matcher.value.split("|"):
        assert wanted in values, f"{name} has no {matcher.name} {wanted}, found {sorted(values)}"


def test_name_or_label_that_is_not_there_is_found() -> None:
    with pytest.raises(AssertionError, match="eplb_balance is not among the metrics"):
        test_dashboard_expressions_use_existing_metrics("eplb_balance > 1")
    with pytest.raises(AssertionError, match="eplb_paused has no label rank"):
        test_dashboard_expressions_use_existing_metrics('eplb_paused{rank="1"}')
    with pytest.raises(AssertionError, match="eplb_balancedness has no agg p99"):
        test_dashboard_expressions_use_existing_metrics('eplb_balancedness{agg="p99"}')


def test_dashboard_can_be_imported_anywhere_and_its_panels_do_not_overlap() -> None:
    dashboard, shown = json.loads(DASHBOARD.read_text()), list(panels())
    sources = re.findall(r'"type": "prometheus",\s+"uid": "([^"]*)"', DASHBOARD.read_text())
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in shown)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]

    assert dashboard["uid"] is dashboard["id"] is None
    assert [one["name"] for one in dashboard["__inputs"]] == ["DS_PROMETHEUS"]
    assert set(sources) == {"${DS_PROMETHEUS}"}
    assert len({panel["id"] for panel in shown}) == len(shown)
    assert all(panel["description"].endswith(".") for panel in shown)
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_dashboard_and_alerts_cover_the_required_metrics() -> None:
    shown = {one.name for text in dashboard_expressions() for one in selectors(text)}
    watched = {one.name for rule in rules() for one in selectors(rule["expr"])}

    assert shown >= SHOWN
    assert watched >= ALERTED


def test_every_alert_has_deployment_severity_and_action() -> None:
    names = [rule["alert"] for rule in rules()]

    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), rule["alert"]
        assert "{{ $labels.deployment }}" in rule["annotations"]["summary"], rule["alert"]
        assert rule["annotations"]["description"], rule["alert"]
        for label in re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])):
            known = set.union(*(labels_of(one.name) for one in selectors(rule["expr"])))
            assert label in known | TARGET_LABELS, rule["alert"]
        grouped = grouped_by(rule["expr"])
        assert not grouped or "deployment" in grouped, rule["alert"]


def test_command_writes_both_files_or_reports_that_it_cannot(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = CliRunner().invoke(app, ["observability", str(folder)])

    assert result.exit_code == 0
    assert (folder / "eplb-dashboard.json").read_bytes() == DASHBOARD.read_bytes()
    assert (folder / "eplb-alerts.yaml").read_bytes() == ALERTS.read_bytes()
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["observability", str(tmp_path / "file")])
    assert (refused.exit_code, "cannot be written" in refused.stderr) == (2, True)


def test_dashboard_never_replaces_a_full_device(tmp_path: Path) -> None:
    (tmp_path / "eplb-dashboard.json").symlink_to("/dev/full")
    refused = CliRunner().invoke(app, ["observability", str(tmp_path)])

    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "eplb-dashboard.json cannot be written: No space left on device" in refused.stderr
    assert not (tmp_path / "eplb-alerts.yaml").exists()


def promtool(*arguments: str, text: str | None = None) -> None:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not on PATH")
    done = subprocess.run([found, *arguments], input=text, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_takes_the_rules_and_the_metrics() -> None:
    store = MemoryStore("d")
    promtool("check", "rules", str(ALERTS))
    shown = partial(metric_families, BackgroundReader(Monitor(store)))
    promtool("check", "metrics", text=metrics_text([shown])[0].decode())
