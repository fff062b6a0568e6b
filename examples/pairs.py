"""Trains encoders of queries and documents, so that each query finds its document.

    python examples/pairs.py
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/pairs.py \\
        --mode shard_map

Queries are the first lines of docstrings in Python's standard library, and documents
are the functions without them. The other documents of a batch are the negatives, from
all devices, so the second command prints the losses of the first.
"""

import argparse
import ast
import pathlib
import sysconfig
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxbucket as jb

SCALE = 20.0  # of cosines, as logits
MAX_SEQ_LEN = {"query": 64, "document": 512}


class Encoder(nnx.Module):
    """Bytes `[B, T]` -> unit vectors `[B, width]`."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.conv = nnx.Conv(width, width, 5, rngs=rngs)
        self.head = nnx.Linear(width, width, rngs=rngs)

    def __call__(self, tokens: jax.Array, is_real: jax.Array) -> jax.Array:
        # Neither the convolution nor the mean may see padding.
        x = jnp.where(is_real[..., None], self.embed(tokens), 0)
        x = nnx.gelu(self.conv(x))
        count = jnp.maximum(is_real.sum(axis=1, keepdims=True), 1)
        x = self.head(jnp.sum(x, axis=1, where=is_real[..., None]) / count)
        # The small number keeps the gradients of empty rows finite.
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


class Encoders(nnx.Module):
    """One encoder for each sequence."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.query, self.document = Encoder(width, rngs), Encoder(width, rngs)


def loss_fn(model: Encoders, batch: jb.Batch, keys: jax.Array | None):
    """Returns the sum of the loss in nats over the queries, their number, and hits."""
    is_real = {name: ids > 0 for name, ids in batch.segment_ids.items()}
    queries = model.query(batch.features["query"], is_real["query"])
    documents = model.document(batch.features["document"], is_real["document"])
    is_pair = is_real["query"][:, 0]  # False for an empty row
    # Queries are those of this device, documents those of all devices.
    documents, is_candidate = jb.train.gather_rows((documents, is_pair))
    logits = jnp.where(is_candidate, SCALE * queries @ documents.T, -1e9)
    labels = jb.train.row_numbers(batch)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jnp.sum(logits.argmax(axis=1) == labels, where=is_pair)
    return jnp.sum(nats, where=is_pair), jnp.sum(is_pair), {"hits": hits}


def make_source() -> list[dict[str, np.ndarray]]:
    """Returns queries and documents, as bytes. No query is repeated."""
    documents = {}
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                node.body = node.body[1:] or [ast.Pass()]
                documents[text.split("\n")[0]] = ast.unparse(node)
    return [
        {"query": to_bytes(query), "document": to_bytes(document)}
        for query, document in documents.items()
    ]


def to_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train encoders for retrieval.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--mode", default="jit", help="jit, shard_map or pmap")
    args = parser.parse_args(argv)

    source = make_source()
    lengths = {x: jb.measure_lengths(source, sequences=[x]) for x in MAX_SEQ_LEN}
    # Every batch has 64 pairs, because the loss depends on the number of negatives.
    options = {"min_batch_size": 64, "max_batch_size": 64, "seq_len_multiple": 16}
    limits = {"max_seq_len": MAX_SEQ_LEN, "overlong": "truncate", **options}
    plan = jb.plan_buckets(lengths, num_buckets=5, max_tokens=64 * 576, **limits)
    print(jb.report(plan, lengths))

    mesh, schedule = jb.data_mesh(), jb.BatchSchedule(plan, lengths, seed=0)
    batches = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    tx = optax.adam(3e-3)
    state = jb.create_state(Encoders(args.width, nnx.Rngs(0)), tx, mesh)
    step_fn = jb.make_train_step(loss_fn, tx, mesh, mode=args.mode)
    train_step = jb.compile_steps(step_fn, state, batches.specs)
    recent = []
    for step, batch in enumerate(batches, 1):
        state, metrics = train_step(state, batch)
        recent.append([metrics[x] for x in ("loss_sum", "hits", "weight")])
        if step % max(1, args.steps // 10) == 0:
            loss, hits, count = np.sum(recent, axis=0)
            print(f"step {step:3d}  {loss / count:.3f} nats, {hits / count:.0%} found")
            recent = []


if __name__ == "__main__":
    main()
