"""Right files changed as people and tools change them: types, shapes, order, headers, rows, ends.

Each change keeps what the file counts, or makes a file that counts nothing as a whole. A change to
another right file, such as another count in a cell or one window more, is none of these.
"""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from telemetry.formats.table import read
from telemetry.formats.torch_file import load_torch
from telemetry.formats.types import LoadFile, ReadOptions
from tests.support.formats.seeds import STORAGE, npy, npz, seeds, torch_file

DTYPES = ("i1", "u1", "i2", "u2", ">i2", "i4", "u4", ">i4", "i8", "u8", ">i8", "f4", "f8", ">f8")
BY_TOKEN = {(2, 32, 2), (2, 2, 3)}  # arrays of the seeds whose second axis is tokens
Files = Mapping[str, bytes]


def mutations(reader: str, count: int, seed: int) -> Iterator[tuple[str, Files]]:
    """So many changed versions of a format's files, each with what was changed."""
    draw = random.Random(f"{seed} {reader}")
    files, _ = seeds()[reader]
    made = 0
    while made < count:
        name = draw.choice(sorted(files))
        changed = _changed(draw, name, files[name])
        if changed is None or changed[1] == files[name]:
            continue
        made += 1
        yield f"{name}: {changed[0]}", {**files, name: changed[1]}


def statement(reader: str, place: str) -> ReadOptions:
    """All that a user can state about the right file of a format."""
    _, options = seeds()[reader]
    found = read(place, options, reader.partition("/")[0])
    if isinstance(found, LoadFile):
        options = replace(options, num_experts=found.history.num_experts)
        if found.top_k is not None:
            options = replace(options, num_layers=len(found.layers.ids), top_k=found.top_k)
    else:
        options = replace(options, num_experts=found.placement.num_experts)
    return replace(
        options,
        layer_ids=found.layers.ids,
        num_ranks=found.num_ranks,
        num_hidden=found.layers.num_hidden,
        strict=True,
    )


def content_of(place: str, options: ReadOptions, name: str | None) -> Any:
    """What a plan is made of: counts of windows with tokens, or experts by slot; with layers."""
    found = read(place, options, name)
    if isinstance(found, LoadFile):
        tokens = found.history.tokens
        return tokens[tokens.any(axis=(1, 2))].tolist(), found.layers.ids
    return found.placement.slot_to_expert.tolist(), found.layers.ids


def _changed(draw: random.Random, name: str, data: bytes) -> tuple[str, bytes] | None:
    suffix = Path(f"x{name}").suffix
    if draw.random() < 0.1 and suffix not in (".bin", ".jsonl"):
        at = draw.randrange(1, len(data))
        return f"cut at byte {at}", data[:at]
    changes: dict[str, Callable[[random.Random, bytes], tuple[str, bytes] | None]] = {
        ".npy": lambda draw, data: _of_array(draw, np.load(io.BytesIO(data)), npy),
        ".npz": _of_npz,
        ".pt": _of_torch,
        ".safetensors": _of_tensors,
        ".json": _of_json,
        ".jsonl": _of_lines,
        ".csv": _of_csv,
        ".yaml": _of_yaml,
        ".bin": _of_raw,
    }
    return changes[suffix](draw, data)


def _of_array(
    draw: random.Random, values: NDArray[Any], write: Callable[[NDArray[Any]], bytes]
) -> tuple[str, bytes] | None:
    kind = draw.choice(("type", "type", "axis", "zero", "twice", "lost", "order", "memory", "sign"))
    axis = draw.randrange(max(0, values.ndim - 2), values.ndim) if values.ndim else 0
    if values.shape in BY_TOKEN and (axis == 1 or (axis == 2 and kind == "lost")):
        return None  # another right recording: of other tokens, or of a smaller top-k
    if kind == "type":
        dtype = np.dtype(draw.choice(DTYPES))
        changed = values.astype(dtype)
        if not np.array_equal(changed.astype(np.float64), values.astype(np.float64)):
            return None
    elif kind == "axis":
        changed = draw.choice((values[None], values[..., None], values.ravel()))
    elif kind == "zero":
        at = draw.randrange(values.shape[axis] + 1) if values.ndim else 0
        changed = np.insert(values, at, 0, axis=axis) if values.ndim else values
    elif kind == "twice":
        at = draw.randrange(values.shape[axis])
        changed = np.insert(values, at, values.take(at, axis=axis), axis=axis)
    elif kind == "lost":
        changed = np.delete(values, draw.randrange(values.shape[axis]), axis=axis)
    elif kind == "order" and values.ndim > 1:
        one, two = draw.sample(range(values.ndim), 2)
        if values.shape[one] == values.shape[two]:
            return None  # another right file
        changed = np.ascontiguousarray(values.swapaxes(one, two))
    elif kind == "memory":
        changed = np.asfortranarray(values)
    else:
        changed = values.astype(np.int64)
        changed.flat[draw.randrange(values.size)] = -7
    try:
        return f"{kind} of axis {axis}: {changed.dtype.str} {changed.shape}", write(changed)
    except KeyError:  # a type that torch.save does not know
        return None


def _of_npz(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    with np.load(io.BytesIO(data)) as archive:
        arrays = dict(archive)
    return _of_table(draw, arrays, lambda changed: npz(**changed))


def _of_tensors(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    def write(changed: dict[str, Any]) -> bytes:
        whole = {name: np.ascontiguousarray(one) for name, one in changed.items()}
        if any(one.dtype.byteorder == ">" for one in whole.values()):
            raise KeyError("big-endian")
        return save(whole)

    return _of_table(draw, load(data), write)


def _of_table(
    draw: random.Random, arrays: dict[str, Any], write: Callable[[dict[str, Any]], bytes]
) -> tuple[str, bytes] | None:
    name = draw.choice(sorted(arrays))
    kind = draw.choice(("array", "array", "array", "lost", "renamed", "extra"))
    if kind == "array" and arrays[name].dtype.kind in "iuf" and arrays[name].ndim:
        found = _of_array(draw, arrays[name], lambda one: write({**arrays, name: one}))
        return found and (f"{name}: {found[0]}", found[1])
    rest = {key: value for key, value in arrays.items() if key != name}
    if kind == "extra":
        return "an array more", write({**arrays, "extra": np.array([1, 2])})
    changed = {**rest, f"{name}_x": arrays[name]} if kind == "renamed" else rest
    return f"{name} {kind}", write(changed)


def _of_torch(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    path = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp") / f"eplb-{id(draw)}.pt"
    path.write_bytes(data)
    try:
        value = load_torch(path)
    finally:
        path.unlink()
    if isinstance(value, np.ndarray):
        return _of_array(draw, value, _torch_of)
    return _of_tree(draw, value, _torch_of)


def _torch_of(value: Any) -> bytes:
    for one in _leaves(value):
        if isinstance(one, np.ndarray) and (
            one.dtype.name not in STORAGE or one.dtype.byteorder == ">"
        ):
            raise KeyError(one.dtype.name)
        if isinstance(one, float):
            raise KeyError("a float")
    return torch_file(value)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value


def _of_json(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    return _of_tree(draw, json.loads(data), lambda value: json.dumps(value).encode())


def _of_lines(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    lines = data.splitlines()
    at = draw.randrange(len(lines))
    if draw.random() < 0.2:
        return f"line {at} twice", b"\n".join([*lines[: at + 1], *lines[at:]])
    if draw.random() < 0.1:
        lines[at] = lines[at][: draw.randrange(1, len(lines[at]))]
        return f"line {at} is cut", b"\n".join(lines)
    found = _of_json(draw, lines[at])
    if found is None:
        return None
    lines[at] = found[1]
    return f"line {at}: {found[0]}", b"\n".join(lines)


def _of_tree(
    draw: random.Random, value: Any, write: Callable[[Any], bytes]
) -> tuple[str, bytes] | None:
    """One node of nested dicts, lists and numbers changed."""
    root = [value]
    places: list[tuple[Any, Any]] = []

    def walk(container: Any) -> None:
        for key in container if isinstance(container, dict) else range(len(container)):
            places.append((container, key))
            if isinstance(container[key], dict | list):
                walk(container[key])

    root = json.loads(json.dumps(root)) if not _has_arrays(root) else _copied(root)
    walk(root)
    container, key = draw.choice(places)
    node = container[key]
    if isinstance(node, np.ndarray):
        changed = _of_array(draw, node, lambda one: write(_put(root, container, key, one)))
        return changed and (f"{key}: {changed[0]}", changed[1])
    if isinstance(node, dict):
        name = draw.choice(sorted(node, key=str)) if node else ""
        kind = draw.choice(("lost", "renamed", "extra", "order"))
        if kind == "extra":
            node["extra"] = 7
        elif kind == "order":
            moved = dict(reversed(node.items()))
            node.clear()
            node.update(moved)
        elif node:
            kept = node.pop(name)
            if kind == "renamed":
                node[f"{name}_x"] = kept
        what = f"key {name} {kind}"
    elif isinstance(node, list) and node:
        at = draw.randrange(len(node))
        kind = draw.choice(("lost", "twice", "zero", "wrapped", "text"))
        if kind == "lost":
            node.pop(at)
        elif kind == "twice":
            node.insert(at, node[at])
        elif kind == "zero":
            node.insert(at, _zero(node[at]))
        else:
            node[at] = [node[at]] if kind == "wrapped" else "x"
        what = f"item {at} of {key} {kind}"
    elif isinstance(node, int) and not isinstance(node, bool):
        container[key] = draw.choice((float(node), float(node), str(node), None, True, -7, [node]))
        what = f"{key} is {container[key]!r}"
    else:
        container[key] = draw.choice((7, "x", [], None))
        what = f"{key} is {container[key]!r}"
    try:
        return what, write(root[0])
    except (KeyError, AttributeError):
        return None


def _put(root: list[Any], container: Any, key: Any, value: Any) -> Any:
    container[key] = value
    return root[0]


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _has_arrays(value: Any) -> bool:
    return any(isinstance(one, np.ndarray) for one in _leaves(value))


def _zero(value: Any) -> Any:
    if isinstance(value, list):
        return [_zero(one) for one in value]
    return {} if isinstance(value, dict) else 0


def _of_csv(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    rows = [line.split(",") for line in data.decode().splitlines()]
    line, column = draw.randrange(len(rows)), draw.randrange(len(rows[0]))
    kind = draw.choice(
        (
            *("float", "text", "negative", "twice", "zero", "order", "columns", "lost", "extra"),
            *("bom", "separator", "no header", "renamed", "empty lines", "returns", "spaces"),
        )
    )
    before, after = "", "\n"
    if kind in ("float", "text", "negative") and line:
        cell = rows[line][column]
        forms = {
            "float": draw.choice((f"{cell}.0", f"{cell}e0", f"+{cell}", f"{int(cell) * 10}e-1")),
            "text": draw.choice(("x", "", "1.5", "nan", "0x1")),
            "negative": f"-{int(cell) + 1}",
        }
        rows[line][column] = forms[kind]
    elif kind == "twice":
        rows.insert(line, rows[line])
    elif kind == "zero" and line:
        rows.insert(line, ["0"] * len(rows[0]))
    elif kind == "order":
        rows[1:] = draw.sample(rows[1:], len(rows) - 1)
    elif kind == "columns":
        order = draw.sample(range(len(rows[0])), len(rows[0]))
        rows = [[row[at] for at in order] for row in rows]
    elif kind == "lost":
        rows = [row[:column] + row[column + 1 :] for row in rows]
    elif kind == "extra":
        name = draw.choice(("total", "9", "step", rows[0][column]))
        rows = [
            [*row[:column], "1" if number else name, *row[column:]]
            for number, row in enumerate(rows)
        ]
    elif kind == "bom":
        before = "\ufeff"
    elif kind == "no header":
        rows.pop(0)
    elif kind == "renamed":
        rows[0][column] += "x"
    elif kind in ("empty lines", "returns"):
        after = "\n\n" if kind == "empty lines" else "\r\n"
    elif kind == "spaces":
        rows = [[f" {cell} " for cell in row] for row in rows]
    elif kind != "separator":
        return None
    between = draw.choice((";", "\t", " ")) if kind == "separator" else ","
    text = before + "".join(between.join(row) + after for row in rows)
    return f"{kind} at {line}, {column}", text.encode()


def _of_yaml(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    lines = data.decode().splitlines()
    at = draw.randrange(len(lines))
    kind = draw.choice(("lost", "twice", "cell lost", "cell twice", "float", "text", "renamed"))
    head, sep, row = lines[at].partition("[")
    if kind in ("lost", "twice"):
        lines[at : at + 1] = [] if kind == "lost" else [lines[at]] * 2
    elif kind == "renamed":
        lines[at] = lines[at].replace(":", "x:", 1)
    elif sep:
        cells = row.rstrip("]").split(", ")
        place = draw.randrange(len(cells))
        forms = {
            "cell lost": [],
            "cell twice": [cells[place]] * 2,
            "float": [f"{cells[place]}.0"],
            "text": ["x"],
        }
        cells[place : place + 1] = forms[kind]
        lines[at] = f"{head}[{', '.join(cells)}]"
    else:
        return None
    return f"{kind} in line {at}", "\n".join(lines).encode()


def _of_raw(draw: random.Random, data: bytes) -> tuple[str, bytes] | None:
    ids = np.frombuffer(data, dtype="<i4")
    kind = draw.choice((">i4", "<i2", "<i8", "<f4", "cut", "text", "negative", "base64"))
    if kind == "base64":
        return kind, base64.encodebytes(data)
    if kind == "cut":
        at = draw.randrange(1, len(data))
        return (f"cut at {at}", data[:at]) if at % 16 else None
    if kind == "text":
        return "text", " ".join(map(str, ids)).encode()
    if kind == "negative":
        changed = ids.copy()
        changed[draw.randrange(len(ids))] = -7
        return kind, changed.tobytes()
    return kind, ids.astype(kind).tobytes()
