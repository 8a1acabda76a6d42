"""Decides what happens when in a train step. Never imports jax."""
