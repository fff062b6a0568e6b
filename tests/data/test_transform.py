"""Random augmentation depends only on seed, epoch and example, not on the reader."""

import functools
import json

import grain
import jax
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.schedule.example_draws import example_rng

SEQUENCES = ["tokens", "noise"]


def make_source(lengths: np.ndarray, first: int = 0) -> list[dict[str, np.ndarray]]:
    return [
        {"tokens": np.arange(n, dtype=np.int32), "index": np.int32(first + i)}
        for i, n in enumerate(lengths)
    ]


def noisy(example, rng):
    """Modifies an array in place, adds a feature and changes a dtype."""
    example["tokens"] += 1000
    example["noise"] = rng.random(len(example["tokens"]), np.float32)
    example["drawn"] = rng.integers(2**62)
    return example


def check_example(example, length, rng) -> None:
    want = noisy({"tokens": np.arange(length, dtype=np.int32)}, rng)
    for name, value in want.items():
        np.testing.assert_array_equal(example[name], value)


def assert_equal(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x, y)


def micro_batches_of(step) -> tuple[jb.Batch, ...]:
    return (step,) if isinstance(step, jb.Batch) else step


def examples_of(batch: jb.Batch, max_segments: int | None) -> list[dict]:
    return jb.data.unbatch(batch, sequences=SEQUENCES, max_segments=max_segments)


def make_job(seed: int = 0, size: int = 90, **options):
    lengths = np.random.default_rng(seed).integers(1, 30, size)
    plan = jb.plan_buckets(
        lengths, max_tokens=240, num_buckets=3, batch_size_multiple=4
    )
    return lengths, jb.BatchSchedule(plan, lengths, seed=seed, **options)


def make_packed_job():
    lengths, _ = make_job(5)
    packing = jb.packing.pack(lengths, 40)
    plan = jb.plan_buckets(
        packing.row_lengths, max_tokens=160, boundaries=[40], batch_size_multiple=4
    )
    return lengths, jb.BatchSchedule(plan, lengths, packing=packing, seed=5)


JOBS = {
    "shuffled": lambda: make_job(1),
    "source": lambda: make_job(2, order="source"),
    "micro-batches": lambda: make_job(3, accumulate=3),
    "mixed": lambda: make_job(4, accumulate=2, group="mixed"),
    "packed": make_packed_job,
}


def test_each_example_has_its_own_philox_words():
    seen = {}
    for numbers in np.ndindex(2, 2, 3, 3, 2):
        seed, run, epoch, index, draw = numbers
        rng = example_rng(seed, run, epoch, index, draw)
        philox = np.random.Philox(
            key=seed + (run << 64),
            counter=(index << 64) + (draw << 128) + (epoch << 192),
        )
        words = rng.bit_generator.random_raw(8)
        assert words.tolist() == philox.random_raw(8).tolist()
        for word in words.tolist():
            assert seen.setdefault(word, numbers) == numbers
    largest = example_rng(2**63 - 1, 2**63 - 1, 2**62, 2**62, 2**63)
    assert 0 <= largest.random() < 1
    golden = example_rng(7, 0, 3, 12).bit_generator.random_raw(2).tolist()
    assert golden == [14464789325577297237, 12305318547082009378]


def test_micro_batches_are_numbered_if_examples_repeat():
    lengths = np.array([3, 2, 4] * 10)
    plan = jb.plan_buckets(lengths, max_tokens=16, num_buckets=2)
    order = jb.Curriculum(lengths.astype(float), replacement=True)
    schedule = jb.BatchSchedule(plan, lengths, order=order, accumulate=3)
    for epoch in range(2):
        steps = range(epoch * len(schedule), (epoch + 1) * len(schedule))
        numbers = [x.number for step in steps for _, x in schedule.drawn_batches(step)]
        assert numbers == list(range(3 * len(schedule)))


@pytest.mark.parametrize("job", JOBS)
def test_random_numbers_are_determined_by_epoch_and_index(job):
    lengths, schedule = JOBS[job]()
    source = make_source(lengths)
    dataset = jb.batch_dataset(
        source, schedule, num_epochs=2, transform=noisy, sequences=SEQUENCES
    )
    drawn = [{}, {}]
    for step, batches in enumerate(dataset):
        epoch = schedule.epoch_at(step)
        for batch in micro_batches_of(batches):
            for example in examples_of(batch, schedule.max_segments):
                index = int(example["index"])
                rng = example_rng(schedule.seed, 0, epoch, index)
                check_example(example, lengths[index], rng)
                drawn[epoch][index] = int(example["drawn"])
    assert drawn[0].keys() == drawn[1].keys() == set(range(len(lengths)))
    # The random numbers of every example differ between epochs.
    assert len({*drawn[0].values(), *drawn[1].values()}) == 2 * len(lengths)
    # The source itself is unchanged, so the next epoch reads the same examples.
    assert_equal(source, make_source(lengths))


@pytest.mark.parametrize("job", JOBS)
def test_shards_and_resumed_runs_have_the_rows_of_the_whole_run(job):
    lengths, schedule = JOBS[job]()
    source, options = make_source(lengths), {"transform": noisy, "num_epochs": 2}
    options["sequences"] = SEQUENCES
    whole = jb.batch_dataset(source, schedule, **options)
    batches = list(map(micro_batches_of, whole))
    for shard in (jb.data.RowShard((part,), 4) for part in range(4)):
        part = jb.batch_dataset(source, schedule, shard=shard, **options)
        for step, want in zip(part, batches, strict=True):
            for local, full in zip(micro_batches_of(step), want, strict=True):
                rows = shard.rows(len(full.mask))
                assert_equal(local, jax.tree.map(lambda x, rows=rows: x[rows], full))
    for step in range(len(whole)):
        resumed = jb.batch_dataset(source, schedule, **options).resume(
            whole.position(step)
        )
        for later in {step, len(whole) - 1}:
            assert_equal(micro_batches_of(resumed[later - step]), batches[later])


def test_token_files_chunks_and_concatenations_apply_the_transform_per_example(
    tmp_path,
):
    lengths, schedule = make_job(8, order="source")
    source = make_source(lengths)
    options = {"transform": noisy, "sequences": SEQUENCES}
    want = list(jb.batch_dataset(source, schedule, **options))
    file = jb.data.write_token_file(tmp_path / "a", source)
    halves = [
        jb.data.write_token_file(tmp_path / name, part)
        for name, part in (("b", source[:40]), ("c", source[40:]))
    ]
    for same in (file, jb.data.concatenate([source[:40], source[40:]])):
        for result, batch in zip(
            jb.batch_dataset(same, schedule, **options), want, strict=True
        ):
            assert_equal(result, batch)
    joined = jb.data.concatenate(halves)
    assert_equal(jb.batch_dataset(joined, schedule, **options)[0], want[0])
    # The random numbers depend on the index of the chunk.
    chunks = jb.data.split_source(file, 7)
    plan = jb.plan_buckets(chunks.lengths, max_tokens=56, boundaries=[7])
    cut = jb.BatchSchedule(plan, chunks.lengths, order="source")
    batch = jb.batch_dataset(chunks, cut, **options)[1]
    for row, index in enumerate(cut[1].rows):
        noise = example_rng(0, 0, 0, int(index)).random(
            int(chunks.lengths[index]), np.float32
        )
        in_batch = batch.features["noise"][row][batch.mask[row]]
        assert in_batch.tolist() == noise.tolist()


def test_each_component_of_a_mixture_has_its_own_epochs_and_numbers():
    lengths = np.random.default_rng(0).integers(1, 30, 40)
    plan = jb.plan_buckets(lengths, max_tokens=120, num_buckets=2)
    # Two components over the same examples, with the same seed.
    parts = [
        jb.BatchSchedule(plan, lengths, seed=3),
        jb.BatchSchedule(plan, lengths[:25], seed=3),
    ]
    mixture = jb.Mixture(parts, weights=[1, 2], accumulate=2)
    source = make_source(lengths)
    whole = jb.data.concatenate([source, source[:25]])
    dataset = jb.batch_dataset(
        whole, mixture, num_epochs=2, transform=noisy, sequences=SEQUENCES
    )
    occurrences: dict[int, int] = {}
    drawn = set()
    for step, (batches, indices) in enumerate(
        zip(dataset, (mixture[step] for step in range(len(dataset))), strict=True)
    ):
        assert_equal(dataset[step], batches)
        for batch, one in zip(batches, indices, strict=True):
            rows = [int(row) for row in one.rows if row >= 0]
            for index, example in zip(rows, examples_of(batch, None), strict=True):
                # The epoch of the component is the number of earlier occurrences.
                epoch = occurrences.get(index, 0)
                occurrences[index] = epoch + 1
                length = len(example["tokens"])
                check_example(example, length, example_rng(3, 0, epoch, index))
                drawn.add(int(example["drawn"]))
    assert max(occurrences.values()) > 2 and len(drawn) == sum(occurrences.values())


def test_repeated_examples_draw_new_numbers_each_time():
    lengths = np.random.default_rng(0).integers(1, 30, 12)
    plan = jb.plan_buckets(
        lengths, max_tokens=240, num_buckets=2, batch_size_multiple=2
    )
    order = jb.Curriculum(
        lengths, jb.schedule.RootPacing(start=0.1, duration=2), replacement=True
    )
    schedule = jb.BatchSchedule(plan, lengths, order=order, accumulate=2)
    make = functools.partial(
        *(jb.batch_dataset, make_source(lengths), schedule),
        num_epochs=6,
        transform=noisy,
        sequences=SEQUENCES,
    )
    whole = make()
    drawn, occurrences = set(), []
    for step, batches in enumerate(whole):
        assert_equal(make(start_step=step)[0], batches)
        for batch in batches:
            for example in examples_of(batch, None):
                drawn.add(int(example["drawn"]))
                occurrences.append((step, int(example["index"])))
    assert len(set(occurrences)) < len(occurrences) == len(drawn)
    shard = jb.data.RowShard((1,), 2)
    for step, batches in enumerate(make(shard=shard)):
        for local, want in zip(batches, whole[step], strict=True):
            rows = shard.rows(len(want.mask))
            assert_equal(local, jax.tree.map(lambda x, rows=rows: x[rows], want))


def test_a_continued_run_draws_new_numbers():
    lengths, schedule = make_job(1)
    source = make_source(lengths)
    options = {"transform": noisy, "sequences": SEQUENCES}
    first = jb.batch_dataset(source, schedule, num_steps=40, **options)
    joined = jb.JoinedSchedule({0: schedule, 7: schedule})
    whole = jb.batch_dataset(source, joined, num_steps=40, **options)
    second = whole.resume(first.position(7))
    # The same batches in the same order, with different random numbers.
    for before, after in zip(first, second, strict=False):
        for name in ("tokens", "index"):
            assert before.features[name].tolist() == after.features[name].tolist()
        assert not set(np.ravel(before.features["drawn"])) & set(
            np.ravel(after.features["drawn"])
        ) - {0}
    for step in (7, 9, 20):
        assert_equal(whole.resume(whole.position(step))[0], second[step - 7])


def test_empty_rows_have_the_features_of_the_transform():
    source = make_source(np.array([3, 5, 2]))
    plan = jb.plan_buckets([5], sample=True, max_tokens=40)
    schedule = jb.BatchSchedule(plan, [3, 5, 2])
    options = {"transform": noisy, "sequences": SEQUENCES}
    dataset = jb.batch_dataset(source, schedule, **options)
    batch = dataset[0]
    assert batch.features["noise"].dtype == np.float32
    assert set(batch.features) == set(dataset.example)
    specs = jb.sharding.batch_specs(
        *(plan, dataset.example, jb.data_mesh()), sequences=SEQUENCES
    )
    (spec,) = specs.values()
    assert spec.features.keys() == batch.features.keys()
    assert all(spec.features[x].shape == batch.features[x].shape for x in spec.features)
    # This part of the rows has no example.
    shard = jb.data.RowShard((7,), 8)
    last = jb.batch_dataset(source, schedule, shard=shard, **options)[0]
    assert last.num_examples == 0
    assert {n: x.dtype for n, x in last.features.items()} == {
        n: x.dtype for n, x in batch.features.items()
    }


def test_a_transform_receives_whole_bytes_and_copied_objects():
    pcm = np.array([5, 7, 0, 0], np.int16).tobytes()
    source = [
        {
            "tokens": np.ones(n, np.int32),
            "pcm": pcm,
            "parts": [pcm, b""],
            "meta": {"a": [n]},
        }
        for n in (2, 3)
    ]
    seen = []

    def decode(example, rng):
        example["meta"].item()["a"].append(rng)
        seen.append((example["pcm"].item(), example["parts"].tolist()))
        return {"tokens": example["tokens"]}

    plan = jb.plan_buckets([3], sample=True, max_tokens=6)
    jb.batch_dataset(source, jb.BatchSchedule(plan, [2, 3]), transform=decode)[0]
    assert len(seen) >= 2
    assert all(x == (pcm, [pcm, b""]) for x in seen)
    assert [example["meta"] for example in source] == [{"a": [2]}, {"a": [3]}]


def raises(error):
    def transform(example, rng):
        raise error

    return transform


class RandomMap(grain.transforms.RandomMap):
    def random_map(self, element, rng):
        return element


@pytest.mark.parametrize(
    "transform",
    [
        lambda x, rng: None,
        lambda x, rng: [1],
        lambda x, rng: {},
        lambda x: x,
        raises(KeyError("x")),
        raises(StopIteration()),
        lambda x, rng: {"tokens": x["tokens"][:2]},
        lambda x, rng: {"tokens": x["tokens"], "other": np.ones(1)},
    ],
)
def test_a_transform_that_fails_is_named_with_its_example(transform):
    source = make_source(np.array([3, 3]))
    plan = jb.plan_buckets([3], sample=True, max_tokens=3)
    schedule = jb.BatchSchedule(plan, [3, 3], order="source")
    dataset = jb.batch_dataset(source, schedule, transform=transform)
    with pytest.raises(Exception, match=r"`source\[0\]`"):
        dataset[0]


def test_a_position_contains_the_name_of_the_transform():
    lengths, schedule = make_job(1)
    source = make_source(lengths)
    make = functools.partial(jb.batch_dataset, source, schedule, sequences=["tokens"])
    plain, transformed = make(), make(transform=noisy)
    position = jb.data.DataPosition.from_dict(
        json.loads(json.dumps(transformed.position(3).to_dict()))
    )
    with pytest.raises(ValueError, match="transform noisy -> None"):
        plain.resume(position)
    with pytest.raises(ValueError, match="transform None -> noisy"):
        transformed.resume(plain.position(3))
    partial = functools.partial(noisy)
    make(transform=partial).resume(position)
    with pytest.raises(ValueError, match="transform noisy -> RandomMap.random_map"):
        make(transform=RandomMap().random_map).resume(position)
