"""Generated load: seeded, skewed as real traces are, and drifting by a mix of domains.

Each layer has a base profile over experts; each domain modifies it by its own lognormal factor. A
window mixes requests of several domains, the mix is a random walk over windows, and every request
draws its own profile around that of its domain. The result has skew, drift, and noise that no
planner can remove.

Real profiles are nearest to a gamma distribution with shape 0.7 to 5; Zipf with exponent 1 or more,
common in demonstrations, is far too steep, and is here for comparison. ``simulations/traffic.py``
has days of calibrated traffic.

Shapes:  T windows, L MoE layers, E experts, D domains, Q requests of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from simulations.traffic import PRESETS as TRAFFIC
from simulations.traffic import Traffic, traffic_windows
from simulations.windows import Tokens, Windows

PREFIX = "generated:"


@dataclass(frozen=True)
class Workload:
    """What to generate.

    Raises:
        ConfigError: an unknown profile, or a figure out of range.
    """

    profile: str
    layers: int = 8
    experts: int = 64
    top_k: int = 6
    windows: int = 48
    tokens: int = 4096  # in a window
    requests: int = 32  # in a window
    domains: int = 4
    domain_spread: float = 0.5  # sigma of a domain's factor: 0.15 mixed traffic, 0.8 single domains
    drift: float = 0.15  # how far the mix of domains walks in a window
    dispersion: float = 30.0  # how much a request strays from its domain; 1 is not at all

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise ConfigError(
                f"unknown workload {self.profile!r}, expected one of: "
                f"{', '.join(sorted({*PROFILES, *TRAFFIC}))}"
            )
        for name, least in (("windows", 2), ("domain_spread", 0), ("drift", 0), ("dispersion", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(
                    f"workload: {name} is {getattr(self, name)}, expected at least {least}"
                )
        for name in ("layers", "experts", "top_k", "tokens", "requests", "domains"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload: {name} is {getattr(self, name)}, expected 1 or more")
        if self.top_k > self.experts:
            raise ConfigError(f"workload: top_k {self.top_k} of {self.experts} experts")


def workload_named(text: str) -> Workload:
    """Read ``generated:NAME`` or ``generated:NAME:layers=8,experts=64``.

    Raises:
        ConfigError: an unknown name or key, or a value that is not a number.
    """
    name, _, settings = text.removeprefix(PREFIX).partition(":")
    return Workload(name, **_read(settings, Workload))  # type: ignore[arg-type]


def _read(settings: str, kind: type[Workload] | type[Traffic]) -> dict[str, int | float]:
    """Numbers of ``key=value,...``, by the types of the fields' defaults."""
    kinds = {
        field.name: float if "." in str(field.default) else int
        for field in fields(kind)
        if isinstance(field.default, int | float)
    }
    chosen: dict[str, int | float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in kinds:
            raise ConfigError(
                f"unknown workload setting {key!r}, expected one of: {', '.join(sorted(kinds))}"
            )
        try:
            chosen[key] = kinds[key](value)
        except ValueError as exc:
            raise ConfigError(
                f"workload: {key} is {value!r}, expected a number ({kinds[key].__name__})"
            ) from exc
    return chosen


def windows_named(text: str, seed: int, model: ModelShape | None = None) -> Windows:
    """A source of generated windows: ``generated:NAME`` or ``generated:NAME:key=value,...``.

    Args:
        model: gives layers, experts and top-k where the text does not.

    Raises:
        ConfigError: as ``workload_named``.
    """
    name, _, settings = text.removeprefix(PREFIX).partition(":")
    shape = {}
    if model is not None:
        shape = {"layers": model.num_layers, "experts": model.num_experts, "top_k": model.top_k}
    if name in TRAFFIC:
        chosen = TRAFFIC[name] | shape | _read(settings, Traffic)
        return traffic_windows(Traffic(**chosen), seed)  # type: ignore[arg-type]
    chosen = shape | _read(settings, Workload)
    workload = Workload(name, **chosen)  # type: ignore[arg-type]
    return Windows(
        workload.layers, workload.experts, lambda: stream(workload, seed), workload.windows
    )


def generate(workload: Workload, seed: int) -> LoadHistory:
    """Draw the windows; the same seed draws the same ones."""
    return LoadHistory(np.stack(list(stream(workload, seed))))


def stream(workload: Workload, seed: int) -> Iterator[Tokens]:
    """Draw one window after another."""
    rng = np.random.default_rng(seed)
    shape = (workload.layers, workload.experts)
    base = PROFILES[workload.profile](rng, shape)
    bend = rng.lognormal(0.0, workload.domain_spread, (workload.domains, *shape))
    per_domain = base * bend  # [D, L, E]
    per_domain /= per_domain.sum(axis=2, keepdims=True)
    # A token goes to an expert once at most: the top-k share of one expert cannot pass 1 / k.
    per_domain = np.minimum(per_domain, 1.0 / workload.top_k)
    per_domain /= per_domain.sum(axis=2, keepdims=True)
    mixes = _walk(rng, workload)
    for mix in mixes:
        yield _window(rng, workload, per_domain, mix)


def _walk(rng: np.random.Generator, workload: Workload) -> NDArray[np.float64]:
    """[T, D] shares of the domains: a random walk of their logarithms."""
    steps = rng.normal(0.0, workload.drift, (workload.windows, workload.domains))
    steps[0] = rng.normal(0.0, 1.0, workload.domains)
    weight = np.exp(steps.cumsum(axis=0))
    mix: NDArray[np.float64] = weight / weight.sum(axis=1, keepdims=True)
    return mix


def _window(
    rng: np.random.Generator,
    workload: Workload,
    per_domain: NDArray[np.float64],
    mix: NDArray[np.float64],
) -> NDArray[np.int64]:
    """[L, E] tokens of one window: its requests, each with a profile of its own."""
    domain_of_request = rng.choice(workload.domains, size=workload.requests, p=mix)
    per_request = workload.tokens * workload.top_k // workload.requests
    # A Dirichlet draw of n tokens has variance 1 + (n - 1) / (a + 1) times the multinomial's.
    strength = max(per_request / max(workload.dispersion - 1.0, 1e-9), 1e-3)
    drawn = rng.gamma(per_domain[domain_of_request] * strength)  # [Q, L, E]
    drawn += 1e-12  # a draw of nothing but zeros would have no profile
    profile = drawn / drawn.sum(axis=2, keepdims=True)
    tokens: NDArray[np.int64] = rng.multinomial(per_request, profile).sum(axis=0)
    return tokens


def _lognormal(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    return rng.lognormal(0.0, 0.8, shape)


def _zipf(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    ranks = rng.permuted(np.tile(np.arange(1.0, shape[1] + 1), (shape[0], 1)), axis=1)
    weight: NDArray[np.float64] = ranks**-1.0
    return weight


def _gamma(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float64]:
    # Shapes as measured per layer on DeepSeek-V2-Lite: 0.7 to 2.7.
    per_layer = rng.uniform(0.7, 2.7, (shape[0], 1))
    return rng.gamma(np.broadcast_to(per_layer, shape)) + 1e-6


PROFILES: dict[str, Callable[[np.random.Generator, tuple[int, int]], NDArray[np.float64]]] = {
    "gamma": _gamma,
    "lognormal": _lognormal,
    "zipf": _zipf,
}
