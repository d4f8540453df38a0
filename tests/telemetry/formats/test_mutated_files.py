"""Files of each format, changed: the same counts, or a refusal that says what was expected."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from eplb.errors import EplbError
from tests.support.formats.mutations import content_of, mutations, statement
from tests.support.formats.seeds import seeds, write_seed

SEED, COUNT = 1, 300


@pytest.mark.system
@pytest.mark.parametrize("reader", list(seeds()))
def test_changed_file_gives_the_same_counts_or_is_refused(tmp_path: Path, reader: str) -> None:
    files, _ = seeds()[reader]
    (right := tmp_path / "right").mkdir()
    place = write_seed(right, files)
    options = statement(reader, place)
    expected = content_of(place, options, None)
    wrong, num_read = [], 0
    for number, (what, changed) in enumerate(mutations(reader, COUNT, SEED)):
        (folder := tmp_path / "changed").mkdir()
        path = write_seed(folder, changed)
        name = reader.partition("/")[0] if number % 2 else None
        try:
            found = content_of(path, options, name)
        except EplbError as exc:
            if path not in str(exc) or "expected" not in str(exc):
                wrong.append(f"{what}: refused by {exc}")
        else:
            num_read += 1
            if found != expected:
                wrong.append(f"{what}: read as {found}, expected {expected}")
        shutil.rmtree(folder)

    assert wrong == []
    assert 0 < num_read < COUNT
