"""Trains encoders of queries and documents, so that each query finds its document.

    python examples/pairs.py
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/pairs.py

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


class Encoders(nnx.Module):
    """The bytes `[B, T]` of a sequence -> unit vectors `[B, width]`."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(256, width, rngs=rngs)
        self.conv = nnx.Conv(width, 2 * width, 5, rngs=rngs)
        heads = {x: nnx.Linear(2 * width, width, rngs=rngs) for x in MAX_SEQ_LEN}
        self.heads = nnx.Dict(heads)

    def __call__(self, batch: jb.Batch, name: str) -> jax.Array:
        # Neither the convolution nor the maximum may see padding.
        is_real = batch.segment_ids[name][..., None] > 0
        x = jnp.where(is_real, self.embed(batch.features[name]), 0)
        x = jnp.max(nnx.relu(self.conv(x)), axis=1, where=is_real, initial=0)
        x = self.heads[name](x)
        # The small number keeps the gradient of an empty row finite.
        return x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-6)


def loss_fn(model: Encoders, batch: jb.Batch, keys: jax.Array | None):
    """Returns the sum of the loss in nats over the queries, their number, and hits."""
    is_pair = batch.segment_ids["query"][:, 0] > 0  # False for an empty row
    # With `mode="jit"`, the documents are those of the whole batch.
    queries, documents = model(batch, "query"), model(batch, "document")
    logits = jnp.where(is_pair, SCALE * queries @ documents.T, -1e9)
    labels = jnp.arange(len(queries))
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jnp.sum(logits.argmax(axis=1) == labels, where=is_pair)
    return jnp.sum(nats, where=is_pair), jnp.sum(is_pair), {"hits": hits}


def make_source() -> list[dict[str, np.ndarray]]:
    """Returns pairs of a query and a document, as bytes. Queries are distinct."""
    documents = {}
    for file in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and (text := ast.get_docstring(node)):
                node.body = node.body[1:] or [ast.Pass()]
                documents[text.partition("\n")[0]] = ast.unparse(node)
    pairs = [{"query": x, "document": y} for x, y in documents.items()]
    return [
        {name: np.frombuffer(text.encode(), np.uint8) for name, text in pair.items()}
        for pair in pairs
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train encoders for retrieval.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--num-buckets", type=int, default=5)
    args = parser.parse_args(argv)

    source = make_source()
    lengths = jb.measure_lengths(source, sequences={x: [x] for x in MAX_SEQ_LEN})
    # Every shape has 64 rows, because the loss depends on the number of negatives.
    budget = {"max_tokens": lambda t: 64 * t.total, "batch_size_multiple": 64}
    options = {"max_seq_len": MAX_SEQ_LEN, "overlong": "truncate", **budget}
    options |= {"num_buckets": args.num_buckets, "seq_len_multiple": 16}
    plan = jb.plan_buckets(lengths, **options)
    print(jb.report(plan, lengths))

    mesh, schedule = jb.data_mesh(), jb.BatchSchedule(plan, lengths, seed=0)
    batches = jb.MeshLoader(source, schedule, mesh, num_steps=args.steps)
    model, tx = Encoders(args.width, nnx.Rngs(0)), optax.adam(3e-3)
    state = jb.create_state(model, tx, mesh)
    step_fn = jb.make_train_step(loss_fn, tx, mesh)
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
