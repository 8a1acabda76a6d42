"""Measurements: one file each, a function `run(...) -> Report`."""
