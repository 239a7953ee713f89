"""The CUDA back end: a Program as kernel launches on one card."""
