"""Opens the sums and the model of a closed-form run, and writes changed ones."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from perennial.config.experiment import Experiment, load_experiment
from perennial.config.simulation import load_simulated_federation
from perennial.foundation.errors import ConfigError, PerennialError, StateError
from perennial.foundation.files import hash_file, replace_file
from perennial.learning.analytic.statistics import PARTS, Statistics
from perennial.models.incremental import complete_state
from perennial.models.saved import GLOBAL_MODEL, PERSONAL_MODEL, SavedModel, load_saved, save_model
from perennial.privacy.signed_sums import Statement
from perennial.protocol.tensors import hash_tensors
from perennial.server.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_previous,
    save_checkpoint,
    save_previous,
)
from perennial.server.measures.record import FILE
from perennial.server.rounds import History
from perennial.server.run_folder import CHECKPOINT
from perennial.server.run_measures import build_confidence_facts
from perennial.server.summary import summarise_accuracy
from perennial.strategies.analytic.cross_site import build_block
from perennial.strategies.analytic.kept import FOLDER, KeptSums
from perennial.strategies.analytic.method import Analytic
from perennial.strategies.analytic.personal_head import keep_personal_head
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.factory import build_strategy


@dataclass
class OpenedRun:
    """A closed-form run whose sums and model are read from its folder."""

    folder: Path
    checkpoint: Checkpoint
    experiment: Experiment
    whole: IncrementalStrategy
    strategy: Analytic
    model: SavedModel | None
    """None of a run that has not finished."""

    @classmethod
    def open(cls, folder: Path, *, unfinished: bool = False) -> "OpenedRun":
        """Open the run in `folder`. unfinished: whether one that has not finished will do.

        Raises StateError or ConfigError naming what is missing, or what forbids to subtract.
        """
        checkpoint, _ = load_checkpoint(folder / CHECKPOINT)
        finished = checkpoint.progress.finished
        if not (finished or unfinished):
            raise StateError(f"{folder}: the run is not finished; resume it first")
        experiment = checkpoint.read_experiment()
        if experiment.secure is not None:
            raise ConfigError(
                f"{folder}: secure: the server has sums over sites only, so no site's part can be taken "
                "out or joined to another run; allowed: a run of strategy analytic without `secure`"
            )
        whole = build_strategy(experiment.strategy.name, experiment.strategy.parameters)
        strategy = whole.find(Analytic)
        if strategy is None:
            raise ConfigError(
                f"{folder}: strategy {experiment.strategy.name} keeps no sums; allowed: analytic"
            )
        if experiment.privacy.enabled:
            raise ConfigError(
                f"{folder}: its sums left with noise; corrected ones need fresh noise and a new charge, and "
                "the old release remains in the world"
            )
        whole.load_state_dict(checkpoint.strategy)
        strategy.bounds = experiment.bounds
        if strategy.keep_sites and isinstance(strategy.sums, KeptSums):
            strategy.sums.folder = folder / FOLDER
        saved = load_saved(folder / GLOBAL_MODEL) if finished else None
        return cls(folder, checkpoint, experiment, whole, strategy, saved)

    @property
    def saved(self) -> SavedModel:
        assert self.model is not None
        return self.model

    @property
    def run(self) -> str:
        """Token of the run."""
        return self.checkpoint.progress.run

    @property
    def features(self) -> str:
        """SHA-256 of the feature maps."""
        return json.loads((self.folder / "summary.json").read_text())["analytic"]["features"]

    @property
    def all_classes(self) -> list[str]:
        """Names of all classes in the registry's order, those of later tasks too."""
        return list(self.checkpoint.progress.registry.classes)

    def list_statements(self, given: Mapping[int, Sequence[str]] | None = None) -> list[Statement]:
        """The statements that sites signed about their sums. given: task -> sites; None: of all.

        Raises ConfigError if a site signed nothing, or in the form of an earlier release.
        """
        found = []
        for task, sites in sorted(self.strategy.kept_sums.contributions.items()):
            for site in sorted(sites) if given is None else given.get(task, ()):
                if "statement" not in sites[site]:
                    raise ConfigError(f"{self.folder}: the sums of {site} in task {task} are not signed")
                try:
                    found.append(Statement.from_json(sites[site]["statement"]))
                except ValueError as error:
                    raise ConfigError(
                        f"{self.folder}: the statement of {site} on task {task} is of another release "
                        f"({error}); use the release that wrote the run"
                    ) from None
        return found

    def list_current_hashes(self, site: str) -> dict[int, str]:
        """task -> hash of the site's present sums, as it signed them."""
        given = self.strategy.kept_sums.list_contributions(site)
        return {s.task: s.sha256 for s in self.list_statements({task: [site] for task in given})}

    @property
    def classes(self) -> list[str]:
        """Names of the model's classes; before a run's end, those of tasks whose sums were asked for."""
        if self.model is not None:
            return list(self.model.classes)
        progress = self.checkpoint.progress
        task = progress.task if progress.round_in_task else progress.task - 1
        return list(progress.registry.classes[: progress.registry.schedule.num_classes(task)])

    @property
    def total(self) -> Statistics:
        assert self.strategy.kept_sums.total is not None
        return self.strategy.kept_sums.total

    def require_certifiable(self) -> None:
        """Raise ConfigError if validation samples chose the head or maps, which sums do not show."""
        if self.strategy.head == "auto":
            raise ConfigError(
                f"{self.folder}: validation samples of all sites chose head or maps; allowed: a head and "
                "maps that no site's samples chose"
            )

    def require_features_of_nobody(self) -> None:
        """Raise ConfigError if samples shaped the features: subtracting sums would not undo that."""
        for features in self.experiment.model.maps:
            if features.name == "model":
                raise ConfigError(
                    f"{self.folder}: model.features: the network of a finished run learnt from samples that "
                    "may be those to withdraw; allowed: maps that no site's samples shaped"
                )

    def head(self, shrinkage: float | None) -> tuple[dict[str, Tensor], float]:
        """Solve the head of the present sums: (tensors, shrinkage). shrinkage: None: the strategy chooses."""
        head, shrinkage = self.strategy.solve_again(len(self.classes), shrinkage)
        return head.list_tensors(), shrinkage

    def write_model(self, path: Path, head: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the run's model with another head to `path`; returns its complete tensors."""
        tensors = {name: tensor.clone() for name, tensor in complete_state(self.saved.model).items()} | head
        settings = json.dumps(self.saved.settings)
        confidence = build_confidence_facts(None, len(self.classes), withdrawn=True)
        save_model(path, tensors, self.saved.inputs, self.saved.classes, settings, confidence=confidence)
        return tensors

    def commit(self, head: dict[str, Tensor]) -> None:
        """Write the run's files with this object's present sums and state, and a new head.

        For a finished run whose `strategy` a withdrawal has changed; its kept sums are the new ones. head:
        the new head's tensors.
        After a crash the checkpoint alone says whether the change was made; the same withdrawal, given again,
        writes the other files.
        """
        folder, progress = self.folder / CHECKPOINT, self.checkpoint.progress
        arrays = {name: tensor.clone() for name, tensor in complete_state(self.saved.model).items()} | head
        sha256, former = hash_tensors(arrays), progress.previous
        save_previous(folder, sha256, arrays, former)
        progress.previous, progress.holders = sha256, []
        # a resume writes the summary again from the history; its figures are of the model before
        sums = self.strategy.kept_sums
        left = {site: sums.samples(site) for site in sums.sites}
        History(progress.history).forget_measures(self.strategy.withdrawn, left)
        self.strategy.compare_again(range(len(self.classes)), able=self.strategy.keep_sites)
        changed = Checkpoint(progress, self.checkpoint.experiment, head, self.whole.state_dict())
        # twice, because the file before it is kept, and holds the sums of the withdrawn site
        save_checkpoint(folder, changed)
        save_checkpoint(folder, changed)
        save_previous(folder, sha256, arrays, sha256)
        self.write_model(self.folder / GLOBAL_MODEL, head)
        (self.folder / FILE).unlink(missing_ok=True)
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text())
        summary["model_sha256"] = hash_tensors(head)
        summary["model_file_sha256"] = hash_file(self.folder / GLOBAL_MODEL)
        summary.pop("cross_site", None)
        if self.strategy.cross_site:
            summary["cross_site"] = self.strategy.cross_site
        summary |= summarise_accuracy(progress.history) | {"measures": None, "stopped_learning": None}
        summary["sites"] = progress.history["sites"]
        summary["analytic"] |= self.strategy.summarise_sums()
        replace_file(path, (json.dumps(summary, indent=2) + "\n").encode(), mode=0o644)

    def begin_again(self) -> None:
        """Write a checkpoint without any model, from which the run asks the remaining sites again.

        Raises StateError for a run that has not finished.
        """
        self.checkpoint.progress.begun_again()
        self.strategy.choose_again()
        experiment, folder = self.checkpoint.experiment, self.folder / CHECKPOINT
        changed = Checkpoint(self.checkpoint.progress, experiment, {}, self.whole.state_dict())
        # twice, because the file before it is kept, and holds the sums of the withdrawn site
        save_checkpoint(folder, changed)
        save_checkpoint(folder, changed)

    def commit_unfinished(self, head: dict[str, Tensor], shrinkage: float) -> None:
        """Write a checkpoint of a run in progress with the new sums, in which no head includes the site.

        The model at the end of the task before is solved for again too, from the sums of the tasks up to it.
        """
        folder, progress, former = self.folder / CHECKPOINT, self.checkpoint.progress, self.checkpoint
        for site in self.strategy.withdrawn:
            progress.history.get("sites", {}).pop(site, None)
        before: dict[str, Tensor] = {}
        if progress.previous:
            before = load_previous(folder, progress.previous)
            up_to_it = self.strategy.kept_sums.limit_to_task(progress.task - 1)
            again, _ = self.strategy.solve_again(len(before["head.bias"]), shrinkage, up_to_it)
            before |= again.list_tensors()
            sha256 = hash_tensors(before)
            save_previous(folder, sha256, before, progress.previous)
            progress.previous, progress.holders = sha256, []
        arrays = {**former.arrays, **(head if progress.round_in_task else {})}
        changed = Checkpoint(progress, former.experiment, arrays, self.whole.state_dict())
        # twice, because the file before it is kept, and holds the sums of the withdrawn site
        save_checkpoint(folder, changed)
        save_checkpoint(folder, changed)
        if before:
            save_previous(folder, progress.previous, before, progress.previous)


def cross_site_of(folder: Path) -> dict[str, Any]:
    """The cross-site table of a finished run, as strategies/analytic/cross_site.py makes it.

    Raises ConfigError, StateError or DataError saying why there can be none.
    """
    run = OpenedRun.open(folder)
    return build_block(run.strategy.kept_sums, range(len(run.classes)))


def _restore_strategy(checkpoint: Checkpoint) -> Analytic | None:
    """The run's closed form, if one site's sums can be taken out of it."""
    experiment = checkpoint.read_experiment()
    found = build_strategy(experiment.strategy.name, experiment.strategy.parameters).find(Analytic)
    able = experiment.secure is None and not experiment.privacy.enabled
    if found is None or not able or not found.keep_sites or found.head == "balanced_ridge":
        return None
    found.load_state_dict(checkpoint.strategy)
    return found


def is_withdrawable(run: Path) -> bool:
    """Whether a run's folder stores sums by site, so that one site's can be taken out."""
    return _restore_strategy(load_checkpoint(run / CHECKPOINT)[0]) is not None


def has_chosen_maps(run: Path) -> bool:
    """Whether validation samples chose the feature maps of a run that stores sums by site."""
    strategy = _restore_strategy(load_checkpoint(run / CHECKPOINT)[0])
    return strategy is not None and strategy.maps.chosen is not None


def ask_again(run: Path, stale: Collection[tuple[int, str]], *, grows: bool) -> None:
    """Take the sums of some (task, site) out of a finished run, which then begins again and asks for them.

    All sums go if maps were chosen, which it does again. grows: whether it goes on with a new task instead.
    Raises StateError if stored sums are missing.
    """
    checkpoint, _ = load_checkpoint(run / CHECKPOINT)
    strategy = _restore_strategy(checkpoint)
    assert strategy is not None
    gone = {f"all-{part}" for part in (*PARTS, "classes")}
    if not grows:
        strategy.choose_again()
        gone.add("maps")
    sums = strategy.kept_sums
    sums.folder = run / FOLDER
    for task, site in stale:
        if sums.has(task, site) and sums.total is not None:
            sums.total = sums.total - sums.read_own_sums(task, site)
            del sums.contributions[task][site]
    last = max((task for task, sites in sums.contributions.items() if sites), default=0)
    if sums.total is not None:
        stop = checkpoint.progress.registry.schedule.boundaries[last]
        sums.total = sums.total.limit_to_classes(stop) if last else None
    kept = {name: value for name, value in checkpoint.strategy.items() if name not in gone}
    state = kept | sums.state("all") | ({} if grows else {"tried": []})
    arrays = checkpoint.arrays
    if not grows:
        checkpoint.progress.begun_again()
        arrays = {}
    save_checkpoint(run / CHECKPOINT, Checkpoint(checkpoint.progress, checkpoint.experiment, arrays, state))


BLOCK = "own_heads"


def forget_own_heads(folder: Path) -> None:
    """Remove the sites' own heads from a run's folder: they began at another federated head."""
    for path in folder.glob(f"sites/*/{PERSONAL_MODEL}"):
        path.unlink()


def write_own_heads(folder: Path, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Make the own heads of a finished run anew; returns summary.json's content, in which their block is.

    without: sites that were withdrawn. Where the run's data cannot be read any more there are none.
    """
    path = folder / "summary.json"
    summary: dict[str, Any] = json.loads(path.read_text())
    forget_own_heads(folder)
    experiment = load_experiment(folder / "experiment.yaml")
    try:
        sites = load_simulated_federation(experiment).sites
    except PerennialError:
        sites = {}
    saved = load_saved(folder / GLOBAL_MODEL)
    found: dict[str, Any] = {}
    for name, data in sites.items():
        if name not in without:
            own = folder / "sites" / name
            figures = keep_personal_head(data, saved.model, saved.classes, experiment.model_dump_json(), own)
            found |= {} if figures is None else {name: figures}
    summary[BLOCK] = found
    replace_file(path, (json.dumps(summary, indent=2) + "\n").encode(), mode=0o644)
    from perennial.server.report.write import write_report

    write_report(folder)
    return summary
