"""Collectives read from programs whose collectives are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import jaxbucket as jb
from jaxbucket.compile.collectives import count_collectives

MESH = jb.data_mesh(jax.devices()[:4])
SHARDED, WHOLE = PartitionSpec("data"), PartitionSpec()


def count(fn, *shapes, in_specs=SHARDED, out_specs=SHARDED):
    mapped = jax.shard_map(
        fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    args = [jnp.ones(shape, jnp.float32) for shape in shapes]
    return count_collectives(jax.jit(mapped).lower(*args).compile().as_text())


def exactly(count, num_bytes):
    return {"count": count, "bytes": num_bytes, "is_lower_bound": False}


@pytest.mark.parametrize(
    ("fn", "kind", "num_bytes"),
    [
        (lambda x: lax.psum(x, "data"), "all-reduce", 4 * 2 * 8),
        (lambda x: lax.all_gather(x, "data"), "all-gather", 4 * 4 * 2 * 8),
        (
            lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]),
            *("collective-permute", 4 * 2 * 8),
        ),
        (
            lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True),
            *("all-to-all", 4 * 2 * 8),
        ),
    ],
)
def test_one_collective_is_found(fn, kind, num_bytes):
    assert count(fn, (8, 8)) == {kind: exactly(1, num_bytes)}


def test_loops_count_their_iterations():
    def nested(x):
        def inner(x, _):
            return lax.psum(jnp.sin(x), "data"), None

        def outer(x, _):
            x, _ = lax.scan(inner, x, length=3)
            return lax.ppermute(x, "data", [(i, 3 - i) for i in range(4)]), None

        x, _ = lax.scan(outer, x, length=5)
        return lax.psum(x, "data")

    size = 4 * 2 * 8
    assert count(nested, (8, 8)) == {
        "all-reduce": exactly(16, 16 * size),
        "collective-permute": exactly(5, 5 * size),
    }


def test_loops_of_unknown_length_count_once():
    def until(x):
        return lax.while_loop(lambda x: x[0, 0] < 1e6, lambda x: lax.psum(x, "data"), x)

    found = count(until, (8, 8))["all-reduce"]
    assert found == {"count": 1, "bytes": 4 * 2 * 8, "is_lower_bound": True}


def test_of_branches_the_largest_counts():
    def branch(x):
        return lax.cond(
            lax.axis_index("data") >= 0,
            lambda x: lax.psum(x, "data"),
            lambda x: lax.psum(2 * x, "data") + lax.psum(x.sum(), "data"),
            lax.psum(x, "data"),
        )

    # XLA may join the two of a branch.
    assert count(branch, (8, 8))["all-reduce"]["count"] in (2, 3)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), ("int8", 1), ("float64", 8), ("bool", 1), ("complex64", 8)],
)
def test_sizes_of_dtypes(dtype, size):
    names = {"bfloat16": "bf16", "int8": "s8", "float64": "f64", "bool": "pred"}
    name = names.get(dtype, "c64")
    text = f"ENTRY %main (x: {name}[3,5]) -> {name}[3,5] {{\n"
    text += f"  ROOT %r = {name}[3,5]{{1,0}} all-reduce(%x), to_apply=%add\n}}"
    assert count_collectives(text)["all-reduce"] == exactly(1, 15 * size)


def test_asynchronous_collectives_count_once():
    text = """
ENTRY %main (x: f32[8]) -> f32[8] {
  %s = ((f32[8]{0:T(9)}, f32[2]), (f32[32]{0:T(9)}, f32[8]), u32[]) all-gather-start(%x)
  %d = (f32[32], f32[8]) all-gather-done(%s)
  %r = f32[8]{0} all-reduce-start(%x), to_apply=%add
  %e = f32[8]{0} all-reduce-done(%r)
  %t = ((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), to_apply=%add
  %f = f32[8]{0} all-reduce-done(%t)
  %p = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%x)
  ROOT %q = f32[8]{0} collective-permute-done(%p)
}"""
    assert count_collectives(text) == {
        "all-gather": exactly(1, 160),
        "all-reduce": exactly(2, 64),
        "collective-permute": exactly(1, 32),
    }


def test_a_report_has_the_collectives_of_a_step():
    plan = jb.BucketPlan.from_shapes([(4, 8)])
    specs = jb.sharding.batch_specs(plan, {"x": np.ones(3, "f4")}, MESH)
    state = jb.sharding.replicate({"w": np.float32(1)}, MESH)

    def step(state, batch):
        return jax.tree.map(lambda w: w * batch.features["x"].sum(), state)

    report = jb.compile_steps(step, state, specs, progress=False).report
    assert report.programs[0].collectives == {"all-reduce": exactly(1, 4)}
    assert report.to_dict()[0]["collectives"]["all-reduce"]["count"] == 1
    assert "1: 0.0" in str(report)
