"""A deployment from its configuration, and the first placement in its store."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from api.config.deployment import ModelSettings
from api.deploy.deployment import Deployment, host_here
from api.deploy.first_placement import check_belongs, ensure_first_placement
from api.deploy.model import model_shape
from eplb.core.placement import check_fits
from eplb.errors import CheckpointError, ConfigError, StoreError
from rebalance.assembly.rank import record_start
from telemetry.state.live import Control
from telemetry.state.runs import RankState
from telemetry.state.store import StateStore
from tests.support.deployments import deployment_in
from tests.support.repository import ROOT
from tests.support.stores import MemoryStore

SECRET = {"EPLB_SECRET": "0123456789abcdef"}
TWO_HOSTS = {"topology__nodes": 2, "topology__hosts": ["10.0.0.1", "10.0.0.2"]}


@pytest.fixture
def store() -> Iterator[StateStore]:
    with closing(MemoryStore("demo")) as opened:
        yield opened


def test_addresses_and_keys_of_two_hosts_are_those_of_the_file(tmp_path: Path) -> None:
    deployment = deployment_in(tmp_path, SECRET, deployment__store="redis://10.0.0.9", **TWO_HOSTS)

    found = deployment.description()

    assert found.config.network.hosts == ("10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2")
    assert len({found.join_key} | {one.key for one in found.host_caches}) == 3


@pytest.mark.parametrize(
    ("changes", "environ", "expected"),
    [
        (TWO_HOSTS, SECRET, "deployment.store is .*all 2"),
        (
            TWO_HOSTS | {"deployment__store": "redis://10.0.0.9"},
            {},
            r"topology.hosts\[0\] is 10.0.0.1, .*no secret",
        ),
        (
            {"http__host": "0.0.0.0"},
            {},
            "http.host is 0.0.0.0, .*no secret: .*16 bytes.*EPLB_SECRET",
        ),
        (
            {"topology__slots_per_rank": 3},
            {},
            "slots_per_rank is 3, expected 4 to 8",
        ),
        ({"telemetry__sample_steps": 7}, {}, "sample_steps is 7 in .*, expected a divisor of"),
        ({"model__hidden": 0}, {}, "model.hidden is 0"),
    ],
)
def test_configuration_that_cannot_serve_is_refused(
    tmp_path: Path, changes: dict[str, Any], environ: dict[str, str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        deployment_in(tmp_path, environ, **changes)


def config_json(folder: Path, **changes: Any) -> Path:
    shapes = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "hidden_size": 16,
        "moe_intermediate_size": 8,
        "intermediate_size": 999,
    }
    (folder / "config.json").write_text(json.dumps(shapes | changes))
    return folder


def test_state_folder_that_every_user_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(0o777)

    with pytest.raises(ConfigError, match=r"the state folder .* has mode 0777"):
        deployment_in(tmp_path)


def test_shapes_are_those_of_the_checkpoint_s_config_json(tmp_path: Path) -> None:
    folder = config_json(tmp_path, first_k_dense_replace=1)
    found = model_shape(ModelSettings(checkpoint=folder, layers=2))

    assert found.layer_ids == (1, 2)
    assert (found.num_experts, found.top_k, found.hidden, found.intermediate) == (8, 2, 16, 8)


def test_shape_that_contradicts_the_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.experts is 16, expected 8 as in .*/config.json"):
        model_shape(ModelSettings(checkpoint=config_json(tmp_path), experts=16))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "perceptron"}, "unknown model family"),
        (None, "is no folder, expected one"),
    ],
)
def test_checkpoint_that_cannot_be_read_is_refused(
    tmp_path: Path, changes: dict[str, Any] | None, expected: str
) -> None:
    folder = tmp_path / "none" if changes is None else config_json(tmp_path, **changes)

    with pytest.raises(CheckpointError, match=expected):
        model_shape(ModelSettings(checkpoint=folder))


def test_host_is_found_by_its_address_and_a_machine_without_one_is_refused(tmp_path: Path) -> None:
    hosts = {"topology__nodes": 2, "deployment__store": "redis://198.51.100.9"}
    one = deployment_in(tmp_path, SECRET, topology__hosts=["198.51.100.1", "127.0.0.3"], **hosts)
    none = deployment_in(
        tmp_path, SECRET, topology__hosts=["198.51.100.1", "198.51.100.2"], **hosts
    )

    assert host_here(one, None) == 1
    with pytest.raises(ConfigError, match="none of them is of this machine"):
        host_here(none, None)
    with pytest.raises(ConfigError, match=r"host 0 has address 198\.51\.100\.1"):
        host_here(one, 0)
    with pytest.raises(ConfigError, match=r"--host is 2, expected 0\.\.1"):
        host_here(one, 2)


NAMES = {"node-a": "10.0.0.1", "node-b.west": "10.0.0.2", "alias": "10.0.0.2", "own": "127.0.1.1"}


def by_name(host: str) -> str:
    """Look a name up as a resolver that knows ``NAMES``."""
    if host not in NAMES:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return NAMES[host]


def test_hosts_are_named_and_ranks_get_their_addresses(tmp_path: Path) -> None:
    remote = {"topology__nodes": 2, "deployment__store": "redis://198.51.100.9"}
    named = deployment_in(
        tmp_path, SECRET, by_name, topology__hosts=["node-a", "node-b.west"], **remote
    )
    here = deployment_in(tmp_path, SECRET, topology__hosts=["localhost"])

    assert named.hosts == ("10.0.0.1", "10.0.0.2")
    assert named.description().config.network.hosts[1:3] == ("10.0.0.1", "10.0.0.2")
    assert (here.hosts, host_here(here, None)) == (("127.0.0.1",), 0)
    assert here.host_cache_address(0).name.endswith("-127.0.0.1")


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (
            ["node-a", "node-c"],
            r"no address of node-c \(Name or service not known\), expected names",
        ),
        (["node-b.west", "alias"], "alias is 10.0.0.2, expected another address for each"),
        (["node-a", "own"], "own is 127.0.1.1, expected no loopback address"),
    ],
)
def test_names_of_hosts_that_others_cannot_reach_are_refused(
    tmp_path: Path, hosts: list[str], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        deployment_in(tmp_path, SECRET, by_name, topology__nodes=2, topology__hosts=hosts)


# -- the first placement


def test_first_starter_writes_the_placement_and_the_second_keeps_it(
    tmp_path: Path, store: StateStore
) -> None:
    deployment = deployment_in(tmp_path)

    first, did = ensure_first_placement(store, deployment, "eplb launch, host 0")
    second, did_again = ensure_first_placement(store, deployment, "eplb serve")

    assert (did, did_again) == ("wrote the first placement", "found a placement")
    assert first.hash == second.hash
    assert [one.reason for one in store.placements()] == [
        "first placement: unbalanced, experts in order (eplb launch, host 0)"
    ]


@pytest.mark.parametrize(
    ("ahead_s", "words"), [(30.0, "30.000 s ahead of"), (-30.0, "30.000 s behind"), (0.0, "")]
)
def test_start_on_a_host_whose_clock_is_off_logs_by_how_much(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead_s: float, words: str
) -> None:
    with closing(MemoryStore("demo", clock=lambda: 1000.0)) as store:
        ensure_first_placement(
            store, deployment_in(tmp_path), "eplb serve", clock=lambda: 1000.0 + ahead_s
        )

    found = [line for line in caplog.messages if line.startswith("clock: ")]
    assert len(found) == bool(words)
    assert words in "".join(found)


def test_restart_keeps_a_pause_and_a_serving_placement(tmp_path: Path, store: StateStore) -> None:
    deployment = deployment_in(tmp_path)
    first, _ = ensure_first_placement(store, deployment, "eplb serve")
    store.commit(first.with_generation(7), expected=0, reason="a plan")
    store.set_control(Control(movement=False), reason="an operator")

    found, did = ensure_first_placement(store, deployment, "eplb serve")

    assert (found.generation, did) == (7, "found a placement")
    assert store.control() == Control(movement=False)


def test_configuration_that_forbids_movement_yields_to_an_operator_until_it_changes(
    tmp_path: Path, store: StateStore
) -> None:
    still = deployment_in(tmp_path, controller__movement=False)
    ensure_first_placement(store, still, "eplb serve")
    assert not store.control().movement

    store.change_live({"movement": True}, reason="an operator")
    ensure_first_placement(store, still, "eplb launch, host 0")
    assert store.control().movement

    changed = deployment_in(tmp_path, controller__movement=False, planner__pay_back_s=30.0)
    ensure_first_placement(store, changed, "eplb serve")
    assert not store.control().movement
    assert store.live().effective["pay_back_s"] == 30.0


def test_start_with_another_configuration_keeps_a_pause(tmp_path: Path, store: StateStore) -> None:
    ensure_first_placement(store, deployment_in(tmp_path), "eplb serve")
    store.change_live({"movement": False}, reason="an operator")

    ensure_first_placement(store, deployment_in(tmp_path, planner__pay_back_s=30.0), "eplb serve")

    assert not store.control().movement


def test_store_that_lost_its_contents_gets_a_later_generation(
    tmp_path: Path, store: StateStore
) -> None:
    found, _ = ensure_first_placement(store, deployment_in(tmp_path), "x", lost_after=41)

    assert found.generation == 1041


def other_deployments() -> list[Any]:
    return [
        pytest.param({"model__experts": 16}, {}, r"\(2, 8\), expected \(2, 16\)"),
        pytest.param({}, SECRET, "was started with a secret of fingerprint .* by eplb serve"),
    ]


@pytest.mark.parametrize(("changes", "environ", "expected"), other_deployments())
def test_store_of_another_deployment_is_refused(
    tmp_path: Path,
    store: StateStore,
    changes: dict[str, Any],
    environ: dict[str, str],
    expected: str,
) -> None:
    ensure_first_placement(store, deployment_in(tmp_path), "eplb serve")
    other: Deployment = deployment_in(tmp_path, environ, **changes)

    with pytest.raises(ConfigError, match=f"store: deployment 'demo' .*{expected}"):
        check_belongs(store, other)
    with pytest.raises(ConfigError, match=expected):
        ensure_first_placement(store, other, "eplb launch")


def resized(folder: Path, num_ranks: int, slots: int, spares: int = 0) -> Deployment:
    return deployment_in(
        folder,
        topology__ranks_per_node=num_ranks,
        topology__slots_per_rank=slots,
        topology__spare_slots=spares,
    )


def launched(store: StateStore, deployment: Deployment, run: str, **again: Any) -> tuple[Any, str]:
    """Have ranks start from the placement of the store, and begin a run."""
    found = ensure_first_placement(store, deployment, "eplb launch", is_of_ranks=True, **again)
    record_start(store, run, deployment.model, deployment.topology, (64, 0.0))
    return found


def test_ranks_of_another_number_or_with_other_slots_take_the_placement_over(
    tmp_path: Path, store: StateStore
) -> None:
    launched(store, resized(tmp_path, 4, 3), "a")
    shapes = [(6, 3, 0), (6, 2, 1), (2, 4, 0), (2, 4, 1)]
    said, generations = [], []

    for number, shape in enumerate(shapes):
        deployment = resized(tmp_path, *shape)
        found, did = launched(store, deployment, f"b{number}")
        same, found_again = launched(store, deployment, f"c{number}")
        said.append(did)
        generations.append(found.generation)
        check_fits(found, deployment.topology)
        assert (same.hash, found_again) == (found.hash, "found a placement")

    assert generations == [1, 2, 3, 4]
    assert said[0] == (
        "placement of 4 ranks x 3 slots taken over for 6 ranks x 3 slots: 16 of 16 replicas kept"
    )
    assert said[3].endswith("for 2 ranks x 5 slots: 16 of 16 replicas kept")
    assert [one.placement.num_slots for one in store.placements()] == [10, 8, 18, 18, 12]


def test_resize_drops_pins_and_cordons_of_ranks_that_are_gone(
    tmp_path: Path, store: StateStore
) -> None:
    launched(store, resized(tmp_path, 4, 3), "a")
    pins, cordons = "*/5:3, 0/1:0+3, 0/2:1", "1:cordon, 3:drain"
    store.change_live({"pins": pins, "cordons": cordons}, reason="change 4711")
    before = store.events()[-1].id

    launched(store, resized(tmp_path, 6, 2), "b")
    larger = store.live().live
    launched(store, resized(tmp_path, 2, 5), "c")
    smaller = store.live().live
    launched(store, resized(tmp_path, 1, 8), "d")

    assert larger == {"pins": pins, "cordons": cordons}
    assert smaller == {"pins": "0/1:0, 0/2:1", "cordons": "1:cordon"}
    assert store.live().live == {"pins": "0/1:0"}
    changes = [one.detail for one in store.events(after=before) if one.kind == "settings"]
    assert [one["live"] for one in changes] == [smaller, {"pins": "0/1:0", "cordons": None}]
    assert "taken over for 2 ranks x 5 slots" in changes[0]["reason"]


def test_ranks_that_serve_are_waited_for_before_others_take_their_placement(
    tmp_path: Path, store: StateStore
) -> None:
    before, after = resized(tmp_path, 2, 5), resized(tmp_path, 4, 3)
    launched(store, before, "a")
    now = time.time()
    store.report(RankState("a", 0, now, 5, 0, "idle", 0, 0, 0, 0))

    with pytest.raises(StoreError, match=r"2 ranks x 5 slots .* still serve, expected none before"):
        launched(store, after, "b")
    later, _ = launched(store, after, "b", clock=lambda: now + 60.0)

    assert later.num_slots == 12
    with pytest.raises(ConfigError, match="has other ranks now, expected 2 ranks x 5 slots"):
        launched(store, before, "a", lost_after=0)


def test_first_placement_that_never_served_is_replaced_for_other_ranks(
    tmp_path: Path, store: StateStore
) -> None:
    ensure_first_placement(store, resized(tmp_path, 2, 5), "eplb serve")

    found, did = launched(store, resized(tmp_path, 4, 3), "a")

    assert (found.generation, found.num_slots) == (1, 12)
    assert did.startswith("first placement of 4 ranks x 3 slots: ")


def test_spare_slots_stay_empty_in_the_first_placement(tmp_path: Path, store: StateStore) -> None:
    deployment = deployment_in(tmp_path, topology__spare_slots=1)

    found, _ = ensure_first_placement(store, deployment, "eplb serve")

    for rank in range(2):  # 8 experts in 12 slots: every rank keeps two, its spare among them
        held = found.slot_to_expert[:, deployment.topology.slots_on(rank)]
        assert (held == -1).sum(axis=1).tolist() == [2, 2]
    assert (deployment.pace.mode, deployment.pace.spare_slots) == ("flip", 1)


@pytest.mark.system
def test_host_of_ranks_needs_no_http_library() -> None:
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "import api.cli.deploy, api.cli.check, api.deploy.launch, api.deploy.roles\n"
        "import api.deploy.check"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert (done.returncode, done.stderr) == (0, "")
