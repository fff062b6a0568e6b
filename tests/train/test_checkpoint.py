"""Checkpoints: what is restored, what is refused, and damaged files."""

import hashlib
import json
import pathlib
import re
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

import jaxbucket as jb

SOURCE = [{"x": np.ones(n, np.int32)} for n in (3, 1, 4, 2)]


@pytest.fixture(scope="module")
def dataset():
    lengths = jb.measure_lengths(SOURCE, progress=False)
    plan = jb.plan_buckets(lengths, max_tokens=8, num_buckets=2)
    return jb.batch_dataset(SOURCE, jb.BatchSchedule(plan, lengths), num_steps=100)


@pytest.fixture
def checkpoints(tmp_path):
    with jb.Checkpoints(tmp_path) as opened:
        yield opened


class Net(nnx.Module):
    """A model with parameters and a random state."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.dense = nnx.Linear(8, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


MESH, TX = jb.data_mesh(), optax.adam(1e-3)


def make_state(width=16, seed=0, tx=TX):
    return jb.create_state(Net(width, nnx.Rngs(seed)), tx, MESH)


def bits(tree) -> list[bytes]:
    """The bytes of every leaf."""
    return [
        np.asarray(
            jax.random.key_data(leaf)
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)
            else leaf
        ).tobytes()
        for leaf in jax.tree.leaves(tree)
    ]


def contents(folder: pathlib.Path) -> dict[str, str]:
    """A digest of every file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def steps_in(folder: pathlib.Path) -> list[str]:
    """The names in a folder, without the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


# Restoring what was saved


def test_a_state_and_its_position_are_restored_bit_for_bit(dataset, tmp_path):
    state = make_state(seed=1)
    with jb.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, dataset.position(5), {"note": [1, 2.5, None]})
        assert checkpoints.latest_step == 5
    with jb.Checkpoints(tmp_path) as checkpoints:
        restored = checkpoints.restore(make_state(seed=2))
    assert bits(restored.state) == bits(state)
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    assert restored.position == dataset.position(5)
    assert restored.extra == {"note": [1, 2.5, None]}


@pytest.mark.parametrize("model", ["nnx", "plain"])
def test_a_state_without_an_optimizer_is_restored_from_a_training_run(
    dataset, checkpoints, model
):
    mesh = jb.data_mesh()

    def make(tx=None, **options):
        value = Net(4, nnx.Rngs(int(tx is None)))
        if model == "plain":
            value = {"w": np.full(3, int(tx is None), np.float32), "b": [np.ones(1)]}
            options["variables"] = {"batch_stats": {"mean": np.ones(2)}}
        return jb.create_state(value, tx, mesh, **options)

    saved = make(optax.adam(1e-3))
    checkpoints.save(saved, dataset.position(5))
    state, position, _ = checkpoints.restore(make())
    assert state.opt_state == ()
    assert position.step == 5
    for name in ("step", "params", "frozen", "variables"):
        assert bits(getattr(state, name)) == bits(getattr(saved, name))
    assert jax.tree.structure(state) == jax.tree.structure(make())
    wider = jb.create_state(Net(5, nnx.Rngs(0)), mesh=mesh)
    with pytest.raises(ValueError, match="params.* Use the model, `wrt` and the op"):
        checkpoints.restore(wider)


def test_arrays_are_restored_into_the_requested_shardings(dataset, tmp_path):
    mesh = jb.data_mesh()
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    replicated = NamedSharding(jb.data_mesh(jax.devices()[:2]), PartitionSpec())
    value = np.arange(16, dtype=np.float32)
    for saved, asked in ((replicated, sharded), (sharded, replicated)):
        folder = tmp_path / str(asked is sharded)
        with jb.Checkpoints(folder) as checkpoints:
            checkpoints.save({"w": jax.device_put(value, saved)}, dataset.position(1))
            spec = jax.ShapeDtypeStruct((16,), np.float32, sharding=asked)
            state = checkpoints.restore({"w": spec}).state
        assert state["w"].sharding == asked
        np.testing.assert_array_equal(state["w"], value)


def test_a_state_may_be_donated_while_it_is_being_written(dataset, tmp_path):
    mesh = jb.data_mesh()
    change = jax.jit(
        lambda state: jax.tree.map(lambda x: x * 2 + 1, state), donate_argnums=0
    )
    # A separate array, because a host view of the state might keep its memory alive.
    value = np.arange(2.0**18, dtype=np.float32)
    state = jb.sharding.replicate({"w": value}, mesh)
    with jb.Checkpoints(tmp_path, keep=8) as checkpoints:
        for step in range(4):
            before = value
            checkpoints.save(state, dataset.position(step))
            for _ in range(3):
                state, value = change(state), value * 2 + 1
            w = state["w"]
            spec = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=w.sharding)
            restored = checkpoints.restore({"w": spec}).state
            np.testing.assert_array_equal(restored["w"], before)


def addresses(tree) -> set[int]:
    """The addresses of the buffers of all arrays."""
    shards = [y for x in jax.tree.leaves(tree) for y in x.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(
    ("kind", "tx"),
    [
        *(("one device", None), ("replicated", optax.adam(0.1))),
        *(("sharded", optax.adam(0.1)), ("uncommitted", None)),
    ],
)
def test_a_restored_state_is_updated_in_place(dataset, checkpoints, kind, tx):
    mesh = jb.data_mesh(jax.devices()[: 1 if kind == "one device" else 4])
    spec = PartitionSpec("data" if kind == "sharded" else None)
    params = {str(n): np.ones((64, n), np.float32) for n in (16, 32, 64)}
    if kind != "uncommitted":
        params = jax.device_put(params, NamedSharding(mesh, spec))

    def make(tx):
        state = jb.create_state(params, tx, None if kind == "uncommitted" else mesh)
        return state.params, state.opt_state and state.opt_state[0]

    def large(state):
        return addresses([x for x in jax.tree.leaves(state) if x.nbytes > 2**10])

    change = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)
    checkpoints.save(make(tx), dataset.position(1))
    for _ in range(4):
        state = jax.block_until_ready(checkpoints.restore(make(tx)).state)
        before = large(state)
        assert large(jax.block_until_ready(change(state))) == before


def injected(optimizer, **options):
    return optax.inject_hyperparams(optimizer)(**{"learning_rate": 0.1, **options})


# Functions from a constant of the optimizer to the optimizer.
INJECTED = {
    "learning_rate": lambda x: injected(optax.sgd, learning_rate=x),
    "weight_decay": lambda x: injected(
        optax.adamw, learning_rate=lambda step: 0.1, weight_decay=x
    ),
    "eps": lambda x: optax.chain(optax.clip(1.0), injected(optax.adam, eps=x)),
    "momentum": lambda x: optax.inject_hyperparams(
        lambda scale: injected(optax.sgd, momentum=x)
    )(scale=1.0),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", INJECTED)
def test_a_new_constant_that_is_ignored_is_named(dataset, checkpoints, name):
    def make(value):
        return jb.create_state({"w": jnp.ones(3)}, INJECTED[name](value))

    checkpoints.save(make(0.5), dataset.position(1))
    with pytest.warns(UserWarning, match=rf"{name}.*0.25 .*0.5 in the") as caught:
        checkpoints.restore(make(0.25))
    assert [warning.filename for warning in caught] == [__file__]
    # Nothing is said of equal constants, or of unknown ones.
    checkpoints.restore(make(0.5))
    deleted = make(0.25)
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        deleted,
    )
    jax.tree.map(lambda x: x.delete(), deleted)
    for unknown in (specs, deleted):
        checkpoints.restore(unknown)


COUNTER = optax.GradientTransformation(
    lambda params: jnp.zeros(2, jnp.int32),
    lambda updates, count, params=None: (updates, count + 1),
)
CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
SPARSE = {"w": jnp.ones(3), "none": None, "empty": {}, "layers": [{}, jnp.ones(2)]}


@pytest.mark.parametrize(
    "state",
    [
        {"w": jnp.ones(3), "n": np.ones(2), "count": 3, "none": None, "empty": ()},
        {"params": SPARSE, "opt_state": CHAIN.init(SPARSE)},
        # Its optimizer state is an array.
        jb.create_state({"w": np.ones(3)}, COUNTER),
    ],
    ids=["numbers and empty nodes", "empty states first", "array"],
)
def test_states_of_any_structure_are_restored(dataset, checkpoints, state):
    checkpoints.save(state, dataset.position(1))
    restored = checkpoints.restore(jax.tree.map(lambda x: x * 0, state)).state
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)


def count_up(state, batch):
    return state.replace(step=state.step + 1), {"tokens": batch.num_tokens}


KEY_DATA = jnp.arange(2, dtype=jnp.uint32)


def flax_state():
    return TrainState.create(apply_fn=None, params={"w": jnp.ones(3)}, tx=TX)


def test_a_new_flax_state_is_a_template_for_a_trained_one(dataset, tmp_path):
    # On several devices, because an array committed to one of them cannot be used with
    # their batches.
    mesh = jb.data_mesh(jax.devices()[:2])
    plan = jb.BucketPlan.from_shapes([(2, 4)])
    specs = jb.sharding.batch_specs(plan, SOURCE[0], mesh)
    rows = jb.data.collate_rows(SOURCE[:2], plan.buckets[0])
    batch = jax.tree.map(
        lambda x, spec: jax.device_put(x, spec.sharding), rows, specs[plan.buckets[0]]
    )
    for name, make in (
        ("new", flax_state),
        ("replicated", lambda: jb.sharding.replicate(flax_state(), mesh)),
    ):
        traces = []

        @jax.jit
        def step_fn(state, batch, traces=traces):
            traces.append(state.step)
            return count_up(state, batch)

        steps = jb.compile_steps(step_fn, make(), specs)
        state, _ = steps(make(), batch)
        with jb.Checkpoints(tmp_path / name) as checkpoints:
            checkpoints.save(state, dataset.position(1))
            restored = checkpoints.restore(make()).state
        assert type(restored.step) is type(make().step) and restored.step == 1
        # The step is neither compiled nor traced again for the restored state.
        number = len(traces)
        state, _ = steps(restored, batch)
        assert int(state.step) == 2
        direct = jax.jit(count_up)
        direct(make(), batch)
        size = direct._cache_size()
        direct(restored, batch)
        assert len(traces) == number and direct._cache_size() == size


@pytest.mark.parametrize(
    ("saved", "asked"),
    [
        (jnp.int32(3), 0.0),
        (jnp.float32(3), 0),
        (jnp.ones(1, jnp.int32), 0),
        (True, 0),
        (3, jnp.int32(0)),
        (jax.random.key(3, impl="rbg"), jax.random.key(0, impl="unsafe_rbg")),
        (KEY_DATA, jax.random.wrap_key_data(KEY_DATA)),
        (jax.random.wrap_key_data(KEY_DATA), KEY_DATA),
    ],
)
def test_a_leaf_of_another_type_is_refused(dataset, checkpoints, saved, asked):
    checkpoints.save({"n": saved}, dataset.position(1))
    with pytest.raises(ValueError, match="`state`: n is .*, but was"):
        checkpoints.restore({"n": asked})
    restored = checkpoints.restore({"n": saved}).state
    assert bits(restored) == bits({"n": saved})


@pytest.mark.parametrize(
    ("saved", "asked"),
    [(jnp.uint32(3), 0), (jnp.bfloat16(3), 0.0), (np.int64(3), np.int64(0))],
)
def test_a_number_is_restored_in_the_requested_type(dataset, checkpoints, saved, asked):
    checkpoints.save({"n": saved}, dataset.position(1))
    restored = checkpoints.restore({"n": asked}).state["n"]
    assert restored == 3 and np.asarray(restored).dtype == np.asarray(asked).dtype


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"s": "hi"}, "state['s']"),
        ({"s": [1j]}, "state['s'][0]"),
        ({"s": np.array("hi")}, "state['s']"),
        ({"s": 10**25}, "state['s']"),
        ({"s": jnp.ones((0, 3))}, "state['s']"),
        ({"a.b": jnp.ones(2), "a": {"b": jnp.zeros(2)}}, "state['a.b']"),
    ],
)
def test_leaves_that_cannot_be_saved_are_named(dataset, checkpoints, state, name):
    with pytest.raises(ValueError, match=re.escape(f"`{name}`")):
        checkpoints.save(state, dataset.position(1))
    # The refused state leaves nothing behind.
    checkpoints.save(
        {"w": jnp.ones(2), "z": jnp.ones(2, "complex64")}, dataset.position(1)
    )
    assert checkpoints.latest_step == 1


def test_only_the_newest_checkpoints_are_kept(dataset, tmp_path):
    with jb.Checkpoints(tmp_path, keep=2) as checkpoints:
        for step in (1, 2, 3, 5):
            state = {"w": jnp.full(3, float(step))}
            checkpoints.save(state, dataset.position(step))
        assert checkpoints.latest_step == 5
    assert steps_in(tmp_path) == ["3", "5"]


def test_saving_the_newest_step_again_does_nothing(dataset, tmp_path):
    for _ in range(2):
        with jb.Checkpoints(tmp_path) as checkpoints:
            if checkpoints.latest_step is not None:
                checkpoints.restore({"w": jnp.zeros(3)})
            else:
                checkpoints.save({"w": jnp.ones(3)}, dataset.position(1))
            checkpoints.save({"w": jnp.zeros(3)}, dataset.position(1))
            state = checkpoints.restore({"w": jnp.zeros(3)}).state
        np.testing.assert_array_equal(state["w"], 1)


def test_a_reader_does_not_disturb_a_writer(dataset, tmp_path):
    class Slow(jb.Checkpoints):
        writing, looked = threading.Event(), threading.Event()

        def _seal(self):
            self.writing.set()
            assert self.looked.wait(60)
            super()._seal()

    with Slow(tmp_path) as checkpoints:
        checkpoints.save({"w": jnp.ones(3)}, dataset.position(1))
        assert checkpoints.writing.wait(60)
        with jb.Checkpoints(tmp_path) as other:
            assert other.latest_step is None
        checkpoints.looked.set()
        assert checkpoints.latest_step == 1


def test_a_run_cannot_save_over_the_checkpoints_of_another(dataset, tmp_path):
    with jb.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({"w": jnp.ones(3)}, dataset.position(5))
    before = contents(tmp_path)
    for step in (3, 5, 9):
        with jb.Checkpoints(tmp_path) as checkpoints:
            with pytest.raises(ValueError, match="has a checkpoint of step 5, from"):
                checkpoints.save({"w": jnp.zeros(3)}, dataset.position(step))
    with jb.Checkpoints(tmp_path) as checkpoints:
        checkpoints.restore({"w": jnp.zeros(3)})
        with pytest.raises(ValueError, match="`position.step=3` is before step 5"):
            checkpoints.save({"w": jnp.zeros(3)}, dataset.position(3))
    assert contents(tmp_path) == before


def test_a_second_run_can_read_but_not_save(dataset, tmp_path):
    state = make_state()
    message = "Another run is saving to .* Wait until it has ended, or choose a"
    with jb.Checkpoints(tmp_path) as first, jb.Checkpoints(tmp_path) as second:
        first.save(state, dataset.position(1))
        first.wait()
        before = contents(tmp_path)
        for step in (1, 2):
            with pytest.raises(ValueError, match=message):
                second.save(state, dataset.position(step))
        with pytest.raises(ValueError, match=message):
            second.claim()
        assert contents(tmp_path) == before
        first.save(state, dataset.position(3))
    # The directory is unlocked, but another run has saved there since.
    with jb.Checkpoints(tmp_path) as third:
        assert third.restore(state).position.step == 3
        with jb.Checkpoints(tmp_path) as fourth:
            fourth.restore(state)
            fourth.save(state, dataset.position(4))
        with pytest.raises(ValueError, match="has a checkpoint of step 4, from"):
            third.save(state, dataset.position(5))


def test_a_failed_write_is_reported_and_can_be_retried(dataset, tmp_path):
    class Full(jb.Checkpoints):
        is_full = True

        def _seal(self):
            if self.is_full:
                raise OSError(28, "No space left on device")
            super()._seal()

    checkpoints = Full(tmp_path)
    checkpoints.save({"w": jnp.ones(3)}, dataset.position(2))
    message = "of step 2 could not be written to .* No space left.* There is no earlier"
    with pytest.raises(OSError, match=message):
        checkpoints.wait()
    assert checkpoints.latest_step is None
    checkpoints.is_full = False
    checkpoints.save({"w": jnp.ones(3)}, dataset.position(2))
    assert checkpoints.latest_step == 2
    checkpoints.close()


@pytest.mark.parametrize("value", [jnp.ones(3), float("nan")])
def test_extra_values_that_are_not_json_are_refused(dataset, checkpoints, value):
    with pytest.raises((TypeError, ValueError), match="JSON"):
        checkpoints.save({"w": jnp.ones(3)}, dataset.position(1), {"loss": value})
    assert checkpoints.latest_step is None


def test_a_half_written_checkpoint_is_ignored_and_replaced(dataset, tmp_path):
    with jb.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({"w": jnp.ones(3)}, dataset.position(1))
    shutil.copytree(tmp_path / "1", tmp_path / "2.orbax-checkpoint-tmp")
    with jb.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.latest_step == 1
        # The step whose checkpoint is half-written can be saved again.
        checkpoints.restore({"w": jnp.zeros(3)})
        checkpoints.save({"w": jnp.zeros(3)}, dataset.position(2))
        assert checkpoints.restore({"w": jnp.ones(3)}).position.step == 2
    assert steps_in(tmp_path) == ["1", "2"]


# Refused states and damaged checkpoints


@pytest.fixture(scope="module")
def saved(dataset, tmp_path_factory):
    """A folder with checkpoints of steps 3 and 7."""
    folder = tmp_path_factory.mktemp("saved")
    with jb.Checkpoints(folder) as checkpoints:
        for step in (3, 7):
            checkpoints.save(make_state(), dataset.position(step))
    return folder


def refusal(folder: pathlib.Path, state) -> str:
    """The message of a failed restore, which must leave the folder unchanged."""
    before = contents(folder)
    with jb.Checkpoints(folder) as checkpoints, pytest.raises(ValueError) as error:
        checkpoints.restore(state)
    assert contents(folder) == before
    return str(error.value)


def flip_last_bit(path: pathlib.Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


DAMAGES = {
    "deleted": (lambda path: path.unlink(), "is missing"),
    "truncated": (
        lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "was changed|is missing or",
    ),
    "changed": (flip_last_bit, "was changed|is missing or"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damaged_file_is_named(saved, tmp_path, damage):
    spoil, problem = DAMAGES[damage]
    sealed = json.loads((saved / "7" / "seal.json").read_text())
    assert len(sealed) > 5
    state = make_state()
    for number, name in enumerate([*sealed, "seal.json"]):
        folder = tmp_path / str(number)
        shutil.copytree(saved, folder)
        spoil(folder / "7" / name)
        message = refusal(folder, state)
        pattern = rf"7 is damaged: {re.escape(name)} ({problem})"
        assert re.search(pattern, message)
        assert message.endswith("Delete this directory to resume from step 3.")


@pytest.mark.parametrize("seal", ["{}", "[]", "null", '{"a": 1}', '{"a": [1]}'])
def test_a_seal_with_the_wrong_contents_is_refused(saved, tmp_path, seal):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    (tmp_path / "7" / "seal.json").write_text(seal)
    message = refusal(tmp_path, make_state())
    assert "7 is damaged: " in message


def test_the_suggested_remedy_works(saved, tmp_path):
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "7")
    with jb.Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(make_state()).position.step == 3
    (tmp_path / "3" / "seal.json").unlink()
    message = refusal(tmp_path, make_state())
    assert message.endswith("There is no older checkpoint to resume from.")


def test_a_different_model_or_optimizer_is_refused(saved):
    wider = refusal(saved, make_state(width=32))
    assert "params.dense.bias.value is float32[32], but was float32[16]" in wider
    other = refusal(saved, make_state(tx=optax.sgd(1e-3)))
    assert re.search(r"opt_state\..* is missing, but was", other)
    other = refusal(saved, make_state(tx=optax.adam(1e-3, mu_dtype="bfloat16")))
    assert re.search(r"mu\..* is bfloat16\[.*\], but was float32", other)
    other = refusal(saved, make_state(tx=optax.scale(-0.1)))
    assert re.search(r"opt_state\..* is missing, but was", other)


def test_restoring_without_a_checkpoint_is_refused(tmp_path):
    with jb.Checkpoints(tmp_path / "new") as checkpoints:
        with pytest.raises(ValueError, match="There is no checkpoint in .*new"):
            checkpoints.restore({"w": jnp.ones(3)})


def test_keep_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="`keep=0`"):
        jb.Checkpoints(tmp_path, keep=0)


STOPPED = """
import os, signal, time
import jax, numpy as np
import jaxbucket as jb

with jb.Processes(timeout=4) as processes:
    mesh = jb.data_mesh()
    plan = jb.BucketPlan.from_shapes([(2, 4)])
    source = [{"x": np.arange(3)}] * 2000
    batches = jb.MeshLoader(source, jb.BatchSchedule(plan, [3] * 2000), mesh)
    state = jb.sharding.replicate({"w": np.zeros(2, np.float32)}, mesh)
    checkpoints = jb.Checkpoints(FOLDER, processes=processes)
    with jb.StopRequest(processes) as stop, checkpoints:
        # The loop and the checkpoints count steps differently, as in a resumed run
        # whose loop counts from zero.
        for step in range(400):
            if stop.before(step):
                break
            if step == 20:
                checkpoints.save(state, batches.position(500 + step))
                if processes.index == 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(2.5)
            time.sleep(0.01)
record(step)
"""


@pytest.mark.exhaustive
def test_all_processes_stop_at_the_same_step_while_saving(launch, tmp_path):
    run = launch(f"FOLDER = {str(tmp_path / 'run')!r}\n{STOPPED}", grace=20)
    assert run.status == 0, run.output
    assert run.recorded(0) == run.recorded(1)
    assert 20 < int(run.recorded(0)[0]) < 399


KEYS = """
import jax, optax
from flax import nnx
import jaxbucket as jb

class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

with jb.Processes() as processes:
    mesh = jb.data_mesh()
    state = jb.create_state(Dropped(nnx.Rngs(7)), optax.sgd(0.1), mesh)
    mine = jb.sharding.replicate({"key": jax.random.key(3)}, mesh)
    batches = jb.MeshLoader(
        [{"x": [1.0]}] * 4,
        jb.BatchSchedule(jb.BucketPlan.from_shapes([(4, 1)]), [1] * 4),
        mesh,
    )
    with jb.Checkpoints(FOLDER, processes=processes) as checkpoints:
        checkpoints.save((state, mine), batches.position(0))
    with jb.Checkpoints(FOLDER, processes=processes) as checkpoints:
        (state, mine), *_ = checkpoints.restore((state, mine))
    record(float(jax.jit(jax.random.uniform)(mine["key"])))
"""


def test_random_keys_are_placed_and_restored_in_several_processes(launch, tmp_path):
    run = launch(f"FOLDER = {str(tmp_path / 'run')!r}\n{KEYS}", devices=2)
    assert run.status == 0, run.output
    expected = [str(float(jax.random.uniform(jax.random.key(3))))]
    assert run.recorded(0) == run.recorded(1) == expected
