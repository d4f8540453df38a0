"""Options that several commands have in common: declared once, as fields of a dataclass.

    @with_options
    def plan(dump: Dump, layers: LayerOptions, output: Output) -> None: ...

A parameter whose type is a dataclass stands for the options that its fields declare.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from api.terminal.printable import printable
from api.terminal.printing import numbers as numbers  # for options with lists of numbers
from eplb.errors import ConfigError

BAD_INPUT = 2  # exit status
MOST_RANKS = 65_536

Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.")]
Redundant = Annotated[
    int | None, typer.Option(min=0, max=MOST_RANKS, help="Redundant experts of a layer.")
]
HiddenLayers = Annotated[
    int | None, typer.Option(min=1, max=65_536, help="Layers of the model, dense ones included.")
]
DeploymentName = Annotated[str, typer.Option(help="Deployment, where the input is a store.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Random seed.")]
Steps = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000_000,
        help="Forward passes of a window. If not given, those that the load tells.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


ConfiguredStore = Annotated[
    str | None, typer.Option(help="The store: a file or URL; else that of the configuration.")
]
ConfiguredDeployment = Annotated[
    str | None,
    typer.Option(help="Name of the deployment; else that of the service or configuration."),
]


Service = Annotated[
    str | None,
    typer.Option(
        envvar="EPLB_SERVICE",
        help="URL of a service, its key in EPLB_KEY; else, or with --store: a store.",
    ),
]


@dataclass(frozen=True)
class ApiOptions:
    """Which API a command asks: of a service by its URL, or in this process on a store."""

    service: Service = None
    store: ConfiguredStore = None
    deployment: ConfiguredDeployment = None

    @property
    def url(self) -> str | None:
        """URL of the service; None: a store is used, which was named or is configured."""
        return self.service if self.store is None else None


@dataclass(frozen=True)
class ReportOptions:
    """How a command gives its report: text for people, JSON for programs."""

    json_output: AsJson = False
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the JSON into this file.")
    ] = None

    def check(self) -> None:
        """Refuse a file that could not be written, before a long run.

        Raises:
            ConfigError: it is a folder, or in none that can be written, or named for other data.
        """
        path = self.output
        if path is not None and path.suffix not in ("", ".json"):
            raise ConfigError(f"--output {path}: JSON is written, expected a name like x.json")
        if path is not None:
            from telemetry.written_files import check_writable

            check_writable(path, "--output")

    def give(self, report: Any, show: Callable[[], object]) -> None:
        """Write the file if it is asked for, and print JSON, or what ``show`` prints.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self.output is not None:
            write_json(self.output, report)
        if self.json_output:
            typer.echo(json.dumps(report, indent=1))
        else:
            show()


def print_report(report: Any, lines: Iterable[str], is_json: bool) -> None:
    """Print a report as JSON, or as its lines."""
    for line in [json.dumps(report, indent=1)] if is_json else map(printable, lines):
        typer.echo(line)


def write_json(path: Path, report: Any) -> None:
    """Write JSON; the file is whole or not there.

    Raises:
        ConfigError: the file cannot be written.
    """
    from telemetry.written_files import write_atomically

    write_atomically(path, f"{json.dumps(report, indent=1)}\n".encode())


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its parameters that are dataclasses, in their places."""
    groups: dict[str, tuple[Any, list[str]]] = {}
    given: list[Parameter] = []
    signature = inspect.signature(command, eval_str=True)
    for one in signature.parameters.values():
        if isinstance(one.annotation, type) and is_dataclass(one.annotation):
            options = [_option(of, one.annotation) for of in fields(one.annotation)]
            groups[one.name] = (one.annotation, [option.name for option in options])
            given += options
        else:
            given.append(one.replace(kind=Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        for name, (kind, options) in groups.items():
            values[name] = kind(**{option: values.pop(option) for option in options})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = signature.replace(parameters=given)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in given}
    return run


def _option(field: Field[Any], group: type) -> Parameter:
    hint = get_type_hints(group, include_extras=True)[field.name]
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


@dataclass(frozen=True)
class LayerOptions:
    """The model of a file."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A known model, or a config.json: MoE layers, bytes, expert groups, which stay on "
            "nodes."
        ),
    ] = None

    def shape(self) -> Any:
        """Return the known model (``ModelShape``); None: none is named.

        Raises:
            ConfigError: the model is not known, or its file lacks a figure.
        """
        from telemetry.formats.model_config import model_by_name

        return model_by_name(self.model) if self.model else None


@dataclass(frozen=True)
class FileOptions:
    """What the options of a command state about a file: each is compared with what is in it."""

    layer_ids: Annotated[str | None, typer.Option(help="Numbers of the MoE layers, as 3-60.")] = (
        None
    )
    first_moe_layer: Annotated[
        int | None,
        typer.Option(min=0, max=65_536, help="The first MoE layer; all after it are too."),
    ] = None
    experts: Annotated[
        int | None, typer.Option(min=1, max=1_048_576, help="Experts of a layer.")
    ] = None
    input_format: Annotated[
        str | None, typer.Option("--format", help="Format of the input, if its name is no help.")
    ] = None
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse recordings that are not cut alike.")
    ] = False

    def reading(self, model: str | None, shape: Any, **others: Any) -> Any:
        """Return how a file is read (``ReadOptions``); a model states its layers and experts.

        Args:
            model: its name; None: none is named.
            shape: of that model.
            others: further statements.

        Raises:
            ConfigError: the layers cannot be read, or experts that the model does not have.
        """
        from eplb.core.model import numbers_in
        from telemetry.formats.types import ReadOptions

        ids = None if self.layer_ids is None else numbers_in(self.layer_ids, "--layer-ids")
        experts = self.experts
        if shape is not None:
            if experts not in (None, shape.num_experts):
                raise ConfigError(
                    f"--experts {experts}, expected {shape.num_experts} as --model {model} has"
                )
            experts = shape.num_experts
            if ids is None and self.first_moe_layer is None:
                ids, others["model"] = shape.layer_ids, model
        stated = {"num_experts": experts, "strict": self.strict, **others}
        return ReadOptions(ids, self.first_moe_layer, **stated)


@dataclass(frozen=True)
class RoutingOptions:
    """What the options of a command tell about raw routing, or about a store."""

    window_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000_000,
            help="Tokens in a window of routing; 4096, or fewer for 24 windows, if not given.",
        ),
    ] = None
    num_layers: Annotated[
        int | None, typer.Option(min=1, max=65_536, help="Layers of raw routing.")
    ] = None
    top_k: Annotated[int | None, typer.Option(min=1, max=64, help="Top-k of raw routing.")] = None
    deployment: DeploymentName = "demo"
