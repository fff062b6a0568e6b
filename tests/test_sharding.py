"""Rows of devices and hosts, compared with the assignment of jax."""

import itertools
import math
import os
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxbucket as jb
from jaxbucket.sharding import batch_sharding, rows_of_devices

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


class Examples:
    """Examples of given lengths, computed from their index."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        values = index + np.arange(self.lengths[index])
        return {
            "tokens": (values % 32_749).astype(np.int32),
            "vectors": np.stack([values, -values], axis=1).astype(np.float32),
            "label": np.int32(index),
        }


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
    return jb.batch_dataset(Examples(lengths), schedule, num_steps=num_steps)


def eight_row_plan(lengths: np.ndarray) -> jb.BucketPlan:
    return jb.plan_buckets(
        lengths, max_tokens=1600, num_buckets=3, batch_size_multiple=8
    )


class CountingIterator:
    """Counts the items that have been read."""

    def __init__(self, items):
        self.items = iter(items)
        self.num_read = 0

    def __iter__(self):
        return self

    def __next__(self):
        item = next(self.items)
        self.num_read += 1
        return item


# data_mesh


def test_data_mesh_contains_all_devices_in_order():
    mesh = jb.data_mesh()
    assert dict(mesh.shape) == {"data": jax.device_count()}
    assert list(mesh.devices.flat) == jax.devices()


def test_data_mesh_keeps_the_given_devices():
    devices = jax.devices()[4:1:-1]
    assert list(jb.data_mesh(devices).devices.flat) == devices


def test_data_mesh_leaves_partitioning_to_the_compiler():
    (axis_type,) = jb.data_mesh().axis_types
    assert axis_type == jax.sharding.AxisType.Auto


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


def test_hosts_across_a_model_axis_need_the_same_rows():
    mesh, axes = make_mesh("1x8-model")
    shards = {rows_of_devices(mesh, host, axes) for host in make_hosts(4)}
    assert shards == {jb.data.RowShard((0,), 1, ("data",))}


def test_a_host_with_interleaved_devices_has_scattered_rows():
    devices = jax.devices()[:8]
    mesh = jb.data_mesh(devices[::2] + devices[1::2])
    shard = rows_of_devices(mesh, devices[:4], "data")
    assert shard.parts == (0, 1, 4, 5)


@pytest.mark.parametrize(
    ("num_devices", "seed"),
    [
        (8, 0),
        *(
            pytest.param(num_devices, seed, marks=EXHAUSTIVE)
            for num_devices in (1, 2, 8)
            for seed in (1, 2)
        ),
    ],
)
def test_rows_match_the_assignment_of_jax(num_devices, seed):
    lengths = random_lengths(seed)
    schedule = jb.BatchSchedule(eight_row_plan(lengths), lengths, seed=seed)
    devices = jax.devices()[:num_devices]
    assert_rows_match_jax(
        *(Examples(lengths), schedule, jb.data_mesh(devices), "data", [devices]),
        steps=range(len(schedule)),
    )


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
        Examples(lengths), schedule, mesh, axes, make_hosts(num_hosts), steps
    )


@pytest.mark.exhaustive
def test_rows_match_the_assignment_of_jax_with_real_lengths(real_lengths):
    plan = jb.plan_buckets(
        real_lengths,
        max_tokens=8 * int(real_lengths.max()),
        num_buckets=4,
        batch_size_multiple=8,
    )
    schedule = jb.BatchSchedule(plan, real_lengths)
    for layout in ("8", "4x2-model", "2x2x2"):
        mesh, axes = make_mesh(layout, permutation=3)
        assert_rows_match_jax(
            *(Examples(real_lengths), schedule, mesh, axes, make_hosts(2)),
            steps=(0, len(schedule) - 1, len(schedule)),
        )


def test_hosts_load_each_row_once_without_a_model_axis():
    mesh, axes = make_mesh("8", permutation=0)
    shards = [rows_of_devices(mesh, host, axes) for host in make_hosts(4)]
    rows = np.concatenate([shard.rows(24) for shard in shards])
    np.testing.assert_array_equal(np.sort(rows), np.arange(24))


# prefetch_to_mesh


@pytest.mark.parametrize("permutation", [pytest.param(None, marks=EXHAUSTIVE), 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_equal_the_numpy_batch(layout, permutation):
    mesh, axes = make_mesh(layout, permutation)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_global_arrays_are_sharded_over_the_batch_axes(layout):
    mesh, axes = make_mesh(layout)
    lengths = random_lengths(6)
    batches = local_batches(eight_row_plan(lengths), lengths, 1)
    (batch,) = jb.sharding.prefetch_to_mesh(batches, mesh, batch_axes=axes)
    for leaf in jax.tree.leaves(batch):
        assert leaf.sharding == NamedSharding(mesh, PartitionSpec(axes))
        assert leaf.sharding == batch_sharding(mesh, axes)


@pytest.mark.parametrize("num_batches", [0, 1, 4, 7])
@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_prefetch_keeps_order_and_number(size, num_batches):
    mesh = jb.data_mesh()
    batches = [
        jb.data.collate_rows([{"x": np.array([n], np.int32)}], jb.Bucket(8, 4))
        for n in range(num_batches)
    ]
    on_mesh = jb.sharding.prefetch_to_mesh(iter(batches), mesh, size=size)
    got = [int(np.asarray(batch.features["x"])[0, 0]) for batch in on_mesh]
    assert got == list(range(num_batches))


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_prefetch_reads_size_batches_ahead_and_no_more(size):
    batch = jb.data.collate_rows([{"x": np.array([1], np.int32)}], jb.Bucket(8, 4))
    batches = CountingIterator([batch] * 8)
    on_mesh = jb.sharding.prefetch_to_mesh(batches, jb.data_mesh(), size=size)
    for num_yielded in range(1, 9):
        next(on_mesh)
        assert batches.num_read == min(num_yielded + size, 8)


def test_prefetch_accepts_a_dataset():
    lengths = random_lengths(7)
    dataset = local_batches(eight_row_plan(lengths), lengths, 5)
    buckets = [
        batch.bucket for batch in jb.sharding.prefetch_to_mesh(dataset, jb.data_mesh())
    ]
    assert buckets == [dataset[step].bucket for step in range(5)]


def test_prefetch_raises_errors_of_the_loader():
    def broken():
        raise OSError("disk on fire")
        yield

    with pytest.raises(OSError, match="disk on fire"):
        next(jb.sharding.prefetch_to_mesh(broken(), jb.data_mesh()))


PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
import jaxbucket as jb

devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
orders = {
    ("data",): [[0, 4, 1, 5, 2, 6, 7, 3], (8,)],
    ("data", "model"): [[0, 4, 1, 5, 6, 2, 7, 3], (4, 2)],
    ("model", "data"): [[3, 2, 4, 0, 1, 5, 7, 6], (2, 4)],
}
lengths = np.random.default_rng(0).integers(1, 20, 150)
source = [{"x": np.arange(n) + 1000 * k, "y": k} for k, n in enumerate(lengths)]
source = [{k: np.asarray(v, np.int32) for k, v in x.items()} for x in source]
plan = jb.plan_buckets(lengths, max_tokens=320, num_buckets=3, batch_size_multiple=8)
schedule = jb.BatchSchedule(plan, lengths)
parts = []
for names, (order, shape) in orders.items():
    mesh = Mesh(np.array([devices[i] for i in order]).reshape(shape), names)
    shard = jb.sharding.local_rows(mesh)
    parts.append(shard.parts)
    local = jb.batch_dataset(source, schedule, shard=shard)
    whole = jb.batch_dataset(source, schedule)
    for got, want in zip(jb.sharding.prefetch_to_mesh(local, mesh), whole, strict=True):
        assert got.bucket == want.bucket
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert len(a.addressable_shards) == 4
            for piece in a.addressable_shards:
                np.testing.assert_array_equal(piece.data, b[piece.index])
print("parts", parts)
"""


@pytest.mark.exhaustive
def test_two_processes_place_their_rows_correctly():
    # The processes are real, because a single process always has all parts.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index)],
            env={
                "JAX_PLATFORMS": "cpu",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    try:
        results = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    lines = [output.splitlines()[-1] for output, _ in results]
    assert lines == [
        "parts [(0, 2, 4, 7), (0, 1, 2, 3), (0, 1, 3)]",
        "parts [(1, 3, 5, 6), (0, 1, 2, 3), (1, 2, 3)]",
    ]


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


def make_original(kind: str, mesh: Mesh):
    values = np.arange(1024, dtype=np.float32)
    if kind == "numpy":
        return values
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.device_put(values, sharding, may_alias=False)


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("kind", ["numpy", "replicated"])
def test_donating_a_replicated_state_keeps_the_original(kind, num_devices):
    mesh = jb.data_mesh(jax.devices()[:num_devices])
    original = make_original(kind, mesh)
    copy = jb.sharding.replicate({"w": original}, mesh)
    jax.block_until_ready(jax.jit(lambda w: w + 1, donate_argnums=0)(copy["w"]))
    assert copy["w"].is_deleted()
    np.testing.assert_array_equal(original, np.arange(1024))


def test_replicate_keeps_random_keys():
    key = jb.sharding.replicate(jax.random.key(3), jb.data_mesh())
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    np.testing.assert_array_equal(
        jax.random.key_data(key), jax.random.key_data(jax.random.key(3))
    )


# batch_specs


@pytest.mark.parametrize(
    "layout",
    [
        *(
            pytest.param(name, marks=EXHAUSTIVE)
            for name in LAYOUTS
            if name != "2x2x2-swapped"
        ),
        "2x2x2-swapped",
    ],
)
def test_specs_match_real_batches(layout):
    mesh, axes = make_mesh(layout, permutation=2)
    lengths = random_lengths(8)
    plan = eight_row_plan(lengths)
    specs = jb.sharding.batch_specs(plan, Examples(lengths)[0], mesh, batch_axes=axes)
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


def test_specs_have_the_dtypes_of_arrays_on_devices():
    mesh = jb.data_mesh()
    plan = jb.BucketPlan((jb.Bucket(8, 4),), max_tokens=32)
    example = {"x": np.arange(3, dtype=np.int64), "y": np.float64(1)}
    (spec,) = jb.sharding.batch_specs(plan, example, mesh).values()
    batch = jb.data.collate_rows([example], jb.Bucket(8, 4))
    (real,) = jb.sharding.prefetch_to_mesh([batch], mesh)
    assert {name: x.dtype for name, x in spec.features.items()} == {
        "x": jnp.int32,
        "y": jnp.float32,
    }
    assert jax.tree.map(lambda x: x.dtype, spec) == jax.tree.map(
        lambda x: x.dtype, real
    )


def test_specs_pad_only_the_named_sequences():
    plan = jb.BucketPlan((jb.Bucket(8, 4),), max_tokens=32)
    example = {"x": np.zeros(3, np.int32), "fixed": np.zeros(7, np.float32)}
    specs = jb.sharding.batch_specs(plan, example, jb.data_mesh(), sequences=["x"])
    features = specs[jb.Bucket(8, 4)].features
    assert {name: x.shape for name, x in features.items()} == {
        "x": (8, 4),
        "fixed": (8, 7),
    }


# Invalid arguments


@pytest.mark.parametrize(
    ("batch_axes", "shown"),
    [("rows", "'rows'"), (("data", "rows"), r"\('data', 'rows'\)"), ((), r"\(\)")],
)
def test_unknown_batch_axes_are_rejected(batch_axes, shown):
    mesh = jb.data_mesh()
    plan = jb.BucketPlan((jb.Bucket(8, 4),), max_tokens=32)
    example = {"x": np.zeros(3, np.int32)}
    message = rf"`batch_axes={shown}`, but the mesh has axes \('data',\)\. Pass one"
    for call in (
        lambda: jb.sharding.local_rows(mesh, batch_axes=batch_axes),
        lambda: jb.sharding.prefetch_to_mesh([], mesh, batch_axes=batch_axes),
        lambda: jb.sharding.batch_specs(plan, example, mesh, batch_axes=batch_axes),
        lambda: batch_sharding(mesh, batch_axes),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_mesh_without_a_device_of_this_process_is_rejected():
    with pytest.raises(ValueError, match=r"No device .* process\. .*`jax.devices\(\)`"):
        rows_of_devices(jb.data_mesh(), [])


def test_an_invalid_prefetch_size_is_rejected():
    for size, message in ((-1, "must not be negative"), (2.5, "is not an integer")):
        with pytest.raises(ValueError, match=f"`size={size}` {message}"):
            jb.sharding.prefetch_to_mesh([], jb.data_mesh(), size=size)


def test_a_local_batch_that_does_not_fit_the_parts_is_rejected():
    batch = jb.data.collate_rows([{"x": np.zeros(3, np.int32)}], jb.Bucket(6, 4))
    message = (
        r"has 6 rows, .* 8 parts .* Load the rows of `jb.sharding.local_rows\(mesh\)`"
    )
    with pytest.raises(ValueError, match=message):
        next(jb.sharding.prefetch_to_mesh([batch], jb.data_mesh()))


@pytest.mark.parametrize(
    ("layout", "axes", "num_parts"),
    [("8", "('data',)", 8), ("2x2x2", "('replica', 'data')", 4)],
)
def test_batch_axes_that_do_not_divide_a_batch_are_rejected(layout, axes, num_parts):
    mesh, batch_axes = make_mesh(layout)
    lengths = np.array([4, 4, 4, 4, 4, 4])
    plan = jb.BucketPlan((jb.Bucket(6, 4),), max_tokens=24)
    schedule = jb.BatchSchedule(plan, lengths)
    shard = jb.sharding.local_rows(mesh, batch_axes=batch_axes)
    for call in (
        lambda: jb.sharding.batch_specs(
            plan, Examples(lengths)[0], mesh, batch_axes=batch_axes
        ),
        lambda: jb.batch_dataset(Examples(lengths), schedule, shard=shard),
    ):
        with pytest.raises(ValueError) as error:
            call()
        message = str(error.value)
        assert f"`batch_size=6` cannot be split into {num_parts}" in message
        assert f"mesh axes {axes}" in message
        assert f"`batch_size_multiple={num_parts}`" in message


@pytest.mark.parametrize("num_devices", [1, 2, 8])
@pytest.mark.parametrize("device", [0, 1])
def test_donating_a_replicated_state_keeps_an_array_on_one_device(device, num_devices):
    original = jax.device_put(np.arange(4.0, dtype=np.float32), jax.devices()[device])
    copy = jb.sharding.replicate(
        {"w": original}, jb.data_mesh(jax.devices()[:num_devices])
    )
    jax.block_until_ready(jax.jit(lambda w: w + 1, donate_argnums=0)(copy["w"]))
    assert not original.is_deleted()
    np.testing.assert_array_equal(original, np.arange(4))


def test_a_state_with_tied_arrays_may_be_donated():
    tied = jnp.ones(4)
    state = jb.sharding.replicate({"a": tied, "b": tied}, jb.data_mesh())
    add = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    np.testing.assert_array_equal(add(state)["b"], [2, 2, 2, 2])


def test_a_replicated_state_does_not_alias_numpy_arrays():
    original = np.zeros(1024, np.float32)
    copies = [
        jb.sharding.replicate(original, jb.data_mesh(jax.devices()[:k])) for k in (1, 8)
    ]
    original[:] = 7
    for copy in copies:
        np.testing.assert_array_equal(copy, np.zeros(1024))


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


def test_integers_that_do_not_fit_on_devices_are_rejected():
    batch = jb.data.collate_rows([{"x": np.array([7, 2**40 + 3])}], jb.Bucket(8, 4))
    message = (
        r"`batch.features\['x'\]` holds 1099511627779, which does not fit into int32"
    )
    with pytest.raises(ValueError, match=message):
        next(jb.sharding.prefetch_to_mesh([batch], jb.data_mesh()))


@pytest.mark.parametrize("dtype", ["f8", "c16"])
def test_floats_that_do_not_fit_on_devices_are_rejected(dtype):
    x = np.array([1e-300, np.inf, -1e39, np.nan], dtype)
    batch = jb.data.collate_rows([{"x": x}], jb.Bucket(8, 4))
    message = r"`batch.features\['x'\]` holds .*-1e\+39.*, which does not fit into"
    with pytest.raises(ValueError, match=message):
        next(jb.sharding.prefetch_to_mesh([batch], jb.data_mesh()))


def test_nonfinite_floats_are_preserved():
    x = np.array([np.inf, -np.inf, np.nan, 3e38, 0.1])
    batch = jb.data.collate_rows([{"x": x}], jb.Bucket(8, 5))
    (on_mesh,) = jb.sharding.prefetch_to_mesh([batch], jb.data_mesh())
    assert on_mesh.features["x"].dtype == np.float32
    np.testing.assert_array_equal(on_mesh.features["x"][0], x.astype(np.float32))


@pytest.mark.parametrize("dtype", [">i4", ">f8", ">i2"])
def test_numbers_in_big_endian_order_are_converted(dtype):
    example = {"x": np.array([1, 2, 300], dtype)}
    mesh = jb.data_mesh(jax.devices()[:1])
    batch = jb.data.collate_rows([example], jb.Bucket(1, 3))
    (on_mesh,) = jb.sharding.prefetch_to_mesh([batch], mesh)
    assert on_mesh.features["x"].tolist() == [[1, 2, 300]]
    specs = jb.sharding.batch_specs(jb.BucketPlan.from_shapes([(1, 3)]), example, mesh)
    assert specs[jb.Bucket(1, 3)].features["x"].dtype == on_mesh.features["x"].dtype


@pytest.mark.parametrize("dtype", ["i4,f4", np.longdouble])
def test_dtypes_that_jax_does_not_support_are_rejected(dtype):
    example = {"x": np.zeros(3, dtype)}
    mesh = jb.data_mesh(jax.devices()[:1])
    batch = jb.data.collate_rows([example], jb.Bucket(1, 3))
    message = r"`batch.features\['x'\]` is .*, which jax does not support"
    with pytest.raises(ValueError, match=message):
        next(jb.sharding.prefetch_to_mesh([batch], mesh))
    with pytest.raises(ValueError, match=message):
        jb.sharding.batch_specs(jb.BucketPlan.from_shapes([(1, 3)]), example, mesh)


def test_wide_values_that_fit_are_converted():
    batch = jb.data.collate_rows([{"x": np.array([7, -3])}], jb.Bucket(8, 2))
    (on_mesh,) = jb.sharding.prefetch_to_mesh([batch], jb.data_mesh())
    assert on_mesh.features["x"].dtype == np.int32
    assert on_mesh.features["x"][0].tolist() == [7, -3]


def test_other_types_than_a_mesh_are_rejected():
    plan = jb.BucketPlan((jb.Bucket(8, 4),), max_tokens=32)
    for call in (
        lambda: jb.sharding.local_rows(jax.devices()),  # pyright: ignore
        lambda: jb.sharding.prefetch_to_mesh([], None),  # pyright: ignore
        lambda: jb.sharding.batch_specs(plan, {"x": [1]}, jax.devices()),  # pyright: ignore
    ):
        with pytest.raises(
            ValueError, match="`mesh` is a .*, not a mesh. Make one with"
        ):
            call()


def test_a_mesh_without_devices_is_rejected():
    with pytest.raises(ValueError, match="`devices` is empty. Pass at least one dev"):
        jb.data_mesh([])
