"""A stream warns of lengths that its plan was not made for."""

import numpy as np
import pytest
from stream_cases import make_case, stream

import jaxbucket as jb
from jaxbucket.stream import drift as drift_module

RNG = np.random.default_rng(0)
SHORT, LONG = RNG.integers(1, 9, 1200), RNG.integers(17, 24, 3500)
PLAN = jb.BucketPlan.from_shapes([(400, 4), (200, 8), (64, 32)])


@pytest.fixture(autouse=True)
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares 512 examples instead of 16,384, so that short streams may drift."""
    monkeypatch.setattr(drift_module, "_WINDOW", 512)


@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (PLAN, {"lengths": SHORT}),
        (PLAN, {}),
        (
            jb.BucketPlan.from_shapes([(4, 33)]),
            {"max_segments_per_row": 40, "lengths": SHORT},
        ),
    ],
    ids=["sample", "first window", "packed"],
)
def test_a_drift_is_warned_of_once(plan, options):
    lengths = np.concatenate([SHORT, LONG])
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=600, **options))
    with pytest.warns(jb.stream.DriftWarning, match=r"% padding up to step") as record:
        for _ in iterator:
            pass
    assert len(record) == 1
    recent = iterator.recent_lengths()
    assert recent.tolist() == lengths[-512:].tolist()
    limits = {"max_tokens": 2048, "max_seq_len": plan.max_seq_len, "num_buckets": 3}
    new = jb.plan_buckets(recent, sample=True, **limits)
    if "max_segments_per_row" not in options:
        assert jb.report(new, recent).padding + 0.05 < jb.report(plan, recent).padding
        # The new plan can be adopted.
        jb.stream_batches(stream(lengths), {0: plan, 9: new}, pool_size=600)


@pytest.mark.parametrize("options", [{}, {"max_segments_per_row": 32}], ids=str)
def test_lengths_as_planned_do_not_warn(options):
    plan = PLAN
    if options:
        plan = jb.BucketPlan.from_shapes([(16, 32)])
    batches = jb.stream_batches(
        stream(np.tile(SHORT, 3)), plan, pool_size=600, lengths=SHORT, **options
    )
    assert len(list(batches)) > 5


def test_a_sequence_for_other_lengths_is_a_drift():
    """Half of the steps of this process are empty, because it has no short examples."""
    plan = jb.BucketPlan.from_shapes([(256, 4), (32, 32)])
    batches = jb.stream_batches(
        stream(np.full(4_000, 32)),
        plan,
        pool_size=512,
        lengths=np.repeat([4, 32], [4000, 500]),
        shard=jb.data.RowShard((0,), 2),
        num_steps=90,
    )
    with pytest.warns(jb.stream.DriftWarning, match="its plan had 0.0%"):
        list(batches)


def test_recent_lengths_of_a_new_iterator_are_empty():
    lengths, plan, _ = make_case(7, size=300)
    iterator = iter(jb.stream_batches(stream(lengths), plan, pool_size=90))
    assert iterator.recent_lengths().shape == (0,)
