"""How well the next window can be forecast, on recorded load: the skill of each way.

    python -m benchmarks.planner.forecast [--seeds 3] [--most 32]

Skill is the part of persistence's error that a forecaster saves: 0 is no better than "as the last
window", below 0 is worse. It is told of the distance between shares (Jensen-Shannon), of the tokens
that went elsewhere than said, and of imbalance above 1 under a plan made from the forecast. Every
forecaster is judged on the later half of the windows and has learnt on the earlier half.

Long series are put together from real parts: production request rates of clients (ServeGen) times
recorded routing, each client given one subject or request by lot (the seed), which likely shows
more drift than a client that mixes subjects. Tokens of a window are independent draws. Short
series are recorded token by token. The last two tables are drawn: how often a history that does
not change shows a change, and what forgetting the load before a change saves.

Traces lie where EPLB_DATA points, or at ../shared/data beside the repository.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from eplb import LoadHistory, Topology
from simulations import Scenario, Workload, generate, load_trace, replay
from telemetry.drift.detector import last_change
from telemetry.forecast.backtest import choose_forecaster

DATA = Path(os.environ.get("EPLB_DATA", Path(__file__).parents[3] / "shared" / "data"))
WINDOW_TOKENS = 65_536
A_DAY = 144  # windows of ten minutes
GPT_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)
LITE_RANKS = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=9)


@dataclass(frozen=True)
class Series:
    """A stretch of load, made anew for each seed."""

    name: str
    make: Callable[[int], LoadHistory]
    topology: Topology
    period: int | None = None  # windows in a day
    is_drawn: bool = True  # whether a seed changes anything


def subjects() -> NDArray[np.float64]:
    """[P, L, E] routing of gpt-oss-20b decode by subject, shares."""
    frequency = np.load(DATA / "gptoss20b_subject_frequency.npz")["frequency"].astype(np.float64)
    return frequency / frequency.sum(axis=2, keepdims=True)


def lite_requests() -> NDArray[np.float64]:
    """[P, L, E] routing of DeepSeek-V2-Lite prefill by request, shares; two domains."""
    found = []
    for domain in ("intent", "summary"):
        trace = np.load(DATA / f"dsv2lite_{domain}.npz")
        ends = np.cumsum(trace["request_len"])[:-1]
        for ids in np.split(trace["expert_ids"], ends, axis=1):
            counts = np.stack([np.bincount(layer.ravel(), minlength=64) for layer in ids])
            found.append(counts / counts.sum(axis=1, keepdims=True))
    return np.array(found)


def clients_times_routing(
    rates: str, profiles: NDArray[np.float64], top_k: int, seed: int
) -> LoadHistory:
    """Real rates of clients, each of which asks for one profile, drawn by lot."""
    rng = np.random.default_rng(seed)
    rate = np.load(DATA / f"servegen_{rates}.npz")["rate"].astype(np.float64)  # [clients, T]
    asked = rng.integers(len(profiles), size=len(rate))
    mix = rate / rate.sum(axis=0)
    tokens = np.empty((rate.shape[1], *profiles.shape[1:]), dtype=np.int64)
    for window, shares in enumerate(mix.T):
        wanted = np.einsum("c,cle->le", shares, profiles[asked])
        tokens[window] = rng.multinomial(WINDOW_TOKENS * top_k, wanted / wanted.sum(1)[:, None])
    return LoadHistory(tokens)


def recorded(name: str, window_tokens: int, num_experts: int) -> LoadHistory:
    return load_trace(DATA / f"{name}.npz", window_tokens=window_tokens, num_experts=num_experts)


def all_series() -> Iterator[Series]:
    gpt, lite = subjects(), lite_requests()
    for rates, period in (("deepseek_r1", None), ("m_large", A_DAY)):
        yield Series(
            f"gpt-oss-20b x {rates}, 10 min",
            lambda seed, rates=rates: clients_times_routing(rates, gpt, 4, seed),
            GPT_RANKS,
            period,
        )
    yield Series(
        "V2-Lite x m_large, 10 min",
        lambda seed: clients_times_routing("m_large", lite, 6, seed),
        LITE_RANKS,
        A_DAY,
    )
    yield Series(
        "gpt-oss-20b decode, 1024 tokens",
        lambda _: recorded("gptoss20b_decode", 1024, 32),
        GPT_RANKS,
        is_drawn=False,
    )
    for domain in ("intent", "summary"):
        yield Series(
            f"V2-Lite {domain}, 256 tokens",
            lambda _, domain=domain: recorded(f"dsv2lite_{domain}", 256, 64),
            LITE_RANKS,
            is_drawn=False,
        )


def skill_rows(series: Series, seeds: int, most: int) -> Iterator[tuple[str, ...]]:
    """One row for each forecaster: medians over the seeds."""
    found: dict[str, list[dict[str, float]]] = {}
    chosen: list[str] = []
    for seed in range(seeds if series.is_drawn else 1):
        choice = choose_forecaster(
            series.make(seed), topology=series.topology, period=series.period, most=most, seed=seed
        )
        chosen.append(choice.forecaster.name)
        for row in choice.rows():
            found.setdefault(row["forecaster"], []).append(row)

    def median(name: str, key: str) -> float:
        return float(np.median([row[key] for row in found[name]]))

    for name in sorted(found, key=lambda name: -median(name, "skill_balance")):
        yield (
            name,
            f"{median(name, 'distance'):.4f}",
            f"{median(name, 'skill_distance'):+.2f}",
            f"{median(name, 'skill_tokens'):+.2f}",
            f"{median(name, 'imbalance'):.4f}",
            f"{median(name, 'skill_balance'):+.2f}",
            f"{chosen.count(name)} of {len(chosen)}" if name in chosen else "",
        )


STEADY = {
    "independent draws": {"domains": 1, "dispersion": 1.0},
    "256 requests of 4 domains": {"domains": 4, "dispersion": 30.0, "requests": 256},
    "32 requests of 1 domain": {"domains": 1, "dispersion": 30.0, "requests": 32},
    "32 requests of 4 domains": {"domains": 4, "dispersion": 30.0, "requests": 32},
}


def alarm_rows(draws: int) -> Iterator[tuple[str, ...]]:
    """How often steady load shows a change, and a switch in the last window is seen."""
    for name, drawn in STEADY.items():
        size = {"layers": 2, "experts": 32, "windows": 64, "drift": 0.0, "tokens": 4096}
        made = [generate(Workload("gamma", **size, **drawn), seed).tokens for seed in range(draws)]
        row = [name]
        for length in (8, 16, 32):
            looks = [part for one in made for part in np.split(one, 64 // length)]
            alarms = sum(last_change(LoadHistory(look)) is not None for look in looks)
            seen = 0
            for before, after in zip(made, made[1:] + made[:1], strict=True):
                change = last_change(LoadHistory(np.concatenate([before[: length - 1], after[:1]])))
                seen += change is not None and change.index == length - 1
            row += [f"{alarms / len(looks):.1%} of {len(looks)}", f"{seen / draws:.0%}"]
        yield tuple(row)


def switch_rows(seeds: int) -> Iterator[tuple[str, ...]]:
    """What forgetting the load before a change saves: three switches in 80 windows."""
    topology = Topology.uniform(num_nodes=1, ranks_per_node=8, slots_per_rank=5)
    size = {"layers": 4, "experts": 32, "windows": 20, "drift": 0.0, "tokens": 8192}
    for name, drawn in STEADY.items():
        for cuts in (False, True):
            found = []
            for first in range(0, 4 * seeds, 4):
                parts = [
                    generate(Workload("gamma", **size, **drawn), seed).tokens
                    for seed in range(first, first + 4)
                ]
                load = LoadHistory(np.concatenate(parts))
                scenario = Scenario(load, topology, past_windows=4, cut_at_change=cuts)
                found.append(replay(scenario, "auto"))
            # A switch comes with window 20: it is planned on after that, and serves from 21 on.
            after = [[one.per_window[at : at + 4].mean() for at in (20, 40, 60)] for one in found]
            yield (
                name,
                "from the change on" if cuts else "4 windows alike",
                f"{np.median([len(one.rebalances) for one in found]):.0f}",
                f"{np.median([one.moves for one in found]):.0f}",
                f"{np.median([one.per_window.mean() for one in found]):.4f}",
                f"{np.median(np.mean(after, axis=1)):.4f}",
            )


def show(console: Console, title: str, headings: str, rows: Iterator[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1))
    for number, heading in enumerate(headings.split("|")):
        table.add_column(heading, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="maps of clients to routing")
    parser.add_argument("--most", type=int, default=32, help="windows judged in a series")
    parser.add_argument("--draws", type=int, default=50, help="steady histories of 64 windows")
    arguments = parser.parse_args()
    console = Console(width=120)
    console.print(
        f"{datetime.now(UTC):%Y-%m-%d} python {sys.version.split()[0]} numpy {np.__version__} "
        f"seeds {arguments.seeds} windows judged {arguments.most}"
    )
    headings = "forecaster|distance|skill|skill, tokens|imbalance|skill, balance|chosen"
    if not DATA.is_dir():
        console.print(f"skipped: real traces are not at {DATA}: set EPLB_DATA")
    for series in all_series() if DATA.is_dir() else ():
        rows = skill_rows(series, arguments.seeds, arguments.most)
        show(console, series.name, headings, rows)
    headings = "no change|8: alarms|switch seen|16: alarms|switch seen|32: alarms|switch seen"
    title = "Changes seen, by windows looked at; stated false alarms: 1 %"
    show(console, title, headings, alarm_rows(arguments.draws))
    headings = "windows of|plans look at|rebalances|moves|imbalance|4 windows after a switch"
    show(console, "Three switches of load in 80 windows", headings, switch_rows(arguments.seeds))


if __name__ == "__main__":
    main()
