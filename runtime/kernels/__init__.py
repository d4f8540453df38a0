"""Triton kernels of the GPU runtime: replica choice, digests, quantising and the experts' GEMM.

Import a module of this package only where a CUDA device is about to be used: each one imports
triton, which CPU installations need not have. Every function here only launches: no allocation, no
copy to the host, grids that follow from shapes alone. So all of them can be captured in a CUDA
graph; call each once before, because a kernel is compiled at its first launch. Tensors must be on
the process's current device.
"""
