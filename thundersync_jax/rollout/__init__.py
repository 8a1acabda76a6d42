"""The agent side of a run: tokens and text, the turn loop, one attempt from reset to verdict."""
