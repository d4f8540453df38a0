"""How long tests wait: for events, without a limit of their own.

A limit that means "it hangs" must not be one that a busy machine reaches. So there is one, of the
whole suite: after 15 minutes in one test pytest prints where every thread stands and ends the
process (``faulthandler_timeout`` in ``pyproject.toml``). Helpers and tests wait for as long as it
takes. What has to be quick is measured in ``benchmarks/``.
"""

from __future__ import annotations

# For parameters of the product that need a number, and of libraries that have a limit unless they
# are given one: later than the suite's own limit, which reports where the test stands.
NEVER_S = 3600.0
