"""A training job that uses everything at once, and the same job without jaxbucket.

A frozen layer, batch normalization and dropout; Adam and an average of the parameters.
The tests import this module, and so do the processes they start.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import jaxbucket as jb
from jaxbucket.train.modes import row_keys

FEATURES, WIDTH, KEPT, MOMENTUM, DECAY = 3, 8, 0.75, 0.9, 0.8
DTYPE = np.float64


class NnxModel(nnx.Module):
    # Without batch normalization, whose statistics NNX keeps in float32.
    def __init__(self, rngs: nnx.Rngs):
        self.body = nnx.Linear(FEATURES, WIDTH, param_dtype=DTYPE, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 1, param_dtype=DTYPE, rngs=rngs)

    def __call__(self, x, mask, kept):
        return self.head(jnp.tanh(self.body(x)) * kept)[..., 0]


class LinenModel(linen.Module):
    normalizes: bool  # with mode "jit" only

    @linen.compact
    def __call__(self, x, mask, kept, train):
        x = linen.Dense(WIDTH, param_dtype=DTYPE, name="body")(x)
        if self.normalizes:
            norm = linen.BatchNorm(
                momentum=MOMENTUM,
                param_dtype=DTYPE,
                use_fast_variance=False,
                force_float32_reductions=False,
                name="norm",
            )
            x = norm(x, not train, mask=mask[..., None])
        return linen.Dense(1, param_dtype=DTYPE, name="head")(jnp.tanh(x) * kept)[
            ..., 0
        ]


def draw(keys: Any, seq_len: int) -> Any:
    """Returns the dropout of each position, `[B, T, WIDTH]`; 1 in evaluation."""
    if keys is None:
        return jnp.ones((), DTYPE)
    shape = (seq_len, WIDTH)
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, KEPT, shape))(keys)
    return kept.astype(DTYPE) / KEPT


def square(y, batch):
    return jnp.sum(jnp.square(y - batch.features["y"]), where=batch.mask)


def nnx_loss(model, batch, keys):
    if keys is None:
        model.eval()
    x = batch.features["x"]
    y = model(x, batch.mask, draw(keys, x.shape[1]))
    return square(y, batch), batch.num_tokens


def linen_loss(variables, batch, keys):
    x, train = batch.features["x"], keys is not None
    y, new = LinenModel("batch_stats" in variables).apply(
        variables, x, batch.mask, draw(keys, x.shape[1]), train, mutable=["batch_stats"]
    )
    return square(y, batch), batch.num_tokens, {}, new


def make_source() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {"x": rng.normal(2, 3, (n, FEATURES)), "y": rng.normal(size=n)}
        for n in rng.integers(1, 17, 60)
    ]


def make_schedule(source: Any, accumulate: int) -> jb.BatchSchedule:
    lengths = jb.measure_lengths(source, progress=False)
    # With two micro-batches, one of them has no examples.
    plan = jb.plan_buckets(
        lengths, max_tokens=128, num_buckets=2, batch_size_multiple=8
    )
    return jb.BatchSchedule(plan, lengths, seed=1, accumulate=accumulate)


@jax.jit
def move_average(average: Any, state: jb.train.TrainState) -> Any:
    return optax.incremental_update(state.params, average, 1 - DECAY)


def values(tree: Any) -> dict[str, Any]:
    """Returns the arrays of a model by name, such as "norm/scale", as lists."""
    if isinstance(tree, nnx.Module):
        tree = nnx.state(tree)
    named = {}
    for path, leaf in jax.tree.leaves_with_path(tree):
        words = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        words = [x for x in words if x not in ("params", "batch_stats", "value")]
        named["/".join(words)] = np.asarray(leaf).tolist()
    return named


def train(
    kind: str,
    mode: Any,
    devices: Any = None,
    *,
    accumulate: int = 1,
    folder: Any = None,
    processes: Any = None,
) -> dict[str, Any]:
    """Trains for an epoch, is resumed in the middle of it, and returns all results."""
    mesh = jb.data_mesh(devices)
    source = make_source()
    schedule = make_schedule(source, accumulate)
    tx = optax.adam(1e-2)
    batches = jb.MeshLoader(source, schedule, mesh)
    trained = nnx.Not(nnx.PathContains("body"))
    if kind == "nnx":
        model, sample = NnxModel(nnx.Rngs(0)), None
        trained = nnx.All(nnx.Param, trained)
    else:
        x = np.zeros((1, 2, FEATURES), DTYPE)
        model = LinenModel(mode == "jit")
        sample = (x, np.zeros((1, 2), bool), draw(None, 2), False)

    def new_state() -> Any:
        return jb.create_state(model, tx, mesh, sample=sample, wrt=trained)

    loss_fn = nnx_loss if kind == "nnx" else linen_loss
    step_fn = jb.make_train_step(
        loss_fn, tx, mesh, mode=mode, seed=5, accumulate=accumulate > 1
    )
    state = new_state()
    average = jax.tree.map(jnp.copy, state.params)
    initial = values(state.model)
    steps = jb.compile_steps(step_fn, state, batches.specs, progress=False)
    eval_step = jb.make_eval_step(loss_fn, mesh, mode=mode)
    losses, half = [], len(schedule) // 2
    for number, batch in enumerate(batches):
        if number == half and folder is not None:
            with jb.Checkpoints(folder, processes=processes) as checkpoints:
                saved = {"state": state, "average": average}
                checkpoints.save(saved, batches.position(number))
            break
        state, metrics = steps(state, batch)
        average = move_average(average, state)
        losses.append(float(metrics["loss"]))
    if folder is not None:
        with jb.Checkpoints(folder, processes=processes) as checkpoints:
            new = {"state": new_state(), "average": new_state().params}
            saved, position, _ = checkpoints.restore(new)
        state, average = saved["state"], saved["average"]
        for batch in batches.resume(position):
            state, metrics = steps(state, batch)
            average = move_average(average, state)
            losses.append(float(metrics["loss"]))
    last = batch if accumulate == 1 else batch[-1]
    averaged = dataclasses.replace(state, params=average)
    return {
        "initial": initial,
        "losses": losses,
        "model": values(state.model),
        "average": values(average),
        "evaluated": float(eval_step(state, last)["loss"]),
        "evaluated_average": float(eval_step(averaged, last)["loss"]),
    }


def reference(initial: dict[str, Any], accumulate: int) -> dict[str, Any]:
    """Returns the results of the job, computed on examples without padding."""
    source = make_source()
    schedule = make_schedule(source, accumulate)
    state = {name: jnp.asarray(value, DTYPE) for name, value in initial.items()}
    statistics = {x: state.pop(x) for x in ("norm/mean", "norm/var") if x in state}
    frozen = {name: state.pop(name) for name in ("body/kernel", "body/bias")}
    tx = optax.adam(1e-2)
    opt_state, average, losses = tx.init(state), state, []
    for step in range(len(schedule)):
        loss_sum, weight = 0.0, 0
        grads = jax.tree.map(jnp.zeros_like, state)
        for number, indices in enumerate(schedule.micro_batches(step)):
            rows = [r for r, i in enumerate(indices.rows.tolist()) if i >= 0]
            if not rows:
                continue
            examples = [source[indices.rows[r]] for r in rows]
            bucket = indices.bucket
            keys = row_keys(5, step, bucket.batch_size, micro_batch=number)
            kept = draw(keys, bucket.seq_len)
            kept = [kept[r, : len(x["y"])] for r, x in zip(rows, examples, strict=True)]
            args = frozen, statistics, examples, jnp.concatenate(kept)
            # Compiled, because most operations have shapes that are new in each step.
            gradients = jax.jit(
                jax.value_and_grad(
                    lambda x, args=args: _plain_loss(x, *args), has_aux=True
                )
            )
            (part, statistics), new = gradients(state)
            loss_sum += float(part)
            weight += sum(len(x["y"]) for x in examples)
            grads = jax.tree.map(jnp.add, grads, new)
        losses.append(loss_sum / weight)
        grads = jax.tree.map(lambda x, n=weight: x / n, grads)
        updates, opt_state = tx.update(grads, opt_state)
        state = optax.apply_updates(state, updates)
        average = jax.tree.map(lambda x, y: DECAY * x + (1 - DECAY) * y, average, state)
    last = examples, statistics, frozen
    return {
        "losses": losses,
        "model": values({**state, **statistics, **frozen}),
        "average": values(average),
        "evaluated": _plain_evaluation(state, *last),
        "evaluated_average": _plain_evaluation(average, *last),
    }


def _plain_loss(params, frozen, statistics, examples, kept):
    x = np.concatenate([x["x"] for x in examples]) @ frozen["body/kernel"]
    x = x + frozen["body/bias"]
    if not statistics:
        return _plain_head(params, x, examples, kept), {}
    mean, var = x.mean(axis=0), x.var(axis=0)
    new = {"norm/mean": mean, "norm/var": var}
    new = jax.tree.map(lambda a, b: MOMENTUM * a + (1 - MOMENTUM) * b, statistics, new)
    return _plain_head(params, _normalized(params, x, mean, var), examples, kept), new


def _plain_evaluation(params, examples, statistics, frozen):
    x = np.concatenate([x["x"] for x in examples]) @ frozen["body/kernel"]
    x = x + frozen["body/bias"]
    if statistics:
        x = _normalized(params, x, statistics["norm/mean"], statistics["norm/var"])
    return float(_plain_head(params, x, examples, 1.0)) / len(x)


def _normalized(params, x, mean, var):
    x = (x - mean) / jnp.sqrt(var + 1e-5)
    return x * params["norm/scale"] + params["norm/bias"]


def _plain_head(params, x, examples, kept):
    y = (jnp.tanh(x) * kept) @ params["head/kernel"] + params["head/bias"]
    targets = np.concatenate([x["y"] for x in examples])
    return jnp.sum(jnp.square(y[:, 0] - targets))


def main() -> None:
    """Trains in one of several processes, and writes the results as JSON."""
    kind, mode, folder, output = sys.argv[1:]
    jax.config.update("jax_enable_x64", True)
    with jb.Processes() as processes:
        results = train(kind, mode, accumulate=2, folder=folder, processes=processes)
        with open(f"{output}.{processes.index}", "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
