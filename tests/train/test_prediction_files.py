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


def assert_right(outputs, source, last=None):
    assert len(outputs) == len(source)
    for got, example in zip(outputs, source, strict=True):
        running = np.cumsum(example["x"][:last] * 3)
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


def test_dropped_examples_have_no_outputs(tmp_path):
    source, batches = make_batches(max_seq_len=12, overlong="drop")
    outputs = write(tmp_path, batches)
    assert [x is None for x in outputs] == [len(x["x"]) > 12 for x in source]
    source, batches = make_batches(max_seq_len=12, overlong="truncate")
    assert_right(write(tmp_path / "truncated", batches), source, last=12)


def test_predictions_of_other_batches_are_refused(tmp_path):
    write(tmp_path, make_batches()[1])
    with pytest.raises(ValueError, match="seed"):
        write(tmp_path, make_batches(seed=1)[1])
    with pytest.raises(ValueError, match=r"has outputs with `sequences=\['running'\]`"):
        write(tmp_path, make_batches()[1], sequences=())
    (tmp_path / "predictions.json").write_text('{"outputs": {')
    with pytest.raises(ValueError, match="is damaged.* Delete the directory"):
        write(tmp_path, make_batches()[1])


def test_a_manifest_of_another_program_is_refused(tmp_path):
    for text in ('{"outputs": {}}', "[1]", '{"outputs": 1, "position": 2}'):
        (tmp_path / "predictions.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"is damaged or foreign.*or choose a diff"
        ):
            write(tmp_path, make_batches()[1])


@pytest.mark.parametrize(
    "name",
    ["written", "offsets", "", ".", "..", ".hidden", "a/b", "../a", "a\\b", "\0"],
)
def test_names_that_files_cannot_have_are_refused(tmp_path, name):
    def named(params, batch):
        return {name: batch.features["x"].sum(axis=1)}

    folder = tmp_path / "out"
    with pytest.raises(ValueError, match="`steps` returned an output named .* Rename"):
        write(folder, make_batches()[1], named, sequences=())
    assert not list(folder.iterdir())


def test_files_of_others_are_not_overwritten(tmp_path):
    np.save(tmp_path / "total.npy", np.arange(3))
    with pytest.raises(ValueError, match=r"total.npy was not written by .* Rename the"):
        write(tmp_path, make_batches()[1])
    assert np.load(tmp_path / "total.npy").tolist() == [0, 1, 2]


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
    with pytest.raises(ValueError, match="`sequences` names 'logits', which must be"):
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


@pytest.mark.parametrize("name", ["total", "offsets", "written"])
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
