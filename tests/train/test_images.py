"""Training on and predicting from images of different sizes, against single images."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.testing.variants import with_more_columns, with_other_padding

SEQUENCES = {"height": ["image"], "width": ["image"]}
PARAMS = {"kernel": np.array([[0.5, -1], [2, 0.25]]), "bias": np.array(0.125)}


def make_images(size: int = 24):
    rng = np.random.default_rng(0)
    shapes = rng.integers(2, 8, (size, 2)).tolist()
    return [{"image": rng.normal(size=shape)} for shape in shapes]


def make_batches(images, **options):
    lengths = jb.measure_lengths(images, sequences=SEQUENCES, progress=False)
    shapes = [(2, {"height": h, "width": w}) for h, w in [(4, 7), (7, 5), (7, 7)]]
    schedule = jb.BatchSchedule(jb.BucketPlan.from_shapes(shapes), lengths)
    mesh = jb.data_mesh(jax.devices()[:1])
    return jb.MeshLoader(images, schedule, mesh, sequences=SEQUENCES, **options)


def pixel_mask(batch):
    height, width = (batch.segment_ids[name] > 0 for name in ("height", "width"))
    return height[:, :, None] & width[:, None, :]


def shifted(image, i, j, xp):
    """Returns images `[..., H, W]` moved by i rows and j columns, filled with zeros."""
    pads = [(0, 0)] * (image.ndim - 2) + [(0, i), (0, j)]
    return xp.pad(image[..., i:, j:], pads)


def convolved(params, image, xp=jnp):
    """Returns a convolution with zeros beyond the image."""
    kernel = params["kernel"]
    terms = [kernel[i, j] * shifted(image, i, j, xp) for i, j in np.ndindex(2, 2)]
    return params["bias"] + sum(terms)


def loss_fn(params, batch, keys):
    mask = pixel_mask(batch)
    x = jnp.where(mask, batch.features["image"], 0)
    return jnp.sum(convolved(params, x) ** 2, where=mask), mask.sum()


def expected_gradients(image):
    """Returns the loss of a single image and its gradients, by hand."""
    y = convolved(PARAMS, image, np)
    kernel = [2 * np.sum(y * shifted(image, i, j, np)) for i, j in np.ndindex(2, 2)]
    return (y**2).sum(), {"bias": 2 * y.sum(), "kernel": np.reshape(kernel, (2, 2))}


def test_the_loss_of_an_epoch_is_that_of_single_images():
    images = make_images()
    with jax.enable_x64(True):
        # The values of padding do not matter.
        batches = make_batches(images, pad_value={"image": np.nan})
        gradients = jax.value_and_grad(lambda *args: loss_fn(*args, None)[0])
        step = jax.jit(gradients)
        got = [step(PARAMS, batch) for batch in batches]
        assert {x.dtype for x in jax.tree.leaves(got)} == {np.dtype(np.float64)}
    want = [expected_gradients(x["image"]) for x in images]
    totals = (jax.tree.map(lambda *x: np.sum(x, axis=0), *y) for y in (got, want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *totals)
    assert step._cache_size() == len(batches.specs) == 3


def test_outputs_for_each_pixel_are_predicted(tmp_path):
    images = make_images()
    batches = make_batches(images)

    def predict_fn(params, batch):
        image = batch.features["image"]
        return {"double": params["two"] * image, "sum": image.sum(axis=(1, 2))}

    state = jb.create_state({"two": np.float32(2)}, mesh=batches.mesh)
    step = jb.make_predict_step(predict_fn, batches.mesh)
    options = {"sequences": {"height": ["double"], "width": ["double"]}}
    outputs = jb.predict(step, state, batches, **options)
    for output, example in zip(outputs, images, strict=True):
        image = example["image"].astype(np.float32)
        np.testing.assert_array_equal(output["double"], 2 * image)
        np.testing.assert_allclose(output["sum"], image.sum(), rtol=1e-4, atol=1e-5)
    swapped = {"width": ["double"], "height": ["double"]}
    with pytest.raises(ValueError, match="`sequences"):
        jb.predict(step, state, batches, sequences=swapped)
    wrong = {"height": ["double", "sum"], "width": ["double"]}
    with pytest.raises(ValueError, match="`sequences"):
        jb.predict(step, state, batches, sequences=wrong)


def collated(height, width):
    """Returns the batch of two images, padded with 0."""
    examples = [{"image": np.ones((2, 3))}, {"image": np.full((3, 4), 2.0)}]
    bucket = jb.Bucket(2, {"height": height, "width": width})
    return jb.data.collate_rows(examples, bucket, sequences=SEQUENCES)


@pytest.mark.parametrize("sequences", [SEQUENCES, None, ["image"]])
@pytest.mark.parametrize("shape", [(4, 5), (4, 4)])
def test_variants_change_the_padding_of_both_axes(shape, sequences):
    batch = collated(*shape)
    if shape == (4, 4) and sequences is not SEQUENCES:
        message = (
            r"\['height', 'width'\] have the same T in this batch, so the order of the "
            r"axes of 'image' is not known. .* `sequences={'height': \['image'\], 'w"
        )
        with pytest.raises(ValueError, match=message):
            with_other_padding(batch, sequences)
        return
    image, real = batch.features["image"], pixel_mask(batch)
    refilled = with_other_padding(batch, sequences).features["image"]
    np.testing.assert_array_equal(refilled[real], image[real])
    assert set(refilled[~real].tolist()) == {1, 2}
    longer = with_more_columns(batch, sequences)
    assert longer.bucket == jb.Bucket(
        2, {x: 2 * t for x, t in batch.bucket.seq_len.items()}
    )
    doubled = np.zeros((2, 2 * shape[0], 2 * shape[1]))
    doubled[:, : shape[0], : shape[1]] = image
    np.testing.assert_array_equal(longer.features["image"], doubled)
