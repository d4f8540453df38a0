"""Whether the load of newly admitted requests forecasts the next decode window.

    python -m benchmarks.planner.prefill_led [--seen 16] [--batch 32] [--steps 32] [--time-ms 50]

A prompt tells what its answer will be about, so prefill might lead decode. No recorded routing has
prompts and answers of the same requests. Here the first 64 tokens of each recorded gpt-oss-20b
answer stand in for its prompt: they are routed when the request is admitted, and the others are
decoded after that, one a step, in a batch that is always full. Answers are the same language and
phase as their stand-in, so this is an upper end of what prompts can tell.

Each plan sees the last decode windows, 16 as the controller's, and is judged on the next. "+ w of
admitted" has also a scenario of weight w: tokens of the requests admitted in the latest window.
"next window" plans on the window itself: the limit.
"""

import argparse
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from benchmarks.planner.heldout import DATA
from eplb import Budget, Scenarios, Topology, imbalance, plan

PROMPT = 64  # tokens of an answer that stand in for its prompt
WEIGHTS = (0.1, 0.25, 0.5)
TOPOLOGY = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)

Tokens = NDArray[np.int64]


def counted(ids: NDArray[np.uint8]) -> Tokens:
    """[L, E] tokens of each expert, of ids [tokens, L, K]."""
    layers = range(ids.shape[1])
    return np.stack([np.bincount(ids[:, layer].ravel(), minlength=32) for layer in layers])


def windows(order: NDArray[np.intp], batch: int, steps: int) -> Iterator[tuple[Tokens, Tokens]]:
    """Admitted and decoded tokens [L, E] of each window, of requests in this order."""
    found = np.load(DATA / "gptoss20b_decode.npz")
    ends, ids = np.cumsum(found["request_len"]), found["expert_ids"]
    starts = ends - found["request_len"]
    waiting = [one for one in order.tolist() if ends[one] - starts[one] > PROMPT]
    active: list[list[int]] = []  # next token and end of each request
    while True:
        admitted, decoded = [], []
        for _ in range(steps):
            active = [one for one in active if one[0] < one[1]]
            while len(active) < batch and waiting:
                one = waiting.pop(0)
                admitted.append(ids[starts[one] : starts[one] + PROMPT])
                active.append([int(starts[one]) + PROMPT, int(ends[one])])
            if len(active) < batch:
                return  # nothing waits, and the batch is no longer full
            decoded.append(ids[[one[0] for one in active]])
            for one in active:
                one[0] += 1
        none = ids[:0]
        yield counted(np.concatenate([none, *admitted])), counted(np.concatenate(decoded))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--seen", type=int, default=16, help="decode windows that a plan sees")
    parser.add_argument("--time-ms", type=float, default=50.0)
    given = parser.parse_args()
    budget = Budget(time_ms=given.time_ms)
    num_requests = len(np.load(DATA / "gptoss20b_decode.npz")["request_len"])
    orders = {"recorded": np.arange(num_requests)} | {
        f"shuffled, seed {seed}": np.random.default_rng(seed).permutation(num_requests)
        for seed in range(2)
    }
    for name, order in orders.items():
        served = list(windows(order, given.batch, given.steps))
        rows: dict[str, list[float]] = {}
        for place in range(given.seen, len(served)):
            past = np.stack([decoded for _, decoded in served[place - given.seen : place]])
            admitted, following = served[place - 1][0], served[place][1]
            for weight in (0.0, *WEIGHTS):
                scenarios = None
                if weight and admitted.sum():
                    likely = np.array([weight])
                    scenarios = Scenarios(admitted[None].astype(np.float64), likely)
                found = plan(past, TOPOLOGY, budget=budget, scenarios=scenarios).target
                row = f"+ {weight:g} of admitted" if weight else "decode windows alone"
                rows.setdefault(row, []).append(float(imbalance(following, found, TOPOLOGY).mean()))
            best = plan(following, TOPOLOGY, budget=budget).target
            limit = float(imbalance(following, best, TOPOLOGY).mean())
            rows.setdefault("next window", []).append(limit)
        print(f"\n{name}: {len(served) - given.seen} windows of {given.batch * given.steps} tokens")
        base = np.array(rows["decode windows alone"])
        for row, values in rows.items():
            gain = base - np.array(values)
            error = gain.std(ddof=1) / len(gain) ** 0.5
            print(
                f"{row:<22}mean {np.mean(values):.3f}  p95 {np.quantile(values, 0.95):.3f}  "
                f"better by {gain.mean():+.4f} +- {error:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
