"""The folder and store of a demo: one at a time, whole files or none, and free after any death."""

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from api.demo.options import Options
from api.demo.setup import begin, check_idle
from api.demo.state_dir import StateDir
from api.deploy.deployment import Deployment
from eplb.errors import ConfigError
from eplb.versions import LAUNCHER, Announcement
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry.state.joining import MISSED_BEATS, Heartbeat
from telemetry.state.store import StateStore
from tests.support.deployments import deployment_in
from tests.support.repository import ROOT

HOLDER = """
import sys
from pathlib import Path
from api.demo.state_dir import StateDir

state = StateDir(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    StateDir(tmp_path / "a" / "b").close()

    assert (tmp_path / "a" / "b" / "lock").is_file()


def test_second_demo_in_a_folder_is_refused_with_the_process_id(tmp_path: Path) -> None:
    first = StateDir(tmp_path)

    with pytest.raises(ConfigError) as caught:
        StateDir(tmp_path)
    assert str(caught.value) == (
        f"state folder {tmp_path} is in use by process {os.getpid()}, "
        "expected another folder (--state-dir) or that demo to end"
    )
    first.close()
    StateDir(tmp_path).close()


def test_folder_is_free_once_its_holder_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"in use by process {holder.pid}, "):
            StateDir(tmp_path)

        holder.kill()
        holder.wait(30.0)

        StateDir(tmp_path).close()


def test_file_where_the_folder_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"file cannot be used: File exists"):
        StateDir(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"file/state cannot be used: Not a directory"):
        StateDir(tmp_path / "file" / "state")


def test_arrays_are_read_back_as_saved(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    path = state.save_arrays("text.npz", {"0-code": np.array([3, 1, 2], dtype=np.int32)})
    state.close()

    with np.load(path) as archive:
        assert {name: archive[name].tolist() for name in archive} == {"0-code": [3, 1, 2]}


def test_full_disk_leaves_the_old_file_and_no_half_of_the_new_one(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.save_arrays("text.npz", {"old": np.arange(3, dtype=np.int32)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(ConfigError, match=r"text\.npz cannot be written: File too large"):
            state.save_arrays("text.npz", {"new": np.arange(10_000, dtype=np.int32)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    state.close()

    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "text.npz"]
    with np.load(tmp_path / "text.npz") as archive:
        assert archive.files == ["old"]


def test_unfinished_files_of_a_killed_demo_are_removed(tmp_path: Path) -> None:
    (tmp_path / "text.npz.unfinished").write_bytes(b"half")
    (tmp_path / "weights-1.7.unfinished").mkdir()
    (tmp_path / "weights-1.7.unfinished" / "model-00001-of-00003.safetensors").touch()

    StateDir(tmp_path).close()

    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


# -- the store of a demo


def test_store_whose_launcher_runs_is_refused_with_its_process(store: StateStore) -> None:
    running = Heartbeat(lambda: store, LAUNCHER, "0").mine
    store.announce(running)

    with pytest.raises(ConfigError, match=rf"is run by process {os.getpid()} on host .*launcher"):
        check_idle(store)


def test_store_whose_processes_have_ended_or_are_silent_is_taken(
    store: StateStore, pass_time: Callable[[float], None]
) -> None:
    ended = Heartbeat(lambda: store, LAUNCHER, "0").mine
    store.announce(ended)
    store.retire(ended)
    check_idle(store)
    store.announce(Announcement(LAUNCHER, "1", every_s=1.0, process="elsewhere"))

    pass_time(MISSED_BEATS + 1.0)

    check_idle(store)


def test_demo_resumes_from_a_placement_that_its_ranks_can_serve_and_no_other(
    store: StateStore, tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    def deployment(spares: int) -> Deployment:
        changes = {"model__checkpoint": small_checkpoint.path, "topology__spare_slots": spares}
        return deployment_in(tmp_path, deployment__name=store.deployment, **changes)

    with pytest.raises(ConfigError, match="holds no placement to resume from"):
        begin(Options(resume=True), deployment(0), store)
    begin(Options(), deployment(0), store)
    begin(Options(resume=True), deployment(0), store)

    with pytest.raises(ConfigError, match="cannot resume: "):
        begin(Options(resume=True), deployment(1), store)
    committed = store.committed()
    assert committed is not None
    assert committed.placement.generation == 0
