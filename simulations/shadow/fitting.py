"""Whether a window is of the model and the group of the first one, and why not."""

from __future__ import annotations

from dataclasses import dataclass

from eplb.errors import EplbError
from simulations.course import Terms, as_served
from simulations.shadow.windows import Observed


@dataclass(frozen=True, eq=False)
class Fit:
    """What windows after the first must be."""

    first: Observed
    terms: Terms  # of the engine
    needs_map: bool

    def refusal(self, window: Observed) -> tuple[str, str] | None:
        """The kind of what is wrong and a sentence; None: the window can be used."""
        shape, expected = window.tokens.shape, self.first.tokens.shape
        ids, expected_ids = window.layers.ids, self.first.layers.ids
        if (shape, ids) != (expected, expected_ids):
            return (
                "another model",
                f"{shape[0]} layers ({ids[0]}..{ids[-1]}) x {shape[1]} experts, expected "
                f"{expected[0]} ({expected_ids[0]}..{expected_ids[-1]}) x {expected[1]} as in the "
                "first window",
            )
        if window.held is None:
            if self.needs_map:
                return "a window without a map", "the map is not known, the first window has one"
            return None
        found, slots = window.held.num_slots, self.terms.topology.num_slots
        if found != slots:
            return "a map of another width", f"the map has {found} slots, expected {slots}"
        try:
            as_served(window.held, self.terms)
        except EplbError as exc:
            return "a map that the rule cannot serve", str(exc)
        return None
