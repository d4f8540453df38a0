"""``eplb shadow``: this planner beside an unmodified engine, with observation only.

``EngineRecorder`` uses SGLang's record endpoints: it starts recording and asks for a dump, which
the engine writes itself. The answer names no file: the folder that the engine writes into is
watched. Two kinds of engines are refused before anything is asked of them. A dump empties the
recorder, and the balancer of an engine with ``--enable-eplb`` counts with the same one. An engine
without the flag ``--expert-distribution-recorder-mode`` has no recorder, and its scheduler does not
catch the exception that a request then raises.

Source: the wheel of sglang 0.5.23: ``srt/entrypoints/http_server.py``, ``srt/server_args.py``,
``srt/managers/scheduler.py`` and ``srt/eplb/expert_distribution.py``. Not run against an engine.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from api.cli.engine_files import Engine, Rule
from api.cli.options import (
    FileOptions,
    LayerOptions,
    Redundant,
    ReportOptions,
    RoutingOptions,
    Seed,
    numbers,
    with_options,
    write_json,
)
from api.engine_plan import RULES
from api.interrupts import StopSignals
from api.terminal.printable import print_plain
from api.terminal.progress import LINE_AFTER_S, Advance, progress
from eplb.core.bounded_json import decode_json
from eplb.core.cost import CostModel
from eplb.core.dispatch import DispatchRule
from eplb.core.model import ModelShape
from eplb.core.topology import Topology
from eplb.errors import ConfigError, counted
from eplb.policies.table import policy_named
from simulations.schemes import PlanTerms
from simulations.shadow.comparison import Comparison, Group
from simulations.shadow.report import Prices, report, table, text_below
from simulations.shadow.sources import SourceOptions, WindowSource, open_source
from telemetry.formats.table import read_placement

TIMEOUT_S = 30.0
MOST_BYTES = 4 * 2**20
INFO = ("/server_info", "/get_server_info")  # newer releases, older ones
BALANCER, MODE = "enable_eplb", "expert_distribution_recorder_mode"


class EngineRecorder:
    """The recorder of one engine.

    Args:
        url: of the engine's HTTP server.
        key: its API key; "": it has none.

    Raises:
        ConfigError: no HTTP address.
    """

    def __init__(self, url: str, key: str = "") -> None:
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError as exc:
            raise ConfigError(f"{url}: {exc}, expected http://HOST:PORT") from exc
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(f"{url} is no HTTP address, expected http://HOST:PORT")
        if parts.query or parts.fragment:
            raise ConfigError(f"{url} has a query or a fragment, expected http://HOST:PORT/PATH")
        self._path = parts.path.rstrip("/")  # of a proxy in front of several engines
        self._url, self._host, self._port = url.rstrip("/"), host, port
        self._is_tls = parts.scheme == "https"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def start(self) -> None:
        """Start recording.

        Raises:
            ConfigError: the engine does not answer, it has no recorder, or its own balancer uses
                the recorder.
        """
        balancer, mode = self._flags()
        if balancer:
            raise ConfigError(
                f"{self._url} serves with --enable-eplb, and a dump would empty the counters that "
                "it plans on: expected an engine without it, or its store (docs/engines.md)"
            )
        if not mode:
            raise ConfigError(
                f"{self._url} serves without --expert-distribution-recorder-mode, and a request to "
                "record would end its scheduler: expected the mode stat"
            )
        self._ask("POST", "/start_expert_distribution_record")

    def dump(self) -> None:
        """Ask the engine to write what it has counted.

        Raises:
            ConfigError: the engine does not answer.
        """
        self._ask("POST", "/dump_expert_distribution_record")

    def stop(self) -> None:
        """Stop recording.

        Raises:
            ConfigError: the engine does not answer.
        """
        self._ask("POST", "/stop_expert_distribution_record")

    def _flags(self) -> tuple[bool, str]:
        """Whether its own balancer is on, and the mode of its recorder; "": it has none."""
        errors = []
        for path in INFO:
            try:
                found = decode_json(self._ask("GET", path), max_bytes=MOST_BYTES)
            except (ConfigError, ValueError) as exc:
                errors.append(str(exc))
                continue
            if isinstance(found, dict) and found.keys() >= {BALANCER, MODE}:
                return bool(found[BALANCER]), str(found[MODE] or "")
            errors.append(f"{path} lacks {BALANCER} or {MODE}")
        raise ConfigError(f"{self._url} does not tell how it records: {errors[0]}")

    def _ask(self, method: str, path: str) -> bytes:
        kind: Any = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        try:
            with closing(kind(self._host, self._port, timeout=TIMEOUT_S)) as connection:
                connection.request(method, self._path + path, headers=self._headers)
                answer = connection.getresponse()
                body: bytes = answer.read(MOST_BYTES)
        except (OSError, http.client.HTTPException) as exc:
            raise ConfigError(f"{self._url}{path} cannot be reached: {exc}") from exc
        if answer.status != http.client.OK:
            raise ConfigError(f"{self._url}{path} answered {answer.status}, expected 200")
        return body


@dataclass(frozen=True)
class Watch:
    """How a source is watched."""

    # Looked at between polls: an exception amid a window would leave it judged on one side alone.
    stop: StopSignals
    poll_s: float = 10.0
    most_s: float | None = None  # None: until interrupted
    recorder: EngineRecorder | None = None
    record_every_s: float = 60.0


def run(
    source: WindowSource,
    comparison: Comparison,
    prices: Prices,
    *,
    watch: Watch | None = None,
    advance: Advance = lambda finished: None,
    on_report: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:
    """Compare all that the source gives, and return the report.

    Args:
        watch: None: read what there is, once.
        advance: gets the number of windows that are compared.
        on_report: gets the report after each poll with new windows, while the command watches.
    """

    def taken(*, is_last: bool) -> dict[str, Any] | None:
        before = comparison.num_windows
        for window in source.poll(is_last=is_last):
            comparison.add(window)
            advance(comparison.num_windows)
        if comparison.num_windows == before and not is_last:
            return None
        return report(comparison, prices, source.notes)

    with closing(source):
        if watch is not None:
            _watch(watch, lambda: taken(is_last=False), source, on_report)
        found = taken(is_last=True)
    assert found is not None, "the last poll reports"
    return found


def _watch(
    watch: Watch,
    poll: Callable[[], dict[str, Any] | None],
    source: WindowSource,
    on_report: Callable[[dict[str, Any]], None],
) -> None:
    """Poll until the time is over or the user stops it; both end with a report."""
    begun = asked = time.monotonic()
    end = float("inf") if watch.most_s is None else begun + watch.most_s
    if watch.recorder is not None:
        watch.recorder.start()
    try:
        while not watch.stop.received and time.monotonic() < end:
            if watch.recorder is not None and time.monotonic() - asked >= watch.record_every_s:
                asked = time.monotonic()
                _ask(watch.recorder.dump, source)
            if (found := poll()) is not None:
                on_report(found)
            watch.stop.wait(min(watch.poll_s, end - time.monotonic()))
    finally:
        if watch.recorder is not None:
            _ask(watch.recorder.dump, source)
            _ask(watch.recorder.stop, source)
    if watch.stop.received:
        typer.echo("stopped: what is left is read, and reported", err=True)


def _ask(call: Callable[[], None], source: WindowSource) -> None:
    """Ask the engine; one that does not answer is noted, and asked again later."""
    try:
        call()
    except ConfigError as exc:
        source.notes[f"the engine was not asked: {exc}"] = None


def _line(found: dict[str, Any]) -> str:
    if "engine" not in found or found["engine"]["imbalance_mean"] is None:
        return counted(found["windows"]["used"], "window")
    ours = found["ours"][0]
    return (
        f"{counted(found['windows']['judged'], 'window')} judged: imbalance of the engine "
        f"{found['engine']['imbalance_mean']:.3f}, ours {ours['imbalance_mean']:.3f}; "
        f"{ours['gain']['imbalance']['sentence']}; last decision {ours['last_decision']}"
    )


Plans = Enum("Plans", {"maps": "maps", "deepseek": "deepseek", "none": "none"})


@with_options
def shadow(
    places: Annotated[
        list[str], typer.Argument(help="Folder, files or store that the engine writes.")
    ],
    engine: Annotated[Engine, typer.Option(help="The engine; names its dispatch rule.")],
    layers: LayerOptions,
    stated: FileOptions,
    routing: RoutingOptions,
    given: ReportOptions,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Ranks; a store tells them.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Nodes of the ranks. Default 1.")
    ] = None,
    redundant: Redundant = None,
    also_redundant: Annotated[
        str, typer.Option(help="Other numbers of redundant experts to compare, as 0,16.")
    ] = "",
    current: Annotated[str | None, typer.Option(help="The map at the start, any format.")] = None,
    engine_plans: Annotated[
        Plans | None, typer.Option(help="The engine's placements; by default maps, else deepseek.")
    ] = None,
    engine_every: Annotated[
        int, typer.Option(min=1, max=100_000, help="Windows between replayed plans.")
    ] = 1,
    dispatch: Annotated[
        Rule | None, typer.Option(help="How the engine chooses a replica; by default its own rule.")
    ] = None,
    policy: Annotated[str, typer.Option(help="Placement policy.")] = "auto",
    past: Annotated[int, typer.Option(min=1, max=4096, help="Windows that a plan uses.")] = 16,
    every: Annotated[int, typer.Option(min=1, max=100_000, help="Windows between our plans.")] = 1,
    pay_back: Annotated[
        float, typer.Option(min=0, max=1e9, help="Seconds within which moves must pay back.")
    ] = CostModel.pay_back_s,
    expert_bytes: Annotated[
        int, typer.Option(min=0, max=2**40, help="Bytes of one expert as served.")
    ] = 0,
    windows_per_file: Annotated[
        int, typer.Option(min=1, max=4096, help="Most windows that a file becomes.")
    ] = 24,  # overlapping parts of one recording: 20 judged windows told in 8 of 8, 8 in 0 of 32
    window_steps: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="Lines of a .jsonl in a window.")
    ] = 100,
    window_seconds: Annotated[
        float, typer.Option(min=0, max=1e9, help="Serving time of a window; 0: not known.")
    ] = 0.0,
    kv_token_bytes: Annotated[
        int, typer.Option(min=0, max=2**40, help="KV cache of a token on a rank; 0: not known.")
    ] = 0,
    watch: Annotated[bool, typer.Option(help="Go on until interrupted.")] = False,
    watch_seconds: Annotated[
        float | None, typer.Option("--for", min=0, max=1e9, help="Watch for so many seconds.")
    ] = None,
    poll: Annotated[float, typer.Option(min=0.05, max=3600, help="Seconds between polls.")] = 10.0,
    record_url: Annotated[
        str | None, typer.Option(help="SGLang server to ask for dumps while watching.")
    ] = None,
    record_every: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds between dumps asked for.")
    ] = 60.0,
    record_key_file: Annotated[Path | None, typer.Option(help="File of its API key.")] = None,
    seed: Seed = 0,
) -> None:
    """Price this planner's decisions against the engine's own, on the same windows of its load.

    Nothing is written to the engine or its store. Each window is judged before it is planned on.
    """
    policy_named(policy)
    named = layers.shape()
    reading = stated.reading(
        layers.model,
        named,
        max_windows=windows_per_file,
        num_redundant=redundant,
        **vars(routing),
    )
    source = open_source(places, SourceOptions(reading, stated.input_format, window_steps, ranks))
    recorder = _recorder(record_url, record_key_file)
    is_watching = watch or watch_seconds is not None
    if recorder is not None and not is_watching:
        raise ConfigError("--record-url asks for dumps while watching, expected --watch or --for")
    topology, told = _system_of(source, ranks, nodes)
    shape = named or told
    if shape is not None and expert_bytes:
        shape = replace(shape, expert_bytes=expert_bytes)
    terms = PlanTerms(
        topology,
        shape,
        cost=CostModel(pay_back_s=pay_back),
        seed=seed,
        past_windows=past,
        dispatch=DispatchRule(dispatch.value) if dispatch else RULES[engine.value],
    )
    group = Group(
        terms,
        redundant,
        policy,
        engine_plans.value if engine_plans else "auto",
        engine_every,
        every,
        numbers("--also-redundant", also_redundant, least=0) if also_redundant else (),
        expert_bytes,
        read_placement(current, reading).placement if current else None,
    )
    watched = None
    if is_watching:
        watched = Watch(StopSignals(), poll, watch_seconds, recorder, record_every)

    def on_report(found: dict[str, Any]) -> None:
        if given.output is not None:
            write_json(given.output, found)
        if not given.json_output:
            typer.echo(_line(found))

    with progress(
        "windows",
        is_shown=not (is_watching or given.json_output),
        line_after_s=None if is_watching else LINE_AFTER_S,
    ) as advance:
        found = run(
            source,
            Comparison(group, source.skips),
            Prices(window_seconds, kv_token_bytes),
            watch=watched,
            advance=advance,
            on_report=on_report,
        )

    def show() -> None:
        tables = [table(found).for_terminal()] if "engine" in found else []
        print_plain(*tables, *text_below(found))

    given.give(found, show)
    if "engine" not in found:
        raise typer.Exit(2)


def _recorder(url: str | None, key_file: Path | None) -> EngineRecorder | None:
    if url is None:
        return None
    try:
        key = key_file.read_text(encoding="utf-8").strip() if key_file else ""
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{key_file} cannot be read: {exc}") from exc
    return EngineRecorder(url, key)


def _system_of(
    source: WindowSource, ranks: int | None, nodes: int | None
) -> tuple[Topology, ModelShape | None]:
    """The engine's ranks and model: as the source tells them, else as the user does."""
    told = source.system()
    if told is not None:
        stated = (told.topology.num_ranks, told.topology.num_nodes)
        if (ranks or stated[0], nodes or stated[1]) != stated:
            raise ConfigError(
                f"--ranks {ranks} --nodes {nodes}, the source has {counted(stated[0], 'rank')} on "
                f"{counted(stated[1], 'node')}"
            )
        return told.topology, told.model
    if ranks is None:
        raise ConfigError("the source does not tell the ranks, expected --ranks")
    if ranks % (nodes or 1):
        raise ConfigError(f"{ranks} ranks on {nodes} nodes, expected as many on each")
    return Topology.uniform(nodes or 1, ranks // (nodes or 1), 1), None
