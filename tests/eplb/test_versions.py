"""Which versions work together, as a table, and announcements of programs of any version."""

from __future__ import annotations

import pytest

import eplb
from eplb.versions import (
    CONTROLLER,
    HOST_CACHE,
    PROTOCOL,
    RANKS,
    Announcement,
    announcement_from_dict,
    announcement_to_dict,
    refusal,
)


def of(component: str, protocol: int) -> Announcement:
    return Announcement(component, "x", f"0.{protocol}.0", protocol, protocol - 1)


@pytest.mark.parametrize(
    ("joining", "present", "fits"),
    [
        (of(CONTROLLER, 5), of(RANKS, 5), True),
        (of(CONTROLLER, 5), of(RANKS, 4), True),
        (of(CONTROLLER, 5), of(RANKS, 3), False),
        (of(CONTROLLER, 4), of(RANKS, 5), False),
        (of(CONTROLLER, 3), of(RANKS, 5), False),
        (of(RANKS, 4), of(CONTROLLER, 5), True),
        (of(RANKS, 5), of(CONTROLLER, 4), False),
        (of(RANKS, 3), of(CONTROLLER, 5), False),
        (of(RANKS, 4), of(HOST_CACHE, 5), True),
        (of(RANKS, 5), of(HOST_CACHE, 4), False),
        (of(HOST_CACHE, 5), of(RANKS, 4), True),
        (of(CONTROLLER, 4), of(CONTROLLER, 5), True),
        (of(CONTROLLER, 5), of(CONTROLLER, 4), True),
        (of(CONTROLLER, 6), of(CONTROLLER, 4), False),
        (of(CONTROLLER, 4), of(CONTROLLER, 6), False),
    ],
)
def test_versions_next_to_each_other_fit_where_no_reader_is_older(
    joining: Announcement, present: Announcement, fits: bool
) -> None:
    assert (refusal(joining, present) == "") is fits


@pytest.mark.parametrize(
    ("joining", "present", "expected"),
    [
        (of(CONTROLLER, 5), of(RANKS, 3), "protocol 4 or later: upgrade by one release at a time"),
        (of(RANKS, 3), of(CONTROLLER, 5), "protocol 4 or later to join it: upgrade this process"),
        (of(RANKS, 5), of(CONTROLLER, 4), "protocol 5 or later: upgrade controllers and host"),
        (of(CONTROLLER, 4), of(RANKS, 5), "protocol 4 at most: ranks go back before all others"),
    ],
)
def test_refusal_names_both_versions_and_the_one_expected(
    joining: Announcement, present: Announcement, expected: str
) -> None:
    said = refusal(joining, present)

    assert f"of eplb {joining.software} (protocol {joining.protocol}) cannot join: found" in said
    assert f"of eplb {present.software} (protocol {present.protocol}), expected" in said
    assert expected in said


def test_announcement_is_of_this_release_and_read_back() -> None:
    mine = Announcement(CONTROLLER, "gpu7:1", time=4.0)

    assert (mine.software, mine.protocol) == (eplb.__version__, PROTOCOL)
    assert announcement_from_dict(announcement_to_dict(mine)) == mine
    later = of(RANKS, 9)
    written = announcement_to_dict(later)
    assert announcement_from_dict(written | {"commit": "abc"}) == later  # a new field
    with pytest.raises(ValueError, match="protocol is '2', expected int"):
        announcement_from_dict(written | {"protocol": "2"})
