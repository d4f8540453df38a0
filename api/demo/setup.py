"""What the demo writes before its first process starts, with all checks of its input.

    options, settings --> weights, text --> settings.toml, engine.json --> first placement

``settings.toml`` is the configuration of an ordinary deployment: with ``EPLB_CONFIG`` it starts the
same processes by hand.
"""

from __future__ import annotations

import hashlib
import math
import os
import random
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from api.config.reference import toml_value
from api.config.tree import Settings, load
from api.demo.checking import Checks
from api.demo.engine import EngineFile
from api.demo.options import Options
from api.demo.state_dir import SETTINGS_FILE, StateDir
from api.demo.text import SEQUENCE_LENGTH, VOCABULARY, Load, domains_of, standard_domains
from api.deploy.check import port_refusal
from api.deploy.deployment import Deployment, resolve, topology_of
from api.deploy.first_placement import (
    check_belongs,
    contiguous_placement,
    misfit,
    record_start,
    set_static,
)
from api.deploy.launch import check_gpus
from api.deploy.model import accept_checkpoint, model_shape
from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from eplb.migration.serialisation import model_to_dict
from eplb.policies.table import policy_named
from eplb.settings.deployment import numeric_address
from eplb.settings.loader import COMMAND_DEFAULTS
from eplb.versions import NAMES
from rebalance.assembly.config import NetworkConfig
from rebalance.assembly.description import schema_of
from rebalance.assembly.rank import new_run_name
from rebalance.assembly.rank import record_start as begin_run
from rebalance.weights.link.secret import VARIABLE as SECRET_VARIABLE
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.checkpoints.own_model import write_random_checkpoint
from runtime.model.moe import NUM_HEADS
from telemetry.formats.routing import read_trace
from telemetry.state.holder import is_dead, shown
from telemetry.state.joining import MISSED_BEATS, heartbeats
from telemetry.state.store import StateStore, without_password

WINDOW_TOKENS = 16_384  # tokens of a load window if telemetry.window_steps is not set
SAMPLES_PER_WINDOW = 4
ENGINE_FILE, FIGURES, RESULTS = "engine.json", "figures", "checks.jsonl"
BY = "eplb demo"


@dataclass(frozen=True)
class Prepared:
    """A demo whose files are written."""

    deployment: Deployment
    engine: EngineFile
    engine_path: Path
    environ: Mapping[str, str]  # environment of its commands


def prepare(options: Options, settings: Settings, state: StateDir) -> Prepared:
    """Write weights, text, the configuration and the engine's file. Starts nothing.

    Raises:
        ConfigError: settings, text or trace that cannot be used.
        CheckpointError: weights on disk that are damaged or of another model.
    """
    model, trace = _model(options, settings, state)
    text = None if trace is not None else _text(options, state)
    weights = _weights(settings, options.seed, state, model)
    path = state.save_text(SETTINGS_FILE, _configuration(options, settings, model, weights))
    given = {SECRET_VARIABLE: os.environ[SECRET_VARIABLE]} if SECRET_VARIABLE in os.environ else {}
    if settings.deployment.store:  # it may hold a password
        given["EPLB_STORE"] = settings.deployment.store
    deployment = resolve(load({}, config=path, environ=given), given)
    for name in (FIGURES, RESULTS):
        with suppress(FileNotFoundError):
            shutil.rmtree(old) if (old := state.path / name).is_dir() else old.unlink()
    checks = Checks(
        socket=f"eplb-demo-checks-{secrets.token_hex(8)}",
        key=secrets.token_bytes(16),
        results=(state.path / RESULTS).absolute(),
        every=options.check_every,
        model=model,
        weights=weights,
        precision=_precision(settings),
        # Beside GPUs there are cores to spare; beside CPU ranks there is one at most.
        num_threads=8 if settings.topology.device == "cuda" else 1,
    )
    engine = EngineFile(
        Load(options.tokens_per_rank, options.seed, options.seconds, text, trace),
        checks,
        options.dispatcher,
        (state.path / FIGURES).absolute(),
        settings.log.format,
        settings.log.level,
    )
    own = {name: value for name, value in os.environ.items() if not name.startswith("EPLB_")}
    environ = own | given | {"EPLB_CONFIG": str(path.absolute())}
    written = state.save_text(ENGINE_FILE, engine.to_json())
    return Prepared(deployment, engine, written.absolute(), environ)


def begin(options: Options, deployment: Deployment, store: StateStore) -> int:
    """Have the store name the placement that the run starts from; returns the latest event's id.

    It is contiguous, or with ``resume`` the one that the last run ended with. What an earlier demo
    in this store had of a secret, a checkpoint and a topology is replaced.
    """
    check_idle(store)
    committed = store.committed()
    generation = None if committed is None else committed.placement.generation
    model, topology = deployment.model, deployment.topology
    record_start(store, deployment, BY)
    accept_checkpoint(store, deployment.settings.model, BY)
    set_static(store, deployment, "start of the demo")
    if not options.resume:
        start = contiguous_placement(model, topology)
        start = start.with_generation(0 if generation is None else generation + 1)
        reason = "start of the demo: unbalanced, experts in order"
        store.commit(start, expected=generation, reason=reason)
    elif committed is None:
        where = deployment.store_shown
        raise ConfigError(f"{where} holds no placement to resume from, expected one")
    else:
        check_belongs(store, deployment)
        if why := misfit(committed.placement, deployment):
            raise ConfigError(f"the placement in {deployment.store_shown} cannot resume: {why}")
    if store.current_run() is not None:
        # The controller would plan on the load of an earlier demo, which may have had other ranks.
        given = deployment.settings.telemetry
        windows = given.window_steps, given.window_seconds
        begin_run(store, new_run_name(), model, topology, windows)
    return next(iter(store.latest_events(limit=1))).id


def check_idle(store: StateStore) -> None:
    """Refuse a store whose deployment is run: its placement would be replaced under its ranks.

    Raises:
        ConfigError: a process of the deployment has announced itself lately, and has not ended.
    """
    now = store.backend.now()
    for one in heartbeats(store, now):
        is_silent = now - one.time > MISSED_BEATS * one.every_s
        if not (is_silent or is_dead(one.process)):
            raise ConfigError(
                f"deployment {store.deployment!r} of this store is run by {shown(one.process)} "
                f"({NAMES[one.component]}), expected none: end that one, or use another store"
            )


def check_settings(options: Options, settings: Settings) -> None:
    """Refuse what needs no file to be refused.

    Raises:
        ConfigError: settings that do not fit together.
    """
    policy_named(settings.controller.policy)
    model, device = settings.model, settings.topology.device
    if (model.precision == "float32") != (device == "cpu"):
        raise ConfigError(
            f"model.precision is {model.precision} with topology.device {device}, expected "
            "float32 on the cpu, bfloat16 or fp8 on cuda"
        )
    if model.hidden % NUM_HEADS:
        raise ConfigError(
            f"model.hidden is {model.hidden}, expected a multiple of {NUM_HEADS}, the number of "
            "attention heads"
        )
    if options.trace is not None and options.text:
        raise ConfigError("--trace and --text are given, expected one of them")
    tokens = options.tokens_per_rank
    if options.trace is None and tokens > SEQUENCE_LENGTH and tokens % SEQUENCE_LENGTH:
        raise ConfigError(
            f"--tokens-per-rank is {tokens}, expected at most {SEQUENCE_LENGTH} or a multiple of "
            "it, the tokens of one sequence of text"
        )
    if model.top_k > model.experts:
        raise ConfigError(
            f"model.top_k is {model.top_k}, expected at most {model.experts}, model.experts"
        )
    topology = topology_of(settings, _shape(settings))
    if device == "cuda":
        check_gpus(topology.num_ranks)


def _configuration(options: Options, settings: Settings, model: ModelShape, weights: Path) -> str:
    """Give the configuration of the demo's deployment: what differs from the defaults."""
    places = settings.places
    block = f"127.{1 + secrets.randbelow(250)}.{secrets.randbelow(250)}"
    derived: dict[str, Any] = {
        "deployment.state_dir": settings.deployment.state_dir.absolute(),
        "model.checkpoint": weights,
        "model.layers": model.num_layers,
        "model.top_k": model.top_k,
        "http.port": _free_port(settings.http.host, settings.http.port),
        # Each host is an address of this machine, which no other demo has.
        "topology.hosts": settings.topology.hosts
        or [f"{block}.{host + 1}" for host in range(settings.topology.nodes)],
        "network.interface": settings[NetworkConfig].interface or "lo",
        **_window(options, settings),
    }
    lines, section = [], ""
    for known in Settings.known.values():
        if known.path not in places and known.path not in derived:
            continue
        if known.section != section:
            section = known.section
            lines += ["", f"[{section}]"]
        value = derived.get(known.path, settings.value(known))
        shown = f"{known.name} = {toml_value(value)}"
        if known.path == "deployment.store":
            shown = f"# store: EPLB_STORE has {without_password(str(value))}"
        lines.append(f"{shown:<40} # {places.get(known.path, BY)}")
    return "\n".join(["# The configuration of the demo's deployment.", *lines]) + "\n"


def _window(options: Options, settings: Settings) -> dict[str, int]:
    """Steps of a load window and of a sample: about WINDOW_TOKENS and a quarter, if not set."""
    given, topology = settings.telemetry, settings.topology
    window, sample = given.window_steps, given.sample_steps
    has_sample = settings.places.get("telemetry.sample_steps") not in (None, COMMAND_DEFAULTS)
    if "telemetry.window_steps" not in settings.places:
        step = topology.nodes * topology.ranks_per_node * options.tokens_per_rank
        if not has_sample:
            sample = max(1, round(WINDOW_TOKENS / step / SAMPLES_PER_WINDOW))
        window = sample * math.ceil(WINDOW_TOKENS / step / sample)
    elif not has_sample:
        most = max(1, window // SAMPLES_PER_WINDOW)
        sample = next(steps for steps in range(most, 0, -1) if window % steps == 0)
    return {"telemetry.window_steps": window, "telemetry.sample_steps": sample}


def _free_port(host: str, port: int) -> int:
    """Give the port of the service; for 0 one below those that connections are given.

    So a service that is started again finds it free.

    Raises:
        ConfigError: it cannot be listened on.
    """
    address, refusal = numeric_address(host), ""
    for one in [port] if port else random.SystemRandom().sample(range(10_000, 32_000), 1_000):
        if not (refusal := port_refusal(address, one)):
            return one
    raise ConfigError(
        f"port {port} of {host} (http.port, http.host) cannot be used: {refusal}, expected a free "
        "one"
    )


def _shape(settings: Settings) -> ModelShape:
    own = replace(settings.model, checkpoint=None, layout="eplb")  # the demo writes its weights
    return replace(model_shape(own), num_shared_experts=1)


def _model(options: Options, settings: Settings, state: StateDir) -> tuple[ModelShape, Path | None]:
    """The model's shape, and the trace that gives its layers and top-k, if there is one."""
    shape = _shape(settings)
    if options.trace is None:
        return shape, None
    ids = read_trace(options.trace).ids.transpose(1, 0, 2)
    num_layers, _, top_k = ids.shape
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < -1 or highest >= shape.num_experts:
        raise ConfigError(
            f"trace {options.trace} names experts {lowest}..{highest}, "
            f"expected 0..{shape.num_experts - 1} (--experts), or -1 for padding"
        )
    path = state.save_arrays("trace.npz", {"expert_ids": ids.astype(np.int16)})
    return replace(shape, layer_ids=tuple(range(num_layers)), top_k=top_k), path.absolute()


def _text(options: Options, state: StateDir) -> Path:
    domains = domains_of(options.text) if options.text else standard_domains()
    arrays = {f"{number}-{domain.name}": domain.tokens for number, domain in enumerate(domains)}
    return state.save_arrays("text.npz", arrays).absolute()


def _precision(settings: Settings) -> str:
    return settings.model.precision or "bfloat16"


def _weights(settings: Settings, seed: int, state: StateDir, model: ModelShape) -> Path:
    """Find the weights of this model and seed, or write them."""
    precision = _precision(settings)
    schema = schema_of(model.hidden, model.intermediate, precision)
    named = {name: value for name, value in model_to_dict(model).items() if name != "expert_cost"}
    key = hashlib.blake2b(
        repr((named, VOCABULARY, precision, seed)).encode(), digest_size=6
    ).hexdigest()
    path = (state.path / f"weights-{key}").absolute()
    if not path.exists():
        write_random_checkpoint(path, model, schema, vocabulary=VOCABULARY, seed=seed)
    Checkpoint(path).check(model, schema)
    return path
