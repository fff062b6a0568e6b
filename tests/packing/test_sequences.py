"""Packing of examples with several sequences."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb
from jaxbucket import Bucket
from jaxbucket.packing.vector_best_fit import fit_sequences, pooled_rows

NAMES = ("inputs", "notes", "targets")


def seeds(quick, count):
    """Returns `count` seeds; all but the first `quick` are for exhaustive runs."""
    rest = (pytest.param(i, marks=pytest.mark.exhaustive) for i in range(quick, count))
    return [*range(quick), *rest]


def pairs_problem(seed):
    """Returns lengths and capacities of some sequences, and a maximum of segments."""
    rng = np.random.default_rng(seed)
    names = NAMES[: int(rng.integers(2, 4))]
    capacities = {name: int(rng.choice([1, 7, 30, 200])) for name in names}
    size = int(rng.choice([1, 9, 200]))
    lengths = {
        name: np.minimum(rng.geometric(min(1, 3 / capacity), size), capacity)
        for name, capacity in capacities.items()
    }
    if seed % 2:  # Examples may lack sequences, but not all of them.
        lengths[names[0]] *= rng.random(size) < 0.7
        lengths[names[1]] *= (lengths[names[0]] == 0) | (rng.random(size) < 0.7)
    return lengths, capacities, rng.choice([None, 1, 3])


def make_source(lengths):
    """Returns examples with tokens, weights for the last sequence, and an index."""
    rng = np.random.default_rng(len(lengths))
    names = list(lengths)
    return [
        {
            **{
                name: rng.integers(1, 9, int(n)).astype(np.int32)
                for name, n in zip(names, sizes, strict=True)
            },
            "weights": rng.random(int(sizes[-1])).astype(np.float32),
            "index": np.int32(index),
        }
        for index, sizes in enumerate(zip(*lengths.values(), strict=True))
    ]


def make_groups(lengths):
    groups = {name: [name] for name in lengths}
    groups[list(lengths)[-1]].append("weights")
    return groups


def make_schedule(lengths, capacities, batch_size=4, **options):
    cap = options.pop("max_segments_per_row", None)
    packing = jb.packing.pack(lengths, capacities, max_segments_per_row=cap)
    plan = jb.BucketPlan.from_shapes([(batch_size, x) for x in packing.seq_lens])
    return jb.BatchSchedule(plan, lengths, packing=packing, **options)


def plain_fit(lengths, capacities):
    """Returns the number of rows of best fit with one example after the other."""
    whole = np.array(list(capacities.values()))
    every = np.stack(list(lengths.values()), axis=1)
    shares = every / whole
    distinct = [len(np.unique(column)) for column in every.T]
    order = np.argsort(-np.array(distinct), kind="stable")
    _, kinds = np.unique(every, axis=0, return_inverse=True)
    largest = np.lexsort((kinds.reshape(-1), -shares.sum(axis=1), -shares.max(axis=1)))
    rooms: list[np.ndarray] = []
    for example in every[largest]:
        fitting = [i for i, room in enumerate(rooms) if (room >= example).all()]
        if fitting:
            tightest = min(fitting, key=lambda i: tuple(rooms[i][order]))
            rooms[tightest] = rooms[tightest] - example
        else:
            rooms.append(whole - example)
    return len(rooms)


@pytest.mark.parametrize("seed", range(12))
def test_rows_hold_every_example_within_the_capacities(seed):
    lengths, capacities, cap = pairs_problem(seed)
    every = np.stack(list(lengths.values()), axis=1)
    kinds, counts = np.unique(every, axis=0, return_counts=True)
    rooms, most = list(capacities.values()), cap or 10**6
    rows = []
    for packer, room, *limit in (
        (fit_sequences, np.array([rooms])),
        (pooled_rows, rooms, 10**6),
    ):
        patterns = packer(kinds, counts, room, most, *limit)
        slots = np.concatenate([np.tile(np.array(x.slots), x.rows) for x in patterns])
        assert np.bincount(slots, minlength=len(kinds)).tolist() == counts.tolist()
        for pattern in patterns:
            assert (kinds[list(pattern.slots)].sum(axis=0) <= rooms).all()
            assert 1 <= len(pattern.slots) <= most
        rows.append(sum(x.rows for x in patterns))
    packing = jb.packing.pack(lengths, capacities, max_segments_per_row=cap)
    assert packing.num_rows == min(rows)
    assert packing.seq_lens == (capacities,)
    parts = packing.slot_parts
    assert sorted(parts.tolist()) == sorted(every.tolist())
    assert packing.slot_lengths.tolist() == parts.sum(axis=1).tolist()
    for begin, end in itertools.pairwise(packing.row_splits):
        assert 1 <= end - begin <= packing.max_segments <= (cap or len(every))
        assert (parts[begin:end].sum(axis=0) <= rooms).all()
    squares = np.square(parts.astype(np.int64)).sum(axis=1)
    assert packing.row_work.sum() == squares.sum()
    if cap is None:
        # The choice among rows with equal room may change the result slightly.
        plain = plain_fit(lengths, capacities)
        assert packing.num_rows <= plain + max(1, plain // 50)


def smaller_shapes(seed, capacities):
    """Returns shapes by increasing sum, the given one last."""
    rng = np.random.default_rng([seed, 1])
    whole = np.array(list(capacities.values()))
    shapes = np.maximum(1, (whole * rng.choice([0.3, 0.6, 1.0], (3, len(whole)))))
    shapes = {int(x.sum()): x.tolist() for x in shapes.astype(int)}
    shapes.pop(int(whole.sum()), None)
    small = [dict(zip(capacities, shapes[x], strict=True)) for x in sorted(shapes)]
    return [*small, capacities]


@pytest.mark.parametrize("seed", seeds(6, 40))
def test_rows_of_several_shapes_hold_every_example(seed):
    lengths, capacities, cap = pairs_problem(seed)
    shapes = smaller_shapes(seed, capacities)
    packing = jb.packing.pack(lengths, shapes, max_segments_per_row=cap)
    assert packing.seq_lens == tuple(shapes)
    given = np.stack(list(lengths.values()), axis=1)
    assert sorted(packing.slot_parts.tolist()) == sorted(given.tolist())
    rows = np.stack(list(packing.row_lengths.values()), axis=1)
    sizes = np.array([list(x.values()) for x in shapes])
    # Each row has the first shape that holds it, so no row is larger than it must be.
    held = (rows[:, None] <= sizes).all(axis=2)
    assert held.any(axis=1).all()
    positions = sizes.sum(axis=1)[held.argmax(axis=1)].sum()
    assert packing.fill == rows.sum() / positions
    assert packing.row_segments.max() <= packing.max_segments <= (cap or len(given))
    # Every row that has one example alone, if no smaller shape holds it, needs it.
    plan = jb.BucketPlan.from_shapes([(4, x) for x in shapes])
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    filled = [x.rows[x.rows >= 0] for x in (schedule[i] for i in range(len(schedule)))]
    assert sorted(np.concatenate(filled)) == list(range(len(given)))


@pytest.mark.parametrize(
    "several", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
@pytest.mark.parametrize("seed", seeds(3, 20))
def test_unbatch_returns_every_example_once_per_epoch(seed, several):
    lengths, capacities, cap = pairs_problem(seed)
    shapes = smaller_shapes(seed, capacities) if several else capacities
    schedule = make_schedule(lengths, shapes, seed=seed, max_segments_per_row=cap)
    source = make_source(lengths)
    groups, rows = make_groups(lengths), []
    for epoch in range(2):
        begin = epoch * len(schedule)
        dataset = jb.batch_dataset(
            source,
            schedule,
            start_step=begin,
            num_steps=begin + len(schedule),
            sequences=groups,
        )
        examples = []
        for batch in dataset:
            assert batch.bucket in schedule.plan.buckets
            for name, seq_len in batch.bucket.seq_len.items():
                assert batch.features[name].shape[1] == seq_len
                assert batch.features["index"].shape[1] == schedule.max_segments
            segments = schedule.max_segments
            examples += jb.data.unbatch(batch, sequences=groups, max_segments=segments)
        examples.sort(key=lambda example: int(example["index"]))
        assert len(examples) == len(source)
        jax.tree.map(np.testing.assert_array_equal, examples, source)
        rows.append([schedule[begin + i].rows.tolist() for i in range(len(schedule))])
    if len(source) == 200 and len(schedule) > 3:
        assert rows[0] != rows[1]


class Translator(nnx.Module):
    """Self-attention of inputs and of targets, and cross-attention between them."""

    def __init__(self, rngs):
        self.inputs = nnx.Embed(16, 8, rngs=rngs)
        self.targets = nnx.Embed(16, 8, rngs=rngs)
        self.places = nnx.Embed(256, 8, rngs=rngs)
        self.out = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, batch):
        def embedded(name, embed):
            x = embed(batch.features[name]) + self.places(batch.positions[name])
            return x[:, :, None]

        x, y = embedded("inputs", self.inputs), embedded("targets", self.targets)
        ids = batch.segment_ids
        mask = jb.attention.attention_mask(ids["inputs"])
        x = x + jax.nn.dot_product_attention(x, x, x, mask=mask)
        mask = jb.attention.attention_mask(ids["targets"], batch.positions["targets"])
        y = y + jax.nn.dot_product_attention(y, y, y, mask=mask)
        mask = jb.attention.attention_mask(
            ids["targets"], key_segment_ids=ids["inputs"]
        )
        y = y + jax.nn.dot_product_attention(y, x, x, mask=mask)
        return self.out(y[:, :, 0])


def norm(tree):
    return np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))


def test_packed_and_padded_pairs_have_the_same_loss_and_gradients():
    shapes = [{"inputs": 32, "targets": 16}, {"inputs": 64, "targets": 32}]
    rng = np.random.default_rng(0)
    lengths = {"inputs": rng.integers(1, 30, 40), "targets": rng.integers(1, 9, 40)}
    source = [{name: x[name] for name in lengths} for x in make_source(lengths)]
    capacities = {"inputs": 64, "targets": 32}
    schedule = make_schedule(lengths, shapes)
    graph, params = nnx.split(Translator(nnx.Rngs(0)))

    def loss(params, batch):
        logits = nnx.merge(graph, params)(batch)
        labels = batch.features["targets"]
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        weights = jb.attention.token_weights(batch, "sequence", sequence="targets")
        return jnp.sum(nats * weights), jnp.sum(weights)

    loss_and_gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))

    def total(batches):
        # Gradients may be summed, because the weights do not depend on the parameters.
        results = [loss_and_gradients(params, batch) for batch in batches]
        weight = sum(n for (_, n), _ in results)
        gradients = [gradients for _, gradients in results]
        mean = sum(x for (x, _), _ in results) / weight
        return mean, jax.tree.map(lambda *x: sum(x) / weight, *gradients)

    packed = list(jb.batch_dataset(source, schedule))
    assert max(int(x.segment_ids["inputs"].max()) for x in packed) > 2
    alone = [jb.data.collate_rows(source, Bucket(40, capacities))]
    (a, grads_a), (b, grads_b) = total(packed), total(alone)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    difference = norm(jax.tree.map(jnp.subtract, grads_a, grads_b))
    assert difference < 1e-5 * norm(grads_b)


# Invalid input


@pytest.mark.parametrize(
    ("name", "lengths", "capacities"),
    [
        ("lengths", {"a": [1, 2], "b": [1]}, {"a": 4, "b": 4}),
        ("lengths", {"a": [0], "b": [0]}, {"a": 4, "b": 4}),
        ("lengths", {"a": [1], "b": [9]}, {"a": 4, "b": 4}),
        ("lengths", {"a": [1], "b": [7]}, [{"a": 2, "b": 2}, {"a": 4, "b": 5}]),
        ("lengths", [1, 2], {"a": 4, "b": 4}),
        ("lengths", {"a": [1], "b": [1]}, 4),
        *(
            ("max_seq_len", {"a": [1], "b": [1]}, capacities)
            for capacities in (
                *({"a": 4, "b": 0}, {"a": 1, "b": 10**9}, {"a": 4}, []),
                [{"a": 4, "b": 5}, {"a": 9, "b": 4}],
            )
        ),
    ],
)
def test_incompatible_lengths_and_capacities_are_refused(name, lengths, capacities):
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.packing.pack(lengths, capacities)


@pytest.mark.parametrize(
    ("lengths", "match"),
    [
        ([4, 6], "`lengths`"),
        ({"a": [3, 5], "c": [1, 1]}, r"sequences \['a', 'c'\], but the plan has"),
        ({"a": [3, 4], "b": [1, 2]}, "that take part. The data, the"),
    ],
)
def test_schedules_require_the_sequences_of_their_packing(lengths, match):
    packing = jb.packing.pack({"a": [3, 5], "b": [1, 1]}, {"a": 8, "b": 4})
    plan = jb.BucketPlan.from_shapes([(1, x) for x in packing.seq_lens])
    with pytest.raises(ValueError, match=match):
        jb.BatchSchedule(plan, lengths, packing=packing)
    with pytest.raises(ValueError, match="`packing`"):
        other = jb.packing.pack([3, 5], 8)
        jb.BatchSchedule(plan, {"a": [3, 5], "b": [1, 1]}, packing=other)


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_many_kinds_are_grouped_before_packing(seed, monkeypatch):
    monkeypatch.setattr("jaxbucket.packing.rows._MAX_KINDS", 150)
    rng = np.random.default_rng(seed)
    names = "abcd"[: int(rng.integers(2, 5))]
    capacities = {name: int(rng.choice([300, 1000, 1 << 20])) for name in names}
    lengths = {x: rng.integers(1, capacities[x] + 1, 2000) for x in names}
    kinds, packed_kinds = np.stack(list(lengths.values()), axis=1), []

    def counted(kinds, *options):
        packed_kinds.append(len(kinds))
        return fit_sequences(kinds, *options)

    monkeypatch.setattr("jaxbucket.packing.rows.fit_sequences", counted)
    packing = jb.packing.pack(lengths, capacities)
    assert packed_kinds[0] <= 150
    assert packing.slot_parts is not None
    # Slots have the exact lengths of the examples, and no row exceeds its capacities.
    np.testing.assert_array_equal(
        kinds[np.lexsort(kinds.T)],
        packing.slot_parts[np.lexsort(packing.slot_parts.T)],
    )
    sums = np.add.reduceat(packing.slot_parts, packing.row_splits[:-1], axis=0)
    assert np.all(sums <= list(capacities.values()))
