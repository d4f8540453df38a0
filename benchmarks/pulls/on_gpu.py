"""Time of just-in-time replicas on one GPU, part by part, and of a layer with and without them.

    python -m benchmarks.pulls.on_gpu [--parts plan redirect pull layer]

All times are of replayed CUDA graphs, medians; arms of a row take turns. Experts are FP8 of
DeepSeek-V3's shape, records of 44.05 MB. **NVLink is not measured**: the peer's records lie in the
memory of the same GPU. A pull over NVLink cannot take less than the record at 346 GB/s, 127 us; in
the arm *paced* each program sleeps after a buffer, so that a record takes about that long here.

    plan      what is pulled: ``plan_pulls``, both kernels, random layers of 256 experts
    redirect  the tokens of a batch, top-8
    pull      one and two records, by programs for each record and how they copy; and a plain copy
    layer     the experts' product of the rank that a layer waits for, 32 ranks of 9 slots:
        before    busiest rank without pulls
        giver     busiest rank of those that pull nothing, with pulls
        merged    busiest taker as if its spare slot were one more resident slot, in one launch
        present   busiest taker: two launches, the record is there already
        held      the same with a pull of few large programs beside the first launch
        pulled    the same with the pull that serves
        paced     the same with a pull that takes about as long as NVLink
      A layer takes max(giver, paced) with pulls, against before: ``gain``. ``exposed`` is paced
      less present, ``launch`` is present less merged. The exchange, the decision and the combine
      are not in it. Rows are drawn, and the decision is the real one.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from benchmarks.experts_uneven import in_turns
from eplb.core.placement import Placement
from eplb.core.topology import Topology
from eplb.shares.pulls import NO_SLOT, PullRule, SlotTokens, moved_by_slot, plan_pulls
from runtime.batch_split import BatchSplit
from runtime.dispatch.all_to_all import Received
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes
from runtime.kernels import pull_plan
from runtime.kernels import pulls as kernels
from runtime.kernels.batch_counts import count_experts, num_blocks
from runtime.kernels.launch import num_multiprocessors
from runtime.kernels.pulls import PULL_TILE, PullTile
from runtime.model.compute import GroupedExperts
from runtime.pulls.layer import PulledExperts
from runtime.routing import RoutingTable
from runtime.streams import new_stream

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE, SEED = 256, 8, 7168, 2048, 7
GROUPS = ((8, 36), (32, 9), (64, 5), (144, 2))  # ranks, slots of each
NVLINK_BYTES_PER_S = 346e9  # design note: copy of 44 MiB from a peer GPU, H200
PAUSE_NS = 1200  # of a paced pull, after each buffer
BEFORE = 24, PullTile(8192, 1, 16)  # few large programs, without shared memory
PULLS = (
    BEFORE,
    (132, PullTile(1024, 1, 1)),
    *((programs, PULL_TILE) for programs in (16, 32, 64, 132)),
    (132, PullTile(1024, 3, 1)),
    (132, PullTile(512, 2, 1)),
    (132, PullTile(256, 2, 1)),
)
ROWS, SPREADS, DRAWS = (16, 64, 256, 768), (0.2, 0.4), 3
LAYER_RANKS, LAYER_SLOTS = 32, 9
CUDA = torch.device("cuda")
Ints = NDArray[np.int64]


def schema() -> ExpertSchema:
    """Of the experts that are timed."""
    return ExpertSchema.swiglu_fp8(HIDDEN, INTERMEDIATE)


def bank_of(num_slots: int) -> ExpertBank:
    """Records of random finite weights: bytes of small FP8 numbers, scales of 1."""
    size = bank_bytes(schema(), 1, num_slots, 0)
    bank = ExpertBank(schema(), 1, num_slots, num_staging=0, arena=PlainArena(size, CUDA))
    bank.records(0).random_(0, 64)
    for name, tensor in bank.weights(0).items():
        if name.endswith("scale"):
            tensor.fill_(0.01)
    return bank


def alone(run: Callable[[], object]) -> float:
    """Microseconds of a launch."""

    def once(_: int) -> None:
        run()

    return in_turns({"": once})[""]


def show_plan() -> None:
    """Decisions for drawn batches, against the reference."""
    print(f"\nplan_pulls, us{'':14}{'J':>3}{'pieces':>8}{'before':>8}{'after':>8}{'us':>8}")
    for num_ranks, per_rank in GROUPS:
        for spares in (1, 2):
            rng = np.random.default_rng(SEED)
            topology = Topology.uniform(1, num_ranks, per_rank)
            share = 1.0 / np.arange(1, EXPERTS + 1) ** 0.7
            rest = rng.choice(EXPERTS, topology.num_slots - EXPERTS, p=share / share.sum())
            held = rng.permutation(np.concatenate([np.arange(EXPERTS), rest]))
            table = RoutingTable(
                Placement(held[None], EXPERTS),
                max_replicas=num_ranks,
                device="cuda",
                topology=topology,
                extra_slots=spares,
            )
            counts = rng.multinomial(256 * topology.num_slots, share / share.sum())
            gathered = torch.from_numpy(counts[None].astype(np.int32)).cuda()
            split = BatchSplit(
                table, lambda own, to: None, source=0, num_sources=1, max_pairs=TOP_K
            )
            split.split(0, gathered)
            ranks = pull_plan.Ranks.on(
                CUDA, topology, np.zeros(num_ranks, np.int64), spares, [0] * num_ranks
            )
            rule = PullRule(spares, 64, 64, most_readers=2)
            decided = pull_plan.Decided.on(CUDA, num_ranks * spares)
            counter = torch.zeros(per_rank + spares, dtype=torch.int32, device=CUDA)
            run = functools.partial(
                pull_plan.plan_pulls,
                split.layer_split(0),
                split.batch.totals,
                split.batch.up_to,
                ranks,
                rule,
                0,
                counter,
                decided,
            )
            us = alone(run)
            fair = counts.sum() / num_ranks
            before, after = (decided.busiest[[-1]].item(), decided.busiest[:-1].min().item())
            pieces = int((decided.source >= 0).sum())
            name = f"{num_ranks} ranks of {per_rank}"
            print(
                f"{name:<28}{spares:>3}{pieces:>8}{before / fair:>8.3f}{after / fair:>8.3f}"
                f"{us:>8.1f}",
                flush=True,
            )


def show_redirect() -> None:
    """A batch of one source, 32 ranks of a spare slot each, all of them pulled."""
    print(f"\nredirect{'':12}{'tokens':>8}{'us':>8}")
    topology = Topology.uniform(1, 32, 9)
    ranks = pull_plan.Ranks.on(CUDA, topology, np.zeros(32, np.int64), 1, [0] * 32)
    decided = pull_plan.Decided.on(CUDA, 32)
    decided.source.copy_(torch.arange(32) * 9)
    decided.end.fill_(2**30)
    for tokens in (32, 256, 1024, 4096):
        experts = torch.randint(EXPERTS, (tokens, TOP_K), device=CUDA)
        slots = experts + experts // 9
        blocks = torch.zeros((num_blocks(tokens * TOP_K), EXPERTS), dtype=torch.int32, device=CUDA)
        counts, starts = torch.zeros((2, EXPERTS), dtype=torch.int32, device=CUDA)
        count_experts(experts, blocks, counts)
        run = functools.partial(kernels.redirect, experts, blocks, starts, ranks, decided, 9, slots)
        us = alone(run)
        print(f"{'':20}{tokens:>8}{us:>8.1f}", flush=True)


class Pull:
    """Pulls of this rank 0 from rank 1, whose slots lie on the same GPU."""

    def __init__(
        self,
        peer: ExpertBank,
        spare: ExpertBank,
        programs: int | None = None,
        tile: PullTile = PULL_TILE,
    ) -> None:
        topology = Topology.uniform(1, 2, peer.num_slots)
        self._records, self._programs, self._tile = spare.records(0), programs, tile
        num_spares = len(self._records)
        base = peer.records(0).data_ptr()
        self._ranks = pull_plan.Ranks.on(
            CUDA, topology, np.zeros(2, np.int64), num_spares, [base, base]
        )
        self._decided = pull_plan.Decided.on(CUDA, 2 * num_spares)
        self._decided.source[:num_spares] = peer.num_slots + torch.arange(num_spares)
        self._per_rank = peer.num_slots

    def run(self) -> None:
        """Order the pulls."""
        kernels.pull(
            0,
            0,
            self._ranks,
            self._decided,
            self._per_rank,
            self._records,
            programs=self._programs,
            tile=self._tile,
        )


def show_pull(peer: ExpertBank) -> None:
    """One and two records."""
    size = schema().record_bytes
    bound = size / NVLINK_BYTES_PER_S * 1e6
    print(f"\npull of {size / 1e6:.2f} MB from the same GPU; at 346 GB/s {bound:.0f} us a record")
    head = f"{'records':>8}{'programs':>9}{'words':>7}{'stages':>7}{'warps':>6}"
    print(f"{head}{'us':>9}{'GB/s':>8}")
    for records in (1, 2):
        spare = bank_of(records)
        for programs, tile in PULLS:
            pull = Pull(peer, spare, programs // records, tile)
            us = alone(pull.run)
            shape = f"{tile.words:>7}{tile.stages:>7}{tile.warps:>6}"
            rate = records * size / us / 1e3
            print(f"{records:>8}{programs // records:>9}{shape}{us:>9.1f}{rate:>8.0f}", flush=True)
        us = alone(PacedPull(peer, spare).run)
        print(f"{records:>8}{'paced':>29}{us:>9.1f}{records * size / us / 1e3:>8.0f}", flush=True)
        us = alone(functools.partial(spare.records(0).copy_, peer.records(0)[:records]))
        print(f"{records:>8}{'copy_':>29}{us:>9.1f}{records * size / us / 1e3:>8.0f}", flush=True)
        spare.records(0).zero_()
        Pull(peer, spare).run()
        torch.cuda.synchronize()
        assert torch.equal(spare.records(0), peer.records(0)[:records]), "the pull copies records"


class PacedPull(Pull):
    """The same programs and buffers, at about the pace of NVLink."""

    def run(self) -> None:
        """Order the pulls."""
        records, tile = self._records.view(torch.int32), PULL_TILE
        programs = num_multiprocessors(records.device) // len(records)
        source = self._ranks.bases[1]  # address of the peer's slots
        _paced_pull[(len(records), programs)](
            source,
            records,
            RECORD_WORDS=records.shape[1],
            WORDS=tile.words,
            PROGRAMS=programs,
            STAGES=tile.stages,
            SLEEP=f"nanosleep.u32 {PAUSE_NS}; mov.u32 $0, $1;",
            num_warps=tile.warps,
        )


@triton.jit
def _paced_pull(
    source: tl.tensor,
    records: tl.tensor,
    RECORD_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    SLEEP: tl.constexpr,
) -> None:
    spare, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    record = tl.load(source).to(tl.pointer_type(tl.int32)) + spare * RECORD_WORDS
    record, into = tl.multiple_of(record, 16), records + spare * RECORD_WORDS
    for turn in tl.range(tl.cdiv(RECORD_WORDS, PROGRAMS * WORDS), num_stages=STAGES):
        word = (turn * PROGRAMS + program) * WORDS + tl.arange(0, WORDS)
        found = tl.load(record + word, mask=word < RECORD_WORDS)
        tl.store(into + word, found, mask=word < RECORD_WORDS)
        tl.inline_asm_elementwise(
            SLEEP,
            "=r,r",
            [turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


class SidePull:
    """A pull on a side stream, closed before the spare slots are served."""

    def __init__(self, pull: Pull | None) -> None:
        self._pull, self._side = pull, new_stream(CUDA)

    def begin(self) -> None:
        """Fork."""
        if self._pull is not None:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._pull.run()

    def close_layer(self) -> None:
        """Join."""
        if self._pull is not None:
            torch.cuda.current_stream().wait_stream(self._side)


def received(rows: Ints) -> Received:
    """Grouped BF16 rows of slots."""
    counts = torch.from_numpy(rows.astype(np.int32)).to(CUDA)
    values = torch.randn((max(1, int(rows.sum())), HIDDEN), device=CUDA) * 0.1
    return Received(values.to(torch.bfloat16), counts, None)


def drawn_rows(rows: int, spread: float, seed: int, rule: PullRule) -> dict[str, Ints]:
    """Rows of the ranks that a layer waits for; nothing under "taker" where nothing is pulled."""
    rng = np.random.default_rng((SEED, seed))
    tokens = rng.lognormal(0, spread, (LAYER_RANKS, LAYER_SLOTS))
    tokens = np.rint(tokens * rows * tokens.size / tokens.sum()).astype(np.int64)
    expert = np.arange(tokens.size).reshape(tokens.shape)
    slots = SlotTokens(expert, np.zeros_like(tokens), tokens, tokens > 0)
    pulls = plan_pulls(slots, np.zeros(LAYER_RANKS, np.int64), rule)
    got = np.where(pulls.source != NO_SLOT, pulls.end - pulls.first, 0)
    after = np.hstack([tokens - moved_by_slot(pulls, LAYER_SLOTS), got])
    load, takes = after.sum(axis=1), got.sum(axis=1) > 0
    found = {"before": tokens[tokens.sum(axis=1).argmax()]}
    if takes.any():
        found["giver"] = after[np.where(takes, -1, load).argmax(), :LAYER_SLOTS]
        found["taker"] = after[np.where(takes, load, -1).argmax()]
    return found


def show_layer(peer: ExpertBank) -> None:
    """Products of the ranks that a layer waits for."""
    names = ("before", "giver", "merged", "present", "held", "pulled", "paced")
    names += ("exposed", "launch", "gain")
    print(f"\nlayer, us\n{'rows':>6}{'spread':>8}{'draw':>6}{'pull_rows':>10}", end="")
    print("".join(f"{name:>9}" for name in names), flush=True)
    resident, spare, wide = bank_of(LAYER_SLOTS), bank_of(1), bank_of(LAYER_SLOTS + 1)
    for rows in ROWS:
        for spread in SPREADS:
            for seed in range(DRAWS):
                for pull_rows in (0, PULL_ROWS[rows]):
                    rule = PullRule(1, 64, 64, pull_rows, 2)
                    found = drawn_rows(rows, spread, seed, rule)
                    head = f"{rows:>6}{spread:>8}{seed:>6}{pull_rows:>10}"
                    if "taker" not in found:
                        print(f"{head}  nothing is pulled", flush=True)
                        continue
                    times = timed(found, rows, peer, resident, spare, wide)
                    print(head + "".join(f"{times[name]:>9.1f}" for name in names), flush=True)


# Rows of a rank whose product takes as long as a record at 346 GB/s, by mean rows of a slot: from
# the times of ``before`` here.
PULL_ROWS = {16: 100, 64: 350, 256: 800, 768: 1000}


def timed(
    found: dict[str, Ints],
    rows: int,
    peer: ExpertBank,
    resident: ExpertBank,
    spare: ExpertBank,
    wide: ExpertBank,
) -> dict[str, float]:
    """Microseconds of each arm."""
    usual = 2 * rows
    plain, merged = (GroupedExperts(bank, usual_rows=usual) for bank in (resident, wide))
    spares = GroupedExperts(spare, usual_rows=usual)
    given = {name: received(one) for name, one in found.items()}

    def run(experts: GroupedExperts, name: str) -> None:
        experts.run(0, given[name])

    def with_pull(pull: Pull | None) -> None:
        side = SidePull(pull)
        side.begin()
        PulledExperts(plain, spares, LAYER_SLOTS, side).run(0, given["taker"])

    held, pulled = Pull(peer, spare, *BEFORE), Pull(peer, spare)
    paced = PacedPull(peer, spare)
    times = in_turns(
        {
            "before": lambda _: run(plain, "before"),
            "giver": lambda _: run(plain, "giver"),
            "merged": lambda _: run(merged, "taker"),
            "present": lambda _: with_pull(None),
            "held": lambda _: with_pull(held),
            "pulled": lambda _: with_pull(pulled),
            "paced": lambda _: with_pull(paced),
        }
    )
    times["exposed"] = times["paced"] - times["present"]
    times["launch"] = times["present"] - times["merged"]
    times["gain"] = times["before"] - max(times["giver"], times["paced"])
    return times


def main() -> None:
    """Run the parts of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ("plan", "redirect", "pull", "layer")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    print(torch.cuda.get_device_name(), torch.__version__)
    peer = bank_of(LAYER_SLOTS)
    if "plan" in args.parts:
        show_plan()
    if "redirect" in args.parts:
        show_redirect()
    if "pull" in args.parts:
        show_pull(peer)
    if "layer" in args.parts:
        show_layer(peer)


if __name__ == "__main__":
    main()
