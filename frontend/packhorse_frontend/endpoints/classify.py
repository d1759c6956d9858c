"""POST /v1/classify: each input's likeliest label, and the probabilities of all."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from packhorse_frontend.bodies.inputs import Texts, TokenizedInputs, cut_ids
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.answers import new_answer_id, write_list
from packhorse_frontend.endpoints.asking import Asked, Body, Endpoint, Question
from packhorse_frontend.endpoints.embeddings import usage_of
from packhorse_frontend.endpoints.tasks import wrong_task
from packhorse_frontend.exchange import Answer
from packhorse_frontend.rows import Rows, shape_of
from packhorse_frontend.schema import ClassifyAnswer, ClassifyRequest
from packhorse_frontend.tokens.texts import TextWork
from packhorse_shared.messages import ModelFacts, Probabilities

_ITEM_SIZE = 8
"""Of an element without its probabilities, in values."""


def _read(asked: Asked) -> Question:
    request: ClassifyRequest = asked.request
    serving, model = asked.serving, asked.serving.model
    if model.task != "classify":
        raise wrong_task(serving, "classify")
    inputs = asked.inputs("input")
    rule = serving.length_rule(request.truncate_prompt_tokens)
    work: TextWork | TokenizedInputs
    if isinstance(inputs, Texts):
        naming = Naming.of("input", len(inputs.texts), listed=inputs.listed)
        special = request.add_special_tokens is not False
        work = TextWork(inputs.texts, 0, naming, "", model.lowercase, special, rule)
    else:
        naming = Naming.of("input", len(inputs.lengths), listed=inputs.listed)
        work = cut_ids(inputs, rule)

    def write(rows: Answer, tokens: TokenizedInputs) -> Body:
        assert isinstance(rows, np.ndarray)
        answer = ClassifyAnswer(
            id=new_answer_id("classify"),
            created=int(time.time()),
            model=serving.name,
            data=[],
            usage=usage_of(tokens, is_cutting=request.truncate_prompt_tokens is not None),
        )
        sizes = [_ITEM_SIZE + rows.shape[1]] * len(rows)
        return write_list(answer, "data", sizes, lambda start, end: _items(rows[start:end], start, model))

    return Question(work, naming, shape_of(model), write, request.priority or 0)


def _items(logits: Rows, first_index: int, model: ModelFacts) -> list[dict[str, Any]]:
    probabilities = np.ascontiguousarray(probabilities_of(logits, model.probabilities))
    best = probabilities.argmax(axis=1).tolist()
    return [
        {
            "index": index,
            "label": model.labels[label] if model.labels else f"LABEL_{label}",
            "probs": row,
            "num_classes": len(row),
        }
        for index, (label, row) in enumerate(zip(best, probabilities, strict=True), first_index)
    ]


def probabilities_of(logits: Rows, kind: Probabilities) -> Rows:
    """What logits ``[n, labels]`` say of each label, float32; worked out in float64, as they are for ``none``."""
    if kind == "none":
        return logits
    wide = logits.astype(np.float64)
    if kind == "sigmoid":
        # By the sign: the exponential of a large number overflows.
        small = np.exp(-np.abs(wide))
        found = np.where(wide >= 0, 1 / (1 + small), small / (1 + small))
    else:
        powers = np.exp(wide - wide.max(axis=1, keepdims=True))
        found = powers / powers.sum(axis=1, keepdims=True)
    return found.astype(np.float32)


CLASSIFY = Endpoint(ClassifyRequest, {"input": "input"}, _read)
