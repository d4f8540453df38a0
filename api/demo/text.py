"""The load of the demo: real text of several domains whose mix drifts, or recorded routes.

Every machine with Python has the three domains: the standard library's source code, prose (its
documentation topics and docstrings, and licence files of the machine), and structured data (tables
of Unicode, HTML entities, the build configuration). Nothing is generated or downloaded.
"""

from __future__ import annotations

import html.entities
import json
import os
import re
import sysconfig
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import ConfigError

VOCABULARY = 4096
SEQUENCE_LENGTH = 64  # tokens of one sequence of text
DOMAIN_CHARACTERS = 1_500_000  # a domain has so many: a minute seldom repeats
PIECE = re.compile(r" ?\w+| ?[^\w\s]+|\s+")
LICENCES = Path("/usr/share/common-licenses")
MAIN_PART = 0.85  # part of the tokens from the current main domain
FADE_PART = 0.1  # part of a domain's period in which its share rises


@dataclass(frozen=True)
class Domain:
    """One kind of text, as token ids."""

    name: str
    tokens: NDArray[np.int32]


def tokenize(text: str) -> NDArray[np.int32]:
    """Cut text into words, punctuation and white space, and number each piece by its checksum."""
    ids = [zlib.crc32(piece.encode()) % VOCABULARY for piece in PIECE.findall(text)]
    return np.array(ids, dtype=np.int32)


def standard_domains() -> list[Domain]:
    """Read the domains that every machine has."""
    texts = {"data": _data(), "code": _code(), "prose": _prose()}
    return [Domain(name, tokenize(_take(parts))) for name, parts in texts.items()]


def domains_of(paths: Sequence[Path]) -> list[Domain]:
    """Read files or folders, each a domain of its own.

    Raises:
        ConfigError: a path cannot be read, or holds no text.
    """
    domains = []
    for path in paths:
        try:
            files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else [path]
            text = _take(file.read_text(encoding="utf-8", errors="replace") for file in files)
        except OSError as exc:
            raise ConfigError(f"text {path} cannot be read: {exc.strerror}") from exc
        tokens = tokenize(text)
        if not tokens.size:
            raise ConfigError(f"text {path} holds no words, expected some")
        domains.append(Domain(path.name, tokens))
    return domains


def mix_at(elapsed: float, period: float, num_domains: int) -> NDArray[np.float64]:
    """Part of the tokens that each domain gives, ``elapsed`` seconds into the run.

    Every domain is the main one for an equal part of the period, then the first again. MAIN_PART of
    the tokens come from the main domain; a change takes FADE_PART of its time. The period repeats.
    """
    turn, into_turn = divmod(elapsed / period * (num_domains + 1), 1.0)
    now, before = int(turn) % num_domains, (int(turn) - 1) % num_domains
    taken_over = 1.0 if turn == 0 else min(1.0, into_turn / FADE_PART)
    mix = np.full(num_domains, (1.0 - MAIN_PART) / num_domains)
    mix[now] += MAIN_PART * taken_over
    mix[before] += MAIN_PART * (1.0 - taken_over)
    return mix


def draw_sequences(
    domains: Sequence[Domain], mix: NDArray[np.float64], shape: tuple[int, int], seed: Sequence[int]
) -> NDArray[np.int64]:
    """Draw sequences [B, N], each a run of tokens from anywhere in a domain drawn from the mix."""
    rng = np.random.default_rng(list(seed))
    count, length = shape
    rows = np.empty(shape, dtype=np.int64)
    for row, domain in enumerate(rng.choice(len(domains), size=count, p=mix)):
        tokens = domains[domain].tokens
        start = int(rng.integers(len(tokens)))
        rows[row] = np.take(tokens, range(start, start + length), mode="wrap")
    return rows


def _take(parts: Iterator[str]) -> str:
    """Join parts until there is enough text."""
    taken, length = [], 0
    for part in parts:
        taken.append(part)
        length += len(part)
        if length >= DOMAIN_CHARACTERS:
            break
    return "\n".join(taken)[:DOMAIN_CHARACTERS]


def _code() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if "site-packages" not in file.parts:
            yield file.read_text(encoding="utf-8", errors="replace")


def _prose() -> Iterator[str]:
    if LICENCES.is_dir():
        for file in sorted(LICENCES.iterdir()):
            yield file.read_text(encoding="utf-8", errors="replace")
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions leave the documentation topics out
        pass
    else:
        yield from topics.topics.values()
    docstring = re.compile(r'"""(.*?)"""', re.DOTALL)
    for source in _code():
        yield from docstring.findall(source)


def _data() -> Iterator[str]:
    yield json.dumps(html.entities.html5, indent=1)
    yield json.dumps(sysconfig.get_config_vars(), indent=1, default=str)
    yield json.dumps(os.sysconf_names, indent=1)
    for first in range(0, 0x20000, 0x100):
        yield "\n".join(_unicode_rows(first))


def _unicode_rows(first: int) -> Iterator[str]:
    for character in map(chr, range(first, first + 0x100)):
        name = unicodedata.name(character, "")
        if name:
            width = unicodedata.east_asian_width(character)
            row = {"code": ord(character), "category": unicodedata.category(character)}
            yield json.dumps(row | {"width": width, "name": name})


@dataclass(frozen=True)
class Load:
    """What the ranks of the demo serve: text, or recorded routes."""

    tokens_per_rank: int  # tokens of one step
    seed: int
    period_s: float  # period of the drift
    text: Path | None  # an .npz of the domains' tokens; None with a trace
    trace: Path | None  # an .npz of expert_ids [L, tokens, K]; None with text

    @property
    def batch_shape(self) -> tuple[int, int]:
        """(sequences, positions) of a rank's step."""
        length = min(SEQUENCE_LENGTH, self.tokens_per_rank)
        return self.tokens_per_rank // length, length


class Batches:
    """A rank's tokens of each step, and their experts when a trace is replayed.

    Ranks are counted among those that have tokens; the number of a rank without any is negative,
    and its batches are empty.

    Shapes:  B sequences, N positions, T = B * N tokens, L MoE layers, K top-k.
    """

    def __init__(self, load: Load, rank: int, num_ranks: int, device: torch.device) -> None:
        self._load, self._rank, self._num_ranks, self._device = load, rank, num_ranks, device
        self._domains: list[Domain] = []
        self._trace: torch.Tensor | None = None
        if load.text is not None:
            with np.load(load.text) as archive:
                self._domains = [Domain(name, archive[name]) for name in archive.files]
        else:
            assert load.trace is not None, "the demo runs on text or on a trace"
            with np.load(load.trace) as archive:
                self._trace = torch.from_numpy(archive["expert_ids"])

    def at(self, step: int, elapsed_s: float) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(token ids [B, N], experts [L, T, K] by the trace, or None) of a step."""
        load, rank = self._load, self._rank
        if self._trace is None:
            mix = mix_at(elapsed_s, load.period_s, len(self._domains))
            num_sequences, length = load.batch_shape
            shape = (num_sequences * (rank >= 0), length)
            drawn = draw_sequences(self._domains, mix, shape, (load.seed, step, max(rank, 0)))
            return self._to_device(torch.from_numpy(drawn)), None
        total = self._trace.shape[1]
        first = (step * self._num_ranks + rank) * load.tokens_per_rank
        num_tokens = load.tokens_per_rank * (rank >= 0)
        positions = torch.arange(first, first + num_tokens) % total
        ids = (positions % 1024).view(1, -1)  # the text is not recorded; routes are
        forced = self._trace[:, positions].to(torch.int64)
        return self._to_device(ids), self._to_device(forced)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy without waiting for the stream, where a kernel may be waiting for a dead peer."""
        if self._device.type != "cuda":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
