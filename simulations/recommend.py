"""Which group, how much redundancy, how often to plan: candidates compared on the same load.

A redundant slot balances better and takes memory from the KV cache, so fewer sequences run at once;
a larger group leaves each rank fewer slots and more memory, and is harder to balance. With
attention ranks of their own, the expert ranks hold experts alone, and every token crosses the
network. Each candidate is replayed with the live planner at the batch that its memory allows, or at
the largest one within a limit of latency:

    memory -> sequences of a rank -> rows of slots -> time of a step -> tokens a second, less moves

The best candidate is replayed once more at smaller batches, with and without balancing, beside the
time that no placement can be below.

Times of experts have an error that was measured (``eplb.core.kernels``). A gain is reported only
where it is above the part of it that experts have in a step; otherwise the answer is that it cannot
tell, and what to measure.

No queue and no scheduler is modelled: the batch is always full. A step of decode gives one token of
each sequence, and drafts that are accepted. A step of prefill takes a number of tokens of each
rank, whatever prompts they are of; a prompt needs as many steps as its tokens fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, product
from math import ceil
from typing import Any

import numpy as np

from eplb.clock import figure_text
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.jit import FloatArray
from eplb.core.kernels import Kernel
from eplb.core.model import ModelShape
from eplb.core.placement import Placement
from eplb.errors import ConfigError
from simulations.inputs import even_topology
from simulations.migration_cost import MigrationCost
from simulations.replay import Replay, Scenario, labelled, replay_all
from simulations.report import TextTable
from simulations.schemes import PlanTerms
from simulations.step_time import Hardware, StepModel
from simulations.verdict import Judge, Verdict
from simulations.windows import WindowSeries


@dataclass(frozen=True)
class MemoryModel:
    """What a rank holds beside routed experts; a slot takes one expert of every MoE layer.

    Raises:
        ConfigError: a part that is none, or bytes below 0.
    """

    hardware: Hardware
    model: ModelShape
    usable: float  # part of the memory that weights and KV cache may fill
    dense_bytes: float  # attention, shared experts, embeddings, buffers, on each rank
    kv_token_bytes: float  # bytes of all layers

    def __post_init__(self) -> None:
        if not 0 < self.usable <= 1:
            raise ConfigError(f"usable is {self.usable}, expected above 0 and at most 1")
        if not (self.dense_bytes >= 0 and self.kv_token_bytes > 0):
            raise ConfigError(
                f"dense_bytes is {self.dense_bytes} and kv_token_bytes {self.kv_token_bytes}, "
                "expected 0 or more, and above 0"
            )

    def expert_bytes(self, slots_per_rank: float) -> float:
        """Weights of a rank's slots."""
        return slots_per_rank * self.model.num_layers * self.model.expert_bytes

    def kv_bytes(self, slots_per_rank: float) -> float:
        """What is left for the KV cache; 0 or less: the weights do not fit."""
        whole = self.hardware.memory_bytes * self.usable
        return whole - self.dense_bytes - self.expert_bytes(slots_per_rank)

    def sequences(self, slots_per_rank: float, context: int) -> int:
        """How many sequences of ``context`` tokens a rank can hold."""
        left = self.kv_bytes(slots_per_rank)
        return max(0, int(left / (self.kv_token_bytes * context)))


@dataclass(frozen=True)
class Speculation:
    """Drafts of a sequence in each step, by multi-token prediction or any other way.

    A step verifies one token of each sequence and its drafts, so experts get that many rows more. A
    draft counts if it and all before it are accepted. Drafts come one after another, each from a
    layer of its own that is taken to last as long as a mean layer of the verifying pass.

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

    def step_us(self, verifying_us: FloatArray, num_layers: int) -> FloatArray:
        """Of steps, their drafts included."""
        return verifying_us * (1 + self.drafts / num_layers)


NOTHING = "none"
LEAST_PREFILL = 256  # tokens of a rank in a step: the smallest batch of the answer's table
TOLD_APART = 5e-4  # of a gain, by links: less rounds to nothing
WORTH_IT = 0.01  # part of the tokens per second: less is called no gain


@dataclass(frozen=True)
class Question:
    """What is compared, and on what.

    Raises:
        ConfigError: nothing to compare.
    """

    windows: WindowSeries
    memory: MemoryModel
    kernel: Kernel
    ranks: Sequence[int] = (32,)  # sizes of groups
    ranks_per_node: int = 8
    redundant: Sequence[int] = (0, 1, 2, 4)  # slots of each rank beyond those that hold all once
    intervals: Sequence[int] = (1, 4, 16)  # windows from one plan to the next
    policies: Sequence[str] = ("auto",)
    context: int = 4096  # tokens of a sequence
    most_sequences: int = 256  # sequences of a rank; in prefill, tokens of a step
    is_prefill: bool = False
    other_us: float = 0.0  # time of a layer outside of its MoE part
    attention_share: float | None = None  # the same as a part of a step at even load; in its place
    pay_back_s: float = CostModel.pay_back_s
    window_s: float = 60.0
    seed: int = 0
    attention_ranks: Sequence[int] = (0,)  # ranks beside the group; 0: its ranks do both
    dispatch: DispatchRule = DispatchRule.WEIGHTED
    most_ms: float | None = None  # limit of ``latency``: each candidate's largest batch within it
    speculation: Speculation = field(default_factory=Speculation)

    def __post_init__(self) -> None:
        for name in ("ranks", "redundant", "intervals", "attention_ranks", "policies"):
            if not getattr(self, name):
                raise ConfigError(f"no {name} to compare, expected at least one")
        for name in ("context", "most_sequences", "ranks_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected 1 or more")
        for name in ("window_s", "most_ms"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}, expected above 0")
        if min(self.attention_ranks) < 0:
            raise ConfigError(
                f"attention_ranks are {list(self.attention_ranks)}, expected 0 or more"
            )
        if self.attention_share is not None and not 0 <= self.attention_share < 1:
            raise ConfigError(
                f"attention_share is {self.attention_share}, expected 0 or more and below 1"
            )
        if self.is_prefill and self.speculation.drafts:
            raise ConfigError(f"{self.speculation.drafts} drafts in prefill, expected none")
        if min(self.redundant) < 0 or min(self.intervals) < 1:
            raise ConfigError(
                f"redundant {list(self.redundant)} and intervals {list(self.intervals)}, "
                "expected 0 or more, and 1 or more"
            )

    @property
    def unit(self) -> str:
        """What a batch is counted in."""
        return "tokens" if self.is_prefill else "sequences"

    @property
    def most_replays(self) -> int:
        """Replays of the windows, if every candidate fits."""
        groups = len(self.ranks) * len(self.attention_ranks)
        # Nothing is planned in a replay of its own; then come the best one's intervals and batches.
        return groups * (len(self.redundant) + 1) + len(self.intervals)

    def is_within(self, one: Candidate) -> bool:
        """Whether a candidate keeps the limit of latency."""
        return self.most_ms is None or one.latency_ms <= self.most_ms

    def latency(self, step_us: float, batch: int) -> float:
        """Milliseconds of a token of a sequence; in prefill, until a prompt has its first one."""
        steps = ceil(self.context / batch) if self.is_prefill else 1 / self.speculation.given
        return step_us * steps / 1000

    def outside_us(self, step: StepModel, tokens: float) -> float:
        """Of a layer outside of its MoE part, in steps of so many tokens of all ranks."""
        if self.attention_share is None:
            return self.other_us
        experts = np.full((1, step.model.num_experts), 1 / step.model.num_experts)
        even_us = replace(step, other_us=0.0).bound(experts * tokens * step.model.top_k).us
        return even_us * self.attention_share / (1 - self.attention_share)


@dataclass(frozen=True)
class Candidate:
    """One way to deploy, and what it gives."""

    ranks: int
    slots_per_rank: int
    redundant: int  # slots of a rank
    interval: int  # windows; 0: nothing is planned
    sequences: int  # a batch of an attention rank, or its tokens in prefill; 0: weights do not fit
    limited_by: str  # what its batch cannot exceed
    kv_bytes: float
    imbalance: float
    step_us: float
    lost_part: float  # part of the time that moves take
    parts_us: tuple[float, ...]  # parts of a step: dispatch, experts, combine, and the rest
    error: float | None  # error of its time, by that of experts at these rows; None: not known
    tokens_per_s: float  # tokens of a rank, attention ranks included
    attention_ranks: int = 0  # ranks beside the group; 0: its ranks do both
    policy: str = NOTHING
    objective: str = ""  # of its plans: tokens, time, or both
    latency_ms: float = 0.0  # ``Question.latency``
    placement: Placement | None = field(default=None, repr=False)  # the placement that served last

    @property
    def name(self) -> str:
        """As sentences have it."""
        slots = f"{self.redundant} redundant a rank" if self.redundant else "no redundancy"
        every = f"{self.interval} windows" if self.interval > 1 else "window"
        planned = (
            f"{labelled(self.policy, self.objective)} every {every}"
            if self.interval
            else "no balancing"
        )
        return f"{self.group}, {slots}, {planned}"

    @property
    def group(self) -> str:
        """Its ranks."""
        beside = f" and {self.attention_ranks} attention ranks" if self.attention_ranks else ""
        return f"EP{self.ranks}{beside}"

    @property
    def group_short(self) -> str:
        """Its ranks, as tables have them."""
        return f"EP{self.ranks}{f'+{self.attention_ranks}' if self.attention_ranks else ''}"

    @property
    def links_part(self) -> float:
        """Part of a step that dispatch and combine take."""
        return (self.parts_us[0] + self.parts_us[2]) / max(sum(self.parts_us), 1e-9)

    @property
    def batch_ranks(self) -> int:
        """Ranks that run attention, which hold the sequences."""
        return self.attention_ranks or self.ranks

    def rank_tokens_per_s(self, token_us: float, sequences: float) -> float:
        """Tokens a second of a rank, all ranks counted, without what moves take."""
        parts = self.batch_ranks / (self.ranks + self.attention_ranks)
        return sequences / (token_us / 1e6) * parts if token_us else 0.0

    def as_json(self) -> dict[str, Any]:
        """All but the placement."""
        found = asdict(replace(self, placement=None))
        del found["placement"]
        return found


@dataclass(frozen=True)
class Batch:
    """One batch of the best candidate: milliseconds are those of ``Question.latency``."""

    sequences: int  # a batch of an attention rank; in prefill its tokens of a step
    tokens_per_expert: float  # mean, of one step
    none_ms: float  # without balancing, in the same slots
    planned_ms: float
    perfect_ms: float  # no placement is below it
    none_tokens_per_s: float  # tokens of a rank, as in the next two
    planned_tokens_per_s: float
    perfect_tokens_per_s: float

    @property
    def gain(self) -> float:
        """Tokens a second that balancing brings, relative."""
        return self.planned_tokens_per_s / self.none_tokens_per_s - 1

    @property
    def most_gain(self) -> float:
        """What no placement exceeds."""
        return self.perfect_tokens_per_s / self.none_tokens_per_s - 1


@dataclass(frozen=True)
class Recommendation:
    """Candidates, the best first."""

    question: Question
    candidates: tuple[Candidate, ...]
    unfit: tuple[Candidate, ...]  # whose weights do not fit
    batches: tuple[Batch, ...] = ()  # batches of the best candidate, the smallest first

    @property
    def best(self) -> Candidate:
        """The recommendation."""
        return self.candidates[0]

    def sentences(self) -> list[str]:
        """The recommendation, its reasons, the runner-up, and what does not fit."""
        best = self.best
        nothing = [one for one in self.candidates if not one.interval and one.group == best.group]
        lines = [f"recommended: {best.name}: {best.tokens_per_s:.1f} tokens/s a rank"]
        if not self.question.is_within(best):
            lines[0] = (
                f"no candidate keeps {self.question.most_ms:g} ms (--most-ms); the nearest is "
                f"{best.name}: {best.latency_ms:.2f} ms, {best.tokens_per_s:.1f} tokens/s a rank"
            )
        if nothing and best.interval:
            gain = best.tokens_per_s / nothing[0].tokens_per_s - 1
            sure = sure_gain(best, nothing[0])
            lines[0] += f", {gain:+.1%} over no balancing"
            if sure is not None and gain - sure >= TOLD_APART:
                lines[0] += f": {sure:+.1%} by experts, and the rest by links that nobody "
                lines[0] += "measured under imbalance"
            lines[0] += _error_of(best)
            if best.error is not None and abs(gain if sure is None else sure) < best.error:
                what = "the gain is" if sure is None or gain <= sure else "what experts gain is"
                lines.append(
                    f"cannot tell whether balancing pays here: {what} below the error of the "
                    "times of experts; benchmarks/expert_curve.py measures them on the GPU that "
                    "serves, for --expert-times"
                )
            lines.append(
                "replayed, on windows that no plan had seen: imbalance "
                f"{nothing[0].imbalance:.3f} -> {best.imbalance:.3f}"
            )
            lines.append(_assumed(best, nothing[0]))
        lines.append(_parts_of(best))
        lines.append(
            f"batch: {best.sequences} {self.question.unit} a rank, limited by {best.limited_by}; "
            f"{best.kv_bytes / 1e9:.1f} GB are left for the KV cache"
        )
        lines.append(self._latency(best, nothing))
        lines += self._batch_sentences()
        if len(self.candidates) > 1:
            lines.append(self._second(self.candidates[1]))
        lines += [
            f"does not fit: {one.group} with {one.slots_per_rank} slots a rank lacks "
            f"{max(-one.kv_bytes, 0.0) / 1e9:.1f} GB for its weights, or holds no sequence"
            for one in self.unfit
        ]
        return lines

    def _latency(self, best: Candidate, nothing: Sequence[Candidate]) -> str:
        """TTFT or TPOT at the full batch."""
        question = self.question
        without = (
            f" ({nothing[0].latency_ms:.2f} ms without balancing, at a batch of "
            f"{nothing[0].sequences})"
            if nothing
            else ""
        )
        if question.is_prefill:
            what = f"TTFT of a prompt of {question.context} tokens, with no queue"
        else:
            what = "TPOT"
        share = question.attention_share
        outside = (
            f"{question.other_us:g} us of each layer (--other-us)"
            if share is None
            else f"{share:.0%} of a step at even load (--attention-share)"
        )
        text = f"{what}: {best.latency_ms:.2f} ms{without}"
        return f"{text}; stated and not measured: outside of MoE layers {outside}"

    def _batch_sentences(self) -> list[str]:
        """From which batch on balancing pays."""
        if not self.batches:
            return []
        first = next(
            (n for n, one in enumerate(self.batches[::-1]) if one.gain < WORTH_IT),
            len(self.batches),
        )
        pays = self.batches[len(self.batches) - first :]  # and at every larger batch
        last, unit = self.batches[-1], self.question.unit
        if not pays:
            return [
                f"balancing gains less than {WORTH_IT:.0%} at every batch up to {last.sequences}"
            ]
        return [
            f"balancing gains {WORTH_IT:.0%} or more at each batch of the table from "
            f"{pays[0].sequences} {unit} a rank up ({figure_text(pays[0].tokens_per_expert)} "
            f"tokens an expert); at {last.sequences} it gains {last.gain:+.1%}, and the bound of "
            f"any placement is {last.most_gain:+.1%}"
        ]

    def _second(self, second: Candidate) -> str:
        loss = 1 - second.tokens_per_s / self.best.tokens_per_s
        reasons = []
        if second.imbalance > self.best.imbalance + 0.001:
            reasons.append(f"imbalance {second.imbalance:.3f}")
        if second.sequences < self.best.sequences:
            reasons.append(f"a batch of {second.sequences} {self.question.unit}")
        if second.lost_part > self.best.lost_part:
            reasons.append(f"moves take {second.lost_part:.2%}")
        why = ", ".join(reasons) or "nearly the same"
        if not self.question.is_within(second):
            why = f"{second.latency_ms:.2f} ms, above the limit"
        text = f"runner-up: {second.name}: {loss:.1%} fewer tokens/s ({why})"
        if self.best.error is not None and loss < self.best.error:
            text += "; cannot tell which is faster: they differ by less than the error of times"
        return text


def sure_gain(best: Candidate, nothing: Candidate) -> float | None:
    """Tokens a second that balancing brings, relative, if links gained nothing by it.

    What imbalance adds to dispatch and combine was never measured. None: the batches differ, so
    that parts of a step do not compare.
    """
    if best.sequences != nothing.sequences or not nothing.tokens_per_s or not best.step_us:
        return None
    links_us = nothing.parts_us[0] + nothing.parts_us[2] - best.parts_us[0] - best.parts_us[2]
    part = best.step_us / (best.step_us + max(links_us, 0.0))
    return best.tokens_per_s * part / nothing.tokens_per_s - 1


def _error_of(one: Candidate) -> str:
    return "" if one.error is None else f" (error of times at these rows: {one.error:.1%})"


def _assumed(best: Candidate, nothing: Candidate) -> str:
    """What the model of times makes of the imbalance; parts compare at the same batch alone."""
    text = f"assumed, by the model of times: a step takes {best.step_us / 1000:.2f} ms"
    if best.sequences != nothing.sequences:
        text += (
            f" with {best.sequences} sequences a rank, {nothing.step_us / 1000:.2f} ms with "
            f"{nothing.sequences} without balancing"
        )
    else:
        before, after = nothing.parts_us, best.parts_us
        links_ms = (before[0] + before[2] - after[0] - after[2]) / 1000
        text += (
            f", {nothing.step_us / 1000:.2f} ms without; experts save "
            f"{(before[1] - after[1]) / 1000:.2f} ms, and dispatch and combine {links_ms:.2f} ms, "
            "which was never measured under imbalance"
        )
    return f"{text}; moves take {best.lost_part:.2%} of the time"


def _parts_of(one: Candidate) -> str:
    """Shares of a step."""
    whole = max(sum(one.parts_us), 1e-9)
    dispatch, experts, combine, rest = (part / whole for part in one.parts_us)
    return (
        f"a step: {dispatch:.0%} dispatch, {experts:.0%} experts, {combine:.0%} combine, "
        f"{rest:.0%} the rest"
    )


def candidate_table(answer: Recommendation) -> TextTable:
    """All candidates; a terminal has room for the columns up to tokens a second."""
    unit = answer.question.unit[:3]
    headings = ["group", "redund", "policy", "every", unit, "KV GB", "imbal", "step ms", "links"]
    headings += ["moves", "tok/s", "error", "dispatch ms", "experts ms", "combine ms", "rest ms"]
    rows = [
        (
            one.group_short,
            str(one.redundant),
            labelled(one.policy, one.objective),
            str(one.interval or "-"),
            str(one.sequences),
            f"{one.kv_bytes / 1e9:.0f}",
            f"{one.imbalance:.3f}",
            f"{one.step_us / 1000:.1f}",
            f"{one.links_part:.0%}",
            f"{one.lost_part:.2%}",
            f"{one.tokens_per_s:.0f}",
            "-" if one.error is None else f"{one.error:.1%}",
            *(f"{part / 1000:.2f}" for part in one.parts_us),
        )
        for one in answer.candidates
    ]
    title = "candidates; redund: redundant slots of a rank; links: part of dispatch and combine"
    return TextTable(headings, rows, title)


def batch_table(answer: Recommendation) -> TextTable:
    """Batches of the best candidate: ms and tokens/s of a rank, by balance."""
    of_what = "TTFT" if answer.question.is_prefill else "TPOT"
    headings = ("tok/exp", "none ms", "ms", "least ms", "tok/s", "gain", "most")
    rows = [
        (
            str(one.sequences),
            figure_text(one.tokens_per_expert),
            *(f"{ms:.2f}" for ms in (one.none_ms, one.planned_ms, one.perfect_ms)),
            f"{one.planned_tokens_per_s:.0f}",
            f"{one.gain:+.1%}",
            f"{one.most_gain:+.1%}",
        )
        for one in answer.batches
    ]
    title = f"batches of {answer.best.name}: ms: {of_what}; none: without balancing"
    return TextTable((answer.question.unit[:3], *headings), rows, title)


def recommend(question: Question) -> Recommendation:
    """Compare groups and redundancy at the middle interval, then intervals for the best of them.

    Raises:
        ConfigError: no candidate fits the memory.
        HistoryError: load that cannot be replayed.
    """
    middle = sorted(question.intervals)[len(question.intervals) // 2]
    found: list[Candidate] = []
    unfit: list[Candidate] = []
    for ranks, attention, redundant in product(
        question.ranks, question.attention_ranks, question.redundant
    ):
        ways = [(name, middle) for name in question.policies if name != NOTHING]
        ways += [(NOTHING, 0)] if redundant == min(question.redundant) else []
        for one in _candidates(question, _plain(question, ranks, attention, redundant), ways):
            (found if one.sequences else unfit).append(one)
    if not found:
        raise ConfigError(
            f"no candidate fits {question.memory.hardware.memory_bytes / 1e9:.0f} GB a rank: "
            + ", ".join(f"{one.group} with {one.slots_per_rank} slots" for one in unfit)
        )
    best = _sorted(question, found)[0]
    others = [one for one in question.intervals if one != middle]
    if best.interval and others:
        plain = _plain(question, best.ranks, best.attention_ranks, best.redundant)
        found += _candidates(question, plain, [(best.policy, one) for one in others])
    once = {(one.group, one.slots_per_rank): one for one in unfit}
    ordered = tuple(_sorted(question, found))
    return Recommendation(question, ordered, tuple(once.values()), _batches(question, ordered[0]))


def verdict_of(question: Question, best: Candidate) -> Verdict:
    """Whether balancing is worth enabling on a candidate's ranks, by the imbalance alone."""

    def terms(redundant: int) -> PlanTerms:
        return PlanTerms(
            even_topology(
                best.ranks, question.ranks_per_node, redundant, question.windows.num_experts
            ),
            question.memory.model,
            cost=CostModel(question.pay_back_s),
            seed=question.seed,
            dispatch=question.dispatch,
        )

    judge = Judge(terms(0), terms(max(best.redundant, 1)))
    for tokens in question.windows:
        judge.add(tokens)
    return judge.verdict


def _sorted(question: Question, found: Sequence[Candidate]) -> list[Candidate]:
    """The most tokens first, of equals the fewest slots; those above the limit last, by latency."""

    def order(one: Candidate) -> tuple[float, ...]:
        above = 0.0 if question.is_within(one) else one.latency_ms
        return above, -one.tokens_per_s, one.slots_per_rank, one.interval

    return sorted(found, key=order)


def _plain(question: Question, ranks: int, attention: int, redundant: int) -> Candidate:
    """A candidate that is not judged yet."""
    memory = question.memory
    topology = even_topology(
        ranks, question.ranks_per_node, redundant, question.windows.num_experts
    )
    slots, context = topology.num_slots // ranks, 1 if question.is_prefill else question.context
    fits, kv_bytes = memory.sequences(slots, context), memory.kv_bytes(slots)
    if attention:
        # What the expert ranks lack for their weights, else what the attention ranks have left.
        left = replace(memory, dense_bytes=0.0).kv_bytes(slots)
        kv_bytes = min(left, 0.0) or memory.kv_bytes(0)
        fits = memory.sequences(0, context) if left >= 0 else 0
    return Candidate(
        ranks,
        slots,
        redundant,
        0,
        min(fits, question.most_sequences),
        "the KV cache" if fits < question.most_sequences else "the most that was asked for",
        kv_bytes,
        imbalance=0.0,
        step_us=0.0,
        lost_part=0.0,
        parts_us=(0.0,) * 4,
        error=None,
        tokens_per_s=0.0,
        attention_ranks=attention,
    )


def _scenario(question: Question, one: Candidate, interval: int) -> Scenario:
    memory = question.memory
    topology = even_topology(
        one.ranks, question.ranks_per_node, one.redundant, question.windows.num_experts
    )
    step = StepModel(
        memory.model,
        topology,
        memory.hardware,
        question.kernel,
        question.is_prefill,
        is_separate=bool(one.attention_ranks),
    )
    tokens = float(one.sequences * one.batch_ranks * question.speculation.verified)
    return Scenario(
        topology,
        memory.model,
        load=question.windows,
        cost=CostModel(question.pay_back_s),
        seed=question.seed,
        plan_every=max(1, interval),
        dispatch=question.dispatch,
        step_model=replace(step, other_us=question.outside_us(step, tokens)),
        migration=MigrationCost(memory.model, memory.hardware),
        tokens_per_step=tokens,
    )


def _candidates(
    question: Question, plain: Candidate, ways: Sequence[tuple[str, int]]
) -> list[Candidate]:
    """A candidate for each policy and interval, which are replayed in one pass where they can."""
    if not plain.sequences:
        return [plain]
    found = []
    sizes = () if question.most_ms is None else _sizes(question, plain)
    for interval in dict.fromkeys(interval for _, interval in ways):
        names = [name for name, its in ways if its == interval]
        for one in _replayed(question, plain, interval, names, sizes):
            judged = _judged(question, replace(plain, interval=interval, policy=one.policy), one)
            if not question.is_within(judged):
                judged = _limited(question, judged, one, sizes)
            found.append(judged)
    return found


def _replayed(
    question: Question, at: Candidate, interval: int, names: Sequence[str], sizes: Sequence[int]
) -> list[Replay]:
    """Replays at a candidate's batch, which other batches of its plans are timed in."""
    tokens = tuple(float(one * at.batch_ranks * question.speculation.verified) for one in sizes)
    found = replay_all(replace(_scenario(question, at, interval), batches=tokens), names)
    for one in found:
        if one.failed:
            text = f"{at.group}, {at.slots_per_rank} slots a rank, {one.policy}"
            raise ConfigError(f"{text}: {one.failed}")
    return found


MOST_ROUNDS = 12  # replays of a candidate in search of its batch


def _limited(
    question: Question, full: Candidate, replayed: Replay, sizes: Sequence[int]
) -> Candidate:
    """A candidate at its largest batch within the limit, else at the batch of least latency.

    Each batch is judged under plans of its own. Those of the full batch tell where to begin.
    """
    limit = question.most_ms
    assert limit is not None, "asked where there is one"
    ms = _batch_ms(question, full, sizes, replayed.batch_us[~replayed.idle])
    known = dict(zip(sizes, ms, strict=True))  # milliseconds by batch, which replays correct
    judged: dict[int, Candidate] = {full.sequences: full}
    low = max((size for size in sizes if known[size] <= limit), default=0)
    high = min(size for size in sizes if size > low)
    guess = low or min(sizes, key=lambda size: known[size])
    for _ in range(MOST_ROUNDS):
        if low:
            part = (limit - known[low]) / max(known[high] - known[low], 1e-9)
            guess = min(max(low, int(low + (high - low) * part)), high - 1)
            guess = (low + high) // 2 if guess in judged and high - low > 1 else guess
        if guess in judged:
            break
        at = replace(full, sequences=guess, limited_by="the limit of latency (--most-ms)")
        (one,) = _replayed(question, at, full.interval, [full.policy], (guess + 1,))
        found = judged[guess] = _judged(question, at, one)
        known[guess] = found.latency_ms
        (known[guess + 1],) = _batch_ms(question, at, (guess + 1,), one.batch_us[~one.idle])
        if not question.is_within(found):
            high = guess
            low = max((size for size in known if size < guess and known[size] <= limit), default=0)
            if not low:
                break
        elif known[guess + 1] > limit:
            break
        else:
            low = guess + (guess + 1 < high)
    within = [one for one in judged.values() if question.is_within(one)]
    if within:
        return max(within, key=lambda one: one.sequences)
    return min(judged.values(), key=lambda one: one.latency_ms)


def _batch_ms(
    question: Question, at: Candidate, sizes: Sequence[int], us: FloatArray
) -> list[float]:
    """``Question.latency`` of batches, whose steps were timed for each window."""
    steps_us = _batch_steps_us(question, at, sizes, us)
    return [question.latency(one, size) for one, size in zip(steps_us, sizes, strict=True)]


def _batch_steps_us(
    question: Question, at: Candidate, sizes: Sequence[int], us: FloatArray
) -> list[float]:
    """Mean steps of batches: what is outside of MoE layers has a time of its own at each."""
    step, by = _scenario(question, at, at.interval).step_model, question.speculation
    assert step is not None, "made with one"
    layers = question.memory.model.num_layers
    outside = [
        question.outside_us(step, float(size * at.batch_ranks * by.verified)) - step.other_us
        for size in sizes
    ]
    found: list[float] = by.step_us(us.mean(axis=0) + np.array(outside) * layers, layers).tolist()
    return found


def _sizes(question: Question, one: Candidate) -> tuple[int, ...]:
    """Powers of two up to a candidate's batch, and that batch."""
    powers = [2**power for power in range(one.sequences.bit_length())]
    least = LEAST_PREFILL if question.is_prefill else 1
    return tuple(sorted({*(one for one in powers if one >= least), one.sequences}))


def _batches(question: Question, best: Candidate) -> tuple[Batch, ...]:
    """Batches up to that of a candidate, with and without balancing, and the bound."""
    sizes, by, model = _sizes(question, best), question.speculation, question.memory.model
    tokens = [float(size * best.batch_ranks * by.verified) for size in sizes]
    names = list(dict.fromkeys((NOTHING, best.policy)))
    replays = _replayed(question, best, best.interval, names, sizes)
    found = {one.policy: one for one in replays}
    none, planned = found[NOTHING], found[best.policy]
    if not none.tokens.any():
        return ()
    steps_us = [
        _batch_steps_us(question, best, sizes, us[~none.idle])
        for us in (none.batch_us, planned.batch_us, planned.bound_us)
    ]
    kept = (1.0, 1.0 - best.lost_part, 1.0)
    batches = []
    for size, together, *times in zip(sizes, tokens, *steps_us, strict=True):
        rates = [
            best.rank_tokens_per_s(us / by.given, size) * part
            for us, part in zip(times, kept, strict=True)
        ]
        rows = together * model.top_k / model.num_experts
        batches.append(Batch(size, rows, *(question.latency(us, size) for us in times), *rates))
    return tuple(batches)


def _judged(question: Question, plain: Candidate, one: Replay) -> Candidate:
    busy = one.step_us[~one.idle]
    by = question.speculation
    verifying_us = float(busy.mean()) if busy.size else 0.0
    step_us = float(by.step_us(np.array(verifying_us), question.memory.model.num_layers))
    # At the mean rows of a slot; experts' part of the time has their error.
    error = None
    parts_us: tuple[float, ...] = (0.0,) * 4
    if busy.size:
        parts_us = tuple(one.parts_us[~one.idle].mean(axis=0).tolist())
        copies = plain.sequences * plain.batch_ranks * by.verified * question.memory.model.top_k
        error = question.kernel.error_at(copies / (plain.ranks * plain.slots_per_rank))
        error = None if error is None else error * parts_us[1] / max(sum(parts_us), 1e-9)
    lost_s = sum(rebalance.lost_s for rebalance in one.rebalances)
    lost = min(1.0, lost_s / (len(one.imbalance) * question.window_s))
    return replace(
        plain,
        objective=one.objective,
        imbalance=one.mean,
        step_us=step_us,
        lost_part=lost,
        parts_us=parts_us,
        error=error,
        latency_ms=question.latency(step_us, plain.sequences),
        tokens_per_s=plain.rank_tokens_per_s(step_us / by.given, plain.sequences) * (1 - lost),
        placement=one.last_placement,
    )


def part_of(windows: WindowSeries, most: int, *, is_latest: bool) -> WindowSeries:
    """The last windows of a source whose number is known, or its first ones."""
    count = windows.num_windows
    skipped = max(0, count - most) if count is not None and is_latest else 0
    return replace(
        windows,
        read=lambda: islice(windows.read(), skipped, skipped + most),
        num_windows=most if count is None else min(most, count),
    )
