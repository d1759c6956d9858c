"""CUDA graphs of an encoder: which are captured, and which of them a batch runs in."""
