"""Times of launches on a GPU, one by one or in a replayed CUDA graph.

Steps are graphs where time counts, so that is how their parts are timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Launch = Callable[[int], object]  # told how many launches came before


def captured(run: Callable[[], object], warm_up: int = 1) -> torch.cuda.CUDAGraph:
    """Capture what is launched, after runs that compile; it may synchronise nothing."""
    for _ in range(warm_up):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def times_us(run: Callable[[], object], count: int) -> list[float]:
    """Microseconds of each of some runs in a row on the current stream, sorted."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) * 1e3 for begin, end in marks)


def replayed_us(run: Launch, launches: int, replays: int) -> list[float]:
    """Microseconds of one of some launches in a graph, for each of its replays, sorted."""

    def all_launches() -> None:
        for number in range(launches):
            run(number)

    graph = captured(all_launches)
    graph.replay()  # the first one also brings the graph to the device
    return [us / launches for us in times_us(graph.replay, replays)]
