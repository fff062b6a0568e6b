"""Mixtures of streams: shares, lockstep, and exact resume of loops that load ahead."""

import itertools
import json
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket.stream import StreamMixture

PLANS = {
    "text": jb.BucketPlan.from_shapes([(4, 16), (2, 32)]),
    "audio": jb.BucketPlan.from_shapes([(4, 16), (1, 64)]),
}
LONGEST = {"text": 33, "audio": 65}


def examples_of(name: str, size: int = 60, first: int = 0) -> grain.IterDataset:
    rng = np.random.default_rng(first + len(name))
    axes = (2,) if name == "audio" else ()
    source = [
        {name: np.full((n, *axes), i, np.float32)}
        for i, n in enumerate(rng.integers(1, LONGEST[name], size))
    ]
    return grain.MapDataset.source(source).to_iter_dataset()


def batches_of(name: str, *, plan=None, first: int = 0, **options):
    options = {"pool_size": 16, "num_epochs": None} | options
    examples = examples_of(name, first=first)
    return jb.stream_batches(examples, plan or PLANS[name], **options)


def mixture(weights=None, **options) -> StreamMixture:
    streams = {name: batches_of(name, **options) for name in PLANS}
    return StreamMixture(streams, weights or {"text": 3, "audio": 1})


def assert_same(batch, expected):
    assert batch.bucket == expected.bucket
    jax.tree.map(np.testing.assert_array_equal, batch, expected)


WEIGHTS = [
    {"text": 3, "audio": 1},
    {"text": 0.1, "audio": 0.7},
    {0: {"text": 1}, 7: {"text": 0.5, "audio": 0.5}, 20: {"audio": 1, "text": 0.2}},
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_stream_keeps_its_batches_and_has_its_share(weights):
    mixed = mixture(weights)
    alone = {name: iter(batches_of(name)) for name in PLANS}
    steps = weights if 0 in weights else {0: weights}
    counts, first = dict.fromkeys(PLANS, 0), 0
    for step, batch in zip(range(60), mixed, strict=False):
        (name,) = batch.features
        assert mixed.turn(step)[0] == name
        assert_same(batch, next(alone[name]))
        if step in steps:
            first, counts = step, dict.fromkeys(PLANS, 0)
            now = {x: steps[step].get(x, 0) for x in PLANS}
        counts[name] += 1
        for x in PLANS:
            share = now[x] / sum(now.values()) * (step + 1 - first)
            assert abs(counts[x] - share) <= 1
    assert mixed.steps_before(60) == {
        x: sum(mixed.turn(step)[0] == x for step in range(60)) for x in PLANS
    }


@pytest.mark.parametrize(
    "weights",
    [pytest.param(x, marks=pytest.mark.exhaustive) for x in WEIGHTS[:2]] + WEIGHTS[2:],
)
def test_a_loop_that_loads_ahead_resumes_at_every_step(weights):
    mixed = mixture(weights, accumulate=2)
    batches = [batch for batch, _ in zip(mixed, range(40), strict=False)]
    ahead = iter(mixed)
    for step in range(24):
        next(ahead)
        for reached in (max(0, step - 8), step)[step % 2 :: 2]:
            state = json.loads(json.dumps(ahead.state_before(reached), sort_keys=True))
            again = iter(mixture(weights, accumulate=2))
            again.set_state(state)
            for later in range(reached, reached + 3):
                for pair in zip(next(again), batches[later], strict=True):
                    assert_same(*pair)
    assert ahead.counts["text"].read > 0


def test_hosts_have_the_same_buckets_at_every_step():
    plans = {
        "text": jb.BucketPlan.from_shapes([(4, 16), (2, 32)]),
        "audio": jb.BucketPlan.from_shapes([(4, 16), (2, 64)]),
    }
    hosts = [
        iter(
            StreamMixture(
                {
                    name: batches_of(
                        name,
                        plan=plan,
                        first=host,
                        shard=jb.data.RowShard((host,), 2),
                        lengths=np.arange(1, LONGEST[name]),
                    )
                    for name, plan in plans.items()
                },
                {"text": 1, "audio": 2},
            )
        )
        for host in range(2)
    ]
    for _ in range(60):
        buckets, features = zip(
            *((x.bucket, list(x.features)) for x in map(next, hosts)), strict=True
        )
        assert len(set(buckets)) == 1 and features[0] == features[1]


def test_streams_with_the_same_bucket_have_a_program_each():
    mixed, mesh = mixture(), jb.data_mesh(jax.devices()[:1])
    specs = {}
    for name, stream in mixed.streams.items():
        specs |= jb.sharding.batch_specs(
            stream.plan, stream.example, mesh, component=name
        )
    assert [str(x) for x in specs][::2] == ["[4, 16] of 'text'", "[4, 16] of 'audio'"]
    num_traces = 0

    def loss_fn(model, batch, keys):
        nonlocal num_traces
        num_traces += 1
        (name,) = batch.features
        mask = batch.segment_ids[name] > 0
        x = batch.features[name].reshape(*mask.shape, -1).sum(axis=-1)
        return jnp.sum(jnp.where(mask, (model["w"] * x) ** 2, 0)), jnp.sum(mask)

    tx = optax.sgd(1e-9)
    state = jb.create_state({"w": jnp.ones(())}, tx, mesh)
    train_step = jb.make_train_step(loss_fn, tx, mesh)
    steps = jb.compile_steps(train_step, state, specs)
    traced, weights = num_traces, dict.fromkeys(PLANS, 0)
    batches = jb.sharding.prefetch_to_mesh(iter(mixed), mesh)
    for step, batch in zip(range(30), batches, strict=False):
        state, metrics = steps(state, batch)
        assert int(metrics["num_tokens"]) == int(batch.num_tokens)
        weights[mixed.turn(step)[0]] += 1
    assert num_traces == traced and min(weights.values()) > 0


def test_the_mixture_ends_with_the_stream_whose_turn_it_is():
    streams = {name: batches_of(name, num_epochs=1) for name in PLANS}
    alone = [batch for batch in batches_of("text", num_epochs=1)]
    mixed = iter(StreamMixture(streams, {"text": 9, "audio": 1}))
    texts = [batch for batch in mixed if "text" in batch.features]
    assert len(texts) == len(alone)
    with pytest.raises(StopIteration):
        next(mixed)


def test_a_run_with_another_plan_or_weights_does_not_resume():
    position = mixture().position(10)
    mixture().position(0).check_same(position)
    other = jb.BucketPlan.from_shapes([(8, 16), (2, 64)])
    streams = {name: batches_of(name, plan=other) for name in PLANS}
    changed = StreamMixture(streams, {"text": 3, "audio": 1})
    with pytest.raises(ValueError, match=r"plan text\.max tokens 64 -> 128"):
        position.check_same(changed.position(10))
    remedy = r"folder\. To change the weights at .* `weights={0: old, step: new}`\.$"
    with pytest.raises(
        ValueError, match=f"schedule weights .*3.0.* -> .*4.0.*{remedy}"
    ):
        position.check_same(mixture({"text": 4, "audio": 1}).position(10))
    with pytest.raises(ValueError, match="no .'later_weights'.: it is of another kind"):
        batches_of("text").position(10).check_same(position)
    state = iter(mixture()).get_state()
    iterator = iter(mixture({"text": 4, "audio": 1}))
    message = "with the weights .*3.0.*, and this one has .* `weights={0: old, step: n"
    with pytest.raises(ValueError, match=message):
        iterator.set_state(state)
    swapped = dict(reversed(mixture().streams.items()))
    iterator = iter(StreamMixture(swapped, {"text": 3, "audio": 1}))
    with pytest.raises(ValueError, match="names .'text', 'audio'., and this one has"):
        iterator.set_state(state)
    for bad in ({}, None, {"step": 3}):
        with pytest.raises(ValueError, match="is not a state of a `StreamMixture`"):
            iterator.set_state(bad)
    with pytest.raises(ValueError, match="`step=1` has no state, because the next"):
        iterator.state_before(1)


def test_a_plan_may_change_at_a_step_that_was_not_reached():
    now, later = PLANS["text"], jb.BucketPlan.from_shapes([(8, 8), (2, 32)])
    before = batches_of("text", plan=now)
    after = batches_of("text", plan={0: now, 15: later})
    iterator, again = iter(before), iter(after)
    batches = [next(iterator) for _ in range(6)]
    again.set_state(iterator.state_before(5))
    assert_same(next(again), batches[5])
    # Processes have to agree on later plans, too.
    assert before.position(5).schedule != after.position(5).schedule


LATER = jb.BucketPlan.from_shapes([(8, 8), (2, 32)])
CHANGES = [{}, {15: LATER}, {15: PLANS["text"]}, {16: LATER}, {7: LATER, 15: LATER}]


@pytest.mark.parametrize("mixed", [False, True])
def test_positions_depend_only_on_plans_before_their_step(mixed):
    all_plans = [{0: PLANS["text"], **change} for change in CHANGES]
    streams = [{"text": batches_of("text", plan=plans)} for plans in all_plans]
    audio = {"audio": batches_of("audio")}
    mixtures = [StreamMixture(text | audio, WEIGHTS[0]) for text in streams]
    datasets = mixtures if mixed else [text["text"] for text in streams]
    for step in (0, 1, 7, 8, 15, 16, 19, 20, 21, 22, 30):
        own_step = mixtures[0].steps_before(step)["text"] if mixed else step
        reached = [
            {start: plan for start, plan in plans.items() if start < max(own_step, 1)}
            for plans in all_plans
        ]
        positions = [dataset.position(step) for dataset in datasets]
        for (old, saved), (new, now) in itertools.product(
            zip(reached, positions, strict=True), repeat=2
        ):
            text = json.dumps(saved.to_dict())
            saved = jb.data.DataPosition.from_dict(json.loads(text))
            if old == new:
                saved.check_same(now)
                continue
            message = r"plans .* -> .* `plan={0: old, step: new}`\.$"
            with pytest.raises(ValueError, match=message):
                saved.check_same(now)


def test_weights_may_change_at_a_step_that_was_not_reached():
    before, after = mixture(WEIGHTS[0]), mixture({0: WEIGHTS[0], 15: WEIGHTS[1]})
    iterator = iter(before)
    batches = [next(iterator) for _ in range(12)]
    state = iterator.state_before(10)
    for step in (10, 15):
        before.position(step).check_same(after.position(step))
        after.position(step).check_same(before.position(step))
    again = iter(after)
    again.set_state(state)
    assert_same(next(again), batches[10])
    with pytest.raises(ValueError, match="schedule weights"):
        before.position(16).check_same(after.position(16))
    for _ in range(8):
        next(iterator)
    with pytest.raises(ValueError, match="is of a mixture with the weights"):
        again.set_state(iterator.get_state())


def test_a_refused_state_leaves_no_valid_iterator():
    iterator = iter(mixture())
    for _ in range(10):
        next(iterator)
    state = iterator.get_state()
    streams = mixture().streams | {"audio": batches_of("audio", first=1)}
    again = iter(StreamMixture(streams, {"text": 3, "audio": 1}))
    with pytest.raises(ValueError, match="The stream has changed"):
        again.set_state(state)
    for use in (lambda: next(again), again.get_state):
        with pytest.raises(ValueError, match="The last state that was set was rej"):
            use()
    iterator.set_state(state)
    next(iterator)
    assert len({mixture(x).position(0).schedule["fingerprint"] for x in WEIGHTS}) == 3
    with pytest.raises(ValueError, match="`step=-1` must not be negative"):
        mixture().turn(-1)
    assert sum(mixture().steps_before(10**30).values()) == 10**30


def test_a_state_refused_without_reading_leaves_the_iterator_unchanged():
    iterator = iter(mixture())
    for _ in range(10):
        next(iterator)
    state = iterator.get_state()
    for name in PLANS:
        streams = mixture().streams | {name: batches_of(name, max_wait=99)}
        again = iter(StreamMixture(streams, {"text": 3, "audio": 1}))
        unchanged = again.get_state()
        with pytest.raises(ValueError, match="max wait 256 -> 99") as error:
            again.set_state(state)
        assert error.value.__notes__ == [f"This is the stream {name!r} of the mixture."]
        assert again.get_state() == unchanged
    text, audio = state["streams"].values()
    damaged = [
        *({"step": x} for x in (4, 1.5, None, 10**30, np.array([1, 2]))),
        *({"names": x} for x in (None, np.array(["text", "audio"]))),
        *({"weights": x} for x in (None, {"0": np.array([3.0, 1.0])})),
        *({"streams": x} for x in ([], {}, {"text": text}, {"a": None})),
        {"streams": {"text": text, "audio": None}},
        {"streams": {"text": text, "audio": audio | {"step": 10**30}}},
        {"streams": {"text": text, "audio": audio | {"traits": {"seed": [0]}}}},
        {"streams": {"text": text, "audio": audio | {"features": "[1]"}}},
    ]
    for change in damaged:
        message = "`state` (is|does not have)|Cannot resume at step"
        with pytest.raises(ValueError, match=message):
            iterator.set_state(state | change)
    assert iterator.get_state() == state


@pytest.mark.parametrize(
    "options", [{"accumulate": 2}, {"shard": jb.data.RowShard((0, 1), 2)}]
)
def test_streams_agree_in_accumulation_and_rows(options):
    streams = mixture().streams | {"text": batches_of("text", **options)}
    (name,) = options
    with pytest.raises(ValueError, match=f"have different values of `{name}`"):
        StreamMixture(streams, {"text": 3, "audio": 1})


@pytest.mark.parametrize(
    ("streams", "weights", "message"),
    [
        ({}, {}, "`streams={}` is not a mapping from names to streams"),
        ([1], [1], "`streams=[1]` is not a mapping from names"),
        ({1: 2}, {1: 2}, "`streams` has the name 1, which is not a s"),
        ({"text": [1]}, {"text": 1}, "`streams['text']` is a list. Pass the result"),
        (None, {"text": 1}, "`weights` has the names ['text'], but the mixture has"),
        (None, {"text": 1, "audio": -1}, "`weights['audio']=-1.0` must be positive"),
    ],
)
def test_invalid_mixtures_are_refused(streams, weights, message):
    streams = mixture().streams if streams is None else streams
    with pytest.raises(ValueError, match=re.escape(message)):
        StreamMixture(streams, weights)


def test_errors_name_the_stream():
    streams = mixture().streams | {"text": batches_of("audio", plan=PLANS["text"])}
    mixed = iter(StreamMixture(streams, {"text": 1, "audio": 1}))
    with pytest.raises(ValueError, match="beyond the last bucket") as error:
        for _ in range(40):
            next(mixed)
    assert "This is the stream 'text' of the mixture." in error.value.__notes__
    with pytest.raises(ValueError, match="cannot be divided among workers"):
        mixture().set_slice(slice(0, None, 2))
