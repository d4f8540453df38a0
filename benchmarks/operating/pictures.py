"""Pictures of every view of the page, from a service over deployments that are drawn.

    python -m benchmarks.operating.pictures --folder docs/page
    python -m benchmarks.operating.pictures --folder FOLDER --all

8 ranks are in a migration, 32 have a cordoned and a drained one and a proposal, and of 320 two are
silent after a death. Pictures have a palette of 256 colours (pillow).
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from benchmarks.operating.load import ShownPage, Size, shown

COLOURS = 256
SIZES = {
    8: Size(ranks=8, layers=6, is_moving=True),
    32: Size(ranks=32, cordons="3:drain, 5:cordon", has_proposal=True),
    320: Size(ranks=320, windows=24, window_s=25.0, silent=(17, 200), killed=5),
}
# What a view shows once it is drawn.
READY = {
    "overview": "#chart .measured[d]",
    "load": "#worst tr",
    "ranks": "#rank-table tr",
    "history": "#decisions .entry",
}


DOCUMENTED = {"32-overview-1280", "32-ranks-1280", "320-load-1280"}


class Shot(NamedTuple):
    """One picture."""

    view: str
    width: int
    scheme: Literal["light", "dark"] = "light"
    is_whole: bool = True  # beyond the first screen

    @property
    def name(self) -> str:
        """Of its file."""
        dark = "-dark" if self.scheme == "dark" else ""
        return f"{self.view}-{self.width}{dark}{'' if self.is_whole else '-first'}"


def shots() -> Iterator[Shot]:
    """Every view at every width, and the first screens of the overview."""
    for view in READY:
        yield Shot(view, 1280)
        yield Shot(view, 1280, "dark")
        yield Shot(view, 390, "dark")
        yield Shot(view, 2560)
    yield Shot("overview", 1280, is_whole=False)
    yield Shot("overview", 390, "dark", is_whole=False)


def main() -> None:
    """Write the pictures; exit status 1 where a console had an error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="*", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--all", action="store_true", help="not only those of docs/operations.md")
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    for ranks in asked.ranks:
        others = ("prefill",) if ranks == 8 else ()
        with shown(SIZES[ranks], others=others) as page:
            for shot in shots():
                name = f"{ranks}-{shot.name}"
                if asked.all or name in DOCUMENTED:
                    (asked.folder / f"{name}.png").write_bytes(quantised(taken(page, shot)))
                    print(name, flush=True)
            if page.errors or page.elsewhere:
                raise SystemExit("; ".join([*page.errors, *page.elsewhere]))


def taken(page: ShownPage, shot: Shot) -> bytes:
    """Open a view, and take its picture once it is drawn."""
    tab = page.open(shot.width, shot.scheme)
    tab.goto(f"{page.url}/#view={shot.view}")
    tab.locator(READY[shot.view]).first.wait_for(state="attached")
    picture: bytes = tab.screenshot(full_page=shot.is_whole)
    tab.close()
    return picture


def quantised(picture: bytes) -> bytes:
    """The same picture with a palette."""
    from PIL import Image

    small = io.BytesIO()
    image: Any = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        small, "PNG", optimize=True
    )
    return small.getvalue()


if __name__ == "__main__":
    main()
