"""The alternatives of a plan: move weights, change shares only, or keep; and the choice of one.

New shares need no bytes, so a MOVE must gain more than its cost beyond new shares on the serving
placement.

    proposed placement, with its best shares --+
    serving placement, with new shares --------+--> gate --> MOVE, RESPLIT or KEEP
    serving placement -------------------------+

The gain of a plan is estimated on windows that it was not fitted to. Two sources: the record of
earlier plans gives the part of promised gains that was realised. Cross-fitting gives it for this
plan: the windows that the serving placement was not fitted to are divided into runs of about as
many tokens; for each run
the search plans on the other windows, at the same price, and is judged on the run. Windows next to
a run share its requests: a gain on these ends with them, so they are not planned on. Both are
combined by their variances. A later judgement compares the realised gain with the estimate; the
decision uses less than the estimate, by a multiple of its deviation.

Shapes:  T windows, L MoE layers, S slots, R ranks, U unseen windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.clock import duration_text
from eplb.core.cost import CostModel, Decision, Objective
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import BoolArray, FloatArray
from eplb.core.placement import Placement, changed_slots, moves_per_layer
from eplb.core.problem import Problem
from eplb.decision.score import (
    as_dispatched,
    dead_zone,
    measured,
    noise_under,
    part_in_time,
    score_of,
)
from eplb.measure import imbalance
from eplb.policies.incremental import incremental
from eplb.search.legality import violations_of
from eplb.shares.resplitting import best_shares, share_floor
from eplb.shares.traffic import crossing, with_local_shares

ENOUGH = 4  # windows on which a plan is judged
FEWEST = 3  # blocks of windows for cross-fitting
FOLDS = 4  # runs into which unseen windows are divided
GAP = 2  # windows on either side of a run that the search does not see, where enough remain
PLANNED_AGAIN = 16  # layers, at most, for cross-fitting
PRIOR_DOUBT = 0.5  # standard deviation of the record's estimate, relative to it
CAUTION = 0.5  # standard deviations that are subtracted at first
LOOKS = 16  # windows of one load for one deviation more: repeated looks find gains by chance
MOST_CAUTION = 3.0  # standard deviations that are subtracted at most
ROUNDING = 1e-9  # smaller gains do not count
FEWEST_MOVED = 0.5  # part of the slots that a plan made afresh moves at least, about
SAMPLED = 16  # fewest layers from which the gain of shares alone is estimated


@dataclass(frozen=True, eq=False)
class Promise:
    """A plan that was published, until there are enough windows to judge it."""

    base: Placement
    target: Placement
    gain: float  # its score's, on the windows that it was fitted to
    objective: Objective = "tokens"


class Expected(NamedTuple):
    """Part of a promised gain that is expected on future windows."""

    part: float  # the estimate, 0 to 1
    sure: float  # less a multiple of its deviation: the part that a decision uses, 0 to 1
    is_judged: bool  # whether unseen windows are part of the estimate


def expected_part(problem: Problem, promised: FloatArray, changed: BoolArray) -> Expected:
    """Part of the promised gain that is expected, and the part that a decision uses.

    Args:
        problem: with a current placement, which can serve.
        promised: [L] gain of the score on the problem's windows.
        changed: [L] layers that the plan changes.
    """
    gain = float(promised.mean())
    unseen = problem.num_unseen
    if gain <= 0 or not unseen:
        return Expected(0.0, 0.0, False)
    part = problem.record.kept
    seen = _crossfitted(problem, changed) if problem.num_blocks >= FEWEST else np.zeros(0)
    if len(seen) < 2:
        # The record alone does not change with more windows, so repeated planning finds nothing by
        # chance, and a long-serving placement must not block every gain.
        return Expected(part, part - CAUTION * PRIOR_DOUBT * part, False)
    # With few runs their deviation is uncertain, so it is increased.
    spread = seen.std(ddof=1) / len(seen) ** 0.5 * (len(seen) + 1) / (len(seen) - 1)
    scale = float(changed.mean()) / gain
    evidence, error = float(seen.mean()) * scale, max(float(spread) * scale, 1e-9)
    doubt = PRIOR_DOUBT * part
    weight = doubt**2 / (error**2 + doubt**2)
    part, doubt = part + weight * (evidence - part), doubt * (1 - weight) ** 0.5
    # A load that has not changed for long is looked at as often, whatever moved meanwhile.
    looks = max(problem.unseen or 0, int(problem.complete.sum()))
    sure = part - min(CAUTION + looks / LOOKS, MOST_CAUTION) * doubt
    return Expected(min(max(part, 0.0), 1.0), min(max(sure, 0.0), 1.0), True)


def _crossfitted(problem: Problem, changed: BoolArray) -> FloatArray:
    """Gain on each run of unseen windows by plans without that run, mean over changed layers."""
    current = problem.current
    assert current is not None, "there is a placement to compare with"
    kept = np.flatnonzero(problem.complete)
    layers = np.flatnonzero(changed)
    layers = layers[np.linspace(0, len(layers) - 1, min(PLANNED_AGAIN, len(layers))).astype(int)]
    serving = current.of_layers(layers)
    unseen = np.arange(len(kept))[-problem.num_unseen :]
    starts = problem.blocks_of(unseen)
    firsts = [run[0] for run in np.array_split(starts, min(FOLDS, len(starts)))]
    weight = problem.window_weight * len(kept)
    gains = []
    for run in np.split(unseen, firsts[1:]):
        near = np.arange(max(run[0] - GAP, 0), min(run[-1] + GAP + 1, len(kept)))
        hidden = near if weight[near].sum() <= len(kept) // 2 + 1 + ROUNDING else run
        others = problem.history.of_windows(np.delete(kept, hidden))
        part = replace(problem, history=others, scenarios=None).of_layers(layers)
        held, _ = incremental(part)
        tested = replace(
            problem,
            history=problem.history.of_windows(kept[run]),
            scenarios=None,
            dispatch=DispatchRule.WEIGHTED,
        ).of_layers(layers)
        promise = Promise(
            serving, Placement(held.astype(np.int32), problem.num_experts), 0.0, problem.objective
        )
        gains.append(realised(tested, promise))
    return np.array(gains)


def realised(problem: Problem, promise: Promise) -> float:
    """Reduction of the promise's score on the problem's windows against the placement before."""
    pair = (promise.base, promise.target)
    before, after = (measured(problem, one, promise.objective).mean() for one in pair)
    return float(before - after)


class Option(NamedTuple):
    """A placement and the score of each layer."""

    placement: Placement
    score: FloatArray  # [L] as ``score_of`` gives it

    def with_layers(self, other: Option, chosen: BoolArray) -> Option:
        """This option with the chosen layers [L] of another one."""
        placement = self.placement.with_layers(other.placement, np.flatnonzero(chosen).tolist())
        return Option(placement, np.where(chosen, other.score, self.score))

    def of_layers(self, layers: NDArray[np.intp]) -> Option:
        """Some layers of this option."""
        return Option(self.placement.of_layers(layers), self.score[layers])

    def with_part(self, part: Option, layers: NDArray[np.intp]) -> Option:
        """This option with the layers of ``part`` in the places ``layers``."""
        place, chosen = np.zeros(len(self.score), dtype=np.intp), np.zeros(len(self.score), bool)
        place[layers], chosen[layers] = np.arange(len(layers)), True
        return self.with_layers(part.of_layers(place), chosen)


def option_of(problem: Problem, placement: Placement) -> Option:
    """A placement with its score."""
    return Option(placement, score_of(problem, placement))


class Choice(NamedTuple):
    """The decision, its reason, and the placement."""

    decision: Decision
    reason: str
    option: Option
    expected: float = 0.0  # reduction of imbalance on future windows


@dataclass(frozen=True)
class Outlook:
    """Figures of a plan that the gate decides on."""

    before: float  # mean imbalance over layers, on the history
    after: float  # the same under the planned placement
    noise: float  # imbalance above 1 of one window by chance
    num_moves: int
    cost_s: float  # serving time that its moves take
    sure: float = 1.0  # part of the gain that the decision uses, by ``expected_part``
    in_time: float = 1.0  # part of the gain that saves time at this batch size, by the curve
    dead_zone: float = 1.0  # imbalance whose removal saves less than a rebalance costs
    of: str = "imbalance"  # name of the figures


def decide(outlook: Outlook, cost: CostModel) -> tuple[Decision, str]:
    """MOVE, RESPLIT (for an outlook without moves) or KEEP, and the reason as text.

    The gain counts down to the noise floor only, because noise below it does not repeat.
    """
    floor = 1.0 + outlook.noise
    change = f"{outlook.of} {outlook.before:.3f} -> {outlook.after:.3f}"
    if outlook.before <= floor:
        worse = " and the plan is worse" if outlook.after > outlook.before else ""
        noise = f"is within the sampling noise of a window ({floor:.3f})"
        return Decision.KEEP, f"{change}: {outlook.before:.3f} {noise}{worse}"
    if outlook.num_moves == 0 and outlook.before <= outlook.after:
        return Decision.KEEP, f"the plan is the current placement, {change}"
    if outlook.before <= outlook.dead_zone:
        return (
            Decision.KEEP,
            f"{change}, within the dead zone of this batch ({outlook.dead_zone:.3f})",
        )
    reachable = max(outlook.after, floor)
    gain = (outlook.before - reachable) * outlook.sure * outlook.in_time
    lost = cost.seconds_per_rebalance + outlook.cost_s
    saved = cost.saved_seconds(gain)
    if outlook.after < floor:
        change += f" (gain counted to the sampling noise, {floor:.3f})"
    if outlook.sure != 1.0:
        change += f", {outlook.sure:.0%} of the gain expected to last"
    if outlook.in_time != 1.0:
        change += f", {outlook.in_time:.0%} of it time at this batch"
    figures = f"{cost.saving_text(gain)}, costs {duration_text(lost)}"
    if not gain > 0 or lost > saved:
        return Decision.KEEP, f"{change}: {figures}"
    if outlook.num_moves == 0:
        return Decision.RESPLIT, f"{change}: {figures} by new shares alone"
    return Decision.MOVE, f"{change}: {figures}, for {outlook.num_moves} moves"


def with_shares(problem: Problem, option: Option) -> Option:
    """The same replicas with new shares in the layers that gain by them, and no others.

    A layer at or below the target imbalance of the budget is not changed, nor one that gains less
    than ``min_share_gain``: on recorded routing such changes made the next window worse as often as
    better.
    """
    placement, balance = option.placement, option.score
    if problem.cost.node_traffic:
        balance = balance - problem.cost.node_traffic * crossing(problem, placement)
    layers = np.flatnonzero(balance > problem.budget.target_imbalance)
    if len(layers) and problem.objective == "tokens":
        floor = share_floor(problem, placement, layers)
        layers = layers[floor < balance[layers] * (1.0 - problem.cost.min_share_gain)]
    if len(layers):
        new = placement.with_shares(best_shares(problem, placement, layers))
        if problem.cost.node_traffic:
            new = with_local_shares(problem, new)
        split = option_of(problem, new)
        gains = split.score < option.score * (1.0 - problem.cost.min_share_gain)
        if gains.any():
            option = option.with_layers(split, gains)
    if problem.cost.node_traffic:
        option = option_of(problem, with_local_shares(problem, option.placement))
    return option


def without_losses(
    problem: Problem, serving: Option, proposed: Option, forced: BoolArray
) -> Option:
    """``proposed``, except layers with unequal shares that it does not improve.

    The search assumes an equal split, so it does not see imbalance that unequal shares removed.

    Args:
        problem: the price of moves.
        serving: the serving placement.
        proposed: the placement to replace it.
        forced: [L] layers that cannot serve as they are.
    """
    old, new = serving.placement, proposed.placement
    moves = moves_per_layer(old, new)
    gain = serving.score - proposed.score
    even = Placement(old.slot_to_expert, old.num_experts).slot_share
    stays = (old.slot_share != even).any(axis=1)
    if old.source_share is not None:
        stays |= (old.source_share != even).any(axis=(0, 2))
    stays &= ~forced & (gain <= np.where(moves > 0, problem.price, 0.0) * moves)
    return proposed.with_layers(serving, stays) if stays.any() else proposed


def no_worse_than(problem: Problem, plain: Option, proposed: Option) -> Option:
    """A fresh plan, except that layers without gain are those of ``plain``; a tie is no gain.

    Replicas may even increase the score, beside a fast rank that could serve its experts alone.
    Layers in which ``plain`` violates constraints are always those of the fresh plan.
    """
    worse = proposed.score >= plain.score - ROUNDING
    if problem.groups_stay or not worse.any():
        return proposed
    worse[list(violations_of(problem, plain.placement))] = False
    return proposed.with_layers(plain, worse)


def cost_of(problem: Problem, serving: Option, option: Option) -> FloatArray:
    """[L] imbalance of each layer by its part of the step, and the price of its moves in the same.

    Imbalance up to the budget's target, or to the noise of the windows, counts as none. Of a fresh
    plan all imbalance counts, and no move.
    """
    if problem.current is None:
        return np.asarray(option.score * problem.layer_weight)
    moves = moves_per_layer(serving.placement, option.placement)
    price: FloatArray = np.zeros(len(moves))
    np.multiply(problem.move_price, moves, out=price, where=moves > 0)  # it may be infinite
    return np.asarray(np.maximum(option.score, _floor(problem)) * problem.layer_weight + price)


def may_cost_less(problem: Problem, serving: Option, option: Option) -> FloatArray:
    """[L] by how much a plan at the floor of imbalance that moves few slots would cost less."""
    if problem.current is None:
        return option.score
    moves = problem.topology.num_slots * FEWEST_MOVED
    least = _floor(problem) * problem.layer_weight + problem.move_price * moves
    return np.asarray(cost_of(problem, serving, option) - least)


def _floor(problem: Problem) -> FloatArray:
    return np.asarray(np.maximum(problem.budget.target_imbalance, 1.0 + problem.noise))


def choose(
    problem: Problem, serving: Option, proposed: Option, why_not: str | None, splits: bool
) -> Choice:
    """Choose MOVE, RESPLIT or KEEP.

    Args:
        problem: cost and pay-back time of moves.
        serving: the serving placement; contiguous when there is none.
        proposed: the placement of the policy.
        why_not: why the serving placement cannot serve; None if it can.
        splits: whether RESPLIT is allowed.
    """
    moved = moves_per_layer(serving.placement, proposed.placement)
    if problem.current is None and moved.any():
        change = f"{_score_name(problem)} {serving.score.mean():.3f} -> {proposed.score.mean():.3f}"
        reason = f"no current placement: {change}"
        return Choice(Decision.MOVE, reason, proposed, _gain(serving, proposed))
    if why_not is not None:
        reason = f"the current placement cannot serve: {why_not}"
        return Choice(Decision.MOVE, reason, proposed, _gain(serving, proposed))
    outlook, part = _outlook(problem, serving, proposed), 1.0
    # A gain that was judged on unseen windows needs no deduction for noise; others do.
    judged, moves = outlook, splits and outlook.num_moves > 0
    if moves and decide(replace(outlook, noise=0.0), problem.priced)[0] is Decision.MOVE:
        promised = (serving.score - proposed.score) * problem.layer_weight
        found = expected_part(problem, promised, moved > 0)
        part, outlook = found.part, replace(outlook, sure=found.sure)
        judged = replace(outlook, noise=0.0) if found.is_judged else outlook
    decision, reason = decide(judged, problem.priced)
    gain = 0.0 if decision is Decision.KEEP else _gain(serving, proposed) * part
    move = Choice(decision, reason, proposed, gain)
    is_noise = outlook.before <= 1.0 + outlook.noise  # new shares would fit noise too
    if not splits or decision is Decision.RESPLIT or is_noise:
        return move
    if decision is Decision.MOVE and _moving_pays_anyway(problem, serving, proposed, outlook):
        return move
    alone = with_shares(problem, serving)
    return _first_shares(problem, move, alone, outlook)


def ordered(problem: Problem, serving: Option, wanted: Option, why: str) -> Choice:
    """MOVE or RESPLIT to a placement that was chosen elsewhere; the gate decides nothing.

    Args:
        problem: cost and pay-back time of moves, for the figures of the reason.
        serving: the serving placement.
        wanted: the chosen placement.
        why: the first words of the reason.
    """
    old, new = serving.placement, wanted.placement
    if np.array_equal(old.slot_to_expert, new.slot_to_expert) and np.allclose(
        old.slot_share, new.slot_share
    ):
        return Choice(Decision.KEEP, f"{why}: it is the current placement", serving)
    outlook = _outlook(problem, serving, wanted)
    judged, figures = decide(outlook, problem.priced)
    decision = Decision.MOVE if outlook.num_moves else Decision.RESPLIT
    if not np.isfinite(outlook.before):  # a time without end is no figure
        judged, figures = decision, "some experts have no live slot in the current placement"
    note = "" if judged is decision else f", by itself a {judged.value}"
    return Choice(decision, f"{why}: {figures}{note}", wanted, _gain(serving, wanted))


def _first_shares(problem: Problem, move: Choice, alone: Option, outlook: Outlook) -> Choice:
    """RESPLIT where new shares pay and moves in addition do not; else ``move``."""
    after = _mean(problem, alone.score)
    shares = replace(outlook, after=after, num_moves=0, cost_s=0.0, sure=1.0)
    decision, reason = decide(shares, problem.priced)
    if decision is not Decision.RESPLIT:
        return move
    onward, why = decide(replace(outlook, before=after), problem.priced)
    if onward is Decision.MOVE:
        return move
    if outlook.num_moves:
        reason += f"; {outlook.num_moves} moves more do not pay: {why}"
    return Choice(decision, reason, alone, outlook.before - after)


def _gain(old: Option, new: Option) -> float:
    return float(old.score.mean() - new.score.mean())


def _moving_pays_anyway(
    problem: Problem, serving: Option, proposed: Option, outlook: Outlook
) -> bool:
    """Whether moves pay in addition to shares alone, estimated on a sample of layers.

    Computing shares for all layers takes as long as the search, and they rarely gain as much.
    """
    num_layers = len(serving.score)
    if num_layers <= SAMPLED or problem.objective != "tokens" or problem.cost.node_traffic:
        return False
    sample = np.arange(0, num_layers, num_layers // SAMPLED)
    old, after = serving.placement, float(proposed.score[sample].mean())

    def pays(alone: FloatArray) -> bool:
        before = float(np.minimum(alone, serving.score[sample]).mean())
        onward, _ = decide(replace(outlook, before=before, after=after), problem.priced)
        return onward is Decision.MOVE

    # What pays beyond the bound for any shares pays beyond the best ones, which take much longer.
    if pays(share_floor(problem, old, sample)):
        return True
    share = best_shares(problem, old, sample)[sample]
    alone = Placement(old.slot_to_expert[sample], old.num_experts, old.generation, share)
    windows = imbalance(problem.work[:, sample], alone, problem.topology)
    return pays(problem.mean_over_windows(windows))


def _outlook(problem: Problem, serving: Option, proposed: Option) -> Outlook:
    # By the base, which was not planned on these windows; the proposed placement fits their noise.
    noise = float(noise_under(problem, as_dispatched(problem, serving.placement)).mean())
    if problem.cost.node_traffic:  # added, because it is no part of the imbalance
        crosses = crossing(problem, proposed.placement).mean()
        noise += problem.cost.node_traffic * float(crosses)
    old, new, topology = serving.placement, proposed.placement, problem.topology
    per_slot = changed_slots(old, new).sum(axis=0)
    received = np.bincount(topology.rank_of_slot, per_slot, topology.num_ranks)  # by each rank
    has_zone = problem.cost.dead_zone and problem.objective == "tokens"
    return Outlook(
        _mean(problem, serving.score),
        _mean(problem, proposed.score),
        noise,
        int(received.sum()),
        int(received.max()) * problem.cost.move_seconds(problem.expert_bytes),
        in_time=part_in_time(problem, old, new) if has_zone else 1.0,
        dead_zone=dead_zone(problem) if has_zone else 1.0,
        of=_score_name(problem),
    )


def _mean(problem: Problem, score: FloatArray) -> float:
    """Mean over layers, weighted by their part of the step."""
    return float((score * problem.layer_weight).mean())


def _score_name(problem: Problem) -> str:
    what = "imbalance" if problem.objective == "tokens" else "time"
    return f"{what} and traffic" if problem.cost.node_traffic else what
