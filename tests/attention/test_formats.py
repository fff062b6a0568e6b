"""Batches under the names of other libraries, as their documentation has them."""

import jax
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.attention import FORMATS, convert_batch
from jaxbucket.data import collate_rows

# Examples of a prompt and an answer. 0 is padding.
TEXTS = [[5, 6, 7, 8], [9, 3], [4, 4, 2]]
PAIRS = [([7, 8, 5, 1], [3, 9, 1]), ([8, 4, 9, 3, 1], [4, 1])]
T = 8


def padded(dtype=np.int32):
    examples = [{"tokens": np.array(x, dtype)} for x in TEXTS]
    return collate_rows(examples, Bucket(len(TEXTS), T))


def packed():
    rows = [[{"tokens": np.array(x, np.int32)} for x in TEXTS[:2]]]
    return collate_rows(rows, Bucket(1, T), max_segments=2)


def pairs(max_segments=None):
    examples = [{"inputs": np.array(x), "targets": np.array(y)} for x, y in PAIRS]
    rows = examples if max_segments is None else [examples]
    bucket = Bucket(len(rows), {"inputs": 10, "targets": 7})
    return collate_rows(rows, bucket, max_segments=max_segments)


def filled(rows, value, seq_len=T):
    """Rows of lists, filled up to `[B, T]`."""
    return np.array([[*row, *[value] * (seq_len - len(row))] for row in rows])


def maxtext():
    """Targets are the inputs shifted to the left; 0 in the last column is padding."""
    inputs = filled(TEXTS, 0)
    ids = (inputs > 0).astype(int)
    targets = np.pad(inputs[:, 1:], ((0, 0), (0, 1)))
    position = np.arange(T) * ids
    return {
        "inputs": inputs,
        "inputs_position": position,
        "inputs_segmentation": ids,
        "targets": targets,
        "targets_position": position,
        "targets_segmentation": np.where(targets != 0, 1, 0),
    }


def huggingface():
    """Labels are the inputs, and -100 in padding; a model reads all but the first."""
    mask = filled([[1] * len(x) for x in TEXTS], 0)
    labels = filled(TEXTS, -100)
    labels[:, 0] = -100
    return {
        "input_ids": filled(TEXTS, 0),
        "attention_mask": mask,
        "position_ids": np.arange(T) * mask,
        "labels": labels,
    }


def flattened():
    """Examples one after another, each with -100 as its first label."""
    return {
        "input_ids": filled([TEXTS[0] + TEXTS[1]], 0),
        "position_ids": filled([[0, 1, 2, 3, 0, 1]], 0),
        "labels": filled([[-100, 6, 7, 8, -100, 3]], -100),
    }


def gemma():
    """Inputs and targets are the sequence without its last and its first token."""
    ends = {"input": [x[:-1] for x in TEXTS], "target": [x[1:] for x in TEXTS]}
    mask = filled([[1] * (len(x) - 1) for x in TEXTS], 0)
    return {**{k: filled(x, 0) * mask for k, x in ends.items()}, "loss_mask": mask}


def test_rows_of_maxtext():
    check(convert_batch(padded(), "maxtext"), maxtext())


def test_labels_of_hugging_face():
    check(convert_batch(padded(), "huggingface"), huggingface())
    check(convert_batch(packed(), "huggingface"), flattened())


def test_pairs_of_hugging_face():
    batch = convert_batch(
        pairs(), "huggingface_seq2seq", encoder="inputs", tokens="targets", bos_token=2
    )
    sources, targets = zip(*PAIRS, strict=True)
    expected = {
        "input_ids": filled(sources, 0, 10),
        "attention_mask": filled([[1] * len(x) for x in sources], 0, 10),
        "labels": filled(targets, -100, 7),
        "decoder_attention_mask": filled([[1] * len(x) for x in targets], 0, 7),
    }
    check(batch, expected)
    shifted = np.pad(filled(targets, 0, 7), ((0, 0), (1, 0)), constant_values=2)[:, :-1]
    real = expected["decoder_attention_mask"] > 0
    np.testing.assert_array_equal(batch["decoder_input_ids"][real], shifted[real])


def test_packed_pairs_of_t5():
    batch = convert_batch(pairs(2), "t5", encoder="inputs", tokens="targets")
    expected = {
        "encoder_input_tokens": [[7, 8, 5, 1, 8, 4, 9, 3, 1, 0]],
        "encoder_segment_ids": [[1, 1, 1, 1, 2, 2, 2, 2, 2, 0]],
        "encoder_positions": [[0, 1, 2, 3, 0, 1, 2, 3, 4, 0]],
        "decoder_target_tokens": [[3, 9, 1, 4, 1, 0, 0]],
        "decoder_input_tokens": [[0, 3, 9, 0, 4, 0, 0]],
        "decoder_loss_weights": [[1, 1, 1, 1, 1, 0, 0]],
        "decoder_segment_ids": [[1, 1, 1, 2, 2, 0, 0]],
        "decoder_positions": [[0, 1, 2, 0, 1, 0, 0]],
    }
    check(batch, expected)
    only = convert_batch(pairs(2), "t5_decoder", tokens="targets")
    decoder = {k: x for k, x in expected.items() if k.startswith("decoder")}
    check(only, decoder)
    # A feature in no role keeps its name.
    assert only.keys() - decoder.keys() == {"inputs"}


def test_inputs_of_tunix():
    tokens = filled(TEXTS, 0)
    mask = tokens != 0
    positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
    batch = convert_batch(padded(), "tunix")
    causal = np.tril(np.ones((T, T), bool)) & mask[:, None] & mask[:, :, None]
    real = {"positions": positions * mask, "attention_mask": causal}
    check(batch, {"input_tokens": tokens, **real})
    # The loss reads the mask of the second token and on.
    np.testing.assert_array_equal(batch["input_mask"][:, 1:], mask[:, 1:])
    check(convert_batch(packed(), "tunix"), {"input_mask": [[0, 1, 1, 1, 0, 1, 0, 0]]})


def test_fields_of_gemma_and_easylm():
    batch, expected = convert_batch(padded(), "gemma"), gemma()
    mask = expected["loss_mask"]
    column = {"target": expected["target"], "loss_mask": mask}
    check(batch, {name: x[..., None] for name, x in column.items()})
    np.testing.assert_array_equal(batch["input"] * mask, expected["input"])
    renamed = convert_batch(padded(), "easylm")
    assert [*renamed] == ["input_tokens", "target_tokens", "loss_masks"]
    for x, y in zip(batch.values(), renamed.values(), strict=True):
        np.testing.assert_array_equal(x, y.reshape(x.shape))


def test_a_prompt_is_no_target():
    batch = padded()
    batch.features["is_answer"] = filled([[0, 0, 1, 1], [0, 1], [0, 0, 1]], 0)
    convert = {"loss_weights": "is_answer"}
    labels = [[-100, -100, 7, 8], [-100, 3], [-100, -100, 2]]
    check(
        convert_batch(batch, "huggingface", **convert), {"labels": filled(labels, -100)}
    )
    segments = filled([[0, 1, 1], [1], [0, 1]], 0)
    found = convert_batch(batch, "maxtext", **convert)
    check(found, {"targets_segmentation": segments})
    assert "is_answer" not in found


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_formats_are_the_same_inside_of_jit(name):
    roles = {"encoder": "inputs", "tokens": "targets", "bos_token": 2}

    def convert(batch):
        return convert_batch(batch, name, **roles)

    for batch in (pairs(), pairs(2)):
        expected = convert(batch)
        found = jax.jit(convert)(jax.tree.map(jax.numpy.asarray, batch))
        check(found, expected)


def test_sequences_may_have_other_names_than_features():
    batch = collate_rows(
        [{"ids": np.array([5, 6], np.uint32), "labels": np.array([3], np.uint32)}],
        Bucket(1, {"source": 3, "target": 2}),
        sequences={"source": ["ids"], "target": ["labels"]},
    )
    found = convert_batch(
        batch, "huggingface_seq2seq", encoder="ids", tokens="labels", bos_token=2
    )
    check(found, {"input_ids": [[5, 6, 0]], "attention_mask": [[1, 1, 0]]})
    check(found, {"labels": [[3, -100]], "decoder_input_ids": [[2, 2]]})


def test_small_integers_and_functions():
    batch = padded(np.uint8)
    found = convert_batch(
        batch, {"a": "labels", "b": "tokens", "c": lambda x: x.bucket}
    )
    assert found["a"].dtype == found["b"].dtype == np.int32
    assert found["c"] == Bucket(len(TEXTS), T)
    check(found, {"a": huggingface()["labels"]})


@pytest.mark.parametrize(
    ("argument", "change", "names", "options"),
    [
        ("batch", lambda batch: batch.features, "maxtext", {}),
        ("names", None, "torch", {}),
        ("names", None, {"x": "token"}, {}),
        ("names", None, "t5", {}),
        ("names", None, {"x": "decoder.tokens"}, {}),
        ("features", None, {"label": "targets"}, {}),
        ("tokens", None, "maxtext", {"tokens": "label"}),
        ("tokens", None, "t5", {"encoder": "other"}),
        ("loss_weights", None, "maxtext", {"loss_weights": "other"}),
    ],
)
def test_invalid_arguments_are_refused(argument, change, names, options):
    batch = padded()
    batch.features["label"] = np.arange(len(TEXTS))
    batch = batch if change is None else change(batch)
    with pytest.raises(ValueError, match=f"`{argument}"):
        jb.convert_batch(batch, names, **options)


def check(found, expected):
    for name, x in expected.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)
