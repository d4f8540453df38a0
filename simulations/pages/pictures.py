"""The figures of a page as PNG files, drawn by matplotlib from the same plotly figures.

What is read of a figure are its traces, axes and lines: the kinds that the pages of this folder
use, and no others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

from eplb.errors import ConfigError
from eplb.extras import needed_for
from simulations.pages.document import Figure, Page
from simulations.report import write_whole

INCHES, DOTS_PER_INCH = (8.0, 4.8), 150
DASHES = {"dot": ":", "solid": "-", None: "-"}
MARKS = {"triangle-up": "^", None: "o"}
TEXT_COLUMNS = 110


def write_pictures(folder: Path, page: Page) -> list[Path]:
    """Write a file for each figure, named by its title; each is whole or not there.

    Raises:
        ConfigError: matplotlib is not installed, or a file cannot be written.
    """
    with needed_for("a PNG file"):
        import matplotlib
    matplotlib.use("Agg")  # no display is needed
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"{folder} cannot be made: {exc.strerror or exc}") from exc
    written = []
    for figure in page.figures:
        path = folder / f"{re.sub('[^a-z0-9]+', '-', figure.title.lower()).strip('-')}.png"
        write_whole(path, _png(figure, page.title))
        written.append(path)
    return written


def _png(figure: Figure, source: str) -> bytes:
    from io import BytesIO
    from textwrap import fill

    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = canvas.add_subplot()
    for trace in figure.figure.data:
        _TRACES[trace.type](axes, trace)
    for shape in figure.figure.layout.shapes:
        axes.axhline(shape.y0, color=shape.line.color, linestyle=DASHES[shape.line.dash])
    _frame(axes, figure.figure.layout)
    axes.set_title(figure.title, loc="left", fontweight="bold")
    canvas.supxlabel(fill(f"{source}. {figure.text}", TEXT_COLUMNS), fontsize=7, color="#555")
    content = BytesIO()
    canvas.savefig(content, format="png")
    return content.getvalue()


def _frame(axes: Any, layout: Any) -> None:
    for name, axis, side in (("x", axes.xaxis, layout.xaxis), ("y", axes.yaxis, layout.yaxis)):
        axis.set_label_text(side.title.text or "")
        if side.type == "log":
            getattr(axes, f"set_{name}scale")("log")
        if side.tickvals is not None:
            axis.set_ticks(list(side.tickvals), [str(one) for one in side.tickvals])
            axis.set_ticks([], minor=True)
        elif side.dtick is not None:
            axis.get_major_locator().set_params(integer=True)
        if side.autorange == "reversed":
            limits = sorted(getattr(axes, f"get_{name}lim")(), reverse=True)
            getattr(axes, f"set_{name}lim")(*limits)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        axes.legend(handles, labels, frameon=False, fontsize=8)


def _scatter(axes: Any, trace: Any) -> None:
    mode = trace.mode or "lines+markers"
    axes.plot(
        trace.x,
        trace.y,
        label=trace.name if trace.showlegend is not False else None,
        color=trace.line.color or trace.marker.color,
        linestyle=DASHES[trace.line.dash] if "lines" in mode else "",
        marker=MARKS[trace.marker.symbol] if "markers" in mode else "",
        drawstyle="steps-post" if trace.line.shape == "hv" else "default",
    )
    axes.grid(visible=True, color="#ddd")
    axes.set_axisbelow(True)


def _bars(axes: Any, trace: Any) -> None:
    bars = axes.barh(list(trace.y), list(trace.x), color=list(trace.marker.color))
    axes.bar_label(bars, labels=list(trace.text), padding=4, fontsize=8)


def _heatmap(axes: Any, trace: Any) -> None:
    drawn = axes.imshow(
        np.asarray(trace.z), cmap="RdBu_r", vmin=trace.zmin, vmax=trace.zmax, aspect="auto"
    )
    axes.figure.colorbar(drawn, ax=axes)


_TRACES = {"scatter": _scatter, "bar": _bars, "heatmap": _heatmap}
