"""Lets torchvision be imported beside a CPU build of torch: import this first.

The package's wheel is compiled for CUDA. Without that part its import ends where it declares
shapes of its operators, none of which is called here.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import torch

_LIBRARY = torch.library.Library("torchvision", "DEF")
_PACKAGE = find_spec("torchvision")
assert _PACKAGE is not None, "tests/engines/environment.sh installs it"
assert _PACKAGE.origin is not None, "it is a package with a file"
_DECLARED = (Path(_PACKAGE.origin).parent / "_meta_registrations.py").read_text()
for _name in sorted(set(re.findall(r'(?:torchvision::|register_meta\(")(\w+)', _DECLARED))):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
