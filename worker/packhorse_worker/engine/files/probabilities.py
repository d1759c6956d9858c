"""What turns a classifier's logits into the probabilities of its labels, chosen as transformers chooses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packhorse_shared.messages import Probabilities


def read_probabilities(config: Mapping[str, Any], labels: int) -> Probabilities:
    """By ``problem_type`` of config.json, then by the number of ``labels``, which must be one at least.

    As transformers' text-classification pipeline does by itself. Its ``function_to_apply`` counts there only for a model
    without labels, so not here.
    """
    problem = config.get("problem_type")
    if problem == "regression":
        return "none"
    return "sigmoid" if problem == "multi_label_classification" or labels == 1 else "softmax"
