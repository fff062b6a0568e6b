"""Random augmentation in streams depends on seed, epoch and example, and resumes."""

import grain
import numpy as np
import pytest
from stream_cases import batches_of, exhaustive, steps_of, stream, through_json

import jaxbucket as jb
from jaxbucket.schedule.example_draws import example_rng

LENGTHS = np.random.default_rng(2).integers(1, 30, 60)
PLAN = jb.BucketPlan.from_shapes([(10, 12), (4, 30)])


def passage(example, rng):
    """Modifies the tokens in place, and returns a random slice of them."""
    example["tokens"] += 1000
    start, end = np.sort(rng.integers(len(example["tokens"]), size=2)) + [0, 1]
    drawn = rng.integers(2**62)
    return {
        "tokens": example["tokens"][start:end],
        "index": example["index"],
        "drawn": drawn,
    }


STREAMS = [
    {},
    {"accumulate": 2, "group": "mixed", "policy": "first"},
    {"max_segments_per_row": 4},
]


@pytest.mark.parametrize("overlong", ["split", *exhaustive(["error", "truncate"])])
@pytest.mark.parametrize("options", STREAMS, ids=str)
def test_streams_draw_by_epoch_and_place_and_resume_at_every_step(options, overlong):
    shapes = [(12, 5), (5, 12), *([(2, 30)] if overlong == "error" else [])]
    plan = jb.BucketPlan.from_shapes(shapes, overlong=overlong)
    given = {"num_epochs": 2, "seed": 9, "sequences": ["tokens"], **options}
    source = stream(LENGTHS)
    dataset = batches_of(source, plan, pool_size=50, transform=passage, **given)
    drawn = []
    for batch in (batch for micro in steps_of(dataset) for batch in micro):
        examples = jb.data.unbatch(
            batch, sequences=["tokens"], max_segments=dataset.max_segments
        )
        drawn += [(int(x["index"]), int(x["drawn"])) for x in examples]
    want = [
        (index, int(passage(example, example_rng(9, 0, epoch, index))["drawn"]))
        for epoch in range(2)
        for index, example in enumerate(stream(LENGTHS))
    ]
    assert sorted(set(drawn)) == sorted(want)
    assert len(drawn) == len(want) or overlong == "split"
    grain.experimental.assert_equal_output_after_checkpoint(dataset)


def test_a_sample_has_the_transformed_lengths_of_the_stream():
    options = {"transform": passage, "seed": 4, "sequences": ["tokens"]}
    examples = jb.stream.ExampleStream(stream(LENGTHS), **options)
    sample = jb.stream.sample_lengths(examples, 100)
    assert len(sample) == 60 and not np.array_equal(sample, LENGTHS)
    plan = jb.plan_buckets(sample, sample=True, max_tokens=60, num_buckets=2)
    dataset = jb.stream_batches(examples, plan, pool_size=40)
    streamed = [n for batch in dataset for n in batch.mask.sum(axis=1) if n]
    assert sorted(streamed) == sorted(sample)
    example = dataset.example
    assert set(example) == {"tokens", "index", "drawn"}
    assert len(example["tokens"]) == sample[0]


def test_several_processes_draw_different_numbers():
    def drawn(part: int, seed: int) -> list[int]:
        dataset = batches_of(
            stream(np.full(20, 9)),
            PLAN,
            pool_size=10,
            lengths=[9],
            shard=jb.data.RowShard((part,), 2),
            num_steps=10,
            seed=seed,
            sequences=["tokens"],
            transform=lambda x, rng: x | {"drawn": 1 + rng.integers(2**60)},
        )
        every = np.concatenate([batch.features["drawn"] for batch in dataset])
        return every[every > 0].tolist()

    every = [*drawn(0, 1), *drawn(1, 1), *drawn(0, 2)]
    assert len(set(every)) == len(every) == 60
    assert drawn(1, 1) == drawn(1, 1)


def stop(example, rng):
    raise StopIteration


@pytest.mark.parametrize(
    "transform", [lambda x, rng: None, lambda x, rng: [1], lambda x: x, stop]
)
def test_a_transform_that_fails_is_named_with_its_example(transform):
    dataset = batches_of(stream([3, 3]), PLAN, pool_size=10, transform=transform)
    for use in (lambda: list(dataset), lambda: dataset.example):
        with pytest.raises(Exception, match="example 0 of epoch 0"):
            use()


def test_resuming_detects_a_transform_with_its_own_generator():
    global_rng = np.random.default_rng(0)

    def transform_with_own_generator(example, rng):
        return example | {"noise": global_rng.random(3)}

    dataset = batches_of(
        stream(np.full(100, 9)),
        PLAN,
        pool_size=40,
        sequences=["tokens"],
        transform=transform_with_own_generator,
    )
    iterator = iter(dataset)
    next(iterator)
    state = through_json(iterator.get_state())
    with pytest.raises(ValueError, match="by seeding all random draws"):
        iter(dataset).set_state(state)
