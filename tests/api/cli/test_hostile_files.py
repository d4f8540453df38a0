"""Files that somebody else has written: refused in one line, whatever they hold."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from api.cli.main import app
from eplb.errors import CheckpointError
from rebalance.protocol.journal import read_journals
from rebalance.weights.disk.record_file import MAGIC, RecordFileLayout, RecordOrigin
from runtime.checkpoints.checkpoint import INDEX_FILE, Checkpoint
from runtime.memory import PAGE_BYTES
from simulations import load_trace
from tests.support.hostile_traces import GROWTH_BYTES, reading_of, write_hostile_files


@pytest.mark.slow
def test_hostile_traces_are_refused_in_one_line_and_little_memory(tmp_path: Path) -> None:
    num_files = write_hostile_files(tmp_path / "hostile", seed=1)
    *wrong, grown, tried = reading_of(tmp_path / "hostile")

    assert (wrong, tried) == ([], f"TRIED {num_files}")
    assert int(grown.removeprefix("GROWN ")) * 1024 <= GROWTH_BYTES


@pytest.mark.slow
def test_hostile_files_are_many_and_alike_for_one_seed(tmp_path: Path) -> None:
    assert write_hostile_files(tmp_path / "a", seed=1) >= 40
    write_hostile_files(tmp_path / "b", seed=1)

    flipped = [(tmp_path / folder / "flipped-3.npz").read_bytes() for folder in "ab"]
    assert flipped[0] == flipped[1]


def test_trace_that_packs_well_and_is_small_is_read(tmp_path: Path) -> None:
    ids = np.zeros((1, 100_000, 2), dtype=np.int64)  # 1.6 MB that pack to 2 kB
    np.savez_compressed(tmp_path / "trace.npz", expert_ids=ids)

    assert load_trace(tmp_path / "trace.npz").num_experts == 1


def test_trace_in_fortran_order_is_read_as_it_is_meant(tmp_path: Path) -> None:
    ids = np.arange(64).reshape(2, 16, 2) % 4
    np.savez(tmp_path / "c.npz", expert_ids=ids)
    np.savez(tmp_path / "f.npz", expert_ids=np.asfortranarray(ids))

    found = [load_trace(tmp_path / name, window_tokens=4) for name in ("c.npz", "f.npz")]
    assert np.array_equal(found[0].tokens, found[1].tokens)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "JSON nested deeper than 32 levels"),
        ("[]", 'expected a "weight_map"'),
        (json.dumps({"weight_map": {"a": "../../etc/passwd"}}), "expected one beside it"),
        (json.dumps({"weight_map": {"a": "/etc/passwd"}}), "expected one beside it"),
        (json.dumps({"weight_map": {"a": 7}}), 'expected a "weight_map"'),
    ],
)
def test_hostile_checkpoint_index_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)

    with pytest.raises(CheckpointError, match=why):
        Checkpoint(tmp_path)


def test_hostile_record_file_header_is_refused() -> None:
    origin = RecordOrigin("", "", 1, 1, PAGE_BYTES)
    for text in (b"[" * 4000, b"[]", b"\xff"):
        digest = hashlib.blake2b(text, digest_size=16).digest()
        head = struct.pack("<8sI16s", MAGIC, len(text), digest)  # as a file begins
        with pytest.raises(CheckpointError):
            RecordFileLayout(origin).check_header((head + text).ljust(PAGE_BYTES, b"\0"))


def test_journal_command_skips_hostile_lines(tmp_path: Path) -> None:
    (tmp_path / "rank-0000.jsonl").write_bytes(b"[" * 100_000 + b"\n7\n\xff\xfe\n{}\n")

    assert read_journals(tmp_path) == ([], 4)


@pytest.mark.parametrize("data", [b"SQLite format 3\0" + b"\xff" * 5000, b"noise" * 1000])
def test_hostile_store_is_not_backed_up(tmp_path: Path, data: bytes) -> None:
    source, target = tmp_path / "store.sqlite", tmp_path / "copy.sqlite"
    source.write_bytes(data)

    done = CliRunner().invoke(app, ["store", "backup", str(target), "--store", str(source)])

    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    assert done.stderr.startswith("eplb: ")
    assert done.stderr.count("\n") == 1
    assert not target.exists()
