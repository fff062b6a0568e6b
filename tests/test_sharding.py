"""Rows of devices and hosts, compared with the assignment of jax."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxbucket as jb
from jaxbucket.sharding.mesh import batch_sharding, rows_of_devices

# (shape of the mesh, axis names, batch axes)
LAYOUTS = {
    "8": ((8,), ("data",), "data"),
    "4x2-model": ((4, 2), ("data", "model"), "data"),
    "1x8-model": ((1, 8), ("data", "model"), "data"),
    "2x2x2": ((2, 2, 2), ("replica", "data", "model"), ("replica", "data")),
    "2x2x2-swapped": ((2, 2, 2), ("replica", "data", "model"), ("data", "replica")),
    "2x4-model-first": ((2, 4), ("model", "data"), "data"),
}
PERMUTATIONS = [None, 0, 1, 2]
EXHAUSTIVE = pytest.mark.exhaustive


def examples_of(lengths: np.ndarray) -> list[dict[str, np.ndarray]]:
    return [
        {
            "tokens": i + np.arange(n, dtype=np.int32),
            "vectors": np.outer(i + np.arange(n), [1, -1]).astype(np.float32),
            "label": np.int32(i),
        }
        for i, n in enumerate(lengths)
    ]


def random_lengths(seed: int, size: int = 200) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.minimum(rng.geometric(0.05, size), 100).astype(np.int32)


def make_mesh(layout: str, permutation: int | None = None) -> tuple[Mesh, object]:
    shape, names, batch_axes = LAYOUTS[layout]
    devices = np.array(jax.devices()[: math.prod(shape)])
    if permutation is not None:
        devices = np.random.default_rng(permutation).permutation(devices)
    return Mesh(devices.reshape(shape), names), batch_axes


def make_hosts(num_hosts: int) -> list[list[jax.Device]]:
    """Returns groups of the eight devices that do not depend on the mesh."""
    return np.array(jax.devices()[:8]).reshape(num_hosts, -1).tolist()


def assert_rows_match_jax(source, schedule, mesh, axes, hosts, steps):
    """Compares every leaf, device and step with the assignment of jax."""
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    whole = jb.batch_dataset(source, schedule)
    for host in hosts:
        shard = rows_of_devices(mesh, host, axes)
        local = jb.batch_dataset(source, schedule, shard=shard)
        for step in steps:
            batch, part = whole[step], local[step]
            rows = shard.rows(batch.bucket.batch_size)
            assert part.bucket == jb.Bucket(len(rows), batch.bucket.seq_len)
            needed = []
            for leaf, local_leaf in zip(
                jax.tree.leaves(batch), jax.tree.leaves(part), strict=True
            ):
                assigned = sharding.devices_indices_map(leaf.shape)
                for device in host:
                    want = np.arange(len(leaf))[assigned[device][0]]
                    slots = np.searchsorted(rows, want)
                    np.testing.assert_array_equal(rows[slots], want)
                    np.testing.assert_array_equal(
                        local_leaf[slots], leaf[assigned[device]]
                    )
                    needed.append(want)
            # A host loads only rows that its devices need.
            assert set(rows) == set(np.concatenate(needed))


def local_batches(plan: jb.BucketPlan, lengths: np.ndarray, num_steps: int):
    schedule = jb.BatchSchedule(plan, lengths)
    return jb.batch_dataset(examples_of(lengths), schedule, num_steps=num_steps)


def eight_row_plan(lengths: np.ndarray) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths, max_tokens=1600, num_buckets=3, batch_size_multiple=8
    )


# data_mesh


def test_data_mesh_has_the_devices_in_order_on_an_automatic_axis():
    mesh = jb.data_mesh()
    assert dict(mesh.shape) == {"data": jax.device_count()}
    assert list(mesh.devices.flat) == jax.devices()
    assert mesh.axis_types == (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[4:1:-1]
    assert list(jb.data_mesh(devices).devices.flat) == devices


# local_rows and rows_of_devices


@pytest.mark.parametrize("num_devices", [1, 2, 8])
def test_a_single_process_has_every_part(num_devices):
    mesh = jb.data_mesh(jax.devices()[:num_devices])
    shard = jb.sharding.local_rows(mesh)
    assert shard == jb.data.RowShard(tuple(range(num_devices)), num_devices, ("data",))
    np.testing.assert_array_equal(shard.rows(16), np.arange(16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_are_counted_over_the_batch_axes_only(layout):
    mesh, axes = make_mesh(layout)
    names = (axes,) if isinstance(axes, str) else axes
    shard = jb.sharding.local_rows(mesh, batch_axes=axes)
    assert shard.num_parts == math.prod(mesh.shape[name] for name in names)
    assert shard.axes == names


@pytest.mark.parametrize(
    ("layout", "permutation", "num_hosts"),
    [
        ("8", 0, 4),
        ("4x2-model", 1, 2),
        ("2x2x2-swapped", 2, 4),
        ("2x4-model-first", 1, 2),
        *(
            pytest.param(*case, marks=EXHAUSTIVE)
            for case in itertools.product(LAYOUTS, PERMUTATIONS, [1, 2, 4])
        ),
    ],
)
def test_rows_of_simulated_hosts_match_the_assignment_of_jax(
    layout, permutation, num_hosts
):
    seed = 10 * (permutation or 0) + num_hosts
    lengths = random_lengths(seed)
    schedule = jb.BatchSchedule(eight_row_plan(lengths), lengths, seed=seed)
    mesh, axes = make_mesh(layout, permutation)
    # The last steps of an epoch, which may have empty rows, and two steps of the next.
    steps = range(len(schedule) - 3, len(schedule) + 2)
    assert_rows_match_jax(
        examples_of(lengths), schedule, mesh, axes, make_hosts(num_hosts), steps
    )


# prefetch_to_mesh


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_equal_the_numpy_batch(layout):
    mesh, axes = make_mesh(layout, permutation=0)
    lengths = random_lengths(5)
    batches = list(local_batches(eight_row_plan(lengths), lengths, 6))
    on_mesh = list(jb.sharding.prefetch_to_mesh(batches, mesh, batch_axes=axes))
    assert len(on_mesh) == len(batches)
    for got, want in zip(on_mesh, batches, strict=True):
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            assert np.asarray(a).tobytes() == b.tobytes()
            # This includes replicated shards.
            for piece in a.addressable_shards:
                np.testing.assert_array_equal(piece.data, b[piece.index])
            assert a.sharding == batch_sharding(mesh, axes)
            assert a.sharding == NamedSharding(mesh, PartitionSpec(axes))


@pytest.mark.parametrize("size", [0, 1, 5])
def test_prefetch_keeps_the_order_and_reads_size_batches_ahead(size):
    num_read = 0

    def batches():
        nonlocal num_read
        for num_read in range(1, 9):
            rows = [{"x": np.array([num_read], np.int32)}]
            yield jb.data.collate_rows(rows, jb.Bucket(8, 4))

    on_mesh = jb.sharding.prefetch_to_mesh(batches(), jb.data_mesh(), size=size)
    for number in range(1, 9):
        assert np.asarray(next(on_mesh).features["x"])[0, 0] == number
        assert num_read == min(number + size, 8)
    assert list(on_mesh) == []


PROCESS = """
import jax
import numpy as np
import jaxbucket as jb

orders = {
    ("data",): [[0, 4, 1, 5, 2, 6, 7, 3], (8,)],
    ("data", "model"): [[0, 4, 1, 5, 6, 2, 7, 3], (4, 2)],
    ("model", "data"): [[3, 2, 4, 0, 1, 5, 7, 6], (2, 4)],
}
lengths = np.random.default_rng(0).integers(1, 20, 150)
source = [{"x": np.arange(n) + 1000 * k} for k, n in enumerate(lengths.tolist())]
plan = jb.plan_buckets(lengths, max_tokens=320, num_buckets=3, batch_size_multiple=8)
whole = jb.batch_dataset(source, jb.BatchSchedule(plan, lengths))
with jb.Processes():
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    for names, (order, shape) in orders.items():
        mesh = jax.sharding.Mesh(
            np.array([devices[i] for i in order]).reshape(shape), names
        )
        shard = jb.sharding.local_rows(mesh)
        record(*shard.parts)
        local = jb.batch_dataset(source, jb.BatchSchedule(plan, lengths), shard=shard)
        on_mesh = jb.sharding.prefetch_to_mesh(local, mesh)
        for got, want in zip(on_mesh, whole, strict=True):
            assert got.bucket == want.bucket
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert len(a.addressable_shards) == 4
                for piece in a.addressable_shards:
                    np.testing.assert_array_equal(piece.data, b[piece.index])
"""


@pytest.mark.exhaustive
def test_two_processes_place_their_rows_correctly(launch):
    # The processes are real, because a single process always has all parts.
    run = launch(PROCESS, count=2, devices=4)
    assert run.status == 0, run.output
    assert run.recorded(0) == ["0 2 4 7", "0 1 2 3", "0 1 3"]
    assert run.recorded(1) == ["1 3 5 6", "0 1 2 3", "1 2 3"]


# replicate


def test_replicate_puts_a_full_copy_on_every_device():
    mesh, _ = make_mesh("4x2-model", permutation=1)
    tree = {"a": np.arange(6.0, dtype=np.float32).reshape(2, 3), "b": (jnp.ones(2),)}
    copy = jb.sharding.replicate(tree, mesh)
    assert jax.tree.structure(copy) == jax.tree.structure(tree)
    for got, want in zip(jax.tree.leaves(copy), jax.tree.leaves(tree), strict=True):
        assert got.sharding == NamedSharding(mesh, PartitionSpec())
        assert len(got.addressable_shards) == 8
        for piece in got.addressable_shards:
            np.testing.assert_array_equal(piece.data, want)


# batch_specs


def test_specs_match_real_batches():
    mesh, axes = make_mesh("2x2x2-swapped", permutation=2)
    lengths = random_lengths(8)
    plan = eight_row_plan(lengths)
    specs = jb.sharding.batch_specs(
        plan, examples_of(lengths)[0], mesh, batch_axes=axes
    )
    assert list(specs) == list(plan.buckets)
    batches = local_batches(plan, lengths, 12)
    seen = set()
    for batch in jb.sharding.prefetch_to_mesh(batches, mesh, batch_axes=axes):
        seen.add(batch.bucket)
        spec = specs[batch.bucket]
        assert jax.tree.structure(spec) == jax.tree.structure(batch)
        for a, b in zip(jax.tree.leaves(spec), jax.tree.leaves(batch), strict=True):
            assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    assert seen == set(plan.buckets)


@pytest.mark.parametrize("dtype", ["i4", "i8", "f8", "f2", ">i4", ">f8", "?", "c16"])
def test_numbers_are_converted_to_the_dtypes_of_devices(dtype):
    mesh = jb.data_mesh(jax.devices()[:1])
    x = np.array([1, 0, 300]).astype(dtype)
    if "f" in dtype:
        x[:2] = np.inf, np.nan
    batch = jb.data.collate_rows([{"x": x}], jb.Bucket(1, 3))
    (on_mesh,) = jb.sharding.prefetch_to_mesh([batch], mesh)
    np.testing.assert_array_equal(on_mesh.features["x"][0], x)
    plan = jb.BucketPlan.from_shapes([(1, 3)])
    (spec,) = jb.sharding.batch_specs(plan, {"x": x}, mesh).values()
    assert spec.features["x"].dtype == on_mesh.features["x"].dtype


# Refusals


@pytest.mark.parametrize(
    "x",
    [
        *(
            np.array([7, 2**40 + 3]),
            np.array([1e-300, np.inf, -1e39]),
            np.array([1e39j]),
        ),
        np.zeros(3, np.longdouble),
    ],
    ids=lambda x: x.dtype.str,
)
def test_numbers_that_do_not_fit_on_devices_are_refused(x):
    batch = jb.data.collate_rows([{"x": x}], jb.Bucket(8, 4))
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        next(jb.sharding.prefetch_to_mesh([batch], jb.data_mesh()))
    message = "".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "`batch.features['x']`" in message


PLAN = jb.BucketPlan.from_shapes([(6, 4)])


def specs(mesh, **options):
    return jb.sharding.batch_specs(PLAN, {"x": np.zeros(3, np.int32)}, mesh, **options)


def first_of(batches, mesh, **options):
    return next(jb.sharding.prefetch_to_mesh(batches, mesh, **options))


def cut_rows(batch_size, seq_len, max_row_shards=8):
    mesh = jb.data_mesh(jax.devices()[:8], max_row_shards=max_row_shards)
    return batch_sharding(mesh, bucket=jb.Bucket(batch_size, seq_len))


MESH = jb.data_mesh()


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: jb.sharding.local_rows(MESH, batch_axes=()), "batch_axes"),
        (lambda: specs(MESH, batch_axes=("data", "rows")), "batch_axes"),
        (lambda: jb.sharding.local_rows(jax.devices()), "mesh"),
        (lambda: jb.sharding.replicate({}, jax.devices()), "mesh"),
        (lambda: rows_of_devices(MESH, []), "jax.devices()"),
        # B is no multiple of the parts of the mesh, or of this process.
        (lambda: specs(MESH), "batch_size"),
        # The shape of the labels depends on the number of examples in a row.
        (
            lambda: jb.sharding.batch_specs(
                jb.BucketPlan.from_shapes([(8, 4)], packed=True),
                {"x": np.zeros(3), "label": 1},
                MESH,
            ),
            "max_segments",
        ),
        (
            lambda: jb.batch_dataset(
                examples_of(np.full(6, 4)),
                jb.BatchSchedule(PLAN, np.full(6, 4)),
                shard=jb.sharding.local_rows(MESH),
            ),
            "batch_size",
        ),
        (
            lambda: first_of(
                [jb.data.collate_rows([{"x": np.ones(3)}], jb.Bucket(6, 4))], MESH
            ),
            "jb.sharding.local_rows",
        ),
        (lambda: jb.data_mesh(jax.devices()[:8], max_row_shards=3), "max_row_shards"),
        (lambda: jb.data_mesh(jax.devices()[:8], max_row_shards=0), "max_row_shards"),
        (
            lambda: batch_sharding(MESH, PartitionSpec("data", "row1", "row2")),
            "batch_axes",
        ),
        (lambda: cut_rows(6, 9), "seq_len_multiple"),
        (lambda: cut_rows(1, 4), "seq_len_multiple"),
        (lambda: cut_rows(1, 8, max_row_shards=4), "data_mesh(max_row_shards="),
        (lambda: cut_rows(4, 4, max_row_shards=1), "batch_size_multiple"),
    ],
)
def test_invalid_arguments_are_refused(call, name):
    with pytest.raises(ValueError, match=f"`{re.escape(name)}"):
        call()


# States that are donated, and buffers that are reused


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("kind", ["numpy", "replicated", "first device", "second"])
def test_donating_a_replicated_state_keeps_the_original(kind, num_devices):
    mesh = jb.data_mesh(jax.devices()[:num_devices])
    original = np.arange(1024, dtype=np.float32)
    places = {
        "replicated": NamedSharding(mesh, PartitionSpec()),
        "first device": jax.devices()[0],
        "second": jax.devices()[1],
    }
    if kind in places:
        original = jax.device_put(original, places[kind], may_alias=False)
    copy = jb.sharding.replicate({"w": original}, mesh)
    jax.block_until_ready(jax.jit(lambda w: w + 1, donate_argnums=0)(copy["w"]))
    assert copy["w"].is_deleted()
    np.testing.assert_array_equal(original, np.arange(1024))
    if kind == "numpy":
        copy = jb.sharding.replicate(original, mesh)
        original[:] = 7
        np.testing.assert_array_equal(copy, np.arange(1024))


def test_a_state_with_tied_arrays_may_be_donated():
    tied = jnp.ones(4)
    state = jb.sharding.replicate({"a": tied, "b": tied}, jb.data_mesh())
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    np.testing.assert_array_equal(add(state)["b"], [2, 2, 2, 2])


@pytest.mark.parametrize("num_devices", [1, 8])
def test_a_loader_may_reuse_its_buffers(num_devices):
    raw = np.zeros(8 * 1024 * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    buffer = raw[start : start + 8 * 1024 * 4].view(np.int32).reshape(8, 1024)

    def reusing():
        for n in range(5):
            buffer[:] = n
            ones = np.ones((8, 1024), np.int32)
            yield jb.Batch({"x": buffer}, {"x": ones}, {"x": 0 * ones})

    mesh = jb.data_mesh(jax.devices()[:num_devices])
    got = [
        np.unique(b.features["x"]).tolist()
        for b in jb.sharding.prefetch_to_mesh(reusing(), mesh)
    ]
    assert got == [[0], [1], [2], [3], [4]]


# (B, T) -> the number of devices that share a row, of eight.
CUTS = {(16, 3): 1, (8, 7): 1, (4, 6): 2, (12, 8): 2, (2, 12): 4, (1, 8): 8, (3, 16): 8}


@pytest.mark.parametrize("permutation", PERMUTATIONS)
@pytest.mark.parametrize("num_hosts", [1, 2, 4, 8])
def test_a_host_loads_the_whole_rows_of_which_its_devices_hold_a_part(
    num_hosts, permutation
):
    mesh = jb.data_mesh(jax.devices()[:8], max_row_shards=8)
    if permutation is not None:
        devices = np.random.default_rng(permutation).permutation(mesh.devices.flat)
        mesh = jb.data_mesh(devices.tolist(), max_row_shards=8)
    for (batch_size, seq_len), cut in CUTS.items():
        bucket = jb.Bucket(batch_size, seq_len)
        sharding = batch_sharding(mesh, bucket=bucket)
        assigned = sharding.devices_indices_map((batch_size, seq_len))
        for host in make_hosts(num_hosts):
            shard = rows_of_devices(mesh, host)
            assert shard.cut(bucket) == cut
            needed = {
                row for x in host for row in range(*assigned[x][0].indices(batch_size))
            }
            assert shard.of(bucket).rows(batch_size).tolist() == sorted(needed)
            widths = {len(range(*assigned[x][1].indices(seq_len))) for x in host}
            assert widths == {seq_len // cut}


def test_batches_of_cut_rows_have_the_values_of_whole_rows():
    mesh = jb.data_mesh(jax.devices()[:8], max_row_shards=4)
    assert dict(mesh.shape) == {"data": 2, "row1": 2, "row2": 2}
    lengths = np.array([24, 21, 17, 24])
    source, plan = examples_of(lengths), jb.BucketPlan.from_shapes([(2, 24)])
    schedule = jb.BatchSchedule(plan, lengths)
    loader = jb.MeshLoader(source, schedule, mesh, sequences=["tokens", "vectors"])
    local = jb.batch_dataset(source, schedule, sequences=["tokens", "vectors"])
    for batch, expected in zip(loader, local, strict=True):
        for got, want in zip(
            jax.tree.leaves(batch), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        cut = PartitionSpec("data", ("row1", "row2"))
        for name in ("tokens", "vectors"):
            assert batch.features[name].sharding.spec == cut
        # One value per example has no columns.
        assert batch.features["label"].sharding.spec == PartitionSpec("data")
    (spec,) = loader.specs.values()
    jax.tree.map(lambda x, y: x.sharding == y.sharding or pytest.fail(), spec, batch)


def test_axes_of_rows_may_have_any_names():
    mesh = jax.make_mesh(
        (2, 2, 2),
        ("replica", "seq", "tensor"),
        axis_types=(jax.sharding.AxisType.Auto,) * 3,
    )
    axes = PartitionSpec("replica", "seq")
    shard = rows_of_devices(mesh, mesh.devices.flat, axes)
    assert (shard.num_parts, shard.cuts) == (4, (1, 2))
    spec = batch_sharding(mesh, axes, bucket=jb.Bucket(2, 8)).spec
    assert spec == PartitionSpec("replica", "seq")
