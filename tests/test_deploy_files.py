"""The files of docs/deploy: checked by their own tools, and the commands of Compose started."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from api.config.tree import load
from api.deploy.deployment import resolve
from eplb.errors import ConfigError
from runtime.checkpoints.checkpoint import Checkpoint
from tests.support.deployments import EPLB, CommandProcess, clean_environ, free_ports
from tests.support.documents import files_of
from tests.support.redis_servers import RedisProcess
from tests.support.repository import ROOT

FILES = ROOT / "docs" / "deploy"
MANIFESTS = [
    document
    for path in sorted((FILES / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
COMPOSE = yaml.safe_load((FILES / "compose.yaml").read_text())


def run_tool(name: str, *words: str | Path) -> None:
    """Run a program that finds nothing to complain about; skip where it is not installed."""
    beside = Path(sys.executable).with_name(name)
    found = beside if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    ended = subprocess.run([found, *words], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def of_kind(*kinds: str) -> list[dict[str, Any]]:
    return [one for one in MANIFESTS if one["kind"] in kinds]


def pods() -> list[dict[str, Any]]:
    return [one["spec"]["template"] for one in of_kind("Deployment", "DaemonSet", "StatefulSet")]


def test_dockerfile_is_clean_for_hadolint() -> None:
    run_tool("hadolint", FILES / "Dockerfile")


def test_job_script_is_clean_for_shellcheck() -> None:
    run_tool("shellcheck", FILES / "slurm.sbatch")


@pytest.mark.parametrize("name", ["namespace", "controllers", "hosts", "network-policy"])
def test_manifests_fit_the_schemas_of_kubernetes(name: str) -> None:
    path = FILES / "kubernetes" / f"{name}.yaml"
    run_tool("kubernetes-validate", "--strict", "-k", "1.34", path)


def test_units_are_clean_for_systemd(tmp_path: Path) -> None:
    for path in (FILES / "systemd").glob("*.service"):
        text = path.read_text().replace("/opt/eplb/bin", str(EPLB.parent))
        (tmp_path / path.name).write_text(text.replace("User=eplb", "User=root"))

    run_tool("systemd-analyze", "verify", *sorted(tmp_path.iterdir()))


def test_every_command_of_the_files_is_one_of_the_package() -> None:
    named = [" ".join(pod["args"]) for one in pods() for pod in one["spec"]["containers"]]
    named += [" ".join(one["command"]) for one in services().values()]
    for path in (FILES / "systemd").glob("*.service"):
        named += re.findall(r"^ExecStart=\S+/eplb (.*)", path.read_text(), re.MULTILINE)
    named += re.findall(r"(?:eplb|\$host) (\w.*?)[\"\n]", (FILES / "slurm.sbatch").read_text())

    known = subprocess.run([EPLB, "--help"], capture_output=True, text=True, check=True).stdout
    assert {words.split()[0] for words in named} == {"serve", "host-cache", "launch"}
    assert all(f" {words.split()[0]} " in known for words in named)


def test_configuration_of_the_manifests_can_be_used_and_has_their_ports() -> None:
    settings = load({}, config=FILES / "kubernetes" / "eplb.toml", environ={})

    (ranks,) = of_kind("StatefulSet")
    assert settings.topology.nodes == len(settings.topology.hosts) == ranks["spec"]["replicas"]
    gpus = ranks["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert gpus == {"nvidia.com/gpu": settings.topology.ranks_per_node}
    ports = {settings.http.port, settings.http.metrics_port}
    (serve,) = of_kind("Deployment")
    container = serve["spec"]["template"]["spec"]["containers"][0]
    assert {one["containerPort"] for one in container["ports"]} == ports
    (policy,) = of_kind("NetworkPolicy")
    assert {one["ports"][0]["port"] for one in policy["spec"]["ingress"]} == ports
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    assert {str(settings.deployment.state_dir), str(settings.model.checkpoint.parent)} <= mounts


def test_everything_that_selects_pods_selects_those_of_a_template() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods()]

    for one in of_kind("Service"):
        assert one["spec"]["selector"] in labels
    for one in of_kind("PodDisruptionBudget", "Deployment", "DaemonSet", "StatefulSet"):
        assert one["spec"]["selector"]["matchLabels"] in labels
    (policy,) = of_kind("NetworkPolicy")
    assert policy["spec"]["podSelector"]["matchLabels"] in labels


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        ("EPLB_SECRET", r"there is no secret: expected one .* network.secret_file or EPLB_SECRET"),
        ("EPLB_STORE", "deployment.store is the file of a host, expected a server that all 2 host"),
    ],
)
def test_manifests_whose_secret_lacks_a_key_are_refused_with_its_name(
    small_checkpoint: Checkpoint, absent: str, expected: str
) -> None:
    environ = {"EPLB_SECRET": "0123456789abcdef", "EPLB_STORE": "redis://redis:6379"}
    del environ[absent]
    given = environ | {"EPLB_MODEL__CHECKPOINT": str(small_checkpoint.path)}
    settings = load({}, config=FILES / "kubernetes" / "eplb.toml", environ=given)

    with pytest.raises(ConfigError, match=expected):
        resolve(settings, environ)


def test_no_process_of_the_manifests_starts_without_the_secret() -> None:
    for pod in pods():
        (container,) = pod["spec"]["containers"]
        assert container["envFrom"] == [{"secretRef": {"name": "eplb"}}]  # not optional
    for service in services().values():
        assert service["environment"]["EPLB_SECRET"].startswith("${EPLB_SECRET:?")


def services() -> dict[str, Any]:
    """Services of Compose that run this package."""
    return {name: one for name, one in COMPOSE["services"].items() if name != "redis"}


@pytest.mark.system
def test_commands_of_compose_serve_with_right_answers(tmp_path: Path) -> None:
    for name, code in files_of("docs/deployment.md").items():
        (tmp_path / name).write_text(code)
    made = [sys.executable, "make_model.py"]
    subprocess.run(made, cwd=tmp_path, env=clean_environ(), check=True, capture_output=True)
    rendezvous, http = free_ports(2)
    with ExitStack() as stack:
        redis = stack.enter_context(RedisProcess(tmp_path / "redis"))
        started = {}
        for name, service in services().items():
            environ = {key: str(value) for key, value in service["environment"].items()}
            environ |= {
                "EPLB_CONFIG": "eplb.toml",  # as the image has it
                "EPLB_STORE": redis.url,
                "EPLB_SECRET": "0123456789abcdef0123456789abcdef",
                "EPLB_HTTP__PORT": str(http),
                "EPLB_NETWORK__RENDEZVOUS_PORT": str(rendezvous),
                "PYTHONPATH": str(ROOT),
            }
            words = [str(EPLB), *service["command"]]
            started[name] = CommandProcess(words, tmp_path, clean_environ(**environ))
            stack.callback(started[name].kill)
        started["launch"].wait_for("engine: generation 0 serves")

        assert urllib.request.urlopen(f"http://127.0.0.1:{http}/livez").status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{http}/")
        token = (tmp_path / ".eplb" / "serve" / "http-token").read_text().strip()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{http}/api/v1/state", headers={"Authorization": f"Bearer {token}"}
        )
        assert urllib.request.urlopen(asked).status == 200

        assert started.pop("launch").ends(signal.SIGTERM) == 0
        for process in started.values():
            assert process.ends(signal.SIGTERM) == 0, process.lines


def test_image_has_every_folder_of_the_package() -> None:
    kept = (FILES / "Dockerfile.dockerignore").read_text().splitlines()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}

    assert kept[0] == "*"
    assert {f"!{name}" for name in packages - {"tests", "benchmarks"}} <= set(kept)
