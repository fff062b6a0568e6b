"""Compiling for devices that are not there: states, reports, refusals.

Tests that compile for TPUs or GPUs need their compilers, `pip install
'jaxbucket[tpu,gpu-plan]'`, and are skipped without them.
"""

import importlib.metadata
import importlib.util
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner
from flax import linen, nnx
from jax.sharding import PartitionSpec

import jaxbucket as jb
from jaxbucket.cli import main
from jaxbucket.compile.absent import absent_devices, memory_limit
from jaxbucket.compile.gpu_targets import GPUS
from jaxbucket.compile.recipes import precompile

TPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs jaxbucket[tpu]"
)
GPU = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None,
    reason="needs jaxbucket[gpu-plan]",
)
TOPOLOGIES = [
    pytest.param("v5e:2x2", marks=TPU),
    pytest.param("h100:1x1x4", marks=GPU),
]
# Adam needs promotion of dtypes, which is strict in tests.
TX = optax.sgd(1e-3, momentum=0.9)
WIDTH = 1024


def loss_fn(params, batch, keys):
    outputs = jnp.tanh(batch.features["x"] @ params["w"])
    return jnp.sum(outputs, where=batch.mask[..., None]), batch.num_tokens


def recipe(plan, *options):
    """A recipe of two products, which the command finds as `test_absent:recipe`."""
    mesh = jb.data_mesh()
    params = {"w": np.ones((WIDTH, WIDTH), np.float32)}
    state = jb.create_state(
        params, TX, mesh, sharding=jb.sharding.fully_sharded(mesh) if options else None
    )
    shardings = jax.tree.map(lambda x: x.sharding, state)
    step = jb.make_train_step(loss_fn, TX, mesh, state_sharding=shardings)
    specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, WIDTH), "f4")}, mesh)
    return {"train": (step, state, specs)}


def on_devices(plan):
    return jax.device_put(1.0, jb.data_mesh().devices.flat[0])


def command(*arguments):
    return CliRunner().invoke(main, [str(x) for x in arguments])


@pytest.mark.parametrize(
    ("topology", "num_slices"),
    [
        *[(x, 1) for x in ("v5e-16", "v5e:3x3", "v5e:16x16x4", "v5e:32x32", "v9:2x2")],
        *[(x, 1) for x in ("v5p:8x4x4", "v5p:2x2", "v5p:4x4x6", "v5p:16x16x28", "")],
        *[(x, 1) for x in ("h100:8", "h100:1x0x8", "h100", "z100:1x1x8", None)],
        *[("h100:1x1x8", 2), ("v5e:4x4", 0)],
    ],
)
def test_a_topology_that_does_not_exist_is_refused(topology, num_slices):
    with pytest.raises(ValueError, match=r"`(topology|num_slices)="):
        with absent_devices(topology, num_slices=num_slices):
            pass


@pytest.mark.parametrize("installed", [None, "0.0.1"])
@pytest.mark.parametrize(
    ("topology", "extra"), [("v5e:2x2", "tpu"), ("h100:1x1x8", "gpu-plan")]
)
def test_a_missing_or_older_compiler_is_named(topology, extra, installed, monkeypatch):
    def version(name):
        if installed is None:
            raise importlib.metadata.PackageNotFoundError
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(ModuleNotFoundError, match=rf"jaxbucket\[{extra}\]"):
        with absent_devices(topology):
            pass


@TPU
def test_devices_that_are_there_are_not_absent(monkeypatch):
    real = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(jax, "devices", lambda *platform: [real])
    with pytest.raises(ValueError, match="`topology='v5e:2x2'`.*JAX_PLATFORMS=cpu"):
        with absent_devices("v5e:2x2"):
            pass


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_recipe_compiles_for_absent_devices(topology):
    plan = jb.BucketPlan.from_shapes([(8, 16), (4, 32)])
    with absent_devices(topology) as devices:
        # A mesh follows the links between devices.
        assert len(devices) == 4 and {*jb.data_mesh().devices.flat} == {*devices}
        replicated, failures = precompile(recipe, plan)
        sharded, others = precompile(recipe, plan, "sharded")
    assert not failures and not others
    for one, other in zip(replicated.programs, sharded.programs, strict=True):
        assert one.flops == other.flops == 2 * 2 * 8 * 16 * WIDTH**2
        size = 4 * WIDTH**2
        # Parameters and the momentum, updated in place.
        assert one.aliased_bytes == pytest.approx(2 * size, rel=0.01)
        assert other.aliased_bytes == pytest.approx(2 * size / 4, rel=0.01)
        assert one.collectives["all-reduce"]["bytes"] == pytest.approx(size, rel=0.01)
        # TPUs gather them in bfloat16, in which they multiply.
        assert other.collectives["all-gather"]["bytes"] >= size / 2
        assert (one.hbm_bytes is not None) == topology.startswith("v5e")
    assert "all-gather" in str(sharded) and "peak" in str(sharded)
    # Outside of the block, the devices of this process are used again.
    assert list(jb.data_mesh().devices.flat) == jax.devices()


@TPU
def test_slices_and_larger_tori_are_devices_of_one_mesh():
    with absent_devices("v5e:4x4", num_slices=2) as devices:
        assert len(devices) == 32
    with absent_devices("v5p:4x4x8") as devices:
        assert len(devices) == 128
    with absent_devices("V6E:1x1") as devices:
        assert len(devices) == 1
    with absent_devices("v5e:2x4"):
        mesh = jb.data_mesh(max_row_shards=8)
        assert dict(mesh.shape) == {"data": 1, "row1": 2, "row2": 2, "row3": 2}


@TPU
def test_states_on_absent_devices_are_shapes_as_they_would_be():
    plain = {"w": np.ones((8, 6), np.float32)}
    linen_model = linen.Dense(
        8,
        kernel_init=linen.with_partitioning(
            linen.initializers.ones_init(), (None, "data")
        ),
    )
    nnx_model = nnx.Sequential(nnx.Linear(6, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
    sample = jax.ShapeDtypeStruct((1, 6), jnp.float32)
    models = [(plain, {}), (linen_model, {"sample": sample}), (nnx_model, {})]
    here = jb.data_mesh(jax.devices()[:4])
    with absent_devices("v5e:2x2"):
        there = jb.data_mesh()
    for model, options in models:
        for sharding in (None, jb.sharding.fully_sharded):
            states = [
                jb.create_state(
                    *(model, TX, mesh), **options, sharding=sharding and sharding(mesh)
                )
                for mesh in (here, there)
            ]
            real, absent = (
                jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding.spec), state)
                for state in states
            )
            assert real == absent
            leaves = jax.tree.leaves(states[1])
            assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
            assert all(x.sharding.mesh == there for x in leaves)


def test_an_abstract_model_gives_the_shapes_of_a_state():
    """The model is not drawn, on devices that are there."""
    mesh = jb.data_mesh(jax.devices()[:4])

    def make():
        return nnx.Linear(6, 8, rngs=nnx.Rngs(0))

    for sharding in (None, jb.sharding.fully_sharded(mesh)):
        drawn = jb.create_state(make(), TX, mesh, sharding=sharding)
        shapes = jb.create_state(nnx.eval_shape(make), TX, mesh, sharding=sharding)
        assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(shapes))
        expected, actual = (
            jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state)
            for state in (drawn, shapes)
        )
        assert expected == actual
    spec = jax.ShapeDtypeStruct(
        *((8, 4), jnp.float32), sharding=jb.sharding.batch_sharding(mesh)
    )
    state = jb.create_state({"w": spec}, TX, mesh)
    specs = {str(x.sharding.spec) for x in jax.tree.leaves(state) if x.shape == (8, 4)}
    assert specs == {str(PartitionSpec("data"))}
    alone = jb.create_state({"w": spec}, TX)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(alone))


def by_name(params):
    return jax.tree.map_with_path(lambda path, x: path[-1].key, params)


@pytest.mark.parametrize(
    "tx",
    [
        optax.adafactor(1e-3, min_dim_size_to_factor=4),
        optax.inject_hyperparams(optax.adamw)(1e-3),
        optax.masked(optax.adam(1e-3), {"w": True, "v": False}),
        optax.multi_transform({"w": optax.adam(1.0), "v": optax.sgd(1.0)}, by_name),
        optax.MultiSteps(optax.lamb(1e-3), 2),
        optax.chain(optax.clip(1.0), jb.scale_by_batch_size(base_tokens=8)),
    ],
)
def test_abstract_states_of_optimizers_are_those_of_real_ones(tx):
    mesh = jb.data_mesh(jax.devices()[:4])
    spread = jb.sharding.batch_sharding(mesh)
    arrays = {"w": jnp.ones((8, 16)), "v": jnp.ones((8, 4))}
    real = jax.device_put(arrays, spread)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=spread), arrays
    )
    # optax mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        real, shapes = (jb.create_state(x, tx, mesh) for x in (real, shapes))
    jax.tree.map(
        lambda x, y: np.testing.assert_equal((x.shape, x.dtype), (y.shape, y.dtype)),
        *(real, shapes),
    )
    of_shapes = [x for x in jax.tree.leaves(shapes) if x.shape == (8, 16)]
    assert len(of_shapes) > 0
    assert all(x.sharding.spec == spread.spec for x in of_shapes)


@pytest.mark.parametrize(
    "options",
    [
        {"sharding": lambda path, leaf: PartitionSpec()},
        {"sharding": PartitionSpec("data"), "mesh": jb.data_mesh(jax.devices()[:1])},
        {"sharding": True, "mesh": jb.data_mesh(jax.devices()[:1])},
    ],
)
def test_a_sharding_that_is_no_function_or_has_no_mesh_is_refused(options):
    with pytest.raises(ValueError, match="`sharding"):
        jb.create_state({"w": np.ones((8, 8), np.float32)}, TX, **options)


def test_a_sharding_may_depend_on_names():
    mesh = jb.data_mesh(jax.devices()[:4])
    seen = []

    def spec_of(path, leaf):
        seen.append(path)
        return PartitionSpec("data") if "kernel" in path else PartitionSpec()

    model = nnx.Linear(8, 3, rngs=nnx.Rngs(0))
    state = jb.create_state(model, TX, mesh, sharding=spec_of)
    assert state.params["kernel"][...].sharding.spec == PartitionSpec("data")
    assert state.params["bias"][...].is_fully_replicated
    assert ("params", "kernel") in {path[:2] for path in seen}


def test_a_fully_sharded_state_trains_as_a_replicated_one():
    mesh = jb.data_mesh(jax.devices()[:4])
    params = {"w": np.full((WIDTH // 8, WIDTH // 8), 1 / 128, np.float32)}
    bucket = jb.BucketPlan.from_shapes([(4, 8)]).buckets[0]
    rows = [{"x": np.full((n, WIDTH // 8), n, np.float32)} for n in (3, 8, 1, 5)]
    local = jb.data.collate_rows(rows, bucket)
    (batch,) = jb.sharding.prefetch_to_mesh([local], mesh)
    results = []
    for sharding in (None, jb.sharding.fully_sharded(mesh)):
        state = jb.create_state(params, TX, mesh, sharding=sharding)
        shardings = jax.tree.map(lambda x: x.sharding, state)
        step = jb.make_train_step(loss_fn, TX, mesh, state_sharding=shardings)
        after, metrics = step(state, batch)
        assert jax.tree.map(lambda x: x.sharding, after) == shardings
        results.append([after.params["w"], metrics["loss"]])
    jax.tree.map(np.testing.assert_allclose, *results)
    assert not after.params["w"].is_fully_replicated


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_step_that_would_gather_a_sharded_state_is_refused(accumulate):
    mesh = jb.data_mesh(jax.devices()[:4])
    spec_of = jb.sharding.fully_sharded(mesh)
    state = jb.create_state(
        {"w": np.ones((WIDTH, 4), "f4")}, TX, mesh, sharding=spec_of
    )
    specs = jb.sharding.batch_specs(
        jb.BucketPlan.from_shapes([(4, 8)]), {"x": np.ones((3, WIDTH), "f4")}, mesh
    )
    step = jb.make_train_step(loss_fn, TX, mesh, accumulate=accumulate)
    with pytest.raises(ValueError, match=r"`state.params\['w'\]`.*`state_sharding="):
        jb.compile_steps(step, state, specs, progress=False)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_recipe_that_puts_arrays_on_absent_devices_is_told(topology):
    plan = jb.BucketPlan.from_shapes([(8, 16)])
    with absent_devices(topology), pytest.raises(Exception) as raised:
        precompile(on_devices, plan)
    assert any("Absent devices hold no arrays" in x for x in raised.value.__notes__)


@TPU
def test_a_recipe_that_does_not_use_absent_devices_is_told():
    def elsewhere(plan):
        mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        state = jb.create_state({"w": np.ones((WIDTH, 2), np.float32)}, TX, mesh)
        specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, WIDTH), "f4")}, mesh)
        return jb.make_train_step(loss_fn, TX, mesh), state, specs

    plan = jb.BucketPlan.from_shapes([(8, 16)])
    with absent_devices("v5e:2x2"), pytest.raises(ValueError, match="`jb.data_mesh"):
        precompile(elsewhere, plan)


@TPU
def test_the_devices_must_divide_b():
    with absent_devices("v5e:2x2"), pytest.raises(ValueError, match="`batch_size=6`"):
        precompile(recipe, jb.BucketPlan.from_shapes([(6, 16)]))


@TPU
def test_what_the_compiler_refuses_is_the_limit_of_tpus():
    with absent_devices("v5e:2x2") as devices:
        assert memory_limit(devices[0]) == int(15.75 * 2**30)
        fitted = jb.compile.fit_batch_sizes(recipe, [512], batch_size_multiple=256)
        (size,) = fitted.sizes
        assert size.next_batch_size == size.batch_size + 256
        assert size.num_compiled <= 2 and size.num_refused >= 1
        (_, no_failures), (report, failures) = (
            precompile(recipe, jb.BucketPlan.from_shapes([(batch_size, 512)]))
            for batch_size in (size.batch_size, size.next_batch_size)
        )
    assert not no_failures and not report.programs
    assert list(failures) == [f"train [{size.next_batch_size}, 512]"]
    assert "15.75G" in str(failures)
    # 16 GiB, of which XLA keeps a part.
    assert 13e9 < size.num_bytes < 17e9 and fitted.limit_bytes is None


@GPU
def test_the_memory_of_a_gpu_is_known():
    with absent_devices("h100:1x1x4") as devices:
        limit = memory_limit(devices[0])
        assert limit == int(0.75 * GPUS["h100"].memory_bytes)
        fitted = jb.compile.fit_batch_sizes(
            recipe, [512], batch_size_multiple=256, margin=0.1
        )
        (size,) = fitted.sizes
    assert fitted.limit_bytes == int(0.9 * limit)
    assert size.num_bytes <= fitted.limit_bytes < size.next_bytes
    assert size.num_compiled <= 5 and size.num_refused == 0


@GPU
@pytest.mark.exhaustive
@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_has_a_target(gpu):
    with absent_devices(f"{gpu}:1x1x2") as devices:
        _, failures = precompile(recipe, jb.BucketPlan.from_shapes([(8, 16)]))
    assert not failures and len(devices) == 2
    assert devices[0].device_kind == GPUS[gpu].name


@TPU
def test_the_commands_plan_for_absent_devices(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    plan, fitted = tmp_path / "plan.json", tmp_path / "fitted.json"
    np.save(tmp_path / "lengths.npy", np.arange(1, 513))
    options = ("--recipe", "test_absent:recipe", "--topology", "v5e:2x2")
    run = command(
        *("fit", *options, "--seq-lens", "128,512", "--batch-size-multiple", 512),
        *("-o", fitted),
    )
    assert run.exit_code == 0, run.output
    sizes = jb.plan.FittedBatchSizes.load(fitted).sizes
    assert [size.seq_len for size in sizes] == [128, 512]
    assert f"{sizes[1].batch_size:,}" in run.output
    run = command(
        *("plan", tmp_path / "lengths.npy", "--max-tokens", fitted),
        *("--num-buckets", 2, "--sample", "--batch-size-multiple", 512, "-o", plan),
    )
    assert run.exit_code == 0, run.output
    buckets = jb.BucketPlan.from_json(plan.read_text()).buckets
    last = buckets[-1]
    assert (last.batch_size, last.seq_len) == (sizes[1].batch_size, 512)
    run = command("precompile", *options, "--plan", plan, "--json")
    assert run.exit_code == 0, run.output
    assert len(json.loads(run.output)["programs"]) == len(buckets)
    run = command("precompile", *options, "--plan", plan, "--cache", tmp_path / "new")
    assert run.exit_code == 1 and "`--cache`" in run.output
    run = command("precompile", *options, "--plan", plan, "--memory-gb", 1)
    assert run.exit_code == 1 and "GB more than 1 GB" in run.output
    run = command("fit", *options[:2], "--seq-lens", "8", "--num-slices", 2)
    assert run.exit_code == 1 and "`topology`" in run.output
