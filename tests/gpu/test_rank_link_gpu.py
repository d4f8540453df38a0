"""Bytes of a GPU's live slots over the network and into a GPU, through pinned memory."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch

from rebalance.weights.link.link_settings import RankLinkSettings
from rebalance.weights.rank_link import GroupName, OtherRanks, Served, SlotPart, serve_slots
from runtime.experts import ExpertBank, ExpertSchema, PlainArena, bank_bytes

SCHEMA = ExpertSchema.swiglu(1024, 768)  # 9.4 MB: several pieces, and several chunks
SIZE, CHUNK = SCHEMA.record_bytes, 2 * 2**20
GROUP = GroupName("run", 0)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def links() -> RankLinkSettings:
    host = f"127.{1 + os.getpid() % 250}.78.1"
    return RankLinkSettings(((host, 23725), (host, 23726)), secret=b"of ranks that are tested")


def gpu_bank() -> ExpertBank:
    arena = PlainArena(bank_bytes(SCHEMA, 1, 2, 1), torch.device("cuda", 0))
    return ExpertBank(SCHEMA, 1, 2, num_staging=1, arena=arena)


def test_record_is_copied_to_another_gpu_while_kernels_run() -> None:
    source, receiver = gpu_bank(), gpu_bank()
    source.live(0, 1).copy_(torch.randint(0, 256, (SIZE,), dtype=torch.uint8))
    torch.cuda.synchronize()
    served = Served(np.array([[-1, 5]], dtype=np.int32), 0, is_open=True)
    settings, into = links(), receiver.staging(0)
    busy = torch.randn(4096, 4096, device="cuda")
    with (
        closing(serve_slots(settings, 1, GROUP, source, lambda: served)),
        closing(OtherRanks(settings, 0, GROUP, SIZE)) as asks,
    ):
        whole = SlotPart(0, 0, 1, 5, 0, SIZE)
        landed = []
        for offset in range(0, SIZE, CHUNK):
            busy = busy @ busy  # of the compute stream: the copies neither wait for it nor hold it
            num_bytes = min(CHUNK, SIZE - offset)
            part = replace(whole, offset=offset, num_bytes=num_bytes)
            landed.append(asks.fetch(1, part, into[offset : offset + num_bytes]))
        while not all(one.is_complete() for one in landed):
            pass

    assert len(landed) > 2  # both bounces were used, and one of them twice
    assert len(landed) > 2  # both halves of the pinned memory, and one of them twice
    torch.cuda.synchronize()
    assert torch.equal(into, source.live(0, 1))
