"""Pages and engine files that commands write: whole, without a network, with inputs and reasons."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from api.cli.main import app
from simulations.pages.document import Page, Table
from telemetry.formats.table import read_placement
from telemetry.formats.types import ReadOptions

LOAD = "generated:v2-lite:windows=5,tokens=20000"
MODEL = ("--model", "deepseek-v2-lite", "--hardware", "h100", "--ranks", "8")


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
        "recommend", LOAD, *MODEL, "--redundant", "0", "--every", "2", "--html", str(out)
    )

    assert asked.exit_code == 0, asked.stderr
    page = Read(out)
    assert page.text["li"][0].startswith("recommended: EP8")
    assert "Tokens a second by batch" in page.text["h2"]
    assert page.addresses == []
    assert "batches of EP8" in asked.stdout


def test_pictures_are_the_figures_of_the_page(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    pytest.importorskip("matplotlib")
    page, pictures = tmp_path / "out.html", tmp_path / "png"
    from matplotlib import image

    both = ("--html", str(page), "--png", str(pictures), "--policy", "none,auto")

    asked = command("simulate", LOAD, *MODEL, *both)

    assert asked.exit_code == 0, asked.stderr
    titles = [title for title in Read(page).text["h2"] if title != "Inputs"]
    names = {re.sub(r"\W+", "-", title.lower()) + ".png" for title in titles}
    assert len(names) == 7
    assert {path.name for path in pictures.iterdir()} == names
    for path in pictures.iterdir():
        drawn = image.imread(path)
        assert drawn.shape[:2] == (720, 1200)
        assert drawn.std() > 0.05  # not an empty canvas


def test_long_table_comes_after_the_figures(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    rows = [(str(number),) for number in range(40)]
    page = Page("title", [], [Table(["short"], rows[:2]), Table(["long"], rows)], [], {})

    page.write(tmp_path / "out.html")

    text = (tmp_path / "out.html").read_text()
    figures = text.index('<div class="figures">')
    assert text.index("<th>short</th>") < figures < text.index("<th>long</th>")


@pytest.mark.parametrize(
    ("command_name", "options"),
    [
        ("simulate", ("--policy", "none,auto,oracle:re-plan", "--slots", "72")),
        ("recommend", ("--redundant", "1", "--every", "2")),
    ],
)
def test_chosen_placement_is_a_file_that_the_engine_reads(
    tmp_path: Path, command_name: str, options: tuple[str, ...]
) -> None:
    out = tmp_path / "placement.json"
    engine = ("--engine", "sglang", "--hidden-layers", "27", "--placement", str(out))

    ran = command(command_name, LOAD, *MODEL, *options, *engine)

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
    ran = command("simulate", LOAD, *arguments)

    assert ran.exit_code == 2
    assert message in ran.stderr
