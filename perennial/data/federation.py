"""A whole simulated federation: one tensor of samples, and who holds which of them.

The test set is the official one, or is held out before anything is divided; a keyed hash of each record
decides (data/splits.py), so sites that exist (a natural partition) hold out what they would in deployment,
and the test set of the server is all of these together. Where the division is simulated, each site's test
part is its share of the test set, in proportion to its training samples of each class: what all sites measure
together is what the server measures.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from perennial.data.config import DataConfig
from perennial.data.labels import list_empty_classes
from perennial.data.partition import partition_samples, share_out
from perennial.data.samples import Source, Stored, fill_missing, find_stored_type, join_samples
from perennial.data.schedule import Registry, TaskSchedule, build_registry
from perennial.data.site import SiteData
from perennial.data.sources import load
from perennial.data.splits import KeyedHash, derive_simulation_key
from perennial.data.tasks_config import TasksConfig
from perennial.foundation.errors import ConfigError, DataError, suggest_nearest
from perennial.foundation.names import SITE_NAME_RULE, is_site_name


@dataclass(frozen=True, eq=False)
class SimulatedFederation:
    """The data of all simulated sites of an experiment.

    registry: classes in order, and tasks.
    sites: name -> data, all views by index into one tensor.
    test: the server's test set, as its part "test"; None without one.
    mean, std: as in SiteData.
    stored: in which numbers the samples are held.
    columns: of a table, as used.
    notes: for the journal.
    estimated_constants: whether mean and std, what stands for missing values, or the columns of a table and
    their categories were taken from the data.
    fill: as in Source, with nothing left open. natural: whether the data name each record's site.
    """

    registry: Registry
    sites: dict[str, SiteData]
    test: SiteData | None
    mean: Tensor
    std: Tensor
    input_shape: tuple[int, ...]
    stored: Stored
    columns: dict[str, str | tuple[str, ...]] | None
    notes: tuple[str, ...]
    estimated_constants: bool = False
    fill: Tensor | None = None
    natural: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        return self.registry.classes

    @property
    def order_hash(self) -> str:
        return self.registry.order_hash

    @property
    def schedule(self) -> TaskSchedule:
        return self.registry.schedule

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(self.sites)

    def site(self, name: str) -> SiteData:
        """The data of one site. Raises ConfigError when there is no site of this name."""
        if name not in self.sites:
            raise ConfigError(
                f"no site {name!r} in the data{suggest_nearest(name, self.sites)}; it has {len(self.sites)}"
            )
        return self.sites[name]


def build(
    config: DataConfig,
    tasks: TasksConfig,
    seed: int,
    earlier: Registry | None = None,
    source: Source | None = None,
) -> SimulatedFederation:
    """Read the data of an experiment, order and cut its classes, and divide it among the simulated sites.

    earlier: the registry of the run that is continued, with which this one begins. source: what reading would
    give, if that was done already or is not to be taken as it is; its tables are filled. Raises ConfigError
    or DataError naming what is wrong with the experiment or its data.
    """
    source = load(config, seed) if source is None else source
    registry = build_registry(source.classes, tasks, seed, earlier)
    return _Builder(config, source, registry, seed, tasks.learnt).build_federation()


class _Builder:
    def __init__(
        self, config: DataConfig, source: Source, registry: Registry, seed: int, learnt: int = 0
    ) -> None:
        self.known = registry.schedule.boundaries[learnt]
        self.config, self.source, self.registry, self.seed = config, source, registry, seed
        self.notes = list(source.notes)
        self.natural = config.partition.kind == "natural"
        self.official = source.test is not None
        everything = source.train if source.test is None else join_samples(source.train, source.test)
        self.x = everything.x
        position = {name: index for index, name in enumerate(registry.classes)}
        internal = torch.tensor([position[name] for name in source.classes])
        self.y = internal[everything.y]
        self.labels = self.y.numpy()
        self.keyed = KeyedHash(derive_simulation_key(seed), everything.split_groups())
        self.subgroup, self.places = everything.subgroup, everything.keys
        self.site_of = None if everything.site is None else everything.site.numpy()
        self.names = self._list_site_names()

    def build_federation(self) -> SimulatedFederation:
        train, test = self._cap_parts(*self._train_and_test())
        self._require_classes()
        shares = self._divide_train(train)
        tests = self._test_shares(shares, test)
        mean, std, fill = self._estimate_constants(train)
        none = np.empty(0, dtype=np.int64)
        frame = SiteData(
            "test",
            self.x,
            self.y,
            train=_to_tensor(none),
            validation=_to_tensor(none),
            test=_to_tensor(test),
            mean=mean,
            std=std,
            keyed=self.keyed,
            patients=self.source.train.patients,
            columns=self.source.columns,
            fill=fill,
            subgroup=self.subgroup,
            places=self.places,
        )
        sites = {}
        fraction = self.config.validation_fraction
        for name, share, test_share in zip(self.names, shares, tests, strict=True):
            if len(share) == 0:
                self.notes.append(f"site {name!r} holds no training sample and takes no part")
                continue
            validation, rest = self.keyed.hold_out(share, fraction, "validation")
            calibration, rest = self.keyed.hold_out(rest, self.config.calibration_fraction, "calibration")
            if len(rest) == 0:
                self.notes.append(f"site {name!r}: all of its samples are validation samples")
            sites[name] = replace(
                frame,
                name=name,
                train=_to_tensor(rest),
                validation=_to_tensor(validation),
                calibration=_to_tensor(calibration),
                test=_to_tensor(test_share),
            )
        self._name_what_is_lacking(sites, test)
        return SimulatedFederation(
            self.registry,
            sites,
            frame if len(test) else None,
            mean,
            std,
            tuple(self.x.shape[1:]),
            find_stored_type(self.x),
            self.source.columns,
            tuple(self.notes),
            self._has_unknowns(),
            fill,
            self.natural,
        )

    def _has_unknowns(self) -> bool:
        source = self.source
        unknown = source.mean.isnan().any() or (source.fill is not None and source.fill.isnan().any())
        return bool(unknown) or (source.columns is not None and self.config.columns is None)

    def _list_site_names(self) -> tuple[str, ...]:
        if self.natural:
            found = self.source.train.site_names
            if self.source.train.site is None:
                raise ConfigError("data.partition.kind: 'natural', but the data names no sites")
            if self.config.sites not in (None, len(found)):
                raise ConfigError(
                    f"data.sites: {self.config.sites}, but the data has {len(found)} of its own; leave it out"
                )
            for name in found:
                if not is_site_name(name):
                    raise DataError(f"site: found {name!r:.80}, allowed {SITE_NAME_RULE}")
            return found
        if self.config.sites is None:
            raise ConfigError(
                f"data.sites: missing; partition {self.config.partition.kind!r} needs their number"
            )
        return tuple(f"site-{index}" for index in range(self.config.sites))

    def _train_and_test(self) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(self.labels))
        if self.official:
            train, test = np.split(rows, [len(self.source.train)])
            if self.source.train.patients and (both := self.keyed.shared(train, test)):
                self.notes.append(
                    f"{both} patients have samples on both sides of the data's own test split, which is kept"
                )
            return train, test
        test, train = self.keyed.hold_out(rows, self.config.test_fraction, "test")
        return train, test

    def _cap_parts(self, train: np.ndarray, test: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        if self.config.samples_limit is not None:
            train = self.keyed.cap(train, self.config.samples_limit, "samples-limit")
        if self.config.test_limit is not None:
            test = self.keyed.cap(test, self.config.test_limit, "test-limit")
        return train, test

    def _require_classes(self) -> None:
        """Raises DataError on a class that nobody can learn because the data has no sample of it."""
        absent = self._list_absent(np.arange(len(self.source.train)))
        # classes that a run learnt before it was continued are learnt
        absent = [name for name in absent if name not in self.registry.classes[: self.known]]
        if absent:
            remedy = "take it out of data.classes"
            if self.config.classes is None:
                remedy = "remove the empty class folder, or the name from the list of classes in the file"
            raise DataError(
                f"the training set has no sample of {', '.join(map(repr, absent))}; add samples, or {remedy}"
            )

    def _name_what_is_lacking(self, sites: dict[str, SiteData], test: np.ndarray) -> None:
        """Name the classes that the split left without any sample of a part."""
        trained, validated = (
            np.concatenate([test[:0], *(site.part(part).numpy() for site in sites.values())])
            for part in ("train", "validation")
        )
        for part, rows, wanted in (
            ("training", trained, True),
            ("validation", validated, self.config.validation_fraction > 0),
            ("test", test, self.official or self.config.test_fraction > 0),
        ):
            if wanted and (absent := self._list_absent(rows)):
                self.notes.append(
                    f"no {part} sample of {', '.join(map(repr, absent))}: a hash of each record decides, "
                    "whatever its class"
                )

    def _list_absent(self, rows: np.ndarray) -> list[str]:
        return list_empty_classes(self.labels[rows], self.registry.classes)

    def _divide_train(self, train: np.ndarray) -> list[np.ndarray]:
        """Training rows of each site."""
        divided = partition_samples(
            self.config.partition,
            self.labels[train],
            len(self.names),
            self.seed,
            self.registry.schedule.boundaries,
            names=self.registry.classes,
            site_of=self.site_of[train] if self.natural and self.site_of is not None else None,
            patients=self._number_patients(train),
        )
        self.notes += divided.notes
        return [train[indices] for indices in divided.indices]

    def _test_shares(self, shares: list[np.ndarray], test: np.ndarray) -> list[np.ndarray]:
        if self.natural and self.site_of is not None:
            return [test[self.site_of[test] == index] for index in range(len(shares))]
        classes = len(self.registry.classes)
        held = np.stack([np.bincount(self.labels[share], minlength=classes) for share in shares], axis=1)
        return share_out(
            self.labels[test], test, held, self.registry.classes, self.seed, self._number_patients(test)
        )

    def _number_patients(self, rows: np.ndarray) -> np.ndarray | None:
        """(n,) int64 whose each row is; None where the data names no patients."""
        if not self.source.train.patients:
            return None
        return self.keyed.number_groups(torch.from_numpy(rows)).numpy()

    def _estimate_constants(self, train: np.ndarray) -> tuple[Tensor, Tensor, Tensor | None]:
        """Constants, those that nobody has said taken from the training rows; fills missing numbers in x."""
        mean, std = self.source.mean.clone(), self.source.std.clone()
        unknown = mean.isnan()
        if unknown.any():
            values = self.x[_to_tensor(train)].transpose(0, 1).flatten(1)[unknown].double()
            center = values.nanmean(dim=1).nan_to_num(0.0)
            spread = (values - center[:, None]).square().nanmean(dim=1).sqrt().nan_to_num(0.0)
            mean[unknown] = center.float()
            std[unknown] = torch.where(spread > 0, spread, torch.ones_like(spread)).float()
        fill = None if self.source.fill is None else self.source.fill.clone()
        if fill is not None and (unknown := fill.isnan()).any():
            values = self.x[_to_tensor(train)][:, unknown]
            fill[unknown] = values.nanmedian(dim=0).values.nan_to_num(0.0)
        fill_missing(self.x, mean if fill is None else fill)
        return mean, std, fill


def _to_tensor(rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=np.int64))
