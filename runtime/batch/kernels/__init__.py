"""Triton kernels of what acts on single batches; the rules of ``runtime.kernels`` hold here too."""
