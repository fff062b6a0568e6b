"""States of Grain's iterators over batches: exact, and refused by any other run."""

import json

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxbucket as jb

LENGTHS = np.random.default_rng(0).integers(1, 60, 150)
SOURCE = [{"tokens": np.full(n, i)} for i, n in enumerate(LENGTHS)]
PLAN = jb.plan_buckets(LENGTHS, max_tokens=256, num_buckets=3)


def schedule_of(**options) -> jb.BatchSchedule:
    return jb.BatchSchedule(PLAN, LENGTHS, **options)


def iterable(source=SOURCE, schedule=None, **options) -> grain.IterDataset:
    """The batches of a run, by default always the same one."""
    schedule = schedule or schedule_of()
    return jb.batch_dataset(source, schedule, **options).to_iter_dataset()


def tokens_of(batches) -> list:
    return [batch.features["tokens"].tolist() for batch in batches]


def saved_after(dataset: grain.IterDataset, step: int):
    """The state after some steps, as a checkpoint restores it."""
    iterator = iter(dataset)
    for _ in range(step):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    iterator.close()
    return state


def add_one(example, rng):
    return {"tokens": example["tokens"] + 1}


def mixture_of(seed: int) -> jb.Mixture:
    components = {"a": schedule_of(), "b": schedule_of(seed=seed)}
    return jb.Mixture(components, dict.fromkeys(components, 1))


PAIR = {"a": SOURCE, "b": SOURCE}
RUNS = {
    "alone": {},
    "later": {"start_step": 7, "num_steps": 30},
    "micro-batches": {"schedule": schedule_of(accumulate=2)},
    "transformed": {"transform": add_one},
    "mixture": {"source": PAIR, "schedule": mixture_of(1), "num_steps": 9},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_state_of_any_step_continues_with_the_next_batch(name):
    grain.experimental.assert_equal_output_after_checkpoint(iterable(**RUNS[name]))


def test_batches_may_be_transformed_after_the_call():
    dataset = iterable(num_epochs=2).map(lambda batch: batch.features["tokens"])
    grain.experimental.assert_equal_output_after_checkpoint(dataset)
    state = saved_after(dataset, 3)
    other = iter(iterable(schedule=schedule_of(seed=1)).map(lambda batch: batch))
    other.set_state(state)
    with pytest.raises(ValueError, match="schedule seed 0 -> 1"):
        next(other)


longer = [{"tokens": np.full(n, 5)} for n in LENGTHS]
OTHERS = {
    "seed": ({"schedule": schedule_of(seed=1)}, "schedule seed 0 -> 1"),
    "contents": ({"source": longer}, "data fingerprint"),
    "transform": ({"transform": add_one}, "transform None -> .*add_one"),
    "micro-batches": ({"schedule": schedule_of(accumulate=2)}, "accumulate 1 -> 2"),
    "mixture": ({"source": PAIR, "schedule": mixture_of(1)}, "schedule"),
    "first step": ({"start_step": 2}, "`start_step=2`"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_refuses_the_state(name):
    state = saved_after(iterable(), 4)
    options, message = OTHERS[name]
    other = iter(iterable(**options))
    other.set_state(state)
    assert other.get_state() == state
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            next(other)
    # It is not lost: a state of its own is accepted.
    other.set_state(saved_after(iterable(**options), 1))
    assert tokens_of([next(other)] if name != "micro-batches" else next(other))


@pytest.mark.parametrize("state", [{"next_index": 3}, {"position": 3}])
def test_a_state_without_a_position_is_refused(state):
    iterator = iter(iterable())
    iterator.set_state(state)
    with pytest.raises(ValueError, match="is not a valid"):
        next(iterator)


def test_the_checkpoints_of_grain_and_orbax_restore_iterators(tmp_path):
    expected = tokens_of(iterable())
    iterator = iter(iterable())
    for _ in range(5):
        next(iterator)
    with ocp.CheckpointManager(tmp_path, item_names=["data"]) as manager:
        saving = grain.checkpoint.CheckpointSave(iterator)
        manager.save(5, args=ocp.args.Composite(data=saving))
        manager.wait_until_finished()

        def restored(**options):
            new = iter(iterable(**options))
            restoring = grain.checkpoint.CheckpointRestore(new)
            manager.restore(5, args=ocp.args.Composite(data=restoring))
            return new

        assert tokens_of(restored()) == expected[5:]
        with pytest.raises(ValueError, match=r"step 5, .* schedule seed 0 -> 3\."):
            next(restored(schedule=schedule_of(seed=3)))
