"""Which dispatchers there are, and the choice of one: the first that passes its self-test.

A new dispatcher is a name in ``DISPATCHERS`` and a maker in ``_makers``. The order of the names is
that in which ``auto`` tries them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from eplb.errors import ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import AllToAllDispatcher, Dispatcher
from runtime.dispatch.selftest import Trial, check_dispatcher
from runtime.group.agreement import first_refusal

DISPATCHERS = ("deepep_low_latency", "deepep_normal", "deepep_by_phase", "all_to_all")


def choose_dispatcher(
    name: str, trial: Trial, counter: SlotCounter, group: dist.ProcessGroup, *, max_tokens: int
) -> tuple[Dispatcher, str]:
    """Make the dispatcher of that name, or with "auto" the first that passes on every rank.

    Returns:
        The dispatcher, and one sentence with the reason of the choice.

    Raises:
        ConfigError: an unknown name, or the named dispatcher fails its proof.
    """
    if name != "auto" and name not in DISPATCHERS:
        raise ConfigError(
            f"unknown dispatcher {name!r}, expected auto or one of: {', '.join(DISPATCHERS)}"
        )
    refusals: list[str] = []
    for candidate in DISPATCHERS if name == "auto" else (name,):
        made: Dispatcher | None = None
        try:
            made = _makers(trial, counter, group, max_tokens)[candidate]()
            wrong = check_dispatcher(made, counter, trial, group)
        except ConfigError as exc:
            wrong = str(exc)
        wrong = first_refusal(wrong, group)
        if not wrong and made is not None:
            passed = f"{candidate} gives right results on {group.size()} ranks"
            return made, "; ".join([passed, *refusals])
        refusals.append(f"{candidate} refused: {wrong}")
    raise ConfigError("; ".join(refusals))


def _makers(
    trial: Trial, counter: SlotCounter, group: dist.ProcessGroup, max_tokens: int
) -> dict[str, Callable[[], Dispatcher]]:
    # Imported here: the module is about a library that need not be installed.
    from runtime.dispatch.deepep import DeepEPByPhase, DeepEPLowLatency, DeepEPNormal, DeepEPShape

    shape = DeepEPShape(trial.topology, trial.hidden, trial.top_k, max_tokens)
    return {
        "deepep_low_latency": lambda: DeepEPLowLatency(shape, group, counter),
        "deepep_normal": lambda: DeepEPNormal(shape, group, counter),
        "deepep_by_phase": lambda: DeepEPByPhase(shape, group, counter),
        "all_to_all": lambda: AllToAllDispatcher(trial.topology, group, group.rank(), counter),
    }
