"""Files of ``torch.save`` without torch, and without running what they hold.

A file is a zip archive: ``data.pkl``, a program of the pickle machine, and the bytes of each
tensor. ``pickletools`` takes the program apart and runs nothing. The machine here knows the few
instructions that ``torch.save`` writes for numbers, text, lists, tuples, dicts and tensors; any
other instruction and any other name than those of tensors is refused. Tensors become numpy arrays
over the bytes of the archive, which are held once.

Memory: the machine counts what it makes, and no instruction can ask for memory that the file does
not have; an index of its memo is a key of a dict.
"""

from __future__ import annotations

import pickletools
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eplb.errors import HistoryError
from telemetry.formats.bounded import check_regular

MAX_PICKLE_BYTES = 256 * 2**20
MAX_DIRECTORY_BYTES = 32 * 2**20  # of the archive: 300,000 tensors
END_RECORD = struct.Struct("<4s4H2LH")

_DTYPES = {
    "Double": "<f8",
    "Float": "<f4",
    "Half": "<f2",
    "Long": "<i8",
    "Int": "<i4",
    "Short": "<i2",
    "Char": "<i1",
    "Byte": "<u1",
    "Bool": "<u1",
    "BFloat16": "<u2",  # the upper half of a float32
}
_STORAGES = {("torch", f"{name}Storage"): np.dtype(code) for name, code in _DTYPES.items()}
_STORAGES["torch.storage", "UntypedStorage"] = np.dtype("<u1")  # its tensors name their type
_UNSIGNED = {("torch", f"uint{bits}"): np.dtype(f"<u{bits // 8}") for bits in (16, 32, 64)}
_BFLOAT16 = ("torch", "BFloat16Storage")
_REBUILD, _ORDERED = ("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")
_REBUILD_TYPED = ("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = ("torch._utils", "_rebuild_parameter")
OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # torch's own mark, before release 1.6
_NAMES = {*_STORAGES, *_UNSIGNED, _REBUILD, _REBUILD_TYPED, _ORDERED, _PARAMETER}


class Mark:
    """Marks where the items of a list, tuple or dict begin on the stack."""


MARK = Mark()


class Name(NamedTuple):
    """One of the few names that a program may refer to."""

    module: str
    name: str


@dataclass(frozen=True)
class Storage:
    """The bytes of one or more tensors."""

    dtype: np.dtype[Any]
    data: NDArray[np.uint8]
    is_bfloat16: bool = False


def load_torch(path: Path) -> Any:
    """What ``torch.save`` wrote: tensors as read-only numpy arrays.

    Raises:
        HistoryError: an instruction or a name that is not of tensors; or see ``bounded.reading``.
    """
    size = check_regular(path)
    with path.open("rb") as file:
        if file.read(len(OLD_FORMAT)) == OLD_FORMAT:
            raise HistoryError(
                "a file of torch.save in the format before torch 1.6, expected a zip archive: "
                "write it anew with torch.save(torch.load(PATH), PATH)"
            )
        _check_directory(file, size)
        with zipfile.ZipFile(file) as archive:
            return _Reader(archive, size).load()


def _check_directory(file: IO[bytes], size: int) -> None:
    """Refuse an archive whose list of members alone would take much memory."""
    tail = min(size, 2**16 + END_RECORD.size)
    file.seek(size - tail)
    data = file.read(tail)
    at = data.rfind(b"PK\x05\x06")
    if at < 0 or at + END_RECORD.size > len(data):
        raise HistoryError("no zip archive, expected a file of torch.save")
    directory_bytes = END_RECORD.unpack_from(data, at)[5]
    if directory_bytes > MAX_DIRECTORY_BYTES and directory_bytes != 2**32 - 1:
        raise HistoryError(f"a list of members of {directory_bytes} bytes, expected fewer members")
    if directory_bytes == 2**32 - 1 and size < 2**32 - 1:
        raise HistoryError("a zip64 archive below 4 GiB, expected a plain one")
    file.seek(0)


class _Reader:
    """One archive: its program, and the storages that the program refers to."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self._archive, self._size = archive, size
        self._members = {one.filename: one for one in archive.infolist()}
        programs = [name for name in self._members if name.endswith("/data.pkl")]
        if len(programs) != 1:
            raise HistoryError(f"found {len(programs)} programs data.pkl, expected a torch.save")
        self._program = programs[0]
        self._root = programs[0].removesuffix("data.pkl")
        self._storages: dict[str, Storage] = {}

    def load(self) -> Any:
        order = f"{self._root}byteorder"
        if order in self._members and bytes(self._read(order, 16)) != b"little":
            raise HistoryError("tensors are big-endian, expected little")
        program = self._read(self._program, min(MAX_PICKLE_BYTES, self._size))
        return _Machine(self._storage).run(program.tobytes())

    def _read(self, name: str, most: int) -> NDArray[np.uint8]:
        """The bytes of a member, which ``torch.save`` never packs, against its checksum."""
        info = self._members.get(name)
        if info is None:
            raise HistoryError(f"the archive lacks {name[:80]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise HistoryError(f"{name[:80]!r} is packed or encrypted, expected plain bytes")
        if info.file_size > most:
            raise HistoryError(f"{name[:80]!r} has {info.file_size} bytes, expected at most {most}")
        return np.frombuffer(self._archive.read(info), dtype=np.uint8)

    def _storage(self, kind: Any) -> Storage:
        """The storage of ``("storage", type, key, device, length)``."""
        if not (isinstance(kind, tuple) and len(kind) == 5 and kind[0] == "storage"):
            raise HistoryError("a persistent id that is no storage, expected tensors alone")
        _, name, key, _, length = kind
        if not isinstance(name, Name) or name not in _STORAGES or not isinstance(key, str):
            raise HistoryError(
                f"a storage of {type(name).__name__}, expected one of: {', '.join(_DTYPES)}"
            )
        dtype = _STORAGES[name]
        if key not in self._storages:
            data = self._read(f"{self._root}data/{key}", self._size)
            self._storages[key] = Storage(dtype, data, name == _BFLOAT16)
        found = self._storages[key]
        if (
            found.dtype != dtype
            or not _is_count(length)
            or length * dtype.itemsize > found.data.nbytes
        ):
            raise HistoryError(
                f"storage {key[:20]!r} has {found.data.nbytes} bytes, not its length"
            )
        return found


def _rebuild(arguments: Any) -> NDArray[Any]:
    """A tensor over a storage: (storage, offset, shape, strides, requires_grad, hooks)."""
    if not isinstance(arguments, tuple) or len(arguments) < 4:
        raise HistoryError("a tensor without storage, offset, shape and strides")
    storage, offset, shape, strides = arguments[:4]
    if len(arguments) == 7 and isinstance(storage, Storage):
        kind = arguments[6] if isinstance(arguments[6], Name) else ()
        if kind not in _UNSIGNED:
            raise HistoryError(f"a tensor of {'.'.join(kind)}, expected one of integers")
        storage = Storage(_UNSIGNED[kind], storage.data)
    counts = isinstance(shape, tuple) and isinstance(strides, tuple) and len(shape) == len(strides)
    if not isinstance(storage, Storage) or not counts or len(shape) > 8:
        raise HistoryError("a tensor without storage, offset, shape and strides")
    if not all(map(_is_count, (offset, *shape, *strides))):
        raise HistoryError("a tensor with a negative or huge offset, shape or stride")
    values = storage.data[: storage.data.nbytes // storage.dtype.itemsize * storage.dtype.itemsize]
    values = values.view(storage.dtype)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    is_empty = 0 in shape
    if offset > len(values) or (not is_empty and last >= len(values)):
        raise HistoryError(f"a tensor of shape {shape} ends past its storage of {len(values)}")
    if not is_empty and np.prod(shape, dtype=np.float64) > len(values):
        raise HistoryError(f"a tensor of shape {shape} repeats its storage of {len(values)}")
    steps = tuple(step * storage.dtype.itemsize for step in strides)
    array: NDArray[Any] = np.ndarray(
        shape, storage.dtype, values.data, offset * storage.dtype.itemsize, steps
    )
    if storage.is_bfloat16:
        return (array.astype("<u4") << 16).view("<f4")
    return array


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**48


LITERALS = {"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE"}
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": MARK}
EMPTY: dict[str, Callable[[], Any]] = {"EMPTY_LIST": list, "EMPTY_DICT": dict}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Machine:
    """The part of the pickle machine that numbers, text, containers and tensors need."""

    def __init__(self, storage: Callable[[Any], Storage]) -> None:
        self._storage = storage
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for op, value, _ in pickletools.genops(program):
            if op.name != "STOP":
                self._step(op, value)
        if len(self._stack) != 1:
            raise HistoryError(f"the program ends with {len(self._stack)} values")
        return self._stack[0]

    def _step(self, op: pickletools.OpcodeInfo, value: Any) -> None:
        stack, name = self._stack, op.name
        if name in LITERALS:
            stack.append(value)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name in EMPTY:
            stack.append(EMPTY[name]())
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[value] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            if value not in self._memo:
                raise HistoryError(f"memo {value} is used before it is set")
            stack.append(self._memo[value])
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in TUPLES:
            stack.append(tuple([self._pop() for _ in range(TUPLES[name])][::-1]))
        elif name in ("APPEND", "APPENDS"):
            items = [self._pop()] if name == "APPEND" else self._marked()
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            self._set([self._pop(), self._pop()][::-1] if name == "SETITEM" else self._marked())
        elif name == "GLOBAL":
            stack.append(_named(*value.split(" ", 1)))
        elif name == "BINPERSID":
            stack.append(self._storage(self._pop()))
        elif name == "REDUCE":
            stack.append(_called(self._pop(), self._pop()))
        elif name != "PROTO":
            raise HistoryError(
                f"instruction {op.code.encode('latin-1')!r} in data.pkl, expected numbers, text, "
                "lists, tuples, dicts and tensors"
            )
        elif value != 2:
            raise HistoryError("the program is not of protocol 2, as torch.save writes it")

    def _set(self, flat: list[Any]) -> None:
        keys, values = flat[::2], flat[1::2]
        if len(keys) != len(values) or not all(isinstance(key, str | int) for key in keys):
            raise HistoryError("a dict with keys other than text and numbers")
        self._top(dict).update(zip(keys, values, strict=True))

    def _top(self, kind: type = object) -> Any:
        if not self._stack or not isinstance(self._stack[-1], kind) or self._stack[-1] is MARK:
            raise HistoryError("an instruction without its operands")
        return self._stack[-1]

    def _pop(self) -> Any:
        self._top()
        return self._stack.pop()

    def _marked(self) -> list[Any]:
        items: list[Any] = []
        while self._stack:
            if (item := self._stack.pop()) is MARK:
                return items[::-1]
            items.append(item)
        raise HistoryError("an instruction without its mark")


def _named(module: str, name: str) -> Name:
    if (module, name) not in _NAMES:
        raise HistoryError(
            f"name {module[:80]}.{name[:80]} in data.pkl, expected those of tensors alone: save "
            "the counts, or the placement, as one tensor"
        )
    return Name(module, name)


def _called(arguments: Any, function: Any) -> Any:
    path = function if isinstance(function, Name) else ()
    if path in (_REBUILD, _REBUILD_TYPED):
        return _rebuild(arguments)
    if path == _PARAMETER and isinstance(arguments, tuple) and isinstance(arguments[0], np.ndarray):
        return arguments[0]
    if path == _ORDERED and arguments in ((), []):
        return {}
    called = ".".join(path) or type(function).__name__
    raise HistoryError(f"a call of {called}, expected tensors alone")
