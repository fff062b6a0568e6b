"""Other data loaders: each example once, parts of processes, and exact resume.

Loaders of other libraries are tested where they are installed, for instance by
`pip install -e ".[loaders]"`.
"""

import itertools
import subprocess
import sys

import grain
import numpy as np
import pytest
from stream_cases import through_json

import jaxbucket as jb
from jaxbucket.base.row_shard import RowShard

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


def ragged_batches(examples):
    """Lists of 7 examples, which need no padding."""
    return [examples[i : i + 7] for i in range(0, len(examples), 7)]


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


def torch_goes_on():
    torch_data()
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Examples(GoesOn, torch_data().IterableDataset):
        pass

    return stateful.StatefulDataLoader(Examples(make_examples()), batch_size=None)


# Name -> (loader, `to_example`, whether the loader itself saves its state)
LOADERS = {
    "list": (make_examples, dict, False),
    "batches": (lambda: ragged_batches(make_examples()), list, False),
    "grain": (grain_loader, dict, False),
    "torch": (torch_loader, dict, False),
    "torch-batches": (torch_batches, list, False),
    "torch-iterable": (torch_iterable, dict, False),
    "torch-stateful": (stateful_torch, dict, True),
    "hugging-face": (hugging_face, dict, True),
    "hugging-face-stateful": (stateful_hugging_face, dict, True),
    "hugging-face-replay": (hugging_face, dict, False),
    "webdataset": (web_dataset, from_web, False),
    "goes-on": (lambda: GoesOn(make_examples()), dict, True),
    "torch-goes-on": (torch_goes_on, dict, True),
}


def make_dataset(name, folder, **options):
    """Returns the dataset of a new loader, as in another process."""
    make, to_example, has_state = LOADERS[name]
    loader = make(folder) if name == "webdataset" else make()
    resume = loader if has_state else None
    return jb.stream.from_loader(loader, to_example, resume=resume, **options)


def indices(examples):
    return [int(example["index"]) for example in examples]


@pytest.mark.parametrize("name", LOADERS)
def test_an_iterator_has_every_example_and_continues_at_its_state(name, tmp_path):
    dataset = make_dataset(name, tmp_path)
    examples = list(dataset)
    expected = indices(examples)
    assert sorted(expected) == list(range(len(LENGTHS)))
    for index, example in zip(expected, examples, strict=True):
        np.testing.assert_array_equal(example["tokens"], np.full(LENGTHS[index], index))
    for stop in (0, 1, 6, 7, 8, 50, 99, 100):
        iterator = iter(dataset)
        for _ in range(stop):
            next(iterator)
        state = through_json(iterator.get_state())
        if stop > 7:
            assert (state["loader"] is not None) == LOADERS[name][2]
        again = make_dataset(name, tmp_path)
        resumed = iter(again)
        resumed.set_state(state)
        assert resumed.get_state() == state
        assert indices(resumed) == expected[stop:]
        # The epoch after a resumed one is complete.
        assert indices(again) == expected


@pytest.mark.parametrize("name", LOADERS)
def test_parts_have_every_element_once(name, tmp_path):
    seen = []
    for part in range(3):
        dataset = make_dataset(name, tmp_path, shard=RowShard((part,), 3))
        iterator = iter(dataset)
        first = indices(itertools.islice(iterator, 9))
        again = iter(make_dataset(name, tmp_path, shard=RowShard((part,), 3)))
        again.set_state(through_json(iterator.get_state()))
        rest = indices(iterator)
        assert indices(again) == rest
        seen += first + rest
    assert sorted(seen) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("name", LOADERS)
def test_batches_resume_at_any_step(name, tmp_path):
    plan = jb.plan_buckets(LENGTHS, sample=True, max_tokens=160, num_buckets=2)

    def batches():
        examples = jb.stream.ExampleStream(
            make_dataset(name, tmp_path), num_epochs=2, sequences=["tokens"]
        )
        return jb.stream_batches(examples, plan, pool_size=32)

    expected = [x.features["tokens"].tolist() for x in batches()]
    step = int(np.random.default_rng(len(name)).integers(1, len(expected)))
    iterator, again = iter(batches()), iter(batches())
    for _ in range(step):
        next(iterator)
    again.set_state(through_json(iterator.get_state()))
    assert [x.features["tokens"].tolist() for x in again] == expected[step:]


@pytest.mark.parametrize("name", LOADERS)
def test_two_iterators_do_not_disturb_each_other(name, tmp_path):
    dataset = make_dataset(name, tmp_path)
    expected = indices(dataset)
    first, second = iter(dataset), iter(dataset)
    got = [[], []]
    for _ in range(9):
        got[0] += indices([next(first), next(first), next(first)])
        got[1] += indices([next(second)])
    second.close()
    assert got[0] + indices(first) == expected and got[1] == expected[:9]


@pytest.mark.parametrize("name", ["goes-on", "torch-goes-on", "list"])
@pytest.mark.parametrize("is_new", [False, True])
def test_sampled_examples_are_read_again(name, is_new, tmp_path):
    make, to_example, has_state = LOADERS[name]
    loader = make()

    def dataset():
        resume = loader if has_state else None
        return jb.stream.from_loader(loader, to_example, resume=resume).map(dict)

    first = dataset()
    options = {"num_epochs": 2, "sequences": ["tokens"]}
    sample = jb.stream.sample_lengths(jb.stream.ExampleStream(first, **options), 10)
    assert sample.tolist() == LENGTHS[:10]
    plan = jb.plan_buckets(
        LENGTHS, sample=True, max_tokens=8 * max(LENGTHS), num_buckets=2
    )
    examples = jb.stream.ExampleStream(dataset() if is_new else first, **options)
    batches = jb.stream_batches(examples, plan, pool_size=20)
    assert batches.example["index"] == 0
    rows = (jb.data.unbatch(x, sequences=["tokens"]) for x in batches)
    seen = indices(itertools.chain(*rows))
    assert sorted(seen) == sorted([*range(len(LENGTHS))] * 2)


def test_every_iteration_begins_where_the_loader_was():
    loader = GoesOn(make_examples())
    loader.load_state_dict({"index": 7})
    dataset = jb.stream.from_loader(loader, dict, resume=loader)
    assert indices(itertools.islice(dataset, 3)) == [7, 8, 9]
    assert indices(dataset) == indices(dataset) == [*range(7, len(LENGTHS))]


def test_only_own_elements_are_converted():
    converted = []

    def to_example(example):
        converted.append(example["index"])
        return example

    shard = RowShard((1,), 4)
    dataset = jb.stream.from_loader(make_examples(), to_example, shard=shard)
    assert indices(dataset) == converted == list(range(1, len(LENGTHS), 4))


# Refusals


@pytest.mark.parametrize(
    "to_example", [3, lambda x: [x], lambda x: next(iter([])), lambda x: "text"]
)
def test_a_wrong_conversion_is_named(to_example):
    with pytest.raises((ValueError, RuntimeError), match="`to_example"):
        list(jb.stream.from_loader([1], to_example))


def test_a_function_is_no_loader():
    with pytest.raises(ValueError, match="`loader`"):
        jb.stream.from_loader(lambda: iter([]), dict)  # pyright: ignore


def test_a_generator_is_read_once():
    dataset = jb.stream.from_loader((x for x in make_examples()), dict)
    iterator = iter(dataset)
    first = indices(itertools.islice(iterator, 5))
    state = iterator.get_state()
    with pytest.raises(ValueError, match="`loader`.*only once"):
        next(iter(dataset))
    # A new process has a new generator.
    again = iter(jb.stream.from_loader((x for x in make_examples()), dict))
    again.set_state(through_json(state))
    assert first + indices(again) == list(range(len(LENGTHS)))


@pytest.mark.parametrize("num_read", [1, 5, 60])
@pytest.mark.parametrize("change", ["order", "contents", "length"])
@pytest.mark.parametrize("name", ["list", "goes-on", "batches"])
def test_another_loader_is_refused(name, change, num_read):
    make, to_example, has_state = LOADERS[name]

    def dataset(loader):
        resume = loader if has_state else None
        return jb.stream.from_loader(loader, to_example, resume=resume)

    iterator = iter(dataset(make()))
    for _ in range(num_read):
        next(iterator)
    state, examples = iterator.get_state(), make_examples()
    examples = {
        "order": examples[::-1],
        "contents": [{**x, "tokens": x["tokens"] + 1} for x in examples],
        "length": [],
    }[change]
    if name == "batches":
        examples = ragged_batches(examples)
    other = GoesOn(examples) if has_state else examples
    if has_state and num_read == 1:
        return  # No element is read again.
    with pytest.raises(ValueError, match="`loader`"):
        iter(dataset(other)).set_state(state)


OPEN_AT_EXIT = """
import jaxbucket as jb

class Loader(list):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

loader = Loader([{"x": [1]}, {"x": [2]}])
stream = jb.stream.from_loader(loader, dict, resume=loader)
plan = jb.plan_buckets([1], max_tokens=1)
batches = iter(jb.stream_batches(stream, plan, pool_size=1))
next(batches)
"""


def test_a_script_may_end_with_an_open_loader():
    command = [sys.executable, "-c", OPEN_AT_EXIT]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not run.stderr
