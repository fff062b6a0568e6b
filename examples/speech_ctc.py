"""Trains a speech recognizer with CTC on frames `[T, 80]` and their transcripts.

    python examples/speech_ctc.py

The frames are made up, but have lengths like those of LibriSpeech, times `--scale`.
"""

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxbucket as jb

BANDS, LETTERS = 80, 27  # The letters are 1 to 27, because 0 is the blank of CTC.


class Recognizer(nnx.Module):
    """Frames `[B, T, 80]` -> logits `[B, T / 4, 28]` of the letters and the blank."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.halve = nnx.Conv(BANDS, width, 3, strides=2, rngs=rngs)
        self.quarter = nnx.Conv(width, width, 3, strides=2, rngs=rngs)
        self.mix = nnx.Conv(width, width, 5, rngs=rngs)
        self.head = nnx.Linear(width, LETTERS + 1, rngs=rngs)

    def __call__(self, frames: jax.Array, is_real: jax.Array) -> jax.Array:
        # A convolution reads padding, which the bias of the one before made nonzero.
        x = jnp.where(is_real[..., None], frames, 0)
        x = jnp.where(is_real[:, ::2, None], nnx.gelu(self.halve(x)), 0)
        x = jnp.where(is_real[:, ::4, None], nnx.gelu(self.quarter(x)), 0)
        return self.head(x + nnx.gelu(self.mix(x)))


def spec_augment(frames: jax.Array, length: jax.Array, key: jax.Array) -> jax.Array:
    """Sets two spans of time and two of bands to 0 in the frames `[T, 80]` of a row.

    They depend on the row's key and length, but not on T, and so not on its bucket.
    """
    start, size = jax.random.uniform(key, (2, 2, 2, 1))
    size *= jnp.array([0.1, 0.2])[:, None, None]  # at most, of the time and the bands
    start *= 1 - size
    places = jnp.arange(len(frames)) / jnp.maximum(length, 1), jnp.arange(BANDS) / BANDS
    times, bands = (
        jnp.any((low <= place) & (place < high), axis=0)
        for low, place, high in zip(start, places, start + size, strict=True)
    )
    return jnp.where(times[:, None] | bands, 0, frames)


def loss_fn(model: Recognizer, batch: jb.Batch, keys: jax.Array | None):
    """Returns the sum of the loss in nats, and the number of letters."""
    is_real, is_letter = (batch.segment_ids[x] > 0 for x in ("frames", "transcript"))
    frames, letters = (batch.features[x] for x in ("frames", "transcript"))
    if keys is not None:  # in training
        frames = jax.vmap(spec_augment)(frames, is_real.sum(axis=1), keys)
    paddings = [1.0 - x for x in (is_real[:, ::4], is_letter)]
    nats = optax.ctc_loss(model(frames, is_real), paddings[0], letters, paddings[1])
    # `ctc_loss` does not promise 0 for an empty row.
    return jnp.sum(nats, where=is_real[:, 0]), jnp.sum(is_letter)


def make_source(num_examples: int, scale: float) -> list[dict[str, np.ndarray]]:
    """Returns utterances: 72% of them last 14.3 +- 1.2 s, the others 2 to 14 s.

    LibriSpeech is cut at the first silence after about 14 s. A second has 100 frames,
    and 14.7 letters times exp(0.15 z) for a normal z. `scale` multiplies durations.
    """
    source, rng = [], np.random.default_rng(0)
    spectra = rng.standard_normal((LETTERS + 1, BANDS))  # of letters, without noise
    for _ in range(num_examples):
        is_long, speed = rng.random() < 0.72, 14.7 * np.exp(0.15 * rng.normal())
        seconds = scale * (rng.normal(14.3, 1.2) if is_long else rng.uniform(2, 14))
        letters = rng.integers(1, LETTERS + 1, 1 + int(seconds * speed), np.int32)
        # CTC needs a position for each letter, and one more between equal letters.
        num_positions = len(letters) + np.count_nonzero(letters[1:] == letters[:-1])
        num_frames = max(int(100 * seconds), 4 * num_positions)
        spoken = letters[np.arange(num_frames) * len(letters) // num_frames]
        frames = spectra[spoken] + rng.standard_normal((num_frames, BANDS))
        source.append({"frames": frames.astype(np.float32), "transcript": letters})
    return source


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a speech recognizer with CTC.")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--num-buckets", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.25, help="of all durations")
    args = parser.parse_args(argv)

    source = make_source(1000, args.scale)
    lengths = jb.measure_lengths(source, sequences={x: [x] for x in source[0]})
    # Convolutions of stride 4 start at the same frames if T is a multiple of 4.
    multiples = {"seq_len_multiple": {"frames": 16, "transcript": 4}}
    options = {**multiples, "batch_size_multiple": 8, "max_tokens": 16_384}
    plan = jb.plan_buckets(lengths, num_buckets=args.num_buckets, **options)
    print(jb.report(plan, lengths))

    mesh, schedule = jb.data_mesh(), jb.BatchSchedule(plan, lengths, seed=0)
    batches = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    tx = optax.adam(3e-3)
    state = jb.create_state(Recognizer(128, nnx.Rngs(0)), tx, mesh)
    step_fn = jb.make_train_step(loss_fn, tx, mesh)
    train_step = jb.compile_steps(step_fn, state, batches.specs)
    losses = []
    for step, batch in enumerate(batches, 1):
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
        if step % max(1, args.steps // 10) == 0:  # a loss depends on its bucket
            print(f"step {step:3d}  {np.mean(losses):.3f} nats per letter")
            losses = []


if __name__ == "__main__":
    main()
