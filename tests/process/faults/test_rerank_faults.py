"""A reranker's requests under faults: each gets the scores of its own pairs, whatever died meanwhile."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, processors

from footprint import Settled
from harm import busy_worker, kill, kill_and_replace, ready_workers, wait_ready_workers
from load import Load
from packhorse_shared.messages import SEGMENT_SHIFT
from questions import CLS, SEP, Question, http_request, ids_of, random_text
from standin import score_of
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 97
POISON = 99


@dataclass(frozen=True, eq=False)
class Ranking(Question):
    """A request to rank documents. ``rows``: their scores, in the order of the documents."""

    def is_answered_by(self, body: bytes) -> bool:
        try:
            results = orjson.loads(body)["results"]
            indexes = [result["index"] for result in results]
            scores = np.array([result["relevance_score"] for result in results], dtype=np.float32)
        except (ValueError, KeyError, TypeError):
            return False
        is_ranked = bool((np.diff(scores) <= 0).all())
        return is_ranked and sorted(indexes) == list(range(self.inputs)) and np.array_equal(scores, self.rows[indexes, 0])


def words_of(query: str, document: str) -> list[int]:
    """A pair as the model sees it: the document and its end are the second segment."""
    first, second = ids_of(query), [*ids_of(document)[1:]]
    return [*first, *(each | 1 << SEGMENT_SHIFT for each in second)]


def rank(query: str, documents: list[str], path: str = "/v2/rerank") -> Ranking:
    scores = [[score_of(words_of(query, document), is_scored=True)] for document in documents]
    wire = http_request(orjson.dumps({"query": query, "documents": documents}), path=path)
    return Ranking(wire, np.array(scores, dtype=np.float32))


def embed(texts: list[str]) -> Question:
    """A request for embeddings, which of a reranker are its logits."""
    rows = [[score_of(ids_of(text), is_scored=False)] for text in texts]
    return Question(http_request(orjson.dumps({"input": texts})), np.array(rows, dtype=np.float32))


def mixed(seed: int, count: int = 200) -> list[Question]:
    """Rankings of 1 to 20 documents, and among them requests for logits."""
    source = random.Random(seed)
    questions: list[Question] = []
    for _ in range(count):
        texts = [random_text(source, 12) for _ in range(source.randint(1, 20))]
        is_ranking = source.random() < 0.7
        questions.append(rank(random_text(source, 6), texts) if is_ranking else embed(texts))
    return questions


@pytest.fixture(scope="module")
def pairs_model(t_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's files, with a tokenizer that can make pairs."""
    folder = tmp_path_factory.mktemp("models") / "pairs"
    shutil.copytree(t_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    specials = [("[CLS]", CLS), ("[SEP]", SEP)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=specials
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory, pairs_model: Path) -> StandInStack:
    flags = ("--workers_per_device=2", "--num_frontends=2", "--max_batch_size=8")
    kills = (POISON, POISON | 1 << SEGMENT_SHIFT)
    made = make_shared_standin(*flags, folder=pairs_model, batch_s=0.01, is_reranker=True, kill=kills)
    return made.start().wait_ready(2, frontends=2)


def test_workers_that_die_mid_batch(stack: StandInStack, settled: Settled) -> None:
    with settled(stack):
        with Load(stack.port, mixed(SEED), rate=60, seed=SEED) as load:
            for slot in (0, 1, 0):
                load.wait_for(40)
                kill_and_replace(stack, busy_worker(stack, slot), 2)
            load.wait_for(40)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}


def test_a_broker_that_dies_gets_pairs_back_as_they_were(stack: StandInStack, settled: Settled) -> None:
    with settled(stack):
        with Load(stack.port, mixed(SEED + 1), rate=60, seed=SEED) as load:
            load.wait_for(40)
            (broker,) = stack.processes("broker")
            kill(broker.pid)
            wait_until(lambda: not broker.is_running() and len(ready_workers(stack)) == 2, 20, "the next broker")
            load.wait_for(60)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) <= {200, 503}
    assert "requests resubmitted" in "".join(path.read_text() for path in stack.run_dir.glob("frontend-*.log"))


def test_a_document_that_kills_workers_fails_its_own_request_only(stack: StandInStack, settled: Settled) -> None:
    stack.forget_deaths()
    poisoned = rank("t10 t11", ["t20", "t21 t99", "t22"])
    with settled(stack):
        with Load(stack.port, mixed(SEED + 2), clients=10, seed=SEED) as load:
            load.wait_for(20)
            with Load(stack.port, [poisoned], clients=1, at_most=1) as guilty:
                found = guilty.wait_done(within_s=40)
            wait_ready_workers(stack, 2)
            load.wait_for(20)
        report = load.report()
    print(f"seed {SEED}: {report}")
    found.assert_invariant()
    assert [(sent.status, sent.code) for sent in found.sent] == [(500, "worker_died")]
    error = orjson.loads(found.sent[0].body)["error"]
    assert (error["param"], error["message"][:12]) == ("documents", "documents[1]")
    report.assert_invariant()
    assert set(report.counts) <= {200, 503}
