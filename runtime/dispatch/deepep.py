"""The DeepEP dispatcher. The only file that imports deep_ep, and it does so late.

Both of DeepEP's modes have buffers of their own here, so a server that does prefill and decode in
one process may alternate them. Facts about the library are those of release v1.2.1
(deep_ep/buffer.py): slots are its "experts", their number is divisible by the ranks, ids are int64
with -1 for none, and the low-latency mode takes at most a fixed number of tokens from each rank.

Shapes:  T tokens of this rank, K top-k, H hidden, C slots of this rank, M places of a slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Received, first_sentence
from runtime.group.agreement import gathered

PREFILL_SMS = 24  # multiprocessors that normal mode may take; even, as the library demands


def load_deep_ep() -> Any:
    """Import deep_ep.

    Raises:
        ConfigError: it is not installed, or not in a way that works here.
    """
    try:
        import deep_ep
    except ImportError as exc:
        raise ConfigError(
            f"deep_ep cannot be imported ({exc}); install it by its own instructions, "
            "or choose the dispatcher all_to_all"
        ) from exc
    if not hasattr(deep_ep, "Buffer"):
        raise ConfigError("deep_ep has no Buffer, expected release 1.2 or another of its line")
    return deep_ep


def make_buffer(deep_ep: Any, group: dist.ProcessGroup, **settings: Any) -> Any:
    """Make a ``deep_ep.Buffer`` after checks that all ranks pass or fail alike.

    Raises:
        ConfigError: the library was built without what these settings need, or the GPUs cannot
            reach each other.
    """
    try:
        return deep_ep.Buffer(group, explicitly_destroy=True, **settings)
    except (RuntimeError, AssertionError) as exc:
        mode = "low-latency" if settings.get("low_latency_mode") else "normal"
        raise ConfigError(
            f"deep_ep cannot serve {mode} mode here ({first_sentence(exc)}), expected GPUs that "
            "reach each other and, for low latency, a build with NVSHMEM"
        ) from exc


@dataclass(frozen=True)
class DeepEPShape:
    """Settings that must be equal on every rank."""

    topology: Topology
    hidden: int
    top_k: int
    max_tokens: int  # of one rank in one low-latency step

    def check(self, group: dist.ProcessGroup) -> None:
        """Refuse, on every rank, a shape that DeepEP cannot serve or that ranks disagree on.

        Raises:
            ConfigError: slots that differ by rank, or another shape on another rank.
        """
        slots = self.topology.slots_of_rank
        if (slots != slots[0]).any():
            raise ConfigError(
                f"ranks have {sorted(set(slots.tolist()))} slots, DeepEP expects the same number"
            )
        mine = [self.topology.num_slots, self.hidden, self.top_k, self.max_tokens]
        found = gathered(mine, group)
        if any(other != mine for other in found):
            raise ConfigError(
                f"ranks disagree on (slots, hidden, top_k, max_tokens): {found}, expected the same"
            )


class DeepEPNormal:
    """``deep_ep.Buffer`` in normal mode: any number of tokens, for prefill.

    A token goes once to each rank that holds any of its slots; here it becomes one row for each
    of them, and the weighted rows are summed again before they go back.
    """

    def __init__(self, shape: DeepEPShape, group: dist.ProcessGroup, counter: SlotCounter) -> None:
        deep_ep = load_deep_ep()
        shape.check(group)
        self._shape, self._counter = shape, counter
        self._num_slots = int(shape.topology.slots_of_rank[0])
        deep_ep.Buffer.set_num_sms(PREFILL_SMS)
        row_bytes = shape.hidden * 2
        configs = (
            deep_ep.Buffer.get_dispatch_config(group.size()),
            deep_ep.Buffer.get_combine_config(group.size()),
        )
        num_bytes = max(c.get_nvl_buffer_size_hint(row_bytes, group.size()) for c in configs)
        self._buffer = make_buffer(deep_ep, group, num_nvl_bytes=num_bytes)
        self.steps = 0

    def forget_steps(self) -> None:
        """Count from zero again."""
        self.steps = 0

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send each token once to every rank that it needs."""
        if layer == 0:
            self.steps += 1
        per_rank, _, per_slot, is_in_rank, _ = self._buffer.get_dispatch_layout(
            slots, self._shape.topology.num_slots
        )
        arrived, local, arrived_weights, counts, handle, _ = self._buffer.dispatch(
            tokens,
            topk_idx=slots,
            topk_weights=weights.float(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_slot,
        )
        flat = local.flatten()
        order = torch.argsort(torch.where(flat >= 0, flat, self._num_slots), stable=True)
        order = order[: sum(counts)]
        received = torch.tensor(counts, dtype=torch.int32, device=tokens.device)
        self._counter.add(layer, received)
        ticket = (order, arrived_weights.flatten()[order], local.shape, handle)
        return Received(arrived[order // local.shape[1]], received, ticket)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Weigh and sum each token's rows of this rank, then sum over ranks at its source."""
        order, weights, (num_tokens, top_k), handle = received.ticket
        # Each pair has its own place, so the sum over k has one order whatever arrived first.
        per_pair = results.new_zeros((num_tokens * top_k, results.shape[1]))
        per_pair[order] = (results * weights[:, None]).to(results.dtype)
        per_pair = per_pair.view(num_tokens, top_k, results.shape[1])
        per_token = per_pair.sum(dim=1, dtype=torch.float32)
        combined, _, _ = self._buffer.combine(per_token.to(results.dtype), handle)
        output: torch.Tensor = combined
        return output

    def close(self) -> None:
        """Release the buffers."""
        self._buffer.destroy()


class DeepEPLowLatency:
    """``deep_ep.Buffer`` in low-latency mode: few tokens, fixed shapes, for decode in CUDA graphs.

    Rows arrive padded, M places for each slot; the dispatch kernel adds what arrived to the
    counters itself.
    """

    def __init__(
        self,
        shape: DeepEPShape,
        group: dist.ProcessGroup,
        counter: SlotCounter,
        *,
        use_fp8: bool = False,
    ) -> None:
        deep_ep = load_deep_ep()
        shape.check(group)
        self._shape, self._counter, self._use_fp8 = shape, counter, use_fp8
        num_slots = shape.topology.num_slots
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
            shape.max_tokens, shape.hidden, group.size(), num_slots
        )
        self._buffer = make_buffer(
            deep_ep,
            group,
            num_rdma_bytes=num_bytes,
            low_latency_mode=True,
            num_qps_per_rank=num_slots // group.size(),
        )
        self.steps = 0

    def forget_steps(self) -> None:
        """Count from zero again."""
        self.steps = 0

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send every (token, slot) pair into its place.

        Raises:
            ConfigError: more tokens than the buffers hold.
        """
        if layer == 0:
            self.steps += 1
        if len(tokens) > self._shape.max_tokens:
            raise ConfigError(
                f"layer {layer}: {len(tokens)} tokens in one step, "
                f"expected at most {self._shape.max_tokens}, what the buffers were made for"
            )
        arrived, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            tokens,
            slots,
            self._shape.max_tokens,
            self._shape.topology.num_slots,
            cumulative_local_expert_recv_stats=self._counter.row(layer),
            use_fp8=self._use_fp8,
        )
        rows, scales = arrived if self._use_fp8 else (arrived, None)
        ticket = (handle, slots, weights.float())
        return Received(rows, counts, ticket, scales)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results back; the kernel weighs and sums at the source."""
        handle, slots, weights = received.ticket
        combined, _, _ = self._buffer.low_latency_combine(results, slots, weights, handle)
        output: torch.Tensor = combined
        return output

    def replayed(self) -> None:
        """Note that a captured graph ran a step: Python did not see its dispatch."""
        self.steps += 1

    def close(self) -> None:
        """Release the buffers."""
        self._buffer.destroy()
