"""Shorter vectors from Matryoshka models: which sizes are allowed, how a vector is cut.

Matryoshka Representation Learning, Kusupati et al. 2022: the leading values of a vector are a vector by themselves.
"""

from __future__ import annotations

import numpy as np

from packhorse_frontend.problems import invalid
from packhorse_frontend.rows import Rows
from packhorse_shared.messages import ModelFacts


def check_dimensions(dimensions: int | None, model: ModelFacts, served_name: str) -> int:
    """The size of the vectors to answer with. Raises Problem (400) that names the model and what it accepts."""
    if dimensions is not None and model.task == "token_reward":
        raise invalid(
            f"dimensions is {dimensions}; model {served_name} gives {model.dimension} values for each token of an input, "
            "so that the size is the input's",
            "dimensions",
        )
    if dimensions is None or dimensions == model.dimension:
        return model.dimension
    if dimensions in model.matryoshka_dimensions and dimensions < model.dimension:
        return dimensions
    if model.matryoshka_any and dimensions < model.dimension:
        return dimensions
    if model.matryoshka_any:
        accepted = f"any size up to {model.dimension}"
    else:
        sizes = sorted({*(size for size in model.matryoshka_dimensions if size < model.dimension), model.dimension})
        accepted = f"only {', '.join(map(str, sizes))}"
    raise invalid(f"dimensions is {dimensions}; model {served_name} accepts {accepted}", "dimensions")


def shorten(rows: Rows, dimension: int) -> Rows:
    """Cut rows ``[n, d]`` to ``[n, dimension]`` and scale each to length 1, in float32. A zero row stays zero."""
    if rows.shape[1] == dimension:
        return rows
    cut = rows[:, :dimension]
    # Scaled by the largest value first: the square of a large float32 overflows, and that of a small one vanishes.
    largest: Rows = np.abs(cut).max(axis=1, keepdims=True)
    largest[largest == 0] = 1
    scaled: Rows = cut / largest
    norms: Rows = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))[:, None]
    norms[norms == 0] = 1
    return scaled / norms
