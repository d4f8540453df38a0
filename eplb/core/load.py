"""Tokens of each expert: the sample of one rank, and the windows summed from many samples.

A window of n routed tokens on R ranks is a random sample: even under a perfect placement the
busiest rank is about z sqrt(R / n) above the mean, where z is the expected maximum of R normal
samples. Requests differ, so real windows fluctuate by more; this is estimated from several windows.
No placement planned on the past avoids that imbalance in the next window.

Windows differ in tokens, by night and day most of all. Noise in the shares of a window goes with
1 / n, and what its imbalance costs goes with its time, that is with n: by both, a window weighs as
its tokens. What compares windows with each other, and for that needs windows of similar noise,
takes those with few tokens together with the next (``blocks``).

Shapes:  L MoE layers, C slots of one rank, E experts, T windows, B blocks, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eplb.core.arrays import UNSET, freeze, on_host, owned, unset
from eplb.errors import HistoryError

Phase = Literal["prefill", "decode", "mixed"]
MOST_TOKENS = 2**62  # in a whole history
IDS_AT_ONCE = 65_536  # tokens whose ids are sorted at a time


@dataclass(frozen=True, eq=False)
class LoadSample:
    """Experts that one rank held, and tokens that it received, over some steps.

    Self-describing: it contains the rank's own slots, so summing it needs no placement and no
    collective. It never spans a swap. Padding, dummy and warm-up batches are not in it.

    Raises:
        HistoryError: shapes that differ, steps in the wrong order, or negative counts.
    """

    deployment: str
    run: str  # one start of the serving processes
    rank: int
    sequence: int  # 0, 1, 2, ... per rank and run: a gap is a lost sample
    time: float  # seconds since the epoch, by the rank's clock
    first_step: int
    last_step: int  # inclusive
    phase: Phase
    generation: int
    slot_to_expert: NDArray[np.int32]  # [L, C]
    tokens: NDArray[np.int64]  # [L, C] received by each slot

    def __post_init__(self) -> None:
        held, tokens = owned(self.slot_to_expert, np.int32), owned(self.tokens, np.int64)
        freeze(self, slot_to_expert=held, tokens=tokens)
        where = f"sample {self.sequence} of rank {self.rank}"
        if held.ndim != 2 or held.shape != tokens.shape:
            raise HistoryError(
                f"{where}: slot_to_expert has shape {held.shape} and tokens {tokens.shape}, "
                "expected the same [layers, slots]"
            )
        if self.last_step < self.first_step:
            raise HistoryError(
                f"{where}: steps {self.first_step}..{self.last_step}, expected first <= last"
            )
        if (tokens < 0).any():
            raise HistoryError(f"{where}: {tokens.min()} tokens in a slot, expected 0 or more")


@dataclass(frozen=True, eq=False)
class LoadHistory:
    """Windows of load, oldest first. They are not summed: the planner uses each of the T windows.

    Raises:
        HistoryError: shapes that differ, negative counts, or no window at all.
    """

    tokens: NDArray[np.int64]  # [T, L, E]
    first_step: NDArray[np.int64] = field(default_factory=unset)  # [T]; default: 0, 1, 2, ...
    last_step: NDArray[np.int64] = field(default_factory=unset)  # [T] inclusive
    phase: Phase = "mixed"
    missing_ranks: tuple[frozenset[int], ...] = ()  # per window; () means none anywhere
    phases: tuple[Phase, ...] = ()  # each window's, where they differ; (): ``phase``

    def __post_init__(self) -> None:
        given = np.asarray(self.tokens)
        if given.ndim != 3 or not given.size:
            raise HistoryError(
                f"tokens has shape {given.shape}, expected [windows, layers, experts], none empty"
            )
        # Checked before the cast, which would wrap unsigned values; the sum of all must fit too.
        if given.max() > MOST_TOKENS / given.size:
            raise HistoryError(
                f"{_where(given.argmax(), given.shape)}: {given.max()} tokens, expected at most "
                f"{MOST_TOKENS // given.size} for {given.size} figures that are summed as int64"
            )
        tokens = owned(given, np.int64)
        if (tokens < 0).any():
            raise HistoryError(
                f"{_where(tokens.argmin(), tokens.shape)}: {tokens.min()} tokens, "
                "expected 0 or more"
            )
        steps = np.arange(len(tokens))
        first = steps if self.first_step is UNSET else self.first_step
        last = first if self.last_step is UNSET else self.last_step
        freeze(self, tokens=tokens, first_step=owned(first, np.int64))
        freeze(self, last_step=owned(last, np.int64))
        if not self.missing_ranks:
            object.__setattr__(self, "missing_ranks", (frozenset[int](),) * len(tokens))
        if not self.phases:
            object.__setattr__(self, "phases", (self.phase,) * len(tokens))
        for name in ("first_step", "last_step", "missing_ranks", "phases"):
            if len(getattr(self, name)) != len(tokens):
                raise HistoryError(
                    f"{name} has {len(getattr(self, name))} entries, expected {len(tokens)} windows"
                )

    @property
    def num_windows(self) -> int:
        """T."""
        return len(self.tokens)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.tokens.shape[1])

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.tokens.shape[2])

    @property
    def steps_per_window(self) -> NDArray[np.int64]:
        """[T] steps that each window spans."""
        steps: NDArray[np.int64] = self.last_step - self.first_step + 1
        return steps

    def total(self) -> NDArray[np.int64]:
        """[L, E] all windows summed."""
        summed: NDArray[np.int64] = self.tokens.sum(axis=0)
        return summed

    def latest(self, num_windows: int) -> LoadHistory:
        """The last ``num_windows`` windows, or all when there are fewer."""
        return self.of_windows(np.arange(max(0, self.num_windows - num_windows), self.num_windows))

    def of_windows(self, places: NDArray[np.intp]) -> LoadHistory:
        """Some windows, in this order."""
        return LoadHistory(
            self.tokens[places],
            self.first_step[places],
            self.last_step[places],
            self.phase,
            tuple(self.missing_ranks[place] for place in places),
            tuple(self.phases[place] for place in places),
        )

    def joined(self, starts: NDArray[np.intp]) -> LoadHistory:
        """The windows of each block summed; ``starts`` [B] as ``blocks`` gives them."""
        ends = np.append(starts[1:], self.num_windows) - 1
        missing, phases = self.missing_ranks, self.phases
        return LoadHistory(
            np.add.reduceat(self.tokens, starts, axis=0),
            self.first_step[starts],
            self.last_step[ends],
            self.phase,
            tuple(
                frozenset[int]().union(*missing[start : end + 1])
                for start, end in zip(starts, ends, strict=True)
            ),
            tuple(phases[end] for end in ends),
        )


def as_history(history: LoadHistory | ArrayLike) -> LoadHistory:
    """Take a LoadHistory, or an array [L, E] or [T, L, E] (a torch tensor too), as a history.

    Fractional loads are scaled to integers so that planning stays exact and repeatable. An array
    that may be something else (``second_reading``) is refused: a LoadHistory is counts by its name.

    Raises:
        HistoryError: another shape, routing ids and the like, negative or non-finite figures.
    """
    if isinstance(history, LoadHistory):
        return history
    values = np.asarray(on_host(history))
    if why := second_reading(values):
        raise HistoryError(
            f"{values.dtype} {list(values.shape)} {why}, expected counts [windows, layers, "
            "experts]; LoadHistory(array) states that it has counts"
        )
    return history_of_figures(values)


def history_of_figures(values: NDArray[Any]) -> LoadHistory:
    """An array [L, E] or [T, L, E] of counts or fractional loads as a history.

    Raises:
        HistoryError: as ``as_history``.
    """
    if values.ndim == 2:
        values = values[None]
    if values.dtype.kind == "f":
        values = _as_counts(values)
    if values.dtype.kind not in "iub":
        raise HistoryError(f"load has dtype {values.dtype}, expected integers or floats")
    return LoadHistory(values)


LARGEST_TOP_K = 64
MOST_ROWS = 16  # layers for each expert
FEWEST_FLAGS = 64  # figures that are 0 and 1 by no chance
FEWEST_COUNTERS = 8  # figures that do not rise together by chance
FEWEST_REPEATS = 3.0  # that chance makes in counts; none of them is evidence of ids
MOST_EXPERTS = 4096  # of a layer; larger numbers are counts


def names_experts(values: NDArray[Any], num_experts: int = MOST_EXPERTS) -> bool:
    """Whether an array may be routing ids [tokens, layers, top-k], by its type, shape and values.

    Each token names different experts in a layer; -1 pads.
    """
    is_table = values.ndim == 3 and values.dtype.kind in "iu" and values.size > 0
    if not is_table or not 1 <= values.shape[2] <= min(LARGEST_TOP_K, num_experts):
        return False
    return bool(values.min() >= -1 and values.max() < num_experts) and not repeats_expert(values)


def second_reading(values: NDArray[Any]) -> str:
    """What an array without a word about it is rather than load; "": nothing else.

    Integers of one or two bytes are what engines return routing ids as. Wider ones, and whole
    floats, are ids if no row names an expert twice though chance would repeat one in so many rows
    of counts, and totals of layers differ: each token passes every layer, so those of counts are
    equal.
    """
    if values.dtype.kind not in "iufb" or not values.size:
        return ""
    if values.ndim == 2 and len(values) >= MOST_ROWS * values.shape[1]:
        return "has far more rows than columns: tokens of one layer, not [layers, experts]"
    if values.ndim != 3:
        return ""
    totals = values.sum(axis=2, dtype=np.float64)
    if values.dtype.kind == "f" and not (values == np.floor(values)).all():
        is_probability = len(values) > 1 and (np.abs(totals - 1.0) < 1e-2).all()
        return "has rows that sum to 1: probabilities of tokens" if is_probability else ""
    has_flags = values.size >= FEWEST_FLAGS and values.min() == 0 and values.max() == 1
    if has_flags and np.ptp(totals) == 0:
        return "is 0 and 1 alone, as many in each row: experts of tokens"
    busy = values.any(axis=(1, 2))
    steps = np.diff(values[busy].astype(np.float64), axis=0)
    is_rise, is_change = (steps >= 0).all(axis=(1, 2)), steps.any(axis=(1, 2))
    # A counter falls at a restart of its engine, and an empty poll is no window.
    mostly = values[0].size >= FEWEST_COUNTERS and 2 * (is_rise & is_change).sum() > len(steps)
    if len(steps) > 2 and values[0].size > 2 and is_change.any() and (is_rise.all() or mostly):
        where = "" if is_rise.all() else " in most steps"
        what = "counters since a start, not windows, their differences"
        return f"has no count that falls{where}: {what}"
    if _reads_as_ids(values):
        return "has different numbers in each row: routing ids [tokens, layers, top-k]"
    if not busy.all() and values.shape[2] > 1 and _reads_as_ids(values[busy]):
        return (
            "has different numbers in each row but those of 0: routing ids [tokens, layers, "
            "top-k], padded with 0 in place of -1"
        )
    return ""


def _reads_as_ids(values: NDArray[Any]) -> bool:
    if values.dtype.kind == "f" and values.max() < MOST_EXPERTS:
        values = values.astype(np.int64)
    if not (may_be := names_experts(values)) or values.itemsize <= 2:
        return may_be
    num_tokens, num_layers, top_k = map(int, values.shape)
    totals = values.sum(axis=2)
    if num_layers > 1 and (totals == totals[:, :1]).all():
        return False
    largest = int(values.max())
    repeats = num_tokens * num_layers * top_k * (top_k - 1) / 2 / (largest + 1)
    is_evident = repeats >= FEWEST_REPEATS or (top_k == 1 and num_tokens > largest)
    return bool(largest >= top_k and is_evident)


def repeats_expert(ids: NDArray[Any]) -> tuple[int, int] | None:
    """The first token and layer of ids [tokens, layers, top-k] that name an expert twice."""
    for begin in range(0, len(ids), IDS_AT_ONCE):
        part = np.sort(ids[begin : begin + IDS_AT_ONCE], axis=2)
        wrong = ((part[:, :, 1:] == part[:, :, :-1]) & (part[:, :, 1:] >= 0)).any(axis=2)
        if wrong.any():
            token, layer = np.unravel_index(int(wrong.argmax()), wrong.shape)
            return begin + int(token), int(layer)
    return None


def _as_counts(values: NDArray[np.floating]) -> NDArray[np.int64]:
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        place = _where(wrong.argmax(), values.shape)
        raise HistoryError(
            f"{place}: load is {values.flat[wrong.argmax()]}, expected a finite number, 0 or more"
        )
    # Of the largest: 12 digits are kept, fewer where int64 must hold the sum of more figures.
    most = min(2**40, MOST_TOKENS // max(values.size, 1))
    if not values.size or ((values == np.floor(values)).all() and values.max() <= most):
        return values.astype(np.int64)
    largest = float(values.max())
    # In this order: ``most`` divided by a tiny value would be infinite.
    counts: NDArray[np.int64] = np.rint(values / largest * most).astype(np.int64)
    return counts


def _where(flat: np.integer, shape: tuple[int, ...]) -> str:
    """Window, layer and expert of a load's flat index, as text."""
    names = ("window", "layer", "expert")[-len(shape) :]
    place = np.unravel_index(int(flat), shape)
    return ", ".join(f"{name} {index}" for name, index in zip(names, place, strict=False))


FEWEST_WINDOWS = 4  # with fewer, one sudden change would count as noise
IDLE = 0.5  # part of the usual tokens below which a window is taken together with the next


def usual_tokens(tokens: NDArray[np.number]) -> float:
    """Tokens of a window such that half of all tokens are in windows with at least as many.

    Args:
        tokens: [T] of each window.
    """
    largest_first = np.sort(tokens)[::-1]
    sums = largest_first.cumsum(dtype=np.float64)
    return float(largest_first[np.searchsorted(sums, sums[-1] / 2)])


def blocks(tokens: NDArray[np.number], usual: float | None = None) -> NDArray[np.intp]:
    """[B] first window of each block: neighbours that together have at least IDLE of the usual.

    Windows with few tokens are part of the next block, at the end of the last one. Windows of
    similar size are a block each.

    Args:
        tokens: [T] of each window.
        usual: ``usual_tokens`` of more windows than these; by default of these.
    """
    least = IDLE * (usual_tokens(tokens) if usual is None else usual)
    starts, start, together = [0], 0, 0.0
    for window, found in enumerate(tokens.tolist()):
        if together >= least and window > start:
            start, together = window, 0.0
            starts.append(start)
        together += found
    if together < least and len(starts) > 1:
        starts.pop()
    return np.array(starts)


def num_full_blocks(tokens: NDArray[np.number], latest: int) -> int:
    """How many windows of the usual tokens the ``latest`` of the windows [T] are worth."""
    usual, since = usual_tokens(tokens), tokens[len(tokens) - latest :]
    starts = blocks(since, usual) if latest else np.zeros(0, dtype=np.intp)
    if len(starts) == 1 and since.sum() < IDLE * usual:
        return 0
    return len(starts)


def fluctuation(
    load: NDArray[np.float64], tokens: NDArray[np.number] | None = None
) -> NDArray[np.float64]:
    """[L] imbalance above 1 by fluctuation between blocks; 0 with fewer than FEWEST_WINDOWS.

    Half the squared difference of neighbouring blocks is their variance without slow drift; the
    median over neighbours also excludes a sudden change, which a plan must follow.

    Args:
        load: [T, L, R] under one placement, in units of the mean rank load.
        tokens: [T] of each window; None: as many in each.
    """
    if tokens is not None and len(starts := blocks(tokens)) < len(tokens):
        together = np.add.reduceat(load * tokens[:, None, None], starts, axis=0)
        load = together / np.add.reduceat(tokens, starts)[:, None, None]
    num_windows, num_layers, num_ranks = load.shape
    if num_windows < FEWEST_WINDOWS or num_ranks < 2:
        return np.zeros(num_layers)
    variance = np.square(np.diff(load, axis=0)).mean(axis=2) / 2  # [T - 1, L]
    spread = num_ranks / (num_ranks - 1)  # as in sampling_noise: ranks share one total
    deviation: NDArray[np.float64] = np.sqrt(np.median(variance, axis=0) * spread)
    return deviation * _largest_of(num_ranks)


def sampling_noise(tokens_per_window: float, num_ranks: int) -> float:
    """Imbalance above 1 of one layer's window if tokens were independent samples.

    Args:
        tokens_per_window: tokens times experts per token, of one layer.
        num_ranks: ranks that are alive.

    Source: multinomial draw, checked against the batches of DeepSeek-V2-Lite (top-6, 8 ranks):
    32 tokens 1.29 (measured 1.26 to 1.31), 512 tokens 1.07 (measured 1.06 to 1.08).
    """
    return float(sampling_noises(np.array([tokens_per_window]), num_ranks)[0])


def sampling_noises(routed: NDArray[np.number], num_ranks: int) -> NDArray[np.float64]:
    """[...] ``sampling_noise`` of layers with so many routed tokens [...]; 0 without any."""
    noise: NDArray[np.float64] = np.zeros(routed.shape)
    if num_ranks < 2:
        return noise
    # The load of a rank deviates by sqrt((R - 1) / n). Loads have a fixed sum, so they are
    # negatively correlated, which adds a factor of sqrt(R / (R - 1)).
    np.divide(num_ranks, routed, out=noise, where=routed > 0)
    return np.asarray(_largest_of(num_ranks) * np.sqrt(noise))


def _largest_of(num_ranks: int) -> float:
    """Blom's approximation of the expected maximum of so many standard normal samples."""
    return NormalDist().inv_cdf((num_ranks - 0.375) / (num_ranks + 0.25))
