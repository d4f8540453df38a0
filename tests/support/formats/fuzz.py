"""Mutated files for every reader: each is read or refused in one sentence, in bounded memory.

    python -m tests.support.formats.fuzz --inputs 100000 --seed 1

Each reader runs in a process of its own whose address space may grow by 256 MB. An input that takes
longer than 5 s ends the process. Events of the interpreter that run code, start a process or open a
connection are counted while a file is read.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eplb.errors import EplbError
from telemetry.formats import own
from telemetry.formats.table import read
from tests.support.formats.seeds import seeds
from tests.support.repository import ROOT

GROWTH_BYTES = 256 * 2**20
LIMIT_S = 5.0
BAD_EVENTS = ("exec", "os.system", "os.exec", "os.fork", "subprocess.Popen", "pickle.find_class")
BAD_EVENTS += ("socket.connect", "ctypes.dlopen", "shutil.rmtree", "os.remove", "import")
TOKENS = [
    *(b"0", b"-1", b"9" * 400, b"[" * 300, b"]", b"{", b"}", b",", b":", b'"', b"null", b"1e999"),
    *(b"NaN", b"true", b"\xff\xfe", b"\0" * 8, b"\xff" * 8, b"2147483648", b"9223372036854775808"),
    *(b"&a [*a, *a]", b"!!python/object/apply:os.system ['true']", b"- ", b"\n", b"? ", b"%TAG"),
    *(b"cos\nsystem\n(X\x04\0\0\0truetR", b"cbuiltins\neval\n", b"r\xff\xff\xff\x7f", b"2", b"0"),
    *(b"\x8b\xff\xff\xff\x7f", b"X\xff\xff\xff\xff", b"\x80\x04", b"\x95\xff\xff\xff\xff", b"P1\n"),
]
FOLDED = (1, 1, 1, 2, 3)  # mutations of one input


@dataclass(frozen=True)
class Figures:
    """What one reader did."""

    reader: str
    inputs: int
    read: int
    refused: int
    wrong: list[str]
    events: int
    grown_mb: float
    slowest_ms: float
    cpu_s: float


def mutated(draw: random.Random, data: bytes) -> bytes:
    """One mutation: bytes flipped, cut, repeated, inserted or replaced."""
    at = draw.randrange(len(data) + 1)
    end = min(len(data), at + draw.choice((1, 2, 4, 8, 64)))
    kind = draw.randrange(7)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + data[end:]
    if kind == 2:
        return data[:end] + data[at:]
    if kind == 3:
        return data[:at] + draw.choice(TOKENS) + data[at:]
    if kind == 4:
        return data[:at] + draw.choice(TOKENS) + data[end:]
    if kind == 5:
        return data[:at] + draw.randbytes(end - at) + data[end:]
    flipped = bytes([data[at] ^ (1 << draw.randrange(8))]) if at < len(data) else b""
    return data[:at] + flipped + data[at + 1 :]


def mutated_file(draw: random.Random, data: bytes) -> bytes:
    """A mutated file; of an archive, half the time one of its members under a right checksum."""
    change = mutated
    if data[:2] == b"PK" and draw.random() < 0.6:
        change = mutated_member
    for _ in range(draw.choice(FOLDED)):
        data = change(draw, data)
    return data


def rehashed(name: str, data: bytes, write: Callable[[str, bytes], None]) -> bytes:
    """Own formats: half the mutated inputs have a right hash, so that what is behind it is read."""
    if name == "counts.safetensors":
        manifest = json.loads(seeds()["eplb-trace"][0]["manifest.json"])
        manifest["sha256"] = hashlib.sha256(data).hexdigest()
        write("manifest.json", json.dumps(manifest).encode())
    elif name == ".json" and b"eplb-placement" in data:
        try:
            record = json.loads(data)
            record.pop("sha256", None)
            return json.dumps(record | {"sha256": own._digest(record)}).encode()
        except (ValueError, AttributeError, TypeError):
            return data
    return data


def mutated_member(draw: random.Random, data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(buffer, "w") as changed:
        names = archive.namelist()
        chosen = draw.choice(names)
        for name in names:
            held = archive.read(name)
            changed.writestr(name, mutated(draw, held) if name == chosen else held)
    return buffer.getvalue()


def run_child(reader: str, inputs: int, seed: int, folder: Path) -> Figures:
    """Read mutated inputs of one reader; only in a process of its own."""
    files, options = seeds()[reader]
    draw = random.Random(f"{seed} {reader}")
    is_folder = not all(name.startswith(".") for name in files)
    place = folder / "in" if is_folder else folder / f"in{next(iter(files))}"
    if is_folder:
        place.mkdir()

    def write(name: str, data: bytes) -> None:
        (place / name if is_folder else place).write_bytes(data)

    for name, data in files.items():
        write(name, data)
    name_of_format = reader.partition("/")[0]
    read(str(place), options, name_of_format)  # loads all that is loaded late
    with_error = folder / "missing.json"
    try_read(lambda: read(str(with_error), options), EplbError)
    watch = Watch()
    before = peak_kb(restart=True)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + GROWTH_BYTES,) * 2)
    signal.signal(signal.SIGALRM, too_slow)
    outcomes, wrong, slowest = Counter[str](), list[str](), 0.0
    began = time.process_time()
    for number in range(inputs):
        name = draw.choice(list(files))
        data = mutated_file(draw, files[name])
        if reader.startswith("eplb") and draw.random() < 0.5:
            data = rehashed(name, data, write)
        write(name, data)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        start = time.process_time()
        watch.is_on = True
        kind, text = try_read(lambda: read(str(place), options, name_of_format), EplbError)
        watch.is_on = False
        slowest = max(slowest, time.process_time() - start)
        signal.setitimer(signal.ITIMER_REAL, 0)
        outcomes[kind] += 1
        if kind == "wrong":
            wrong.append(f"input {number}: {text}")
        for name, held in files.items() if is_folder else ():
            write(name, held)
    grown = peak_kb() - before
    return Figures(
        reader,
        inputs,
        outcomes["read"],
        outcomes["refused"],
        wrong[:5] + watch.seen[:5],
        len(watch.seen),
        grown / 1024,
        slowest * 1000,
        time.process_time() - began,
    )


def peak_kb(*, restart: bool = False) -> int:
    """Largest resident size so far; the resource module's includes that of the parent process."""
    if restart:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


def try_read(reads: Callable[[], Any], refusal: type[Exception]) -> tuple[str, str]:
    """How one input ended."""
    try:
        reads()
    except refusal as exc:
        text = str(exc)
        is_sentence = 0 < len(text) < 2000 and text.count("\n") == 0
        return ("refused", "") if is_sentence else ("wrong", f"no sentence: {text[:200]!r}")
    except BaseException as exc:  # whatever it is, it is what is looked for
        return "wrong", f"{type(exc).__name__}: {exc}"[:300]
    return "read", ""


class Watch:
    """Counts events that no reader may cause."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.is_on = False
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_on or event not in BAD_EVENTS:
            return
        if event == "import" and arguments[0] in sys.modules:
            return
        self.seen.append(f"{event} {arguments!r}"[:200])


def too_slow(signum: int, frame: object) -> NoReturn:
    """End the process: no handler of a reader can swallow that."""
    os.write(2, b"an input took longer than the limit\n")
    os._exit(9)


def fuzz(reader: str, inputs: int, seed: int) -> Figures:
    """Run one reader in a child process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.support.formats.fuzz", "--child", reader]
        command += ["--inputs", str(inputs), "--seed", str(seed), "--folder", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lost = f"the process ended with {done.returncode}: {done.stderr[-300:]}"
        return Figures(reader, inputs, 0, 0, [lost], 0, 0.0, 0.0, 0.0)
    return Figures(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", default="")
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(vars(run_child(given.child, given.inputs, given.seed, given.folder))))
        return
    for reader in seeds():
        print(fuzz(reader, given.inputs, given.seed), flush=True)


if __name__ == "__main__":
    main()
