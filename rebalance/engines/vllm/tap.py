"""Loads from ``EplbState.step``: summed on the device, handed over without waiting for it.

vLLM counts at the sender: each rank has the tokens that it sent to every physical expert of all
ranks. A sample therefore lists each expert once, with this rank's tokens, and the sum over ranks is
the load. Folding to experts in each step makes a sample independent of swaps of single layers.

Shapes:  L MoE layers, E experts, P physical experts.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from eplb.core.load import Phase
from rebalance.engines.common.tap import Counted, on_host
from rebalance.engines.vllm.assumptions import RUNNERS

log = logging.getLogger(__name__)


class LoadTap:
    """Sums the passes of one model on one rank; used by the step alone.

    Args:
        sample_steps: passes of a sample. One that changes phase ends sooner.
    """

    def __init__(
        self, num_layers: int, num_experts: int, device: torch.device, sample_steps: int
    ) -> None:
        self._sum = torch.zeros((num_layers, num_experts), dtype=torch.int64, device=device)
        self._sample_steps = sample_steps
        self._first, self._step, self._phase = 0, 0, ""
        self._has_passes = False

    def add(
        self, load: torch.Tensor, held: torch.Tensor, phase: Phase | None, generation: int
    ) -> list[Counted]:
        """Count a pass, and return the samples that it completes.

        Args:
            load: [L, P] tokens that this rank sent to each physical expert.
            held: [L, P] experts of the physical experts during the pass.
            phase: of the pass; None: a dummy pass, of which nothing is counted.
            generation: of the map during the pass.
        """
        done = []
        if phase is not None and self._has_passes and phase != self._phase:
            done.append(self._take(self._step - 1, generation))
        if phase is not None:
            self._sum.scatter_add_(1, held.long(), load.long())
            self._phase, self._has_passes = phase, True
        self._step += 1
        if self._step % self._sample_steps == 0:
            done.append(self._take(self._step - 1, generation))
        return done

    def _take(self, last: int, generation: int) -> Counted:
        tokens, copied = on_host(self._sum)
        self._sum.zero_()
        phase: Any = self._phase or "mixed"
        taken = Counted(tokens, copied, None, self._first, last, phase, generation, time.time())
        self._first, self._has_passes = last + 1, False
        return taken


def phase_of(num_scheduled_tokens: Any, num_speculative: int) -> Phase:
    """The phase of a pass, from the tokens that vLLM's scheduler gave to each request in it.

    A request that decodes has one token and those that were speculated. A pass with requests of
    both kinds, as chunked prefill makes them, is mixed; a last chunk that small counts as decode.
    """
    is_decode = [tokens <= 1 + num_speculative for tokens in num_scheduled_tokens.values()]
    if not is_decode or all(is_decode):
        return "decode"
    return "mixed" if any(is_decode) else "prefill"


def watch_phases(note: Callable[[Phase], None]) -> None:
    """Note the phase of each pass from the scheduler's output, in whichever runner is loaded."""
    for name in RUNNERS:
        runner = getattr(sys.modules.get(name), "GPUModelRunner", None)
        if runner is not None:
            note_phases(runner, note)


def note_phases(runner: Any, note: Callable[[Phase], None]) -> None:
    """Wrap ``execute_model`` of a model runner, which gets the scheduler's output of each pass."""
    own = runner.execute_model
    if getattr(own, "notes_phases", False):
        return
    if list(inspect.signature(own).parameters)[1:2] != ["scheduler_output"]:
        log.warning("phases are not known: execute_model of %s has no scheduler_output", runner)
        return

    @functools.wraps(own)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            speculative = int(
                getattr(self, "num_spec_tokens", 0) or getattr(self, "num_speculative_steps", 0)
            )
            note(phase_of(scheduler_output.num_scheduled_tokens, speculative))
        except Exception:
            note("mixed")
        return own(self, scheduler_output, *args, **kwargs)

    execute_model.notes_phases = True  # type: ignore[attr-defined]
    runner.execute_model = execute_model
