"""`sample_sort` against `np.lexsort`, on one device, on several, in real processes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket import data_mesh
from jaxbucket.compile import count_compiles
from jaxbucket.sort import SortedKeys, accelerator, sample_sort
from jaxbucket.sort.collectives import Devices
from jaxbucket.sort.composite import Column, Composite
from jaxbucket.sort.exchange import chunk_capacity

DEVICES = [1, 2, 3, 4, 8]
DTYPES = [np.dtype(x) for x in "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8".split()]


def lexsort(columns, descending):
    """The order of all, by ranks of values: NaN last, then by index."""
    ranks = [np.arange(len(columns[0]))]
    for column, falls in zip(reversed(columns), reversed(descending), strict=True):
        values, rank = np.unique(column, return_inverse=True)
        if falls:
            last = len(values) - 1 if values[-1] != values[-1] else len(values)
            rank = np.where(rank == last, last + 1, last - rank)
        ranks.append(rank)
    return np.lexsort(ranks)


def assert_sorted(found: SortedKeys, columns, descending):
    order = np.full(len(columns[0]), -1)
    shares = found.local_shares()
    for share in shares:
        keys = share.keys if isinstance(share.keys, tuple) else (share.keys,)
        order[list(share.ranks)] = share.index
        for got, column in zip(keys, columns, strict=True):
            assert got.dtype == column.dtype
            np.testing.assert_array_equal(got, column[share.index])
    np.testing.assert_array_equal(order, lexsort(columns, descending))
    sizes = [len(share.ranks) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def mesh_of(count):
    return data_mesh(jax.devices()[:count])


def random_column(rng, size):
    dtype = rng.choice(DTYPES)
    kind = rng.choice(["few", "same", "some", "sorted", "reversed", "all"])
    keys = rng.integers(0, {"few": 3, "same": 1}.get(kind, 100), size)
    if kind == "all" and dtype.kind in "iu":
        ends = np.iinfo(dtype)
        keys = rng.integers(ends.min, ends.max, size, dtype, endpoint=True)
    if kind in ("sorted", "reversed"):
        keys = np.sort(keys)[:: 1 if kind == "sorted" else -1]
    keys = keys.astype(dtype)
    if dtype.kind == "f":
        keys -= dtype.type(50)
        odd = rng.random(size) < 0.1
        keys[odd] = rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0], odd.sum())
    return keys


@pytest.mark.parametrize("seed", range(150))
def test_it_is_a_lexsort_of_whatever_columns(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 7, 8, 9, 100, 1000, 20_000]))
    count = int(rng.integers(1, 4))
    columns = tuple(random_column(rng, size) for _ in range(count))
    descending = [bool(x) for x in rng.integers(0, 2, count)]
    found = sample_sort(
        columns,
        mesh_of(rng.choice(DEVICES)),
        descending=descending,
        assignment=["contiguous", "interleaved"][seed % 2],
    )
    assert_sorted(found, columns, descending)


def named_keys(size):
    rng = np.random.default_rng(0)
    uniform = rng.integers(0, 2**31 - 1, size, np.int32)
    floats = rng.standard_normal(size).astype(np.float32)
    return {
        "uniform": uniform,
        "90% equal": np.where(rng.random(size) < 0.9, 7, uniform),
        "all equal": np.full(size, 7),
        "sorted": np.sort(uniform),
        "reversed": np.sort(uniform)[::-1],
        "with NaN": np.where(rng.random(size) < 0.3, np.float32(np.nan), floats),
        "all NaN": np.full(size, np.nan),
        "organ pipe": np.abs(np.arange(size) - size // 2),
    }


@pytest.mark.parametrize("name", named_keys(1))
@pytest.mark.parametrize("count", DEVICES)
def test_keys_of_every_kind(name, count):
    keys = named_keys(100_003)[name]
    for falls in (False, True):
        found = sample_sort(keys, mesh_of(count), descending=falls)
        assert_sorted(found, [keys], [falls])


@pytest.mark.parametrize("count", DEVICES)
def test_real_lengths(real_lengths, count):
    found = sample_sort(real_lengths, mesh_of(count), assignment="interleaved")
    assert_sorted(found, [real_lengths], [False])


@pytest.mark.parametrize("assignment", ["contiguous", "interleaved"])
@pytest.mark.parametrize("size", [1, 5, 8, 27])
def test_the_arrays_have_a_row_for_each_device(size, assignment):
    found = sample_sort(np.arange(size)[::-1], mesh_of(8), assignment=assignment)
    keys, index = np.asarray(found.keys), np.asarray(found.index)
    assert keys.shape == index.shape == (8, -(-size // 8))
    assert index.dtype == np.int32 and keys.dtype == np.int64
    assert [shard.data.shape[0] for shard in found.index.addressable_shards] == [1] * 8
    for row in range(8):
        ranks = list(found.ranks(row))
        assert index[row].tolist() == [
            *(size - 1 - rank for rank in ranks),
            *[-1] * (index.shape[1] - len(ranks)),
        ]
        assert keys[row].tolist() == [*ranks, *[0] * (index.shape[1] - len(ranks))]
    every = sorted(itertools.chain(*map(found.ranks, range(8))))
    assert every == list(range(size))
    if assignment == "interleaved":
        assert list(found.ranks(0)) == list(range(0, size, 8))


def test_a_global_array_is_sorted_where_it_is():
    keys = np.random.default_rng(0).permutation(4096).astype(np.int32)
    mesh = data_mesh()
    cut = jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data")))
    copied = jax.device_put(keys, NamedSharding(mesh, PartitionSpec()))
    for given in (cut, copied, jax.device_put(keys), jax.device_put(keys).tolist()):
        assert_sorted(sample_sort(given, mesh), [np.asarray(given)], [False])


def test_any_mesh_will_do():
    keys = np.random.default_rng(0).integers(0, 50, 1000)
    devices = np.array(jax.devices())
    for mesh in (
        Mesh(devices.reshape(2, 4), ("a", "b")),
        Mesh(devices[::-1], ("x",)),
        Mesh(devices[[5, 1, 3]], ("x",)),
    ):
        assert_sorted(sample_sort(keys, mesh), [keys], [False])
        cut = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        if len(keys) % mesh.size == 0:
            shared = jax.device_put(keys.astype("i4"), cut)
            assert_sorted(sample_sort(shared, mesh), [np.asarray(shared)], [False])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_whatever_mesh_is_set(kind, count):
    keys = np.random.default_rng(0).integers(0, 50, 1000)
    around = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(around):
        assert_sorted(sample_sort(keys, mesh_of(count)), [keys], [False])
    with jax.disable_jit():
        assert_sorted(sample_sort(keys, mesh_of(count)), [keys], [False])


@pytest.mark.parametrize("dtype", [">i4", ">f8", "<u2"])
def test_bytes_in_any_order(dtype):
    keys = np.random.default_rng(0).integers(0, 5000, 1000).astype(dtype)
    native = keys.astype(keys.dtype.newbyteorder("="))
    assert_sorted(sample_sort(keys, mesh_of(3)), [native], [False])


def test_there_are_no_rows_but_those_of_devices():
    found = sample_sort(np.arange(9), mesh_of(4))
    for row in (-1, 4):
        with pytest.raises(ValueError, match=f"`device={row}`: there are 4 rows"):
            found.ranks(row)


def test_shapes_are_compiled_once():
    rng = np.random.default_rng(0)
    # One that no other test has.
    mesh = Mesh(np.array(jax.devices())[[6, 1, 7, 2]], ("x",))
    with count_compiles() as first:
        sample_sort(rng.integers(0, 1000, 50_000), mesh)
    with count_compiles() as again:
        for size in (40_000, 50_000, 60_000):
            sample_sort(rng.integers(0, 1000, size), mesh)
    names = {"gather_parts", "exchange_chunks"}
    assert names <= set(first)
    # Windows of twice the keys, in the worst case.
    assert sum(again[name] for name in names) <= 2


@pytest.mark.parametrize("seed", range(40))
def test_accelerators_sort_alike(seed, monkeypatch):
    monkeypatch.setattr(Devices, "platform", "gpu")
    test_it_is_a_lexsort_of_whatever_columns(seed)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "tpu"])
def test_accelerators_sort_one_operand(platform):
    sort_part = accelerator._sort(Devices(mesh_of(4)).mesh)
    with jax.enable_x64(True):
        keys = jax.ShapeDtypeStruct((32,), jnp.uint64)
        lowered = sort_part.trace(keys).lower(lowering_platforms=(platform,))
    (sort,) = (x for x in lowered.as_text().splitlines() if "stablehlo.sort" in x)
    assert sort.count("%arg") == 1


def test_shares_that_are_not_even_are_sorted_by_their_hosts(monkeypatch):
    monkeypatch.setattr(Devices, "platform", "tpu")
    devices = Devices(mesh_of(4))
    word = np.dtype(np.uint64)
    assert accelerator.devices_sort(np.array([5, 5, 4, 5]), word, devices)
    assert not accelerator.devices_sort(np.array([20, 0, 0, 0]), word, devices)
    assert not accelerator.devices_sort(np.array([5] * 4), np.dtype("S16"), devices)
    monkeypatch.undo()
    assert not accelerator.devices_sort(np.array([5] * 4), word, devices)


def test_accelerators_compile_few_shapes():
    sizes = {accelerator._rounded(size) for size in range(1, 10**6, 997)}
    assert len(sizes) < 4 * 20
    assert all(accelerator._rounded(x) <= 1.25 * x for x in range(100, 5000))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("falls", [False, True])
def test_encoded_keys_are_in_order_and_come_back(dtype, falls):
    rng = np.random.default_rng(0)
    if dtype.kind == "f":
        keys = rng.integers(0, 256, 4000 * dtype.itemsize, np.uint8).view(dtype)
        keys = np.concatenate([keys, np.array([0, -0.0, np.inf, -np.inf], dtype)])
    else:
        ends = (0, 1) if dtype.kind == "b" else np.iinfo(dtype)
        low, high = ends if dtype.kind == "b" else (ends.min, ends.max)
        keys = rng.integers(low, high, 4000, "u1" if dtype.kind == "b" else dtype)
        keys = np.concatenate([keys.astype(dtype), np.array([low, high], dtype)])
    column = Column(dtype, falls)
    bits = column.encode(keys)
    np.testing.assert_array_equal(
        np.argsort(bits, kind="stable"), lexsort([keys], [falls])
    )
    np.testing.assert_array_equal(column.decode(bits.copy()), keys)


def test_few_bits_make_one_word():
    columns = [Column(np.dtype(np.int64), False), Column(np.dtype(np.int32), True)]
    ranges = np.array([[5, 2**20], [0, 2**20]], np.uint64)
    assert Composite(columns, ranges, 2**22).dtype == np.uint64
    assert Composite(columns, ranges, 2**24).dtype == np.dtype("S16")


def test_chunks_take_no_more_than_a_part_of_a_share():
    for size in (10, 10**6, 10**8):
        counts = np.full((4, 4), size // 16)
        capacity = chunk_capacity(counts, 8)
        assert capacity & (capacity - 1) == 0
        assert 4 * 8 * capacity <= max(2**21, min(2**22, size // 4 * 8 // 4))


@pytest.mark.parametrize(
    "keys, options, message",
    [
        (np.zeros(0, int), {}, "empty in every process"),
        ([], {}, "empty list, which has no dtype"),
        (np.zeros((2, 3)), {}, r"float64\[2, 3\]: give integers, floats"),
        (["a", "b"], {}, r"`keys` is <U1\[2\]"),
        ([1j], {}, "complex128"),
        ([[1], [2, 3]], {}, "ragged"),
        ((), {}, "a tuple of 0 columns: give 1 to 8"),
        (([1], [1, 2]), {}, r"columns of \[1, 2\] rows"),
        (([1], [2]), {"descending": [True]}, "has 1 entries for 2 columns"),
        (([1], [2]), {"descending": "no"}, "give True or False, or one for each"),
        ([1], {"descending": None}, "give True or False, or one for each"),
        ([1], {"assignment": "striped"}, "`assignment='striped'`: choose"),
    ],
)
def test_what_is_no_key_is_refused(keys, options, message):
    with pytest.raises(ValueError, match=message):
        sample_sort(keys, mesh_of(2), **options)


def test_a_mask_is_not_lost():
    with pytest.raises(ValueError, match="`keys` is a masked array"):
        sample_sort(np.ma.array([3, 1, 2], mask=[0, 1, 0]), mesh_of(1))
    with pytest.raises(ValueError, match="integers that no dtype of numpy holds"):
        sample_sort([-1, 2**63], mesh_of(1))


def test_arrays_elsewhere_are_refused():
    cut = NamedSharding(data_mesh(), PartitionSpec("data"))
    keys = jax.device_put(np.arange(8, dtype=np.int32), cut)
    with pytest.raises(ValueError, match="on devices that the mesh lacks"):
        sample_sort(keys, mesh_of(4))
    other = jax.device_put(np.arange(16, dtype=np.int32), cut)
    with pytest.raises(ValueError, match="of different lengths or shardings"):
        sample_sort((keys, other), data_mesh())
    with pytest.raises(ValueError, match="others of this process alone"):
        sample_sort((keys, np.arange(8)), data_mesh())


PROCESSES = """
import hashlib
import jax, jax.numpy as jnp, numpy as np
import jaxbucket as jb

with jb.Processes() as processes:
    here, count = processes.index, processes.count
    mesh = jb.data_mesh()
    devices = mesh.size
    rng = np.random.default_rng(0)
    size = 60_001
    uniform = rng.integers(-(2**31), 2**31 - 1, size, np.int32)
    floats = rng.standard_normal(size).astype(np.float32)
    lengths = np.minimum(rng.lognormal(5, 1, size), 2048).astype(np.int32)
    cases = {
        "uniform": (uniform,),
        "lengths": (lengths,),
        "mostly equal": (np.where(rng.random(size) < 0.9, 7, uniform),),
        "equal": (np.full(size, 7),),
        "sorted": (np.sort(uniform),),
        "reversed": (np.sort(uniform)[::-1],),
        "nan": (np.where(rng.random(size) < 0.3, np.float32(np.nan), floats),),
        "wide": (rng.integers(-(2**62), 2**62, size),),
        "columns": (lengths, floats, uniform),
    }

    def shared_unevenly(column, seed):
        # Some have nothing at all.
        inner = np.random.default_rng(seed).integers(0, size, count - 1)
        ends = np.sort([0, 0 if count < 4 else size, *inner, size])[-count - 1 :]
        ends[0] = 0
        return column[ends[here] : ends[here + 1]]

    def told(found, want):
        for share in found.local_shares():
            np.testing.assert_array_equal(share.index, want[list(share.ranks)])
        sizes = [len(found.ranks(d)) for d in range(devices)]
        assert sum(sizes) == len(want) and max(sizes) - min(sizes) <= 1
        own = [share.index.tobytes() for share in found.local_shares()]
        return hashlib.sha256(b"".join(own)).hexdigest()

    for seed, (name, columns) in enumerate(cases.items()):
        want = np.lexsort(columns[::-1])
        own = tuple(shared_unevenly(column, seed) for column in columns)
        for assignment in ("contiguous", "interleaved"):
            told(jb.sort.sample_sort(own, mesh, assignment=assignment), want)
    # An array of all processes.
    cut = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    whole = uniform[: size // devices * devices]
    array = jax.make_array_from_callback(whole.shape, cut, lambda i: whole[i])
    told(jb.sort.sample_sort(array, mesh), np.argsort(whole, kind="stable"))
    say("sorted")

    # Whatever one of them gives, all of them hear of it.
    for give in (
        lambda: np.zeros((2, 2)) if here == 1 else np.zeros(4),
        lambda: np.zeros(4, np.float32 if here == 1 else np.float64),
        lambda: np.zeros(0),
    ):
        try:
            jb.sort.sample_sort(give(), mesh)
        except ValueError as error:
            say(error)
    for options in ({"assignment": "x"}, {"descending": None}, {"descending": True}):
        try:
            jb.sort.sample_sort(uniform, mesh, **(options if here == 1 else {}))
        except ValueError as error:
            say(error)
    deleted = jnp.zeros(3)
    if here == 1:
        deleted.delete()
    try:
        jb.sort.sample_sort(deleted, mesh)
    except (RuntimeError, ValueError) as error:
        say(error)
"""


@pytest.mark.parametrize("count, devices", [(2, 1), (2, 4), (4, 1)])
def test_processes_sort_together(launch, count, devices):
    run = launch(PROCESSES, count=count, devices=devices)
    assert run.status == 0, run.output
    for index in range(count):
        done, shape, dtype, empty, *others = run.said(index)
        assert len(others) == 4
        assert done == "sorted"
        if index == 1:
            assert "`keys` is float64[2, 2]" in shape
            assert "float32 ascending, contiguous; process 0" in dtype
        else:
            assert shape == "The `keys` of process 1 are refused: see what it raises."
            assert "float64 ascending, contiguous; process 1 has others" in dtype
        assert "empty in every process" in empty


MEMORY = """
import re
import numpy as np
import jaxbucket as jb

def peak():
    text = open("/proc/self/status").read()
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", text)[1])

def reset():
    open("/proc/self/clear_refs", "w").write("5")

with jb.Processes() as processes:
    here, count = processes.index, processes.count
    mesh = jb.data_mesh()
    size = 2**24
    rng = np.random.default_rng(0)
    # What is loaded, and compiled, the first time is no part of it.
    jb.sort.sample_sort(rng.integers(0, 99, size, np.int32), mesh)
    share = size // count * 8
    spread = rng.integers(0, 2**31 - 1, size // count, np.int32)
    rising = np.arange(size // count, dtype=np.int32) + here * (size // count)
    for name, keys in {
        "uniform": spread,
        "sorted": rising,
        "reversed": size - rising,
        "equal": np.zeros_like(spread),
    }.items():
        for assignment in ("contiguous", "interleaved"):
            reset()
            before = peak()
            jb.sort.sample_sort(keys, mesh, assignment=assignment)
            say(f"{name},{assignment}", (peak() - before) / share)
"""


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_memory_is_three_shares(launch, monkeypatch, platform):
    # What is freed is given back, and does not hide in what was there before.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    of = (
        f"from jaxbucket.sort.collectives import Devices\nDevices.platform={platform!r}"
    )
    run = launch(of + MEMORY, count=2)
    assert run.status == 0, run.output
    for index in range(2):
        shares = {line.split()[0]: line.split()[1] for line in run.said(index)}
        assert len(shares) == 8
        assert max(map(float, shares.values())) <= 3, shares
