"""Trains an encoder-decoder transformer on pairs of texts, in bytes.

    python examples/seq2seq.py

The source is the signature of a function in Python's standard library, the target is
the first paragraph of its docstring. Their lengths differ, so every shape has two.
"""

import argparse
import ast
import pathlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxbucket as jb

END, BEGIN, VOCABULARY = 0, 256, 257  # END follows every text, BEGIN precedes targets.
MAX_SEQ_LEN = {"source": 128, "target": 256}


class Block(nnx.Module):
    """Self-attention, attention to an encoded source if there is one, and an MLP."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norms = nnx.List(nnx.RMSNorm(width, rngs=rngs) for _ in range(3))
        self.attentions = nnx.List(
            nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs) for _ in range(2)
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask, source=None, source_mask=None) -> jax.Array:
        x += self.attentions[0](self.norms[0](x), mask=mask)
        if source is not None:
            x += self.attentions[1](self.norms[1](x), source, mask=source_mask)
        return x + self.down(nnx.gelu(self.up(self.norms[2](x))))


class EncoderDecoder(nnx.Module):
    """Sources `[B, S]`, inputs `[B, T]` -> logits `[B, T, 257]` of the targets."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.place = nnx.Embed(max(MAX_SEQ_LEN.values()), width, rngs=rngs)
        self.encoder, self.decoder = Block(width, rngs), Block(width, rngs)
        self.head = nnx.Linear(width, VOCABULARY, rngs=rngs)

    def __call__(self, batch: jb.Batch, inputs: jax.Array) -> jax.Array:
        # The masks separate the pairs of packed rows, too.
        source_ids, target_ids = (batch.segment_ids[x] for x in ("source", "target"))
        across = jb.attention.attention_mask(target_ids, key_segment_ids=source_ids)
        places = batch.positions
        x = self.embed(batch.features["source"]) + self.place(places["source"])
        source = self.encoder(x, jb.attention.attention_mask(source_ids))
        causal = jb.attention.attention_mask(target_ids, places["target"])
        x = self.embed(inputs) + self.place(places["target"])
        return self.head(self.decoder(x, causal, source, across))


def loss_fn(model: EncoderDecoder, batch: jb.Batch, keys: jax.Array | None):
    """Returns the sum of the loss in bits over all target bytes, and their number."""
    inputs, targets, weights = jb.next_tokens(batch, "target", bos_token=BEGIN)
    logits = model(batch, inputs)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(nats * weights) / np.log(2), jnp.sum(weights)


def make_source() -> list[dict[str, np.ndarray]]:
    """Returns the signature and the documentation of functions, as bytes."""
    source = []
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                signature = f"{node.name}({ast.unparse(node.args)})"
                pair = {"source": signature, "target": text.partition("\n\n")[0]}
                encoded = {x: [*text.encode(), END] for x, text in pair.items()}
                source.append({x: np.array(y, np.uint8) for x, y in encoded.items()})
    return source


def flops(width: int) -> Callable[[int, Mapping[str, int]], float]:
    """Returns the operations of a train step of one layer of each width, by shape."""

    def cost_fn(batch_size: int, seq_lens: Mapping[str, int]) -> float:
        s, t = seq_lens["source"], seq_lens["target"]
        # Matrices and their backward passes; projections of cross attention.
        dense = 84 * (s + t) * width**2
        attention = 12 * (s * s + t * t + s * t) * width
        return batch_size * (dense + attention + 6 * t * VOCABULARY * width)

    return cost_fn


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Predict docstrings of signatures.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-buckets", type=int, default=5)
    args = parser.parse_args(argv)

    source, limits = make_source(), {"max_tokens": 4096, "max_seq_len": MAX_SEQ_LEN}
    lengths = jb.measure_lengths(source, sequences={x: [x] for x in MAX_SEQ_LEN})
    cost_fn = flops(args.width)
    multiples = {"batch_size_multiple": 8, "seq_len_multiple": 8}
    options = {**limits, **multiples, "overlong": "truncate", "cost_fn": cost_fn}
    plan = jb.plan_buckets(lengths, num_buckets=args.num_buckets, **options)
    print(jb.report(plan, lengths))

    mesh, schedule = jb.data_mesh(), jb.BatchSchedule(plan, lengths, seed=0)
    batches = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    tx = optax.adamw(optax.warmup_constant_schedule(0, 3e-3, warmup_steps=20))
    state = jb.create_state(EncoderDecoder(args.width, nnx.Rngs(0)), tx, mesh)
    step_fn = jb.make_train_step(loss_fn, tx, mesh)
    train_step = jb.compile_steps(step_fn, state, batches.specs)
    losses = []
    for step, batch in enumerate(batches, 1):
        state, metrics = train_step(state, batch)
        losses.append(metrics["loss"])
        if step % max(1, args.steps // 10) == 0:  # a loss depends on its bucket
            print(f"step {step:3d}  {np.mean(losses):.3f} bits per byte")
            losses = []


if __name__ == "__main__":
    main()
