"""Parts of a source, selected by a condition or by indices."""

import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.data import select, split_source, write_token_file, zip_sources

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 20, 60)
EXAMPLES = [
    {"x": RNG.integers(0, 99, n), "index": np.array(i)} for i, n in enumerate(LENGTHS)
]
CONDITION = (LENGTHS >= 4) & (np.arange(60) % 3 > 0)
INDICES = {
    "condition": CONDITION,
    "indices": np.array([7, 3, 3, 59, 0], np.uint8),
    "list": [5, 6],
}


@pytest.fixture(params=["list", "token file", "chunks"])
def source(request, tmp_path):
    if request.param == "list":
        return EXAMPLES
    file = write_token_file(tmp_path / "file", EXAMPLES)
    if request.param == "token file":
        return file
    return split_source(file, 20)


@pytest.mark.parametrize("kind", INDICES)
@pytest.mark.parametrize("packed", [False, True])
def test_an_epoch_has_the_selected_examples(source, kind, packed):
    selected = INDICES[kind]
    part = select(source, selected)
    indices = np.arange(60)[selected]
    lengths = LENGTHS[selected]
    assert len(part) == len(indices)
    packing = jb.packing.pack(lengths, 32) if packed else None
    plan = jb.plan_buckets([32] if packed else lengths, max_tokens=128)
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    dataset, size = jb.batch_dataset(part, schedule), schedule.max_segments
    rows = [x for batch in dataset for x in jb.data.unbatch(batch, max_segments=size)]
    assert sorted(int(x["index"]) for x in rows) == sorted(indices.tolist())
    for row in rows:
        expected = EXAMPLES[int(row["index"])]["x"]
        np.testing.assert_array_equal(row["x"], expected)


def test_a_selection_of_a_token_file_gathers_and_truncates_on_both_sides(tmp_path):
    part = select(write_token_file(tmp_path / "file", EXAMPLES), CONDITION)
    for overlong in ("truncate", "truncate_left"):
        plan = jb.plan_buckets(
            part.lengths, max_tokens=64, max_seq_len=6, overlong=overlong
        )
        schedule = jb.BatchSchedule(plan, part.lengths)
        dataset = jb.batch_dataset(part, schedule)
        assert dataset._reader._row_source is part
        for batch in dataset:
            for row in jb.data.unbatch(batch):
                whole = EXAMPLES[int(row["index"])]["x"]
                kept = whole[:6] if overlong == "truncate" else whole[-6:]
                np.testing.assert_array_equal(row["x"], kept)


def test_zipped_files_are_selected_together(tmp_path):
    files = [
        write_token_file(tmp_path / name, ({name: x["x"]} for x in EXAMPLES))
        for name in ("a", "b")
    ]
    part = select(zip_sources(files), CONDITION)
    np.testing.assert_array_equal(part.lengths["a"], LENGTHS[CONDITION])
    np.testing.assert_array_equal(
        part[2]["b"], EXAMPLES[np.flatnonzero(CONDITION)[2]]["x"]
    )


def test_a_run_does_not_resume_with_a_different_selection(source):
    plan = jb.BucketPlan.from_shapes([(2, 20)])
    same = np.flatnonzero(LENGTHS == np.bincount(LENGTHS).argmax())
    first, second = select(source, same[:3]), select(source, same[1:4])
    lengths = LENGTHS[same[:3]]
    schedule = jb.BatchSchedule(plan, lengths)
    position = jb.batch_dataset(first, schedule).position(1)
    again = jb.batch_dataset(select(source, same[:3]), schedule)
    assert again.resume(position).start_step == 1
    with pytest.raises(ValueError, match="data fingerprint"):
        jb.batch_dataset(second, schedule).resume(position)


@pytest.mark.parametrize(
    ("selected", "message"),
    [
        ([], "`selected` selects no example"),
        (np.zeros(60, bool), "`selected` selects no example"),
        (np.ones(9, bool), r"`selected` is bool\[9\], but there are 60 examples"),
        ([0, 60], "`selected` has the index 60, but there are 60 .* 0 to 59"),
        ([0, -1], "`selected` has the index -1, but"),
        ([0.5], r"`selected` is float64\[1\]. Pass integers"),
        ([1, 0] * 30, "`selected` has only 0 and 1 for 60 examples. Pass `selected.as"),
        ([[1, 2]], r"`selected` is int64\[1, 2\]. Pass integers"),
    ],
)
def test_invalid_selections_are_refused(selected, message):
    with pytest.raises(ValueError, match=message):
        select(EXAMPLES, selected)


def test_an_empty_source_is_refused():
    with pytest.raises(ValueError, match="`source` is empty"):
        select([], [0])


def test_an_index_outside_the_selection_is_refused():
    part = select(EXAMPLES, [3, 4])
    with pytest.raises(IndexError, match="`index=2` must be from 0 to 1"):
        part[2]
