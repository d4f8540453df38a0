"""``eplb check --engine``: a command that starts vLLM, and what the plug-in needs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

from api.deploy.check import Finding
from eplb.errors import EplbError
from eplb.settings.loader import CONFIG_VARIABLE, GROUP_VARIABLE
from rebalance.engines.common.plugin_settings import settings_of
from rebalance.engines.common.store_link import why_kept
from rebalance.engines.vllm.options import model_config_of, options_of, remarks, uses_ray
from telemetry.state.store import file_of, open_store, without_password

OF_PLUGIN = ("numba", "scipy", "zstandard")  # libraries that engines may lack
RAY_COPIES = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # variables that vLLM gives Ray's processes


def check_engine(
    command: str, model_config: Path | None, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Run every check of a command such as ``vllm serve MODEL --enable-eplb``.

    Raises:
        EplbError: the command or a file cannot be read.
    """
    yield from _plugin(environ)
    if find_spec("vllm") is None:
        found = "not installed in this environment: its command and its release are not checked"
        yield Finding("vllm", found, "the environment of the engine")
        return
    options = options_of(command)
    for remark in remarks(options, model_config_of(options, model_config)):
        yield Finding(*remark)
    copied = environ.get(RAY_COPIES, "").split(",")
    if uses_ray(options) and CONFIG_VARIABLE not in copied:
        found = f"{RAY_COPIES} is {environ.get(RAY_COPIES, '')!r}: Ray's processes load no plug-in"
        yield Finding("ray", found, f"{CONFIG_VARIABLE} among them")
    elif uses_ray(options) and GROUP_VARIABLE in environ and GROUP_VARIABLE not in copied:
        found = f"{RAY_COPIES} lacks {GROUP_VARIABLE}: Ray's processes run as another engine"
        yield Finding("ray", found, f"{GROUP_VARIABLE} among them")
    yield _release()


def _plugin(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Settings, libraries and store of the plug-in."""
    settings = settings_of(environ)
    if settings is None:
        unset = f"{CONFIG_VARIABLE} is not set: the plug-in does nothing"
        yield Finding("plug-in", unset, f"{CONFIG_VARIABLE} in every process of the engine")
        return
    names = environ.get("VLLM_PLUGINS")
    if names is not None and "eplb" not in names.split(","):
        yield Finding(
            "plug-in", f"VLLM_PLUGINS is {names!r}", "eplb among them, or no VLLM_PLUGINS"
        )
        return
    deployment = settings.deployment
    shown = without_password(deployment.store_url)
    yield Finding("plug-in", f"deployment {deployment.name!r}, store {shown}")
    missing = [name for name in OF_PLUGIN if find_spec(name) is None]
    if missing:
        libraries = " ".join(missing)
        yield Finding("libraries", f"{libraries}: not installed", f"pip install {libraries}")
    file = file_of(deployment.store_url)
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


def _release() -> Finding:
    """The vLLM that is installed here, by the checks that the plug-in makes when it is loaded."""
    from rebalance.engines.vllm.entry import refusals  # late: it imports vLLM

    for refusal in refusals():
        return Finding("vllm", refusal, "a release that the plug-in was tested with")
    version = importlib.metadata.version("vllm")
    return Finding("vllm", f"{version}, all that the plug-in depends on is there")
