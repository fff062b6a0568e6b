"""`sample_sort` compared with `np.lexsort`, on one and on several devices."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxbucket import data_mesh
from jaxbucket.compile import count_compiles
from jaxbucket.sort import sample_sort
from jaxbucket.sort.keys import Column

DEVICES = [1, 2, 3, 4, 8]
DTYPES = [np.dtype(x) for x in "? i1 u1 i2 u2 i4 u4 i8 u8 f2 f4 f8".split()]


def lexsort(columns, descending):
    """Returns the expected order: NaN last, equal keys by index."""
    ranks = [np.arange(len(columns[0]))]
    for column, is_descending in zip(
        reversed(columns), reversed(descending), strict=True
    ):
        values, rank = np.unique(column, return_inverse=True)
        if is_descending:
            last = len(values) - 1 if values[-1] != values[-1] else len(values)
            rank = np.where(rank == last, last + 1, last - rank)
        ranks.append(rank)
    return np.lexsort(ranks)


def assert_sorted(shares, columns, descending):
    order = np.full(len(columns[0]), -1)
    for share in shares:
        keys = share.keys if isinstance(share.keys, tuple) else (share.keys,)
        order[list(share.ranks)] = share.index
        for sorted_column, column in zip(keys, columns, strict=True):
            assert sorted_column.dtype == column.dtype
            np.testing.assert_array_equal(sorted_column, column[share.index])
    np.testing.assert_array_equal(order, lexsort(columns, descending))
    sizes = [len(share.ranks) for share in shares]
    assert max(sizes) - min(sizes) <= 1


def mesh_of(count):
    return data_mesh(jax.devices()[:count])


def random_column(rng, size):
    dtype = rng.choice(DTYPES)
    kind = rng.choice(["few", "same", "most", "sorted", "reversed", "all"])
    keys = rng.integers(0, {"few": 3, "same": 1}.get(kind, 100), size)
    if kind == "all" and dtype.kind in "iu":
        ends = np.iinfo(dtype)
        keys = rng.integers(ends.min, ends.max, size, dtype, endpoint=True)
    if kind == "most":
        keys[rng.random(size) < 0.9] = 7
    if kind in ("sorted", "reversed"):
        keys = np.sort(keys)[:: 1 if kind == "sorted" else -1]
    keys = keys.astype(dtype)
    if dtype.kind == "f":
        keys -= dtype.type(50)
        odd = rng.random(size) < 0.1
        keys[odd] = rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0], odd.sum())
    return keys


@pytest.mark.parametrize(
    "seed",
    [
        *range(30),
        *(pytest.param(i, marks=pytest.mark.exhaustive) for i in range(30, 150)),
    ],
)
def test_random_columns_are_sorted_like_lexsort(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.choice([1, 2, 7, 9, 100, 1000, 20_000, 100_003]))
    count = int(rng.integers(1, 4))
    columns = tuple(random_column(rng, size) for _ in range(count))
    descending = [bool(x) for x in rng.integers(0, 2, count)]
    result = sample_sort(
        columns,
        mesh_of(rng.choice(DEVICES)),
        descending=descending,
        assignment=["contiguous", "interleaved"][seed % 2],
    )
    assert_sorted(result, columns, descending)


@pytest.mark.parametrize("size", [1, 5, 8, 27])
def test_the_ranks_of_the_devices(size):
    def ranks(assignment):
        shares = sample_sort(np.arange(size)[::-1], mesh_of(8), assignment=assignment)
        return [list(share.ranks) for share in shares]

    ends = [d * size // 8 for d in range(9)]
    assert ranks("contiguous") == [
        list(range(a, b)) for a, b in itertools.pairwise(ends)
    ]
    assert ranks("interleaved") == [list(range(d, size, 8)) for d in range(8)]


def test_jax_arrays_lists_and_any_byte_order_are_accepted():
    keys = np.random.default_rng(0).permutation(4096).astype(np.int32)
    mesh = data_mesh()
    sharded = jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data")))
    for array in (sharded, keys.tolist()):
        assert_sorted(sample_sort(array, mesh), [np.asarray(array)], [False])
    swapped = sample_sort(keys.astype(">f8"), mesh)
    assert_sorted(swapped, [keys.astype(float)], [False])


def test_any_mesh_may_be_used():
    keys = np.random.default_rng(0).integers(0, 50, 1000)
    devices = np.array(jax.devices())
    for mesh in (
        Mesh(devices.reshape(2, 4), ("a", "b")),
        Mesh(devices[::-1], ("x",)),
        Mesh(devices[[5, 1, 3]], ("x",)),
    ):
        assert_sorted(sample_sort(keys, mesh), [keys], [False])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_the_current_mesh_does_not_matter(kind, count):
    keys = np.random.default_rng(0).integers(0, 50, 1000)
    current = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    with jax.set_mesh(current):
        assert_sorted(sample_sort(keys, mesh_of(count)), [keys], [False])
    with jax.disable_jit():
        assert_sorted(sample_sort(keys, mesh_of(count)), [keys], [False])


def test_shapes_are_compiled_once():
    rng = np.random.default_rng(0)
    # No other test has compiled for this mesh.
    mesh = Mesh(np.array(jax.devices())[[6, 1, 7, 2]], ("x",))
    with count_compiles() as first:
        sample_sort(rng.integers(0, 1000, 50_000), mesh)
    with count_compiles() as again:
        for size in (40_000, 50_000, 60_000):
            sample_sort(rng.integers(0, 1000, size), mesh)
    names = {"gather_parts", "exchange_chunks"}
    assert names <= set(first)
    # In the worst case, the other sizes need a different power of two.
    assert sum(again[name] for name in names) <= 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("descending", [False, True])
def test_encoding_preserves_order_and_can_be_inverted(dtype, descending):
    rng = np.random.default_rng(0)
    if dtype.kind == "f":
        keys = rng.integers(0, 256, 4000 * dtype.itemsize, np.uint8).view(dtype)
        keys = np.concatenate([keys, np.array([0, -0.0, np.inf, -np.inf], dtype)])
    else:
        ends = (0, 1) if dtype.kind == "b" else np.iinfo(dtype)
        low, high = ends if dtype.kind == "b" else (ends.min, ends.max)
        keys = rng.integers(low, high, 4000, "u1" if dtype.kind == "b" else dtype)
        keys = np.concatenate([keys.astype(dtype), np.array([low, high], dtype)])
    column = Column(dtype, descending)
    bits = column.encode(keys)
    np.testing.assert_array_equal(
        np.argsort(bits, kind="stable"), lexsort([keys], [descending])
    )
    np.testing.assert_array_equal(column.decode(bits.copy()), keys)


@pytest.mark.parametrize(
    ("keys", "options", "name"),
    [
        (np.zeros(0, int), {}, "keys"),
        (np.zeros((2, 3)), {}, "keys"),
        (["a", "b"], {}, "keys"),
        ([1j], {}, "keys"),
        ((), {}, "keys"),
        (([1], [1, 2]), {}, "keys"),
        (([1], [2]), {"descending": [True, False, True]}, "descending"),
        ([1], {"descending": "no"}, "descending"),
        ([1], {"descending": None}, "descending"),
        ([1], {"assignment": "striped"}, "assignment"),
    ],
)
def test_invalid_arguments_are_refused(keys, options, name):
    with pytest.raises(ValueError, match=f"`{name}"):
        sample_sort(keys, mesh_of(2), **options)
