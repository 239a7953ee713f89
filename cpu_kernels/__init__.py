"""Numba CPU kernels: a team of threads runs a whole model step in lockstep."""
