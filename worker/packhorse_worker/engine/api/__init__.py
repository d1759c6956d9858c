"""The Python API: what a user imports from ``packhorse``, and what a worker runs its batches with."""
