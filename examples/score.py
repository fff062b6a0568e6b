"""Scores every example of a dataset, and writes the scores into a file in its order.

    python examples/score.py
    python examples/score.py --output scores.npy

The data are the docstrings of numpy. A bigram model of their characters says how
surprising each docstring is. Examples of similar length are scored together, in a few
shapes, but the file has the scores in the order of the source.
"""

import argparse
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxbucket as jb

VOCABULARY = 129
START = 128  # The token before the first character.


def docstrings() -> dict[str, str]:
    """Returns the docstring of numpy's functions and classes, by name."""
    texts = {name: value.__doc__ for name, value in vars(np).items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def bigram_model(source: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Returns the log probability of each character after each other one."""
    counts = np.full((VOCABULARY, VOCABULARY), 0.01)
    for example in source:
        tokens = example["tokens"]
        np.add.at(counts, (np.append(START, tokens[:-1]), tokens), 1)
    logits = np.log(counts / counts.sum(axis=1, keepdims=True))
    return {"logits": logits.astype(np.float32)}


def predict_fn(model: dict[str, jax.Array], batch: jb.Batch) -> dict[str, jax.Array]:
    """Returns two outputs: a number per character, and a number per example."""
    inputs, targets, weights = jb.next_tokens(batch, "tokens", bos_token=START)
    logits = model["logits"][inputs]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights
    mean = jnp.sum(nats, axis=1) / jnp.maximum(jnp.sum(weights, axis=1), 1)
    return {"nats": nats, "mean": mean}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Score the docstrings of numpy.")
    parser.add_argument("--output", default="scores.npy", help="the file to write")
    args = parser.parse_args(argv)

    texts = docstrings()
    source = [
        {"tokens": np.frombuffer(text.encode("ascii", "replace"), np.uint8)}
        for text in texts.values()
    ]
    mesh = jb.data_mesh()
    lengths = jb.measure_lengths(source)
    plan = jb.plan_buckets(
        lengths, max_tokens=131_072, num_buckets=6, batch_size_multiple=8
    )
    print(jb.report(plan, lengths).summary)

    # Exactly one epoch, so every example is scored once.
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, lengths), mesh)
    state = jb.create_state(bigram_model(source), mesh=mesh)
    predict_step = jb.make_predict_step(predict_fn, mesh)
    steps = jb.compile_steps(predict_step, state, batches.specs)
    outputs = jb.predict(steps, state, batches, sequences=["nats"])

    # "nats" has a number for each character of an example, without padding.
    scores = np.array([output["mean"] for output in outputs if output])
    np.save(args.output, scores)
    order = np.argsort(scores)
    names = list(texts)
    print(f"{len(scores)} scores in {args.output}, in nats per character.")
    print(f"least surprising: {names[order[0]]} ({scores[order[0]]:.2f})")
    print(f"most surprising: {names[order[-1]]} ({scores[order[-1]]:.2f})")


if __name__ == "__main__":
    main()
