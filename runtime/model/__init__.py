"""The MoE layer of a rank, its CUDA graphs, and the plain reference model."""
