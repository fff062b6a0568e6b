"""Trains a byte-level language model on documents of every length.

    python examples/train_lm.py
    python examples/train_lm.py --data my.jsonl --field text --json summary.json
    python examples/train_lm.py --checkpoint runs/a          # and, when it was stopped:
    python examples/train_lm.py --checkpoint runs/a --resume
    python examples/train_lm.py --compare --seconds 300 --max-len 2048

Without `--data` it reads the functions and classes of the running Python's standard
library. All shapes are compiled before the first step; the end says whether any was
compiled after it. `--policy` makes batches in another way, and `--compare` trains in
every way for the same time.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import pathlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import comparison
import documents
import jax
import jax.numpy as jnp
import numpy as np
import optax
import policies
from flax import nnx
from interrupt import StopRequest
from live import Clock, TrainingLog, console
from options import SEQ_LEN_MULTIPLE, parse_arguments
from transformer import Transformer

import jaxbucket as jb
from jaxbucket.input_pipeline import BatchDataset
from jaxbucket.plots import plot_buckets, plot_run
from jaxbucket.stats import bucket_uses
from jaxbucket.train import LossFn

BASE_EXAMPLES = 32
WARM_UP_STEPS = 35


@dataclasses.dataclass(frozen=True)
class Part:
    """Documents, and the schedule that batches them."""

    source: documents.Examples
    schedule: jb.BatchSchedule

    @property
    def report(self) -> jb.Report:
        return jb.report(self.schedule.plan, self.schedule.lengths)


@dataclasses.dataclass(frozen=True)
class Job:
    """All that is settled before anything compiles.

    Attributes:
      mesh: where batches go.
      limits: what every batch keeps to, whatever the policy.
      train: the documents to train on; their plan has one shape for some policies.
      held_out: the others, always in the shapes of the bucketed plan.
    """

    mesh: jax.sharding.Mesh
    limits: policies.Limits
    train: Part
    held_out: Part

    def specs(self, plan: jb.BucketPlan) -> dict[jb.Bucket, jb.Batch]:
        return jb.batch_specs(plan, self.train.source[0], self.mesh)


@dataclasses.dataclass
class Progress:
    """What training changes, and a checkpoint keeps."""

    state: jb.TrainState
    dataset: BatchDataset
    step: int = 0
    digest: str = ""
    seconds: float = 0.0


def main() -> None:
    args = parse_arguments()
    if args.compare:
        sys.exit(comparison.run(args))
    if args.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.devices)
    try:
        job = prepare(args)
        with jb.count_compiles() as compiles, checkpoints_of(args) as checkpoints:
            summary = run(job, args, compiles, checkpoints)
    except ValueError as error:
        sys.exit(f"train_lm.py: {error}")
    console.print(in_words(summary))
    if args.json:
        pathlib.Path(args.json).write_text(to_json(summary) + "\n")


def prepare(args: argparse.Namespace) -> Job:
    """Reads and measures the documents, and plans the shapes for them."""
    if args.checkpoint and args.policy not in policies.RESUMABLE:
        raise ValueError(
            f"`--policy {args.policy}` cannot be resumed, for its batches depend on "
            "all before them: leave out `--checkpoint`, or choose one of "
            f"{', '.join(policies.RESUMABLE)}."
        )
    split = documents.load(args.data, args.field)
    lengths = jb.measure_lengths(split.train)
    held_out = jb.measure_lengths(split.held_out)
    longest = max(lengths.max(), held_out.max())
    limits = policies.Limits(
        args.max_tokens or args.batch_size_multiple * args.max_len,
        # Shorter than asked where no document is that long: no shape for nothing.
        min(args.max_len, -(-longest // SEQ_LEN_MULTIPLE) * SEQ_LEN_MULTIPLE),
        args.batch_size_multiple,
    )
    buckets = plan(lengths, limits, args.num_buckets)
    own = buckets if args.policy == "bucketed" else plan(lengths, limits, 1)
    return Job(
        jb.data_mesh(),
        limits,
        Part(split.train, jb.BatchSchedule(own, lengths, seed=args.seed)),
        Part(split.held_out, jb.BatchSchedule(buckets, held_out, order="source")),
    )


def plan(
    lengths: np.ndarray, limits: policies.Limits, num_buckets: int
) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths,
        max_tokens=limits.max_tokens,
        num_buckets=num_buckets,
        batch_size_multiple=limits.batch_size_multiple,
        seq_len_multiple=SEQ_LEN_MULTIPLE,
        max_seq_len=limits.max_len,
        overlong="truncate",
    )


def checkpoints_of(
    args: argparse.Namespace,
) -> contextlib.AbstractContextManager[jb.Checkpoints | None]:
    if args.checkpoint is None:
        return contextlib.nullcontext()
    return jb.Checkpoints(args.checkpoint, keep=args.keep)


def run(
    job: Job,
    args: argparse.Namespace,
    compiles: Counter[str],
    checkpoints: jb.Checkpoints | None,
) -> dict[str, Any]:
    """Compiles, trains and evaluates; returns every number about it."""
    show(job, args)
    learning_rate, tx = make_optimizer(args)
    model = Transformer(args.width, args.layers, args.dropout, nnx.Rngs(args.seed))
    state = jb.replicate(jb.create_state(model, tx), job.mesh)
    dataset = jb.batch_dataset(
        job.train.source,
        job.train.schedule,
        shard=jb.local_rows(job.mesh),
        # Until the time is over, where there is no number of steps.
        num_steps=sys.maxsize if args.seconds else args.steps,
    )
    progress = Progress(state, dataset)
    if checkpoints:
        progress = resumed(progress, job, args, checkpoints)
    train_step = jb.data_parallel(
        make_loss(packed=args.policy == "grain-pack"),
        tx,
        job.mesh,
        mode=args.mode,
        seed=args.seed,
    )
    eval_step = jb.data_parallel_eval(make_loss(packed=False), job.mesh, mode=args.mode)
    eval_steps = jb.compile_steps(
        eval_step, progress.state, job.specs(job.held_out.schedule.plan)
    )
    clock = Clock(progress.seconds)
    clock.start()
    train_steps = compile_train(train_step, job, args, progress.state)
    ahead = compiles.copy()
    log = TrainingLog(
        clock,
        learning_rate,
        num_steps=None if args.seconds else args.steps,
        seconds=args.seconds,
        first_step=progress.step,
        digest=progress.digest,
    )
    curve: list[dict[str, Any]] = []

    def note_held_out() -> None:
        clock.pause()
        held_out = evaluate(job, progress.state, eval_steps)
        curve.append({"seconds": clock.seconds, "step": log.step, **held_out})
        clock.start()

    train(job, args, progress, train_steps, log, checkpoints, note_held_out)
    clock.pause()
    held_out = evaluate(job, progress.state, eval_steps)
    compile_seconds = sum(train_steps.seconds.values())
    training = log.summary()
    if args.plot:
        draw(log, args.plot)
    return {
        "versions": {"jaxbucket": jb.__version__, "jax": jax.__version__},
        "devices": [str(device) for device in job.mesh.devices.flat],
        "arguments": vars(args),
        "plan": json.loads(job.train.schedule.plan.to_json()),
        "schedule": job.train.schedule.fingerprint,
        "epoch": job.train.report.to_dict(),
        "compile": {
            name: {
                "ahead": ahead[name],
                "seconds": seconds,
                "later": compiles[name] - ahead[name],
            }
            for name, seconds in (
                ("train_step", compile_seconds),
                ("eval_step", sum(eval_steps.seconds.values())),
            )
        },
        "seconds": clock.seconds,
        "train": training,
        "buckets": [use.to_dict() for use in bucket_uses(log.records)],
        "params_digest": params_digest(progress.state),
        "curve": [
            *curve,
            {"seconds": clock.seconds, "step": log.step, **held_out},
        ],
        "held_out": held_out,
    }


def show(job: Job, args: argparse.Namespace) -> None:
    console.print(
        f"{len(job.train.source)} documents to train on, {len(job.held_out.source)} "
        f"held out. {args.policy} on {job.mesh.size} device(s), {args.mode}."
    )
    if args.policy in policies.RESUMABLE:
        console.print("One epoch:")
        console.print(job.train.report)


def resumed(
    progress: Progress, job: Job, args: argparse.Namespace, checkpoints: jb.Checkpoints
) -> Progress:
    """Where to go on, or where to begin if nothing is to be resumed."""
    if not (args.resume or args.resume_changed):
        if checkpoints.latest_step is not None:
            raise ValueError(
                f"`--checkpoint {args.checkpoint}` has a run at step "
                f"{checkpoints.latest_step}: go on with it by `--resume`, or name "
                "another folder."
            )
        return progress
    if checkpoints.latest_step is None:
        console.print(f"Nothing to resume in {args.checkpoint}: beginning at step 0.")
        return progress
    state, position, extra = checkpoints.restore(progress.state)
    if args.resume_changed:
        dataset = jb.batch_dataset(
            job.train.source,
            job.train.schedule.continue_with(position),
            shard=jb.local_rows(job.mesh),
            num_steps=sys.maxsize if args.seconds else args.steps,
        )
    else:
        try:
            dataset = progress.dataset.resume(position)
        except ValueError as error:
            raise ValueError(f"{error} Here that is `--resume-changed`.") from None
    console.print(f"Going on at step {position.step}.")
    return Progress(state, dataset, position.step, extra["digest"], extra["seconds"])


def compile_train(
    train_step: Callable[[jb.TrainState, jb.Batch], Any],
    job: Job,
    args: argparse.Namespace,
    state: jb.TrainState,
) -> jb.CompiledSteps | policies.Jitted:
    if args.policy == "dynamic":
        return policies.Jitted(train_step)
    return jb.compile_steps(train_step, state, job.specs(job.train.schedule.plan))


def make_optimizer(
    args: argparse.Namespace,
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """AdamW, its rate rising, then falling; updates scaled by the batch's size."""
    if args.seconds:
        learning_rate = inverse_sqrt(args.lr)
    else:
        learning_rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=args.lr,
            warmup_steps=max(1, args.steps // 20),
            decay_steps=max(2, args.steps),
            end_value=args.lr / 20,
        )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(learning_rate, b2=0.98, weight_decay=0.05),
        jb.scale_by_batch_size(base_examples=BASE_EXAMPLES, rule="sqrt"),
    )
    return learning_rate, tx


def inverse_sqrt(peak: float) -> optax.Schedule:
    """Needs no end: it falls as the root of the steps (Vaswani et al., 2017)."""

    def learning_rate(step: Any) -> Any:
        relative = jnp.maximum(step, 1) / WARM_UP_STEPS
        return peak * jnp.minimum(relative, jax.lax.rsqrt(relative))

    return learning_rate


def make_loss(*, packed: bool) -> LossFn:
    """Sum of the nats of every real byte, and how many there are."""

    def loss_fn(
        model: Transformer, batch: jb.Batch, keys: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        tokens = batch.features["tokens"].astype(jnp.int32)
        segment_ids = batch.segment_ids["tokens"] if packed else None
        logits = model(tokens, batch.positions["tokens"], keys, segment_ids)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, tokens)
        return jnp.sum(nats * batch.mask), batch.num_tokens

    return loss_fn


def train(
    job: Job,
    args: argparse.Namespace,
    progress: Progress,
    steps: jb.CompiledSteps | policies.Jitted,
    log: TrainingLog,
    checkpoints: jb.Checkpoints | None,
    note_held_out: Callable[[], None],
) -> None:
    """Trains to the end, or until a signal asks to stop; then it exits by itself."""

    def save() -> None:
        if checkpoints:
            checkpoints.save(
                progress.state,
                progress.dataset.position(progress.step),
                {"digest": log.digest, "seconds": log.seconds},
            )

    # Without a checkpoint there is nothing to finish for.
    stop = StopRequest() if checkpoints else None
    with stop or contextlib.nullcontext(), log:
        points = 1
        for batch in jb.prefetch_to_mesh(batches(job, args, progress), job.mesh):
            progress.state, metrics = steps(progress.state, batch)
            progress.step += 1
            # A copy, as the next step takes the state's own buffers.
            metrics["lr_factor"] = jnp.copy(progress.state.opt_state[-1].factor)
            log.add(batch, metrics)
            if progress.step % args.save_every == 0:
                save()
            # At the end and not before a step: one is always done.
            if log.done >= 1 or (stop and stop.signal):
                break
            if log.done * args.points >= points:
                points = int(log.done * args.points) + 1
                log.settle()
                note_held_out()
        log.settle()
        save()
        if stop and stop.signal and checkpoints:
            checkpoints.close()
            exit_by(stop, args, progress.step)


def batches(
    job: Job, args: argparse.Namespace, progress: Progress
) -> Iterable[jb.Batch]:
    if args.policy == "dynamic":
        return policies.dynamic(job.train.source, job.limits, args.seed)
    if args.policy == "grain-pack":
        (bucket,) = job.train.schedule.plan.buckets
        return policies.grain_pack(job.train.source, bucket, job.limits, args.seed)
    return progress.dataset


def exit_by(stop: StopRequest, args: argparse.Namespace, step: int) -> None:
    """Says how to go on; exits as a process does that the signal ended."""
    assert stop.signal is not None
    own = [word for word in sys.argv if word not in ("--resume", "--resume-changed")]
    command = shlex.join(["python", *own, "--resume"])
    console.print(
        f"\nStopped by {stop.signal.name} after step {step}, which is saved in "
        f"{args.checkpoint}. Go on with:\n{command}",
        soft_wrap=True,
    )
    sys.exit(128 + stop.signal)


def evaluate(job: Job, state: jb.TrainState, steps: jb.CompiledSteps) -> dict[str, Any]:
    """Every held-out document once, in source order, through the same shapes."""
    start = time.perf_counter()
    dataset = jb.batch_dataset(
        job.held_out.source, job.held_out.schedule, shard=jb.local_rows(job.mesh)
    )
    totals = Counter[str]()
    for batch in jb.prefetch_to_mesh(dataset, job.mesh):
        totals.update(jax.tree.map(float, steps(state, batch)))
    return {
        "documents": int(totals["num_examples"]),
        "bytes": int(totals["weight"]),
        "bits_per_byte": totals["loss_sum"] / totals["weight"] / math.log(2),
        "evaluation_seconds": time.perf_counter() - start,
    }


def params_digest(state: jb.TrainState) -> str:
    """Names the parameters, bit for bit."""
    digest = hashlib.blake2b(digest_size=16)
    for leaf in jax.tree.leaves(state.params):
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def draw(log: TrainingLog, path: str) -> None:
    """The run, step by step, and what every shape had of it."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure = pyplot.figure(figsize=(8, 9), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=[2, 1])[:, 0]
    plot_run(log.records, above)
    plot_buckets(log.records, below)
    figure.savefig(path, dpi=120)


def to_json(summary: dict[str, Any]) -> str:
    """JSON, which has no NaN: a run that diverged has null there."""

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(finite(summary), indent=2, allow_nan=False)


def in_words(summary: dict[str, Any]) -> str:
    trained, held_out = summary["train"], summary["held_out"]
    shapes = len(summary["buckets"])
    compiled = [
        f"{name} compiled {c['ahead']} times in {c['seconds']:.1f} s, then {c['later']}"
        for name, c in summary["compile"].items()
    ]
    speed = (
        f": {trained['real_tokens_per_second']:,.0f} real tokens/s, "
        f"{trained['padding']:.1%} padding"
        if "padding" in trained
        else ""
    )
    return "\n".join(
        [
            f"\nTrained to step {trained['steps']} in {summary['seconds']:.0f} s"
            f"{speed}.",
            f"{shapes} shapes: {'; '.join(compiled)}.",
            f"Held out: {held_out['bits_per_byte']:.3f} bits per byte over "
            f"{held_out['bytes']:,} bytes of {held_out['documents']} documents.",
        ]
    )


if __name__ == "__main__":
    main()
