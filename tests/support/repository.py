"""Where the repository is, and the recorded traces if there are any."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("EPLB_DATA", ROOT.parent / "shared" / "data"))
