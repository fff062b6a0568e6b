"""Other data loaders: each example once, parts of processes, and exact resume.

Loaders of other libraries are tested where they are installed, for instance by
`pip install -e ".[loaders]"`.
"""

import itertools
import json
import pathlib
import pickle
import random
import textwrap

import grain
import numpy as np
import pytest

import jaxbucket as jb
from jaxbucket.base.batch import RowShard

# The other libraries cause these.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

LENGTHS = np.random.default_rng(0).integers(1, 20, 100).tolist()


def make_examples():
    return [
        {"tokens": np.full(n, index, np.int32), "index": index}
        for index, n in enumerate(LENGTHS)
    ]


class Source:
    """A random access data source."""

    def __repr__(self):
        # Grain compares it when a loader is resumed.
        return "Source"

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return make_examples()[index]


def ragged_batches(size):
    """Lists of `size` examples, which need no padding."""
    examples = make_examples()
    return [examples[i : i + size] for i in range(0, len(examples), size)]


def grain_loader():
    sampler = grain.samplers.IndexSampler(
        len(LENGTHS),
        shuffle=False,
        shard_options=grain.sharding.NoSharding(),
        num_epochs=1,
    )
    return grain.DataLoader(data_source=Source(), sampler=sampler)


def torch_data():
    return pytest.importorskip("torch.utils.data")


class TorchDataset:
    """The protocol of `torch.utils.data.Dataset`."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        import torch

        example = make_examples()[index]
        return {"tokens": torch.tensor(example["tokens"]), "index": example["index"]}


def torch_loader():
    return torch_data().DataLoader(TorchDataset(), batch_size=None)


def torch_batches():
    return torch_data().DataLoader(TorchDataset(), batch_size=7, collate_fn=list)


def torch_iterable():
    class Examples(torch_data().IterableDataset):
        def __iter__(self):
            return iter(make_examples())

    return torch_data().DataLoader(Examples(), batch_size=None)


def stateful_torch():
    torch_data()
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(TorchDataset(), batch_size=None)


def shuffled_torch(seed, num_workers, with_generator):
    torch = pytest.importorskip("torch")
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    torch.manual_seed(seed)
    return stateful.StatefulDataLoader(
        TorchDataset(),
        batch_size=None,
        shuffle=True,
        num_workers=num_workers,
        generator=torch.Generator().manual_seed(seed) if with_generator else None,
    )


def hugging_face():
    datasets = pytest.importorskip("datasets")
    rows = [
        {"tokens": x["tokens"].tolist(), "index": x["index"]} for x in make_examples()
    ]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)


def stateful_hugging_face():
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(hugging_face(), batch_size=None)


def web_dataset(folder):
    webdataset = pytest.importorskip("webdataset")
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"{shard}.tar")) as writer:
            for example in make_examples()[shard * 50 : shard * 50 + 50]:
                writer.write(
                    {
                        "__key__": f"{example['index']:06d}",
                        "tokens.npy": example["tokens"],
                    }
                )
    urls = [str(folder / f"{shard}.tar") for shard in range(2)]
    return webdataset.WebDataset(urls, shardshuffle=False).decode()


def from_web(sample):
    return {"tokens": sample["tokens.npy"], "index": int(sample["__key__"])}


# Name -> (loader, options of `from_loader`, whether the loader has a state)
LOADERS = {
    "list": (make_examples, {}, False),
    "batches": (lambda: ragged_batches(7), {"batched": True}, False),
    "grain": (grain_loader, {}, True),
    "torch": (torch_loader, {}, False),
    "torch-batches": (torch_batches, {"batched": True}, False),
    "torch-iterable": (torch_iterable, {}, False),
    "torch-stateful": (stateful_torch, {}, True),
    "hugging-face": (hugging_face, {}, True),
    "hugging-face-stateful": (stateful_hugging_face, {}, True),
    "hugging-face-replay": (hugging_face, {"resume": "replay"}, False),
    "webdataset": (web_dataset, {"to_example": from_web}, False),
    "goes-on": (lambda: GoesOn(make_examples()), {}, True),
    "torch-goes-on": (lambda: torch_goes_on(batch_size=None), {}, True),
}


def make_loader(name, folder):
    make, options, has_state = LOADERS[name]
    loader = make(folder) if name == "webdataset" else make()
    return loader, options, has_state


def indices(examples):
    return [int(example["index"]) for example in examples]


@pytest.mark.parametrize("name", LOADERS)
def test_every_example_is_read_once_per_epoch(name, tmp_path):
    loader, options, _ = make_loader(name, tmp_path)
    dataset = jb.stream.from_loader(loader, **options)
    for _ in range(2):
        examples = list(dataset)
        assert sorted(indices(examples)) == list(range(len(LENGTHS)))
        for example in examples:
            n = LENGTHS[int(example["index"])]
            np.testing.assert_array_equal(
                example["tokens"], np.full(n, example["index"])
            )


@pytest.mark.parametrize("name", LOADERS)
def test_an_iterator_continues_at_its_state(name, tmp_path):
    loader, options, has_state = make_loader(name, tmp_path)
    dataset = jb.stream.from_loader(loader, **options)
    expected = indices(dataset)
    for stop in (0, 1, 6, 7, 8, 50, 99, 100):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        if stop > 0:
            assert (state["loader"] is not None) == has_state
        # As in another process, the loader is a new one.
        again, options, _ = make_loader(name, tmp_path)
        dataset_again = jb.stream.from_loader(again, **options)
        resumed = iter(dataset_again)
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert indices(resumed) == expected[stop:]
        # The epoch after a resumed one is complete.
        assert indices(dataset_again) == expected


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("num_processes", [1, 2])
def test_batches_have_every_example_once(name, num_processes, tmp_path):
    seen, lengths = [], np.array(LENGTHS)
    plan = jb.plan_buckets(
        lengths, sample=True, max_tokens=160, num_buckets=2, batch_size_multiple=4
    )
    for part in range(num_processes):
        loader, options, _ = make_loader(name, tmp_path)
        shard = RowShard((part,), num_processes)
        dataset = jb.stream.from_loader(loader, shard=shard, **options)
        batches = jb.stream_batches(
            dataset,
            plan,
            pool_size=64,
            lengths=lengths,
            shard=shard,
            # Enough for all examples; processes do not communicate here.
            num_steps=None if num_processes == 1 else 40,
        )
        for batch in batches:
            seen += indices(jb.data.unbatch(batch, sequences=["tokens"]))
    assert sorted(seen) == list(range(len(LENGTHS)))


IN_PROCESSES = """
    import json
    import pathlib

    sys.path.insert(0, FOLDER)
    import numpy as np
    import pytest
    import test_from_loader as loaders

    import jaxbucket as jb

    with jb.Processes() as processes:
        mesh = jb.data_mesh()
        shard = jb.sharding.local_rows(mesh)
        lengths = np.array(loaders.LENGTHS)
        plan = jb.plan_buckets(
            lengths, sample=True, max_tokens=160, num_buckets=2, batch_size_multiple=4
        )
        folder = pathlib.Path(sys.argv[0]).parent / f"data{processes.index}"
        folder.mkdir()

        def batches_of(name):
            loader, options, _ = loaders.make_loader(name, folder)
            dataset = jb.stream.from_loader(loader, shard=shard, **options)
            return iter(
                jb.stream_batches(
                    dataset,
                    plan,
                    pool_size=64,
                    lengths=lengths,
                    shard=shard,
                    processes=processes,
                )
            )

        def indices(batch):
            return loaders.indices(jb.data.unbatch(batch, sequences=["tokens"]))

        for name in loaders.LOADERS:
            try:
                batches = batches_of(name)
            except pytest.skip.Exception:
                record(name, "absent")
                continue
            served, states = [], []
            for batch in batches:
                served.append(indices(batch))
                states.append(json.dumps(batches.state_before(len(served))))
            step = int(np.random.default_rng(len(name)).integers(1, len(served)))
            again = batches_of(name)
            again.set_state(json.loads(states[step - 1]))
            assert [indices(batch) for batch in again] == served[step:], name
            record(name, json.dumps(sum(served, [])))
"""


@pytest.mark.exhaustive
def test_two_processes_have_every_example_once_and_resume(launch):
    folder = str(pathlib.Path(__file__).parent)
    code = textwrap.dedent(IN_PROCESSES).replace("FOLDER", repr(folder))
    run = launch(code, count=2)
    assert run.status == 0, run.output
    first, second = (run.recorded(index) for index in range(2))
    assert len(first) == len(second) == len(LOADERS)
    for one, other in zip(first, second, strict=True):
        name, numbers = one.split(" ", 1)
        other_name, other_numbers = other.split(" ", 1)
        assert name == other_name
        if numbers != "absent":
            seen = json.loads(numbers) + json.loads(other_numbers)
            assert sorted(seen) == list(range(len(LENGTHS))), name


@pytest.mark.parametrize("name", LOADERS)
def test_batches_resume_at_any_step(name, tmp_path):
    plan = jb.plan_buckets(
        np.array(LENGTHS), sample=True, max_tokens=160, num_buckets=2
    )

    def batches_of(folder):
        loader, options, _ = make_loader(name, folder)
        dataset = jb.stream.from_loader(loader, **options)
        return jb.stream_batches(dataset, plan, pool_size=32, num_epochs=2)

    expected = [x.features["tokens"].tolist() for x in batches_of(tmp_path)]
    step = int(np.random.default_rng(len(name)).integers(1, len(expected)))
    iterator = iter(batches_of(tmp_path))
    for _ in range(step):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    iterator = iter(batches_of(tmp_path))
    iterator.set_state(state)
    assert [x.features["tokens"].tolist() for x in iterator] == expected[step:]


@pytest.mark.parametrize(
    ("num_workers", "with_generator"), [(0, False), (0, True), (2, False), (2, True)]
)
def test_a_shuffled_loader_resumes_in_its_order(num_workers, with_generator):
    plan = jb.plan_buckets(
        np.array(LENGTHS), sample=True, max_tokens=160, num_buckets=2
    )

    def batches_of(seed):
        loader = shuffled_torch(seed, num_workers, with_generator)
        dataset = jb.stream.from_loader(loader)
        # A small pool, so that all epochs have states of the loader.
        return jb.stream_batches(dataset, plan, pool_size=16, num_epochs=3)

    def contents(batches):
        return [x.features["tokens"].tolist() for x in batches]

    expected = contents(batches_of(0))
    # All tokens of an example are its index; padding is 0.
    counts = np.bincount(np.concatenate([np.ravel(x) for x in expected]))
    assert counts[1:].tolist() == [3 * n for n in LENGTHS[1:]]
    steps = np.random.default_rng(num_workers).integers(1, len(expected), 10)
    for step in steps[: 2 if num_workers else None]:
        iterator = iter(batches_of(0))
        for _ in range(step):
            next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
        # The order is that of the state, not of the seed.
        iterator = iter(batches_of(1))
        iterator.set_state(state)
        assert contents(iterator) == expected[step:]


def test_states_with_arrays_are_restored():
    state = {
        "random": random.Random(0).getstate(),
        "numpy": np.random.RandomState(0).get_state(),
        "pcg": np.random.default_rng(0).bit_generator.state,
        "offsets": {0: 7, 1: np.int64(8)},
        "bytes": bytes(range(256)),
        "none": [None, True, 0.5, "text"],
    }

    class Loader(list):
        restored = None

        def state_dict(self):
            return state

        def load_state_dict(self, state):
            self.restored = state

    iterator = iter(jb.stream.from_loader(Loader(make_examples())))
    next(iterator)
    saved = json.loads(json.dumps(iterator.get_state()))
    loader = Loader(make_examples())
    iter(jb.stream.from_loader(loader)).set_state(saved)
    assert loader.restored.keys() == state.keys()
    for name in ("random", "pcg", "offsets", "bytes", "none"):
        assert loader.restored[name] == state[name]
    generator = np.random.RandomState(1)
    generator.set_state(loader.restored["numpy"])
    assert generator.randint(1 << 30) == np.random.RandomState(0).randint(1 << 30)


@pytest.mark.parametrize("name", LOADERS)
def test_an_iterator_that_has_ended_stays_at_its_end(name, tmp_path):
    def make_dataset():
        loader, options, _ = make_loader(name, tmp_path)
        return jb.stream.from_loader(loader, **options)

    ended = iter(make_dataset())
    assert len(indices(ended)) == len(LENGTHS)
    dataset = make_dataset()
    resumed = iter(dataset)
    resumed.set_state(json.loads(json.dumps(ended.get_state())))
    assert indices(resumed) == []
    assert resumed.get_state() == ended.get_state()
    # Neither continues with the next epoch.
    assert len(indices(dataset)) == len(LENGTHS)
    assert indices(ended) == indices(resumed) == []


@pytest.mark.parametrize("name", LOADERS)
def test_two_iterators_do_not_disturb_each_other(name, tmp_path):
    def make_dataset():
        loader, options, _ = make_loader(name, tmp_path)
        return jb.stream.from_loader(loader, **options)

    dataset = make_dataset()
    expected = indices(dataset)
    first, second = iter(dataset), iter(dataset)
    got = [[], []]
    for _ in range(9):
        got[0] += indices([next(first), next(first), next(first)])
        got[1] += indices([next(second)])
    states = [first.get_state(), second.get_state()]
    assert got[0] + indices(first) == got[1] + indices(second) == expected
    for state, stop in zip(states, (27, 9), strict=True):
        iterator = iter(make_dataset())
        iterator.set_state(state)
        assert indices(iterator) == expected[stop:]


def test_resuming_leaves_the_dataset_at_its_beginning():
    state = iter(jb.stream.from_loader(hugging_face()))
    for _ in range(30):
        next(state)
    state, loader = state.get_state(), hugging_face()
    resumed = iter(jb.stream.from_loader(loader))
    resumed.set_state(state)
    next(resumed)
    assert indices(loader) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("name", ["goes-on", "list"])
def test_a_dataset_that_is_read_can_be_pickled(name, tmp_path):
    dataset = jb.stream.from_loader(make_loader(name, tmp_path)[0])
    iterator = iter(dataset)
    next(iterator)
    assert indices(pickle.loads(pickle.dumps(dataset))) == list(range(len(LENGTHS)))


class GoesOn:
    """A loader whose `iter` goes on where it was, as that of torchtitan."""

    def __init__(self, examples):
        self.examples, self.index = examples, 0

    def __iter__(self):
        for example in self.examples[self.index :]:
            self.index += 1
            yield example
        self.index = 0

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


def torch_goes_on(**options):
    torch_data()
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Examples(GoesOn, torch_data().IterableDataset):
        pass

    return stateful.StatefulDataLoader(Examples(make_examples()), **options)


STREAM = {"pool_size": 20, "sequences": ["tokens"], "num_epochs": 2, "on_drift": None}


@pytest.mark.parametrize("name", ["goes-on", "torch-goes-on", "torch-goes-on-batches"])
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("resume", ["state", "replay"])
def test_sampled_examples_are_read_again(name, is_new, resume, tmp_path):
    options = {"resume": resume}
    if name == "torch-goes-on-batches":
        options["batched"] = True
        loader = torch_goes_on(batch_size=7, collate_fn=list)
    else:
        loader, _, _ = make_loader(name, tmp_path)

    def examples():
        return jb.stream.from_loader(loader, **options).map(dict)

    first = examples()
    sample = jb.stream.sample_lengths(first, 10, sequences=["tokens"])
    assert sample.tolist() == [*LENGTHS[:10]]
    plan = jb.plan_buckets(
        LENGTHS, sample=True, max_tokens=8 * max(LENGTHS), num_buckets=2
    )
    stream = examples() if is_new else first
    dataset = jb.stream_batches(stream, plan, **STREAM)
    assert dataset.example["index"] == 0
    parts = [jb.data.unbatch(x, sequences=["tokens"]) for x in dataset]
    rows = itertools.chain(*parts)
    assert sorted(indices(rows)) == sorted([*range(len(LENGTHS))] * 2)


@pytest.mark.parametrize("num_read", [0, 1, 5])
@pytest.mark.parametrize("closes", [False, True])
def test_a_loader_that_goes_on_is_read_from_any_state(num_read, closes):
    dataset = jb.stream.from_loader(GoesOn(make_examples()))
    for _ in range(2):
        iterator = iter(dataset)
        assert indices(itertools.islice(iterator, num_read)) == [*range(num_read)]
        state = json.loads(json.dumps(iterator.get_state()))
        if closes:
            iterator.close()
        for again in (dataset, jb.stream.from_loader(GoesOn(make_examples()))):
            again = iter(again)
            again.set_state(state)
            assert indices(again) == [*range(num_read, len(LENGTHS))]


def test_a_loader_that_was_moved_goes_on_where_it_was_moved_to():
    loader = GoesOn(make_examples())
    loader.load_state_dict({"index": 7})
    dataset = jb.stream.from_loader(loader)
    jb.stream.sample_lengths(dataset, 3, sequences=["tokens"])
    for start in (7, 0, 0):
        assert indices(dataset) == [*range(start, len(LENGTHS))]


@pytest.mark.parametrize("index", [0, 3, 20])
def test_a_loader_that_was_moved_after_it_was_read_stays_there(index):
    loader = GoesOn(make_examples())
    dataset = jb.stream.from_loader(loader)
    jb.stream.sample_lengths(dataset, 3, sequences=["tokens"])
    for _ in range(2):
        loader.load_state_dict({"index": index})
        read = list(itertools.islice(dataset, 5))
        assert indices(read) == [*range(index, index + 5)]


def test_an_element_that_cannot_be_converted_can_be_skipped():
    def to_example(number):
        return {"index": 0 if number else next(x for x in [] if x)}

    loader = [1, 0, 1, 1]
    iterator = iter(jb.stream.from_loader(loader, to_example=to_example))
    next(iterator)
    # A StopIteration of a function does not end the stream.
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    state = iterator.get_state()
    assert len(list(iterator)) == 2
    iterator = iter(jb.stream.from_loader(loader, to_example=to_example))
    iterator.set_state(state)
    assert len(list(iterator)) == 2


def test_bfloat16_tensors_are_converted():
    torch = pytest.importorskip("torch")
    values = torch.tensor([[1.5, -2.0], [3.0, 1e30]], dtype=torch.bfloat16)
    batch = {"x": values.requires_grad_(), "scale": values[:, 0]}
    examples = list(jb.stream.from_loader([batch], batched=True))
    assert [x["x"].dtype.name for x in examples] == ["bfloat16"] * 2
    for example, row in zip(examples, values.detach().float().numpy(), strict=True):
        np.testing.assert_array_equal(example["x"].astype(np.float32), row)
        assert example["scale"].shape == () and float(example["scale"]) == row[0]


def test_processes_with_the_same_rows_read_the_same_examples():
    for parts in [(0, 1), (2, 3), (0, 2), (1, 3), (1,)]:
        dataset = jb.stream.from_loader(make_examples(), shard=RowShard(parts, 4))
        expected = [index for index in range(len(LENGTHS)) if index % 4 in parts]
        assert indices(dataset) == expected


def test_a_dict_of_arrays_is_a_batch():
    loader = [{"tokens": np.arange(12).reshape(3, 4), "index": [7, 8, 9]}]
    examples = list(jb.stream.from_loader(loader, batched=True))
    assert indices(examples) == [7, 8, 9]
    np.testing.assert_array_equal(examples[2]["tokens"], [8, 9, 10, 11])


def test_a_generator_is_read_once():
    dataset = jb.stream.from_loader(x for x in make_examples())
    iterator = iter(dataset)
    assert indices([next(iterator), next(iterator)]) == [0, 1]
    state = iterator.get_state()
    message = "`loader` is a generator, which can be iterated over only once"
    with pytest.raises(ValueError, match=message):
        next(iter(dataset))
    with pytest.raises(ValueError, match=message):
        iter(dataset).set_state(state)
    # In another process, the generator is new.
    resumed = iter(jb.stream.from_loader(x for x in make_examples()))
    resumed.set_state(state)
    assert indices(resumed) == list(range(2, len(LENGTHS)))


def test_a_loader_of_another_length_is_named():
    iterator = iter(jb.stream.from_loader(make_examples()))
    indices(iterator)
    state = iterator.get_state()
    for examples, change in (
        (make_examples()[:50], "fewer"),
        (make_examples() * 2, "more"),
    ):
        other = iter(jb.stream.from_loader(examples))
        with pytest.raises(ValueError, match=f"`loader` has {change} than 100 elem"):
            other.set_state(state)
    same = iter(jb.stream.from_loader(make_examples()))
    same.set_state(state)
    assert not list(same)


class Counter:
    """A loader with a state."""

    def __init__(self):
        self.next_index = 0

    def __iter__(self):
        for index in range(self.next_index, len(LENGTHS)):
            self.next_index = index + 1
            yield make_examples()[index]
        self.next_index = 0

    def state_dict(self):
        return {"next": self.next_index}

    def load_state_dict(self, state):
        self.next_index = state["next"]


def test_replaying_ignores_a_state_that_was_saved():
    iterator = iter(jb.stream.from_loader(Counter()))
    assert indices([next(iterator) for _ in range(7)]) == list(range(7))
    state = json.loads(json.dumps(iterator.get_state()))
    assert state["loader"] is not None
    for loader in (make_examples(), Counter()):
        resumed = iter(jb.stream.from_loader(loader, resume="replay"))
        resumed.set_state(state)
        assert indices(resumed) == list(range(7, len(LENGTHS)))
    with pytest.raises(ValueError, match="a list, has none.*`resume='replay'` if"):
        iter(jb.stream.from_loader(make_examples())).set_state(state)


class Batches(list):
    """Like the loader of PyTorch."""

    batch_size = 4
    batch_sampler = [[0]]

    def __init__(self, items, collate_fn):
        super().__init__(items)
        self.collate_fn = collate_fn


def default_collate(batch):
    """Named like that of PyTorch."""


class Sized(list):
    """Like `StreamingDataset` of MosaicML, which yields examples."""

    batch_size = 4


def test_a_loader_of_batches_is_not_one_of_examples():
    batches = Batches([make_examples()], default_collate)
    with pytest.raises(ValueError, match=r"makes batches, `batch_size=4`.*`batched=T"):
        jb.stream.from_loader(batches)
    assert indices(jb.stream.from_loader(batches, batched=True))
    batches.batch_size = None
    with pytest.raises(ValueError, match="makes batches, by its `batch_sampler`"):
        jb.stream.from_loader(batches)
    stacked = Batches([make_examples()], lambda batch: batch)
    with pytest.raises(ValueError, match=r"makes batches, `batch_size=4`"):
        jb.stream.from_loader(stacked)


def test_batches_of_grain_are_not_examples():
    loader = grain.DataLoader(
        data_source=make_examples(),
        sampler=grain.samplers.IndexSampler(len(LENGTHS), num_epochs=1),
        operations=[grain.transforms.Batch(4)],
    )
    with pytest.raises(ValueError, match=r"makes batches, `Batch\(batch_size=4"):
        jb.stream.from_loader(loader)
    dataset = grain.MapDataset.source(make_examples())
    for batches in (
        dataset.batch(4),
        dataset.batch(4).to_iter_dataset(),
        dataset.to_iter_dataset().batch(4),
    ):
        with pytest.raises(ValueError, match="makes batches, by its `batch`"):
            jb.stream.from_loader(batches)
    assert len(list(jb.stream.from_loader(dataset.to_iter_dataset()))) == len(LENGTHS)


def test_batches_of_hugging_face_are_not_examples():
    datasets = pytest.importorskip("datasets")
    rows = {"tokens": [[1, 2]] * 8}
    dataset = datasets.Dataset.from_dict(rows).to_iterable_dataset().batch(4)
    for batches in (dataset, dataset.with_format("numpy")):
        with pytest.raises(ValueError, match=r"makes batches, `batch_size=4`"):
            jb.stream.from_loader(batches)
        assert len(list(jb.stream.from_loader(batches, batched=True))) == 8

    def _batch_fn(rows):
        return {"tokens": [x for tokens in rows["tokens"] for x in tokens]}

    unbatched = dataset.map(_batch_fn, batched=True)
    assert len(list(jb.stream.from_loader(unbatched))) == 8


@pytest.mark.parametrize("index", [0, 5, 63, 64])
def test_skipped_elements_are_compared(index):
    examples = [{"x": [n]} for n in range(100)]
    iterator = iter(jb.stream.from_loader(examples))
    for _ in range(70):
        next(iterator)
    changed = [*examples[:index], {"x": [-1]}, *examples[index + 1 :]]
    with pytest.raises(ValueError, match="yields other elements than before"):
        iter(jb.stream.from_loader(changed)).set_state(iterator.get_state())
    swapped = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    iterator = iter(jb.stream.from_loader(swapped))
    next(iterator), next(iterator)
    swapped = [swapped[1], swapped[0], swapped[2]]
    with pytest.raises(ValueError, match="in another order"):
        iter(jb.stream.from_loader(swapped)).set_state(iterator.get_state())


@pytest.mark.parametrize("taken", [6, 7, 10])
def test_a_batch_that_is_continued_is_compared(taken):
    batches = [make_examples()[i : i + 7] for i in range(0, 21, 7)]
    iterator = iter(jb.stream.from_loader(batches, batched=True))
    for _ in range(taken):
        next(iterator)
    state = iterator.get_state()
    resumed = iter(jb.stream.from_loader(batches, batched=True))
    resumed.set_state(state)
    assert indices(resumed) == list(range(taken, 21))
    changes = {
        "other elements": [x[:3] for x in batches],
        "in another order": batches[::-1],
        "fewer than": batches[: (taken - 1) // 7],
    }
    for message, changed in changes.items():
        with pytest.raises(ValueError, match=message):
            iter(jb.stream.from_loader(changed, batched=True)).set_state(state)


def test_examples_are_not_converted_to_be_compared():
    rng = np.random.default_rng(0)

    def augmented(example):
        return {"tokens": example["tokens"], "noise": rng.random()}

    class Video:
        def __len__(self):
            raise AssertionError("This is read.")

        __getitem__ = __array__ = __len__

    examples = [{**x, "video": Video()} for x in make_examples()]
    iterator = iter(jb.stream.from_loader(examples, to_example=augmented))
    for _ in range(70):
        next(iterator)
    resumed = iter(jb.stream.from_loader(examples, to_example=augmented))
    resumed.set_state(iterator.get_state())
    assert len(list(resumed)) == len(LENGTHS) - 70


def test_examples_may_be_converted_in_place():
    def convert(example):
        example["tokens"] = example.pop("tokens")[:1] + 1
        return example

    def batches():
        return [make_examples()[i : i + 7] for i in range(0, 21, 7)]

    options = {"batched": True, "to_example": convert}
    for taken in range(1, 21):
        iterator = iter(jb.stream.from_loader(batches(), **options))
        for _ in range(taken):
            next(iterator)
        resumed = iter(jb.stream.from_loader(batches(), **options))
        resumed.set_state(iterator.get_state())
        assert indices(resumed) == list(range(taken, 21))


def test_a_loader_with_a_state_may_augment_at_random():
    class Augmenting(Counter):
        def __iter__(self):
            for example in super().__iter__():
                yield [{**example, "noise": random.random()}] * 2

    iterator = iter(jb.stream.from_loader(Augmenting(), batched=True))
    for _ in range(5):
        next(iterator)
    resumed = iter(jb.stream.from_loader(Augmenting(), batched=True))
    resumed.set_state(iterator.get_state())
    assert indices(resumed)[:3] == [2, 3, 3]


def test_an_example_that_fails_does_not_take_its_batch_along():
    def convert(example):
        if example["index"] in (0, 8, 20):
            raise KeyError(example["index"])
        return example

    batches = [make_examples()[i : i + 7] for i in range(0, 21, 7)]
    iterator = iter(jb.stream.from_loader(batches, batched=True, to_example=convert))
    read, failed = [], 0
    while True:
        try:
            read.append(int(next(iterator)["index"]))
        except KeyError:
            failed += 1
        except StopIteration:
            break
    assert read == [n for n in range(21) if n not in (0, 8, 20)] and failed == 3


@pytest.mark.parametrize("state", [{}, None, {"elements": 3}])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="is not the state of a stream from a loader"):
        iter(jb.stream.from_loader(make_examples())).set_state(state)


def test_a_loader_that_rejects_its_state_is_named():
    iterator = iter(jb.stream.from_loader(Counter()))
    next(iterator)
    other = Counter()
    other.load_state_dict = lambda state: state["epoch"]
    with pytest.raises(ValueError, match=r"a Counter, cannot continue.*KeyError.*Pass"):
        iter(jb.stream.from_loader(other)).set_state(iterator.get_state())


@pytest.mark.parametrize(
    ("loader", "options"),
    [
        (Sized(make_examples()), {}),
        (Batches(make_examples(), lambda batch: batch[0]), {"batched": False}),
        (
            Batches([[x] for x in make_examples()], default_collate),
            {"to_example": lambda batch: batch[0]},
        ),
    ],
)
def test_a_loader_with_a_batch_size_may_yield_examples(loader, options):
    examples = jb.stream.from_loader(loader, **options)
    assert indices(examples) == list(range(len(LENGTHS)))


def test_a_column_may_be_a_list_of_arrays_of_different_lengths():
    columns = {"tokens": [x["tokens"] for x in make_examples()]}
    columns["index"] = np.arange(len(LENGTHS))
    # The last batch may have a single row.
    last = {"tokens": [np.ones(3, np.int32)], "index": np.zeros(1)}
    examples = jb.stream.from_loader([columns, last], batched=True)
    assert [len(x["tokens"]) for x in examples] == [*LENGTHS, 3]


def test_default_batches_of_torch_are_refused_if_they_are_transposed():
    loader = torch_data().DataLoader
    rows = [{"x": [10 * i + j for j in range(6)]} for i in range(8)]
    pairs = [(f"s{i}", f"t{i}") for i in range(8)]
    for dataset, message in ((rows, "column 'x' is a list"), (pairs, "list of tuples")):
        batches = jb.stream.from_loader(loader(dataset, batch_size=4), batched=True)
        with pytest.raises(ValueError, match=message):
            next(iter(batches))
    for batch_size, refused in ((None, False), (1, True)):
        try:
            jb.stream.from_loader(loader(rows, batch_size=batch_size))
        except ValueError:
            assert refused


class WithState(list):
    def state_dict(self):
        return {"generator": object()}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: jb.stream.from_loader(3), "`loader` is a int, which cannot be"),
        (
            lambda: jb.stream.from_loader([], shard=0),
            "`shard` is a int, not a `RowShard`. Pass `jb.sharding.local_rows",
        ),
        (
            lambda: jb.stream.from_loader([], resume="never"),
            "`resume='never'`: choose 'state' or 'replay'",
        ),
        (
            lambda: list(jb.stream.from_loader([3], batched=True)),
            "`loader` yields a int, but with `batched=True`",
        ),
        (
            lambda: list(
                jb.stream.from_loader([{"a": [1], "b": [1, 2]}], batched=True)
            ),
            "whose features have {'a': 1, 'b': 2} entries",
        ),
        (
            lambda: list(
                jb.stream.from_loader(
                    [{"a": [1], "b": 3, "c": np.array(3), "d": "x"}], batched=True
                )
            ),
            "have {'a': 1, 'b': None, 'c': None, 'd': None} entries .* Repeat or",
        ),
        (
            lambda: list(jb.stream.from_loader([{}], batched=True)),
            "whose features have {} entries",
        ),
        (
            lambda: list(
                jb.stream.from_loader([[np.ones((2, 3)), np.ones(2)]], batched=True)
            ),
            "yields a list of arrays, .* list of dicts: .* `collate_fn=list` in",
        ),
        (
            lambda: list(
                jb.stream.from_loader([[("a", "b"), ("c", "d")]], batched=True)
            ),
            "yields a list of tuples, which may be the examples or the columns",
        ),
        (
            lambda: list(
                jb.stream.from_loader(
                    [{"x": [np.array([1, 3]), np.array([2, 4])]}], batched=True
                )
            ),
            "column 'x' is a list of arrays.* list of dicts: .*`with_format",
        ),
        (
            lambda: _state_after_one(WithState(make_examples())),
            "a WithState, is not JSON .* contains a object. Pass `resume='replay'`",
        ),
    ],
)
def test_wrong_loaders_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def _state_after_one(loader):
    iterator = iter(jb.stream.from_loader(loader))
    next(iterator)
    return iterator.get_state()


def test_a_shuffled_stream_of_hugging_face_is_warned_of_when_it_is_saved():
    datasets = pytest.importorskip("datasets")
    rows = [{"tokens": [i] * 8} for i in range(20)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    shuffled = stream.shuffle(seed=0, buffer_size=8).map(lambda x: x)
    for loader, resume in ((stream, "state"), (shuffled, "replay")):
        iterator = iter(jb.stream.from_loader(loader, resume=resume))
        next(iterator)
        iterator.get_state()
    iterator = iter(jb.stream.from_loader(shuffled))
    next(iterator)
    with pytest.warns(UserWarning, match=r"shuffles through a buffer.*'replay'`"):
        iterator.get_state()


@pytest.mark.filterwarnings("ignore:`loader` shuffles through a buffer")
def test_a_shuffled_stream_of_hugging_face_is_replayed_by_epoch():
    """Its state does not include the buffer, which resuming from it reveals."""
    datasets = pytest.importorskip("datasets")
    rows = [{"tokens": [i + 1] * 8} for i in range(200)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=4)
    plan = jb.BucketPlan.from_shapes([(4, 8)])

    def batches_of(resume):
        def epoch(epoch, seed):
            shuffled = stream.shuffle(seed=seed, buffer_size=50)
            return jb.stream.from_loader(shuffled, resume=resume)

        return jb.stream_batches(epoch, plan, pool_size=16, num_epochs=2)

    def contents(batches):
        return [x.features["tokens"][:, 0].tolist() for x in batches]

    expected = contents(batches_of("replay"))
    epochs = np.array(expected).reshape(2, 200)
    assert np.sort(epochs).tolist() == [list(range(1, 201))] * 2
    assert epochs[0].tolist() != epochs[1].tolist()
    for step in (7, 60):
        for resume in ("replay", "state"):
            iterator = iter(batches_of(resume))
            for _ in range(step):
                next(iterator)
            state = json.loads(json.dumps(iterator.get_state()))
            iterator = iter(batches_of(resume))
            if resume == "replay":
                iterator.set_state(state)
                assert contents(iterator) == expected[step:]
                continue
            with pytest.raises(ValueError, match="`resume='replay'`"):
                iterator.set_state(state)
            iterator = iter(batches_of("replay"))
            iterator.set_state(state)
            assert contents(iterator) == expected[step:]
