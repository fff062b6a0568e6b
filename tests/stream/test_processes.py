"""Real processes that train on streams of their own, to the end of all of them."""

import collections
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]

COUNTS = [30, 60, 90, 120]

TRAIN = f"""
import hashlib, json, os, pathlib, signal, sys
import grain, jax, optax
import jax.numpy as jnp
import numpy as np
import jaxbucket as jb

COUNTS = {COUNTS}
lengths = np.random.default_rng(0).integers(1, 33, sum(COUNTS))


def stream(index):
    first = sum(COUNTS[:index])
    source = [
        {{"tokens": np.full(lengths[i], i % 50, np.int32), "index": np.int32(i)}}
        for i in range(first, first + COUNTS[index])
    ]
    return grain.MapDataset.source(source).to_iter_dataset()


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
    plan = jb.plan_buckets(
        lengths, max_tokens=256, num_buckets=3, batch_size_multiple=4
    )
    dataset = jb.stream_batches(
        stream(processes.index),
        plan,
        pool_size=32,
        lengths=lengths[:100],
        shard=jb.sharding.local_rows(mesh),
        processes=processes,
    )
    processes.check_agreement(dataset.position(0), mesh)
    tx = optax.adam(1e-2)
    state = jb.sharding.replicate(jb.create_state({{"w": jnp.zeros((50, 4))}}, tx), mesh)
    step_fn = jb.data_parallel(loss_fn, tx, mesh)
    like = {{"tokens": np.zeros(1, np.int32), "index": np.int32(0)}}
    steps = jb.compile_steps(step_fn, state, jb.sharding.batch_specs(plan, like, mesh))
    folder = pathlib.Path(sys.argv[0]).parent / "run"
    with jb.Checkpoints(folder, processes=processes) as checkpoints:
        batches, step = iter(dataset), 0
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
                saved = {{"streams": list(streams)}}
                checkpoints.save(state, dataset.position(step), saved)
            if step == KILL and processes.index == 2:
                checkpoints.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    assert batches.ended
    say("end", step, hashlib.sha256(np.array(state.params["w"]).tobytes()).hexdigest())
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


def test_unequal_streams_end_together_and_go_on_where_they_were_killed(
    launch, tmp_path
):
    run = launch(TRAIN.replace("KILL", "-1"), count=4)
    assert run.status == 0, run.output
    whole = [steps_said(run, index) for index in range(4)]
    ends = [run.said(index)[-1] for index in range(4)]
    # All of them at the same step, with the same parameters.
    assert ends == [ends[0]] * 4 and ends[0].startswith("end "), run.output
    check_once(whole)

    (tmp_path / "run").rename(tmp_path / "first")
    killed = launch(TRAIN.replace("KILL", "20"), count=4)
    assert killed.status != 0
    before = [steps_said(killed, index) for index in range(4)]
    again = launch(TRAIN.replace("KILL", "-1"), count=4)
    assert again.status == 0, again.output
    after = [steps_said(again, index) for index in range(4)]
    assert [min(steps) for steps in after] == [16] * 4
    for index in range(4):
        assert {**before[index], **after[index]} == whole[index]
        assert again.said(index)[-1] == ends[0]


def check_once(hosts: list[dict[int, tuple[str, list[int]]]]) -> None:
    """The same bucket at every step, every example in one row, of whose it is."""
    for said in zip(*(steps.items() for steps in hosts), strict=True):
        assert len({(step, bucket) for step, (bucket, _) in said}) == 1
    first = 0
    for steps, count in zip(hosts, COUNTS, strict=True):
        found = collections.Counter(x for _, names in steps.values() for x in names)
        assert found == dict.fromkeys(range(first, first + count), 1)
        first += count


TWO = """
import threading
import grain
import numpy as np
import jaxbucket as jb

lengths = np.random.default_rng(0).integers(1, 33, 400)
plan = jb.plan_buckets(lengths, max_tokens=256, num_buckets=3, batch_size_multiple=2)


def read(name, dataset):
    found = [
        int(n)
        for batch in dataset
        for n in batch.features["index"][batch.mask[:, 0] > 0]
    ]
    told[name] = sorted(found) == list(range(processes.index, sizes[name], 2))


with jb.Processes(timeout=4) as processes:
    sizes, datasets, told = {"train": 400, "eval": 90}, {}, {}
    for name, size in sizes.items():
        source = [
            {"tokens": np.zeros(lengths[i], np.int32), "index": np.int32(i)}
            for i in range(processes.index, size, 2)
        ]
        datasets[name] = jb.stream_batches(
            grain.MapDataset.source(source).to_iter_dataset(),
            plan,
            pool_size=64,
            lengths=lengths,
            shard=jb.data.RowShard((processes.index,), 2),
            processes=processes,
        )
    # Whoever comes first meets the others of the same stream.
    names = sorted(datasets, reverse=processes.index == 1)
    threads = [threading.Thread(target=read, args=(x, datasets[x])) for x in names]
    for thread in threads:
        thread.start()
        thread.join(1.0)
    for thread in threads:
        thread.join()
    say("read", told["train"], told["eval"])
"""


def test_two_streams_are_read_at_once(launch):
    run = launch(TWO, count=2)
    assert run.status == 0, run.output
    assert [run.said(index) for index in range(2)] == [["read True True"]] * 2


ELSEWHERE = """
import grain, jax
import numpy as np
import jaxbucket as jb

lengths = np.random.default_rng(0).integers(1, 33, 400)
plan = jb.plan_buckets(lengths, max_tokens=256, num_buckets=3, batch_size_multiple=2)


def read(example):
    if processes.index == 1 and example["index"] == 150:
        raise OSError("no network")
    return example


with jb.Processes(timeout=4) as processes:
    source = [
        {"tokens": np.zeros(n, np.int32), "index": np.int32(i)}
        for i, n in enumerate(lengths)
    ]
    dataset = jb.stream_batches(
        grain.MapDataset.source(source).map(read).to_iter_dataset(),
        plan,
        pool_size=64,
        lengths=lengths,
        shard=jb.data.RowShard((processes.index,), 2),
        processes=processes,
        seed=CHANGE * processes.index,
    )
    for batch in dataset:
        pass
"""


def test_nobody_waits_for_a_stream_that_broke(launch):
    run = launch(ELSEWHERE.replace("CHANGE", "0"), count=2)
    assert run.status != 0
    assert "OSError: no network" in run.output
    assert "process 1" in run.output and "Example 150 of epoch 0" in run.output


def test_processes_that_batch_otherwise_end_with_an_error(launch):
    run = launch(ELSEWHERE.replace("CHANGE", "1"), count=2)
    assert run.status != 0
    assert "seed is 0 in process 0, 1 in 1" in run.output


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
