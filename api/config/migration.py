"""Sections of what moves weights: the rank's agent, staging, transport, the host cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import ValidationInfo, field_validator

from api.config.fields import HOUR_S, MOST, Number, Section, Whole, setting
from rebalance.stage.stage_settings import LinkSettings, StageSettings
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.rank_link_settings import RankLinkSettings


class Agent(Section):
    """The vote and the migrations of a rank; alike on every rank."""

    vote_every: Whole = setting(2, "steps from one vote to the next", unit="steps", ge=2, le=10_000)
    vote_deadline_s: Number = setting(
        30.0, "how late a rank's vote may be before the others time out", gt=0, le=HOUR_S
    )
    plan_deadline_s: Number = setting(
        30.0, "time without progress after which a migration is aborted", gt=0, le=HOUR_S
    )
    scrub_every_steps: Whole = setting(
        64,
        "idle steps from one digest check of a live slot to the next; 0: no check",
        ge=0,
        le=1_000_000_000,
    )


class Staging(Section):
    """What staging may take of links and time. 0: the default of the device (CPU or GPU)."""

    peer_chunk_bytes: Whole = setting(0, "one read from a peer on the same host", ge=0, le=MOST)
    host_chunk_bytes: Whole = setting(0, "one read from the host cache", ge=0, le=MOST)
    network_chunk_bytes: Whole = setting(0, "one read from a rank of another host", ge=0, le=MOST)
    local_bytes_per_second: Number = setting(
        0.0, "budget of each link within the host", ge=0, le=1e15
    )
    network_bytes_per_second: Number = setting(
        0.0, "budget of reads from ranks of other hosts", ge=0, le=1e15
    )
    in_flight: Whole = setting(
        StageSettings.in_flight,
        "chunks of one kind of link that are ordered and not complete",
        unit="chunks",
        ge=1,
        le=65_536,
    )
    preload_records: Whole = setting(
        StageSettings.preload_records,
        "records requested from the host cache at a time",
        unit="records",
        ge=1,
        le=65_536,
    )
    preload_deadline_s: Number = setting(
        StageSettings.preload_deadline_s, "for the host cache to answer", gt=0, le=HOUR_S
    )
    pull_deadline_s: Number = setting(
        StageSettings.pull_deadline_s,
        "for one chunk, and for the copies of a swap",
        gt=0,
        le=HOUR_S,
    )
    pause_deadline_s: Number = setting(
        StageSettings.pause_deadline_s,
        "after which an engine's pause of staging ends by itself",
        gt=0,
        le=HOUR_S,
    )

    def applied_to(self, stage: StageSettings) -> StageSettings:
        """Give a device's settings with what was set here."""
        local, network = self.local_bytes_per_second, self.network_bytes_per_second
        return replace(
            stage,
            peer=_link(stage.peer, self.peer_chunk_bytes, local),
            host=_link(stage.host, self.host_chunk_bytes, local),
            network=_link(stage.network, self.network_chunk_bytes, network),
            in_flight=self.in_flight,
            preload_records=self.preload_records,
            preload_deadline_s=self.preload_deadline_s,
            pull_deadline_s=self.pull_deadline_s,
            pause_deadline_s=self.pause_deadline_s,
        )


def _link(link: LinkSettings, chunk_bytes: int, bytes_per_second: float) -> LinkSettings:
    return LinkSettings(chunk_bytes or link.chunk_bytes, bytes_per_second or link.bytes_per_second)


class Transport(Section):
    """Transfers between ranks of different hosts (``RankLinkSettings``)."""

    bytes_per_second: Number = setting(
        RankLinkSettings.bytes_per_second, "that one side sends", gt=0, le=1e15
    )
    max_transfers: Whole = setting(
        RankLinkSettings.max_transfers,
        "that one side sends at a time",
        unit="transfers",
        ge=1,
        le=65_536,
    )
    silence_s: Number = setting(
        RankLinkSettings.silence_s,
        "without a byte, after which the other side counts as unreachable",
        gt=0,
        le=HOUR_S,
    )
    deadline_s: Number = setting(RankLinkSettings.deadline_s, "for one transfer", gt=0, le=HOUR_S)
    back_off_s: Number = setting(
        RankLinkSettings.back_off_s, "longest back-off after a failure", gt=0, le=HOUR_S
    )


class HostLink(Transport):
    """Transfers between the host caches of different hosts (``HostLinkSettings``)."""

    deadline_s: Number = setting(
        HostLinkSettings.deadline_s,
        "for one record, the other host's disk included",
        gt=0,
        le=HOUR_S,
    )


class HostCache(Section):
    """The records that a host keeps in memory for its ranks."""

    mode: Literal["full", "hot", "ring"] = setting(
        "full",
        "records in host memory: all, those used last, or a small ring",
        short="host_cache_mode",
    )
    records: Whole = setting(
        0,
        "capacity with hot or ring; 0 with full",
        unit="records",
        short="host_cache_records",
        ge=0,
        le=100_000_000,
    )
    record_file: bool = setting(False, "keep expert records in a file beside the weights")
    num_readers: Whole = setting(
        0, "threads that read the disk; 0: half of the cores, 4 to 8", unit="threads", ge=0, le=1024
    )
    other_hosts: Literal["off", "before_disk", "after_disk"] = setting(
        "off", "whether and when records are requested from other hosts and their ranks"
    )

    @field_validator("records")
    @classmethod
    def _cache_has_room(cls, records: int, info: ValidationInfo) -> int:
        if (info.data.get("mode") == "full") != (records == 0):
            raise ValueError("expected a number of records with hot or ring, and none with full")
        return records
