"""The largest batch sizes that fit, against every batch size; and memory that ends."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from click.testing import CliRunner

import jaxbucket as jb
from jaxbucket.cli import main
from jaxbucket.compile.fit import _Result, _Search, refused_bytes
from jaxbucket.compile.steps import is_out_of_memory

TX = optax.sgd(1e-3)
WIDTH, MOST = 16, 10


def chunked(params, batch, keys):
    """A loss whose memory is not affine in B: rows are processed in chunks of 64."""
    x = batch.features["x"]
    if x.shape[0] % 64 == 0:
        x = jax.lax.map(jnp.tanh, x.reshape(64, -1, *x.shape[1:])).reshape(x.shape)
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2), batch.num_tokens


def plain(params, batch, keys):
    return jnp.sum(jnp.tanh(batch.features["x"] @ params["w"]) ** 2), batch.num_tokens


def make_recipe(loss_fn, num_devices=1, calls=None):
    def recipe(plan, *options):
        if calls is not None:
            calls.append(plan)
        mesh = jb.data_mesh(jax.devices()[:num_devices])
        params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
        state = jb.create_state(params, TX, mesh)
        specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, WIDTH), "f4")}, mesh)
        return {"train": (jb.make_train_step(loss_fn, TX, mesh), state, specs)}

    return recipe


recipe = make_recipe(plain)
fit = functools.partial(jb.compile.fit_batch_sizes, progress=False)


@functools.cache
def peaks(loss_fn, multiple, seq_len, num_devices):
    """The memory of every multiple."""
    needed = []
    for k in range(1, MOST + 1):
        plan = jb.BucketPlan.from_shapes([(k * multiple, seq_len)])
        step = make_recipe(loss_fn, num_devices)(plan)["train"]
        report = jb.compile_steps(*step, progress=False).report
        needed.append(report.programs[0].peak_bytes)
    return needed


SLOW = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("loss_fn", "multiple", "seq_len", "num_devices"),
    [
        (plain, 16, 8, 1),
        pytest.param(chunked, 16, 8, 1, marks=SLOW),
        pytest.param(plain, 8, 32, 8, marks=SLOW),
        pytest.param(chunked, 8, 32, 8, marks=SLOW),
    ],
)
def test_the_answer_is_that_of_exhaustive_search(
    loss_fn, multiple, seq_len, num_devices
):
    needed = peaks(loss_fn, multiple, seq_len, num_devices)
    for fitting in (1, 3, 8):
        low, high = needed[fitting - 1], needed[fitting]
        if low >= high:
            continue
        fitted = fit(
            make_recipe(loss_fn, num_devices),
            [seq_len],
            batch_size_multiple=multiple,
            memory_bytes=low if fitting == 3 else high - 1,
        )
        (size,) = fitted.sizes
        k, above = divmod(size.batch_size, multiple)
        assert above == 0 and size.next_batch_size == (k + 1) * multiple
        assert size.num_bytes == needed[k - 1] <= fitted.limit_bytes < needed[k]
        assert size.next_bytes == needed[k] and size.num_refused == 0
        if loss_fn is plain:
            assert k == fitting and size.num_compiled <= 5


def test_all_programs_of_a_bucket_must_fit():
    """The largest B is that of the larger program, whatever its name."""

    def both(plan):
        step_fn, state, specs = recipe(plan)["train"]
        mesh = jb.data_mesh(jax.devices()[:1])
        evaluate = jb.make_eval_step(plain, mesh), state, specs
        return {"eval": evaluate, "train": (step_fn, state, specs), "more": evaluate}

    alone, together = (fit(x, [8], memory_bytes=1e5) for x in (recipe, both))
    one, other = together.sizes[0], alone.sizes[0]
    assert (one.batch_size, one.num_bytes) == (other.batch_size, other.num_bytes)


@pytest.mark.parametrize("first", [1, 2**10, 2**22])
@pytest.mark.parametrize(
    "needed",
    [
        lambda count: 10**9 + 3_000_000 * count,
        lambda count: max(9 * 2**30 + 10**5 * count, 10**7 * count),
        lambda count: -(-(10**9 + 3_000_000 * count) // 2**29) * 2**29,
        lambda count: 10**9 + 3 * 10**8 * (count // 64 + 1),
        lambda count: 10**9 + 10_000 * count**2,
        lambda count: 2_000 * count,
    ],
)
@pytest.mark.parametrize("limit", [int(15.75 * 2**30), 10**10])
def test_a_search_ends_for_any_memory(needed, limit, first):
    """Also if bytes are rounded, as a compiler that refuses programs prints them."""
    refuses = first > 1
    search = _Search(1, None if refuses else limit, first)
    for _ in range(150):
        count = search.next_batch_size
        size, fits = needed(count), needed(count) <= limit
        if refuses and not fits:
            rounded = int(round(size / 2**30, 2) * 2**30)
            error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
            result = _Result(False, rounded, available=limit, error=error)
        else:
            result = _Result(fits, size)
        search.add(count, result, min(needed(1), 10**9))
        if search.ends:
            break
    fitted = search.fitted(1)
    assert needed(fitted.batch_size) <= limit < needed(fitted.next_batch_size)
    assert search.ends
    assert fitted.num_compiled <= 25 and fitted.num_refused <= 100 * refuses


def test_phases_and_arguments_that_a_program_does_not_use_count():
    def accumulating(plan):
        mesh, tx = jb.data_mesh(jax.devices()[:1]), optax.sgd(1e-3, momentum=0.9)
        state = jb.create_state({"w": np.ones((512, 512), np.float32)}, tx, mesh)
        specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, 512), "f4")}, mesh)
        step = jb.make_train_step(plain, tx, mesh, accumulate=True)
        evaluate = jb.make_eval_step(plain, mesh)
        return {"train": (step, state, specs), "eval": (evaluate, state, specs)}

    # The state has 2.1 MB, and gradients half of that.
    with pytest.raises(
        ValueError, match=r"even \[8, 4\].* 2.097 MB of it for the state"
    ):
        fit(accumulating, [4], memory_bytes=3.1e6)
    alone = fit(lambda plan: accumulating(plan)["eval"], [4], memory_bytes=3.1e6)
    assert alone.sizes[0].num_bytes > 2_097_152


def test_memory_that_no_batch_needs_is_named():
    def constant(plan):
        return lambda state, batch: jax.tree.map(lambda x: 2 * x, state), *small(plan)

    def small(plan):
        return make_recipe(plain)(plan)["train"][1:]

    with pytest.raises(ValueError, match="`memory_bytes`"):
        fit(constant, [2**20], memory_bytes=1e18)


def test_several_t_are_fitted_in_the_same_rounds():
    calls = []
    fitted = fit(make_recipe(plain, calls=calls), [32, 8, 8], memory_bytes=2e5)
    assert [size.seq_len for size in fitted.sizes] == [8, 32]
    assert len(calls) <= 6 and len(calls[0].buckets) == 2
    assert fitted.limit_bytes == 200_000
    # By default, B is a multiple of the number of all devices.
    assert all(size.next_batch_size % len(jax.devices()) == 0 for size in fitted.sizes)
    by_t = fit(recipe, [8, 32], memory_bytes=2e5, batch_size_multiple=lambda t: 64 // t)
    assert [x.next_batch_size - x.batch_size for x in by_t.sizes] == [8, 2]


def test_a_margin_is_left_free():
    whole = fit(recipe, [16], memory_bytes=1e6)
    part = fit(recipe, [16], memory_bytes=1e6, margin=0.5)
    assert part.limit_bytes == 500_000
    assert part.sizes[0].batch_size < whole.sizes[0].batch_size


def test_a_t_that_does_not_fit_has_no_batch():
    fitted = fit(recipe, [8, 4096], memory_bytes=2e6)
    assert [size.batch_size > 0 for size in fitted.sizes] == [True, False]
    assert fitted(8) == 8 * fitted.sizes[0].batch_size
    with pytest.raises(ValueError, match="`max_seq_len`"):
        fitted(9)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"seq_lens": [8], "memory_bytes": None}, "memory_bytes"),
        ({"seq_lens": [0]}, "seq_lens"),
        ({"seq_lens": []}, "seq_lens"),
        ({"seq_lens": [8], "memory_bytes": 0}, "memory_bytes"),
        ({"seq_lens": [8], "memory_bytes": "16"}, "memory_bytes"),
        ({"seq_lens": [8], "margin": 1.0}, "margin"),
        ({"seq_lens": [8], "margin": -0.1}, "margin"),
        ({"seq_lens": [8], "batch_size_multiple": 0}, "batch_size_multiple"),
        ({"seq_lens": [8], "batch_size_multiple": lambda t: 0}, "batch_size_multiple"),
        ({"seq_lens": [8], "workers": 0}, "workers"),
    ],
)
def test_what_fit_refuses(options, name):
    with pytest.raises(ValueError, match=f"`{name}|{name}`"):
        fit(recipe, **{"memory_bytes": 1e6, **options})


def test_other_errors_are_raised():
    def failing(plan):
        step_fn, state, specs = recipe(plan)["train"]

        def step(state, batch):
            raise ArithmeticError("no such model")

        return step, state, specs

    with pytest.raises(ArithmeticError, match="no such model"):
        fit(failing, [4], memory_bytes=1e6)


def test_the_command_writes_a_budget(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    path, lengths = tmp_path / "fitted.json", tmp_path / "lengths.npy"
    np.save(lengths, np.arange(1, 65).repeat(99))

    def run(*arguments):
        return CliRunner().invoke(main, [str(x) for x in arguments])

    options = ("fit", "--recipe", "test_fit:recipe", "--seq-lens", "16, 64")
    limits = ("--memory-gb", 0.00125, "--margin", 0.2)
    done = run(*options, *limits, "-o", path, "--json")
    assert done.exit_code == 0, done.output
    fitted = jb.plan.FittedBatchSizes.load(path)
    assert json.loads(done.output) == fitted.to_dict() == json.loads(path.read_text())
    assert fitted.limit_bytes == 1_000_000
    done = run("plan", lengths, "--max-tokens", path, "--num-buckets", 4, "--json")
    assert done.exit_code == 0, done.output
    for batch_size, seq_len in json.loads(done.output)["plan"]["buckets"]:
        assert batch_size * seq_len <= fitted(seq_len)
    done = run(*options, "--memory-gb", 1e-6)
    assert done.exit_code == 1 and "No batch fits" in done.output
    done = run(*options[:-1], "8,65536", "--memory-gb", 0.001)
    assert done.exit_code == 1 and "No batch of T = 65536 fits" in done.output
    done = run("plan", lengths, "--max-tokens", lengths)
    assert done.exit_code == 1 and "`jaxbucket fit -o`" in done.output
    done = run("plan", lengths, "--max-tokens", tmp_path / "none.json")
    assert done.exit_code == 1 and "that exists" in done.output
    columns = {"a": np.arange(1, 65), "b": np.arange(1, 65)}
    with pytest.raises(ValueError, match="one length"):
        jb.plan_buckets(columns, max_tokens=fitted, num_buckets=2)
    done = run(*options[:-1], "8,x", "--memory-gb", 1)
    assert done.exit_code == 2 and "--seq-lens" in done.output


@pytest.mark.parametrize(
    ("text", "needed", "available"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries "
            "(1.50T) exceeds available HBM (15.75G).",
            *(1.5 * 2**40, 15.75 * 2**30),
        ),
        (
            "Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. "
            "Exceeded hbm capacity by 4.75G.",
            *(20.5 * 2**30, 15.75 * 2**30),
        ),
    ],
)
def test_refusals_of_the_compiler_are_read(text, needed, available):
    error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")
    assert refused_bytes(error) == (needed, available)
    assert is_out_of_memory(error) and not is_out_of_memory(ValueError(text))
    other = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: CompileTimeScopedVmemOom")
    assert refused_bytes(other) is None and not is_out_of_memory(other)


@pytest.mark.parametrize("donated", [False, True])
def test_memory_that_ends_during_training_is_explained(donated):
    mesh = jb.data_mesh(jax.devices()[:1])
    plan = jb.BucketPlan.from_shapes([(2, 8)])
    specs = jb.sharding.batch_specs(plan, {"x": np.ones((3, WIDTH), "f4")}, mesh)
    state = jb.create_state({"w": np.ones((WIDTH, WIDTH), np.float32)}, TX, mesh)
    steps = jb.compile_steps(
        jb.make_train_step(plain, TX, mesh), state, specs, progress=False
    )
    row = {"x": np.ones((3, WIDTH), np.float32)}
    local = jb.data.collate_rows([row, row], plan.buckets[0])
    (batch,) = jb.sharding.prefetch_to_mesh([local], mesh)

    def exhausted(state, batch):
        if donated:
            jax.tree.map(lambda x: x.delete(), state)
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4.2GiB."
        )

    steps._executables[plan.buckets[0]] = exhausted
    with pytest.raises(jax.errors.JaxRuntimeError, match="4.2GiB") as raised:
        steps(state, batch)
    (note,) = raised.value.__notes__
    assert "[2, 8]" in note and "MB" in note and "jaxbucket fit" in note
    assert ("last checkpoint" in note) == donated
    assert ("state is intact" in note) == (not donated)
