"""The outage clock: when tokens came last, over all runs, and the outages that ended.

Every view and metric counts from here. An outage lasts from the last token before it to the first
token after it, by the times of the samples that counted them:

    restart   the ranks were started again in between, however soon
    regroup   ranks died, and the others went on as another group
    stall     no step was completed for longer than the verdict allows, without a restart

A sample is dated when its last step is over. Its first token came earlier, by as long as its other
steps take: at 20 steps a second, a sample of 16 steps would end an outage 0.8 s late.

A deployment that gets no requests completes no step either, and looks the same.
"""

from __future__ import annotations

from collections import deque

from api.monitor.state import Death
from eplb.core.load import LoadSample
from eplb.migration.recovery import Recovery
from telemetry.state.events import OF_RANKS, STOPPED, Event, Failure, OfHost, Outage, Restart
from telemetry.state.runs import RunBegan

KEPT_DEATHS = 1000
DIED = "a rank died"
RESTARTED = "the ranks were started again"
REGROUPED = "the ranks went on as another group"
STALLED = "no step was completed"


class OutageLog:
    """Follows the samples and events of one deployment. Its owner serialises calls."""

    def __init__(self) -> None:
        self.token_time: float | None = None  # newest token of any run, by the store's clock
        self.death: Death | None = None  # the latest
        self.found: list[Outage] = []  # outages that the store does not have, the oldest first
        self._recorded: list[Outage] = []
        self._deaths: deque[Death] = deque(maxlen=KEPT_DEATHS)
        self._begun = 0.0  # the latest run
        self._is_explained = False  # its death, by its survivors
        self._is_restart = False  # another run began since the last token
        self._is_start = True  # with a start of all ranks
        self._newest: dict[int, LoadSample] = {}  # newest sample of each rank of this run
        self._step_s = 0.0  # duration of a step by the latest samples that tell it; 0: unknown

    def begin_run(self, *, is_start: bool = True) -> None:
        """Note that the ranks were started again; else they go on as another group."""
        self._newest.clear()
        self._is_restart = self.token_time is not None
        self._is_start = is_start

    def note_event(self, event: Event) -> None:
        """Note a death, or an outage that some service has recorded."""
        match event.fact:
            case Restart() as restart:
                lost = ", ".join(map(str, restart.lost)) or "none"
                text = f"ranks lost: {lost}; all ranks start again: {restart.reason}"
                while self._deaths and self._deaths[-1].time >= self._begun:
                    self._deaths.pop()  # the same, without the reason
                self._note_death(event.time, text)
                self._is_explained = True
            case Recovery(reason=why) if not self._is_explained:
                self._note_death(event.time, why or DIED)
            case Failure() as failure if failure.where == OF_RANKS and not failure.others_serve:
                if not self._is_explained:
                    self._note_death(event.time, failure.message or DIED)
            case OfHost() as stopped if event.kind == STOPPED:
                self._note_death(event.time, stopped.message, is_planned=True)
            case RunBegan():
                self._begun, self._is_explained = event.time, False
            case Outage() as known:
                self._recorded.append(known)
                self.found = [one for one in self.found if not one.overlaps(known)]

    def note_sample(self, sample: LoadSample, limit_s: float) -> None:
        """Note a sample; one that ends an outage is its end.

        Args:
            limit_s: without a step for so long, a deployment is stopped.
        """
        before = self._newest.get(sample.rank)
        if before is None or sample.sequence > before.sequence:
            self._newest[sample.rank] = sample
        if not sample.tokens.any():
            return
        num_steps = sample.last_step - sample.first_step + 1
        first_token = sample.time - (num_steps - 1) * self._step_s
        if self._is_restart and self.token_time is not None:
            # A planned change of the ranks is one step longer than others.
            has_died = self.death is not None and self.death.time >= self.token_time
            if self._is_start or has_died or first_token - self.token_time > limit_s:
                why = RESTARTED if self._is_start else REGROUPED
                self._note(self.token_time, first_token, why)
        # Samples that were lost leave a gap in the sequences, and prove nothing.
        elif before is not None and sample.sequence == before.sequence + 1:
            if sample.time - before.time > limit_s:
                self._note(before.time, first_token, STALLED)
            else:
                self._step_s = max(0.0, sample.time - before.time) / num_steps
        self._is_restart = False
        self.token_time = max(sample.time, self.token_time or sample.time)

    def clamp(self, now: float) -> None:
        """Take no token for a later one than now, after the store's clock was set back."""
        if self.token_time is not None:
            self.token_time = min(self.token_time, now)

    def _note_death(self, time: float, text: str, *, is_planned: bool = False) -> None:
        self.death = Death(time, text, is_planned)
        self._deaths.append(self.death)

    def _note(self, start: float, end: float, reason: str) -> None:
        if end <= start:
            return
        deaths = [one.text for one in self._deaths if start <= one.time <= end]
        found = Outage(start, end, round(end - start, 3), deaths[0] if deaths else reason)
        if not any(found.overlaps(one) for one in (*self._recorded, *self.found)):
            self.found.append(found)
