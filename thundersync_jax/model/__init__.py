"""The decoder-only transformer: outside this folder, the pure functions of `model.transformer`."""
