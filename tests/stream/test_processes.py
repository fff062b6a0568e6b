"""Real processes that train on streams of their own, to the end of all of them."""

import collections
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

# Made for as many processes as `COUNTS` has; each one trains on examples of its own.
TRAIN = """
import hashlib, json, os, pathlib, signal, sys, threading
import grain, jax, optax
import jax.numpy as jnp
import numpy as np
import jaxbucket as jb

lengths = np.random.default_rng(0).integers(1, 33, sum(COUNTS))
plan = jb.plan_buckets(lengths, max_tokens=256, num_buckets=3, batch_size_multiple=4)


def stream(index):
    first = sum(COUNTS[:index])
    source = [
        {"tokens": np.full(lengths[i], i % 50, np.int32), "index": np.int32(i)}
        for i in range(first, first + COUNTS[index])
    ]
    return grain.MapDataset.source(source).to_iter_dataset()


def batches_of(stream, **options):
    return jb.stream_batches(
        stream,
        plan,
        pool_size=32,
        lengths=lengths[:100],
        shard=jb.sharding.local_rows(mesh),
        processes=processes,
        **options,
    )


def loss_fn(params, batch, keys):
    vectors = params["w"][batch.features["tokens"]]
    loss = jnp.square(vectors - 1).sum(axis=-1) * batch.mask
    return jnp.sum(loss), jnp.sum(batch.mask)


def names(batch):
    pairs = zip(
        batch.features["index"].addressable_shards,
        batch.segment_ids["tokens"].addressable_shards,
    )
    return [
        int(name)
        for index, ids in pairs
        for name in np.array(index.data)[np.array(ids.data)[:, 0] > 0]
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


def steps_said(run, index: int) -> dict[int, tuple[str, list[int]]]:
    """Step -> (bucket, names of the examples in the rows of a process)."""
    found = {}
    for line in run.said(index):
        match = re.fullmatch(r"step (\d+) (\[.*?\]) (\[.*\])", line)
        if match:
            names = [int(x) for x in re.findall(r"\d+", match[3])]
            found[int(match[1])] = match[2], names
    return found


TOGETHER = (
    TRAIN
    + """
    served, saved = [], None
    for batch in jb.sharding.prefetch_to_mesh(batches, mesh):
        state, metrics = steps(state, batch)
        served.append(names(batch))
        say("step", step, batch.bucket, names(batch))
        step += 1
        if step == 9:
            saved = json.dumps(batches.state_before(step))
    assert batches.ended
    say("end", step, hashlib.sha256(np.array(state.params["w"]).tobytes()).hexdigest())

    again = iter(dataset)
    again.set_state(json.loads(saved))
    rest = [names(batch) for batch in jb.sharding.prefetch_to_mesh(again, mesh)]
    say("resumed", rest == served[9:], len(rest) > 2)

    # Two streams at once; whoever comes first meets the others of the same stream.
    found = {}
    parts = {name: stream(processes.index) for name in ("train", "eval")}
    datasets = {name: batches_of(part) for name, part in parts.items()}

    def read(name):
        rows = ((x.features["index"], x.mask[:, 0]) for x in datasets[name])
        found[name] = sorted(int(i) for index, mask in rows for i in index[mask])

    order = sorted(datasets, reverse=processes.index == 1)
    threads = [threading.Thread(target=read, args=(name,)) for name in order]
    for thread in threads:
        thread.start()
        thread.join(0.5)
    for thread in threads:
        thread.join()
    want = sorted(x for names in served for x in names)
    say("both", found == {"train": want, "eval": want})

    try:
        next(iter(batches_of(stream(processes.index), seed=processes.index)))
    except ValueError as error:
        say("refused", error)

    def fail(example):
        if processes.index == 1 and example["index"] == 150:
            raise OSError("no network")
        return example

    for batch in batches_of(stream(processes.index).map(fail), num_epochs=None):
        pass
"""
)


def test_processes_end_together_resume_and_are_told_what_is_wrong(launch):
    counts = [40, 160]
    run = launch(f"COUNTS = {counts}\n{TOGETHER}", count=2)
    said = [run.said(index) for index in range(2)]
    steps = [steps_said(run, index) for index in range(2)]
    check_once(steps, counts)
    end, resumed, both, refused = zip(*(x[len(steps[0]) :] for x in said), strict=True)
    # At the same step, with the same parameters.
    assert end[0] == end[1] and end[0].startswith(f"end {len(steps[0])} "), run.output
    assert resumed == ("resumed True True",) * 2
    assert both == ("both True",) * 2
    assert all("seed is 0 in process 0, 1 in 1" in text for text in refused)
    # Nobody waits for the stream that broke.
    assert run.status != 0
    assert "OSError: no network" in run.output
    assert "process 1" in run.output and "Example 110 of epoch 0" in run.output


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
            say("step", step, batch.bucket, names(batch))
            step += 1
            if step % 8 == 0:
                own = json.dumps(batches.state_before(step))
                streams = map(json.loads, processes.gather("streams", own))
                saved = {"streams": list(streams)}
                checkpoints.save(state, dataset.position(step), saved)
            if step == KILL and processes.index == 2:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    assert batches.ended
    say("end", step, hashlib.sha256(np.array(state.params["w"]).tobytes()).hexdigest())
"""
)


@pytest.mark.exhaustive
def test_unequal_streams_end_together_and_go_on_where_they_were_killed(
    launch, tmp_path
):
    counts = [30, 60, 90, 120]
    code = f"COUNTS = {counts}\n{CHECKPOINTED}"
    run = launch(code.replace("KILL", "-1"), count=4)
    assert run.status == 0, run.output
    whole = [steps_said(run, index) for index in range(4)]
    ends = [run.said(index)[-1] for index in range(4)]
    # All of them at the same step, with the same parameters.
    assert ends == [ends[0]] * 4 and ends[0].startswith("end "), run.output
    check_once(whole, counts)

    (tmp_path / "run").rename(tmp_path / "first")
    killed = launch(code.replace("KILL", "20"), count=4)
    assert killed.status != 0
    before = [steps_said(killed, index) for index in range(4)]
    again = launch(code.replace("KILL", "-1"), count=4)
    assert again.status == 0, again.output
    after = [steps_said(again, index) for index in range(4)]
    assert [min(steps) for steps in after] == [16] * 4
    for index in range(4):
        assert {**before[index], **after[index]} == whole[index]
        assert again.said(index)[-1] == ends[0]


def check_once(
    hosts: list[dict[int, tuple[str, list[int]]]], counts: list[int]
) -> None:
    """The same bucket at every step, every example in one row, of whose it is."""
    for said in zip(*(steps.items() for steps in hosts), strict=True):
        assert len({(step, bucket) for step, (bucket, _) in said}) == 1
    first = 0
    for steps, count in zip(hosts, counts, strict=True):
        found = collections.Counter(x for _, names in steps.values() for x in names)
        assert found == dict.fromkeys(range(first, first + count), 1)
        first += count


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [[], ["--pack", "--epochs", "2"]], ids=str)
def test_the_example_ends_where_it_ended_when_it_goes_on(tmp_path, options):
    text = "\n".join(f"document {n} " + "x" * (n * 7 % 190) for n in range(300))
    (tmp_path / "data.txt").write_text(text)

    def run(folder: str, *more: str) -> dict:
        command = [
            *(sys.executable, ROOT / "scripts" / "launch_local.py", "-n", "2", "--"),
            *(sys.executable, "-W", "error", ROOT / "examples" / "stream.py"),
            *("--data", "data.txt", "--checkpoint", folder, "--save-every", "6"),
            *("--max-len", "128", "--max-tokens", "1024", "--num-buckets", "2"),
            *("--width", "16", "--layers", "1", "--pool-size", "64"),
            *("--sample", "100", "--json", f"{folder}.json", *options, *more),
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
