"""``Encoder.encode``: the forms of inputs, the shapes of outputs, and what is refused."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from packhorse import EncodeError, Encoder, EncoderOutput
from packhorse_shared.messages import ErrorCode
from reference import reference_vectors
from texts import mixed_texts
from tiny_heads import build_head
from tiny_models import HIDDEN, ROWS, build_n, build_t, write_json, write_parts

IDS = [2, 10, 11, 3]


@pytest.fixture(scope="module")
def encoder(t_model: Path) -> Iterator[Encoder]:
    with Encoder(t_model) as found:
        yield found


@pytest.fixture(scope="module")
def expected(encoder: Encoder) -> torch.Tensor:
    """The vector of "t10 t11"."""
    return encoder.encode("t10 t11").logits


@pytest.mark.parametrize(
    "one",
    [
        "t10 t11",
        np.str_("t10 t11"),
        IDS,
        tuple(IDS),
        [np.int64(each) for each in IDS],
        np.array(IDS),
        np.array(IDS, dtype=np.uint8),
        torch.tensor(IDS),
        {"prompt": "t10 t11"},
        {"prompt": "t10 t11", "prompt_token_ids": None},
        {"prompt_token_ids": IDS},
        {"prompt_token_ids": np.array(IDS)},
    ],
    ids=repr,
)
def test_one_input_gives_one_output(encoder: Encoder, expected: torch.Tensor, one: Any) -> None:
    output = encoder.encode(one)
    assert isinstance(output, EncoderOutput)
    assert (output.logits.shape, output.logits.dtype, output.logits.device.type) == ((HIDDEN,), torch.float32, "cpu")
    assert torch.equal(output.logits, expected)
    assert output.prompt_token_ids == IDS
    assert all(type(each) is int for each in output.prompt_token_ids)
    is_text = isinstance(one, str) or (isinstance(one, dict) and "prompt" in one)
    assert output.prompt == ("t10 t11" if is_text else None)
    (listed,) = encoder.encode([one])
    assert torch.equal(listed.logits, expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_sequence_gives_a_list_in_its_order(encoder: Encoder, kind: type) -> None:
    inputs = kind(["t10 t11", [2, 12, 3], {"prompt": "t13 t14 t15"}, {"prompt_token_ids": (2, 16)}, np.array([17])])
    outputs = encoder.encode(inputs)
    assert type(outputs) is list
    assert [each.prompt_token_ids for each in outputs] == [IDS, [2, 12, 3], [2, 13, 14, 15, 3], [2, 16], [17]]
    assert [each.prompt for each in outputs] == ["t10 t11", None, "t13 t14 t15", None, None]
    for each in outputs:
        alone = encoder.encode(each.prompt_token_ids)
        torch.testing.assert_close(each.logits, alone.logits, rtol=0, atol=1e-5)


def test_more_inputs_than_a_batch_holds(t_model: Path) -> None:
    texts = [" ".join(f"t{10 + (start + word) % 110}" for word in range(1 + start * 7 % 50)) for start in range(100)]
    with Encoder(t_model, max_batch_size=8, max_num_tokens=128) as encoder:
        outputs = encoder.encode(texts)
        assert [each.prompt for each in outputs] == texts
        found = torch.stack([each.logits for each in outputs]).numpy()
    np.testing.assert_allclose(found, reference_vectors(t_model, texts), rtol=0, atol=1e-5)


def test_the_bundled_model_beside_sentence_transformers(minilm_folder: Path) -> None:
    texts = [*mixed_texts(12, longest=256), "", "Ünïcödé, 日本語 and [SEP] \U0001f40e"]
    with Encoder() as encoder:
        outputs = encoder.encode(texts)
        assert (encoder.task, encoder.dimension, encoder.max_seq_len) == ("embedding", 384, 256)
    expected = reference_vectors(minilm_folder, texts)
    np.testing.assert_allclose(torch.stack([each.logits for each in outputs]).numpy(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "kind", "message"),
    [
        ([], ValueError, "inputs is empty"),
        ((), ValueError, "inputs is empty"),
        (None, TypeError, "the input is None; give"),
        (5, TypeError, "the input is an int; give a text"),
        ({"t10"}, TypeError, "a list or tuple holds several"),
        (iter(["t10"]), TypeError, "a list or tuple holds several"),
        (["t10", None], TypeError, r"inputs\[1\] is None; give"),
        (["t10", 5], TypeError, r"inputs\[1\] is an int; give"),
        ([5, "t10"], TypeError, r"^inputs\[1\] is a str"),
        ([True, 5], TypeError, r"^inputs\[0\] is a bool; token ids are integers"),
        ([[2, 3], [2, False]], TypeError, r"inputs\[1\]\[1\] is a bool"),
        ([1.0], TypeError, r"^inputs\[0\] is a float"),
        ([np.True_], TypeError, r"^inputs\[0\] is a numpy\.bool; token ids are integers"),
        (list(torch.tensor(IDS)), ValueError, r"^inputs\[0\] is a single number.*list of ints \(array\.tolist\(\)\)"),
        ([list(torch.tensor(IDS))], TypeError, r"^inputs\[0\]\[0\] is a Tensor.*integers; array\.tolist\(\) makes a list of"),
        ([list(map(np.array, IDS))], TypeError, r"^inputs\[0\]\[0\] is an ndarray.*array\.tolist\(\)"),
        (torch.tensor(101), ValueError, r"^the input is a single number.*list of ints \(array\.tolist\(\)\)"),
        ({"prompt_token_ids": [2, "t10"]}, TypeError, r"^the input: prompt_token_ids\[1\] is a str"),
        (["t10", {"prompt_token_ids": [2, ROWS]}], ValueError, r"^inputs\[1\]: prompt_token_ids\[1\] is token id"),
        ([[2, np.float32(3)]], TypeError, r"inputs\[0\]\[1\] is a float32"),
        (np.array([1.5]), TypeError, "the input is an array of float64"),
        (np.array([True]), TypeError, "the input is an array of bool"),
        (torch.tensor([1.5]), TypeError, "the input is an array of torch.float32"),
        (np.array([[2, 3]]), ValueError, r"2 dimensions.*list\(array\)"),
        (np.array([], dtype=np.int64), ValueError, "the input has no tokens"),
        (["t10", []], ValueError, r"inputs\[1\] has no tokens"),
        ([["t10", "t11"]], TypeError, r"inputs\[0\]\[0\] is a str.*text_pair"),
        ([[[2]]], TypeError, r"inputs\[0\]\[0\] is a list"),
        ([2, ROWS], ValueError, rf"^inputs\[1\] is token id {ROWS}; this model's ids are 0 to {ROWS - 1}"),
        ([[2], [3, -1]], ValueError, r"inputs\[1\]\[1\] is token id -1"),
        ([2, 1 << 70], ValueError, f"token id {1 << 70}"),
        ({}, ValueError, "must have one of prompt and prompt_token_ids, and has nothing"),
        ({"prompt": "t10", "prompt_token_ids": [2]}, ValueError, "must have one of"),
        ({"text": "t10"}, ValueError, "the key 'text'; known are prompt, "),
        ({"prompt": 5}, TypeError, "prompt is an int, not a text"),
        ({"prompt_token_ids": "t10"}, TypeError, "prompt_token_ids is a str"),
        ({"prompt_token_ids": [2], "prompt_name": "query"}, ValueError, "prompt_token_ids alone"),
        (["t10", {"prompt": "t11", "prompt_name": "nope"}], ValueError, r"inputs\[1\].*'nope'.*\(document, query\)"),
        (["t10", {"prompt": "t11", "text_pair": "t12"}], ValueError, r"inputs\[1\]: text_pair.*embeddings"),
        (["t10", "\ud800"], ValueError, r"inputs\[1\] has half of a surrogate pair at character 0"),
    ],
)
def test_what_is_no_input(encoder: Encoder, inputs: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        encoder.encode(inputs)
    assert isinstance(caught.value, ValueError), "one clause catches whatever is wrong with inputs"
    assert "\n" not in str(caught.value)


def test_an_argument_in_the_wrong_place(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="add_special_tokens: 't11' is not allowed; give True or False"):
        encoder.encode("t10", "t11")  # type: ignore[call-overload]


def test_too_long_inputs_name_the_limit_that_they_are_over(t_model: Path, encoder: Encoder) -> None:
    with pytest.raises(ValueError, match=r"inputs\[1\] has 66 tokens, the limit is 64 \(max_seq_len\)"):
        encoder.encode(["t10", " ".join(["t10"] * 64)])
    with pytest.raises(ValueError, match=r"the input has 65 tokens, the limit is 64 \(max_seq_len\)"):
        encoder.encode([10] * 65)
    assert len(encoder.encode(" ".join(["t10"] * 62)).prompt_token_ids) == 64
    with Encoder(t_model, max_num_tokens=16) as small:
        assert small.max_seq_len == 16
        with pytest.raises(ValueError, match=r"the input has 17 tokens, the limit is 16 \(max_num_tokens\)"):
            small.encode([10] * 17)


def test_special_tokens(encoder: Encoder) -> None:
    assert encoder.encode("t10 t11", add_special_tokens=False).prompt_token_ids == [10, 11]
    assert encoder.encode("").prompt_token_ids == [2, 3]
    with pytest.raises(ValueError, match=r"inputs\[1\] has no tokens"):
        encoder.encode(["t10", ""], add_special_tokens=False)
    assert encoder.encode([10, 11], add_special_tokens=True).prompt_token_ids == [10, 11], "ids are used as they are"


@pytest.mark.parametrize("include_prompt", [True, False])
def test_the_models_prompts(tmp_path: Path, include_prompt: bool) -> None:
    folder = build_t(tmp_path)
    write_parts(folder, pooling=("mean",), normalize=True, include_prompt=include_prompt)
    prompts = {"query": "t20 t21 ", "passage": "t30 "}
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts, "default_prompt_name": "query"})
    with Encoder(folder) as encoder:
        by_default, named, ids = encoder.encode(["t10", {"prompt": "t10", "prompt_name": "passage"}, [2, 10, 3]])
    assert (by_default.prompt, by_default.prompt_token_ids) == ("t10", [2, 20, 21, 10, 3])
    assert (named.prompt, named.prompt_token_ids) == ("t10", [2, 30, 10, 3])
    assert ids.prompt_token_ids == [2, 10, 3]
    for output, prompt in ((by_default, "t20 t21 "), (named, "t30 ")):
        expected = reference_vectors(folder, ["t10"], prompt=prompt)[0]
        np.testing.assert_allclose(output.logits.numpy(), expected, rtol=0, atol=1e-5)


def test_lower_casing_as_the_model_declares_it(tmp_path: Path) -> None:
    folder = build_t(tmp_path)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    with Encoder(folder) as encoder:
        assert encoder.encode("T10 T11 [SEP]").prompt_token_ids == [2, 10, 11, 3, 3]


def test_raw_logits_are_one_tensor_of_two_dimensions(encoder: Encoder) -> None:
    inputs = ["t10 t11 t12", "t13", [2, 14, 15, 3]]
    raw = encoder.encode(inputs, return_raw_logits=True)
    assert raw.shape == (3, HIDDEN)
    assert torch.equal(raw, torch.stack([each.logits for each in encoder.encode(inputs)]))
    assert encoder.encode("t10", return_raw_logits=True).shape == (1, HIDDEN)
    by_token = encoder.encode(inputs, batch_indexed_model_output=False, return_raw_logits=True)
    assert by_token.shape == (5 + 3 + 4, HIDDEN)


def test_the_vectors_of_tokens(t_model: Path, encoder: Encoder) -> None:
    from transformers import AutoModel

    outputs = encoder.encode(["t10 t11", [2, 12, 3], "t13"], batch_indexed_model_output=False)
    assert [each.logits.shape for each in outputs] == [(4, HIDDEN), (3, HIDDEN), (3, HIDDEN)]
    model = AutoModel.from_pretrained(t_model).eval()
    for each in outputs:
        with torch.inference_mode():
            expected = model(torch.tensor([each.prompt_token_ids])).last_hidden_state[0]
        torch.testing.assert_close(each.logits, expected, rtol=0, atol=1e-5)
    assert encoder.encode("t10", batch_indexed_model_output=False).logits.shape == (3, HIDDEN)


def test_a_token_level_model(tmp_path: Path) -> None:
    with Encoder(build_head(tmp_path, "bert-token-reward")) as encoder:
        assert (encoder.task, encoder.dimension, encoder.labels) == ("token_reward", 2, ("LABEL_0", "LABEL_1"))
        inputs = ["t10 t11", "t12"]
        flat = encoder.encode(inputs)
        assert [each.logits.shape for each in flat] == [(8,), (6,)]
        by_token = encoder.encode(inputs, batch_indexed_model_output=False)
        assert [each.logits.shape for each in by_token] == [(4, 2), (3, 2)]
        for one, other in zip(flat, by_token, strict=True):
            assert torch.equal(one.logits, other.logits.flatten())
        for batch_indexed in (True, False):
            raw = encoder.encode(inputs, batch_indexed_model_output=batch_indexed, return_raw_logits=True)
            assert torch.equal(raw, torch.cat([each.logits for each in by_token]))


def test_a_classifier_has_one_vector_per_input(tmp_path: Path) -> None:
    with Encoder(build_head(tmp_path, "bert-classifier")) as encoder:
        assert (encoder.task, encoder.labels) == ("classify", ("anger", "joy", "fear"))
        assert encoder.encode("t10").logits.shape == (3,)
        with pytest.raises(ValueError, match=r"batch_indexed_model_output.*classify.*one vector per input"):
            encoder.encode("t10", batch_indexed_model_output=False)


def test_outputs_are_ordinary_tensors(encoder: Encoder) -> None:
    """Not inference tensors, which autograd refuses and nobody may change."""
    probe = torch.nn.Linear(HIDDEN, 1)
    outputs = encoder.encode(["t10", "t11"])
    raw = encoder.encode(["t10", "t11"], return_raw_logits=True, copy_logits_to_host=False)
    for tensor in (outputs[0].logits, raw):
        before = outputs[1].logits.clone()
        probe(tensor).sum().backward()
        tensor.add_(1)
        assert torch.equal(outputs[1].logits, before)


def test_inputs_that_fail_take_nothing_from_the_others(tmp_path: Path) -> None:
    with Encoder(build_n(tmp_path)) as encoder:
        with pytest.raises(EncodeError) as caught:
            encoder.encode(["t10", "t99", "t11", [99]])
        with pytest.raises(EncodeError, match="1 of 1 inputs failed") as single:
            encoder.encode("t99", return_raw_logits=True)
        expected = encoder.encode("t11")
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert [(each.index, each.code) for each in error.failures] == [(index, ErrorCode.NON_FINITE_OUTPUT) for index in (1, 3)]
    assert str(error).startswith("2 of 4 inputs failed; inputs[1]: the model's output for this input is not finite; inputs[3]")
    assert [each is None for each in error.outputs] == [False, True, False, True]
    assert error.outputs[2] is not None
    torch.testing.assert_close(error.outputs[2].logits, expected.logits, rtol=0, atol=1e-5)
    assert single.value.outputs == [None]
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), len(again.outputs), again.failures) == (str(error), 4, error.failures)


def test_many_failures_are_not_all_listed() -> None:
    from packhorse_shared.messages import InputFailure

    failures = [InputFailure(index, ErrorCode.FORWARD_FAILED, "no") for index in range(100)]
    message = str(EncodeError(failures, [None] * 100))
    assert message.endswith("; and 92 more")
    assert len(message) < 400
