"""Attention over packed inputs: every input sees itself only, whatever lies beside it."""
