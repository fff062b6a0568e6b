"""Attention over rows that several devices share equals that over whole rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb
from jaxbucket.attention.row_layout import RowLayout, row_layout
from jaxbucket.data.collate import row_segments

EXHAUSTIVE = pytest.mark.exhaustive
IDS = row_segments(np.array([[20, 30], [40, 24], [64, 0], [0, 0]]), 64)[0]
CUTS = {
    1: (("data", "row1", "row2"), ()),
    2: (("data", "row1"), ("row2",)),
    4: (("data",), ("row1", "row2")),
}


def heads(num_heads, key_heads, seq_len=64):
    rng = np.random.default_rng(0)
    counts = (num_heads, key_heads, key_heads)
    return [rng.standard_normal((4, seq_len, count, 8), np.float32) for count in counts]


def results(attend, arrays):
    """Returns the output, and the gradients of a loss to query, key and value."""

    def loss(*arrays):
        output = attend(*arrays)
        return jnp.sum(output**2), output

    grads, output = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return output, *grads


def on_devices(attend, cut, arrays):
    """Returns the results on four devices, of which `cut` share a row."""
    mesh = jb.data_mesh(jax.devices()[:4], max_row_shards=4)
    layout = RowLayout(mesh, *CUTS[cut])
    sharding = NamedSharding(mesh, PartitionSpec(layout.rows, layout.columns))

    def with_layout(*arrays):
        with row_layout(layout):
            return attend(*arrays)

    return results(with_layout, jax.device_put(arrays, sharding))


def assert_close(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("cut", "key_heads", "is_causal"),
    [
        (2, 1, True),
        (4, 2, False),
        *(pytest.param(x, 4, True, marks=EXHAUSTIVE) for x in (1, 4)),
    ],
)
def test_segment_attention_of_cut_rows(cut, key_heads, is_causal):
    attend = functools.partial(jb.segment_attention, is_causal=is_causal)
    arrays = (*heads(4, key_heads), IDS)
    expected = results(attend, [*map(jnp.asarray, arrays)])
    assert_close(on_devices(attend, cut, arrays), expected)


def test_attention_of_users_gets_whole_rows_and_a_share_of_the_heads():
    shapes = []

    def attend(query, key, value, ids):
        shapes.append((query.shape, key.shape, ids.shape))
        mask = jb.attention.attention_mask(ids)
        output = jax.nn.dot_product_attention(query, key, value, mask=mask)
        return jnp.where(ids[..., None, None] > 0, output, 0)

    arrays = (*heads(8, 2), IDS)
    expected = results(attend, [*map(jnp.asarray, arrays)])
    exchanged = jb.attention.exchange_heads(attend)
    shapes.clear()
    assert_close(on_devices(exchanged, 4, arrays), expected)
    # Key heads are repeated to the number of devices.
    assert set(shapes) == {((4, 64, 2, 8), (4, 64, 1, 8), (4, 64))}


def test_arrays_that_are_not_divided_as_the_batch():
    # A single row, as under `jax.vmap`, and a sequence that four devices cannot share.
    arrays = [x[:1, :63] for x in (*heads(4, 4), IDS)]
    expected = results(jb.segment_attention, [*map(jnp.asarray, arrays)])
    layout = RowLayout(jb.data_mesh(jax.devices()[:4], max_row_shards=4), *CUTS[4])
    with row_layout(layout):
        assert_close(results(jb.segment_attention, arrays), expected)


def test_inside_of_a_shard_map_of_the_model():
    # So many rows that those of one device look like a batch.
    arrays = [np.tile(x, (4,) + (1,) * (x.ndim - 1)) for x in (*heads(4, 4), IDS)]
    expected = results(jb.segment_attention, [*map(jnp.asarray, arrays)])
    rows = PartitionSpec(CUTS[1][0])

    def attend(*arrays):
        return jax.shard_map(
            jb.segment_attention,
            mesh=jb.data_mesh(jax.devices()[:4], max_row_shards=4),
            in_specs=rows,
            out_specs=rows,
            check_vma=False,
        )(*arrays)

    assert_close(on_devices(attend, 1, arrays), expected)


def test_too_few_heads_are_refused():
    with pytest.raises(ValueError, match="`query` has 2 heads"):
        on_devices(jb.segment_attention, 4, (*heads(2, 2), IDS))


@pytest.mark.parametrize(
    ("shape", "names", "spec"),
    [
        pytest.param((4,), ("fsdp",), PartitionSpec("fsdp"), marks=EXHAUSTIVE),
        ((2, 2), ("data", "seq"), PartitionSpec("data", "seq")),
        ((2, 2), ("data", "tensor"), PartitionSpec("data", None, "tensor")),
    ],
)
def test_meshes_with_explicit_axes(shape, names, spec):
    arrays = (*heads(4, 4), IDS)
    expected = results(jb.segment_attention, [*map(jnp.asarray, arrays)])
    mesh = jax.make_mesh(
        shape, names, axis_types=(jax.sharding.AxisType.Explicit,) * len(names)
    )
    specs = [*[spec] * 3, PartitionSpec(*spec[:2])]
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s))
            for x, s in zip(arrays, specs, strict=True)
        ]
        actual = results(jb.segment_attention, placed)
    assert tuple(actual[0].sharding.spec[: len(spec)]) == tuple(spec)
    assert_close(actual, expected)
