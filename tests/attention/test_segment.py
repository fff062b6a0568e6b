"""Attention within segments against `jax.nn.dot_product_attention` with a mask."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxbucket as jb
from jaxbucket.attention import blockwise, splash
from jaxbucket.data.segments import row_segments


def packed_rows(seed, size=3, seq_len=96, longest=60):
    """`[B, T]` segment ids of random lengths that were packed, the last row empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 20, 60), min(longest, seq_len))
    packing = jb.packing.pack(lengths, seq_len)
    rows = rng.permutation(packing.num_rows)[: size - 1]
    slots = np.zeros((size, int(packing.row_segments.max())), np.int64)
    for place, row in enumerate(rows):
        own = packing.slots(int(row))
        slots[place, : len(own)] = rng.permutation(own)
    return jnp.asarray(row_segments(slots, seq_len)[0])


def random_heads(ids, *, heads=2, of_keys=None, width=8, dtype=jnp.float32, seed=0):
    """Query, key and value."""
    keys = jax.random.split(jax.random.key(seed), 3)
    counts = (heads, of_keys or heads, of_keys or heads)
    return tuple(
        jax.random.normal(key, (*ids.shape, count, width)).astype(dtype)
        for key, count in zip(keys, counts, strict=True)
    )


def with_mask(query, key, value, ids, *, is_causal=False, scale=None):
    """What it must be, padding left out."""
    places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jb.attention.attention_mask(ids, places if is_causal else None)
    found = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)
    return jnp.where(ids[..., None, None] > 0, found, 0)


def found_and_changes(attend, ids, *heads):
    """What it gives, and what a loss of it gives back to query, key and value."""
    wanted = jax.random.normal(jax.random.key(9), heads[0].shape)

    def loss(*heads):
        found = attend(*heads, ids)
        return jnp.sum(found.astype(jnp.float32) * wanted), found

    changes, found = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*heads)
    return (found, *changes)


def assert_near(found, want, tolerance):
    off = []
    for a, b in zip(found, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        off.append((np.linalg.norm(a - b), np.linalg.norm(b)))
    # Of the values, and of all gradients: those of queries with one key each are 0.
    for own in (off[:1], off[1:]):
        distance, size = np.linalg.norm(own, axis=0)
        assert size > 0 and distance < tolerance * size


@pytest.mark.parametrize(
    ("seed", "is_causal", "seq_len"),
    # T of one block, of several, and of none exactly.
    [(0, True, 8), (1, False, 70), (2, True, 130), (3, False, 256)],
)
def test_it_is_attention_with_a_mask(seed, is_causal, seq_len):
    ids = packed_rows(seed, seq_len=seq_len)
    heads = random_heads(ids, heads=4, of_keys=[4, 2, 1][seed % 3], seed=seed)
    options = {"is_causal": is_causal, "scale": [None, 0.7][seed % 2]}
    want = found_and_changes(functools.partial(with_mask, **options), ids, *heads)
    attend = functools.partial(jb.segment_attention, **options)
    found = found_and_changes(attend, ids, *heads)
    assert_near(found, want, 1e-5)
    # Padding has nothing, and gives nothing.
    for x in found:
        assert not x[np.asarray(ids) == 0].any()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_blocks_of_any_size_give_the_same(seed, is_causal):
    rng = np.random.default_rng(seed)
    ids = packed_rows(seed, seq_len=96, longest=int(rng.choice([1, 10, 96])))
    heads = random_heads(ids, heads=2, of_keys=1, seed=seed)
    run = _compiled([40, 16][is_causal], is_causal)
    found, want = run(ids, *heads)
    assert_near(found, want, 1e-5)


@functools.cache
def _compiled(block, is_causal):
    def in_blocks(query, key, value, ids):
        found = blockwise.attend(
            query, key, value, ids, is_causal=is_causal, scale=8**-0.5, block=block
        )
        return jnp.where(ids[..., None, None] > 0, found, 0)

    by_mask = functools.partial(with_mask, is_causal=is_causal)
    return jax.jit(
        lambda ids, *heads: [
            found_and_changes(x, ids, *heads) for x in (in_blocks, by_mask)
        ]
    )


def test_numbers_of_half_the_size_are_near():
    ids = packed_rows(0, seq_len=200)
    heads = random_heads(ids, dtype=jnp.bfloat16)
    attend = functools.partial(jb.segment_attention, is_causal=True)
    found = found_and_changes(attend, ids, *heads)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    exact = [x.astype(jnp.float32) for x in heads]
    by_mask = functools.partial(with_mask, is_causal=True)
    assert_near(found, found_and_changes(by_mask, ids, *exact), 0.01)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_of_padding_are_zero_and_change_nothing(is_causal):
    ids = jnp.zeros((2, 40), jnp.int32)
    heads = random_heads(ids)
    attend = functools.partial(jb.segment_attention, is_causal=is_causal)
    for x in found_and_changes(attend, ids, *heads):
        assert not np.asarray(x).any()


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_neighbour_changes_nothing(is_causal):
    ids = jnp.repeat(jnp.array([[1, 2, 3, 0]]), jnp.array([50, 90, 100, 20]), axis=1)
    heads = random_heads(ids)
    attend = functools.partial(jb.segment_attention, is_causal=is_causal)
    own = np.asarray(ids)[0] == 2

    @jax.jit
    def of_segment(heads):
        found, pullback = jax.vjp(lambda *x: attend(*x, ids), *heads)
        changes = pullback(jnp.where((ids == 2)[..., None, None], found, 0))
        return [x[0, own] for x in (found, *changes)]

    others = ~own[None, :, None, None]
    loud = tuple(jnp.where(others, 100 * x + 3, x) for x in heads)
    for a, b in zip(of_segment(heads), of_segment(loud), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(of_segment(tuple(2 * x for x in heads))[0]).max() > 0


def test_keys_that_nothing_sees_are_not_looked_at():
    # What is not a number spoils whatever is multiplied by it, be it by zero.
    ids = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([16, 16, 16]), axis=1)
    query, key, value = random_heads(ids)
    value = value.at[:, :16].set(jnp.nan)
    found = blockwise.attend(
        query, key, value, ids, is_causal=True, scale=1.0, block=16
    )
    assert np.isfinite(found[:, 16:]).all() and np.isnan(found[:, :16]).all()


def test_what_it_holds_grows_with_the_row_and_not_with_its_square():
    def held(attend, seq_len):
        ids = jax.ShapeDtypeStruct((2, seq_len), jnp.int32)
        heads = [jax.ShapeDtypeStruct((2, seq_len, 2, 8), jnp.float32)] * 3
        attend = functools.partial(attend, is_causal=True)
        run = jax.jit(functools.partial(found_and_changes, attend))
        compiled = run.lower(ids, *heads).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [held(jb.segment_attention, seq_len) for seq_len in (1024, 2048)]
    # The logits of all heads, where there is a mask.
    assert held(with_mask, 1024) >= 4 * 2 * 2 * 1024**2
    assert sizes[1] < 2.2 * sizes[0]
    # Not even one number for each pair of one head.
    assert sizes[1] < 4 * 2 * 2048**2 / 4


def test_devices_have_rows_of_their_own():
    mesh = jb.data_mesh()
    ids = packed_rows(3, size=8, seq_len=40)
    arrays = (*random_heads(ids), ids)
    attend = functools.partial(jb.segment_attention, is_causal=True)
    rows = jax.sharding.NamedSharding(mesh, P(mesh.axis_names[0]))
    of_own_rows = jax.shard_map(
        attend, mesh=mesh, in_specs=rows.spec, out_specs=rows.spec, check_vma=False
    )
    row_by_row = jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
    want = jax.jit(attend)(*arrays)
    for over, given in (
        (attend, jax.device_put(arrays, rows)),
        (of_own_rows, jax.device_put(arrays, rows)),
        (row_by_row, arrays),
    ):
        np.testing.assert_allclose(jax.jit(over)(*given), want, atol=1e-6)


# The kernel for TPUs


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_kernel_gives_the_same(is_causal):
    ids = packed_rows(1, size=2, seq_len=200, longest=150)
    heads = random_heads(ids, heads=2, of_keys=1, width=32)

    def by_kernel(query, key, value, ids):
        found = splash.attend(
            *(query, key, value, ids),
            is_causal=is_causal,
            scale=32**-0.5,
            interpret=True,
        )
        return jnp.where(ids[..., None, None] > 0, found, 0)

    want = found_and_changes(
        functools.partial(with_mask, is_causal=is_causal), ids, *heads
    )
    assert_near(found_and_changes(by_kernel, ids, *heads), want, 1e-5)


KERNEL = "tpu_custom_call"


def lowered(attend, platform):
    """The program of a gradient for a platform that is not here."""
    ids = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    query = jax.ShapeDtypeStruct((8, 256, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((8, 256, 2, 64), jnp.bfloat16)
    run = jax.jit(functools.partial(found_and_changes, attend))
    traced = run.trace(ids, query, key, key)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def of_own_rows(attend, platform):
    """Each device of a mesh that is not here has rows of its own."""
    here = jb.data_mesh().abstract_mesh.abstract_device
    there = dataclasses.replace(here, platform=platform)
    mesh = jax.sharding.AbstractMesh(
        (4,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=there
    )
    spec = P("data")
    return jax.shard_map(
        attend, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )


@pytest.mark.parametrize("how", ["shard_map", "pmap"])
def test_grouped_heads_of_64_bits_run_on_every_mesh(how):
    with jax.enable_x64(True):
        ids = packed_rows(2, size=4, seq_len=16, longest=9)
        heads = random_heads(ids, heads=2, of_keys=1, width=8)
        heads = tuple(x.astype(jnp.float64) for x in heads)
        mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
        spec = P("data")
        if how == "shard_map":
            run = jax.jit(
                jax.shard_map(
                    jb.segment_attention,
                    mesh=mesh,
                    in_specs=spec,
                    out_specs=spec,
                    check_vma=False,
                )
            )
            found = run(*heads, ids)
        else:
            cut = [x.reshape(4, 1, *x.shape[1:]) for x in (*heads, ids)]
            found = jax.pmap(jb.segment_attention)(*cut).reshape(heads[0].shape)
        # On one device; `jax.nn.dot_product_attention` has weights of 32 bits.
        want = jb.segment_attention(*heads, ids)
        np.testing.assert_allclose(found, want, atol=1e-12)


def test_a_scale_may_be_learned():
    ids = packed_rows(2, size=2, seq_len=16, longest=9)
    heads = random_heads(ids)

    def total(scale, attend):
        return jnp.sum(attend(*heads, ids, scale=scale) ** 2)

    found, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, attend=attend)))(0.7)
        for attend in (jb.segment_attention, with_mask)
    )
    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_a_scale_of_numpy_changes_no_dtype():
    ids = packed_rows(2, size=2, seq_len=16, longest=9)
    heads = tuple(x.astype(jnp.bfloat16) for x in random_heads(ids, width=32))
    scale = 1 / np.sqrt(32)
    attend = functools.partial(jb.segment_attention, scale=scale)
    found = attend(*heads, ids)
    assert found.dtype == jnp.bfloat16
    products = [
        x.aval.dtype
        for equation in jax.make_jaxpr(attend)(*heads, ids).eqns
        for x in equation.invars[:3]
        if x.aval.ndim == 5
    ]
    assert jnp.float32 not in products
    # What is rounded is no more than what a mask has.
    exact = [x.astype(jnp.float32) for x in heads]
    want = with_mask(*exact, ids, is_causal=False)
    with jax.numpy_dtype_promotion("standard"):
        masked = with_mask(*heads, ids, is_causal=False)
    errors = [
        jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32) - want)))
        for x in (found, masked)
    ]
    assert errors[0] < 1.2 * errors[1]


def test_platforms_have_what_they_can_run():
    attend = functools.partial(jb.segment_attention, is_causal=True)
    # Of several devices the compiler would have to cut up a kernel, which it cannot.
    for platform in ("cuda", "rocm", "tpu", "cpu"):
        assert KERNEL not in lowered(attend, platform)
    for platform in ("cuda", "rocm", "cpu"):
        assert KERNEL not in lowered(of_own_rows(attend, platform), platform)
    assert lowered(of_own_rows(attend, "tpu"), "tpu").count(KERNEL) >= 3
    named = functools.partial(attend, implementation="splash")
    assert lowered(named, "tpu").count(KERNEL) >= 3


# Refusals


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"query": (2, 8, 16)}, r"`query` has shape \(2, 8, 16\): pass \[B, T, N, H\]"),
        ({"key": (2, 9, 4, 4)}, r"`key` has shape \(2, 9, 4, 4\): with `query` of"),
        ({"value": (2, 8, 4, 5)}, r"`value` has shape .* \[2, 8, heads, 4\]"),
        ({"key": (2, 8, 2, 4)}, "`key` has 2 heads and `value` 4: pass as many of"),
        (
            {"key": (2, 8, 3, 4), "value": (2, 8, 3, 4)},
            "`key` has 3 heads and `value` 3: .* a divisor of the 4 of `query`",
        ),
        ({"segment_ids": (2, 9)}, r"`segment_ids` has shape \(2, 9\): pass one"),
    ],
)
def test_shapes_that_do_not_go_together_are_refused(changed, message):
    shapes = dict.fromkeys(("query", "key", "value"), (2, 8, 4, 4))
    shapes = {**shapes, "segment_ids": (2, 8), **changed}
    arrays = {
        name: jnp.ones(shape, jnp.int32 if name == "segment_ids" else jnp.float32)
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        jb.segment_attention(**arrays)


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        (("f4", "f2", "f4", "i4"), "`key` is float16 and `query` float32: cast one"),
        (("i4", "i4", "i4", "i4"), "`query` is int32: pass floating point numbers"),
        (("f4", "f4", "f4", "f4"), "`segment_ids` is float32: pass integers, 0 for"),
    ],
)
def test_dtypes_that_do_not_go_together_are_refused(dtypes, message):
    shapes = (*[(2, 8, 4, 4)] * 3, (2, 8))
    arrays = [jnp.ones(x, dtype) for x, dtype in zip(shapes, dtypes, strict=True)]
    with pytest.raises(ValueError, match=message):
        jb.segment_attention(*arrays)


def test_an_unknown_implementation_is_refused():
    ids = jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="`implementation='xla'`: choose 'blockwise'"):
        jb.segment_attention(*random_heads(ids), ids, implementation="xla")  # pyright: ignore
