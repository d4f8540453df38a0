"""Install on a GPU host what ``carry`` laid out: python3 install.py SITE [PART ...].

Called once for each transfer, with the parts that it brought; they are kept in ``SITE.parts``.
The call that completes them unpacks into ``SITE.partial``, tries the engine there, and renames it
to ``SITE``: a folder of that name is always whole. Needs nothing but Python's standard library and
the host's torch.

Exit status: 0 installed, 3 parts are still missing, 2 the host or the parts do not fit.
"""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TORCH = (2, 11)  # the first release with the stable ABI that the wheel's libraries use
CUDA_MAJOR = "13"
FREE_GPU_BYTES = 24 << 30  # four ranks of the largest model of this folder
DONE, REFUSED, INCOMPLETE = 0, 2, 3


class Refusal(Exception):
    """One sentence: what was found, and what was expected."""


def check_host(site: Path, unpacked_bytes: int) -> None:
    """Refuse a host that cannot serve, before anything is written."""
    try:
        import torch
    except ImportError as exc:
        raise Refusal(f"torch does not load ({exc}), expected torch {TORCH[0]}.{TORCH[1]}") from exc
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < TORCH:
        raise Refusal(f"torch is {torch.__version__}, expected {TORCH[0]}.{TORCH[1]} or later")
    if not (torch.version.cuda or "").startswith(CUDA_MAJOR + "."):
        raise Refusal(f"torch was built for CUDA {torch.version.cuda}, expected {CUDA_MAJOR}")
    if not torch.cuda.is_available():
        raise Refusal("torch sees no GPU, expected an NVIDIA GPU with its driver")
    free, _ = torch.cuda.mem_get_info()
    if free < FREE_GPU_BYTES:
        raise Refusal(f"{free >> 30} GiB of GPU memory are free, expected {FREE_GPU_BYTES >> 30}")
    place = site.parent
    while not place.exists():
        place = place.parent
    room = shutil.disk_usage(place).free
    if room < 2 * unpacked_bytes:
        raise Refusal(f"{room >> 20} MiB of disk are free, expected {2 * unpacked_bytes >> 20}")


def keep_part(part: Path, digests: list[str], kept: Path) -> None:
    """Keep a part that is one of the manifest's."""
    data = part.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if digest not in digests:
        raise Refusal(f"{part} has the digest {digest[:12]}, expected one of the manifest's")
    kept.mkdir(parents=True, exist_ok=True)
    target = kept / f"part-{digests.index(digest)}"
    target.with_suffix(".partial").write_bytes(data)
    target.with_suffix(".partial").rename(target)


def unpack(manifest: dict, kept: Path, folder: Path) -> None:
    """Unpack the units, several at once: lzma works without Python's lock."""
    stream = b"".join(
        (kept / f"part-{number}").read_bytes() for number in range(len(manifest["parts"]))
    )
    places, first = [], 0
    for name, size in manifest["units"]:
        places.append((name, stream[first : first + size]))
        first += size

    def write(name: str, packed: bytes) -> None:
        if name.endswith(".tar.xz"):
            archive = kept / name
            archive.write_bytes(packed)
            with tarfile.open(archive) as opened:
                opened.extractall(folder, filter="tar")
            archive.unlink()
            return
        if name.endswith(".whl"):
            with zipfile.ZipFile(io.BytesIO(packed)) as wheel:
                wheel.extractall(folder)
            return
        target = folder / name.removesuffix(".xz").replace("+", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(lzma.decompress(packed))
        target.chmod(0o755)

    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda place: write(*place), places))


def fit_nccl(folder: Path) -> None:
    """Let the engine load a host's NCCL that has no suspension (before 2.29.7).

    vLLM asks for all functions when it loads the library, and uses these two for sleeping alone.
    """
    source = folder / "vllm/distributed/device_communicators/pynccl_wrapper.py"
    text = source.read_text()
    asked = 'elif func.name in ("ncclCommSuspend", "ncclCommResume"):'
    if text.count(asked) != 1:
        raise Refusal(f"{source.name} has {text.count(asked)} lines {asked!r}, expected one")
    skipped = asked + "\n                        continue"
    source.write_text(text.replace(asked, skipped))


def try_engine(folder: Path) -> None:
    """Load the engine's libraries in a process of their own."""
    program = (
        "import torch, vllm._C_stable_libtorch, vllm._moe_C_stable_libtorch; import vllm;"
        "torch.ops._moe_C.topk_softmax; print(vllm.__version__)"
    )
    environment = dict(os.environ, PYTHONPATH=str(folder), VLLM_NO_USAGE_STATS="1")
    tried = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    if tried.returncode:
        last = (tried.stderr.strip().splitlines() or ["no message"])[-1]
        raise Refusal(f"the wheel does not load ({last}), expected that vllm and its kernels do")


def install(site: Path, parts: list[Path]) -> int:
    """Keep the parts; install once all are there."""
    manifest = json.loads((Path(__file__).parent / "manifest.json").read_text())
    if site.exists():
        print(f"install: {site} is installed")
        return DONE
    kept, partial = site.with_suffix(".parts"), site.with_suffix(".partial")
    if not kept.exists():
        check_host(site, manifest["unpacked_bytes"])
    for part in parts:
        keep_part(part, manifest["parts"], kept)
    missing = [
        number for number in range(len(manifest["parts"])) if not (kept / f"part-{number}").exists()
    ]
    if missing:
        print(f"install: parts {missing} are still missing")
        return INCOMPLETE
    shutil.rmtree(partial, ignore_errors=True)
    try:
        unpack(manifest, kept, partial)
        fit_nccl(partial)
        try_engine(partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    partial.rename(site)
    shutil.rmtree(kept)
    print(f"install: {site} has {manifest['engine']}")
    return DONE


def main() -> int:
    """Install, or say in one sentence why not."""
    if len(sys.argv) < 2:
        print("usage: python3 install.py SITE [PART ...]", file=sys.stderr)
        return REFUSED
    try:
        return install(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
    except (Refusal, OSError, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile) as exc:
        print(f"install: {exc}", file=sys.stderr)
        return REFUSED


if __name__ == "__main__":
    sys.exit(main())
