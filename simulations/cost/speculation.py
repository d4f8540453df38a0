"""Multi-token prediction, or any drafting: what it does to the batch, the step and the tokens.

A step verifies one token of each sequence and its drafts, so experts get that many rows more. A
draft counts if it and all before it are accepted. Drafts come one after another, each from a layer
of its own that is taken to last as long as a mean layer of the verifying pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from eplb.errors import ConfigError


@dataclass(frozen=True)
class Speculation:
    """Drafts of a sequence in each step.

    Args:
        drafts: tokens; 0: none.
        acceptance: chance that a draft is right, if all before it are.

    Raises:
        ConfigError: fewer than no drafts, or a chance that is none.
    """

    drafts: int = 0
    acceptance: float = 0.8

    def __post_init__(self) -> None:
        if self.drafts < 0 or not 0 <= self.acceptance <= 1:
            raise ConfigError(
                f"{self.drafts} drafts at an acceptance of {self.acceptance}, expected 0 or more, "
                "and 0 to 1"
            )

    @property
    def verified(self) -> int:
        """Tokens of a sequence that a step routes."""
        return 1 + self.drafts

    @property
    def given(self) -> float:
        """Tokens of a sequence that a step gives, in the mean."""
        return sum(self.acceptance**draft for draft in range(self.verified))

    def step_us(self, verifying_us: float, num_layers: int) -> float:
        """Of a step, its drafts included."""
        return verifying_us * (1 + self.drafts / num_layers)
