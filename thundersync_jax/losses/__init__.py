"""Pure mathematics of the objectives: no device placement, no files, no state."""
