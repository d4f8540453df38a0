"""One HTML file: conclusions, figures, inputs. The script is included, nothing is downloaded.

Colours follow the reader's light or dark setting; figures share the width in as many columns as
fit, one on a phone. A button of each figure saves it as a picture.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from eplb.packages import needed_for
from simulations.report import TextTable
from telemetry.written_files import write_atomically

# Told apart by people who see colours differently, on white and on black (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# The seventh line has the first one's colour and the second dash, and so on.
DASHED, SYMBOLS = ("solid", "dash", "dot"), ("circle", "square", "diamond")
STYLE = """
:root { color-scheme: light dark; --text: #1a1a1a; --soft: #555; --line: #ddd; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e6e6; --soft: #aaa; --line: #3a3a3a; --back: #161616; }
}
body { font-family: system-ui, sans-serif; margin: 0 auto; padding: 1.5rem; max-width: 128rem;
  color: var(--text); background: var(--back); line-height: 1.45; }
h1 { font-size: 1.4rem; margin: 0 0 0.2rem; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 0 0 0.2rem; }
p, li { max-width: 60rem; overflow-wrap: anywhere; }
p { margin: 0.2rem 0 0.8rem; color: var(--soft); }
ul.found { padding-left: 1.2rem; font-size: 1.05rem; }
section { min-width: 0; }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
.figures { display: grid; gap: 2rem; margin: 1.5rem 0;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.2rem 1rem; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 40rem) { body { padding: 0.8rem; } dl { grid-template-columns: 1fr; } }
"""
# Plotly draws with colours of its own: they are set again whenever the reader's setting changes.
THEME = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function paint() {
  const style = getComputedStyle(document.documentElement);
  const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
  for (const plot of document.querySelectorAll(".js-plotly-plot")) {
    const changes = { "font.color": text };
    for (const axis of ["xaxis", "yaxis"]) {
      for (const part of ["gridcolor", "zerolinecolor", "linecolor"]) {
        changes[`${axis}.${part}`] = line;
      }
    }
    Plotly.relayout(plot, changes);
  }
}
dark.addEventListener("change", paint);
addEventListener("load", paint);
"""
MOST_MARKED = 12  # marks of an axis that counts


@dataclass(frozen=True)
class Figure:
    """A plotly figure under its heading."""

    title: str
    text: str
    figure: Any


@dataclass(frozen=True)
class ReportPage:
    """What a page has, in its order."""

    title: str
    conclusions: Sequence[str]
    tables: Sequence[TextTable]
    figures: Sequence[Figure]
    inputs: dict[str, object]  # values by what they are called; the command is among them
    limits: str = "No queue and no scheduler is modelled: batches are full."

    def write(self, path: Path) -> None:
        """Write the page atomically.

        Raises:
            ConfigError: the file cannot be written.
        """
        write_atomically(path, self._html().encode())

    def _html(self) -> str:
        from plotly.offline import get_plotlyjs

        title = escape(self.title)
        # An arrow of two characters may be split between two lines.
        sentences = [sentence.replace(" -> ", " → ") for sentence in self.conclusions]
        found = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
        short, long = (
            "".join(_table(one) for one in self.tables if one.is_long is wanted)
            for wanted in (False, True)
        )
        figures = "".join(_figure(one) for one in self.figures)
        inputs = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>"
            for name, value in self.inputs.items()
        )
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{title}</title><style>{STYLE}</style><script>{get_plotlyjs()}</script></head>"
            f'<body><h1>{title}</h1><ul class="found">{found}</ul>{short}'
            f'<div class="figures">{figures}</div>{long}'
            f"<h2>Inputs</h2><dl>{inputs}</dl><p>{escape(self.limits)}</p>"
            f"<script>{THEME}</script></body></html>\n"
        )


def _table(table: TextTable) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    about = "".join(f"<p>{escape(text)}</p>" for text in (table.title, table.caption) if text)
    return f'{about}<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _figure(one: Figure) -> str:
    name = re.sub("[^a-z0-9]+", "-", one.title.lower()).strip("-")
    config = {
        "responsive": True,
        "displaylogo": False,
        "modeBarButtons": [["toImage"]],
        "toImageButtonOptions": {"format": "svg", "filename": name},
    }
    plot = one.figure.to_html(full_html=False, include_plotlyjs=False, config=config)
    return f"<section><h2>{escape(one.title)}</h2><p>{escape(one.text)}</p>{plot}</section>"


def graph_objects() -> Any:
    """Plotly, which pages are drawn with.

    Raises:
        ConfigError: it is not installed.
    """
    with needed_for("the HTML page"):
        import plotly.graph_objects as go
    return go


def framed(figure: Any, x_title: str, y_title: str) -> Any:
    """The same look for all figures; the legend is below, where a phone has room for it."""
    figure.update_layout(
        template="none",
        height=420,
        autosize=True,
        xaxis_title=x_title,
        yaxis_title=y_title,
        margin={"t": 20, "l": 60, "r": 20, "b": 60},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "y": -0.25},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#888"},
        xaxis={"automargin": True},
        yaxis={"automargin": True},
    )
    return figure


def whole_numbers(figure: Any, *, x: int = 0, y: int = 0) -> Any:
    """Axes of whole numbers; so few of them that plotly would mark halves get a mark each."""
    for update, count in ((figure.update_xaxes, x), (figure.update_yaxes, y)):
        if 0 < count <= MOST_MARKED:
            update(dtick=1)
    return figure


def colour_of(number: int) -> str:
    """The colour of a line or a bar."""
    return COLOURS[number % len(COLOURS)]


def line_of(number: int, **more: str) -> dict[str, str]:
    """A line that is told apart from the others by colour and dash."""
    dash = DASHED[number // len(COLOURS) % len(DASHED)]
    return {"color": colour_of(number), "dash": dash, **more}


def marker_of(number: int, size: int) -> dict[str, Any]:
    """A marker that is told apart from the others by colour and symbol."""
    symbol = SYMBOLS[number // len(COLOURS) % len(SYMBOLS)]
    return {"color": colour_of(number), "symbol": symbol, "size": size}
