"""The encode engine: a model folder becomes a function from token ids to vectors."""
