"""Pairs of site data that differ in one record, which stands at a branch of what a site does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import shake_256

import numpy as np

from perennial.config.site import load_site_config
from perennial.data.deployed import load_site, merge_site_config
from perennial.data.site import SiteData
from tests.privacy.twins.records import Array, Records, record
from tests.privacy.twins.world import Federation, Ran

TRIES = 400
HELD_OUT = ("test", "validation")


@dataclass(frozen=True)
class Pair:
    """The twin's data. replaced: a record took another's place; else one came last. part: where it lies."""

    name: str
    twin: Records
    replaced: bool = False
    part: str = "train"


class Pairs:
    """Makes pairs of a recorded federation; a record's content decides its part, by the run's key."""

    def __init__(self, federation: Federation, before: Ran) -> None:
        self.federation = federation
        keys = [
            answer.request["fields"].get("split_key")  # pyright: ignore[reportAttributeAccessIssue]
            for answer in before.answers
        ]
        self.key = next((str(key) for key in keys if key), "00" * 32)
        self.records = federation.data[federation.first]
        self.shape = self.records.x.shape[1:]

    def loaded(self, records: Records) -> SiteData:
        """The site's data as it reads them."""
        folder = self.federation.folder / self.federation.first
        records.write(folder)
        experiment = self.federation.experiment()
        own = load_site_config(folder / "site.yaml").data
        assert own is not None and experiment.data.classes is not None
        config = merge_site_config(experiment.data, own)
        return load_site(
            config, experiment.data.classes, self.federation.first, experiment.seed, bytes.fromhex(self.key)
        )

    def part_of(self, records: Records, row: int) -> str:
        """Where a record lies: train, test, validation or calibration."""
        data = self.loaded(records)
        parts = ("train", *HELD_OUT, "calibration")
        return next(part for part in parts if row in getattr(data, part).tolist())

    def added(self, name: str, part: str, make: Callable[[int], Array] | None = None, label: int = 0) -> Pair:
        """One record more, of a class, in a part of the data; in training it is in the first batch."""
        make = make or (lambda trial: record(1, f"new {trial}", self.shape, label))
        for trial in range(TRIES):
            x = make(trial)
            # where data name patients, the patient decides the part
            twin = self.records.with_one(x, f"c{label}", f"new {trial}")
            if self.part_of(twin, len(self.records)) == part and (part != "train" or _drawn(x)):
                return Pair(name, twin, part=part)
        raise RuntimeError(f"{name}: no record found that lies in {part}")

    def in_its_place(self) -> Pair:
        """A training record replaced by another one of its class, which is in training too."""
        data = self.loaded(self.records)
        row = next(int(row) for row in data.train if int(data.y[row]) == 0)
        for trial in range(TRIES):
            x = record(1, f"other {trial}", self.shape, 0)
            twin = self.records.with_other(row, x)
            if self.part_of(twin, row) == "train" and _drawn(x):
                return Pair("replaced", twin, replaced=True)
        raise RuntimeError("replaced: no record found")

    def relabelled(self) -> Pair:
        """A training record that says another class, of another task where there are two."""
        data = self.loaded(self.records)
        row = next(int(row) for row in data.train if int(data.y[row]) == 0 and _drawn(self.records.x[row]))
        return Pair("relabelled", self.records.with_other(row, self.records.x[row], "c3"), replaced=True)

    def duplicate(self) -> Pair:
        """A training record that is there twice."""
        row = int(self.loaded(self.records).train[0])
        return Pair("duplicate", self.records.with_one(self.records.x[row], str(self.records.y[row])))

    def largest(self) -> Pair:
        """The greatest values that there are."""

        def make(trial: int) -> Array:
            x = np.full(self.shape, 255, dtype=np.uint8)
            x.flat[trial % x.size] -= 1 + trial // x.size
            return x

        return self.added("largest value", "train", make)

    def few(self) -> Iterator[Pair]:
        """Pairs for every case."""
        yield self.added("added", "train")
        yield self.in_its_place()
        if self.federation.experiment().data.validation_fraction:
            yield self.added("added to the validation part", "validation")

    def usual(self) -> Iterator[Pair]:
        """Pairs for every protection."""
        yield from self.few()
        if self.federation.experiment().data.test_fraction:
            yield self.added("added to the test part", "test")
        yield self.duplicate()
        yield self.largest()
        yield self.relabelled()


def training_count(federation: Federation, key: str, task_classes: int = 2) -> int:
    """Training samples that the first site has of the first task."""
    pairs = Pairs(federation, Ran([], {}))
    pairs.key = key
    data = pairs.loaded(pairs.records)
    return int((data.y[data.train] < task_classes).sum())


def _drawn(x: Array) -> bool:
    """Whether a record is in a batch of half of them (twins/coupling.py)."""
    coin = shake_256(b"0 " + x.tobytes()).digest(7)
    return int.from_bytes(coin) / 2**56 < 0.5
