"""Numba-CUDA kernels of the paged decode path."""
