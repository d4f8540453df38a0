"""``eplb check --engine``: a command that starts an engine, and what the plug-in needs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from api.deploy.check import Finding, as_finding
from eplb.errors import ConfigError, EplbError
from eplb.packages import LIBRARIES
from eplb.settings.loader import CONFIG_VARIABLE, GROUP_VARIABLE
from rebalance.engines import trtllm_options
from rebalance.engines.common.command import Remark, command_of, model_config_of
from rebalance.engines.common.guards import untried
from rebalance.engines.common.plugin_settings import settings_of
from rebalance.engines.common.start import check_libraries
from rebalance.engines.common.store_link import why_kept
from rebalance.engines.sglang import options as sglang_options
from rebalance.engines.vllm import options as vllm_options
from telemetry.state.store import file_of, open_store, without_password

RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # variables that vLLM gives Ray's processes


def check_engine(
    command: str, model_config: Path | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Run every check of a command such as ``vllm serve MODEL --enable-eplb``.

    Raises:
        EplbError: the command or a file cannot be read.
    """
    engine, words = command_of(command)
    if engine == "trtllm":
        yield from _as_findings(trtllm_options.remarks(words))
        return
    yield from _plugin(engine, environ)
    is_here = find_spec(engine) is not None
    if engine == "sglang":
        options = sglang_options.options_of(words)
        model = model_config_of(options.model_path, model_config)
        yield from _as_findings(sglang_options.remarks(options, model))
    elif not is_here:
        found = "not installed in this environment: its command and its release are not checked"
        yield Finding("vllm", found, "the environment of the engine")
    else:
        options = vllm_options.options_of(words)
        model = model_config_of(options.model, model_config)
        yield from _as_findings(vllm_options.remarks(options, model))
        yield from _ray(options, environ)
    if is_here:
        yield _release(engine)


def _as_findings(remarks: Iterable[Remark]) -> Iterator[Finding]:
    yield from (Finding(*remark) for remark in remarks)


def _ray(options: Any, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables that Ray gives to the processes that it starts."""
    copied = environ.get(RAY_COPIES, "").split(",")
    if vllm_options.uses_ray(options) and CONFIG_VARIABLE not in copied:
        found = f"{RAY_COPIES} is {environ.get(RAY_COPIES, '')!r}: Ray's processes load no plug-in"
        yield Finding("ray", found, f"{CONFIG_VARIABLE} among them")
    elif vllm_options.uses_ray(options) and GROUP_VARIABLE in environ.keys() - set(copied):
        found = f"{RAY_COPIES} lacks {GROUP_VARIABLE}: Ray's processes run as another engine"
        yield Finding("ray", found, f"{GROUP_VARIABLE} among them")


def _plugin(engine: str, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings, libraries and store of the plug-in."""
    settings = settings_of(environ)
    if settings is None:
        unset = f"{CONFIG_VARIABLE} is not set: the plug-in does nothing"
        yield Finding("plug-in", unset, f"{CONFIG_VARIABLE} in every process of the engine")
        return
    variable = f"{engine.upper()}_PLUGINS"
    names = environ.get(variable)
    if names is not None and "eplb" not in names.split(","):
        found = f"{variable} is {names!r}"
        yield Finding("plug-in", found, f"eplb among them, or no {variable}")
        return
    deployment = settings.deployment
    shown = without_password(deployment.store_url)
    yield Finding("plug-in", f"deployment {deployment.name!r}, store {shown}")
    file = file_of(deployment.store_url)
    try:
        check_libraries(LIBRARIES if file is not None else (*LIBRARIES, "redis"))
    except ConfigError as exc:
        yield as_finding("libraries", exc)
    if file is not None and not file.exists():
        yield Finding("store", f"{file} is not there yet, the engine's start makes it")
        return
    try:
        with closing(open_store(deployment.store_url, deployment.name)) as store:
            why = why_kept(store)
    except EplbError as exc:
        yield Finding("store", str(exc), "a store that answers: else the map of the start stays")
        return
    moves = f"nothing moves: {why}" if why else "plans move experts"
    if not settings.engine.plan:
        moves = "engine.plan is off: the engine's own balancer moves experts, and obeys no switch"
    yield Finding("store", f"answers; {moves}")


def _release(engine: str) -> Finding:
    """The engine that is installed here, by the checks that the plug-in makes when it is loaded."""
    entry = import_module(f"rebalance.engines.{engine}.entry")
    for refusal in entry.refusals():
        return Finding(engine, refusal, "a release that the plug-in was tested with")
    version = importlib.metadata.version(engine)
    first = untried(entry.ASSUMED)
    after = f"; {first}: it is observed first" if first else ""
    return Finding(engine, f"{version}, all that the plug-in depends on is there{after}")
