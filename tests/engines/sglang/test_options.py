"""``eplb check --engine``: a command as SGLang's own parser reads it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang", reason="run `make test-engines`: it has SGLang in .venv-sglang")

import tests.support.engines.cpu_torchvision  # noqa: F401  # first: the engine imports it
from eplb.errors import ConfigError
from rebalance.engines.common.command import command_of
from rebalance.engines.sglang.options import options_of, remarks

pytestmark = pytest.mark.slow
GOOD = (
    "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 32 --ep-size 32 "
    "--nnodes 4 --moe-a2a-backend deepep --enable-eplb --ep-num-redundant-experts 32"
)


def read(command: str) -> Any:
    """The options of a command."""
    return options_of(command_of(command)[1])


def test_command_of_the_page_fits_with_what_sglang_sets_itself() -> None:
    options = read(GOOD)

    assert (options.tp_size, options.ep_size, options.ep_dispatch_algorithm) == (32, 32, "static")
    assert [one for one in remarks(options, {"n_routed_experts": 256}) if one.expected] == []


@pytest.mark.parametrize(
    ("added", "sentence"),
    [
        ("--enable-ebpl", "expected an option of SGLang: --enable-eplb"),
        ("--nnodes two", "invalid int value: 'two'"),
        ("--moe-a2a-backend deepeep", "invalid choice: 'deepeep'"),
    ],
)
def test_what_sglang_refuses_is_refused_with_its_words(added: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(f"{GOOD} {added}")

    assert sentence in str(caught.value)
