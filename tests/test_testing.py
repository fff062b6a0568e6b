"""The checks report what is wrong with broken loaders and losses.

The loaders of this package are checked in test_invariants.py.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxbucket import (
    Batch,
    BatchSchedule,
    Bucket,
    BucketPlan,
    batch_dataset,
    convert_batch,
    create_state,
    data_mesh,
    make_train_step,
    measure_lengths,
    next_tokens,
    plan_buckets,
    segment_attention,
)
from jaxbucket.attention import token_weights
from jaxbucket.data import RowShard, collate_rows
from jaxbucket.testing import check_batches, check_loss, check_step


def source_of(lengths: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Examples of given lengths, identified by a feature `index`."""
    return [
        {"tokens": i * 31 + np.arange(n, dtype=np.int32), "index": np.array(i)}
        for i, n in enumerate(lengths)
    ]


def job(seed=0, count=70, **options):
    lengths = np.random.default_rng(seed).integers(1, 40, count)
    plan = plan_buckets(lengths, max_tokens=960, num_buckets=3, batch_size_multiple=24)
    return plan, lengths, BatchSchedule(plan, lengths, seed=seed, **options)


def resumed(batches, host, start):
    return batches[start:]


def edited(edit, resume=resumed):
    """A correct loader for two hosts, whose list of batches is changed by `edit`.

    It returns another list of batches, or None if it has changed them in place.
    """
    plan, lengths, schedule = job()

    def loader(host, start_step):
        shard = RowShard((host,), 2)
        batches = list(batch_dataset(source_of(lengths), schedule, shard=shard))
        return resume(edit(batches, host) or batches, host, start_step)

    return loader, {
        "num_examples": len(lengths),
        "buckets": plan.buckets,
        "max_tokens": plan.max_tokens,
        "num_hosts": 2,
    }


def unchanged(batches, host):
    pass


def fewer_steps_on_one_host(batches, host):
    return batches[: len(batches) - host]


def different_order_on_one_host(batches, host):
    return batches if host else batches[::-1]


def a_shape_outside_the_plan(batches, host):
    return [Batch(*({n: x[:-1] for n, x in part.items()} for part in batches[0]))]


def the_first_batch_twice(batches, host):
    return [batches[0], *batches]


def an_unknown_example(batches, host):
    batches[0].features["index"][0] = 1000


def positions_that_do_not_restart(batches, host):
    batches[0].positions["tokens"][:] = np.arange(batches[0].bucket.seq_len)


def different_dtype_on_one_host(batches, host):
    if host:
        tokens = batches[0].features["tokens"]
        batches[0].features["tokens"] = tokens.astype(np.int16)


def a_wider_feature(batches, host):
    for batch in batches:
        tokens = batch.features["tokens"]
        batch.features["tokens"] = np.pad(tokens, ((0, 0), (0, 3)))


def more_rows_on_one_host(batches, host):
    """Moves a row from the first host to the second."""
    _, lengths, schedule = job()
    first = batch_dataset(source_of(lengths), schedule, shard=RowShard((0,), 2))
    for batch, first_batch in zip(batches, first, strict=True):
        for arrays, first_arrays in zip(batch, first_batch, strict=True):
            for name in arrays:
                x, y = arrays[name], first_arrays[name]
                arrays[name] = x[:-1] if host == 0 else np.concatenate([y[-1:], x])


def segments_that_start_at_two(batches, host):
    for batch in batches:
        ids = batch.segment_ids["tokens"]
        ids[ids > 0] = 2


def no_positions(batches, host):
    for batch in batches:
        batch.positions.clear()


def an_identity_of_floats(batches, host):
    for batch in batches:
        batch.features["index"] = batch.features["index"] + 0.7


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            different_dtype_on_one_host,
            r"host 1 has features\['tokens'\] with dtype int",
        ),
        (a_wider_feature, r"has features\['tokens'\] with shape .*, but segment ids"),
        (more_rows_on_one_host, r"Fixed shapes: at step \d+, host 1 has .* elsewhere"),
        (segments_that_start_at_two, "segment ids of 'tokens' that are not 1, 2, ..."),
        (no_positions, "at step 0, host 0 has no positions of 'tokens' that match"),
        (an_identity_of_floats, "host 0 has no feature 'index' with one integer per"),
        (fewer_steps_on_one_host, r"Lockstep: hosts have \[(\d+), \d+\] steps"),
        (fewer_steps_on_one_host, r"10 examples \(.* and 5 more\) are in no row"),
        (different_order_on_one_host, r"Lockstep: at step 0, the hosts have different"),
        (a_shape_outside_the_plan, r"step 0 has shape \[.*, which is not in \["),
        (the_first_batch_twice, r"examples .* and \d+ more are in several rows"),
        (an_unknown_example, "Exactly once: 1000, 1000 are not between 0 and 69"),
        (positions_that_do_not_restart, "host 1 has positions of 'tokens' that do"),
    ],
)
def test_every_violation_is_reported(edit, message):
    loader, job = edited(edit)
    with pytest.raises(AssertionError) as error:
        check_batches(loader, **job)
    assert re.search(message, str(error.value)), error.value


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_ignores_the_start_step_is_reported(host):
    def resume(batches, index, start):
        return batches if index == host else batches[start:]

    loader, job = edited(unchanged, resume)
    with pytest.raises(AssertionError) as error:
        check_batches(loader, **job, resume_at=iter([1, 2]))
    prefix = f"Resume: host {host}, resumed at step 1, yields"
    for message in (rf"{prefix} \d+ steps", f"{prefix} a different batch at step"):
        assert re.search(message, str(error.value)), error.value


def test_a_correct_loader_is_accepted():
    loader, job = edited(unchanged)
    check_batches(loader, **job)


def test_a_batch_beyond_the_budget_is_reported():
    loader, job = edited(unchanged)
    most = max(bucket.num_tokens for bucket in job["buckets"])
    with pytest.raises(
        AssertionError, match=rf"Budget: step \d+ has {most} tokens, mo"
    ):
        check_batches(loader, **job | {"max_tokens": most - 1})


def test_several_sequences_with_lengths_of_their_own_are_accepted():
    """For example, the source and target of a translation."""

    def batch(first):
        index = np.array([first, first + 1])
        x, y = np.ones((2, 4), np.int32), np.array([[1, 1], [1, 0]], np.int32)
        positions = {
            "x": np.tile(np.arange(4), (2, 1)),
            "y": np.array([[0, 1], [0, 0]]),
        }
        return Batch({"x": x, "y": y, "index": index}, {"x": x, "y": y}, positions)

    check_batches(
        lambda host, start: [batch(0), batch(2)][start:],
        num_examples=4,
        buckets=[Bucket(2, {"x": 4, "y": 2})],
        max_tokens=12,
    )


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ({"x": np.ones((2, 3))}, "dict"),
        (({"x": np.ones((2, 3))},), "tuple"),
        (np.ones((2, 3)), "ndarray"),
    ],
)
def test_a_loader_must_yield_batches(step, kind):
    message = f"`loader` yielded a {kind}, not a `jaxbucket.Batch` or a tuple"
    with pytest.raises(ValueError, match=message):
        check_batches(
            lambda host, start: [step],
            **{"num_examples": 2, "buckets": [Bucket(2, 3)], "max_tokens": 6},
        )


# Losses


def batch_of_floats(packed=False, num_examples=7):
    rng = np.random.default_rng(0)
    rows = [
        {"x": rng.normal(size=(n, 8)).astype("f4"), "label": np.int32(n % 3)}
        for n in rng.integers(1, 6, num_examples)
    ]
    if packed:
        pairs = [rows[:2], rows[2:4], rows[4:5], rows[5:]]
        return collate_rows(
            pairs, Bucket(6, 12), sequences=["x"], like=rows[0], max_segments=2
        )
    return collate_rows(rows, Bucket(8, 6), sequences=["x"])


PARAMS = {"w": np.random.default_rng(1).normal(size=(8, 3)).astype("f4")}


def logits_of(params, batch):
    return batch.features["x"] @ params["w"]


def squared_loss(params, batch, keys):
    losses = jnp.square(logits_of(params, batch)).sum(axis=-1)
    lengths = batch.mask.sum(axis=1).astype(jnp.uint32)
    sums = {"digest": jnp.sum(lengths * jnp.uint32(2**31))}
    weight = batch.num_tokens.astype(jnp.float32)
    return jnp.sum(jnp.where(batch.mask, losses, 0)), weight, sums


def with_dropout(params, batch, keys):
    x = batch.features["x"]
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, x.shape[1:]))(keys)
    batch = batch._replace(features={**batch.features, "x": jnp.where(kept, x, 0)})
    return squared_loss(params, batch, None)


def contrastive(params, batch, keys):
    real = batch.mask.any(axis=1)
    x = jnp.where(batch.mask[..., None], logits_of(params, batch), 0)
    a, b = jnp.sin(x).sum(axis=1), jnp.cos(x).sum(axis=1)
    logits = jax.nn.log_softmax(jnp.where(real, a @ b.T, -1e9))
    return -jnp.sum(jnp.where(real, jnp.diagonal(logits), 0)), jnp.sum(real)


@pytest.mark.parametrize(
    ("loss", "packed"),
    [
        (squared_loss, True),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (with_dropout, False),
                (squared_loss, False),
                (with_dropout, True),
            )
        ),
    ],
)
def test_a_sum_over_rows_is_accepted(loss, packed):
    check_loss(loss, PARAMS, batch_of_floats(packed))


@pytest.mark.exhaustive
def test_a_loss_of_the_whole_batch_is_accepted():
    check_loss(contrastive, PARAMS, batch_of_floats(), mode="jit", seed=None)
    # Also with an odd number of rows.
    batch = Batch(*({n: x[:7] for n, x in part.items()} for part in batch_of_floats()))
    check_loss(contrastive, PARAMS, batch, mode="jit")


@pytest.mark.exhaustive
def test_a_loss_of_an_nnx_module_is_accepted():
    def loss(model, batch, keys):
        nats = jnp.square(model(batch.features["x"])).sum(axis=-1)
        return jnp.sum(jnp.where(batch.mask, nats, 0)), batch.num_tokens

    check_loss(loss, nnx.Linear(8, 3, rngs=nnx.Rngs(0)), batch_of_floats())


def a_mean(params, batch, keys):
    loss_sum, weight, _ = squared_loss(params, batch, keys)
    return loss_sum / weight, jnp.float32(1)


def depends_on_row_index(params, batch, keys):
    loss_sum, weight, _ = squared_loss(params, batch, keys)
    indices = jnp.arange(batch.bucket.batch_size, dtype=jnp.float32)
    values = jnp.where(batch.mask, logits_of(params, batch)[..., 0], 0).sum(axis=1)
    return loss_sum + jnp.sum(indices * values), weight


def all_positions(params, batch, keys):
    losses = jnp.square(logits_of(params, batch)).sum(axis=-1)
    return jnp.sum(losses), batch.num_tokens


def divided_by_local_tokens(params, batch, keys):
    loss_sum, weight, _ = squared_loss(params, batch, keys)
    return loss_sum, weight, {"share": loss_sum * 0 / weight}


def a_mean_over_columns(params, batch, keys):
    losses = jnp.square(logits_of(params, batch)).sum(axis=-1)
    means = jnp.mean(jnp.where(batch.mask, losses, 0), axis=1)
    return jnp.sum(means), batch.num_examples


def norm_of_padding(params, batch, keys):
    """Sums are finite, but gradients are not."""
    norms = jnp.linalg.norm(logits_of(params, batch), axis=-1)
    return jnp.sum(jnp.where(batch.mask, norms, 0)), batch.num_tokens


def gradient_with_other_rows(params, batch, keys):
    """The loss is correct, but its gradient depends on other rows."""
    loss_sum, weight, _ = squared_loss(params, batch, keys)
    product = loss_sum * weight
    return loss_sum + product - jax.lax.stop_gradient(product), weight


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (contrastive, r"two halves.*'loss_sum' is .*, not .*`mode=\"jit\"`"),
        (a_mean, r"two halves.*'loss_sum' .*'weight' is 2, not 1.*Return sums over"),
        (depends_on_row_index, r"reordered: 'loss_sum'.*depends on its index"),
        (all_positions, r"values in its padding: 'loss_sum'.*by `batch.mask`"),
        (a_mean_over_columns, r"new ones all padding: 'loss_sum'.*a mean over T"),
        (norm_of_padding, r"not finite for the unchanged batch: the gradient of \['w"),
        (divided_by_local_tokens, r"only empty rows: 'share' is nan, not 0\. Empty"),
        (gradient_with_other_rows, r"halves, .*: the gradient of \['w'\] is off by"),
    ],
)
def test_a_loss_that_is_not_a_sum_over_rows_is_reported(loss, message):
    with pytest.raises(AssertionError) as error:
        check_loss(loss, PARAMS, batch_of_floats())
    assert re.search(message, str(error.value)), error.value


def a_mean_over_real_rows(params, batch, keys):
    loss_sum, weight, _ = squared_loss(params, batch, keys)
    return loss_sum / jnp.maximum(weight, 1), jnp.sign(weight)


@pytest.mark.parametrize("loss", [contrastive, a_mean_over_real_rows])
def test_both_halves_of_a_batch_with_few_examples_have_some(loss):
    batch = batch_of_floats(num_examples=3)
    assert batch.row_mask.tolist() == [True] * 3 + [False] * 5
    with pytest.raises(AssertionError, match="two halves"):
        check_loss(loss, PARAMS, batch)


def with_the_next_row(params, batch, keys):
    rows = jnp.where(batch.mask[..., None], logits_of(params, batch), 0).sum((1, 2))
    return jnp.sum(rows * jnp.roll(rows, 1)), batch.num_examples


@pytest.mark.parametrize("mode", ["shard_map", "jit"])
def test_a_loss_that_uses_the_next_row_is_reported(mode):
    with pytest.raises(AssertionError, match="reordered|two halves"):
        check_loss(
            with_the_next_row, PARAMS, batch_of_floats(num_examples=2), mode=mode
        )


TABLES = {
    "embedding": np.random.default_rng(2).normal(size=(20, 6)).astype("f4"),
    "places": np.random.default_rng(3).normal(size=(8, 6)).astype("f4"),
    "out": np.random.default_rng(4).normal(size=(6, 20)).astype("f4"),
}


def packed_tokens():
    rng = np.random.default_rng(0)
    lengths = [[3, 2], [5], [1, 1, 4]]
    rows = [
        [{"tokens": rng.integers(1, 20, n), "label": np.int32(n)} for n in row]
        for row in lengths
    ]
    return collate_rows(rows, Bucket(3, 8), max_segments=4)


def nats_of(hidden, targets, weights):
    picked = jnp.take_along_axis(
        jax.nn.log_softmax(hidden), targets[..., None], axis=-1
    )[..., 0]
    return -jnp.sum(picked * weights), jnp.sum(weights)


def language_model(params, batch, keys):
    inputs, targets, weights = next_tokens(batch)
    (ids,), (positions,) = batch.segment_ids.values(), batch.positions.values()
    x = params["embedding"][inputs] + params["places"][positions]
    heads = x[:, :, None]
    x = segment_attention(heads, heads, heads, ids)[:, :, 0]
    weights = token_weights(batch, "sequence", where=weights)
    return nats_of(x @ params["out"], targets, weights)


@pytest.mark.exhaustive
def test_a_loss_that_keeps_packed_examples_apart_is_accepted():
    check_loss(language_model, TABLES, packed_tokens(), seed=None)


def shifted_over_rows(params, batch, keys):
    tokens = batch.features["tokens"]
    x = params["embedding"][tokens[:, :-1]]
    weights = batch.mask[:, 1:].astype(jnp.float32)
    return nats_of(x @ params["out"], tokens[:, 1:], weights)


def test_a_loss_that_mixes_packed_examples_is_reported():
    message = r"packed example in a row of its own: .*`jaxbucket.next_tokens`"
    with pytest.raises(AssertionError, match=message):
        check_loss(shifted_over_rows, TABLES, packed_tokens())


def test_a_sum_whose_rows_cancel_is_accepted():
    def signed(params, batch, keys):
        x = jnp.where(batch.mask, batch.features["x"], 0)
        return jnp.sum(x * params["w"]), batch.num_tokens

    x = np.random.default_rng(0).normal(size=(4, 5)).astype("f4")
    x[2:] = -x[:2]
    batch = collate_rows([{"x": row} for row in x], Bucket(4, 6))
    check_loss(signed, {"w": jnp.float32(1.7)}, batch)


def test_a_loss_that_needs_keys_is_not_called_without_them():
    """The shape of the random bits depends on T, as in dropout of attention."""

    def loss(params, batch, keys):
        shape = (batch.bucket.seq_len,) * 2
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, shape))(keys)
        x = logits_of(params, batch).sum(axis=-1)
        x = x * kept.sum(axis=1).astype(jnp.float32)
        return jnp.sum(jnp.where(batch.mask, x, 0)), batch.num_tokens

    check_loss(loss, PARAMS, batch_of_floats())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (batch_of_floats(num_examples=1), "`batch` has 1 rows with examples"),
        ({"x": 1}, "`batch` is of type dict"),
    ],
)
def test_a_batch_without_two_filled_rows_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        check_loss(squared_loss, PARAMS, batch)


@pytest.mark.exhaustive
def test_sequences_excludes_a_feature_that_is_as_wide_as_the_batch():
    def loss(params, batch, keys):
        fixed = batch.features["fixed"].sum(axis=1)
        loss_sum, weight, _ = squared_loss(params, batch, keys)
        real = batch.mask.any(axis=1)
        return loss_sum + jnp.sum(jnp.where(real, fixed, 0)), weight

    batch = batch_of_floats()
    batch.features["fixed"] = np.random.default_rng(0).normal(size=(8, 6)).astype("f4")
    check_loss(loss, PARAMS, batch, sequences=["x"])
    with pytest.raises(AssertionError, match="different values in its padding"):
        check_loss(loss, PARAMS, batch)


# Steps of one's own


@pytest.fixture
def standard_promotion():
    """Dtype promotion as users have it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def rows_of_floats(remainder="cheapest"):
    """The batches of a padded and a full bucket, one of which may have an empty row."""
    source = [{"x": np.full(n, n / 9, np.float32)} for n in [9] * 7 + [5] * 8]
    lengths = measure_lengths(source, progress=False)
    plan = BucketPlan.from_shapes([(8, 5), (8, 9)])
    schedule = BatchSchedule(plan, lengths, order="source", remainder=remainder)
    return list(batch_dataset(source, schedule))


def mean_of_tokens(w, batch):
    x = jnp.where(batch.mask, batch.features["x"], 0)
    return jnp.sum((w * x) ** 2) / batch.num_tokens


def mean_of_rows(w, batch):
    mask = batch.mask.astype(jnp.float32)
    means = jnp.sum(w * batch.features["x"] * mask, -1)
    return jnp.mean(means / jnp.maximum(jnp.sum(mask, -1), 1e-10))


def pooled_by_softmax(w, batch):
    x = batch.features["x"]
    weights = jax.nn.softmax(jnp.where(batch.mask, w * x, -jnp.inf), axis=-1)
    return jnp.mean(jnp.sum(weights * x, -1))


def mean_of_filled_rows(w, batch):
    mask = batch.mask.astype(jnp.float32)
    sums = jnp.sum(w * batch.features["x"], -1, where=batch.mask)
    means = sums / jnp.maximum(jnp.sum(mask, -1), 1)
    return jnp.sum(means, where=batch.row_mask) / batch.row_mask.sum()


def step_of(loss_fn):
    """A step that donates its state."""
    tx = optax.sgd(0.1)

    @functools.partial(jax.jit, donate_argnums=0)
    def step_fn(state, batch):
        w, opt_state = state
        loss, gradient = jax.value_and_grad(loss_fn)(w, batch)
        updates, opt_state = tx.update(gradient, opt_state)
        return (optax.apply_updates(w, updates), opt_state), {"loss": loss}

    return step_fn, (jnp.float32(1.5), tx.init(jnp.float32(1.5)))


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("loss_fn", [mean_of_tokens, mean_of_filled_rows])
def test_a_step_in_which_padding_does_not_count_is_accepted(loss_fn):
    for batch in rows_of_floats():
        check_step(*step_of(loss_fn), batch)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("loss_fn", [mean_of_rows, pooled_by_softmax])
def test_a_step_that_counts_empty_rows_is_reported(loss_fn):
    for batch in rows_of_floats():
        with pytest.raises(AssertionError, match=r"`step_fn` .*`batch.row_mask`"):
            check_step(*step_of(loss_fn), batch)
    for batch in rows_of_floats("repeat"):
        assert batch.row_mask.all()
        check_step(*step_of(loss_fn), batch, empty_rows=False)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("num_rows", "parts"), [(4, 2), (6, 2), (6, 3), (8, 4)])
@pytest.mark.parametrize("is_strided", [False, True])
def test_a_mean_over_the_means_of_devices_is_reported(num_rows, parts, is_strided):
    rows = np.arange(num_rows)
    part_of_row = rows % parts if is_strided else rows * parts // num_rows

    def mean_of_means(w, batch):
        means = []
        for part in range(parts):
            rows = part_of_row == part
            real = batch.mask[rows]
            x = (w * batch.features["x"][rows] - 1) ** 2
            means.append(jnp.sum(x, where=real) / jnp.sum(real))
        return sum(means) / parts

    rows = [{"x": np.arange(1.0, n)} for n in range(2, num_rows + 2)]
    batch = collate_rows(rows, Bucket(num_rows, 16))
    with pytest.raises(AssertionError, match="order"):
        check_step(*step_of(mean_of_means), batch, empty_rows=False)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_may_evaluate_or_count():
    batch, _ = rows_of_floats()

    def evaluate(state, batch):
        return mean_of_tokens(2.0, batch), batch.num_tokens

    def count(state, batch):
        return {"tokens": state["tokens"] + batch.num_tokens}

    check_step(evaluate, None, batch)
    check_step(count, {"tokens": jnp.int32(0)}, batch)
    with pytest.raises(AssertionError, match="empty rows"):
        check_step(lambda _, batch: (mean_of_rows(2.0, batch), 3), None, batch)


def test_a_step_that_changes_nothing_is_refused():
    batch, _ = rows_of_floats()
    with pytest.raises(ValueError, match="`step_fn`"):
        check_step(lambda w, batch: w, jnp.float32(1), batch)
    with pytest.raises(ValueError, match="`step_fn`"):
        check_step(lambda w, batch: None, {"w": jnp.float32(1), "n": 1}, batch)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_that_updates_a_module_in_place_is_checked():
    def state():
        model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step_with(reduce):
        def step_fn(state, batch):
            model, optimizer = state

            def loss_fn(model):
                y = model(batch.features["x"][..., None])[..., 0] ** 2
                return reduce(jnp.where(batch.mask, y, 0), batch)

            optimizer.update(model, nnx.grad(loss_fn)(model))

        return step_fn

    batch, _ = rows_of_floats()
    check_step(step_with(lambda y, batch: y.sum() / batch.num_tokens), state(), batch)
    with pytest.raises(AssertionError, match=r"empty rows: .*kernel"):
        check_step(step_with(lambda y, batch: y.mean()), state(), batch)


@pytest.mark.usefixtures("standard_promotion")
def test_a_state_with_keys_and_16_bits_is_checked():
    def step_with(reduce):
        def step_fn(state, batch):
            key, scale = state
            x = jnp.where(batch.mask, batch.features["x"], 0)
            state = jax.random.split(key)[0], scale + reduce(x).astype(scale.dtype)
            return state, scale

        return step_fn

    batch, _ = rows_of_floats()
    state = jax.random.key(0), jnp.zeros((), jnp.bfloat16)
    check_step(step_with(jnp.sum), state, batch, tolerance=0.05)
    with pytest.raises(AssertionError, match=r"empty rows: .*\[1\]"):
        check_step(step_with(jnp.mean), state, batch, tolerance=0.05)


@pytest.mark.usefixtures("standard_promotion")
def test_a_step_with_the_names_of_another_library_is_checked():
    def loss_fn(params, batch):
        """Causal, as clients write it: the labels are shifted here."""
        hidden = jnp.cumsum(params[batch["input_ids"]], axis=1)
        logits, labels = hidden[:, :-1], batch["labels"][:, 1:]
        is_target = labels != -100
        nats = optax.softmax_cross_entropy_with_integer_labels(
            logits, jnp.where(is_target, labels, 0)
        )
        return jnp.sum(nats, where=is_target) / jnp.sum(is_target)

    @jax.jit
    def step_fn(params, batch):
        batch = convert_batch(batch, "huggingface")
        return params - 0.1 * jax.grad(loss_fn)(params, batch)

    params = jax.random.normal(jax.random.key(0), (9, 9))
    examples = [{"x": np.arange(n) % 9} for n in (3, 7, 5)]
    check_step(step_fn, params, collate_rows(examples, Bucket(4, 8)))
    # A sum from the left of the row goes over its other examples.
    batch = collate_rows([examples[:2], examples[2:]], Bucket(2, 12), max_segments=2)
    with pytest.raises(AssertionError, match="in a row of its own"):
        check_step(step_fn, params, batch)


@pytest.mark.usefixtures("standard_promotion")
def test_the_batch_of_a_step_needs_two_rows():
    with pytest.raises(ValueError, match="`batch`"):
        check_step(*step_of(mean_of_tokens), {"x": np.ones((2, 3))})


def wrong_mean(batch):
    return jnp.where(batch.mask, batch.features["x"], 0).sum(axis=1).mean()


def step_by(w, batch, rate=1e-6):
    return w - rate * wrong_mean(batch)


@pytest.mark.parametrize(
    ("step_fn", "state"),
    [
        # Integers and random numbers are no scale for others.
        (
            lambda s, b: (step_by(s[0], b, 1), jax.random.split(s[1])[0]),
            (jnp.float32(0), jax.random.PRNGKey(0)),
        ),
        (lambda s, b: (step_by(s[0], b), s[1] + 1), (jnp.float32(0), jnp.int32(5))),
        # The state may be anywhere in what is returned.
        (
            lambda s, b: (0.0, {"w": step_by(s["w"], b), "v": s["v"]}),
            {"w": 1.0, "v": 2.0},
        ),
        (lambda s, b: {"state": (step_by(s[0], b), s[1])}, (1.0, 2.0)),
        (lambda s, b: (step_by(s, b),), jnp.float32(1)),
        # Python numbers count.
        (lambda s, b: (s, float(wrong_mean(b))), jnp.float32(0)),
        (lambda s, b: s + 1j * wrong_mean(b), jnp.complex64(0)),
    ],
)
@pytest.mark.usefixtures("standard_promotion")
def test_small_changes_and_all_kinds_of_results_are_compared(step_fn, state):
    batch, _ = rows_of_floats()
    with pytest.raises(AssertionError, match="empty rows"):
        check_step(step_fn, state, batch)


def test_a_state_of_numpy_arrays_is_not_changed():
    def step_fn(state, batch):
        state["w"] -= np.asarray(wrong_mean(batch))

    state = {"w": np.zeros(1)}
    batch, _ = rows_of_floats()
    with pytest.raises(AssertionError, match="empty rows"):
        check_step(step_fn, state, batch)
    assert state["w"] == 0


def test_steps_of_the_library_are_accepted_on_a_mesh():
    mesh, tx = data_mesh(), optax.sgd(0.1)

    def loss_fn(params, batch, keys):
        inputs, _, weights = next_tokens(batch)
        losses = params["w"][inputs] ** 2 * weights
        return losses.sum(), weights.sum()

    params = {"w": jnp.arange(1.0, 10)}
    step_fn = make_train_step(loss_fn, tx, mesh)
    examples = [{"x": np.arange(n) % 9} for n in (3, 7, 5, 2, 4, 6, 3, 5, 2, 8, 1, 3)]
    rows = [examples[i : i + 2] for i in range(0, 12, 2)]
    for batch in (
        collate_rows(examples[:6], Bucket(8, 8)),
        collate_rows(rows, Bucket(8, 16), max_segments=2),
    ):
        check_step(step_fn, create_state(params, tx, mesh), batch)
