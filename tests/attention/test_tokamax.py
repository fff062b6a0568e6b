"""Where the kernel for GPUs is used, and what it is told about the rows.

Its programs are compiled for GPUs that are not there, `pip install
'jaxbucket[gpu-plan]'`; without it these tests are skipped.
"""

import dataclasses
import functools
import importlib.util
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

import jaxbucket as jb
from jaxbucket.attention import blockwise, segment, tokamax
from jaxbucket.attention.masks import Pairs

INSTALLED = all(map(importlib.util.find_spec, ("tokamax", "jax_cuda13_plugin")))
GPU = pytest.mark.skipif(not INSTALLED, reason="needs jaxbucket[gpu-plan]")
H100 = "NVIDIA H100 80GB HBM3"
WIDTH, HEADS = 256, 4


@pytest.mark.parametrize(
    ("kind", "capability", "changed", "expected"),
    [
        (H100, "9.0", {}, "tokamax"),
        ("NVIDIA B200", "10.0", {"dtype": "float16"}, "tokamax"),
        ("NVIDIA H200", "9.0", {"width": 256}, "tokamax"),
        ("NVIDIA B200", "10.0", {"width": 192}, "tokamax"),
        ("NVIDIA B200", "10.0", {"width": 200}, "blockwise"),
        (H100, "9.0", {"width": 320}, "blockwise"),
        (H100, "9.0", {"dtype": "float32"}, "blockwise"),
        (H100, "9.0", {"installed": None}, "blockwise"),
        (H100, "9.0", {"installed": "0.0.18"}, "blockwise"),
        (H100, "9.0", {"x64": True}, "blockwise"),
        # The compiler would have to partition the kernel.
        (H100, "9.0", {"manual": False}, "blockwise"),
        (H100, "9.0", {"manual": False, "devices": 1}, "tokamax"),
        ("NVIDIA A100-SXM4-80GB", "8.0", {}, "blockwise"),
        ("NVIDIA GeForce RTX 5090", "12.0", {}, "blockwise"),
        ("AMD Instinct MI300X", "gfx942", {}, "blockwise"),
        ("cpu", None, {}, "blockwise"),
        ("TPU v5 lite", None, {}, "splash"),
        ("TPU v5 lite", None, {"dtype": "float32"}, "splash"),
        ("TPU v5 lite", None, {"manual": False}, "blockwise"),
        ("TPU v5 lite", None, {"x64": True}, "blockwise"),
    ],
)
def test_the_implementation_follows_the_devices(
    kind, capability, changed, expected, monkeypatch
):
    options = {
        **{"dtype": "bfloat16", "width": 64, "installed": "0.0.17", "manual": True},
        **{"devices": 4, "x64": False},
        **changed,
    }
    device = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(tokamax, "get_default_device", lambda: device)
    monkeypatch.setattr(tokamax, "_installed_version", lambda: options["installed"])
    axis_type = AxisType.Manual if options["manual"] else AxisType.Auto
    there = jb.data_mesh().abstract_mesh.abstract_device
    there = dataclasses.replace(there, device_kind=kind)
    mesh = AbstractMesh(
        *((options["devices"],), ("data",), (axis_type,)), abstract_device=there
    )
    query = jax.ShapeDtypeStruct((4, 256, 2, options["width"]), options["dtype"])
    with jax.enable_x64(options["x64"]), jax.sharding.use_abstract_mesh(mesh):
        assert segment._choose(query) == expected


def test_a_kernel_that_is_not_installed_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    ids = jnp.ones((1, 8), jnp.int32)
    heads = jnp.ones((1, 8, 1, 16), jnp.bfloat16)
    with pytest.raises(ModuleNotFoundError) as raised:
        jb.segment_attention(heads, heads, heads, ids, implementation="tokamax")
    assert any("jaxbucket[gpu]" in note for note in raised.value.__notes__)


@GPU
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize(
    ("before", "after"), [(None, 0), (None, None), (20, 0), (3, 7), (0, None)]
)
def test_the_mask_of_the_kernel_has_the_pairs_of_segments(before, after, soft_cap):
    """By Tokamax's own reference, which takes the same mask on any platform."""
    from tokamax._src.ops.attention import base

    rng = np.random.default_rng(0)
    # Packed, one example, left padding, and an empty row.
    rows = [[9, 41, 30], [55], [-20, 60], []]
    ids = np.zeros((4, 96), np.int32)
    for row, sizes in zip(ids, rows, strict=True):
        start = 0
        for number, size in enumerate(sizes, 1):
            row[start : start + abs(size)] = max(0, number * np.sign(size))
            start += abs(size)
    ids = jnp.asarray(ids)
    query, key, value = (
        jnp.asarray(rng.standard_normal((4, 96, heads, 16)), jnp.float32)
        for heads in (4, 2, 2)
    )
    pairs = Pairs(before, after, 0.3, soft_cap)
    attend = functools.partial(
        base.DotProductAttention(),
        **{"logits_scale": 0.3, "logits_soft_cap": soft_cap},
        mask=tokamax.mask_of(ids, pairs),
    )
    expected = blockwise.attend(query, key, value, ids, pairs=pairs, block=16)
    actual = attend(query, key, value)
    assert np.isfinite(actual).all()
    is_real = np.asarray(ids) > 0
    np.testing.assert_allclose(actual[is_real], expected[is_real], atol=2e-6)


def loss_fn(params, batch, keys):
    x = params["words"][batch.features["tokens"]]
    heads = x.reshape(*x.shape[:2], HEADS, -1)
    ids = batch.segment_ids["tokens"]
    mixed = jb.segment_attention(
        *(heads, heads[:, :, ::2], heads[:, :, ::2]),
        *(ids,),
        is_causal=True,
        local_window_size=100,
        logits_soft_cap=30.0,
    )
    losses = jnp.square(mixed.astype(jnp.float32)).mean((2, 3))
    return jnp.sum(losses, where=batch.mask), batch.num_tokens


@GPU
@pytest.mark.parametrize(
    ("topology", "dtype", "mode", "num_kernels"),
    [
        ("h100:1x1x4", "bfloat16", "jit", 3),
        ("h100:1x1x4", "float16", "shard_map", 3),
        ("h100:1x1x1", "bfloat16", "jit", 3),
        ("h100:1x1x4", "float32", "jit", 0),
        ("a100:1x1x4", "bfloat16", "jit", 0),
    ],
)
def test_programs_for_absent_gpus_have_the_kernel(topology, dtype, mode, num_kernels):
    """Forward, and for the gradients of the queries and of the keys and values.

    Kernels are compiled for one type of GPUs in a process, so there is no Blackwell.
    """
    with jax.enable_x64(False), jb.compile.absent_devices(topology):
        # A T that is no multiple of a block, and a row of two devices.
        shapes, num_shards = [(4, 352), (2, 1024)], 2
        if mode == "shard_map" or topology.endswith("x1x1"):
            shapes, num_shards = [(4, 352)], 1
        mesh, tx = jb.data_mesh(max_row_shards=num_shards), optax.sgd(0.1)
        plan = jb.BucketPlan.from_shapes(shapes)
        example = {"tokens": np.ones(3, np.int32)}
        specs = jb.sharding.batch_specs(plan, example, mesh)
        params = {"words": jax.ShapeDtypeStruct((100, WIDTH), dtype)}
        state = jb.create_state(params, tx, mesh)
        step = jb.make_train_step(loss_fn, tx, mesh, mode=mode)
        steps = jb.compile_steps(step, state, specs, progress=False)
    for executable in steps.values():
        assert executable.as_text().count("mosaic_gpu_v2") == num_kernels
