"""What a failure costs, which batch to take, and attention on ranks of its own."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from eplb import ModelShape, Placement, Topology
from eplb.core.kernels import kernel_for
from eplb.errors import ConfigError
from simulations.failures import failures_of
from simulations.pages.document import ReportPage
from simulations.recommend import MemoryModel, Question, recommend
from simulations.replay import Scenario
from simulations.report import TextTable
from simulations.step_time import StepModel, hardware_named
from simulations.windows import WindowSeries
from telemetry.formats.table import read_placement
from telemetry.formats.types import ReadOptions

MODEL = ModelShape((0, 1), 8, 4, 7168, 2048)
CARD = hardware_named("h200")
KERNEL = kernel_for("h200", "bf16", None, is_prefill=False)
FOUR = Topology.uniform(num_nodes=2, ranks_per_node=2, slots_per_rank=3)
# Experts 0 to 3 have a replica on the other node, 4 to 7 have none.
ROW = [0, 1, 4, 2, 3, 5, 0, 1, 6, 2, 3, 7]
HELD = Placement(np.tile(np.array(ROW), (2, 1)), num_experts=8, generation=1)
ROWS_IN_ORDER = np.tile(np.arange(8), (2, 1))
WINDOW = np.tile(np.array([20, 20, 20, 20, 10, 30, 10, 10]), (2, 1))
LOAD = WindowSeries(2, 8, lambda: (WINDOW.copy() for _ in range(4)))


def test_loss_of_a_rank_names_the_one_with_most_tokens_of_sole_copies() -> None:
    rank, node = failures_of(Scenario(FOUR, MODEL, load=LOAD), HELD)

    # Rank 1 alone has expert 5, which gets 30 of the 140 tokens of each of two layers.
    assert rank.name == "rank 1 lost, the worst of 4"
    assert (rank.uncovered, rank.unserved) == (2, pytest.approx(30 / 140))
    assert rank.repaired_imbalance is not None
    assert rank.moves >= 2
    assert rank.bytes == rank.moves * MODEL.expert_bytes
    assert "without a slot: 21.4% of the tokens are not served" in rank.sentence()
    assert node.name == "node 0 lost, the worst of 2"
    assert node.unserved == pytest.approx(40 / 140)


def test_loss_that_leaves_too_few_slots_cannot_be_repaired() -> None:
    _, node = failures_of(Scenario(FOUR, MODEL, load=LOAD), HELD)

    # 6 slots are left for 8 experts.
    assert node.repaired_imbalance is None
    assert "cannot be repaired: found 6 slots" in node.sentence()


def test_one_rank_has_no_failure_to_survive() -> None:
    one = Topology.uniform(num_nodes=1, ranks_per_node=1, slots_per_rank=8)

    assert failures_of(Scenario(one, MODEL, load=LOAD), Placement(ROWS_IN_ORDER, 8)) == []


def test_slow_network_link_makes_steps_longer_and_leaves_balance() -> None:
    step = StepModel(MODEL, FOUR, CARD, KERNEL)
    scenario = Scenario(FOUR, MODEL, load=LOAD, step_model=step, tokens_per_step=4096.0)

    found = failures_of(scenario, HELD)

    network = found[-1]
    assert network.name == "a network link at half its rate"
    assert network.slower is not None
    assert 0.0 < network.slower < 1.0
    assert network.imbalance == found[-2].imbalance
    assert network.repaired_imbalance is None


def question(spare_bytes: float = 4e9, **changes: object) -> Question:
    """Four ranks, the hot expert 9 times as busy, and so much KV cache."""
    window = np.full((2, 8), 1000, dtype=np.int64)
    window[:, 0] *= 9
    windows = WindowSeries(2, 8, lambda: (window.copy() for _ in range(6)))
    weights = 2 * MODEL.num_layers * MODEL.expert_bytes
    memory = MemoryModel(CARD, MODEL, 1.0, CARD.memory_bytes - weights - spare_bytes, 1000.0)
    asked = Question(
        windows,
        memory,
        KERNEL,
        (4,),
        redundant=(1,),
        intervals=(1,),
        context=1000,
        most_sequences=3000,
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def test_batches_of_the_best_candidate_grow_to_what_its_memory_allows() -> None:
    answer = recommend(question())

    sizes = [one.sequences for one in answer.batches]
    assert sizes == [2**power for power in range(12)] + [3000]
    last = answer.batches[-1]
    assert last.planned_ms == pytest.approx(answer.best.step_us / 1000)
    assert last.perfect_ms <= last.planned_ms < last.none_ms
    assert last.tokens_per_expert == 3000 * 4 * 4 / 8


def test_sentence_tells_from_which_batch_on_balancing_pays() -> None:
    answer = recommend(question())
    (text,) = (one for one in answer.sentences() if one.startswith("balancing gains"))

    first = int(text.split()[12])
    gains = {one.sequences: one.gain for one in answer.batches}
    assert all(gain >= 0.01 for size, gain in gains.items() if size >= first)
    assert gains[first // 2] < 0.01


def test_attention_ranks_hold_the_cache_and_count_among_the_ranks() -> None:
    answer = recommend(question(attention_ranks=(0, 4)))

    together, apart = (
        next(one for one in answer.candidates if one.attention_ranks == ranks) for ranks in (0, 4)
    )
    # The attention ranks have room for the weights of experts: two slots of two layers.
    weights = 2 * MODEL.num_layers * MODEL.expert_bytes
    redundant = MODEL.num_layers * MODEL.expert_bytes
    assert apart.kv_bytes - together.kv_bytes == pytest.approx(weights + redundant)
    assert apart.tokens_per_s == pytest.approx(apart.sequences / (apart.step_us / 1e6) / 2)
    assert apart.group == "EP4 and 4 attention ranks"


def test_expert_ranks_that_cannot_hold_their_slots_do_not_fit() -> None:
    small = replace(CARD, memory_bytes=MODEL.num_layers * MODEL.expert_bytes * 2.5)
    asked = question()
    memory = replace(asked.memory, hardware=small, dense_bytes=0.0)

    with pytest.raises(ConfigError, match="EP4 and 4 attention ranks with 3 slots"):
        recommend(replace(asked, memory=memory, attention_ranks=(4,)))


GENERATED = "generated:v2-lite:windows=5,tokens=20000"
MODEL_OPTIONS = ("--model", "deepseek-v2-lite", "--hardware", "h100", "--ranks", "8")


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


class Read(HTMLParser):
    """Text by tag, and every address that the page would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self._tag = ""
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag = tag
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        self.text.setdefault(self._tag, []).append(data)


def test_page_of_a_recommendation_begins_with_it_and_has_its_batches(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    out = tmp_path / "out.html"

    asked = command(
        "recommend",
        GENERATED,
        *MODEL_OPTIONS,
        "--redundant-per-rank",
        "0",
        "--every",
        "2",
        "--html",
        str(out),
    )

    assert asked.exit_code == 0, asked.stderr
    page = Read(out)
    assert page.text["li"][0].startswith("recommended: EP8")
    assert "Tokens a second by batch" in page.text["h2"]
    assert page.addresses == []
    assert "batches of EP8" in asked.stdout


def test_figures_of_a_page_save_themselves_under_names_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page = tmp_path / "out.html"

    asked = command("simulate", GENERATED, *MODEL_OPTIONS, "--html", str(page))

    assert asked.exit_code == 0, asked.stderr
    titles = [title for title in Read(page).text["h2"] if title != "Inputs"]
    names = {re.sub(r"\W+", "-", title.lower()) for title in titles}
    assert len(names) == 7
    assert set(re.findall(r'"filename": ?"([^"]*)"', page.read_text())) == names


def test_long_table_comes_after_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rows = [(str(number),) for number in range(40)]
    page = ReportPage(
        "title", [], [TextTable(["short"], rows[:2]), TextTable(["long"], rows)], [], {}
    )

    page.write(tmp_path / "out.html")

    text = (tmp_path / "out.html").read_text()
    figures = text.index('<div class="figures">')
    assert text.index("<th>short</th>") < figures < text.index("<th>long</th>")


@pytest.mark.parametrize(
    ("command_name", "options"),
    [
        ("simulate", ("--policy", "none,auto,oracle:re-plan", "--slots", "72")),
        ("recommend", ("--redundant-per-rank", "1", "--every", "2")),
    ],
)
def test_chosen_placement_is_a_file_that_the_engine_reads(
    tmp_path: Path, command_name: str, options: tuple[str, ...]
) -> None:
    out = tmp_path / "placement.json"
    engine = ("--engine", "sglang", "--hidden-layers", "27", "--placement", str(out))

    ran = command(command_name, GENERATED, *MODEL_OPTIONS, *options, *engine)

    assert ran.exit_code == 0, ran.stderr
    assert f"placement: {out}" in ran.stdout
    ids = tuple(range(1, 27))
    read = read_placement(str(out), ReadOptions(layer_ids=ids, num_experts=64), "sglang")
    assert read.placement.slot_to_expert.shape == (26, 72)
    assert (read.placement.replica_count > 0).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--placement", "x.json"), "--placement needs --engine, expected one of: sglang"),
        (
            ("--placement", "x.json", "--engine", "eplb", "--policy", "oracle:re-plan"),
            "no policy but oracles came to the end",
        ),
    ],
)
def test_placement_that_cannot_be_written_is_one_sentence(
    arguments: tuple[str, ...], message: str
) -> None:
    ran = command("simulate", GENERATED, *arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
