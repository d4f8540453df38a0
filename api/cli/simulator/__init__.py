"""``eplb simulate``, ``eplb sweep`` and ``eplb recommend``."""
