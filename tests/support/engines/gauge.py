"""The gauge of the plug-in's parts, as a scrape of this process would have it."""

from __future__ import annotations

from rebalance.engines.common.start import plugin_gauge


def value_of(engine: str, part: str) -> float | None:
    """Return the gauge of one part; None where there is no gauge."""
    gauge = plugin_gauge()
    return None if gauge is None else float(gauge.labels(engine, part)._value.get())
