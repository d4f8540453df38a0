"""What a split of each batch brings, and what it costs: recorded routing, unseen windows.

    python -m benchmarks.ranks.batch_split balance [--tokens 64 256]
    python -m benchmarks.ranks.batch_split device [--tokens 32 128 512 1024]
    python -m benchmarks.ranks.batch_split rows && python -m benchmarks.ranks.batch_split experts
    torchrun --nproc-per-node 2 -m benchmarks.ranks.batch_split exchange

"balance" needs no GPU; "device" times the kernels on one, "exchange" the exchange of counts over a
collective on several, "experts" the experts on the rows that "rows" wrote. Each has a file here.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.ranks.batch_split.balance import show_balance
from benchmarks.ranks.batch_split.device import show_device, show_exchange
from benchmarks.ranks.batch_split.rows import show_experts, write_rows
from eplb.shares.batch import ROUNDS


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("what", choices=("balance", "device", "rows", "experts", "exchange"))
    parser.add_argument("--tokens", type=int, nargs="+", help="of a rank, instead of the usual")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--order", choices=("recorded", "mixed"), default="recorded")
    parser.add_argument("--file", type=Path, default=Path("rows.json"))
    asked = parser.parse_args()
    if asked.what == "balance":
        show_balance(asked.tokens or [64, 256], asked.rounds, asked.order)
    elif asked.what == "device":
        show_device(asked.tokens or [32, 128, 512, 1024])
    elif asked.what == "rows":
        write_rows(asked.file)
    elif asked.what == "experts":
        show_experts(asked.file)
    else:
        show_exchange()


if __name__ == "__main__":
    main()
