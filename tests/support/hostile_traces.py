"""Hostile trace files: each is refused in one line, with status 2, in little memory.

The files are the same for one seed. They are read by the command ``eplb simulate`` in a process
whose address space may grow by 64 MB.
"""

from __future__ import annotations

import io
import os
import random
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.repository import ROOT

GROWTH_BYTES = 64 * 2**20
NUM_FLIPS = 8
IDS = np.arange(16_000, dtype=np.int64).reshape(1, 8000, 2) % 8

# Reads every file of a folder; prints one line for each that is not refused as it must be.
PROBE = """
import resource, sys
from pathlib import Path
from typer.testing import CliRunner
from api.cli.main import app
import api.cli.simulator.simulate, telemetry.formats.bounded

def tried(path):
    done = CliRunner().invoke(app, ["simulate", str(path)])
    words = done.stderr
    is_one_line = words.startswith("eplb: ") and words.count("\\n") == 1
    is_refused = done.exit_code == 2 and isinstance(done.exception, SystemExit)
    hidden = [one for one in ("allow_pickle", "Unable to allocate", "MemoryError") if one in words]
    return "" if is_one_line and is_refused and not hidden else repr((done.exit_code, words[-200:]))

paths = sorted(Path(sys.argv[1]).iterdir())
tried(Path(sys.argv[1]) / "missing.npz")
pages = int(Path("/proc/self/statm").read_text().split()[0])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + int(sys.argv[2]),) * 2)
for path in paths:
    if wrong := tried(path):
        print("WRONG", path.name, wrong)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print("GROWN", grown // 1024)
print("TRIED", len(paths))
"""


def saved(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def packed(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def headed(header: str, data: bytes = b"", *, length: int | None = None, version: int = 2) -> bytes:
    text = header.encode()
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes([version, 0]) + size.to_bytes(4, "little") + text + data


def described(shape: str, descr: str = "'<i8'", data: bytes = b"") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"
    return packed({"expert_ids.npy": headed(text, data)})


def contents(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of each file."""
    for name, value, dtype in (
        ("id-2e9", 2_000_000_000, np.int64),
        ("id-2e31", 2**31 - 1, np.int32),
        ("id-2e63", 2**63, np.uint64),
        ("id-most", 2**64 - 1, np.uint64),
        ("id-negative", -2, np.int64),
        ("id-least", -(2**63), np.int64),
    ):
        ids = IDS.astype(dtype)
        ids[0, draw.randrange(8000), 0] = value
        yield name, saved(expert_ids=ids)
    for name, lengths in (
        ("lengths-nan", [np.nan, 8000.0]),
        ("lengths-inf", [np.inf]),
        ("lengths-negative", [-1, 8001]),
        ("lengths-overflow", [2**62] * 4),
        ("lengths-wrong", [draw.randrange(7000)]),
        ("lengths-deep", [[[8000]]]),
        ("lengths-words", ["8000"]),
        ("lengths-pickled", np.array([{}], dtype=object)),
    ):
        yield name, saved(expert_ids=IDS, request_len=np.array(lengths))
    for name, figure in (("nan", np.nan), ("inf", np.inf), ("negative", -1.0)):
        load = np.ones((3, 2, 4))
        load[draw.randrange(3), 1, draw.randrange(4)] = figure
        yield f"load-{name}", saved(load=load)
    yield "load-2e63", saved(load=np.full((3, 2, 4), 2**63, dtype=np.uint64))
    yield "load-empty", saved(load=np.zeros((3, 0, 4), dtype=np.int64))
    yield "load-flat", saved(load=np.ones(8))
    yield "load-deep", saved(load=np.ones((1, 1, 2, 2)))
    for dtype_name in ("complex128", "bool", "U3", "datetime64[s]", "longdouble", "object", "S2"):
        yield f"ids-of-{dtype_name}", saved(expert_ids=IDS[:, :64].astype(dtype_name))
    yield "ids-float", saved(expert_ids=IDS.astype(np.float64))
    yield "ids-empty", saved(expert_ids=IDS[:, :0])
    yield "ids-flat", saved(expert_ids=IDS[0, :, 0])
    yield "structured", saved(expert_ids=np.zeros((1, 8, 2), dtype="i4,i4"))
    yield from headers()
    yield from archives(draw)


def headers() -> Iterator[tuple[str, bytes]]:
    yield "shape-15-gb", described("(1, 1000000000, 2)")
    yield "shape-overflow", described("(4294967296, 4294967296, 4294967296)")
    yield "shape-negative", described("(-1, 8, 2)")
    yield "shape-bool", described("(True, 8, 2)")
    yield "shape-text", described("'abc'")
    yield "descr-deep", described("(1, 8, 2)", "[" * 4000 + "]" * 4000)
    yield "descr-call", described("(1, 8, 2)", "__import__('os').getpid()")
    yield "header-no-dict", packed({"expert_ids.npy": headed("7")})
    yield "header-4-gb", packed({"expert_ids.npy": headed("{", b"\0" * 2**24, length=2**32 - 1)})
    yield "header-version", packed({"expert_ids.npy": headed("{}", version=9)})
    yield "header-empty", packed({"expert_ids.npy": b""})


def archives(draw: random.Random) -> Iterator[tuple[str, bytes]]:
    shape = (1, 16 * 2**20, 2)  # 256 MB of zeros
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}"
    zeros = headed(text, b"\0" * (16 * shape[1]))
    yield "bomb-deflate", packed({"expert_ids.npy": zeros})
    yield "bomb-bzip2", packed({"expert_ids.npy": zeros}, zipfile.ZIP_BZIP2)
    whole = bytearray(saved(expert_ids=IDS))
    for number in range(NUM_FLIPS):  # within the data: the archive's checksum must find it
        at = draw.randrange(400, 100_000)
        yield f"flipped-{number}", bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
    directory = whole.rfind(b"PK\x01\x02")
    for name, offset, value in (
        ("packed-4-gb", 20, 2**32 - 2),
        ("unpacked-4-gb", 24, 2**32 - 2),
        ("unpacked-less", 24, 200),
        ("method-99", 10, 99),
        ("encrypted", 8, 1),
        ("far-away", 42, 2**31),
    ):
        patched = whole.copy()
        size = 2 if offset < 20 else 4
        patched[directory + offset : directory + offset + size] = value.to_bytes(size, "little")
        yield f"directory-{name}", bytes(patched)
    yield "truncated", bytes(whole[: draw.randrange(len(whole) // 2)])
    yield "many-members", packed({f"a{number}.npy": b"" for number in range(2000)})
    yield "escapes", packed({"\x1b[2J\neplb: all is well.npy": b""})
    yield "nested", packed({"expert_ids.npy": bytes(whole)})
    yield "nothing", b""
    yield "noise", draw.randbytes(4096)
    alone = io.BytesIO()
    np.save(alone, IDS)
    yield "alone", alone.getvalue()


def write_hostile_files(folder: Path, seed: int) -> int:
    """Write them all; return how many."""
    folder.mkdir()
    for name, data in contents(random.Random(seed)):
        (folder / f"{name}.npz").write_bytes(data)
    (folder / "folder.npz").mkdir()
    (folder / "nowhere.npz").symlink_to(folder / "none")
    (folder / "endless.npz").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.npz")
    return len(list(folder.iterdir()))


def reading_of(folder: Path) -> list[str]:
    """Lines of the process that reads each file: wrong ones, KiB by which it has grown, number."""
    command = [sys.executable, "-c", PROBE, str(folder), str(GROWTH_BYTES)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
