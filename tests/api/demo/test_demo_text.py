"""Text as the demo serves it: the same tokens every time, kinds that differ, a mix that drifts."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from api.demo.text import (
    VOCABULARY,
    Domain,
    domains_of,
    draw_sequences,
    mix_at,
    standard_domains,
    tokenize,
)
from eplb.errors import ConfigError

ONES = Domain("ones", np.array([1], dtype=np.int32))
COUNT = Domain("count", np.arange(10, 15, dtype=np.int32))


@pytest.mark.parametrize(
    ("elapsed_s", "first"),
    [(0.0, 0.925), (9.9, 0.925), (10.5, 0.5), (15.0, 0.075), (25.0, 0.925), (35.0, 0.075)],
)
def test_mix_drifts_from_one_domain_to_the_next_and_round(elapsed_s: float, first: float) -> None:
    # Two domains over 30 s are three turns of 10 s: first, second, first; a second fades one in.
    assert mix_at(elapsed_s, 30.0, 2).tolist() == pytest.approx([first, 1 - first])


@pytest.mark.parametrize("num_domains", [1, 3])
def test_every_mix_sums_to_one(num_domains: int) -> None:
    for elapsed in np.linspace(0, 100, 73):
        mix = mix_at(float(elapsed), 30.0, num_domains)
        assert mix.sum() == pytest.approx(1.0)
        assert mix.min() > 0


def test_tokens_of_a_text_never_change() -> None:
    # From zlib.crc32 of each piece, modulo 4096: a fixed function, unlike hash().
    assert tokenize("def f(x):\n").tolist() == tokenize("def f(x):\n").tolist()
    assert len(tokenize("one two, three")) == 4  # "one", " two", ",", " three"
    assert tokenize("a").tolist() == [0xE8B7BE43 % VOCABULARY]


def test_domains_that_every_machine_has_are_large_and_differ_in_their_words() -> None:
    domains = standard_domains()

    assert [domain.name for domain in domains] == ["data", "code", "prose"]
    assert all(len(domain.tokens) > 50_000 for domain in domains)
    frequencies = [
        np.bincount(domain.tokens, minlength=VOCABULARY) / len(domain.tokens) for domain in domains
    ]
    assert {len(one) for one in frequencies} == {VOCABULARY}
    for first, second in combinations(frequencies, 2):
        overlap = np.minimum(first, second).sum()  # 1: the same words as often
        assert overlap < 0.7


def test_sequences_are_runs_of_a_domain_that_go_round_at_its_end() -> None:
    drawn = draw_sequences([COUNT], np.array([1.0]), (3, 7), seed=[1, 2])

    for row in drawn:
        assert ((row[1:] - row[:-1]) % 5 == 1).all()
    assert set(drawn.ravel()) == {10, 11, 12, 13, 14}


def test_seed_draws_the_same_sequences_and_another_seed_others() -> None:
    mix = np.array([0.5, 0.5])
    drawn = draw_sequences([ONES, COUNT], mix, (8, 4), seed=[1, 2, 3])

    assert drawn.tolist() == draw_sequences([ONES, COUNT], mix, (8, 4), seed=[1, 2, 3]).tolist()
    assert drawn.tolist() != draw_sequences([ONES, COUNT], mix, (8, 4), seed=[1, 2, 4]).tolist()


def test_domains_are_drawn_in_proportion_to_the_mix() -> None:
    drawn = draw_sequences([ONES, COUNT], np.array([0.25, 0.75]), (4000, 1), seed=[5])

    assert (drawn == 1).mean() == pytest.approx(0.25, abs=0.03)


def test_each_path_is_a_domain_and_a_folder_is_all_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("one two")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe word \x00")  # no text, and read all the same
    (tmp_path / "b" / "1.txt").write_text("three")
    (tmp_path / "b" / "2.txt").write_text("four")

    first, second, third = domains_of([tmp_path / name for name in ("a.txt", "b", "bytes")])

    assert (first.name, first.tokens.tolist()) == ("a.txt", tokenize("one two").tolist())
    assert (second.name, second.tokens.tolist()) == ("b", tokenize("three\nfour").tolist())
    assert third.tokens.size > 0


def test_path_without_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "folder").mkdir()

    for path in (tmp_path / "empty.txt", tmp_path / "folder"):
        with pytest.raises(ConfigError, match=str(path)):
            domains_of([path])
    with pytest.raises(ConfigError, match=r"none\.txt"):
        domains_of([tmp_path / "none.txt"])
