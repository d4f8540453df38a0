"""Routes and commands: what every declaration has, and what the document says of it."""

from __future__ import annotations

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from api.app import create_app
from api.http.dependencies import if_known_revision
from api.operations.commands import COMMANDS, Argument, arguments_of, keys_of, table_in
from api.operations.live_settings import SettingsRequest
from api.operations.table import ROUTES
from eplb.declared import without_none
from tests.support.stores import MemoryStore


def headers_of(route: APIRoute) -> list[str]:
    """Headers that dependencies of a route read."""
    return [one.name for of in route.dependant.dependencies for one in of.header_params]


def arguments() -> dict[str, Argument]:
    """Every argument of a route or command; tables of bodies opened."""
    found = dict[str, Argument]()
    functions = [route.endpoint for route in ROUTES]
    functions += [one.function for one in COMMANDS.values() if not one.is_of_route]
    for function in functions:
        for name, one in arguments_of(function).items():
            found[f"{function.__name__}: {name}"] = one
            if (table := table_in(one.kind)) is not None:
                found |= {f"{function.__name__}: {name}.{k}": v for k, v in keys_of(table).items()}
    return found


@pytest.mark.parametrize(("name", "argument"), arguments().items())
def test_argument_has_a_meaning_and_a_number_has_an_upper_bound(
    name: str, argument: Argument
) -> None:
    kind, _ = without_none(argument.kind)

    assert argument.meaning.text
    assert kind not in (int, float) or argument.meaning.at_most is not None


@pytest.mark.parametrize("route", ROUTES)
def test_every_parameter_of_a_route_is_an_argument_with_a_meaning(
    route: APIRoute,
) -> None:
    dependant = route.dependant
    expected = {one.name for one in (*dependant.path_params, *dependant.query_params)}
    for body in dependant.body_params:
        model: type[BaseModel] = body.field_info.annotation  # type: ignore[assignment]
        expected |= set() if model is SettingsRequest else set(model.model_fields)

    assert expected == arguments_of(route.endpoint).keys()


def test_document_has_each_operation_with_its_own_id_and_description() -> None:
    document = create_app(MemoryStore("d")).openapi()
    found = {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }

    assert found.keys() == {(method, one.path) for one in ROUTES for method in one.methods}
    assert len({one["operationId"] for one in found.values()}) == len(ROUTES)
    assert all(one["summary"] and one["description"] for one in found.values())


@pytest.mark.parametrize(
    "route",
    [one for one in ROUTES if "if_match" in headers_of(one)],
)
def test_operation_with_a_precondition_documents_its_header_and_refusal(route: APIRoute) -> None:
    document = create_app(MemoryStore("d")).openapi()
    (method,) = route.methods
    documented = document["paths"][route.path][method.lower()]
    (header,) = [one for one in documented["parameters"] if one["in"] == "header"]
    is_required = any(one.call is if_known_revision for one in route.dependant.dependencies)

    assert header["name"] == "if-match"
    assert header["required"] is is_required
    assert "412" in documented["responses"]
    assert ("428" in documented["responses"]) is is_required


def test_document_says_how_a_request_proves_its_key() -> None:
    document = create_app(MemoryStore("d")).openapi()

    assert document["components"]["securitySchemes"].keys() == {"bearer", "basic"}
    assert document["security"] == [{"bearer": []}, {"basic": []}, {}]
    assert document["paths"]["/livez"]["get"]["security"] == []
    assert "security" not in document["paths"]["/api/v1/state"]["get"]
