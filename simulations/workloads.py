"""Generated load: seeded, skewed as real traces are, and drifting by a mix of domains.

Each layer has a base profile over experts; each domain modifies it by its own lognormal factor. A
window mixes requests of several domains. The result has skew, drift, and noise that no planner can
remove.

Real profiles are nearest to a gamma distribution with shape 0.7 to 5; Zipf with exponent 1 or more,
common in demonstrations, is far too steep, and is here for comparison. A few layers have one expert
that half of all tokens choose. Where domains are single tenants (``domain_spread`` 0.8) little of
the ranking is left, in mixed traffic (0.15) nearly all of it. The mix of domains returns to its
mean with a random walk, swings with the hour, and jumps at sudden shifts; every layer sees the same
mix. Requests stray from their domains, which makes the counts of a window vary ``dispersion`` times
as much as independent tokens would. A window's counts have the mean and the variance of that model
without drawing single requests: a day of 58 x 256 experts takes minutes. Calibrated to measurements
of recorded routing, which ``tests/simulations/test_traffic.py`` states.

Shapes:  L MoE layers, E experts, D domains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from math import tau

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.core.model import ModelShape
from eplb.errors import ConfigError
from simulations.windows import RecordedDeployment, Tokens, WindowSeries

DAY_S = 86_400.0
DRIFT_S = 600.0  # ``drift`` is what the mix walks in so long
COLDEST = 1e-4  # part of a mean expert: in long windows real layers have no dead experts
# Correlation of decode's with prefill's profile: 0.78 to 0.85 in ranks on questions and answers.
DECODE_SPREAD = 0.35


@dataclass(frozen=True)
class Traffic:
    """What to generate.

    Raises:
        ConfigError: a figure out of range.
    """

    layers: int = 58
    experts: int = 256
    top_k: int = 8
    windows: int = 288
    window_s: float = 300.0
    tokens: int = 1_000_000  # tokens of a window at the mean rate, before top-k
    steps: int = 100  # forward passes of a window
    decode: int = 1  # 0: prefill
    shape_low: float = 1.6  # least shape of the Gamma profiles, by layer: 1 / CV^2
    shape_high: float = 4.8
    hot_layers: float = (
        0.03  # part of the layers with one expert that ``hot_share`` of tokens go to
    )
    hot_share: float = 0.5  # at most; at least 0.05
    domains: int = 8
    domain_spread: float = 0.3  # sigma: 0.15 mixed traffic, 0.8 single domains
    requests: float = 512.0  # requests of a window, as the mix of domains varies
    dispersion: float = 30.0  # variance over that of independent tokens: 2 to 5 prefill, 30 decode
    drift: float = 0.15  # random walk of the mix in ten minutes, in sigmas
    diurnal: float = 0.3  # how far rate and mix swing in a day
    shift_hours: float = 12.0  # mean time between sudden shifts of the mix; 0: none
    profile: str = "gamma"  # profile of experts: one of PROFILES

    def __post_init__(self) -> None:
        for name in ("layers", "experts", "top_k", "tokens", "steps", "domains"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload: {name} is {getattr(self, name)}, expected 1 or more")
        limits = {
            "windows": (2, np.inf),
            "window_s": (1e-3, np.inf),
            "decode": (0, 1),
            "shape_low": (0.05, self.shape_high),
            "hot_layers": (0, 1),
            "hot_share": (0.05, 1),
            "domain_spread": (0, 5),
            "requests": (1, np.inf),
            "dispersion": (1, np.inf),
            "drift": (0, 10),
            "diurnal": (0, 1),
            "shift_hours": (0, np.inf),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(
                    f"workload: {name} is {getattr(self, name)}, expected {low:g} to {high:g}"
                )
        if self.top_k > self.experts:
            raise ConfigError(f"workload: top_k {self.top_k} of {self.experts} experts")


# Short loads, for examples.
SHORT: dict[str, float | int] = {
    "layers": 8,
    "experts": 64,
    "top_k": 6,
    "windows": 48,
    "window_s": 600.0,
    "tokens": 4096,
    "steps": 1,
    "decode": 0,
    "requests": 32.0,
    "domains": 4,
    "domain_spread": 0.5,
    "shape_low": 0.7,
    "shape_high": 2.7,
    "hot_layers": 0.0,
    "diurnal": 0.0,
    "shift_hours": 0.0,
}
# By the model that the figures were measured on; the rest are the defaults above.
TRAFFIC: dict[str, dict[str, float | int | str]] = {
    "mixed": {},
    "tenants": {
        "domain_spread": 0.8,
        "shape_low": 4.0,
        "shape_high": 8.0,
        "requests": 48.0,
        "shift_hours": 4.0,
    },
    "glm": {"layers": 75, "shape_low": 4.6, "domain_spread": 0.14, "decode": 0, "dispersion": 4.0},
    "prefill": {"decode": 0, "dispersion": 4.0, "requests": 64.0},
    "steady": {"drift": 0.0, "diurnal": 0.0, "shift_hours": 0.0},
    "v2-lite": {
        "layers": 26,
        "experts": 64,
        "top_k": 6,
        "shape_low": 0.7,
        "shape_high": 2.7,
        "hot_layers": 0.0,
    },
    "gpt-oss": {
        "layers": 24,
        "experts": 32,
        "top_k": 4,
        "shape_low": 0.66,
        "shape_high": 1.85,
        "hot_layers": 0.0,
    },
    **{name: SHORT | {"profile": name} for name in ("gamma", "lognormal", "zipf")},
}


def traffic_windows(traffic: Traffic, seed: int) -> WindowSeries:
    """The windows as a source; every reading draws the same ones."""
    return WindowSeries(
        traffic.layers,
        traffic.experts,
        lambda: traffic_stream(traffic, seed),
        traffic.windows,
        traffic.steps,
        "decode" if traffic.decode else "prefill",
        deployment=RecordedDeployment(window_s=traffic.window_s),
    )


def traffic_stream(traffic: Traffic, seed: int) -> Iterator[Tokens]:
    """[L, E] of one window after another."""
    profiles = profiles_of(traffic, np.random.default_rng([seed, 0]))
    rng = np.random.default_rng([seed, 1])
    for mix, rate in mixes(traffic, np.random.default_rng([seed, 2])):
        requests = max(1, round(traffic.requests * rate))
        seen = rng.multinomial(requests, mix) / requests  # one draw: layers see the same requests
        count = max(1, round(traffic.tokens * rate)) * traffic.top_k
        yield drawn(np.tensordot(seen, profiles, axes=1), count, traffic.dispersion, rng)


def profiles_of(traffic: Traffic, rng: np.random.Generator) -> NDArray[np.float64]:
    """[D, L, E] shares of routed tokens, of each domain."""
    shape = (traffic.layers, traffic.experts)
    base = PROFILES[traffic.profile](traffic, rng, shape)
    bend = rng.normal(0.0, traffic.domain_spread, (traffic.domains, *shape))
    if traffic.decode:
        bend = bend + rng.normal(0.0, DECODE_SPREAD, shape)
    profile: NDArray[np.float64] = np.maximum(base, COLDEST) * np.exp(bend)
    profile /= profile.sum(axis=2, keepdims=True)
    is_hot = rng.random(traffic.layers) < traffic.hot_layers
    part = np.exp(rng.uniform(np.log(0.05), np.log(traffic.hot_share), traffic.layers))
    expert = rng.integers(traffic.experts, size=traffic.layers)
    for layer in np.flatnonzero(is_hot):
        share = part[layer] / traffic.top_k
        profile[:, layer] *= (1 - share) / (1 - profile[:, layer, expert[layer], None])
        profile[:, layer, expert[layer]] = share
    # A token goes to an expert once at most: the top-k share of one expert cannot pass 1 / k.
    profile = np.minimum(profile, 1.0 / traffic.top_k)
    profile /= profile.sum(axis=2, keepdims=True)
    return profile


def _gamma(
    traffic: Traffic, rng: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.float64]:
    # Drawn evenly in 1 / CV, as layers of one model are.
    low, high = traffic.shape_low**-0.5, traffic.shape_high**-0.5
    concentration = rng.uniform(min(low, high), max(low, high), (shape[0], 1)) ** -2
    return rng.gamma(np.broadcast_to(concentration, shape)) / concentration


def _lognormal(
    traffic: Traffic, rng: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.float64]:
    return rng.lognormal(0.0, 0.8, shape)


def _zipf(
    traffic: Traffic, rng: np.random.Generator, shape: tuple[int, int]
) -> NDArray[np.float64]:
    ranks = rng.permuted(np.tile(np.arange(1.0, shape[1] + 1), (shape[0], 1)), axis=1)
    weight: NDArray[np.float64] = 1.0 / ranks
    return weight


PROFILES: dict[
    str, Callable[[Traffic, np.random.Generator, tuple[int, int]], NDArray[np.float64]]
] = {"gamma": _gamma, "lognormal": _lognormal, "zipf": _zipf}


def mixes(
    traffic: Traffic, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float64], float]]:
    """Shares of the domains [D] and the rate of tokens, window by window."""
    size = traffic.domains
    walk = rng.normal(0.0, 1.0, size)
    hour = rng.uniform(0.0, 1.0, size)  # hour of the day at which a domain is busiest
    step = min(1.0, traffic.drift * (traffic.window_s / DRIFT_S) ** 0.5)
    stays = (1.0 - step**2) ** 0.5  # so that the walk keeps its spread over any number of days
    often = traffic.window_s / (traffic.shift_hours * 3600.0) if traffic.shift_hours else 0.0
    for window in range(traffic.windows):
        draws = rng.normal(0.0, 1.0, size)
        is_shift = rng.random() < often
        fresh = rng.normal(0.0, 1.0, size)
        if window:
            walk = fresh if is_shift else stays * walk + step * draws
        time = window * traffic.window_s / DAY_S
        swing = traffic.diurnal * np.cos(tau * (time - hour))
        weight = np.exp(walk + 2.0 * swing)
        yield weight / weight.sum(), float(1.0 + traffic.diurnal * np.cos(tau * (time - 0.6)))


def drawn(
    profile: NDArray[np.float64], count: int, dispersion: float, rng: np.random.Generator
) -> Tokens:
    """[L, E] counts of ``count`` routed tokens, with ``dispersion`` times multinomial variance.

    A Dirichlet around the profile, then a multinomial draw: with strength a the variance is
    1 + (n - 1) / (a + 1) times that of n independent tokens.
    """
    if dispersion > 1:
        strength = max((count - 1) / (dispersion - 1) - 1, 1e-3)
        profile = rng.gamma(profile * strength) + 1e-12
        profile /= profile.sum(axis=1, keepdims=True)
    tokens: Tokens = rng.multinomial(count, profile)
    return tokens


PREFIX = "generated:"


def windows_named(text: str, seed: int, model: ModelShape | None = None) -> WindowSeries:
    """A source of generated windows: ``generated:NAME`` or ``generated:NAME:key=value,...``.

    Args:
        model: gives layers, experts and top-k where the text does not.

    Raises:
        ConfigError: an unknown name or key, or a value that is not a number or out of range.
    """
    name, _, settings = text.removeprefix(PREFIX).partition(":")
    if name not in TRAFFIC:
        known = ", ".join(sorted(TRAFFIC))
        raise ConfigError(f"unknown workload {name!r}, expected one of: {known}")
    shape = {}
    if model is not None:
        shape = {"layers": model.num_layers, "experts": model.num_experts, "top_k": model.top_k}
    chosen = TRAFFIC[name] | shape | _read(settings)
    return traffic_windows(Traffic(**chosen), seed)  # type: ignore[arg-type]


def _read(settings: str) -> dict[str, int | float]:
    """Numbers of ``key=value,...``, by the types of the fields' defaults."""
    kinds = {
        field.name: float if "." in str(field.default) else int
        for field in fields(Traffic)
        if isinstance(field.default, int | float)
    }
    chosen: dict[str, int | float] = {}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in kinds:
            known = ", ".join(f"{one}={getattr(Traffic, one)}" for one in kinds)
            raise ConfigError(f"unknown workload setting {key!r}, expected one of: {known}")
        try:
            chosen[key] = kinds[key](value)
        except ValueError as exc:
            raise ConfigError(
                f"workload: {key} is {value!r}, expected a number ({kinds[key].__name__})"
            ) from exc
    return chosen


def generate(text: str, seed: int) -> LoadHistory:
    """Draw the windows that a text names; the same seed draws the same ones."""
    return LoadHistory(np.stack(list(windows_named(text, seed))))
