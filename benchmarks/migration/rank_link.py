"""A rank's live slots over loopback TCP, measured against a plain copy of as many bytes.

    python -m benchmarks.migration.rank_link [--runs 7] [--records 8]

The rank that is asked is a process of its own, and so is the plain sender. Both ways take turns in
one run, over one stream each, into memory that was used before. Records are DeepSeek-V3's experts
(7168 x 2048, FP8: 44 MB), in chunks as staging takes them. Prints one table, and the rates of each
way in the order of the runs. Seeded.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import secrets
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from statistics import median

import numpy as np
import torch

from benchmarks.migration.loopback import DEADLINE_S, plain_rate, process, send_plainly
from rebalance.stage.stage_settings import MIB, StageSettings
from rebalance.weights.link.link_settings import RankLinkSettings
from rebalance.weights.rank_link import GroupName, OtherRanks, Served, SlotPart, serve_slots
from runtime.experts import ExpertBank, ExpertSchema

SCHEMA = ExpertSchema.swiglu_fp8(7168, 2048)
GROUP = GroupName("bench", 0)
PORT = 23724
SETTINGS = (StageSettings(), StageSettings.while_serving())  # on CPUs, and on GPUs
CHUNKS = [settings.network.chunk_bytes for settings in SETTINGS]


def hold(pipe: Connection, settings: RankLinkSettings, num_records: int) -> None:
    """Be rank 1, which holds every record."""
    torch.set_num_threads(1)
    bank = ExpertBank(SCHEMA, 1, num_records, num_staging=0)
    for slot in range(num_records):
        bank.live(0, slot).fill_(slot + 1)
    served = Served(np.arange(num_records, dtype=np.int32)[None], 0, is_open=True)
    with closing(serve_slots(settings, 1, GROUP, bank, lambda: served)):
        pipe.send("ready")
        pipe.poll(DEADLINE_S)


def rate(settings: RankLinkSettings, num_records: int, chunk_bytes: int) -> float:
    """GB/s at which rank 0 takes every record, chunk by chunk."""
    size = SCHEMA.record_bytes
    into = torch.ones(size, dtype=torch.uint8)
    with closing(OtherRanks(settings, 0, GROUP, size)) as others:
        started = time.monotonic()
        for slot in range(num_records):
            for offset in range(0, size, chunk_bytes):
                part = into[offset : offset + chunk_bytes]
                others.fetch(1, SlotPart(0, 0, slot, slot, offset, len(part)), part)
        return num_records * size / (time.monotonic() - started) / 1e9


def measure(num_runs: int, num_records: int) -> dict[str, list[float]]:
    """GB/s of every way, run by run."""
    host = f"127.{1 + os.getpid() % 250}.{1 + os.getpid() // 250 % 250}.1"
    free = RankLinkSettings(
        ((host, PORT), (host, PORT + 1)), secret=secrets.token_bytes(32), bytes_per_second=math.inf
    )
    held = replace(free, addresses=((host, PORT), (host, PORT + 2)), bytes_per_second=1.25e9)
    plain_at, to_send = (host, PORT + 3), num_records * SCHEMA.record_bytes
    ways: dict[str, Callable[[], float]] = {
        "plain TCP copy over loopback, 1 stream": partial(plain_rate, plain_at, to_send, 1)
    }
    for chunk_bytes in CHUNKS:
        name = f"another rank's slots, chunks of {chunk_bytes // MIB} MiB"
        ways[name] = partial(rate, free, num_records, chunk_bytes)
    ways["  the same within 1.25 GB/s, chunks of 8 MiB"] = partial(
        rate, held, num_records, CHUNKS[0]
    )
    rates: dict[str, list[float]] = {name: [] for name in ways}
    with (
        process(hold, free, num_records),
        process(hold, held, num_records),
        process(send_plainly, plain_at, to_send),
    ):
        # A run takes 0.1 s, and one full collection of torch's modules as long: it halved a run.
        gc.collect()
        gc.freeze()
        for _ in range(num_runs):
            for name, way in ways.items():
                rates[name].append(way())
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--records", type=int, default=8)
    given = parser.parse_args()
    rates = measure(given.runs, given.records)
    plain = median(next(iter(rates.values())))
    print(f"{'rank to rank, 44 MB records':46} {'GB/s (range)':>20} {'of plain':>9}")
    for name, found in rates.items():
        spread = f"{median(found):.2f} ({min(found):.2f}..{max(found):.2f})"
        print(f"{name:46} {spread:>20} {median(found) / plain:>9.0%}")
    for name, found in rates.items():
        print(f"{name:46} GB/s by run: {' '.join(f'{one:.2f}' for one in found)}")


if __name__ == "__main__":
    main()
