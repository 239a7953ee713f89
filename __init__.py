"""kvpool: one daemon owns a GPU's paged KV cache, and every process on the box decodes through it."""

__version__ = "0.1.0"
