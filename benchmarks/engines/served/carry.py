"""Lay out an engine's wheel for a GPU host that has torch and no network.

    python -m benchmarks.engines.served.carry carried --engine vllm-0.33.0-*.whl --wheels required

Libraries that no run of this folder loads are left out of the wheel. What remains is compressed
with xz and cut into parts of a given size. ``install.py`` beside the parts unpacks them there.

A *unit* is one archive: each large library of the engine, the rest of it, and each further wheel
as it is. They are unpacked at once, each on a thread of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import shutil
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

MIB = 1 << 20
LARGE = 8 * MIB  # bytes of a file that is a unit of its own
CODE_UNIT = "engine.tar.xz"

# vLLM asks for one of FlashAttention 2 and 3 at its import; 3 is smaller by half.
DROPPED = (
    "vllm/vllm_flash_attn/_vllm_fa2_C",
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100/",
    "vllm/third_party/deep_gemm/",
    "vllm/third_party/flashmla/",
    "vllm/_flashkda_C",
    "vllm/_deepselect_C",
    "vllm/_flashmla",
    "vllm/_qutlass_C",
    "vllm/entrypoints/serve/instrumentator/static/",
    "vllm/kernels/helion/configs/",
)


def members(archive: zipfile.ZipFile) -> Iterator[zipfile.ZipInfo]:
    """Yield each file of the engine's wheel that is carried."""
    for member in archive.infolist():
        if not (member.is_dir() or member.filename.startswith(DROPPED)):
            yield member


def compress_file(source: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """Write a member of a wheel as an xz file; one that is there already is kept."""
    if target.exists():
        return
    partial = target.with_suffix(".partial")
    with source.open(member) as opened, lzma.open(partial, "wb", preset=6) as packed:
        shutil.copyfileobj(opened, packed, MIB)
    partial.rename(target)


def unit_name(member: str) -> str:
    """The file name of the unit of one large member."""
    return member.replace("/", "+") + ".xz"


def compress_units(engine: Path, folder: Path) -> list[Path]:
    """Write the units of the engine's wheel into a folder, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    units, code = [], folder / CODE_UNIT
    with zipfile.ZipFile(engine) as archive:
        small = []
        for member in members(archive):
            if member.file_size < LARGE:
                small.append(member)
                continue
            units.append(folder / unit_name(member.filename))
            compress_file(archive, member, units[-1])
        if not code.exists():
            partial = code.with_suffix(".partial")
            with tarfile.open(partial, "w:xz", preset=4) as packed:
                for member in small:
                    data = archive.read(member)
                    info = tarfile.TarInfo(member.filename)
                    info.size = len(data)
                    info.mode = 0o755 if ".so" in member.filename else 0o644
                    packed.addfile(info, io.BytesIO(data))
            partial.rename(code)
    return [*units, code]


def write_parts(units: Sequence[Path], folder: Path, part_bytes: int) -> dict[str, object]:
    """Cut the units, one after another, into parts; return what the manifest says."""
    for old in folder.glob("part-*"):
        old.unlink()
    stream = b"".join(unit.read_bytes() for unit in units)
    digests = []
    for number, first in enumerate(range(0, len(stream), part_bytes)):
        part = stream[first : first + part_bytes]
        digests.append(hashlib.sha256(part).hexdigest())
        (folder / f"part-{number}").write_bytes(part)
    return {
        "parts": digests,
        "units": [[unit.name, unit.stat().st_size] for unit in units],
        "unpacked_bytes": sum(size_of(unit) for unit in units),
    }


def size_of(unit: Path) -> int:
    """Bytes of a unit once it is unpacked."""
    if unit.suffix == ".whl":
        with zipfile.ZipFile(unit) as archive:
            return sum(member.file_size for member in archive.infolist())
    with lzma.open(unit) as opened:
        return sum(len(block) for block in iter(lambda: opened.read(MIB), b""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the parts, the manifest and the script that installs them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", type=Path, required=True, help="the engine's wheel")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of what it requires")
    parser.add_argument("--part-mib", type=float, default=48.0)
    parser.add_argument("--units", type=Path, help="folder of units, kept for the next call")
    parser.add_argument("own", type=Path, nargs="*", help="further wheels")
    options = parser.parse_args(arguments)
    wheels = [options.engine, *sorted(options.wheels.glob("*.whl")), *options.own]
    absent = [str(wheel) for wheel in wheels if not wheel.is_file()]
    if absent or len(wheels) == 1:
        print(f"carry: {absent or options.wheels} has no wheel, expected wheels", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    units = compress_units(options.engine, options.units or options.folder / "units")
    manifest = write_parts([*units, *wheels[1:]], options.folder, int(options.part_mib * MIB))
    manifest["engine"] = options.engine.name
    (options.folder / "manifest.json").write_text(json.dumps(manifest, indent=1))
    shutil.copy(Path(__file__).parent / "install.py", options.folder)
    for part in sorted(options.folder.glob("part-*")):
        print(f"{part}  {part.stat().st_size / MIB:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
