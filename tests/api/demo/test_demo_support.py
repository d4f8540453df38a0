"""What a deployment leaves for whoever looks for the cause of a fault: JSON log lines, a bundle."""

from __future__ import annotations

import json
import tarfile
import tomllib
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from telemetry import open_store
from tests.support.controlled_deployment import START, Deployment
from tests.support.redis_servers import RedisProcess

SECRET = "open-sesame"
MB = 1_000_000


def make_bundle(state_dir: Path, out: Path, *flags: str) -> Result:
    words = ["support-bundle", "--state-dir", str(state_dir), *flags, str(out)]
    return CliRunner().invoke(app, words)


def files_in(out: Path) -> dict[str, str]:
    with tarfile.open(out) as archive:
        opened = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in opened.items() if file is not None}


# -- of a store and a folder alone


def test_bundle_shows_no_password_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    out = tmp_path / "bundle.tar.gz"
    with RedisProcess(tmp_path / "redis", {"requirepass": SECRET}) as server:
        url = server.url.replace("//", f"//:{SECRET}@")
        with closing(open_store(url, "demo")) as store:
            store.commit(START, expected=None, reason="start")
            Deployment(store)
            store.add_event("error", {"where": "test", "message": f"cannot reach {url}"})

        made = make_bundle(tmp_path / "state", out, "--store", url)

    assert made.exit_code == 0, made.output
    files = files_in(out)
    assert "cannot reach redis://:***@" in files["events.jsonl"]
    assert [name for name, text in files.items() if SECRET in text] == []
    assert SECRET not in made.output


def test_bundle_is_of_the_configured_deployment(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "bundle.tar.gz"
    state.mkdir()
    with closing(open_store(state / "store.sqlite", "west")) as store:
        store.commit(START, expected=None, reason="start")
        store.add_event("error", {"message": "of west"})
    file = tmp_path / "eplb.toml"
    file.write_text(f'[deployment]\nname = "west"\nstate_dir = "{state}"\n')

    made = CliRunner().invoke(app, ["support-bundle", str(out)], env={"EPLB_CONFIG": str(file)})

    assert made.exit_code == 0, made.output
    assert "missing: state" not in made.output
    assert "of west" in files_in(out)["events.jsonl"]


def test_bundle_of_a_long_journal_stays_within_its_size(tmp_path: Path) -> None:
    state, out = tmp_path / "state", tmp_path / "small.tar.gz"
    (state / "journal").mkdir(parents=True)
    long = "".join(json.dumps({"step": step}) + "\n" for step in range(3 * MB // 14))
    (state / "journal" / "rank-0000.jsonl").write_text(long)

    made = make_bundle(state, out, "--max-mb", "1")

    assert made.exit_code == 0, made.output
    files = files_in(out)
    kept, manifest = files["journal/rank-0000.jsonl"], json.loads(files["manifest.json"])
    assert MB * 0.9 < len(kept) <= MB
    assert long.endswith("\n" + kept)
    assert manifest["bytes_cut_from_the_beginning"] == {
        "journal/rank-0000.jsonl": len(long) - len(kept)
    }
    assert set(manifest["missing"]) == {"settings.toml", "state"}
    assert "there is no store at" in manifest["missing"]["state"]


def test_bundle_of_no_folder_or_onto_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (taken := tmp_path / "taken").write_text("mine")
    for done, named in (
        (make_bundle(tmp_path / "none", tmp_path / "new"), tmp_path / "none"),
        (make_bundle(tmp_path, taken), taken),
    ):
        assert done.exit_code == 2
        assert done.stderr.startswith("eplb: ")
        assert str(named) in done.stderr
        assert done.stderr.count("\n") == 1
    assert taken.read_text() == "mine"


# -- of a demo


@pytest.mark.system
def test_log_lines_of_a_demo_name_rank_generation_and_task_where_known(watched_demo: Any) -> None:
    task = watched_demo.post("/api/v1/explanations", {"layer": 0, "expert": 0}).json()["id"]

    def lines_of_task(_: object) -> list[dict[str, Any]]:
        # Whole lines: the last one may still be in the making.
        text = watched_demo.errors.rpartition("\n")[0]
        lines[:] = [json.loads(line) for line in text.splitlines()]
        return [line for line in lines if line.get("task") == task]

    lines = list[dict[str, Any]]()
    of_task = watched_demo.sees("the end of the task in the log", lines_of_task)

    assert any(" kind=explain done" in line["message"] for line in of_task)
    for line in lines:
        assert {"time", "level", "logger", "message", "deployment", "process"} <= line.keys()
        assert datetime.fromisoformat(line["time"]).tzinfo == UTC
        assert line["deployment"] == "demo"
        assert line["level"] in ("info", "warning", "error")
    of_ranks = [line for line in lines if line["process"].startswith("rank ")]
    assert {line["rank"] for line in of_ranks} == {0, 1, 2, 3}
    assert all(line["process"] == f"rank {line['rank']}" for line in of_ranks)
    plans = [line for line in lines if " decision=" in line["message"]]
    assert plans
    for line in plans:
        assert line["process"] == "controller"
        assert line["message"].startswith(f"generation={line['generation']} ")
        assert "task" not in line


@pytest.mark.system
def test_bundle_of_a_demo_holds_state_journals_settings_versions_and_events(
    watched_demo: Any, tmp_path: Path
) -> None:
    out = tmp_path / "bundle.tar.gz"

    made = make_bundle(watched_demo.state_dir, out)

    assert made.exit_code == 0, made.output
    files = files_in(out)
    manifest = json.loads(files["manifest.json"])
    assert manifest["missing"] == {}
    assert set(manifest["files"]) == files.keys() - {"manifest.json"}
    assert json.loads(files["versions.json"]).keys() >= {"eplb", "python", "system", "torch"}
    assert json.loads(files["state/overview.json"])["ranks"]
    assert json.loads(files["state/placement.json"])["num_experts"] == 8
    assert json.loads(files["state/settings.json"])["static"]["movement"] is True
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    assert {"run", "plan"} <= {event["kind"] for event in events}
    for rank in range(4):
        entries = files[f"journal/rank-{rank:04d}.jsonl"].splitlines()
        assert all(json.loads(entry) for entry in entries)
    settings = tomllib.loads(files["settings.toml"])
    assert (settings["topology"]["ranks_per_node"], settings["log"]["format"]) == (2, "json")
    line = next(one for one in files["settings.toml"].splitlines() if one.startswith("format "))
    assert line.split()[:4] == ["format", "=", '"json"', "#"]
