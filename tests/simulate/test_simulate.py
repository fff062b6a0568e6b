"""Simulated epochs against runs that are played step by step, in plain numpy."""

import dataclasses
import json
from statistics import NormalDist

import numpy as np
import optax
import pytest

import jaxbucket as jb
from jaxbucket.optim.schedules import learning_rate_at
from jaxbucket.simulate import Cluster, simulate
from jaxbucket.simulate.faults import best_interval, replay

LENGTHS = np.random.default_rng(0).integers(1, 500, 5000)
PLAN = jb.plan_buckets(LENGTHS, max_tokens=4096, num_buckets=4, batch_size_multiple=8)


def step_seconds(batch_size, seq_len):
    return 0.1 + batch_size * seq_len * 1e-4


CLUSTER = Cluster(step_seconds=step_seconds)


def played(schedule, cluster, rng, num_runs=500):
    """Returns the seconds of an epoch without faults, played on all hosts."""
    buckets = [batch.bucket for batch in schedule]
    size = num_runs, len(buckets), cluster.num_hosts
    seconds = np.array([step_seconds(*bucket.to_list()) for bucket in buckets])
    if np.ndim(cluster.skew):
        factors = rng.choice(cluster.skew, size)
    else:
        factors = rng.lognormal(-(cluster.skew**2) / 2, cluster.skew, size)
    hosts = seconds[:, None] * factors
    rows = np.array([[x.batch_size // cluster.num_hosts] for x in buckets])
    values = np.atleast_1d(cluster.row_seconds)
    counts = rng.multinomial(rows, np.ones(len(values)) / len(values), size)
    # A batch is loaded during the step before it.
    before = np.pad(hosts.max(axis=2), [(0, 0), (1, 0)])[:, :-1]
    parts = {
        "steps": hosts.mean(axis=2),
        "waiting": hosts.max(axis=2) - hosts.mean(axis=2),
        "data": np.maximum((counts @ values).max(axis=2) - before, 0),
    }
    return {name: x.sum() / num_runs for name, x in parts.items()}


@pytest.mark.parametrize("num_hosts", [1, 2, 8])
@pytest.mark.parametrize("skew", [0.0, 0.2, [1.0, 1.0, 1.5]], ids=str)
@pytest.mark.parametrize("row_seconds", [0.0, [0.05, 0.1, 0.2]], ids=str)
def test_the_parts_of_an_epoch_are_those_of_a_played_run(num_hosts, skew, row_seconds):
    cluster = Cluster(
        num_hosts=num_hosts,
        step_seconds=step_seconds,
        skew=skew,
        row_seconds=row_seconds,
        compile_seconds=2.5,
    )
    epoch = simulate(PLAN, LENGTHS, cluster)["plan"]
    schedule = jb.BatchSchedule(PLAN, LENGTHS)
    expected = played(schedule, cluster, np.random.default_rng(1))
    total = sum(expected.values())
    for name, seconds in expected.items():
        assert abs(epoch.parts[name] - seconds) < 0.01 * total, name
    assert epoch.parts["compile"] == 2.5 * len(PLAN)
    assert epoch.seconds == sum(epoch.parts.values())
    assert epoch.report == schedule.report()


def test_steps_have_the_numbers_of_the_schedule():
    schedule = jb.BatchSchedule(PLAN, LENGTHS)
    steps = simulate(PLAN, LENGTHS, CLUSTER, num_points=10**6)["plan"].steps
    assert steps["step"].tolist() == list(range(len(schedule)))
    rows = [batch.rows[batch.rows >= 0] for batch in schedule]
    assert steps["examples"].tolist() == [len(row) for row in rows]
    positions = [batch.bucket.num_tokens for batch in schedule]
    assert steps["positions"].tolist() == positions
    seconds = [step_seconds(*batch.bucket.to_list()) for batch in schedule]
    np.testing.assert_allclose(steps["seconds"], seconds)
    # Real tokens are means over the examples of a bucket.
    tokens = np.array([LENGTHS[row].sum() for row in rows])
    assert steps["tokens"].sum() == pytest.approx(tokens.sum(), rel=1e-9)
    assert np.abs(steps["tokens"] / tokens - 1).mean() < 0.2
    # Fewer steps are at equal distances.
    some = simulate(PLAN, LENGTHS, CLUSTER, num_points=10)["plan"].steps
    assert len(some["step"]) == 10 and np.ptp(np.diff(some["step"])) <= 1
    np.testing.assert_array_equal(some["seconds"], steps["seconds"][some["step"]])


@pytest.mark.parametrize("work", [None, "examples", "tokens"])
def test_learning_rates_are_those_of_the_optimizer(work):
    curve = optax.linear_schedule(0.0, 1e-2, 50_000 if work else 30)
    inner = curve if work is None else jb.optim.schedule_by_work(curve, work)
    rate = jb.scale_schedule(inner, base_examples=16)
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    params = np.ones(1, np.float32)
    state, before = tx.init(params), {"examples_before": 0, "tokens_before": 0}
    rates = []
    for step, batch in enumerate(jb.BatchSchedule(PLAN, LENGTHS)):
        rows = batch.rows[batch.rows >= 0]
        sizes = {"num_examples": len(rows), "num_tokens": int(LENGTHS[rows].sum())}
        _, state = tx.update(params, state, params, **sizes)
        found = learning_rate_at(rate, step, **before, **sizes)
        rates.append(float(state.hyperparams["learning_rate"]))
        assert found == pytest.approx(rates[-1], 1e-5)
        before["examples_before"] += sizes["num_examples"]
        before["tokens_before"] += sizes["num_tokens"]
        if step == 40:
            break
    steps = simulate(PLAN, LENGTHS, CLUSTER, learning_rate=rate)["plan"].steps
    assert len(steps["learning_rate"]) == len(steps["step"])
    # The work before a step is estimated, at first roughly.
    some = (steps["step"] > 20) & (steps["step"] <= 40)
    want = np.array(rates)[steps["step"][some]]
    close = {"rtol": 0.15 if work else 1e-5}
    np.testing.assert_allclose(steps["learning_rate"][some], want, **close)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_balance_is_that_of_the_batches(num_devices):
    cluster = Cluster(devices_per_host=num_devices, step_seconds=step_seconds)
    most = total = 0
    for epoch in range(3):
        schedule = jb.BatchSchedule(PLAN, LENGTHS, seed=epoch)
        for batch in schedule:
            lengths = np.where(batch.rows < 0, 0, LENGTHS[batch.rows])
            tokens = lengths.reshape(num_devices, -1).sum(axis=1)
            most, total = most + tokens.max(), total + tokens.mean()
    found = simulate(PLAN, LENGTHS, cluster)["plan"].balance
    assert found == pytest.approx(most / total, abs=0.08)


@pytest.mark.parametrize("checkpoint", [0.0, 30.0])
@pytest.mark.parametrize("interval", [300.0, 1500.0])
def test_faults_cost_what_the_formula_says(interval, checkpoint):
    """Daly, 2006, A higher order estimate of the optimum checkpoint interval."""
    mean, work, restart = 5000.0, 500_000.0, 100.0
    cluster = Cluster(
        hours_between_faults=mean / 3600,
        restart_seconds=restart,
        checkpoint_seconds=checkpoint,
    )
    checkpoints, lost, restarts = replay(work, interval, cluster)
    cycle = mean * np.expm1((interval + checkpoint) / mean)
    expected = cycle * work / interval
    found = work + (checkpoints + lost).mean()
    assert found == pytest.approx(expected, rel=0.01)
    assert restarts.mean() == pytest.approx(restart * expected / mean, rel=0.05)


def test_a_replay_is_that_of_a_plain_loop():
    rng = np.random.default_rng(3)
    values = rng.uniform(50, 400, 1000)

    class Played(Cluster):
        def fault_gaps(self, rng, number):
            return np.full(number, next(stream))

    for work, interval, checkpoint in ((1000, 90, 7), (300, 600, 7), (700, 100, 0)):
        stream = iter(values)
        cluster = Played(restart_seconds=11, checkpoint_seconds=checkpoint)
        found = replay(work, interval, cluster, num_runs=1)
        clock, saved, expected = 0.0, 0.0, [0.0, 0.0, 0.0]
        for gap in values:
            clock = done = 0.0
            while True:
                step = min(interval, work - saved - done)
                is_last = saved + done + step >= work
                cost = step + (0 if is_last else checkpoint)
                if clock + cost > gap:
                    break
                clock, done = clock + cost, done + step
                if is_last:
                    break
                expected[0] += checkpoint
            saved += done
            if saved >= work:
                break
            expected[1] += gap - clock
            expected[2] += 11
        np.testing.assert_allclose(found[:, 0], expected)


@pytest.mark.parametrize(("work", "hours"), [(4_200, 78), (14_000, 78), (90_000, 9)])
def test_the_interval_loses_least_where_faults_are_rare(work, hours):
    cluster = Cluster(
        hours_between_faults=hours, restart_seconds=120, checkpoint_seconds=5
    )
    best = best_interval(work, 1.0, cluster)
    # The same faults in all runs.
    costs = [
        replay(work, round(best * x), cluster, num_runs=100_000).sum(axis=0).mean()
        for x in (0.5, 0.7, 0.85, 1, 1.15, 1.4, 2)
    ]
    assert costs[3] < 1.02 * min(costs)


def test_the_interval_loses_least():
    step, checkpoint = 2.0, 30.0
    cluster = Cluster(
        hours_between_faults=20_000.0 / 3600,
        restart_seconds=60.0,
        checkpoint_seconds=checkpoint,
    )
    found = best_interval(10**6, step, cluster)
    assert found == pytest.approx(np.sqrt(2 * checkpoint * 20_000.0) / step, rel=0.35)
    best, less, more = (
        replay(10**6, found * step * x, cluster).sum() for x in (1, 0.3, 3)
    )
    assert best < less and best < more


def test_a_cluster_with_faults_takes_longer_and_says_how_long():
    cluster = Cluster(
        num_hosts=64,
        step_seconds=step_seconds,
        hours_between_faults=0.5,
        restart_seconds=5,
        checkpoint_seconds=0.5,
    )
    epoch = simulate(PLAN, LENGTHS, cluster)["plan"]
    assert epoch.parts["lost"] > 0 and epoch.parts["restarts"] > 0
    assert epoch.range[0] < epoch.seconds < epoch.range[1]
    assert epoch.checkpoint_steps and epoch.checkpoint_steps > 0


def test_measured_values_replace_distributions():
    rng = np.random.default_rng(0)
    for hosts, hours in ((1, 100.0), (1, [90.0, 110.0]), (16, 100.0), (16, [50, 150])):
        cluster = Cluster(num_hosts=hosts, hours_between_faults=hours)
        gaps = cluster.fault_gaps(rng, 50_000)
        assert gaps.mean() == pytest.approx(100 * 3600 / hosts, rel=0.02)
        # Faults of many hosts are distributed exponentially.
        is_regular = hosts == 1 and np.ndim(hours)
        assert gaps.std() / gaps.mean() == pytest.approx(0.1 if is_regular else 1, 0.03)
    cluster = Cluster(num_hosts=50, skew=np.arange(1.0, 101))
    slowest, deviations = cluster.slowest(rng, 50_000)
    expected = rng.integers(1, 101, (50_000, 50)).max(axis=1)
    assert slowest.mean() == pytest.approx(expected.mean(), rel=0.01)
    expected = rng.standard_normal((50_000, 50)).max(axis=1)
    assert deviations.mean() == pytest.approx(expected.mean(), rel=0.01)


def test_the_slowest_of_a_million_hosts_is_not_one_of_a_sample():
    cluster = Cluster(num_hosts=10**6, skew=0.1)
    slowest, _ = cluster.slowest(np.random.default_rng(0), 20_000)
    # Sorted uniform numbers follow from exponential ones (Devroye, 1986, chapter 5).
    largest = np.exp(-np.random.default_rng(1).exponential(1e-6, 2000))
    normal = [NormalDist().inv_cdf(x) for x in largest]
    expected = np.exp(0.1 * np.array(normal) - 0.005).mean()
    assert slowest.mean() == pytest.approx(expected, rel=0.005)


def test_examples_that_are_split_are_simulated():
    lengths = jb.LengthCounts({5: 1000, 50: 100, 500: 10})
    options = {"max_seq_len": 100, "overlong": "split"}
    plan = jb.plan_buckets(lengths, max_tokens=400, num_buckets=2, **options)
    cluster = Cluster(devices_per_host=2, step_seconds=step_seconds)
    chunks = jb.plan.chunk_lengths([5] * 1000 + [50] * 100 + [500] * 10, 100)
    found = simulate(plan, lengths, cluster)["plan"]
    assert found.report.real_tokens == chunks.sum()
    assert found.seconds == simulate(plan, chunks, cluster)["plan"].seconds


def test_long_runs_get_on():
    plan = jb.BucketPlan.from_shapes([(1, 10)])
    cluster = Cluster(
        num_hosts=20_000,
        hours_between_faults=20_000.0,
        step_seconds=lambda *shape: 1.0,
        restart_seconds=60,
        checkpoint_seconds=1,
    )
    year = jb.LengthCounts({10: 365 * 86_400})
    shares = [
        simulate(plan, lengths, cluster)["plan"].share("steps")
        for lengths in (year, jb.LengthCounts({10: 10**6}))
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.01)


def test_several_plans_are_side_by_side():
    one = jb.plan_buckets(LENGTHS, max_tokens=4096, num_buckets=1)
    simulation = simulate({"four": PLAN, "one $": one}, LENGTHS, CLUSTER)
    text = str(simulation)
    assert "four" in text and "one $" in text
    assert "batch_size_multiple" not in text
    timed = jb.plan.StepTime.fit({jb.Bucket(1, 8): 1.0})
    cluster = dataclasses.replace(CLUSTER, num_hosts=4, step_seconds=timed)
    words = " ".join(str(simulate(PLAN, LENGTHS, cluster)).split())
    assert "times the tokens of those that were timed" in words
    all_hosts = jb.plan.StepTime.fit(dict.fromkeys(PLAN.buckets, 1.0))
    cluster = dataclasses.replace(CLUSTER, num_hosts=4, step_seconds=all_hosts)
    assert "timed" not in str(simulate(PLAN, LENGTHS, cluster))
    large = dataclasses.replace(CLUSTER, num_hosts=64)
    assert "`batch_size_multiple=64`" in str(simulate(PLAN, LENGTHS, large))
    numbers = json.loads(simulation.to_json())
    assert numbers["four"]["seconds"] < numbers["one $"]["seconds"]
    assert numbers["four"]["steps"]["step"][0] == 0


@pytest.mark.parametrize("hours", [None, 0.5, [20_000.0]])
def test_the_share_of_epochs_without_a_fault(hours):
    cluster = dataclasses.replace(
        CLUSTER, hours_between_faults=hours, checkpoint_steps=10, restart_seconds=60
    )
    simulation = simulate(PLAN, LENGTHS, cluster)
    share = simulation["plan"].without_fault
    words = " ".join(str(simulation).split())
    assert ("have no fault" in words) == (hours is not None)
    if hours == 0.5:
        work = sum(simulation["plan"].parts[x] for x in ("steps", "checkpoints"))
        assert share == pytest.approx(np.exp(-work / 1800), abs=0.02)
    else:
        assert share == 1


def test_plans_in_seconds_have_their_own_times():
    limits = jb.Limits(max_tokens=4096, cost_fn=jb.plan.TokenCost(1000.0))
    plan = jb.plan.plan_within(LENGTHS, limits)
    epoch = simulate(plan, LENGTHS, Cluster())["plan"]
    assert epoch.seconds == pytest.approx(jb.report(plan, LENGTHS).epoch_cost)


@pytest.mark.parametrize(
    "name, value",
    [
        *((name, 0) for name in ("num_hosts", "devices_per_host", "checkpoint_steps")),
        *((name, -1) for name in ("skew", "row_seconds", "compile_seconds")),
        *((name, np.nan) for name in ("skew", "restart_seconds", "row_seconds")),
        ("checkpoint_seconds", "1 s"),
        ("skew", []),
        ("skew", [[1.0]]),
        ("row_seconds", [1, -1]),
        ("row_seconds", ["x"]),
        ("hours_between_faults", 0),
        ("hours_between_faults", [5, 0]),
    ],
)
def test_a_wrong_number_of_a_cluster_is_named(name, value):
    with pytest.raises(ValueError, match=f"`{name}"):
        Cluster(**{name: value})


# No 100 steps pass without a fault.
OFTEN = dataclasses.replace(CLUSTER, hours_between_faults=[0.001], checkpoint_steps=100)


@pytest.mark.parametrize(
    "argument, plan, options",
    [
        ("step_seconds", PLAN, {"cluster": Cluster()}),
        ("step_seconds", PLAN, {"cluster": Cluster(step_seconds=lambda b, t: -1)}),
        ("plan", jb.plan_packing(LENGTHS, max_tokens=4096, pack="always").plan, {}),
        ("order", PLAN, {"order": "source"}),
        ("num_points", PLAN, {"num_points": 0}),
        ("checkpoint_steps", PLAN, {"cluster": OFTEN}),
    ],
)
def test_what_cannot_be_simulated_is_named(argument, plan, options):
    options = {"cluster": CLUSTER, **options}
    with pytest.raises(ValueError, match=f"`{argument}"):
        simulate(plan, LENGTHS, **options)
