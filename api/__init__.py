"""Settings, HTTP, page, terminal, command line, and the demo that wires all of it."""

from eplb.siblings import check_siblings

check_siblings()
