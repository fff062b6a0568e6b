"""The golden set: what a change of the code must not change.

`python tests/golden/golden.py` writes `golden.json`. A change that needs this makes old
runs impossible to resume, and says so in CHANGELOG.md.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxbucket as jb
from jaxbucket.data import RowShard
from jaxbucket.packing import pack
from jaxbucket.schedule import GroupedByLength, LinearPacing, RootPacing

FILE = pathlib.Path(__file__).with_name("golden.json")
DATA = pathlib.Path(__file__).parents[3] / "shared" / "data"
NUM_STEPS = 200
NUM_BUCKETS = (4, 8, 16, 32)
RNG = np.random.default_rng(0)
LENGTHS = np.minimum(4 + RNG.lognormal(4, 0.8, 3000), 500).astype(np.int64)
PAIRS = {
    "source": LENGTHS[:1500],
    "target": np.maximum(LENGTHS[:1500] * RNG.uniform(0.4, 1.4, 1500), 1).astype(int),
}
DIFFICULTY, NOISE = RNG.random((2, len(LENGTHS)))


def plan(lengths: Any = LENGTHS, **options: Any) -> jb.BucketPlan:
    defaults = {"max_tokens": 8192, "num_buckets": 6, "batch_size_multiple": 4}
    return jb.plan_buckets(lengths, **{**defaults, **options})


def packed(lengths: Any = LENGTHS) -> tuple[jb.BucketPlan, Any]:
    result = jb.plan_packing(
        lengths, max_tokens=8192, max_seq_len=1024, batch_size_multiple=4, pack="always"
    )
    return result.plan, result.packing


def schedules() -> dict[str, Callable[[], Any]]:
    """Returns the twelve schedules by name."""

    def padded(**options: Any) -> jb.BatchSchedule:
        return jb.BatchSchedule(plan(), LENGTHS, seed=3, **options)

    def rows(lengths: Any = LENGTHS, **options: Any) -> jb.BatchSchedule:
        shapes, packing = packed(lengths)
        return jb.BatchSchedule(shapes, lengths, seed=3, packing=packing, **options)

    def pairs(**options: Any) -> jb.BatchSchedule:
        shapes = plan(PAIRS, max_tokens=16384)
        return jb.BatchSchedule(shapes, PAIRS, seed=3, **options)

    two_metrics = jb.Curriculum(
        {"difficulty": DIFFICULTY, "noise": NOISE},
        {"difficulty": LinearPacing(0.2, 0.5), "noise": RootPacing(0.5, 1.0)},
    )
    halves = LENGTHS[::2], LENGTHS[1::2]
    return {
        "spread": padded,
        "shuffled, largest first": lambda: padded(order="shuffled", largest_first=True),
        "source, drop": lambda: padded(order="source", remainder="drop"),
        "ascending, 2 alike": lambda: padded(order="ascending", accumulate=2),
        "grouped by length, 3 mixed": lambda: padded(
            order=GroupedByLength(), accumulate=3, group="mixed"
        ),
        "curriculum": lambda: padded(
            order=jb.Curriculum(DIFFICULTY, LinearPacing(0.1, 1.5))
        ),
        "curriculum of two metrics": lambda: padded(order=two_metrics),
        "packed, balanced": lambda: rows(balance=True),
        "packed curriculum": lambda: rows(
            order=jb.Curriculum(DIFFICULTY, LinearPacing(0.1, 1.5))
        ),
        "two lengths, 2 alike": lambda: pairs(accumulate=2),
        "mixture": lambda: jb.Mixture(
            {
                "even": jb.BatchSchedule(plan(halves[0]), halves[0], seed=1),
                "odd": jb.BatchSchedule(plan(halves[1]), halves[1], seed=2),
            },
            {0: {"even": 3, "odd": 1}, 50: {"even": 1, "odd": 2}},
            accumulate=2,
        ),
        "phases": lambda: jb.JoinedSchedule(
            {0: padded(accumulate=2), 40: padded(), 90: padded(order="ascending")}
        ),
    }


def schedule_digest(schedule: Any) -> str:
    state = hashlib.sha256()
    for step in range(NUM_STEPS):
        for indices in schedule.micro_batches(step):
            state.update(f"{indices.bucket}".encode())
            state.update(np.ascontiguousarray(indices.rows, np.int64).tobytes())
    return state.hexdigest()[:32]


class Examples:
    """Examples of the given lengths."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        tokens = (index * 7 + np.arange(self.lengths[index])) % 97
        return {"tokens": tokens.astype(np.int32), "index": np.array(index)}


def streams() -> dict[str, Callable[[], Iterable[Any]]]:
    """Returns the streams of batches by name."""
    source = grain.MapDataset.source(Examples(LENGTHS))

    def stream(shapes: Any = None, **options: Any) -> Iterable[Any]:
        examples = jb.stream.ExampleStream(
            source.to_iter_dataset(), sequences=["tokens"], seed=4
        )
        return jb.stream_batches(
            examples, shapes or plan(sample=True), pool_size=1024, **options
        )

    def epochs(epoch: int, seed: int) -> Any:
        return source.shuffle(seed=seed).to_iter_dataset()

    def of_half() -> Iterable[Any]:
        examples = source[::2].to_iter_dataset()
        return jb.stream_batches(
            jb.stream.ExampleStream(examples, sequences=["tokens"]),
            plan(sample=True),
            pool_size=1024,
            lengths=LENGTHS,
            shard=RowShard((1,), 2),
            num_steps=40,
        )

    def two_epochs() -> Iterable[Any]:
        return jb.stream_batches(
            jb.stream.ExampleStream(epochs, num_epochs=2, sequences=["tokens"]),
            plan(sample=True),
            pool_size=1024,
            accumulate=2,
        )

    rows = jb.BucketPlan.from_shapes([(16, 512)], max_tokens=8192)
    return {
        "closest": stream,
        "first": lambda: stream(policy="first"),
        "packed": lambda: stream(rows, max_segments_per_row=64),
        "two epochs, 2 alike": two_epochs,
        "half of the rows": of_half,
    }


def stream_digest(batches: Iterable[Any]) -> str:
    state = hashlib.sha256()
    for _, step in zip(range(NUM_STEPS), batches, strict=False):
        for batch in step if not isinstance(step, jb.Batch) else (step,):
            for part in batch:
                for name, array in sorted(part.items()):
                    array = np.ascontiguousarray(array)
                    state.update(f"{name} {array.dtype} {array.shape}".encode())
                    state.update(array.tobytes())
    return state.hexdigest()[:32]


def length_sets() -> dict[str, Any]:
    """Returns the real lengths by name, and those of several lengths with a "+"."""
    sets = {"lognormal": LENGTHS, "source+target": PAIRS}
    for path in sorted(DATA.glob("*.npz")):
        with np.load(path) as columns:
            sets.update(
                {f"{path.stem}-{x}": np.minimum(columns[x], 8192) for x in columns}
            )
    for first, second in (
        ("multi30k-en_words", "multi30k-de_words"),
        ("gsm8k-question_bytes", "gsm8k-answer_bytes"),
        ("azure_code-context", "azure_code-generated"),
    ):
        if first in sets:
            pair = np.maximum(np.stack([sets[first], sets[second]]), 1)
            sets[f"{first}+{second}"] = {"a": pair[0], "b": pair[1]}
    return sets


def plan_of(lengths: Any, num_buckets: int) -> dict[str, Any]:
    """Returns the shapes of a plan and the cost of its epoch."""
    if not isinstance(lengths, dict):
        lengths = lengths[lengths > 0]
    result = plan(
        lengths, max_tokens=32768, num_buckets=num_buckets, seq_len_multiple=8
    )
    steps = jb.report(result, lengths)
    return {
        "shapes": " ".join(f"{x.batch_size}x{x.seq_len}" for x in result.buckets)
        if not isinstance(lengths, dict)
        else None,
        "tokens": steps.padded_tokens,
    }


def losses(mode: Any) -> list[float]:
    """Returns the losses of 24 training steps on eight devices."""
    source, mesh = Examples(LENGTHS[:400]), jb.data_mesh()
    shapes = plan(source.lengths, max_tokens=4096, num_buckets=3, batch_size_multiple=8)
    schedule = jb.BatchSchedule(shapes, source.lengths, accumulate=2, group="mixed")
    batches = jb.MeshLoader(source, schedule, mesh, num_epochs=3)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.embed = nnx.Embed(97, 16, rngs=rngs)
            self.out = nnx.Linear(16, 97, rngs=rngs)

        def __call__(self, tokens: Any, keys: Any) -> Any:
            x = jnp.tanh(self.embed(tokens))
            kept = jax.vmap(lambda k: jax.random.bernoulli(k, 0.9, x.shape[1:]))(keys)
            return self.out(x * kept / 0.9)

    def loss_fn(model: Any, batch: jb.Batch, keys: Any) -> Any:
        inputs, targets, weights = jb.next_tokens(batch)
        logits = model(inputs, keys)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        return jnp.sum(each * weights), jnp.sum(weights)

    tx = optax.chain(
        optax.adam(1e-2), jb.scale_by_batch_size(base_examples=64, rule="sqrt")
    )
    state = jb.create_state(Model(nnx.Rngs(0)), tx, mesh)
    step = jb.make_train_step(loss_fn, tx, mesh, mode=mode, accumulate=True, seed=1)
    steps = jb.compile_steps(step, state, batches.specs, progress=False)
    values = []
    for _, batch in zip(range(24), batches, strict=False):
        state, metrics = steps(state, batch)
        values.append(float(metrics["loss"]))
    return values


def plans() -> Iterator[tuple[str, Any, int]]:
    for name, lengths in length_sets().items():
        for num_buckets in NUM_BUCKETS:
            yield name, lengths, num_buckets


def packing_digest() -> str:
    rows = pack(LENGTHS, max_seq_len=1024)
    parts = (np.asarray(x, np.int64) for x in (rows.slot_lengths, rows.row_splits))
    return hashlib.sha256(b"".join(x.tobytes() for x in parts)).hexdigest()[:32]


def main() -> None:
    """Writes the golden set."""
    golden = {
        "schedules": {x: schedule_digest(make()) for x, make in schedules().items()},
        "streams": {x: stream_digest(make()) for x, make in streams().items()},
        "plans": {f"{x}, {k}": plan_of(lengths, k) for x, lengths, k in plans()},
        "packing": packing_digest(),
        "losses": losses("jit"),
    }
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    main()
