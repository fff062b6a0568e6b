"""Token files that are zipped into a source of several sequences."""

import jax
import numpy as np
import pytest

import jaxbucket as jb

RNG = np.random.default_rng(0)
PAIRS = [
    {
        "source": RNG.integers(1, 99, n).astype(np.int32),
        "weights": RNG.random(n).astype(np.float32),
        "kind": np.int8(n % 3),
        "target": RNG.integers(1, 99, m).astype(np.uint8),
    }
    for n, m in RNG.integers(1, 40, (60, 2))
]
SIDES = {"source": ["source", "weights", "kind"], "target": ["target"]}
SEQUENCES = {"source": ["source", "weights"], "target": ["target"]}
LENGTHS = {name: np.array([len(x[name]) for x in PAIRS]) for name in SIDES}


@pytest.fixture
def zipped(tmp_path):
    return jb.data.zip_sources(
        [
            jb.data.write_token_file(
                tmp_path / side,
                ({name: x[name] for name in names} for x in PAIRS),
                sequences=SEQUENCES[side],
            )
            for side, names in SIDES.items()
        ]
    )


def assert_same_batches(source, other, schedule, **options):
    """Compares the batches of two sources, of which one is not gathered."""
    gathered = jb.batch_dataset(source, schedule, **options)
    assert gathered._reader._zipped is source
    collated = jb.batch_dataset(other, schedule, sequences=SEQUENCES, **options)
    assert len(gathered) == len(collated)
    for a, b in zip(gathered, collated, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
        assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)


def test_a_zipped_source_has_the_examples_of_its_files(zipped):
    assert len(zipped) == len(PAIRS)
    for name, lengths in zipped.lengths.items():
        assert lengths.tolist() == LENGTHS[name].tolist()
    for index in (0, 7, 59):
        assert zipped[index].keys() == PAIRS[index].keys()
        for name, value in PAIRS[index].items():
            np.testing.assert_array_equal(zipped[index][name], value)
    measured = jb.measure_lengths(zipped, sequences=SEQUENCES, progress=False)
    for name, lengths in measured.items():
        assert lengths.tolist() == LENGTHS[name].tolist()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlong": "drop", "max_seq_len": 30},
        {"overlong": "truncate", "max_seq_len": 20},
        {"overlong": {"source": "truncate_left", "target": "truncate"}},
        {"overlong": "truncate_left", "max_seq_len": {"source": 9, "target": 30}},
    ],
)
def test_batches_are_those_of_collated_examples(zipped, options):
    options = {"max_seq_len": 25 if "overlong" in options else None, **options}
    plan = jb.plan_buckets(zipped.lengths, max_tokens=600, num_buckets=3, **options)
    schedule = jb.BatchSchedule(plan, zipped.lengths, seed=1)
    assert_same_batches(zipped, PAIRS, schedule)
    pads = {"weights": -1.0, "target": 255}
    assert_same_batches(zipped, PAIRS, schedule, pad_value=pads)


def test_packed_rows_are_gathered(zipped):
    packing = jb.packing.pack(zipped.lengths, {"source": 64, "target": 64})
    shape = {"source": 64, "target": 64}
    plan = jb.BucketPlan.from_shapes([(4, shape)], packed=True)
    schedule = jb.BatchSchedule(plan, zipped.lengths, packing=packing, seed=1)
    assert_same_batches(zipped, PAIRS, schedule)


def test_a_transform_reads_examples_one_at_a_time(zipped):
    plan = jb.plan_buckets(zipped.lengths, max_tokens=600)
    schedule = jb.BatchSchedule(plan, zipped.lengths)
    batches = jb.batch_dataset(
        zipped, schedule, transform=lambda x, rng: {**x, "source": x["source"] + 1}
    )
    plain = jb.batch_dataset(zipped, schedule)
    real = plain[0].segment_ids["source"] > 0
    np.testing.assert_array_equal(
        batches[0].features["source"], plain[0].features["source"] + real
    )
    np.testing.assert_array_equal(
        batches[0].features["weights"], plain[0].features["weights"]
    )


def test_a_transform_may_add_a_sequence(zipped):
    plan = jb.plan_buckets(zipped.lengths, max_tokens=600)
    schedule = jb.BatchSchedule(plan, zipped.lengths)
    batches = jb.batch_dataset(
        zipped,
        schedule,
        sequences={**SEQUENCES, "target": ["target", "labels"]},
        transform=lambda x, rng: {**x, "labels": x["target"] + 1},
    )
    features = batches[0].features
    real = batches[0].segment_ids["target"] > 0
    np.testing.assert_array_equal(features["labels"], features["target"] + real)


def test_hosts_gather_parts_of_the_same_batches(zipped):
    plan = jb.plan_buckets(zipped.lengths, max_tokens=600, batch_size_multiple=4)
    schedule = jb.BatchSchedule(plan, zipped.lengths)
    whole = jb.batch_dataset(zipped, schedule)
    for count in (2, 4):
        parts = [
            jb.batch_dataset(
                zipped, schedule, shard=jb.data.RowShard((i,), num_parts=count)
            )
            for i in range(count)
        ]
        for step, batch in enumerate(whole):
            joined = jax.tree.map(
                lambda *x: np.concatenate(x), *(part[step] for part in parts)
            )
            jax.tree.map(np.testing.assert_array_equal, joined, batch)


def test_zipped_sources_are_concatenated(zipped):
    both = jb.data.concatenate([zipped, zipped])
    lengths = {name: np.tile(x, 2) for name, x in LENGTHS.items()}
    plan = jb.plan_buckets(lengths, max_tokens=600)
    schedule = jb.BatchSchedule(plan, lengths, seed=1)
    assert_same_batches(both, [*PAIRS, *PAIRS], schedule)


def test_files_that_do_not_match_are_refused(tmp_path, zipped):
    def write(name, examples):
        return jb.data.write_token_file(tmp_path / name, examples)

    a = write("a", [{"a": np.arange(3)}] * 2)
    with pytest.raises(ValueError, match="`sources` has 1 entries. Pass at least two"):
        jb.data.zip_sources([a])
    with pytest.raises(ValueError, match=r"`sources\[1\]` is a list, which does not"):
        jb.data.zip_sources([a, [{"b": [1]}] * 2])
    with pytest.raises(ValueError, match=r"have \[2, 3\] examples. Pass sources with"):
        jb.data.zip_sources([a, write("b", [{"b": np.arange(3)}] * 3)])
    with pytest.raises(ValueError, match=r"share the features \['a'\]. Write each"):
        jb.data.zip_sources([a, write("c", [{"a": np.arange(3)}] * 2)])
    plan = jb.plan_buckets(LENGTHS["source"], max_tokens=600)
    schedule = jb.BatchSchedule(plan, LENGTHS["source"])
    with pytest.raises(ValueError, match=r"but the plan has \[\]. Plan with `source.l"):
        jb.batch_dataset(zipped, schedule)
    plan = jb.plan_buckets(LENGTHS, max_tokens=600)
    schedule = jb.BatchSchedule(plan, LENGTHS)
    for sequences in (SEQUENCES, None):
        jb.batch_dataset(zipped, schedule, sequences=sequences)
    for source in (["nope"], ["source"]):
        with pytest.raises(ValueError, match="but the source has {.*Remove `sequences"):
            jb.batch_dataset(
                zipped, schedule, sequences={"source": source, "target": ["target"]}
            )
    changed = {**LENGTHS, "target": LENGTHS["target"] + 1}
    plan = jb.plan_buckets(changed, max_tokens=600)
    with pytest.raises(ValueError, match="The data changed since it was measured"):
        jb.batch_dataset(zipped, jb.BatchSchedule(plan, changed))
    plan = jb.plan_buckets(LENGTHS, max_tokens=600)
    with pytest.raises(ValueError, match="would fill 3 features. Pass a dict of"):
        jb.batch_dataset(zipped, jb.BatchSchedule(plan, LENGTHS), pad_value=5)[0]
