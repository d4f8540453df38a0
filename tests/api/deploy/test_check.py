"""``eplb check``: each thing that is wrong is one line with what was found and expected."""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from api.cli.main import app
from api.config.certificate import Certificate
from api.config.deployment import ModelSettings
from api.deploy.check import (
    Costs,
    Finding,
    as_finding,
    available_memory,
    check_all,
    check_memory,
    check_ports,
    check_serve_on,
    check_store,
    costs_of,
    lines_of,
)
from api.deploy.first_placement import ensure_first_placement
from api.deploy.model import accept_checkpoint, check_same_checkpoint, check_weights
from api.deploy.roles import run_host_cache
from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, StoreError
from eplb.versions import SERVICE
from rebalance.assembly.host_cache import build_host_cache
from rebalance.assembly.places import claim_place
from runtime import ExpertSchema, write_random_checkpoint
from runtime.checkpoints.checkpoint import Checkpoint
from telemetry.state.holder import new_holder
from telemetry.state.joining import Heartbeat
from tests.support.certificates import Authority
from tests.support.deployments import SMALL, deployment_in, free_ports
from tests.support.redis_servers import RedisProcess
from tests.support.stores import MemoryStore

GIB = 2**30


def findings(deployment: Any, host: int = 0, **more: Any) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for one in check_all(deployment, host, **more):
        found.setdefault(one.component, []).append(one)
    return found


def wrong(found: dict[str, list[Finding]]) -> list[str]:
    return [str(one) for many in found.values() for one in many if not one.is_ok]


def small(tmp_path: Path, checkpoint: Checkpoint | None = None, **changes: Any) -> Any:
    given = {
        "deployment__name": f"west-{os.getpid()}",
        "network__rendezvous_port": free_ports(1)[0],
    }
    if checkpoint is not None:
        given["model__checkpoint"] = checkpoint.path
    return deployment_in(tmp_path, **(given | changes))


def test_host_that_is_ready_has_nothing_refused(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    found = findings(small(tmp_path, small_checkpoint))

    assert wrong(found) == []
    assert list(found) == [
        "configuration",
        "secret",
        "ports",
        "places",
        "state folder",
        "checkpoint",
        "memory",
        "store",
        "clock",
        "versions",
    ]
    assert "2 MoE layers x 8 experts in float32" in found["checkpoint"][0].found


def test_serve_on_is_refused_where_survivors_have_too_few_slots(tmp_path: Path) -> None:
    def of(slots: int, **more: Any) -> list[str]:
        given = {"topology__slots_per_rank": slots, "agent__serve_on": True} | more
        return list(map(str, check_serve_on(small(tmp_path, **given))))

    refused, alone = of(4)  # two ranks, 8 experts

    assert refused == (
        "refused  serve on: after the death of any rank 4 slots of a layer are left for 8 experts, "
        "so that all ranks start again, expected topology.slots_per_rank = 8 or more, or "
        "agent.serve_on = false"
    )
    assert alone.startswith("ok       serve on: without model.checkpoint a rank that died cannot ")
    assert of(8)[0] == (
        "ok       serve on: 1 of 2 ranks may die: the others have 8 slots of a layer for 8 experts"
    )
    assert of(4, agent__serve_on=False) == []


def test_slots_of_spares_count_for_survivors(tmp_path: Path) -> None:
    given = {"topology__ranks_per_node": 4, "topology__slots_per_rank": 2, "agent__serve_on": True}

    assert not next(check_serve_on(small(tmp_path, **given))).is_ok
    assert next(check_serve_on(small(tmp_path, topology__spare_slots=1, **given))).is_ok


def test_certificate_of_http_is_checked_and_an_expired_one_is_refused(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")

    def refusals(certificate: Certificate) -> list[str]:
        deployment = small(
            tmp_path,
            http__tls_certificate_file=certificate.chain,
            http__tls_key_file=certificate.key,
        )
        return [one for one in wrong(findings(deployment)) if "TLS" in one]

    old = authority.issue("127.0.0.1", expired=True)

    assert refusals(authority.issue("127.0.0.1")) == []
    (refusal,) = refusals(old)
    assert refusal.startswith(f"refused  TLS of HTTP: certificate {old.chain}")
    assert "certificate has expired, expected one" in refusal


def test_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"http.tls_key_file is not set and http.tls_certificate"):
        small(tmp_path, http__tls_certificate_file=tmp_path / "one.pem")


def test_port_in_use_and_port_given_twice_are_refused(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        deployment = small(tmp_path, network__rendezvous_port=port)
        (first,) = check_ports(deployment, 0)
    twice = small(
        tmp_path,
        network__rendezvous_port=port,
        http__port=port,
    )

    assert str(first).startswith(f"refused  ports: {port} of 127.0.0.1 (network.rendezvous_port) ")
    assert any("is also network.rendezvous_port" in one.found for one in check_ports(twice, 0))


def test_port_of_this_deployment_s_own_service_or_rank_is_no_fault(tmp_path: Path) -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as service,
        closing(socket.create_server(("127.0.0.1", 0))) as rendezvous,
    ):
        ports = [one.getsockname()[1] for one in (service, rendezvous)]
        deployment = small(tmp_path, http__port=ports[0], network__rendezvous_port=ports[1])
        assert len([one for one in check_ports(deployment, 0) if not one.is_ok]) == 2

        with closing(deployment.opened_store()) as store:
            store.announce(Heartbeat(deployment.opened_store, SERVICE, new_holder()).mine)
        own = list(check_ports(deployment, 0))

    assert [one.is_ok for one in own] == [True, True]
    assert own[0].found.endswith(f"is used by process {os.getpid()} of this deployment")


def test_ports_of_the_second_host_are_its_own_alone(tmp_path: Path) -> None:
    two = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}
    deployment = small(tmp_path, network__rendezvous_port=29400, **two)

    assert [one.found for one in check_ports(deployment, 1)] == ["free: none needed"]


@pytest.mark.parametrize("host", [0, 1])
def test_rank_and_host_cache_that_run_already_are_refused(
    tmp_path: Path, small_checkpoint: Checkpoint, host: int
) -> None:
    two = {"topology__nodes": 2, "topology__hosts": ["127.0.0.1", "127.0.0.2"]}
    deployment = small(tmp_path, small_checkpoint, **two)
    schema = deployment.description().schema
    settings, address = deployment.host_cache, deployment.host_cache_address(host)
    cache = build_host_cache(settings, address, deployment.model, schema, small_checkpoint.path)
    rank = deployment.ranks_of(host)[-1]

    with closing(cache), closing(claim_place(deployment.name, rank, deployment.hosts[host])):
        found = wrong(findings(deployment, host))

    assert found == [
        f"refused  places: rank {rank} is run by process {os.getpid()}, expected no process",
        f"refused  places: a process is the cache of host {host}, expected no process",
    ]


def test_checkpoint_of_another_model_is_refused(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    typed = small(tmp_path, small_checkpoint, model__precision="bfloat16")

    with pytest.raises(ConfigError, match=r"model.hidden is 32, expected 16 as in"):
        small(tmp_path, small_checkpoint, model__hidden=32)
    (kind,) = wrong(findings(typed))
    assert "of torch.float32 for gate_proj.weight, expected (8, 16) of torch.bfloat16" in kind


def test_checkpoint_that_changed_between_starts_is_refused_until_it_is_accepted(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    weights = shutil.copytree(small_checkpoint.path, tmp_path / "weights")  # of another time
    first, now = (small(tmp_path, small_checkpoint), small(tmp_path, Checkpoint(weights)))
    shard = sorted(weights.glob("*.safetensors"))[0]
    with closing(first.opened_store()) as store:
        ensure_first_placement(store, first, "eplb serve")
        ensure_first_placement(store, now, "eplb launch, host 0")  # a copy
        assert "differs" not in str(findings(now))

        with shard.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(bytes(64))
        (refused,) = [line for line in wrong(findings(now)) if "checkpoint" in line]
        with pytest.raises(CheckpointError, match=r"differs from the one that deployment 'west-"):
            ensure_first_placement(store, now, "eplb launch, host 0")
        with pytest.raises(CheckpointError, match=r"differs from the one that deployment 'west-"):
            run_host_cache(now, 0, print)
        done = accept_checkpoint(store, now.settings.model, "an operator")
        ensure_first_placement(store, now, "eplb launch, host 0")
        back = [line for line in wrong(findings(first)) if "checkpoint" in line]

    assert refused.startswith(f"refused  checkpoint: {weights} differs from the one that ")
    assert f"(eplb serve): {shard.name} has other bytes, of tensor " in refused
    assert refused.endswith(
        "expected the same; to serve this one, stop all ranks and host caches and run `eplb check "
        "--accept-checkpoint`"
    )
    assert done.startswith(f"accepted {weights}: {shard.name} has other bytes")
    assert len(back) == 1


def test_damage_between_the_samples_is_found_once_all_bytes_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    model = ModelShape((0,), 8, 2, hidden=64, intermediate=64)
    schema = ExpertSchema.swiglu(model.hidden, model.intermediate)
    write_random_checkpoint(folder, model, schema, vocabulary=64, seed=1)
    shard = max(folder.glob("*.safetensors"), key=lambda file: file.stat().st_size)
    weights, before = ModelSettings(checkpoint=folder), shard.stat()
    num_read = list[int]()

    with closing(MemoryStore("demo")) as store:
        check_same_checkpoint(store, weights, "eplb serve")
        first = check_weights(store, weights, "host 0", num_read.append)
        again = check_weights(store, weights, "host 1", num_read.append)
        with shard.open("r+b") as file:  # one float, away from the end and the middle
            file.seek(before.st_size // 5)
            file.write(bytes(byte ^ 1 for byte in shard.read_bytes()[file.tell() :][:4]))
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        check_same_checkpoint(store, weights)
        with pytest.raises(CheckpointError, match=rf"{shard.name} of .* have other bytes than .*"):
            check_weights(store, weights, "host 0", num_read.append)

    num_files = len(list(folder.glob("*.safetensors")))
    assert first.endswith("was read, for the first time")
    assert again.endswith("is as it was first read")
    assert num_read == list(range(1, num_files + 1)) * 3


def test_host_cache_refuses_tensors_that_do_not_fit_the_config_json(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    model = replace(small(tmp_path, small_checkpoint).model, hidden=32)
    weights = tmp_path / "weights"
    write_random_checkpoint(weights, model, ExpertSchema.swiglu(32, 8), vocabulary=64, seed=1)
    shutil.copy(small_checkpoint.path / "config.json", weights / "config.json")

    with pytest.raises(CheckpointError, match=r"has shape \(64, 32\), expected \(64, 16\)"):
        run_host_cache(small(tmp_path, model__checkpoint=weights), 0, print)


def test_checkpoint_without_weight_files_names_both_kinds(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    weights = shutil.copytree(
        small_checkpoint.path, tmp_path / "w", ignore=shutil.ignore_patterns("*.safetensors*")
    )

    (found,) = wrong(findings(small(tmp_path, model__checkpoint=weights)))

    assert found.startswith(f"refused  checkpoint: {weights} ")
    assert "model.safetensors " in found
    assert "model.safetensors.index.json" in found


def test_error_without_an_expectation_is_printed_as_it_is() -> None:
    found = as_finding("store", StoreError("store: the disk is full"))

    assert (found.is_ok, str(found)) == (False, "refused  store: the disk is full")


def test_memory_that_is_not_there_is_refused() -> None:
    costs = Costs(GIB, 10 * GIB, 0, GIB, 64 * GIB, num_local_ranks=2, device="cpu")

    found = check_memory(costs, available=80 * GIB)

    assert str(found) == (
        "refused  memory: 80.0 GiB of host memory are available, 86.0 GiB are needed, "
        "expected more memory, or fewer host_cache.records"
    )
    assert check_memory(costs, available=90 * GIB).is_ok
    assert available_memory() > 0


def test_costs_are_counted_by_slots_staging_and_cache(tmp_path: Path) -> None:
    deployment = small(tmp_path, topology__slots_per_rank=6, topology__staging_experts=3)

    costs = costs_of(deployment)

    assert costs.record == 4096  # 3 x 16 x 8 x 4 bytes in one page
    assert (costs.slots, costs.spares, costs.staging) == (2 * 6 * 4096, 0, 3 * 4096)
    assert (costs.cache, costs.host) == (16 * 4096, 16 * 4096 + 2 * 15 * 4096)
    assert lines_of(costs)[0] == (
        "each rank    60.0 KiB of host memory: slots 48.0 KiB, spares 0 bytes, "
        "staging ring 12.0 KiB"
    )


def test_store_that_does_not_answer_is_refused_without_its_password(tmp_path: Path) -> None:
    # Bound and not listening: it refuses, and no other process can get the port meanwhile.
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        port = refusing.getsockname()[1]
        deployment = small(
            tmp_path, deployment__store=f"redis://:hidden@127.0.0.1:{port}?deadline_s=0.1"
        )

        (found,) = check_store(deployment)

    assert not found.is_ok
    assert f"redis://127.0.0.1:{port}/0 cannot be reached" in found.found
    assert "hidden" not in str(found)


def test_store_of_another_deployment_is_refused(tmp_path: Path) -> None:
    with closing(small(tmp_path).opened_store()) as store:
        ensure_first_placement(store, small(tmp_path), "eplb serve")

    (found,) = check_store(small(tmp_path, model__experts=16))

    assert "has a placement of (layers, experts) (2, 8)" in found.found
    assert found.expected.startswith("(2, 16) by the configuration")


@pytest.mark.parametrize(("ahead_s", "words"), [(30.0, "ahead of"), (-30.0, "behind")])
def test_clock_that_differs_from_the_store_s_is_refused(
    tmp_path: Path, redis_server: RedisProcess, ahead_s: float, words: str
) -> None:
    deployment = small(tmp_path, deployment__store=redis_server.url)

    _, right, _ = check_store(deployment)
    _, off, _ = check_store(deployment, clock=lambda: time.time() + ahead_s)

    assert right.is_ok
    assert off.found.startswith("this host's is ")
    assert words in off.found
    assert off.expected == "at most 1 s: synchronise it (NTP)"


def test_command_names_what_is_wrong_and_what_ranks_take(
    tmp_path: Path, small_checkpoint: Checkpoint
) -> None:
    named = SMALL | {
        "deployment.state_dir": tmp_path / "state",
        "deployment.name": f"west-{os.getpid()}",
        "model.checkpoint": small_checkpoint.path,
    }
    words = [
        "check",
        *(word for one in named.items() for word in ("--setting", "{}={}".format(*one))),
    ]
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        words += ["--setting", f"network.rendezvous_port={port}"]
        done, as_json = (CliRunner().invoke(app, [*words, *more]) for more in ((), ("--json",)))
    lines = done.output.splitlines()
    report = json.loads(as_json.stdout)

    assert done.exit_code == 2
    assert [line for line in lines if line.startswith("refused")] == [
        f"refused  ports: {port} of 127.0.0.1 (network.rendezvous_port) cannot be used: "
        "Address already in use, expected a free port"
    ]
    assert [line.split("  ")[0] for line in lines[-3:]] == ["each rank", "each host", "an expert"]
    assert [one["component"] for one in report["findings"] if not one["is_ok"]] == ["ports"]
    assert report["costs"]["record"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses a host without GPUs")
def test_cuda_without_gpus_is_refused(tmp_path: Path) -> None:
    deployment = small(tmp_path, topology__device="cuda", model__precision="bfloat16")

    found = findings(deployment)

    assert wrong(found) == ["refused  GPUs: 0 GPUs for 2 ranks of this host, expected one for each"]
    assert found["DeepEP"][0].found.startswith("not used, all-to-all over NCCL takes its place")
