"""How far times of the simulator are from measured ones: ``python -m benchmarks.fidelity``."""
