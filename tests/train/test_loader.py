"""`MeshLoader` against the functions that it combines."""

import faulthandler
import gc
import math
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import jaxbucket as jb
from jaxbucket.sharding import global_batch
from jaxbucket.train import waiting

MESH = jb.data_mesh(jax.devices()[:2])
LENGTHS = np.random.default_rng(0).integers(1, 20, 90)
SOURCE = [{"x": np.arange(n, dtype=np.float32)} for n in LENGTHS]
PLAN = jb.plan_buckets(
    LENGTHS, max_tokens=160, num_buckets=2, batch_size_multiple=4, seq_len_multiple=4
)
SCHEDULE = jb.BatchSchedule(PLAN, LENGTHS)
SMALL = jb.BatchSchedule(jb.BucketPlan.from_shapes([(4, 20)]), LENGTHS)


def packed_schedule():
    plan = jb.plan_buckets([24], max_tokens=96, batch_size_multiple=4)
    return jb.BatchSchedule(plan, LENGTHS, packing=jb.packing.pack(LENGTHS, 24))


def assert_same_batches(batches, expected):
    for batch, want in zip(batches, expected, strict=True):
        leaves, structure = jax.tree.flatten(batch)
        wanted, want_structure = jax.tree.flatten(want)
        assert structure == want_structure
        for x, y in zip(leaves, wanted, strict=True):
            np.testing.assert_array_equal(x, y)
            assert x.sharding == y.sharding


SCHEDULES = {
    "plain": lambda: SCHEDULE,
    "packed": packed_schedule,
    "accumulated": lambda: jb.BatchSchedule(PLAN, LENGTHS, accumulate=2),
    "mixture": lambda: jb.Mixture([SCHEDULE, SCHEDULE], weights=[2, 1]),
    "joined": lambda: jb.JoinedSchedule({0: SMALL, 2: SCHEDULE}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_batches_equal_those_of_its_parts_and_match_the_specs(name):
    schedule = SCHEDULES[name]()
    source = jb.data.concatenate([SOURCE, SOURCE]) if name == "mixture" else SOURCE
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("model", "rows"))
    batches = jb.MeshLoader(source, schedule, mesh, batch_axes="rows", num_steps=10)
    shard = jb.sharding.local_rows(mesh, batch_axes="rows")
    dataset = jb.batch_dataset(source, schedule, shard=shard, num_steps=10)
    expected = list(jb.sharding.prefetch_to_mesh(dataset, mesh, batch_axes="rows"))
    assert len(batches) == len(expected)
    # Every iteration starts from the beginning.
    for _ in range(2):
        assert_same_batches(batches, expected)
    expected = jax.tree.leaves(expected, is_leaf=lambda x: isinstance(x, jb.Batch))
    assert {batch.bucket for batch in expected} == {*batches.specs}
    for batch in expected:
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), batch
        )
        assert shapes == batches.specs[batch.bucket]


def test_a_resumed_run_continues_with_the_same_batches():
    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH, num_epochs=2)
    expected = list(batches)
    for step in range(0, len(batches) + 1, 3):
        resumed = batches.resume(batches.position(step))
        assert resumed.start_step == step
        assert resumed.specs == batches.specs
        assert_same_batches(resumed, expected[step:])
        again = jb.MeshLoader(SOURCE, SCHEDULE, MESH, start_step=step, num_epochs=2)
        assert_same_batches(again, expected[step:])
    other = jb.BatchSchedule(PLAN, LENGTHS, seed=1)
    with pytest.raises(ValueError, match="seed"):
        jb.MeshLoader(SOURCE, other, MESH).resume(batches.position(3))


@pytest.mark.exhaustive
def test_workers_yield_the_same_batches():
    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH)
    in_workers = jb.MeshLoader(SOURCE, SCHEDULE, MESH, num_workers=1, num_threads=1)
    assert_same_batches(in_workers, list(batches))


def test_sequences_pad_value_and_transform_are_passed_to_the_dataset():
    def halve(example, rng):
        return {"y": example["x"].astype(np.float16) / 2, "noise": rng.random()}

    options = {"sequences": ["y"], "pad_value": {"y": -1.0}, "transform": halve}
    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH, **options)
    batch, spec = next(iter(batches)), next(iter(batches.specs.values()))
    assert batch.features.keys() == spec.features.keys() == {"y", "noise"}
    assert batch.features["y"].dtype == spec.features["y"].dtype == np.float16
    assert (np.asarray(batch.features["y"])[~np.asarray(batch.mask)] == -1).all()
    dataset = jb.batch_dataset(SOURCE, SCHEDULE, **options)
    assert batches.position(2) == dataset.position(2)


def test_a_token_file_declares_its_sequences(tmp_path):
    jb.data.write_token_file(tmp_path / "tokens", SOURCE)
    file = jb.data.TokenFile(tmp_path / "tokens")
    batches = jb.MeshLoader(file, jb.BatchSchedule(PLAN, file.lengths), MESH)
    batch = next(iter(batches))
    assert jax.tree.structure(batch) == jax.tree.structure(batches.specs[batch.bucket])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_axes": "rows"}, "batch_axes='rows'"),
        ({"start_step": -1}, "start_step=-1"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"prefetch": -1}, "prefetch=-1"),
        ({"transform": 3}, "transform=3"),
        ({"source": (x for x in SOURCE)}, "source"),
        ({"schedule": PLAN}, "schedule"),
        ({"mesh": jax.devices()}, "mesh"),
        (
            {
                "schedule": jb.BatchSchedule(
                    jb.BucketPlan.from_shapes([(3, 20)]), LENGTHS
                )
            },
            "batch_size=3",
        ),
    ],
)
def test_arguments_are_checked_before_anything_is_read(options, message):
    good = {"source": SOURCE, "schedule": SCHEDULE, "mesh": MESH}
    with pytest.raises(ValueError, match=f"`{message}"):
        jb.MeshLoader(**good | options)


def test_an_endless_run_yields_batches_of_every_epoch():
    start = 7 * len(SCHEDULE)
    batches = jb.MeshLoader(
        SOURCE, SCHEDULE, MESH, start_step=start, num_steps=math.inf
    )
    first = next(iter(batches))
    last = jb.MeshLoader(SOURCE, SCHEDULE, MESH, start_step=start)
    assert_same_batches([first], [next(iter(last))])


def threads():
    return [x for x in threading.enumerate() if "jaxbucket-loader" in x.name]


def wait_until(is_done):
    deadline = time.monotonic() + 60
    while not is_done():
        if time.monotonic() > deadline:
            faulthandler.dump_traceback()
            raise AssertionError(f"{threads()} still run, as shown above.")
        time.sleep(0.01)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 4])
def test_batches_are_made_and_sent_while_the_loop_does_something_else(
    prefetch, monkeypatch
):
    made = []
    to_global = global_batch.ToMesh.__call__

    def counted(self, batch):
        # Threads of other loops may still be at work.
        if "counted" in batch.features:
            made.append(threading.current_thread())
        return to_global(self, batch)

    monkeypatch.setattr(global_batch.ToMesh, "__call__", counted)
    source = [{"counted": example["x"]} for example in SOURCE]
    iterator = iter(jb.MeshLoader(source, SCHEDULE, MESH, prefetch=prefetch))
    assert not made
    for used in (1, 2):
        next(iterator)
        # The loop asks for no further batch.
        wait_until(lambda used=used: len(made) == used + prefetch)
    time.sleep(0.1)
    assert len(made) == 2 + prefetch
    assert (threading.current_thread() in made) == (not prefetch)
    iterator.close()
    wait_until(lambda: not threads())


class Slow:
    """A source whose examples can be held back."""

    def __init__(self):
        self.may_read = threading.Event()

    def __len__(self):
        return len(SOURCE)

    def __getitem__(self, index):
        assert self.may_read.wait(60)
        return SOURCE[index]


def test_leaving_a_loop_does_not_wait_for_the_batch_that_is_made():
    source = Slow()
    source.may_read.set()
    batches = iter(jb.MeshLoader(source, SCHEDULE, MESH, buffer_size=0, num_threads=1))
    next(batches)
    source.may_read.clear()
    batches.close()
    assert not source.may_read.is_set()
    source.may_read.set()
    wait_until(lambda: not threads())


@pytest.mark.exhaustive
def test_loops_that_garbage_collection_closes_do_not_block_others():
    """A loop that told its thread to close something hung here."""

    class Trainer:
        def __init__(self, batches):
            self.batches = iter(batches)
            self.on_end = self.run

        def run(self):
            for _ in range(10):
                next(self.batches)

    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH, num_steps=math.inf)
    threshold, others = gc.get_threshold(), {*threads()}
    # What other tests have left would make every collection slow.
    gc.freeze()
    gc.set_threshold(3)
    try:
        for _ in range(60):
            Trainer(batches).run()
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
    gc.collect()
    # Threads of other tests may wait for a collection of their own.
    wait_until(lambda: others.issuperset(threads()))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_every_error_of_the_thread_reaches_the_loop(error):
    def transform(example, rng):
        raise error("no")

    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH, transform=transform)
    with pytest.raises(error):
        next(iter(batches))


def test_two_loops_over_a_loader_are_measured_each_by_itself():
    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH)
    one = iter(batches)
    for _ in range(3):
        next(one)
    assert batches.data_wait > 0
    other = iter(batches)
    assert batches.data_wait == 0
    assert_same_batches([next(other)], [next(iter(batches))])
    next(one)
    assert batches.data_wait == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_program_may_end_with_an_unfinished_loop(num_workers, tmp_path):
    """Without an abort of the interpreter or a hang, or a message of ours."""
    script = tmp_path / "script.py"
    script.write_text(
        f"""if __name__ == "__main__":
    import math, numpy as np, jax, jaxbucket as jb
    source = [{{"x": np.ones(n, np.float32)}} for n in range(1, 30)]
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(lengths, max_tokens=64, num_buckets=2)
    mesh = jb.data_mesh(jax.devices()[:1])
    schedule = jb.BatchSchedule(plan, lengths)
    loader = jb.MeshLoader(
        source, schedule, mesh, num_steps=math.inf, num_workers={num_workers}
    )
    batches = iter(loader)
    for _ in range(20):
        next(batches)
"""
    )
    for _ in range(4):
        run = subprocess.run(
            [sys.executable, script], capture_output=True, text=True, timeout=120
        )
        assert run.returncode == 0, run.stderr
        assert "terminate called" not in run.stderr and "/jaxbucket/" not in run.stderr


def test_an_error_of_a_batch_is_raised_in_the_loop_before_later_batches():
    source = list(SOURCE)
    bad = int(np.argmax(LENGTHS))
    source[bad] = {"x": np.zeros(3, np.float32)}
    batches = jb.MeshLoader(source, SCHEDULE, MESH)
    seen = []
    with pytest.raises(ValueError, match="`source"):
        for batch in batches:
            seen.append(batch)
    expected = list(jb.MeshLoader(SOURCE, SCHEDULE, MESH))[: len(seen)]
    assert_same_batches(seen, expected)


def test_a_context_of_64_bits_holds_for_batches_made_ahead():
    source = [{"x": np.full(n, 2**40)} for n in LENGTHS]
    with jax.enable_x64(True):
        batches = iter(jb.MeshLoader(source, SCHEDULE, MESH))
        for _ in range(3):
            x = next(batches).features["x"]
            assert x.dtype == np.int64 and int(x.max()) == 2**40
    with pytest.raises(ValueError, match="does not fit"):
        next(iter(jb.MeshLoader(source, SCHEDULE, MESH)))


def test_data_wait_is_the_share_of_the_last_steps_spent_waiting(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(waiting.time, "perf_counter", lambda: now[0])

    def loading(seconds):
        for wait in seconds:
            now[0] += wait
            yield wait

    meter = waiting.Waiting(num_steps=3)
    assert meter.share == 0
    shares = []
    # The first wait is that of the start, and each step takes 4 seconds.
    for _ in meter.during(loading([100, 1, 4, 12, 0, 0, 0])):
        shares.append(meter.share)
        now[0] += 4
    assert shares[0] == 0
    expected = [1 / 5, 5 / 13, 17 / 29, 16 / 28, 12 / 24, 0.0]
    np.testing.assert_allclose(shares[1:], expected)
    # Every iteration is measured by itself.
    for _ in meter.during(loading([0])):
        assert meter.share == 0


def test_a_loader_reports_its_own_data_wait():
    batches = jb.MeshLoader(SOURCE, SCHEDULE, MESH)
    assert batches.data_wait == 0
    for step, _ in enumerate(batches):
        assert (batches.data_wait > 0) == (step > 0)
    assert 0 < batches.data_wait <= 1
    assert batches.resume(batches.position(1)).data_wait == 0
