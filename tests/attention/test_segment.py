"""Attention within segments against `jax.nn.dot_product_attention` with a mask."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxbucket as jb
from jaxbucket.attention import blockwise, splash
from jaxbucket.attention.masks import Pairs
from jaxbucket.data.collate import row_segments

SLOW = pytest.mark.exhaustive


def packed_rows(seed, size=3, seq_len=96, longest=60):
    """Returns `[B, T]` segment ids of random packed rows; the last row is empty."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.geometric(1 / 20, 60), min(longest, seq_len))
    packing = jb.packing.pack(lengths, seq_len)
    rows = rng.permutation(packing.num_rows)[: size - 1]
    slots = np.zeros((size, int(packing.row_segments.max())), np.int64)
    for place, row in enumerate(rows):
        lengths = packing.slots(int(row))
        slots[place, : len(lengths)] = rng.permutation(lengths)
    return jnp.asarray(row_segments(slots, seq_len)[0])


def random_heads(ids, *, heads=2, key_heads=None, width=8, dtype=jnp.float32, seed=0):
    """Returns query, key and value, by numpy because jax would compile each shape."""
    rng = np.random.default_rng(seed)
    counts = (heads, key_heads or heads, key_heads or heads)
    return tuple(
        jnp.asarray(rng.standard_normal((*ids.shape, count, width)), dtype)
        for count in counts
    )


def masked_attention(query, key, value, ids, *, is_causal=False, scale=None):
    """Returns the expected output: attention with a mask, and 0 in padding."""
    places = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    mask = jb.attention.attention_mask(ids, places if is_causal else None)
    result = jax.nn.dot_product_attention(query, key, value, mask=mask, scale=scale)
    return jnp.where(ids[..., None, None] > 0, result, 0)


def pairs(is_causal, width, **options):
    return Pairs(None, 0 if is_causal else None, width**-0.5, **options)


def output_and_gradients(attend, ids, *heads):
    """Returns the output, and the gradients of a loss to query, key and value."""
    rng = np.random.default_rng(9)
    weights = rng.standard_normal(heads[0].shape, np.float32)

    def loss(*heads):
        result = attend(*heads, ids)
        return jnp.sum(result.astype(jnp.float32) * weights), result

    gradients, result = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*heads)
    return (result, *gradients)


def assert_near(result, want, tolerance):
    off = []
    for a, b in zip(result, want, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        assert np.isfinite(a).all()
        off.append((np.linalg.norm(a - b), np.linalg.norm(b)))
    # Gradients are compared together, because those of some inputs may be all 0.
    for group in (off[:1], off[1:]):
        distance, size = np.linalg.norm(group, axis=0)
        assert size > 0 and distance < tolerance * size


@pytest.mark.parametrize(
    ("seed", "is_causal", "seq_len"),
    # T of one block, of several blocks, and of no whole number of blocks.
    [
        pytest.param(0, True, 8, marks=SLOW),
        pytest.param(1, False, 70, marks=SLOW),
        (2, True, 130),
        pytest.param(3, False, 256, marks=SLOW),
    ],
)
def test_segment_attention_agrees_with_a_mask(seed, is_causal, seq_len):
    ids = packed_rows(seed, seq_len=seq_len)
    heads = random_heads(ids, heads=4, key_heads=[4, 2, 1][seed % 3], seed=seed)
    options = {"is_causal": is_causal, "scale": [None, 0.7][seed % 2]}
    want = output_and_gradients(
        functools.partial(masked_attention, **options), ids, *heads
    )
    attend = functools.partial(jb.segment_attention, **options)
    result = output_and_gradients(attend, ids, *heads)
    assert_near(result, want, 1e-5)
    # Output and gradients are 0 in padding.
    for x in result:
        assert not x[np.asarray(ids) == 0].any()


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("seed", range(12))
def test_the_result_does_not_depend_on_the_block_size(seed, is_causal):
    rng = np.random.default_rng(seed)
    ids = packed_rows(seed, seq_len=96, longest=int(rng.choice([1, 10, 96])))
    heads = random_heads(ids, heads=2, key_heads=1, seed=seed)
    run = _compiled([40, 16][is_causal], is_causal)
    result, want = run(ids, *heads)
    assert_near(result, want, 1e-5)


@functools.cache
def _compiled(block, is_causal):
    def in_blocks(query, key, value, ids):
        result = blockwise.attend(
            query, key, value, ids, pairs=pairs(is_causal, 8), block=block
        )
        return jnp.where(ids[..., None, None] > 0, result, 0)

    by_mask = functools.partial(masked_attention, is_causal=is_causal)
    return jax.jit(
        lambda ids, *heads: [
            output_and_gradients(x, ids, *heads) for x in (in_blocks, by_mask)
        ]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_causal", [True, False])
def test_segments_are_independent_of_their_neighbors(is_causal):
    ids = jnp.repeat(jnp.array([[1, 2, 3, 0]]), jnp.array([50, 90, 100, 20]), axis=1)
    heads = random_heads(ids)
    attend = functools.partial(jb.segment_attention, is_causal=is_causal)
    in_segment = np.asarray(ids)[0] == 2

    @jax.jit
    def attend_to_segment(heads):
        result, pullback = jax.vjp(lambda *x: attend(*x, ids), *heads)
        gradients = pullback(jnp.where((ids == 2)[..., None, None], result, 0))
        return [x[0, in_segment] for x in (result, *gradients)]

    others = ~in_segment[None, :, None, None]
    loud = tuple(jnp.where(others, 100 * x + 3, x) for x in heads)
    for a, b in zip(attend_to_segment(heads), attend_to_segment(loud), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(attend_to_segment(tuple(2 * x for x in heads))[0]).max() > 0


@pytest.mark.exhaustive
def test_blocks_of_keys_that_no_query_needs_are_skipped():
    # NaN spreads to every output that it is part of, even with a weight of 0.
    ids = jnp.repeat(jnp.array([[1, 2, 0]]), jnp.array([16, 16, 16]), axis=1)
    query, key, value = random_heads(ids)
    value = value.at[:, :16].set(jnp.nan)
    attend = functools.partial(blockwise.attend, pairs=pairs(True, 8), block=16)
    result = jax.jit(attend)(query, key, value, ids)
    assert np.isfinite(result[:, 16:]).all() and np.isnan(result[:, :16]).all()


@pytest.mark.exhaustive
def test_memory_grows_linearly_with_the_row():
    def temporary_bytes(attend, seq_len):
        ids = jax.ShapeDtypeStruct((2, seq_len), jnp.int32)
        heads = [jax.ShapeDtypeStruct((2, seq_len, 2, 8), jnp.float32)] * 3
        attend = functools.partial(attend, is_causal=True)
        run = jax.jit(functools.partial(output_and_gradients, attend))
        compiled = run.lower(ids, *heads).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    sizes = [temporary_bytes(jb.segment_attention, seq_len) for seq_len in (1024, 2048)]
    # With a mask, the logits of all heads are in memory.
    assert temporary_bytes(masked_attention, 1024) >= 4 * 2 * 2 * 1024**2
    assert sizes[1] < 2.2 * sizes[0]
    # Without a mask, not even one number per pair of a single head.
    assert sizes[1] < 4 * 2 * 2048**2 / 4


# Windows and caps


def by_softmax(query, key, value, ids, *, is_causal, window, soft_cap):
    """Returns the expected output from a softmax over all pairs, in float64."""
    key, value = (
        jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value)
    )
    logits = jnp.einsum("bqnh,bknh->bnqk", query, key) / query.shape[-1] ** 0.5
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    places = jnp.arange(ids.shape[1])
    distance = places[:, None] - places
    before, after = window or (ids.shape[1], ids.shape[1])
    is_seen = (distance <= before) & (distance >= -(0 if is_causal else after))
    is_seen &= (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, None, :]
    logits = jnp.where(is_seen[:, None], logits, -1e30)
    output = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(logits), value)
    return jnp.where(ids[..., None, None] > 0, output, 0)


WINDOWS = [
    (True, None, 3.0),
    (True, (40, 9), 1.5),
    (False, (0, 3), 3.0),
    (True, (10, 0), None),
    (False, (5, 20), None),
]


@pytest.mark.parametrize(
    ("is_causal", "window", "soft_cap"),
    [*WINDOWS[:3], *(pytest.param(*x, marks=SLOW) for x in WINDOWS[3:])],
)
@pytest.mark.parametrize("seq_len", [40, pytest.param(300, marks=SLOW)])
def test_windows_and_caps_agree_with_a_softmax(is_causal, window, soft_cap, seq_len):
    ids = packed_rows(3, seq_len=seq_len, longest=200)
    with jax.enable_x64(True):
        heads = random_heads(ids, heads=4, key_heads=2, dtype=jnp.float64)
        heads = tuple(2 * x for x in heads)
        options = {"is_causal": is_causal, "window": window, "soft_cap": soft_cap}
        want = output_and_gradients(
            functools.partial(by_softmax, **options), ids, *heads
        )
        attend = functools.partial(
            jb.segment_attention,
            **{"is_causal": is_causal, "logits_soft_cap": soft_cap},
            local_window_size=window,
        )
        result = output_and_gradients(attend, ids, *heads)
    assert_near(result, want, 1e-7)
    same = functools.partial(attend, local_window_size=7)
    pair = functools.partial(attend, local_window_size=[7, np.int64(7)])
    heads = random_heads(ids)
    np.testing.assert_array_equal(same(*heads, ids), pair(*heads, ids))


# The kernel for TPUs


@pytest.mark.parametrize(
    ("is_causal", "window", "soft_cap"),
    [
        (True, None, None),
        *(pytest.param(*x, marks=SLOW) for x in [(False, None, None), *WINDOWS]),
    ],
)
def test_the_kernel_agrees_with_a_softmax(is_causal, window, soft_cap):
    ids = packed_rows(1, size=2, seq_len=200, longest=150)
    heads = random_heads(ids, heads=2, key_heads=1, width=32)
    before, after = window or (None, None)
    options = Pairs(before, 0 if is_causal else after, 32**-0.5, soft_cap)

    def by_kernel(query, key, value, ids):
        arrays = (query, key, value, ids)
        result = splash.attend(*arrays, pairs=options, interpret=True)
        return jnp.where(ids[..., None, None] > 0, result, 0)

    expected = functools.partial(
        by_softmax, is_causal=is_causal, window=window, soft_cap=soft_cap
    )
    want = output_and_gradients(expected, ids, *heads)
    assert_near(output_and_gradients(by_kernel, ids, *heads), want, 1e-5)


KERNEL = "tpu_custom_call"


def lowered(attend, platform, seq_len=256):
    """Returns the program of a gradient, lowered for any platform."""
    ids = jax.ShapeDtypeStruct((8, seq_len), jnp.int32)
    query = jax.ShapeDtypeStruct((8, seq_len, 4, 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((8, seq_len, 2, 64), jnp.bfloat16)
    run = jax.jit(functools.partial(output_and_gradients, attend))
    traced = run.trace(ids, query, key, key)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def abstract_mesh(platform):
    """Returns a mesh of four devices of any platform, without the devices."""
    here = jb.data_mesh().abstract_mesh.abstract_device
    kind = "TPU v5 lite" if platform == "tpu" else platform
    there = dataclasses.replace(here, device_kind=kind)
    if hasattr(here, "platform"):  # not in jax 0.9
        name = "gpu" if platform in ("cuda", "rocm") else platform
        there = dataclasses.replace(there, platform=name)
    return jax.sharding.AbstractMesh(
        (4,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=there
    )


def shard_rows(attend, platform):
    """Returns `attend` for an abstract mesh, in which each device has its own rows."""
    spec = P("data")
    return jax.shard_map(
        attend,
        mesh=abstract_mesh(platform),
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )


@pytest.mark.parametrize("how", ["shard_map", pytest.param("pmap", marks=SLOW)])
def test_64_bit_grouped_heads_run_on_a_mesh(how):
    with jax.enable_x64(True):
        ids = packed_rows(2, size=4, seq_len=16, longest=9)
        heads = random_heads(ids, heads=2, key_heads=1, dtype=jnp.float64)
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
            result = run(*heads, ids)
        else:
            sharded = [x.reshape(4, 1, *x.shape[1:]) for x in (*heads, ids)]
            result = jax.pmap(jb.segment_attention)(*sharded).reshape(heads[0].shape)
        # `jax.nn.dot_product_attention` would use 32-bit weights, so the reference is
        # the same function on one device.
        want = jax.jit(jb.segment_attention)(*heads, ids)
        np.testing.assert_allclose(result, want, atol=1e-12)


def test_the_scale_can_be_learned():
    ids = packed_rows(2, size=2, seq_len=16, longest=9)
    heads = random_heads(ids)

    def total(scale, attend):
        return jnp.sum(attend(*heads, ids, scale=scale) ** 2)

    result, want = (
        jax.jit(jax.value_and_grad(functools.partial(total, attend=attend)))(0.7)
        for attend in (jb.segment_attention, masked_attention)
    )
    np.testing.assert_allclose(result, want, rtol=1e-5)


def test_the_kernel_is_used_only_where_it_can_run():
    attend = functools.partial(jb.segment_attention, is_causal=True)
    # With several devices the compiler would have to partition a kernel, which it
    # cannot do.
    for platform in ("cuda", "rocm", "tpu", "cpu"):
        assert KERNEL not in lowered(attend, platform)
    for platform in ("cuda", "rocm", "cpu"):
        assert KERNEL not in lowered(shard_rows(attend, platform), platform)
    assert lowered(shard_rows(attend, "tpu"), "tpu").count(KERNEL) >= 3
    named = functools.partial(attend, implementation="splash")
    assert lowered(named, "tpu").count(KERNEL) >= 3


@pytest.mark.parametrize(("platform", "block"), [("cpu", 128), ("cuda", 512)])
@pytest.mark.parametrize("has_mesh", [True, False])
def test_blocks_are_larger_on_gpus(platform, block, has_mesh, monkeypatch):
    attend = functools.partial(jb.segment_attention, is_causal=True)
    if has_mesh:
        attend = shard_rows(attend, platform)
    else:
        backend = {"cuda": "gpu"}.get(platform, platform)
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert block_sizes(lowered(attend, platform, seq_len=1024)) == {block}


def test_blocks_are_small_on_tpus():
    # With several devices, "jit" does not use the kernel.
    attend = functools.partial(jb.segment_attention, is_causal=True)
    with jax.sharding.use_abstract_mesh(abstract_mesh("tpu")):
        program = lowered(attend, "tpu", seq_len=1024)
    assert KERNEL not in program and block_sizes(program) == {128}


def block_sizes(program):
    """Returns the sizes of the blocks of logits in a program."""
    return {int(size) for size in re.findall(r"x(\d+)x\1xf32", program)}


# Refusals


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"query": ((2, 8, 16), "f4")}, "query"),
        ({"query": ((2, 8, 4, 4), "i4")}, "query"),
        ({"key": ((2, 9, 4, 4), "f4")}, "key"),
        ({"key": ((2, 8, 4, 4), "f2")}, "key"),
        ({"key": ((2, 8, 2, 4), "f4")}, "key"),
        ({"value": ((2, 8, 4, 5), "f4")}, "value"),
        (dict.fromkeys(("key", "value"), ((2, 8, 3, 4), "f4")), "key"),
        ({"segment_ids": ((2, 9), "i4")}, "segment_ids"),
        ({"segment_ids": ((2, 8), "f4")}, "segment_ids"),
        ({"implementation": "xla"}, "implementation"),
        ({"local_window_size": -1}, "local_window_size"),
        ({"local_window_size": (3, 0.5)}, "local_window_size"),
        ({"local_window_size": (1, 2, 3)}, "local_window_size"),
        ({"local_window_size": (None, 3)}, "local_window_size"),
        ({"local_window_size": 2**31}, "local_window_size"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap"),
        ({"logits_soft_cap": 1e39}, "logits_soft_cap"),
    ],
)
def test_invalid_arguments_are_refused(changed, name):
    arrays = {
        **dict.fromkeys(("query", "key", "value"), ((2, 8, 4, 4), "f4")),
        "segment_ids": ((2, 8), "i4"),
        **changed,
    }
    arrays = {
        name: jnp.ones(*x) if isinstance(x, tuple) and isinstance(x[0], tuple) else x
        for name, x in arrays.items()
    }
    with pytest.raises(ValueError, match=f"`{name}"):
        jb.segment_attention(**arrays)
