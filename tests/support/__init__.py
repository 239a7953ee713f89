"""Helpers that tests share: tiny models, NumPy twins, processes under test."""
