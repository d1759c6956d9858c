"""POST /v1/rerank, /v2/rerank and /rerank: documents, best first, in the shapes of Cohere's and Jina's clients.

See https://docs.cohere.com/reference/rerank and https://jina.ai/reranker.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import numpy as np

from packhorse_frontend.bodies.inputs import TokenizedInputs
from packhorse_frontend.bodies.large_body import Fields
from packhorse_frontend.bodies.naming import Naming
from packhorse_frontend.endpoints.answers import new_answer_id, write_list
from packhorse_frontend.endpoints.asking import Asked, Body, Endpoint, Question
from packhorse_frontend.endpoints.embeddings import usage_of
from packhorse_frontend.endpoints.tasks import require_pairs
from packhorse_frontend.exchange import Answer
from packhorse_frontend.problems import invalid
from packhorse_frontend.rows import RowShape
from packhorse_frontend.schema import (
    ApiVersion,
    BilledUnits,
    RerankAnswer,
    RerankAnswerV2,
    RerankMeta,
    RerankRequest,
    RerankTokens,
)
from packhorse_frontend.tokens.pairs import PairWork
from packhorse_frontend.tokens.prompts import choose_pair_prompt
from packhorse_shared.messages import WORST_PRIORITY

_DOCUMENTS_PER_SEARCH = 100
_MOST_NAMED = 20
"""Documents that a warning names; it says how many more there are."""
_ITEM_SIZE = 4
"""Of a result without its document, in values."""


def _read(asked: Asked, version: int) -> Question:
    request: RerankRequest = asked.request
    serving, model = asked.serving, asked.serving.model
    require_pairs(serving, "rerank")
    query = asked.text("query")
    if query is None:
        raise invalid("query is required: what the documents are ranked for", "query")
    if not query:
        raise invalid("query is empty", "query")
    if version == 2 and request.top_n == 0:
        raise invalid("top_n is 0; leave it out for all results, or ask for at least 1", "top_n")
    documents = asked.texts("documents").texts
    work = PairWork(
        texts=[(query, document) for document in documents],
        first_index=0,
        naming=Naming.of("documents", len(documents), listed=True),
        query_naming=Naming.of("query", 1, listed=False),
        prompt=choose_pair_prompt(request.prompt, request.prompt_name, model),
        lowercase=model.lowercase,
        rule=serving.length_rule(None),
        cuts=True,
        most_document_tokens=request.max_tokens_per_doc,
    )
    count = min(request.top_n or len(documents), len(documents))

    def write(rows: Answer, tokens: TokenizedInputs) -> Body:
        assert isinstance(rows, np.ndarray)
        scores = rows[:, 0]
        order = np.argsort(-scores, kind="stable")[:count].tolist()

        def items(start: int, end: int) -> list[dict[str, Any]]:
            results = [{"index": index, "relevance_score": scores[index]} for index in order[start:end]]
            if request.return_documents:
                for result in results:
                    result["document"] = {"text": documents[result["index"]]}
            return results

        sizes = [_ITEM_SIZE + (len(documents[index]) if request.return_documents else 0) for index in order]
        meta = _meta(version, tokens, len(documents))
        answer_id = new_answer_id("rerank")
        if version == 2:
            return write_list(RerankAnswerV2(id=answer_id, results=[], meta=meta), "results", sizes, items)
        usage = usage_of(tokens, is_cutting=True)
        answer = RerankAnswer(id=answer_id, model=serving.name, results=[], meta=meta, usage=usage)
        return write_list(answer, "results", sizes, items)

    return Question(work, work.naming, RowShape(1), write, min(request.priority or 0, WORST_PRIORITY), scored=True)


def _meta(version: int, tokens: TokenizedInputs, documents: int) -> RerankMeta:
    return RerankMeta(
        api_version=ApiVersion(version=str(version)),
        billed_units=BilledUnits(search_units=-(-documents // _DOCUMENTS_PER_SEARCH)),
        tokens=RerankTokens(input_tokens=len(tokens.ids)),
        warnings=[_warning(tokens)] if tokens.truncated else msgspec.UNSET,
    )


def _warning(tokens: TokenizedInputs) -> str:
    named = ", ".join(map(str, tokens.cut[:_MOST_NAMED]))
    more = f" and {len(tokens.cut) - _MOST_NAMED} more" if len(tokens.cut) > _MOST_NAMED else ""
    which = f"document {named} was" if len(tokens.cut) == 1 else f"documents {named}{more} were"
    return f"{which} cut: too long for the model, or for max_tokens_per_doc"


_FIELDS: Fields = {"documents": "documents", "query": "text"}
RERANK_V1 = Endpoint(RerankRequest, _FIELDS, partial(_read, version=1))
RERANK_V2 = Endpoint(RerankRequest, _FIELDS, partial(_read, version=2))
