"""Profiles of domains learnt from windows of mixed traffic, and the mix that a window shows.

A window's profile is taken as a mix of a few domains', with weights that are never negative; the
same weights hold in every layer, because the same tokens pass all of them. Both are fitted by
maximum likelihood: each round deals every token to the domains in proportion to what they explain
of it, and counts again (expectation maximisation, so no round makes the fit worse).

Shapes:  T windows, L MoE layers, E experts, D domains.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from eplb.core.load import LoadHistory
from eplb.errors import ConfigError
from telemetry.drift.detector import shares_of

ROUNDS = 100
TINY = 1e-12  # a share that is zero could never grow again

Profiles = NDArray[np.float64]  # [D, L, E], each layer sums to 1


def learn_domains(history: LoadHistory, num_domains: int, *, seed: int) -> Profiles:
    """[D, L, E] profiles whose mixes explain the windows best.

    Args:
        history: the more the mix of traffic varies over it, the better they are separated.
        num_domains: D, at most as many as windows.
        seed: of the first guess; the same one learns the same profiles.

    Raises:
        ConfigError: no domain, or more of them than windows.
    """
    if not 1 <= num_domains <= history.num_windows:
        raise ConfigError(
            f"{num_domains} domains from {history.num_windows} windows, expected 1 to that many"
        )
    _, num_layers, num_experts = history.tokens.shape
    flat = shares_of(history.tokens).reshape(history.num_windows, -1) / num_layers  # [T, L * E]
    rng = np.random.default_rng(seed)
    # Each domain begins as a few windows of its own: windows are mixes, so this is near already.
    begun = rng.dirichlet(np.full(history.num_windows, 0.3), num_domains)  # [D, T]
    profiles = begun @ flat + TINY
    weights = np.full((history.num_windows, num_domains), 1 / num_domains)
    for _ in range(ROUNDS):
        explained = flat / (weights @ profiles + TINY)
        dealt = profiles * (weights.T @ explained)
        weights = weights * (explained @ profiles.T)
        weights /= weights.sum(axis=1, keepdims=True)
        profiles = _per_layer(dealt, num_layers, num_experts) + TINY
    return shares_of(profiles.reshape(num_domains, num_layers, num_experts))


def mix_of(profiles: Profiles, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
    """[D] weights, none negative, sum 1, whose mix of profiles explains ``tokens`` [L, E] best."""
    num_domains, num_layers, _ = profiles.shape
    flat = shares_of(tokens).ravel() / num_layers
    known = profiles.reshape(num_domains, -1) / num_layers
    weights = np.full(num_domains, 1 / num_domains)
    for _ in range(ROUNDS):
        weights = weights * (known @ (flat / (weights @ known + TINY))) * num_layers
        weights /= weights.sum()
    return weights


def _per_layer(
    profiles: NDArray[np.float64], num_layers: int, num_experts: int
) -> NDArray[np.float64]:
    """Scale so that every layer of every domain holds the same."""
    apart = profiles.reshape(len(profiles), num_layers, num_experts)
    scaled: NDArray[np.float64] = shares_of(apart).reshape(profiles.shape) / num_layers
    return scaled
