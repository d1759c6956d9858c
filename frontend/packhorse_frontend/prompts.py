"""Which prompt goes before the texts of a request: the model's own, named or by default, or the request's."""

from __future__ import annotations

from packhorse_frontend.problems import invalid
from packhorse_frontend.schema import EmbeddingsRequest
from packhorse_shared.messages import ModelFacts

# The names that models give their prompts, in the order in which sentence-transformers looks for them.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
_INPUT_TYPES = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}


def choose_prompt(request: EmbeddingsRequest, model: ModelFacts, *, is_text: bool) -> str:
    """The text to put before every input; empty for none.

    ``prompt`` and ``prompt_name`` exclude each other and come before ``input_type``, which comes before the model's default. A
    prompt is text, so that token ids never get one: asking for one by name is refused there, the rest does nothing.
    A reranker's prompts belong into its pairs, so that a text gets one only when it is asked for. Raises Problem (400).
    """
    if request.prompt is not None and request.prompt_name is not None:
        raise invalid("prompt and prompt_name were both given; send one of them", "prompt")
    if request.prompt_name is not None and request.prompt_name not in model.prompts:
        names = ", ".join(sorted(model.prompts)) or "none"
        raise invalid(f"prompt_name {request.prompt_name!r} is not one of this model's prompts ({names})", "prompt_name")
    if not is_text:
        if request.prompt or request.prompt_name is not None:
            param = "prompt" if request.prompt else "prompt_name"
            raise invalid(f"{param} goes before text, but input is token ids, which are used as they are", param)
        return ""
    if request.prompt is not None:
        return request.prompt
    if request.prompt_name is not None:
        return model.prompts[request.prompt_name]
    if model.task == "rerank":
        return ""
    name = _name_for(request.input_type, model) or model.default_prompt_name
    return model.prompts.get(name, "") if name else ""


def _name_for(input_type: str | None, model: ModelFacts) -> str | None:
    """The model's prompt that matches an input type, None without one. An unknown type matters only to a model with prompts."""
    if input_type is None or not any(model.prompts.values()):
        return None
    kind = _INPUT_TYPES.get(input_type)
    if kind is None:
        raise invalid(f"input_type {input_type!r} is neither query nor document", "input_type")
    return next((name for name in _PROMPT_NAMES[kind] if name in model.prompts), None)
