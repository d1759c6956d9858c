"""POST /v1/embeddings: the model's output for each input, as it is."""

from __future__ import annotations

import msgspec

from packhorse_frontend.bodies.inputs import Texts, TokenizedInputs, cut_ids
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.asking import Asked, Body, Endpoint, Question
from packhorse_frontend.endpoints.dimensions import check_dimensions
from packhorse_frontend.endpoints.render import LARGEST_INLINE_VALUES, count_values, pieces_of, render_embeddings
from packhorse_frontend.exchange import Answer
from packhorse_frontend.rows import shape_of
from packhorse_frontend.schema import EmbeddingsRequest, Usage
from packhorse_frontend.tokens.prompts import choose_prompt
from packhorse_frontend.tokens.texts import TextWork


def _read(asked: Asked) -> Question:
    request: EmbeddingsRequest = asked.request
    serving, model = asked.serving, asked.serving.model
    dimension = check_dimensions(request.dimensions, model, serving.name)
    inputs = asked.inputs("input")
    is_text = isinstance(inputs, Texts)
    prompt = choose_prompt(request.prompt, request.prompt_name, request.input_type, model, is_text=is_text)
    rule = serving.length_rule(request.truncate_prompt_tokens)
    work: TextWork | TokenizedInputs
    if isinstance(inputs, Texts):
        naming = Naming.of("input", len(inputs.texts), listed=inputs.listed)
        special = request.add_special_tokens is not False
        work = TextWork(inputs.texts, 0, naming, prompt, model.lowercase, special, rule)
    else:
        naming = Naming.of("input", len(inputs.lengths), listed=inputs.listed)
        work = cut_ids(inputs, rule)

    def write(rows: Answer, tokens: TokenizedInputs) -> Body:
        usage = usage_of(tokens, is_cutting=request.truncate_prompt_tokens is not None)
        arguments = (rows, dimension, request.encoding_format or "float", serving.name, usage)
        return render_embeddings(*arguments) if count_values(rows) <= LARGEST_INLINE_VALUES else pieces_of(*arguments)

    return Question(work, naming, shape_of(model), write, request.priority or 0)


def usage_of(tokens: TokenizedInputs, *, is_cutting: bool) -> Usage:
    """What a request took. ``is_cutting``: whether it asked for too long inputs to be cut."""
    count = len(tokens.ids)
    return Usage(prompt_tokens=count, total_tokens=count, truncated_inputs=tokens.truncated if is_cutting else msgspec.UNSET)


EMBEDDINGS = Endpoint(EmbeddingsRequest, {"input": "input"}, _read)
