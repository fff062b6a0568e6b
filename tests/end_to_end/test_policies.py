"""Tests of the baseline batching methods."""

import importlib
import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb

END_TO_END = pathlib.Path(__file__).parents[2] / "benchmarks" / "end_to_end"


@pytest.fixture
def policies(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(END_TO_END)
    return importlib.import_module("policies")


@pytest.fixture
def documents():
    rng = np.random.default_rng(0)
    lengths = np.minimum(1 + rng.geometric(0.03, 300), 100)
    # Every document starts with two bytes that name it.
    return [
        {"tokens": np.append([n // 256, n % 256], rng.integers(0, 256, k)).astype("u1")}
        for n, k in enumerate(lengths)
    ]


def names(batch: jb.Batch) -> list[int]:
    """Returns the documents in a batch, by their first two bytes."""
    tokens = batch.features["tokens"].astype(int)
    starts = (batch.positions["tokens"] == 0) & (batch.segment_ids["tokens"] > 0)
    rows, columns = np.nonzero(starts)
    return (256 * tokens[rows, columns] + tokens[rows, columns + 1]).tolist()


@pytest.mark.parametrize(("max_tokens", "multiple"), [(300, 1), (512, 4), (1000, 3)])
def test_dynamic_batches_keep_the_budget_and_hold_every_document(
    policies, documents, max_tokens, multiple
):
    limits = policies.Limits(max_tokens, 64, multiple)
    seen = []
    batches = policies.dynamic(documents, limits, seed=0)
    while len(seen) < len(documents):
        batch = next(batches)
        assert batch.bucket.num_tokens <= max_tokens
        assert batch.bucket.batch_size % multiple == 0
        lengths = batch.mask.sum(axis=1)
        assert lengths.max() == batch.bucket.seq_len <= 64
        # There are no more empty rows than the multiple needs.
        assert np.count_nonzero(lengths == 0) < multiple
        seen += names(batch)
    assert sorted(seen) == list(range(len(documents)))


def test_grain_packs_whole_documents(policies, documents):
    limits = policies.Limits(512, 128, 4)
    bucket = jb.Bucket(4, 128)
    packed = policies.grain_pack(documents, bucket, limits, seed=0)
    seen = 0
    for batch in itertools.islice(packed, 20):
        assert batch.bucket == bucket
        expected = [documents[number]["tokens"] for number in names(batch)]
        examples = jb.data.unbatch(batch, sequences=["tokens"], max_segments=64)
        for example, tokens in zip(examples, expected, strict=True):
            np.testing.assert_array_equal(example["tokens"], tokens)
        positions = np.concatenate([np.arange(len(tokens)) for tokens in expected])
        np.testing.assert_array_equal(batch.positions["tokens"][batch.mask], positions)
        seen += len(expected)
    assert seen > 100


def test_the_time_to_compile_is_recorded_once_per_shape(policies):
    calls = []

    def step(state, batch):
        calls.append(batch.bucket)
        return state, batch.num_tokens

    jitted = policies.Jitted(jax.jit(step))
    for length in (3, 5, 3, 5, 5):
        batch = jb.data.collate_rows([{"x": np.ones(length)}], jb.Bucket(1, length))
        state, tokens = jitted(jnp.zeros(()), batch)
        assert tokens == length
    assert calls == [jb.Bucket(1, 3), jb.Bucket(1, 5)] == list(jitted.seconds)
    assert all(seconds > 0 for seconds in jitted.seconds.values())
