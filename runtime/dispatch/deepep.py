"""The DeepEP dispatcher. The only file that imports deep_ep, and it does so late.

Both of DeepEP's modes have buffers of their own here, so a server that does prefill and decode in
one process may alternate them (``DeepEPByPhase``). Facts about the library are those of release
v1.2.1 (deep_ep/buffer.py): slots are its "experts", their number is divisible by the ranks, ids are
int64 with -1 for none, and the low-latency mode takes at most a fixed number of tokens from each
rank.

Shapes:  T tokens of this rank, K top-k, H hidden, C slots of this rank, M places of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from eplb.core.load import Phase
from eplb.core.topology import Topology
from eplb.errors import ConfigError
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Pending, Received
from runtime.group import first_sentence, gathered

HOST_RANKS = 8  # most ranks of one host, within which deep_ep has kernels of its own
MOST_NORMAL_SLOTS = 128  # the threads of its ``notify_dispatch`` (csrc/kernels/intranode.cu)
MOST_BYTES = 2**31 - 1  # largest buffer between hosts in normal mode (csrc/deep_ep.cpp)
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
    max_tokens: int  # tokens that one rank may have in one low-latency step

    def check(self, group: dist.ProcessGroup) -> None:
        """Refuse, on every rank, a shape that DeepEP cannot serve or that ranks disagree on.

        Raises:
            ConfigError: slots that differ by rank, a rank that is not alive, or another shape on
                another rank.
        """
        slots = self.topology.slots_of_rank
        if (slots != slots[0]).any():
            raise ConfigError(
                f"ranks have {sorted(set(slots.tolist()))} slots, DeepEP expects the same number"
            )
        if group.size() != self.topology.num_ranks:
            raise ConfigError(
                f"{group.size()} of {self.topology.num_ranks} ranks are alive, expected all: "
                "DeepEP numbers slots by the ranks of its group"
            )
        mine = [self.topology.num_slots, self.hidden, self.top_k, self.max_tokens]
        found = gathered(mine, group)
        if any(other != mine for other in found):
            raise ConfigError(
                f"ranks disagree on (slots, hidden, top_k, max_tokens): {found}, expected the same"
            )

    def check_normal(self, num_ranks: int) -> None:
        """Refuse more slots than normal mode serves within a host, where it fails at a dispatch.

        Raises:
            ConfigError: a rank has too many slots.
        """
        slots = self.topology.num_slots // num_ranks
        if num_ranks <= HOST_RANKS and slots > MOST_NORMAL_SLOTS:
            raise ConfigError(
                f"a rank has {slots} slots of a layer, expected at most {MOST_NORMAL_SLOTS}, which "
                "deep_ep's normal mode serves within a host: take more ranks or all_to_all"
            )


def normal_bytes(configs: Sequence[Any], row_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Bytes of the buffers that normal mode needs: for NVLink, and for RDMA between hosts.

    deep_ep takes each HOST_RANKS ranks in order for one NVLink domain; within one it needs no RDMA.

    Args:
        configs: deep_ep's for dispatch and for combine.
        row_bytes: of a token.
        num_ranks: of the group.

    Raises:
        ConfigError: larger buffers than deep_ep addresses.
    """
    nvl, rdma = max(one.get_nvl_buffer_size_hint(row_bytes, num_ranks) for one in configs), 0
    if num_ranks > HOST_RANKS:  # a build without NVSHMEM has no hint for RDMA
        rdma = max(one.get_rdma_buffer_size_hint(row_bytes, num_ranks) for one in configs)
    if rdma and max(nvl, rdma) > MOST_BYTES:
        raise ConfigError(
            f"deep_ep's normal mode on {num_ranks} ranks needs {nvl} bytes for NVLink and {rdma} "
            f"for RDMA at {row_bytes} bytes a token, expected at most {MOST_BYTES} of each"
        )
    return nvl, rdma


class DeepEPNormal:
    """``deep_ep.Buffer`` in normal mode: any number of tokens, for prefill.

    A token goes once to each rank that holds any of its slots; here it becomes one row for each
    of them, and the weighted rows are summed again before they go back. More than HOST_RANKS ranks
    also have a buffer for RDMA: that was read in deep_ep's source, and never run.

    Args:
        use_fp8: whether tokens travel as FP8 with a scale for every 128 columns.
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
        shape.check_normal(group.size())
        self._shape, self._counter, self._use_fp8 = shape, counter, use_fp8
        self._num_slots = int(shape.topology.slots_of_rank[0])
        deep_ep.Buffer.set_num_sms(PREFILL_SMS)
        row_bytes = shape.hidden * 2
        try:
            configs = (
                deep_ep.Buffer.get_dispatch_config(group.size()),
                deep_ep.Buffer.get_combine_config(group.size()),
            )
        except AssertionError as exc:
            raise ConfigError(
                f"deep_ep has no normal mode for a group of {group.size()} "
                f"({first_sentence(exc)}), expected one of its sizes, such as 2, 4 or 8"
            ) from exc
        nvl, rdma = normal_bytes(configs, row_bytes, group.size())
        self._buffer = make_buffer(deep_ep, group, num_nvl_bytes=nvl, num_rdma_bytes=rdma)

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send each token once to every rank; the host waits until it knows how many arrive."""
        per_rank, per_rdma_rank, per_slot, is_in_rank, _ = self._buffer.get_dispatch_layout(
            slots, self._shape.topology.num_slots
        )
        sent, local, arrived_weights, counts, handle, event = self._buffer.dispatch(
            _as_fp8(tokens) if self._use_fp8 else tokens,
            topk_idx=slots,
            topk_weights=weights.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,  # None within a host
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_slot,
            async_finish=True,
        )

        event.current_stream_wait()
        arrived, scales = sent if self._use_fp8 else (sent, None)
        flat = local.flatten()
        order = torch.argsort(torch.where(flat >= 0, flat, self._num_slots), stable=True)
        order = order[: sum(counts)]
        received = torch.tensor(counts, dtype=torch.int32, device=tokens.device)
        self._counter.add(layer, received)
        row = order // local.shape[1]
        place = torch.full_like(flat, -1)
        place[order] = torch.arange(len(order), device=order.device)
        ticket = (place.view(local.shape), arrived_weights, handle)
        return Received(arrived[row], received, ticket, None if scales is None else scales[row])

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Weigh and sum each token's rows of this rank, then sum over ranks at its source."""
        return self.begin_combine(layer, results, received).finish()

    def begin_combine(self, layer: int, results: torch.Tensor, received: Received) -> Pending:
        """Start to send the sums of this rank."""
        # Imported here: the kernel needs triton, which only GPU hosts have.
        from runtime.kernels.combine import sum_rows

        place, weights, handle = received.ticket
        per_token = results.new_empty((len(place), results.shape[1]))
        sum_rows(results, place, weights, per_token)
        combined, _, event = self._buffer.combine(per_token, handle, async_finish=True)

        def finish() -> torch.Tensor:
            event.current_stream_wait()
            output: torch.Tensor = combined
            return output

        return Pending(finish)

    def close(self) -> None:
        """Release the buffers."""
        self._buffer.destroy()


class DeepEPLowLatency:
    """``deep_ep.Buffer`` in low-latency mode: few tokens, fixed shapes, for decode in CUDA graphs.

    Rows arrive padded, M places for each slot; the dispatch kernel adds what arrived to the
    counters itself. Two buffers take turns, and a kernel clears the other one's flags: a transfer
    that begins before the last one was finished would wait without end, so it is refused.
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
        self._under_way = ""  # the transfer that was begun and not finished

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Send every (token, slot) pair into its place.

        Raises:
            ConfigError: more tokens than the buffers hold, or a transfer is under way.
        """
        self._check_idle(f"the dispatch of layer {layer}")
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
        return Received(rows, counts, (handle, slots, weights.float()), scales)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Send results back; the kernel weighs and sums at the source."""
        return self._combine(layer, results, received, is_overlapped=False)[0]

    def begin_combine(self, layer: int, results: torch.Tensor, received: Received) -> Pending:
        """Send results back, and let ``finish`` receive and sum."""
        output, hook = self._combine(layer, results, received, is_overlapped=True)
        self._under_way = f"the combine of layer {layer}"

        def finish() -> torch.Tensor:
            hook()
            self._under_way = ""
            return output

        return Pending(finish)

    def _combine(
        self, layer: int, results: torch.Tensor, received: Received, *, is_overlapped: bool
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        self._check_idle(f"the combine of layer {layer}")
        handle, slots, weights = received.ticket
        combined, _, hook = self._buffer.low_latency_combine(
            results, slots, weights, handle, return_recv_hook=is_overlapped
        )
        return combined, hook

    def _check_idle(self, what: str) -> None:
        if self._under_way:
            raise ConfigError(
                f"{what} begins while {self._under_way} is not finished, expected one transfer "
                "at a time: call finish() of what begin_combine returned"
            )

    def close(self) -> None:
        """Release the buffers."""
        self._buffer.destroy()


class DeepEPByPhase:
    """Both modes behind one dispatcher: low latency for decode, normal for everything else.

    Call ``begin_pass`` before each forward pass, with one phase on all ranks: where some ranks
    prefill and others decode, it is "mixed".
    """

    def __init__(
        self,
        shape: DeepEPShape,
        group: dist.ProcessGroup,
        counter: SlotCounter,
        *,
        use_fp8: bool = False,
    ) -> None:
        if group.size() > HOST_RANKS:
            raise ConfigError(
                f"deepep_by_phase on {group.size()} ranks, expected at most {HOST_RANKS}: between "
                "hosts both modes need NVSHMEM, which a process starts once and for one of them"
            )
        self._normal = DeepEPNormal(shape, group, counter, use_fp8=use_fp8)
        self._low_latency = DeepEPLowLatency(shape, group, counter, use_fp8=use_fp8)
        self._mode: DeepEPNormal | DeepEPLowLatency = self._normal

    def begin_pass(self, phase: Phase) -> None:
        """Choose the mode of the forward pass that begins now."""
        self._mode = self._low_latency if phase == "decode" else self._normal

    def dispatch(
        self, layer: int, tokens: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor
    ) -> Received:
        """Dispatch in the mode of this pass."""
        return self._mode.dispatch(layer, tokens, slots, weights)

    def combine(self, layer: int, results: torch.Tensor, received: Received) -> torch.Tensor:
        """Combine in the mode of this pass."""
        return self._mode.combine(layer, results, received)

    def begin_combine(self, layer: int, results: torch.Tensor, received: Received) -> Pending:
        """Start a combine in the mode of this pass."""
        return self._mode.begin_combine(layer, results, received)

    def close(self) -> None:
        """Release the buffers of both modes."""
        self._normal.close()
        self._low_latency.close()


def _as_fp8(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Imported here: the kernel needs triton, which only GPU hosts have.
    from runtime.kernels.quantise import GROUP, Quantised, quantise_rows

    values = torch.empty_like(tokens, dtype=torch.float8_e4m3fn)
    num_rows, hidden = tokens.shape
    scales = torch.empty((num_rows, hidden // GROUP), dtype=torch.float32, device=tokens.device)
    quantise_rows(tokens, Quantised(values, scales))
    return values, scales
