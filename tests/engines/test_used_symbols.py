"""Every symbol of an engine that the plug-in uses is declared, and refused where it is renamed.

Which symbols are used is read from the plug-in's own source: what it imports of the engine, and
what it reads of the engine's objects. The class of an object does not stand in the source:
``OBJECTS`` names it, by the name that the object has there.
"""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import rebalance.engines
from rebalance.engines.common.guards import Assumptions, PackageSource, Part, refusals, source_of
from tests.support.engines.which import ASSUMPTIONS, NAME

DECLARED: dict[str, Assumptions] = {
    name: assumed for name, assumed in vars(ASSUMPTIONS).items() if isinstance(assumed, Assumptions)
}
SOURCE = source_of(NAME)
# Those that this release is not too old for.
EXPECTED = [
    assumed
    for assumed in DECLARED.values()
    if not any("or newer" in refusal for refusal in refusals(assumed, SOURCE))
]
FOLDER = Path(rebalance.engines.__file__).parent / NAME

OF_CONFORM = ("layers.py",)  # it serves nothing: `eplb conform` refuses what it cannot import
if NAME == "vllm":
    EPLB, MOE = ASSUMPTIONS.EPLB, ASSUMPTIONS.FUSED_MOE
    OBJECTS: dict[str, dict[str, str]] = {
        "*": {
            "state": f"{EPLB}.eplb_state.EplbState",
            "model_state": f"{EPLB}.eplb_state.EplbModelState",
            "each": f"{EPLB}.eplb_state.EplbModelState",
            "model": "vllm.model_executor.models.interfaces.MixtureOfExperts",
            "group": "vllm.distributed.parallel_state.GroupCoordinator",
            "_group": "vllm.distributed.parallel_state.GroupCoordinator",
            "get_pp_group()": "vllm.distributed.parallel_state.GroupCoordinator",
            "parallel_config": "vllm.config.parallel.ParallelConfig",
            "parallel": "vllm.config.parallel.ParallelConfig",
            "eplb_config": "vllm.config.parallel.EPLBConfig",
            "balancer": "vllm.config.parallel.EPLBConfig",
            "model_config": "vllm.config.model.ModelConfig",
            "scheduler_output": "vllm.v1.core.sched.output.SchedulerOutput",
            "_own": f"{EPLB}.eplb_communicator.EplbCommunicator",
            "by": f"{EPLB}.eplb_communicator.EplbCommunicator",
            "layers[]": f"{MOE}.runner.moe_runner.MoERunner",
            "layer": f"{MOE}.runner.moe_runner.MoERunner",
            "experts_of()": f"{MOE}.routed_experts.RoutedExperts",
            "experts": f"{MOE}.routed_experts.RoutedExperts",
            "method": f"{MOE}.fused_moe_method_base.FusedMoEMethodBase",
            "quant_method": f"{MOE}.fused_moe_method_base.FusedMoEMethodBase",
            "config": f"{MOE}.config.FusedMoEQuantConfig",
            "kernel": f"{MOE}.modular_kernel.FusedMoEKernel",
            "desc": f"{MOE}.config.FusedMoEQuantDesc",
        },
        "replay.py": {"layer": "", "own": ""},
        "mover.py": {"layer": "", "moved": f"{EPLB}.rebalance_execute.TransferMetadata"},
        "options.py": {
            "options": "vllm.config.parallel.ParallelConfig",
            "current_platform": "vllm.platforms.interface.Platform",
            "model": "",
        },
        "process.py": {"experts": ""},
        "reload.py": {"info": f"{ASSUMPTIONS.LAYERWISE}.types.LayerReloadingInfo"},
        "policy.py": {"state": ""},
    }
    # Used by a name that the source computes, or of an object whose name others have too.
    BY_HAND = (
        f"{EPLB}.policy.abstract.AbstractEplbPolicy.rebalance_experts",
        f"{EPLB}.eplb_communicator.TorchDistGlooStagedEplbCommunicator._ops",
        *(f"{runner}.GPUModelRunner.execute_model" for runner in ASSUMPTIONS.RUNNERS),
        f"{ASSUMPTIONS.RUNNERS[0]}.GPUModelRunner.num_spec_tokens",
        f"{ASSUMPTIONS.RUNNERS[1]}.GPUModelRunner.num_speculative_steps",
        *(f"{MOE}.config.FusedMoEQuantConfig._{part}" for part in ("a1", "a2", "w1", "w2")),
        *(f"{MOE}.config.FusedMoEQuantDesc.{one}" for one in ("scale", "alpha_or_gscale")),
    )
    # What no class of vLLM declares.
    UNDECLARED = {
        f"{MOE}.routed_experts.RoutedExperts": {"w13_weight", "w2_weight"},  # quantisations do
        # The first is one of ``ModelConfig``, ``lines`` names where vLLM reads the second.
        "vllm.config.parallel.ParallelConfig": {"model", "model_tag"},
    }
else:
    from rebalance.engines.sglang.rounds import PHASES

    EPLB, FIELDS = ASSUMPTIONS.EPLB, ASSUMPTIONS.FIELDS
    OBJECTS = {
        "*": {
            "metadata()": f"{EPLB}.expert_location.ExpertLocationMetadata",
            "live": f"{EPLB}.expert_location.ExpertLocationMetadata",
            "manager": f"{EPLB}.eplb_manager.EPLBManager",
            "_manager": f"{EPLB}.eplb_manager.EPLBManager",
            "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
        },
        "engine.py": {
            "moe": f"{FIELDS}.exec_.ExecMoe",
            "parallel": f"{FIELDS}.parallel.Parallel",
            "get_parallel()": f"{FIELDS}.parallel.Parallel",
            "model": f"{FIELDS}.model.Model",
            "config": f"{EPLB}.expert_location.ModelConfigForExpertLocation",
            "state": f"{ASSUMPTIONS.ELASTIC}.ElasticEPState",
            "_get_weight_updater()": f"{ASSUMPTIONS.RUNNER}.weight_updater.WeightUpdater",
            "recorder": f"{EPLB}.expert_distribution._ExpertDistributionRecorderReal",
        },
        "rounds.py": {"live": ""},
    }
    BY_HAND = (
        f"{EPLB}.eplb_manager.EPLBManager.on_forward_pass_end",
        f"{EPLB}.expert_distribution._ExpertDistributionRecorderReal._on_forward_pass_start",
        f"{EPLB}.expert_distribution._StatAccumulator.append",
        f"{EPLB}.eplb_algorithms.elasticity_aware.rebalance_experts",
        f"{ASSUMPTIONS.ELASTIC}.ElasticEPState.reset",
        *(
            f"sglang.srt.model_executor.forward_batch_info.ForwardMode.{mode}"
            for mode in ("IDLE", *PHASES)
        ),
    )
    UNDECLARED = {
        # Each model with experts has it: ``lines`` names where the engine reads it.
        f"{FIELDS}.model.Model": {"routed_experts_weights_of_layer"},
    }


def last_name(node: ast.AST) -> str:
    """The last name of an expression; of a call with "()", of an item with "[]"."""
    if isinstance(node, ast.Call):
        return f"{last_name(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{last_name(node.value)}[]"
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def path_of(node: ast.AST, imported: Mapping[str, str]) -> str:
    """The dotted path of an expression of imported names; "" for any other."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    owner = path_of(node.value, imported) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


def used_in(file: Path) -> Iterator[str]:
    """Dotted paths of the engine's symbols that a file of the plug-in uses."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    classes = OBJECTS["*"] | OBJECTS.get(file.name, {})
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{NAME}."):
            for each in node.names:
                path = f"{node.module}.{each.name}"
                imported[each.asname or each.name] = path
                part = SOURCE.find(path)
                if part is None or not isinstance(part.node, ast.Module):
                    yield path
    for node in ast.walk(tree):
        base, name = None, ""
        if isinstance(node, ast.Attribute):
            base, name = node.value, node.attr
        elif isinstance(node, ast.Call) and last_name(node.func) in ("getattr", "wrap"):
            base, second = node.args[:2]
            name = str(second.value) if isinstance(second, ast.Constant) else ""
        if base is None or not name or name.startswith("__"):
            continue
        if owner := classes.get(last_name(base), "") or path_of(base, imported):
            yield f"{owner}.{name}"


def used_symbols() -> list[str]:
    """All symbols that the plug-in uses."""
    files = [one for one in sorted(FOLDER.glob("*.py")) if one.name not in OF_CONFORM]
    return sorted({*BY_HAND, *(path for file in files for path in used_in(file))})


def declared_symbols(assumptions: Iterable[Assumptions] = DECLARED.values()) -> set[str]:
    """Dotted paths of all symbols that are declared."""
    found = set()
    for assumed in assumptions:
        for path, names in assumed.signatures.items():
            found.update(path.split("|"))
            found.update(f"{path}.{name.strip('[]')}" for name in names.split())  # a class's fields
        for path, words in assumed.attributes.items():
            found.update(f"{path}.{word}" for word in words.split())
        found.update(assumed.digests)
    return found


OF_RELEASE = declared_symbols(EXPECTED)
OF_RELEASE |= {path.rpartition(".")[0] for path in OF_RELEASE}  # a class is declared by its members


def is_undeclared(path: str) -> bool:
    """Whether no class of the engine has it."""
    owner, _, name = path.rpartition(".")
    return name in UNDECLARED.get(owner, ())


def places(path: str) -> Iterator[tuple[Part, str]]:
    """Where a symbol is bound: in the class or module that has it, or where it is imported from."""
    owner, _, name = path.rpartition(".")
    holder = SOURCE.find(owner)
    assert holder is not None, path
    yield holder, name
    part = SOURCE.find(path)
    if part is not None and part.module.file != holder.module.file:
        yield Part(part.module, part.module.tree), getattr(part.node, "name", name)


def renamed(part: Part, name: str) -> str:
    """The source of a part's file, with another name in that part."""
    lines = part.module.text.splitlines(keepends=True)
    first, last = 0, len(lines)
    if isinstance(part.node, ast.ClassDef) and not part.node.bases:  # else a parent may have it
        first, last = part.node.lineno - 1, part.node.end_lineno or last
    own = re.sub(rf"\b{re.escape(name)}\b", f"{name}_renamed", "".join(lines[first:last]))
    return "".join(lines[:first]) + own + "".join(lines[last:])


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> PackageSource:
    """A copy of the files of the engine that the declarations read."""
    root = tmp_path_factory.mktemp("wheel") / NAME
    read = source_of(NAME)
    for assumed in EXPECTED:
        assert list(refusals(assumed, read)) == []
    for file in read.files:
        target = root / file.relative_to(read.folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    return PackageSource(root)


def test_every_symbol_that_the_plugin_uses_is_declared() -> None:
    declared = declared_symbols()
    # A class is declared by its members.
    known = declared | {path.rpartition(".")[0] for path in declared}

    print(f"{len(used_symbols())} symbols of {NAME} are used")
    assert [one for one in used_symbols() if one not in known and not is_undeclared(one)] == []
    assert len(used_symbols()) > 60, "the plug-in's source was read"


@pytest.mark.parametrize("path", [one for one in used_symbols() if not is_undeclared(one)])
def test_engine_with_a_renamed_symbol_is_refused(path: str, copy: PackageSource) -> None:
    owner = path.rpartition(".")[0]
    if SOURCE.find(owner) is None or not {path, owner} & OF_RELEASE:
        pytest.skip(f"{path} is of another release")
    for part, symbol in places(path):
        file = copy.folder / part.module.file.relative_to(SOURCE.folder)
        before = file.read_text(encoding="utf-8")
        try:
            file.write_text(renamed(part, symbol), encoding="utf-8")
            copy.forget(file)
            found = [one for assumed in EXPECTED for one in refusals(assumed, copy)]
        finally:
            file.write_text(before, encoding="utf-8")
            copy.forget(file)

        assert [one for one in found if symbol in one], f"{symbol} in {file.name}"
