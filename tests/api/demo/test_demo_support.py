"""What a demo leaves for whoever looks for the cause of a fault: JSON log lines, a bundle."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from telemetry import open_store
from telemetry.stores.redis.connection.local_server import RedisProcess

EPLB = Path(sys.executable).with_name("eplb")
DEADLINE_S = 60.0
SECRET = "open-sesame"
MB = 1_000_000


def eplb(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [EPLB, *words], timeout=DEADLINE_S, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def seen(
    tmp_path_factory: pytest.TempPathFactory, start_demo: Callable[..., Any]
) -> dict[str, Any]:
    """A demo with JSON logs on a Redis with a password, one task, and its bundle."""
    folder = tmp_path_factory.mktemp("support")
    with RedisProcess(folder / "redis", {"requirepass": SECRET}) as server:
        url = server.url.replace("//", f"//:{SECRET}@")
        flags = ("--store", url, "--log-format", "json", "--log-level", "info", "--serve")
        demo = start_demo(folder, *flags, seconds=1)
        page = demo.wait_for_line("eplb demo: http").split()[-1]
        demo.wait_for_line(" commit plan=1")
        body = {"layer": 0, "expert": 0}
        asked = httpx.post(
            f"{page}/api/v1/explanations", json=body, timeout=DEADLINE_S, trust_env=False
        )
        os.killpg(demo.process.pid, signal.SIGINT)
        status = demo.ends()
        with closing(open_store(url, "demo")) as store:
            store.add_event("error", {"where": "test", "message": f"cannot reach {url}"})
        out = folder / "bundle.tar.gz"
        made = eplb("support-bundle", "--state-dir", str(demo.state_dir), "--store", url, str(out))
    return {
        "status": status,
        "told": demo.output_text(),
        "lines": demo.errors.splitlines(),
        "task": asked.json()["id"],
        "made": made,
        "out": out,
        "state_dir": demo.state_dir,
    }


@pytest.fixture(scope="module")
def files(seen: dict[str, Any]) -> dict[str, str]:
    assert seen["made"].returncode == 0, seen["made"].stderr
    with tarfile.open(seen["out"]) as archive:
        opened = {member.name: archive.extractfile(member) for member in archive}
        return {name: file.read().decode() for name, file in opened.items() if file is not None}


def test_every_line_on_the_error_stream_is_one_json_object(seen: dict[str, Any]) -> None:
    assert seen["status"] == 0, seen["told"]
    lines = [json.loads(line) for line in seen["lines"]]

    assert lines
    for line in lines:
        assert {"time", "level", "logger", "message", "deployment", "process"} <= line.keys()
        moment = datetime.fromisoformat(line["time"])
        assert moment.tzinfo == UTC
        assert line["deployment"] == "demo"
        assert line["level"] in ("info", "warning", "error")


def test_log_lines_name_rank_generation_and_task_where_known(seen: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in seen["lines"]]

    of_ranks = [line for line in lines if line["process"].startswith("rank ")]
    assert {line["rank"] for line in of_ranks} == {0, 1, 2, 3}
    assert all(line["process"] == f"rank {line['rank']}" for line in of_ranks)
    plans = [line for line in lines if " decision=" in line["message"]]
    assert plans
    for line in plans:
        assert line["process"] == "controller"
        assert line["message"].startswith(f"generation={line['generation']} ")
    done = [line for line in lines if " kind=explain done" in line["message"]]
    assert [line["task"] for line in done] == [seen["task"]]
    assert all("task" not in line for line in plans)


def test_bundle_holds_state_journals_settings_versions_and_events(files: dict[str, str]) -> None:
    manifest = json.loads(files["manifest.json"])

    assert manifest["missing"] == {}
    assert set(manifest["files"]) == files.keys() - {"manifest.json"}
    assert json.loads(files["versions.json"]).keys() >= {"eplb", "python", "system", "torch"}
    assert json.loads(files["state/overview.json"])["ranks"]
    assert json.loads(files["state/placement.json"])["num_experts"] == 8
    settings = json.loads(files["state/settings.json"])
    assert (settings["revision"], settings["static"]["movement"]) == (1, True)
    events = [json.loads(line) for line in files["events.jsonl"].splitlines()]
    assert {"run", "plan", "commit"} <= {event["kind"] for event in events}
    for rank in range(4):
        entries = files[f"journal/rank-{rank:04d}.jsonl"].splitlines()
        assert all(json.loads(entry) for entry in entries)


def test_bundle_has_the_settings_of_the_start_with_their_places(files: dict[str, str]) -> None:
    settings = tomllib.loads(files["settings.toml"])

    assert (settings["demo"]["ranks"], settings["log"]["format"]) == (4, "json")
    line = next(one for one in files["settings.toml"].splitlines() if one.startswith("format "))
    assert line.split() == ["format", "=", '"json"', "#", "flag", "--log-format"]


def test_no_password_is_in_the_bundle_or_in_the_log(
    seen: dict[str, Any], files: dict[str, str]
) -> None:
    event = files["events.jsonl"].splitlines()[-1]

    assert "cannot reach redis://:***@" in event
    assert [name for name, text in files.items() if SECRET in text] == []
    assert SECRET not in "".join(seen["lines"]) + seen["told"] + seen["made"].stdout


def test_bundle_of_a_long_journal_stays_within_its_size(
    seen: dict[str, Any], tmp_path: Path
) -> None:
    state, out = tmp_path / "state", tmp_path / "small.tar.gz"
    (state / "journal").mkdir(parents=True)
    first = (seen["state_dir"] / "journal" / "rank-0000.jsonl").read_text()
    long = first * (3 * MB // len(first))
    (state / "journal" / "rank-0000.jsonl").write_text(long)

    made = eplb("support-bundle", "--state-dir", str(state), "--max-mb", "1", str(out))

    assert made.returncode == 0, made.stderr
    with tarfile.open(out) as archive:
        sizes = {member.name: member.size for member in archive}
        journal = archive.extractfile("journal/rank-0000.jsonl")
        assert journal is not None
        kept = journal.read().decode()
        found = archive.extractfile("manifest.json")
        assert found is not None
        manifest = json.load(found)
    assert MB * 0.9 < sizes["journal/rank-0000.jsonl"] <= MB
    assert long.endswith(kept)
    assert manifest["bytes_cut_from_the_beginning"]["journal/rank-0000.jsonl"] == len(long) - len(
        kept
    )
    assert set(manifest["missing"]) == {"settings.toml", "state"}
    assert "there is no store at" in manifest["missing"]["state"]


def test_bundle_of_no_folder_or_onto_a_file_is_refused_in_one_line(
    seen: dict[str, Any], tmp_path: Path
) -> None:
    missing = eplb("support-bundle", "--state-dir", str(tmp_path / "none"), str(tmp_path / "b"))
    taken = eplb("support-bundle", "--state-dir", str(seen["state_dir"]), str(seen["out"]))

    assert (missing.returncode, taken.returncode) == (2, 2)
    assert missing.stderr == (
        f"eplb: there is no folder {tmp_path / 'none'}, expected the state folder (--state-dir)\n"
    )
    assert taken.stderr == f"eplb: {seen['out']} exists already, expected a new file\n"
