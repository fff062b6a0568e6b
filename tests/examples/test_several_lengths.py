"""seq2seq.py, speech_ctc.py and pairs.py, which plan for two lengths per example."""

import re

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import jaxbucket as jb
from jaxbucket.testing import check_loss

SMALL = {
    "seq2seq": ("--steps", "10", "--width", "16", "--num-buckets", "2"),
    "speech_ctc": ("--steps", "20", "--scale", "0.03", "--num-buckets", "2"),
    "pairs": ("--steps", "10", "--width", "16", "--num-buckets", "2"),
}


def run(module, name: str, capsys: pytest.CaptureFixture[str], *options: str):
    """Returns the losses that an example prints, and the number of compilations."""
    with jb.compile.count_compiles() as compiles:
        module.main([*SMALL[name], *options])
    printed = capsys.readouterr().out
    losses = re.findall(r"^step +\d+  ([\d.]+)", printed, re.MULTILINE)
    # The lines of the report: B, the T of both sequences, and numbers of examples.
    shapes = re.findall(r"^ *\d+ +\d+ +\d+ +[\d,]+ +\d+ +\d+ ", printed, re.MULTILINE)
    return list(map(float, losses)), compiles["train_step"], len(shapes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SMALL)
def test_learns_with_one_compilation_per_shape(example, capsys, name):
    losses, num_compiles, num_shapes = run(example(name), name, capsys)
    assert len(losses) == 10
    assert np.isfinite(losses).all() and losses[-1] < losses[0]
    assert num_compiles == num_shapes > 1


def text_batch(names: tuple[str, str], *, packed: bool = False) -> jb.Batch:
    """Returns a batch of pairs of bytes, in rows with padding, the last one empty."""
    rng = np.random.default_rng(0)
    pairs = [
        {
            x: rng.integers(97, 123, n, np.uint8)
            for x, n in zip(names, lens, strict=True)
        }
        for lens in ((5, 9), (12, 3), (7, 7), (2, 14))
    ]
    bucket = jb.Bucket(4, {names[0]: 24, names[1]: 16})
    if packed:
        rows = [pairs[:2], pairs[2:3], pairs[3:], None]
        return jb.data.collate_rows(rows, bucket, max_segments=2)
    return jb.data.collate_rows([*pairs[:3], None], bucket)


@pytest.mark.exhaustive
def test_padding_does_not_count_in_seq2seq(example):
    module = example("seq2seq")
    model = module.EncoderDecoder(16, nnx.Rngs(0))
    batch = text_batch(("source", "target"), packed=True)
    check_loss(module.loss_fn, model, batch)


@pytest.mark.exhaustive
def test_padding_does_not_count_in_pairs(example):
    module = example("pairs")
    model = module.Encoders(16, nnx.Rngs(0))
    batch = text_batch(("query", "document"))
    check_loss(module.loss_fn, model, batch, mode="jit")


@pytest.mark.exhaustive
def test_padding_does_not_count_in_speech(example):
    module = example("speech_ctc")
    model = module.Recognizer(16, nnx.Rngs(0))
    source = module.make_source(3, 0.05)
    bucket = jb.Bucket(4, {"frames": 96, "transcript": 24})
    batch = jb.data.collate_rows([*source, None], bucket)
    check_loss(module.loss_fn, model, batch)


@pytest.mark.exhaustive
def test_speech_is_masked_alike_in_any_shape_and_equals_examples_one_by_one(example):
    module = example("speech_ctc")
    model = module.Recognizer(8, nnx.Rngs(0))
    source = module.make_source(3, 0.05)
    keys = jb.train.row_keys(0, 0, 4)
    bucket = jb.Bucket(4, {"frames": 112, "transcript": 28})
    batch = jb.data.collate_rows([*source, None], bucket)
    total, weight = module.loss_fn(model, batch, keys)
    assert weight == sum(len(x["transcript"]) for x in source)
    losses = []
    for key, x in zip(keys, source, strict=False):
        num_frames = len(x["frames"])
        # By hand: no padding but what a multiple of 4 frames needs.
        frames = module.spec_augment(x["frames"], num_frames, key)
        assert 0 < np.mean(frames == 0) < 0.6
        frames = np.pad(frames, ((0, -num_frames % 4), (0, 0)))
        is_real = np.arange(len(frames)) < num_frames
        logits = model(frames[None], is_real[None])
        label = x["transcript"][None]
        paddings = np.zeros(logits.shape[:2]), np.zeros(label.shape)
        losses.append(optax.ctc_loss(logits, paddings[0], label, paddings[1]))
    np.testing.assert_allclose(total, np.sum(losses), rtol=1e-5)
    # Other keys mask other frames, and evaluation masks none.
    assert total != module.loss_fn(model, batch, jb.train.row_keys(1, 0, 4))[0]
    assert jax.numpy.isfinite(module.loss_fn(model, batch, None)[0])
