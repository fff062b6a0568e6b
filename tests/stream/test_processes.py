"""Real processes that train on different streams until all streams end."""

import collections
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# `COUNTS` has the number of examples of each process.
TRAIN = """
import hashlib, json, os, pathlib, signal, sys, threading
import grain, jax, optax
import jax.numpy as jnp
import numpy as np
import jaxbucket as jb

lengths = np.random.default_rng(0).integers(1, 33, sum(COUNTS))
limits = {"max_tokens": 256, "batch_size_multiple": 4}
plan = jb.plan_buckets(lengths, sample=True, num_buckets=3, **limits)


def stream(index):
    first = sum(COUNTS[:index])
    source = [
        {"tokens": np.full(lengths[i], i % 50, np.int32), "index": np.int32(i)}
        for i in range(first, first + COUNTS[index])
    ]
    return grain.MapDataset.source(source).to_iter_dataset()


def batches_of(stream, **options):
    return jb.stream_batches(
        jb.stream.ExampleStream(stream, **options),
        plan,
        pool_size=32,
        lengths=lengths[:100],
        shard=jb.sharding.local_rows(mesh),
        processes=processes,
    )


def loss_fn(params, batch, keys):
    vectors = params["w"][batch.features["tokens"]]
    loss = jnp.square(vectors - 1).sum(axis=-1) * batch.mask
    return jnp.sum(loss), jnp.sum(batch.mask)


def indices(batch):
    pairs = zip(
        batch.features["index"].addressable_shards,
        batch.segment_ids["tokens"].addressable_shards,
    )
    return [
        int(i)
        for index, ids in pairs
        for i in np.array(index.data)[np.array(ids.data)[:, 0] > 0]
    ]


with jb.Processes(timeout=4) as processes:
    mesh = jb.data_mesh()
    dataset = batches_of(stream(processes.index))
    processes.check_agreement(dataset.position(0), mesh)
    tx = optax.adam(1e-2)
    state = jb.create_state({"w": jnp.zeros((50, 4))}, tx, mesh)
    step_fn = jb.make_train_step(loss_fn, tx, mesh)
    like = {"tokens": np.zeros(1, np.int32), "index": np.int32(0)}
    steps = jb.compile_steps(step_fn, state, jb.sharding.batch_specs(plan, like, mesh))
    batches, step = iter(dataset), 0
"""


def printed_steps(run, index: int) -> dict[int, tuple[str, list[int]]]:
    """Returns the bucket and the indices of the examples of a process, by step."""
    steps = {}
    for line in run.recorded(index):
        match = re.fullmatch(r"step (\d+) (\[.*?\]) (\[.*\])", line)
        if match:
            indices = [int(x) for x in re.findall(r"\d+", match[3])]
            steps[int(match[1])] = match[2], indices
    return steps


TOGETHER = (
    TRAIN
    + """
    served, saved = [], None
    for batch in jb.sharding.prefetch_to_mesh(batches, mesh):
        state, metrics = steps(state, batch)
        served.append(indices(batch))
        record("step", step, batch.bucket, indices(batch))
        step += 1
        if step == 9:
            saved = json.dumps(batches.state_before(step))
    assert batches.ended
    weights = np.array(state.params["w"]).tobytes()
    record("end", step, hashlib.sha256(weights).hexdigest())

    again = iter(dataset)
    again.set_state(json.loads(saved))
    rest = [indices(batch) for batch in jb.sharding.prefetch_to_mesh(again, mesh)]
    record("resumed", rest == served[9:], len(rest) > 2)

    # Processes read two streams concurrently, starting with different ones.
    results = {}
    parts = {name: stream(processes.index) for name in ("train", "eval")}
    datasets = {name: batches_of(part) for name, part in parts.items()}

    def read(name):
        rows = ((x.features["index"], x.mask[:, 0]) for x in datasets[name])
        results[name] = sorted(int(i) for index, mask in rows for i in index[mask])

    order = sorted(datasets, reverse=processes.index == 1)
    threads = [threading.Thread(target=read, args=(name,)) for name in order]
    for thread in threads:
        thread.start()
        thread.join(0.5)
    for thread in threads:
        thread.join()
    want = sorted(i for step_indices in served for i in step_indices)
    record("both", results == {"train": want, "eval": want})

    try:
        next(iter(batches_of(stream(processes.index), seed=processes.index)))
    except ValueError as error:
        record("rejected", error)
    # Both processes read the examples of the first.
    try:
        next(iter(batches_of(stream(0))))
    except ValueError as error:
        record("repeated", error)

    # Equal examples, as for measurements, are not repetitions.
    equal = [{"tokens": np.zeros(4, np.int32), "index": np.int32(0)}] * 40
    loader = jb.stream.from_loader(equal, dict, shard=jb.sharding.local_rows(mesh))
    record("equal", sum(1 for _ in batches_of(loader)) > 0)

    # Two streams in turn, mixed by Grain.
    parts = {name: batches_of(stream(processes.index)) for name in ("a", "b")}
    mixture = grain.IterDataset.mix(parts, {"a": 2, "b": 1})
    mixed, states = iter(mixture), [None]

    def drawn():
        for batch in mixed:
            states.append(json.dumps(mixed.get_state()))
            yield batch

    served = []
    for batch in jb.sharding.prefetch_to_mesh(drawn(), mesh):
        state, metrics = steps(state, batch)
        served.append((str(batch.bucket), indices(batch)))
    record("mixed buckets", [bucket for bucket, _ in served])
    again = iter(mixture)
    again.set_state(json.loads(states[4]))
    again = jb.sharding.prefetch_to_mesh(again, mesh)
    rest = [(str(x.bucket), indices(x)) for x in again]
    record("mixed", rest == served[4:], len(rest) > 2)

    def fail(example):
        if processes.index == 1 and example["index"] == 150:
            raise OSError("no network")
        return example

    for batch in batches_of(stream(processes.index).map(fail), num_epochs=None):
        pass
"""
)


CHECKPOINTED = (
    TRAIN
    + """
    folder = pathlib.Path(sys.argv[0]).parent / "run"
    with jb.Checkpoints(folder, processes=processes) as checkpoints:
        if checkpoints.latest_step is not None:
            state, position, extra = checkpoints.restore(state)
            position.check_same(dataset.position(position.step))
            batches.set_state(extra["streams"][processes.index])
            step = position.step
        for batch in jb.sharding.prefetch_to_mesh(batches, mesh):
            state, metrics = steps(state, batch)
            record("step", step, batch.bucket, indices(batch))
            step += 1
            if step % 8 == 0:
                local = json.dumps(batches.state_before(step))
                streams = map(json.loads, processes.gather("streams", local))
                saved = {"streams": list(streams)}
                checkpoints.save(state, dataset.position(step), saved)
            if step == KILL and processes.index == 1:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    assert batches.ended
    weights = np.array(state.params["w"]).tobytes()
    record("end", step, hashlib.sha256(weights).hexdigest())
"""
)


@pytest.mark.exhaustive
def test_processes_end_together_resume_and_report_errors(launch):
    counts = [40, 160]
    run = launch(f"COUNTS = {counts}\n{TOGETHER}")
    lines = [run.recorded(index) for index in range(2)]
    whole = [printed_steps(run, index) for index in range(2)]
    check_each_example_once(whole, counts)
    ends, resumed, both, rejected, repeated, equal, buckets, mixed = zip(
        *(x[len(whole[0]) :] for x in lines), strict=True
    )
    # All processes end at the same step, with the same parameters.
    assert ends[0] == ends[1], run.output
    assert ends[0].startswith(f"end {len(whole[0])} "), run.output
    assert resumed == ("resumed True True",) * 2
    assert both == ("both True",) * 2
    assert all("seed 0 -> 1" in text for text in rejected)
    assert all("the same 32 examples" in text for text in repeated)
    assert equal == ("equal True",) * 2
    assert buckets[0] == buckets[1] and mixed == ("mixed True True",) * 2
    # The other process does not wait for the failed stream.
    assert run.status != 0
    assert "OSError: no network" in run.output
    assert "process 1" in run.output and "example 110 of epoch 0" in run.output

    # A run that is killed and goes on has the same steps and parameters.
    code = f"COUNTS = {counts}\n{CHECKPOINTED}"
    killed = launch(code.replace("KILL", "20"))
    assert killed.status != 0
    before = [printed_steps(killed, index) for index in range(2)]
    again = launch(code.replace("KILL", "-1"))
    assert again.status == 0, again.output
    after = [printed_steps(again, index) for index in range(2)]
    assert [min(steps) for steps in after] == [16] * 2
    for index in range(2):
        assert {**before[index], **after[index]} == whole[index]
        assert again.recorded(index)[-1] == ends[0]


def check_each_example_once(
    hosts: list[dict[int, tuple[str, list[int]]]], counts: list[int]
) -> None:
    """Checks that hosts have the same buckets, and each of their examples once."""
    for at_hosts in zip(*(steps.items() for steps in hosts), strict=True):
        assert len({(step, bucket) for step, (bucket, _) in at_hosts}) == 1
    first = 0
    for steps, count in zip(hosts, counts, strict=True):
        served = collections.Counter(
            i for _, indices in steps.values() for i in indices
        )
        assert served == dict.fromkeys(range(first, first + count), 1)
        first += count


@pytest.mark.exhaustive
def test_the_example_script_resumes_from_a_checkpoint(tmp_path):
    text = "\n".join(f"document {n} " + "x" * (n * 7 % 190) for n in range(300))
    (tmp_path / "data.txt").write_text(text)

    def run(folder: str, *more: str) -> dict:
        command = [
            *(sys.executable, ROOT / "scripts" / "launch_local.py", "-n", "2", "--"),
            *(sys.executable, "-W", "error", ROOT / "examples" / "stream.py"),
            *("--data", "data.txt", "--checkpoint", folder, "--save-every", "6"),
            *("--max-len", "128", "--max-tokens", "1024", "--num-buckets", "2"),
            *("--width", "16", "--layers", "1", "--pool-size", "64"),
            *("--sample", "100", "--pack", "--epochs", "2"),
            *("--json", f"{folder}.json", *more),
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads((tmp_path / f"{folder}.json").read_text())

    whole = run("whole")
    numbers = [step["step"] for step in whole["steps"]]
    assert numbers == list(range(len(numbers))) and len(numbers) > 12
    last = max(int(x.name) for x in (tmp_path / "whole").glob("[0-9]*"))
    assert 0 < last < len(numbers)
    (tmp_path / "whole.json").unlink()
    assert run("whole")["steps"] == whole["steps"][last:]
