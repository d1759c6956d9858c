"""Which prompt goes before the texts of a request: the model's own, named or by default, or the request's."""

from __future__ import annotations

from packhorse_frontend.problems import invalid
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


def choose_prompt(
    prompt: str | None, prompt_name: str | None, input_type: str | None, model: ModelFacts, *, is_text: bool
) -> str:
    """The text to put before every input; empty for none.

    ``prompt`` and ``prompt_name`` exclude each other and come before ``input_type``, which comes before the model's default. A
    prompt is text, so that token ids never get one: asking for one by name is refused there, the rest does nothing.
    A reranker's prompts belong into its pairs, so that a text gets one only when it is asked for. Raises Problem (400).
    """
    asked = _asked_for(prompt, prompt_name, model)
    if not is_text:
        if prompt or prompt_name is not None:
            param = "prompt" if prompt else "prompt_name"
            raise invalid(f"{param} goes before text, but input is token ids, which are used as they are", param)
        return ""
    if asked is not None:
        return asked
    if model.task == "rerank":
        return ""
    name = _name_for(input_type, model) or model.default_prompt_name
    return model.prompts.get(name, "") if name else ""


def choose_pair_prompt(prompt: str | None, prompt_name: str | None, model: ModelFacts) -> str:
    """The instruction for pairs of texts: the request's, else the model's default; empty for none. Raises Problem (400)."""
    asked = _asked_for(prompt, prompt_name, model)
    return model.prompts.get(model.default_prompt_name or "", "") if asked is None else asked


def _asked_for(prompt: str | None, prompt_name: str | None, model: ModelFacts) -> str | None:
    if prompt is not None and prompt_name is not None:
        raise invalid("prompt and prompt_name were both given; send one of them", "prompt")
    if prompt_name is not None and prompt_name not in model.prompts:
        names = ", ".join(sorted(model.prompts)) or "none"
        raise invalid(f"prompt_name {prompt_name!r} is not one of this model's prompts ({names})", "prompt_name")
    return prompt if prompt_name is None else model.prompts[prompt_name]


def _name_for(input_type: str | None, model: ModelFacts) -> str | None:
    """The model's prompt that matches an input type, None without one. An unknown type matters only to a model with prompts."""
    if input_type is None or not any(model.prompts.values()):
        return None
    kind = _INPUT_TYPES.get(input_type)
    if kind is None:
        raise invalid(f"input_type {input_type!r} is neither query nor document", "input_type")
    return next((name for name in _PROMPT_NAMES[kind] if name in model.prompts), None)
