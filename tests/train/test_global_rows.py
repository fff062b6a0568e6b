"""Losses that use rows of other devices, against the loss of the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import jaxbucket as jb

MODES = ["jit", "shard_map", "pmap"]
EXHAUSTIVE = pytest.mark.exhaustive
WIDTH, NUM_ROWS, SEQ_LEN = 5, 16, 4
# (shape of the mesh, its axes, axes that shard the rows)
LAYOUTS = {
    "1": ((1,), ("data",), "data"),
    "2": ((2,), ("data",), "data"),
    "8": ((8,), ("data",), "data"),
    "4x2-model": ((4, 2), ("data", "model"), "data"),
    "2x2x2": ((2, 2, 2), ("model", "a", "b"), ("b", "a")),
}


def make_params():
    rng = np.random.default_rng(0)
    return {n: rng.normal(size=(WIDTH, 3)).astype("f4") for n in ("query", "document")}


def make_batch(num_examples, num_rows=NUM_ROWS, seed=0):
    """Returns a batch whose examples are in the first rows; the others are empty."""
    rng = np.random.default_rng(seed)
    rows = [
        {
            "tokens": rng.normal(size=(n, WIDTH)).astype("f4"),
            "query": rng.normal(size=WIDTH).astype("f4"),
        }
        for n in rng.integers(1, SEQ_LEN + 1, num_examples)
    ]
    bucket = jb.Bucket(num_rows, SEQ_LEN)
    return jb.data.collate_rows(rows, bucket, sequences=["tokens"])


def contrastive(params, batch, keys, gather=jb.train.gather_rows):
    """Contrastive loss, in which the document of a query is the one of its row."""
    real = batch.mask.any(axis=1)
    queries = batch.features["query"] @ params["query"]
    tokens = jnp.where(batch.mask[..., None], batch.features["tokens"], 0)
    documents = jnp.tanh(tokens @ params["document"]).sum(axis=1)
    documents, candidates = gather((documents, real))
    logits = jnp.where(candidates, queries @ documents.T, -1e9)
    labels = jb.train.row_numbers(batch)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(jnp.where(real, nats, 0)), jnp.sum(real)


@functools.cache
def expected(num_examples):
    """Returns the mean and its gradient, computed over the examples only."""
    batch = make_batch(num_examples)
    real = np.asarray(batch.mask.any(axis=1))

    def mean(params):
        queries = batch.features["query"][real] @ params["query"]
        tokens = batch.features["tokens"][real] * batch.mask[real][..., None].astype(
            "f4"
        )
        documents = jnp.tanh(tokens @ params["document"]).sum(axis=1)
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(queries @ documents.T)))

    return jax.value_and_grad(mean)(make_params())


def recorder():
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def run(
    layout,
    mode,
    batches,
    *,
    loss=contrastive,
    accumulate=False,
    params=None,
):
    params = make_params() if params is None else params
    shape, names, axes = LAYOUTS[layout]
    mesh = Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), names)
    tx = recorder()
    step = jb.make_train_step(
        loss, tx, mesh, accumulate=accumulate, mode=mode, batch_axes=axes
    )
    state = jb.create_state(params, tx, mesh)
    batches = tuple(jb.sharding.prefetch_to_mesh(batches, mesh, batch_axes=axes))
    state, metrics = step(state, batches if accumulate else batches[0])
    return state.opt_state, metrics


def assert_equal_means(got, metrics, want):
    loss, grads = want
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, grads
    )


# With 5 examples, most devices have only empty rows, and weights differ.
@pytest.mark.parametrize("num_examples", [pytest.param(NUM_ROWS, marks=EXHAUSTIVE), 5])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "layout",
    [
        *(pytest.param(name, marks=EXHAUSTIVE) for name in LAYOUTS if name != "2x2x2"),
        "2x2x2",
    ],
)
def test_in_batch_negatives_are_the_same_on_every_mesh(layout, mode, num_examples):
    got, metrics = run(layout, mode, [make_batch(num_examples)])
    assert metrics["weight"] == num_examples
    assert_equal_means(got, metrics, expected(num_examples))


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param("jit", marks=EXHAUSTIVE),
        pytest.param("shard_map", marks=EXHAUSTIVE),
        "pmap",
    ],
)
def test_rows_are_gathered_within_a_micro_batch(mode):
    batches = [make_batch(9, seed=0), make_batch(16, seed=1)]
    got, metrics = run("4x2-model", mode, batches, accumulate=True)
    want, want_metrics = run("1", "jit", batches, accumulate=True)
    assert_equal_means(got, metrics, (want_metrics["loss"], want))


@pytest.mark.parametrize("mode", MODES)
def test_evaluation_gathers_the_same_rows(mode):
    mesh = jb.data_mesh(jax.devices()[:4])
    state = jb.create_state(make_params(), optax.sgd(0.1), mesh)
    (batch,) = jb.sharding.prefetch_to_mesh([make_batch(7)], mesh)
    metrics = jb.make_eval_step(contrastive, mesh, mode=mode)(state, batch)
    want, _ = jax.jit(lambda p, b: contrastive(p, b, None))(
        make_params(), make_batch(7)
    )
    np.testing.assert_allclose(metrics["loss_sum"], want, rtol=1e-5)


@pytest.mark.exhaustive
def test_a_jitted_function_in_a_loss_is_traced_for_each_step():
    """The local rows have the same shape, so that a cache by shapes would fail."""
    gather = jax.jit(jb.train.gather_rows)
    loss = functools.partial(contrastive, gather=gather)
    for layout, mode in (("8", "pmap"), ("4x2-model", "pmap"), ("1", "jit")):
        num_rows = {"8": 16, "4x2-model": 8, "1": 2}[layout]
        batch = make_batch(num_rows, num_rows)
        got, metrics = run(layout, mode, [batch], loss=loss)
        want, want_metrics = run("1", "jit", [batch])
        assert_equal_means(got, metrics, (want_metrics["loss"], want))


def test_gather_rows_returns_its_argument_outside_of_a_step():
    x = {"a": jnp.arange(3), "b": jnp.ones((3, 2))}
    assert jb.train.gather_rows(x) is x


def test_scalars_are_refused():
    with pytest.raises(ValueError, match="`x` contains a scalar. Pass arrays"):
        jb.train.gather_rows(jnp.float32(1))


@pytest.mark.parametrize("mapped", ["shard_map", "pmap"])
def test_gathering_in_a_custom_mapped_step_is_refused(mapped):
    x = jnp.ones((2, 3))
    if mapped == "pmap":
        fn = jax.pmap(jb.train.gather_rows, "i", devices=jax.devices()[:2])
    else:
        spec = PartitionSpec("data")
        mesh = jb.data_mesh(jax.devices()[:2])
        fn = jax.shard_map(
            jb.train.gather_rows, mesh=mesh, in_specs=spec, out_specs=spec
        )
    with pytest.raises(ValueError, match="of your own `shard_map` or `pmap` shard"):
        fn(x)


@pytest.mark.parametrize(
    "fn", [jb.train.gather_rows, lambda x: x + jb.train.row_numbers(make_batch(1, 2))]
)
def test_gathering_in_a_custom_shard_map_within_a_loss_is_refused(fn):
    spec = PartitionSpec("data")

    def loss(params, batch, keys):
        mesh = jb.data_mesh(jax.devices()[:2])
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
        return jnp.sum(mapped(batch.features["query"][:, 0])), batch.num_tokens

    with pytest.raises(ValueError, match="of your own `shard_map` or `pmap` shard"):
        run("2", "jit", [make_batch(4)], loss=loss)


@pytest.mark.parametrize(
    "mode", ["shard_map", *(pytest.param(m, marks=EXHAUSTIVE) for m in ("jit", "pmap"))]
)
@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float16, marks=EXHAUSTIVE)]
)
def test_half_precision_rows_are_gathered_on_a_mesh_with_a_model_axis(dtype, mode):
    """The parameters, and so their gradients, are in half precision, too."""
    gathered = []

    def gather(tree):
        documents, real = tree
        gathered.append(jb.train.gather_rows(documents.astype(dtype)).dtype)
        documents, real = jb.train.gather_rows((documents.astype(dtype), real))
        return documents.astype(jnp.float32), real

    def loss(params, batch, keys):
        params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        return contrastive(params, batch, keys, gather)

    params = jax.tree.map(lambda x: x.astype(dtype), make_params())
    got, metrics = run("4x2-model", mode, [make_batch(5)], loss=loss, params=params)
    want, want_metrics = run("1", "jit", [make_batch(5)], loss=loss, params=params)
    assert set(gathered) == {jnp.dtype(dtype)}
    np.testing.assert_allclose(metrics["loss"], want_metrics["loss"], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype("f4"), b.astype("f4"), rtol=0.03, atol=0.02)
