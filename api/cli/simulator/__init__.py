"""``eplb simulate`` and ``eplb recommend``."""
