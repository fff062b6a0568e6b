"""Next tokens and loss weights of padded and packed rows."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

BEGIN = 1000


def make_examples(seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    dtype = [np.uint8, np.int16, np.int32, np.int64][seed % 4]
    return [
        {
            "loss_weights": rng.choice([0, 0.5, 1, 2], n).astype(np.float32),
            "tokens": rng.integers(0, 200, n).astype(dtype),
            "label": np.int32(n),
        }
        for n in rng.integers(1, 12, rng.integers(1, 40))
    ]


def make_batches(examples, rows: str, seed: int) -> list[jb.Batch]:
    names = ["loss_weights", "tokens"]
    lengths = jb.measure_lengths(examples, sequences=names, progress=False)
    packing = None
    if rows == "packed":
        packing = jb.packing.pack(
            lengths, int(np.random.default_rng(seed).integers(12, 40))
        )
        plan = jb.plan_buckets(
            packing.row_lengths, max_tokens=160, boundaries=packing.seq_lens
        )
    else:
        plan = jb.plan_buckets(lengths, max_tokens=48, num_buckets=3)
    schedule = jb.BatchSchedule(plan, lengths, seed=seed, packing=packing)
    # Unusual pad values reveal any use of padding.
    pads = {"tokens": 99, "loss_weights": np.nan}
    return list(jb.batch_dataset(examples, schedule, sequences=names, pad_value=pads))


def count_pairs_of_examples(examples, weighted: bool, begin: bool) -> Counter:
    """Returns the total weight of each (input, target), by a loop over the examples."""
    result = Counter()
    for example in examples:
        tokens, weights = example["tokens"].tolist(), example["loss_weights"].tolist()
        if begin:
            tokens, weights = [BEGIN, *tokens], [0, *weights]
        for place in range(1, len(tokens)):
            weight = weights[place] if weighted else 1
            result[tokens[place - 1], tokens[place]] += weight
    return +result


def count_pairs_of_batches(batches, next_tokens) -> Counter:
    result = Counter()
    for batch in batches:
        inputs, targets, weights = next_tokens(batch)
        for x in (inputs, targets, weights):
            assert x.shape == batch.mask.shape
        assert weights.dtype == np.float32 and inputs.dtype == targets.dtype
        assert not np.asarray(targets)[np.asarray(weights) == 0].any()
        places = (np.ravel(x).tolist() for x in (inputs, targets, weights))
        for token, target, weight in zip(*places, strict=True):
            result[token, target] += weight
    return +result


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize("seed", range(4))
def test_next_tokens_agree_with_a_loop_over_examples(seed, rows, weighted, begin):
    examples = make_examples(seed)
    want = count_pairs_of_examples(examples, weighted, begin)

    def next_tokens(batch):
        return jb.next_tokens(
            batch,
            loss_weights="loss_weights" if weighted else None,
            bos_token=BEGIN if begin else None,
        )

    assert (
        count_pairs_of_batches(make_batches(examples, rows, seed), next_tokens) == want
    )


@pytest.mark.parametrize("begin", [None, BEGIN])
def test_next_tokens_are_the_same_inside_of_jit(begin):
    for batch in make_batches(make_examples(0), "packed", 0)[:2]:
        options = {"loss_weights": "loss_weights", "bos_token": begin}
        want = jb.next_tokens(batch, **options)
        assert all(isinstance(x, np.ndarray) for x in want)
        on_device = jax.tree.map(jnp.asarray, batch)
        result = jax.jit(lambda b: jb.next_tokens(b, **options))(on_device)  # noqa: B023
        for a, b in zip(result, want, strict=True):
            assert isinstance(a, jax.Array) and a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_next_tokens_of_several_sequences():
    example = {"inputs": [7, 3, 5], "targets": [9, 8], "kind": [1, 2], "w": [1.0, 2.0]}
    batch = jb.data.collate_rows(
        [[example, example]],
        jb.Bucket(1, {"inputs": 7, "targets": 6}),
        sequences={"inputs": ["inputs"], "targets": ["targets", "kind", "w"]},
        max_segments=2,
    )
    result = jb.next_tokens(batch, "targets", loss_weights="w")
    assert result.targets.tolist() == [[8, 0, 8, 0, 0, 0]]
    assert result.weights.tolist() == [[2, 0, 2, 0, 0, 0]]
    result = jb.next_tokens(batch, "kind", sequence="targets")
    assert result.targets.tolist() == [[2, 0, 2, 0, 0, 0]]
    with pytest.raises(ValueError, match="`name`"):
        jb.next_tokens(batch)
    with pytest.raises(ValueError, match="`sequence=None`"):
        jb.next_tokens(batch, "kind")


def test_token_weights_accept_next_token_weights():
    rows = [[{"x": [7, 3, 9]}, {"x": [5]}, {"x": [2, 4]}]]
    batch = jb.data.collate_rows(rows, jb.Bucket(1, 7), max_segments=3)
    result = jb.next_tokens(batch).weights
    for where in (result > 0, result, jnp.asarray(result), result.astype(int)):
        weights = jb.attention.token_weights(batch, "sequence", where=where)
        assert weights.tolist() == [[0.5, 0.5, 0, 0, 1, 0, 0]]


def batch_of(**features) -> jb.Batch:
    return jb.data.collate_rows([features], jb.Bucket(2, 4))


EXAMPLE = {
    "tokens": np.arange(3, dtype=np.int16),
    "labels": np.ones(3, np.float32),
    "frames": np.ones((3, 3), np.int32),
    "size": np.int32(3),
}


@pytest.mark.parametrize(
    ("batch", "options", "name"),
    [
        ({"tokens": np.ones((1, 2), np.int32)}, {}, "batch"),
        (batch_of(labels=[1, 2], tokens=[3, 4]), {}, "name"),
        *((batch_of(**EXAMPLE), {"name": x}, "name") for x in ("x", "size", "labels")),
        (batch_of(**EXAMPLE), {"loss_weights": "w"}, "loss_weights"),
        (batch_of(**EXAMPLE), {"loss_weights": "size"}, "loss_weights"),
        (batch_of(**EXAMPLE), {"loss_weights": np.ones(3)}, "loss_weights"),
        (batch_of(**EXAMPLE), {"sequence": "x"}, "sequence"),
        (batch_of(**EXAMPLE), {"bos_token": 0.5}, "bos_token"),
        *(
            (
                batch_of(x=[7, 3], w=w),
                {"name": "x", "loss_weights": "w"},
                "loss_weights",
            )
            for w in ([0, 3], [-1.0, 0.5])
        ),
    ],
)
def test_invalid_arguments_are_refused(batch, options, name):
    for values in (batch, jax.device_put(batch)):
        with pytest.raises(ValueError, match=f"`{name}"):
            jb.next_tokens(values, **options)


def test_token_weights_need_a_batch():
    with pytest.raises(ValueError, match="`batch`"):
        jb.attention.token_weights({"tokens": np.ones((1, 2), np.int32)})
    with pytest.raises(ValueError, match="`per"):
        jb.attention.token_weights(batch_of(**EXAMPLE), "row")


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_loss_weights_may_be_a_mask(dtype):
    example = {"x": [7, 3, 9], "w": np.array([0, 0, 1], dtype)}
    batch = jb.data.collate_rows([example], jb.Bucket(1, 4))

    def weights(batch):
        return jb.next_tokens(batch, "x", loss_weights="w").weights

    assert weights(batch).tolist() == jax.jit(weights)(batch).tolist() == [[0, 1, 0, 0]]
