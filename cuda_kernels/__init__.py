"""Numba-CUDA kernels: one idea a file. Each file's docstring gives the mathematics, the grid and what each warp holds.

`compiler.build` turns a kernel function into PTX on any machine, with or without a GPU; who launches it is the back
end's affair. Importing this package needs `numba-cuda`.
"""
