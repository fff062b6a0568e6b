"""Examples that lack one of their sequences, such as text without an image."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket.testing import check_batches, check_loss

SEQUENCES = {"patches": ["patches"], "tokens": ["tokens", "weights"]}
WIDTH = 4


def make_source(seed, size=24, share=0.4, longest=11):
    """Returns examples, about a share of which lack patches, and some lack tokens."""
    rng = np.random.default_rng(seed)
    examples = []
    for index in range(size):
        tokens, patches = rng.integers(1, longest + 1, 2)
        patches *= rng.random() >= share
        tokens *= not patches or rng.random() >= share / 2
        examples.append(
            {
                "tokens": rng.integers(1, 8, tokens),
                "weights": rng.random(tokens),
                "patches": rng.random((patches, WIDTH)),
                "index": np.int64(index),
            }
        )
    return examples


def params_of(seed):
    rng = np.random.default_rng(seed)
    shapes = {"embed": (8, WIDTH), "key": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def attend(params, queries, patches, mask):
    """Returns the sum of patches that each query attends to, `[T, WIDTH]`."""
    scores = jnp.where(mask, queries @ params["key"] @ patches.T, -1e30)
    weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0)
    return weights @ patches


def loss_fn(params, batch, keys):
    """Tokens attend to patches of their example, and patches count by themselves."""
    queries = params["embed"][batch.features["tokens"]]
    ids = batch.segment_ids
    mask = jb.attention.attention_mask(
        ids["tokens"], key_segment_ids=ids["patches"]
    ).squeeze(1)
    patches = batch.features["patches"]
    seen = jax.vmap(functools.partial(attend, params))(queries, patches, mask)
    outputs = jnp.sin(queries + seen @ params["out"]).sum(axis=-1)
    weights = jnp.where(ids["tokens"] > 0, batch.features["weights"], 0)
    own = jnp.cos(patches @ params["out"]).sum(axis=-1)
    return jnp.sum(outputs * weights) + jnp.sum(own, where=ids["patches"] > 0), (
        batch.num_examples
    )


def loss_of_example(params, example):
    """The same loss of one example without padding."""
    queries = params["embed"][example["tokens"]]
    patches = jnp.asarray(example["patches"])
    seen = jnp.zeros_like(queries)
    if len(patches):
        mask = np.ones((len(queries), len(patches)), bool)
        seen = attend(params, queries, patches, mask)
    outputs = jnp.sin(queries + seen @ params["out"]).sum(axis=-1)
    own = jnp.cos(patches @ params["out"]).sum()
    return jnp.sum(outputs * example["weights"]) + own


# Compiled once for each shape of examples.
gradient_of_example = jax.jit(jax.value_and_grad(loss_of_example))


def expected_of(params, examples):
    """The mean loss of examples, and its gradient."""
    each = [gradient_of_example(params, x) for x in examples]
    return jax.tree.map(lambda *x: sum(x) / len(x), *each)


def schedules_of(source, batch_size_multiple, max_tokens=320, num_packed_buckets=2):
    """Returns schedules of padded and of packed rows."""
    lengths = jb.measure_lengths(source, sequences=SEQUENCES, progress=False)
    limits = {"max_tokens": max_tokens, "batch_size_multiple": batch_size_multiple}
    plan = jb.plan_buckets(lengths, num_buckets=2, **limits)
    limits |= {"num_buckets": num_packed_buckets, "max_segments_per_row": 4}
    packed = jb.plan_packing(lengths, pack="always", **limits)
    return (
        jb.BatchSchedule(plan, lengths),
        jb.BatchSchedule(packed.plan, lengths, packing=packed.packing),
    )


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    "mode", ["jit", pytest.param("shard_map", marks=pytest.mark.exhaustive), "pmap"]
)
def test_updates_equal_those_of_examples_without_padding(mode, float64):
    source, params = make_source(seed=1, size=14, longest=3), params_of(1)
    mesh = jb.data_mesh(jax.devices()[:2])
    tx = optax.sgd(0.1)
    step_fn = jb.make_train_step(loss_fn, tx, mesh, mode=mode)
    for schedule in schedules_of(source, batch_size_multiple=2, max_tokens=40):
        batches = jb.MeshLoader(source, schedule, mesh, sequences=SEQUENCES)
        for step, batch in enumerate(batches):
            indices = schedule[step].rows
            examples = [source[i] for i in indices[indices >= 0].tolist()]
            loss, gradient = expected_of(params, examples)
            state = jb.create_state(params, tx, mesh)
            before = jax.tree.map(np.array, state.params)
            state, metrics = step_fn(state, batch)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            for name, x in gradient.items():
                got = (before[name] - np.array(state.params[name])) / 0.1
                np.testing.assert_allclose(got, x, rtol=1e-9, atol=1e-12)


def check_problem(seed):
    """Checks the batches of a random problem, padded and packed."""
    source = make_source(seed, size=seed % 40 + 2, share=(seed % 4) / 4)
    # A search for one shape takes a third of the time of two.
    num_buckets = 1 if seed % 5 else 2
    for schedule in schedules_of(source, seed % 2 + 1, num_packed_buckets=num_buckets):

        def loader(host, start, schedule=schedule):
            return jb.batch_dataset(
                source, schedule, start_step=start, sequences=SEQUENCES
            )

        check_batches(
            loader,
            num_examples=len(source),
            buckets=schedule.plan.buckets,
            max_tokens=320,
        )
        found = []
        for batch in loader(0, 0):
            segments = schedule.max_segments
            options = {"sequences": SEQUENCES, "max_segments": segments}
            examples = jb.data.unbatch(batch, **options)
            assert batch.num_examples == len(examples)
            assert batch.row_mask.sum() == len(np.flatnonzero(batch.segments_per_row))
            found += examples
        tokens = sum(len(x["tokens"]) + len(x["patches"]) for x in source)
        assert schedule.report().real_tokens == tokens
        for example in found:
            want = source[int(example["index"])]
            for name, x in want.items():
                np.testing.assert_array_equal(example[name], x)


@pytest.mark.parametrize("seed", range(20))
def test_batches_hold_the_examples_that_they_were_made_of(seed):
    check_problem(seed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("first", range(20, 520, 50))
def test_batches_of_500_problems_hold_their_examples(first):
    for seed in range(first, first + 50):
        check_problem(seed)


def test_a_loss_that_averages_what_queries_without_keys_see_is_found(float64):
    def leaking(params, batch, keys):
        queries = params["embed"][batch.features["tokens"]]
        ids = batch.segment_ids
        mask = ids["tokens"][:, :, None] == ids["patches"][:, None, :]
        patches = batch.features["patches"]
        scores = jnp.where(mask, queries @ params["key"] @ patches.mT, -1e30)
        seen = jax.nn.softmax(scores, axis=-1) @ patches
        return jnp.sum(seen.sum(-1), where=ids["tokens"] > 0), batch.num_examples

    source = make_source(seed=1)
    _, schedule = schedules_of(source, batch_size_multiple=2)
    batches = list(jb.batch_dataset(source, schedule, sequences=SEQUENCES))
    batch = max(batches, key=lambda batch: batch.bucket.num_tokens)
    check_loss(loss_fn, params_of(1), batch, sequences=SEQUENCES)
    with pytest.raises(AssertionError, match="`loss_fn` returns different"):
        check_loss(leaking, params_of(1), batch, sequences=SEQUENCES)


def test_weights_of_sequences_count_examples_beyond_the_columns_of_one():
    lengths = {"a": np.array([[1, 0, 0, 0, 1]]), "b": np.array([[0, 2, 2, 2, 1]])}
    ids = {x: jb.data.collate.row_segments(n, 7)[0] for x, n in lengths.items()}
    ids["a"] = ids["a"][:, :2]
    assert ids["a"].tolist() == [[1, 5]]
    batch = jb.Batch({}, jax.tree.map(jnp.asarray, ids), {})
    weights = jb.attention.token_weights(batch, "sequence", sequence="a")
    assert weights.tolist() == [[1, 1]]
