"""Outputs in files: order, interrupted jobs, changes, several processes."""

import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb


def predict_fn(params, batch):
    values = jnp.where(batch.mask, batch.features["x"], 0) * params["scale"]
    return {"running": jnp.cumsum(values, axis=1), "total": values.sum(axis=1)}


def make_batches(mesh=None, seed=0, **options):
    rng = np.random.default_rng(0)
    source = [{"x": rng.integers(-9, 9, n).astype(np.float32)} for n in lengths_of()]
    lengths = np.array(lengths_of())
    plan = jb.plan_buckets(
        lengths, max_tokens=160, num_buckets=3, batch_size_multiple=8, **options
    )
    schedule = jb.BatchSchedule(plan, lengths, seed=seed)
    return source, jb.MeshLoader(source, schedule, mesh or jb.data_mesh())


def lengths_of():
    return np.random.default_rng(3).integers(1, 20, 130).tolist()


def write(folder, batches, fn=predict_fn, steps=None, **options):
    state = jb.create_state({"scale": np.float32(3)}, mesh=batches.mesh)
    step = steps or jb.make_predict_step(fn, batches.mesh)
    options = {"sequences": ["running"], **options}
    return jb.train.write_predictions(folder, step, state, batches, **options)


def assert_right(outputs, source, kept=slice(None)):
    assert len(outputs) == len(source)
    for got, example in zip(outputs, source, strict=True):
        running = np.cumsum(example["x"][kept] * 3)
        assert sorted(got) == ["running", "total"]
        np.testing.assert_array_equal(got["running"], running)
        assert got["total"] == running[-1]


def test_files_have_all_outputs_in_the_order_of_the_source(tmp_path):
    source, batches = make_batches()
    outputs = write(tmp_path / "out", batches)
    assert_right(outputs, source)
    totals = np.load(tmp_path / "out" / "total.npy")
    np.testing.assert_array_equal(totals, [3 * x["x"].sum() for x in source])
    assert outputs[-1]["total"] == outputs[len(source) - 1]["total"]
    with pytest.raises(IndexError, match="no example 130 among 130"):
        outputs[130]
    assert [x["total"] for x in outputs[-2:]] == totals[-2:].tolist()


@pytest.mark.parametrize("stop_after", [0, 1, 4, 8])
def test_an_interrupted_job_is_resumed(tmp_path, stop_after):
    source, batches = make_batches()
    step = jb.make_predict_step(predict_fn, batches.mesh)
    calls = []

    def interrupted(state, batch):
        if len(calls) == stop_after:
            raise KeyboardInterrupt
        calls.append(batch.bucket)
        return step(state, batch)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, batches, steps=interrupted, save_seconds=0)
    before, calls[:] = len(calls), []
    stop_after = None
    outputs = write(tmp_path, batches, steps=interrupted)
    assert_right(outputs, source)
    # The step whose outputs had not been saved yet is repeated.
    assert len(batches) <= before + len(calls) <= len(batches) + 2
    calls.clear()
    assert_right(write(tmp_path, batches, steps=interrupted), source)
    assert not calls


def test_only_the_examples_of_a_subset_have_outputs(tmp_path):
    source, batches = make_batches(max_seq_len=12, overlong="drop")
    # Some have lengths that the plan leaves out.
    subset, lengths = np.arange(130) % 3 > 0, np.array(lengths_of())
    schedule = jb.BatchSchedule(batches.schedule.plan, lengths, subset=subset)
    loader = jb.MeshLoader(source, schedule, batches.mesh)
    outputs = list(write(tmp_path, loader))
    is_kept = subset & (lengths <= 12)
    assert [x is not None for x in outputs] == is_kept.tolist()
    kept = np.flatnonzero(is_kept)
    assert_right([outputs[i] for i in kept], [source[i] for i in kept])


def test_dropped_examples_have_no_outputs(tmp_path):
    source, batches = make_batches(max_seq_len=12, overlong="drop")
    outputs = write(tmp_path, batches)
    assert [x is None for x in outputs] == [len(x["x"]) > 12 for x in source]
    first, last = slice(12), slice(-12, None)
    for overlong, kept in (("truncate", first), ("truncate_left", last)):
        source, batches = make_batches(max_seq_len=12, overlong=overlong)
        assert_right(write(tmp_path / overlong, batches), source, kept)


def test_predictions_of_other_batches_are_refused(tmp_path):
    write(tmp_path, make_batches()[1])
    with pytest.raises(ValueError, match="seed"):
        write(tmp_path, make_batches(seed=1)[1])
    with pytest.raises(ValueError, match=r"has outputs with `sequences=\['running'\]`"):
        write(tmp_path, make_batches()[1], sequences=())
    (tmp_path / "predictions.json").write_text('{"outputs": {')
    with pytest.raises(ValueError, match="is damaged.* Delete the directory"):
        write(tmp_path, make_batches()[1])


@pytest.mark.parametrize(
    ("version", "message"), [(None, "an earlier version"), (3, "a later version")]
)
def test_predictions_of_another_version_are_refused(tmp_path, version, message):
    batches = make_batches()[1]
    write(tmp_path, batches)
    path = tmp_path / "predictions.json"
    fields = json.loads(path.read_text())
    if version is None:
        del fields["version"]
        fields["outputs"]["total"] = {"dtype": "<f4", "shape": [], "sequence": False}
    else:
        fields["version"] = version
    path.write_text(json.dumps(fields))
    for read in (jb.train.Predictions, lambda folder: write(folder, batches)):
        with pytest.raises(ValueError, match=f"was written by {message} of jaxbucket"):
            read(tmp_path)


def test_a_manifest_of_another_program_is_refused(tmp_path):
    for text in ('{"outputs": {}}', "[1]", '{"outputs": 1, "position": 2}'):
        (tmp_path / "predictions.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"is damaged or foreign.*or choose a diff"
        ):
            write(tmp_path, make_batches()[1])


@pytest.mark.parametrize(
    "name",
    [
        *("written", "y.offsets", "", ".", "..", ".hidden", "a/b", "../a", "a\\b"),
        *("\0", "a" * 300),
    ],
)
def test_names_that_files_cannot_have_are_refused(tmp_path, name):
    def named(params, batch):
        return {name: batch.features["x"].sum(axis=1)}

    folder = tmp_path / "out"
    with pytest.raises(ValueError, match="`steps` returned an output named .* Rename"):
        write(folder, make_batches()[1], named, sequences=())
    assert not list(folder.iterdir())


def test_files_of_others_are_not_overwritten(tmp_path):
    for name in ("total", "written", "running.offsets"):
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / f"{name}.npy", np.arange(3))
        message = rf"{name}.npy was not written by .* Rename the"
        with pytest.raises(ValueError, match=message):
            write(folder, make_batches()[1])
        assert [x.name for x in folder.iterdir()] == [f"{name}.npy"]
        assert np.load(folder / f"{name}.npy").tolist() == [0, 1, 2]


def test_a_directory_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match="file'` cannot be created: .* Choose a differ"
    ):
        write(tmp_path / "file", make_batches()[1])


def test_a_job_is_not_resumed_with_other_outputs(tmp_path):
    _, batches = make_batches()
    step, calls = jb.make_predict_step(predict_fn, batches.mesh), []

    def interrupted(state, batch):
        calls.append(batch)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(state, batch)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, batches, steps=interrupted, save_seconds=0)

    def more(params, batch):
        return {**predict_fn(params, batch), "more": batch.features["x"][:, 0]}

    def fewer(params, batch):
        return {"running": predict_fn(params, batch)["running"]}

    for other in (more, fewer):
        with pytest.raises(
            ValueError, match=r"returned the outputs .* has \['running'"
        ):
            write(tmp_path, batches, other)

    def wider(params, batch):
        outputs = predict_fn(params, batch)
        return {**outputs, "total": jnp.stack([outputs["total"]] * 2, axis=1)}

    with pytest.raises(ValueError, match=r"'total' as float32\[2\].* choose a differ"):
        write(tmp_path, batches, wider)


def test_a_single_sequence_may_be_named_without_a_list(tmp_path):
    source, batches = make_batches()
    assert_right(write(tmp_path, batches, sequences="running"), source)


def test_outputs_of_packed_rows_are_written(tmp_path):
    lengths = np.array(lengths_of())
    source = [{"x": np.full(n, i, np.float32)} for i, n in enumerate(lengths)]
    choice = jb.plan_packing(
        lengths, max_tokens=256, pack="always", batch_size_multiple=8
    )
    schedule = jb.BatchSchedule(choice.plan, lengths, packing=choice.packing)
    assert schedule.max_segments > 1
    batches = jb.MeshLoader(source, schedule, jb.data_mesh())

    def tripled(params, batch):
        return {"x": params["scale"] * batch.features["x"]}

    outputs = write(tmp_path, batches, tripled, sequences=["x"])
    for got, example in zip(outputs, source, strict=True):
        np.testing.assert_array_equal(got["x"], 3 * example["x"])


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="Files are sparse.")
def test_space_for_all_outputs_is_allocated_first(tmp_path):
    _, batches = make_batches()

    def wide(params, batch):
        return {"wide": jnp.zeros((batch.bucket.batch_size, 4096))}

    step, calls = jb.make_predict_step(wide, batches.mesh), []

    def interrupted(state, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(state, batch)

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, batches, steps=interrupted, sequences=())
    file = (tmp_path / "wide.npy").stat()
    # A block of `st_blocks` has 512 bytes.
    assert 512 * file.st_blocks >= file.st_size > 130 * 4096


def test_outputs_that_change_are_refused(tmp_path):
    _, batches = make_batches()
    with pytest.raises(ValueError, match=r"'running' as float32\[.*Name outputs of"):
        write(tmp_path, batches, sequences=())
    with pytest.raises(ValueError, match=r"\['logits'\]` must name outputs of"):
        write(tmp_path, batches, sequences=["logits"])


def test_dtypes_that_files_cannot_hold_are_refused(tmp_path):
    def half(params, batch):
        return {"total": jnp.sum(batch.features["x"], axis=1).astype(jnp.bfloat16)}

    with pytest.raises(ValueError, match="'total' as bfloat16, which `.npy` files do"):
        write(tmp_path, make_batches()[1], half, sequences=())


def test_a_directory_without_predictions_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no predictions.json"):
        jb.train.Predictions(tmp_path)


IN_PROCESSES = """
import json, sys
import jax, numpy as np
import jaxbucket as jb

def predict_fn(params, batch):
    values = batch.features["x"] * params["scale"] * batch.mask
    return {{"total": values.sum(axis=1)}}

folder = {folder!r}
with jb.Processes() as processes:
    source = [{{"x": np.full(n, n, np.float32)}} for n in range(1, 40)]
    lengths = np.arange(1, 40)
    plan = jb.plan_buckets(lengths, max_tokens=320, batch_size_multiple=8)
    mesh = jb.data_mesh()
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
    state = jb.create_state({{"scale": np.float32(3)}}, mesh=mesh)
    step = jb.make_predict_step(predict_fn, mesh)
    calls = []
    def counted(state, batch):
        calls.append(1)
        if len(calls) == 3 and {stop}:
            sys.exit(3)
        return step(state, batch)
    outputs = jb.train.write_predictions(
        folder, counted, state, batches, save_seconds=0
    )
    record(len(calls), [float(x["total"]) for x in outputs])
"""


@pytest.mark.exhaustive
def test_processes_write_each_example_once_and_resume(launch, tmp_path):
    folder = str(tmp_path / "out")
    launched = launch(IN_PROCESSES.format(folder=folder, stop=True), devices=2)
    assert launched.status == 3, launched.output
    position = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert position["position"]["step"] >= 1
    # The number of processes may change.
    copy = shutil.copytree(folder, tmp_path / "copy")
    launched = launch(
        IN_PROCESSES.format(folder=str(copy), stop=False), count=1, devices=4
    )
    totals = [3.0 * n * n for n in range(1, 40)]
    assert launched.status == 0, launched.output
    assert launched.recorded(0)[0].endswith(str(totals))
    launched = launch(IN_PROCESSES.format(folder=folder, stop=False), devices=2)
    assert launched.status == 0, launched.output
    calls = set()
    for index in range(2):
        (line,) = launched.recorded(index)
        number, outputs = line.split(" ", 1)
        calls.add(int(number))
        assert json.loads(outputs) == totals
    # Both continued at the same step, after the first.
    assert len(calls) == 1


FAILING = """
import pathlib
import jax
import numpy as np
import jaxbucket as jb

folder = pathlib.Path({folder!r})
with jb.Processes() as processes:
    index = processes.index

    def write(name, num_examples, mesh):
        lengths = np.arange(1, num_examples + 1)
        source = [{{"x": np.full(n, n, np.float32)}} for n in lengths]
        plan = jb.plan_buckets(lengths, max_tokens=320, batch_size_multiple=8)
        batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
        state = jb.create_state({{"scale": np.float32(3)}}, mesh=mesh)

        def predict_fn(params, batch):
            return {{"total": (batch.features["x"] * batch.mask).sum(axis=1)}}

        step = jb.make_predict_step(predict_fn, mesh)
        try:
            outputs = jb.train.write_predictions(folder / name, step, state, batches)
            record(name, [float(x["total"]) for x in outputs])
        except Exception as error:
            record(name, type(error).__name__, error)

    mesh = jb.data_mesh()
    write("file", 40, mesh)
    write("foreign", 40, mesh)
    write(f"unshared-{{index}}", 40, mesh)
    # Process 1 has no examples.
    write("single", 1, mesh)
    write(f"local-{{index}}", 3 + index, jb.data_mesh(jax.local_devices()))
"""


@pytest.mark.exhaustive
def test_errors_of_one_process_are_raised_in_all(launch, tmp_path):
    folder = tmp_path / "out"
    (folder / "foreign").mkdir(parents=True)
    (folder / "file").touch()
    np.save(folder / "foreign" / "total.npy", np.arange(3))
    launched = launch(FAILING.format(folder=str(folder)), devices=2)
    assert launched.status == 0, launched.output
    first, second = launched.recorded(0), launched.recorded(1)
    assert first[0].startswith("file ValueError `directory=")
    assert "total.npy was not written by" in first[1]
    refused = "RuntimeError Process {} could not write or open the predictions."
    for line, name in zip(second, ("file", "foreign"), strict=False):
        assert line.startswith(f"{name} {refused.format(0)}")
    assert first[2].startswith(f"unshared-0 {refused.format(1)}")
    assert "has no predictions.json" in second[2]
    assert first[3] == second[3] == "single [1.0]"
    assert first[4] == "local-0 [1.0, 4.0, 9.0]"
    assert second[4] == "local-1 [1.0, 4.0, 9.0, 16.0]"


def test_predictions_of_another_state_are_not_mixed(tmp_path):
    mesh = jb.data_mesh(jax.devices()[:2])
    source = [{"x": np.arange(n, dtype=np.float32)} for n in (3, 1, 4)]
    lengths = jb.measure_lengths(source, progress=False)
    plan = jb.plan_buckets(lengths, max_tokens=8, batch_size_multiple=2)
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
    step = jb.make_predict_step(
        lambda model, batch: {
            "y": jnp.sum(model["w"][0] * batch.features["x"], axis=1)
        },
        mesh,
    )

    def write(w):
        state = jb.create_state({"w": np.array(w, np.float32)}, mesh=mesh)
        outputs = jb.train.write_predictions(
            tmp_path, step, state, batches, progress=False
        )
        return outputs.arrays["y"].tolist()

    assert write([1, 2]) == write([1, 2]) == [3, 0, 6]
    for other in ([2, 1], [1, 3], [1, 2, 0], [-1, -2]):
        with pytest.raises(ValueError, match="predictions of a state with other param"):
            write(other)


@pytest.mark.parametrize("name", ["total", "running.offsets", "written"])
@pytest.mark.parametrize("change", ["truncate", "delete"])
def test_damaged_files_are_named(tmp_path, name, change):
    _, batches = make_batches()
    state = jb.create_state({"scale": np.float32(2)}, mesh=batches.mesh)
    step = jb.make_predict_step(predict_fn, batches.mesh)
    arguments = (tmp_path, step, state, batches)
    options = {"sequences": ["running"], "progress": False}
    jb.train.write_predictions(*arguments, **options)
    path = tmp_path / f"{name}.npy"
    if change == "delete":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:20])
    message = rf"{name}.npy is missing or damaged: .* Delete the directory"
    with pytest.raises(ValueError, match=message):
        jb.train.Predictions(tmp_path)


def interrupted(step, stop_after):
    """The step, interrupted after a number of calls."""
    calls = []

    def call(state, batch):
        if len(calls) == stop_after:
            raise KeyboardInterrupt
        calls.append(batch)
        return step(state, batch)

    return call


def write_part(folder, batches, fn=predict_fn, stop_after=3, **options):
    step = interrupted(jb.make_predict_step(fn, batches.mesh), stop_after)
    with pytest.raises(KeyboardInterrupt):
        write(folder, batches, steps=step, **options)


@pytest.mark.parametrize("stop_after", [3, None])
@pytest.mark.parametrize("epochs", [(0, 1), (1, 0)])
def test_predictions_of_another_epoch_are_refused(tmp_path, epochs, stop_after):
    source, batches = make_batches()
    first, second = (
        jb.MeshLoader(
            source, batches.schedule, batches.mesh, start_step=epoch * len(batches)
        )
        for epoch in epochs
    )
    if stop_after:
        write_part(tmp_path, first, stop_after=stop_after, save_seconds=0)
    else:
        write(tmp_path, first)
    start = first.start_step
    message = f"another epoch.* Pass a loader with `start_step={start}`"
    with pytest.raises(ValueError, match=message):
        write(tmp_path, second)
    assert_right(write(tmp_path, first), source)


def test_advice_for_other_batches_is_a_different_directory(tmp_path):
    write(tmp_path, make_batches()[1])
    with pytest.raises(ValueError, match="seed 0 -> 1. Choose a different directory"):
        write(tmp_path, make_batches(seed=1)[1])


@pytest.mark.parametrize("name", ["running", "total", "written", "running.offsets"])
def test_files_that_are_too_short_are_not_extended(tmp_path, name):
    _, batches = make_batches()
    write_part(tmp_path, batches, save_seconds=0)
    path = tmp_path / f"{name}.npy"
    os.truncate(path, path.stat().st_size - 8)
    with pytest.raises(ValueError, match=rf"{name}.npy is missing or damaged"):
        write(tmp_path, batches)
    np.save(path, np.zeros(5, bool))
    with pytest.raises(ValueError, match=r"damaged: it has bool\[5\] instead of"):
        write(tmp_path, batches)


def test_a_job_that_failed_before_it_saved_starts_again(tmp_path):
    source, batches = make_batches()

    def other(params, batch):
        return {"other": batch.features["x"][:, 0]}

    write_part(tmp_path, batches, other, sequences=None)
    np.save(tmp_path / "total.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"total.npy was not written by"):
        write(tmp_path, batches)
    (tmp_path / "total.npy").unlink()
    assert (tmp_path / "other.npy").exists()
    assert_right(write(tmp_path, batches), source)
    assert not (tmp_path / "other.npy").exists()


@pytest.mark.parametrize(("other", "when"), [(2, 4), (3, 4), (3, 1)])
def test_two_jobs_do_not_share_a_directory(tmp_path, other, when):
    """The first job has not saved when another one starts, with its model or not."""
    source, batches = make_batches()
    step = jb.make_predict_step(predict_fn, batches.mesh)
    states = [
        jb.create_state({"scale": np.float32(x)}, mesh=batches.mesh) for x in (3, other)
    ]
    options = {"sequences": "running", "progress": False}
    calls = []

    def slow(state, batch):
        calls.append(batch)
        if len(calls) == when:
            jb.train.write_predictions(tmp_path, step, states[1], batches, **options)
        return step(state, batch)

    message = "Another job writes" if other == 3 else "a state with other parameters"
    with pytest.raises(ValueError, match=message):
        jb.train.write_predictions(tmp_path, slow, states[0], batches, **options)
    arguments = (tmp_path, step, states[0], batches)
    assert_right(jb.train.write_predictions(*arguments, **options), source)


@pytest.mark.parametrize("value", [-1, float("nan"), None, "3"])
def test_save_seconds_must_be_a_number_of_seconds(tmp_path, value):
    with pytest.raises(ValueError, match=r"`save_seconds=.* Pass 0 or more"):
        write(tmp_path, make_batches()[1], save_seconds=value)


def test_sequences_must_be_named_if_shapes_do_not_tell_them(tmp_path):
    _, batches = make_batches()
    with pytest.raises(ValueError, match=r"\['running'\] with .*`, or `seq"):
        write(tmp_path, batches, sequences=None)
    assert not list(tmp_path.iterdir())

    def total(params, batch):
        return {"total": predict_fn(params, batch)["total"]}

    assert write(tmp_path, batches, total, sequences=None)[0].keys() == {"total"}


def test_outputs_of_several_sequences_are_written(tmp_path):
    source, batches = pair_batches()
    options = {"sequences": {"inputs": ["doubled"], "targets": ["next"]}}
    write_part(tmp_path, batches, pair_fn, 1, save_seconds=0, **options)
    outputs = write(tmp_path, batches, pair_fn, **options)
    state = jb.create_state({"scale": np.float32(3)}, mesh=batches.mesh)
    step = jb.make_predict_step(pair_fn, batches.mesh)
    for results in (outputs, jb.predict(step, state, batches, **options)):
        for got, example in zip(results, source, strict=True):
            assert got["doubled"].tolist() == (2 * example["inputs"]).tolist()
            assert got["next"].tolist() == (example["targets"] + 1).tolist()
            assert got["index"] == example["index"]


def test_outputs_without_t_need_no_names_of_several_sequences(tmp_path):
    source, batches = pair_batches()

    def index_fn(params, batch):
        return {"index": batch.features["index"]}

    state = jb.create_state({"scale": np.float32(3)}, mesh=batches.mesh)
    step = jb.make_predict_step(index_fn, batches.mesh)
    for results in (
        write(tmp_path, batches, index_fn, sequences=None),
        jb.predict(step, state, batches),
    ):
        assert [x["index"] for x in results] == [x["index"] for x in source]
    for names in (["index"], {"inputs": ["index"]}, {"other": ["index"]}):
        message = r"must name outputs of shape|Pass a mapping|has the keys \['other'\]"
        with pytest.raises(ValueError, match=message):
            jb.predict(step, state, batches, sequences=names)
    step = jb.make_predict_step(pair_fn, batches.mesh)
    with pytest.raises(ValueError, match=r"{'inputs': \['doubled', 'next'\]}`, or"):
        jb.predict(step, state, batches)


def pair_fn(params, batch):
    return {
        "doubled": 2 * batch.features["inputs"],
        "next": batch.features["targets"] + 1,
        "index": batch.features["index"],
    }


def pair_batches():
    """Packed examples with two sequences, each with 8 tokens in a row."""
    source = [
        {
            "inputs": np.full(1 + i % 3, i, np.int32),
            "targets": np.full(1 + i % 4, i, np.int32),
            "index": np.int32(i),
        }
        for i in range(24)
    ]
    lengths = {
        name: jb.measure_lengths(source, sequences=[name], progress=False)
        for name in ("inputs", "targets")
    }
    packing = jb.packing.pack(lengths, {"inputs": 8, "targets": 8})
    plan = jb.plan_buckets(
        packing.row_lengths, max_tokens=32, boundaries=packing.seq_lens
    )
    schedule = jb.BatchSchedule(plan, lengths, packing=packing)
    return source, jb.MeshLoader(source, schedule, jb.data_mesh(jax.devices()[:1]))
