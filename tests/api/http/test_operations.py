"""The table of operations: what every declaration has, and what its import loads."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Any, get_args, get_origin

import pytest

from api.http.app import create_app
from api.operations.declaration import Operation, arguments_of, fields_of
from api.operations.table import COMMANDS, OPERATIONS
from eplb.declared import Meaning
from tests.support.repository import ROOT
from tests.support.stores import MemoryStore

NUMBERS = (int, float, int | None, float | None)
LIBRARIES = {"fastapi", "httpx", "numba", "numpy", "pydantic", "redis", "starlette", "torch"}


def arguments() -> dict[str, Any]:
    """Every argument of an operation or command, with its type; tables of bodies opened."""
    found = dict[str, Any]()
    opened = [(one.name, one.arguments) for one in OPERATIONS if one.body is None]
    opened += [(one.words, arguments_of(one.run)) for one in COMMANDS if one.run is not None]
    while opened:
        of, named = opened.pop()
        for name, one in named.items():
            found[f"{of}: {name}"] = one.hint
            tables = [part for part in parts_of(one.hint) if is_dataclass(part)]
            opened += [(f"{of}: {name}", fields_of(table)) for table in tables]
    return found


def parts_of(hint: Any) -> set[Any]:
    """The types that a type is made of."""
    if get_origin(hint) in (Annotated, UnionType, list):
        return set().union(*map(parts_of, get_args(hint)))
    return {hint} if isinstance(hint, type) else set()


@pytest.mark.parametrize(("name", "hint"), arguments().items())
def test_argument_has_a_meaning_and_a_number_has_an_upper_bound(name: str, hint: Any) -> None:
    assert get_origin(hint) is Annotated, f"{name} has no meaning"
    base, meaning, *_ = get_args(hint)
    assert isinstance(meaning, Meaning)
    assert meaning.text

    assert base not in NUMBERS or meaning.at_most is not None


def test_table_of_operations_is_imported_without_any_library() -> None:
    code = "import sys, api.operations.table; print(*{n.partition('.')[0] for n in sys.modules})"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert LIBRARIES & set(done.stdout.split()) == set()


def test_document_has_each_operation_with_its_own_id_and_description() -> None:
    document = create_app(MemoryStore("d")).openapi()
    found = {
        f"{method.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }

    assert found.keys() == {one.route for one in OPERATIONS}
    assert len({one["operationId"] for one in found.values()}) == len(OPERATIONS)
    assert all(one["description"] for one in found.values())


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if one.if_match])
def test_operation_with_a_precondition_documents_its_header_and_refusal(
    operation: Operation,
) -> None:
    document = create_app(MemoryStore("d")).openapi()
    route = document["paths"][operation.path][operation.method.lower()]
    (header,) = [one for one in route["parameters"] if one["in"] == "header"]

    assert header["name"] == "if-match"
    assert header["required"] is (operation.if_match == "known revision")
    assert "412" in route["responses"]
    assert ("428" in route["responses"]) is (operation.if_match == "known revision")


def test_document_says_how_a_request_proves_its_key() -> None:
    document = create_app(MemoryStore("d")).openapi()

    assert document["components"]["securitySchemes"].keys() == {"bearer", "basic"}
    assert document["security"] == [{"bearer": []}, {"basic": []}, {}]
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/api/v1/state"]["get"]
