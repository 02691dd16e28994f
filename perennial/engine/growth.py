"""Compares a simulation's records with those that a run has noted, and finds the sums that must change."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import escape
from pathlib import Path

import numpy as np
import torch

from perennial.client.learnt import (
    FOLDER,
    NOWHERE,
    PARTS,
    Noted,
    as_noted,
    read_noted,
    read_notes,
    write_notes,
)
from perennial.config.experiment import Experiment
from perennial.config.simulation import load_simulated_federation
from perennial.data.federation import SimulatedFederation
from perennial.data.schedule import TaskSchedule
from perennial.data.site import SiteData
from perennial.server.continuation import Learnt
from perennial.server.opened_run import ask_again, has_chosen_maps, is_withdrawable

MOST_NAMED = 3
STAYS = (
    "records of known classes have changed, and nothing is made anew: model and figures stay those of the "
    "records before; begin a new run"
)
NOTHING_LEARNT = (
    "{} training records of known classes are new, and there is no new class: nothing is learnt; {}"
)


@dataclass
class Changes:
    """Records that changed since the run noted them, by place and class; removed ones by class alone.

    learnt: whether the run noted any records. training: number of new ones that would be trained on.
    """

    learnt: bool = False
    training: int = 0
    new: list[str] = field(default_factory=list)
    corrected: list[str] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)

    def in_words(self) -> Iterator[str]:
        """Yield a line for each kind of change that occurred; none if nothing was noted before."""
        if not self.learnt:
            return
        for kind, what in (
            ("new", "are new"),
            ("corrected", "are known with another class"),
            ("moved", "are known from another place"),
            ("removed", "are there no more"),
            ("duplicate", "are there more than once"),
        ):
            if found := getattr(self, kind):
                more = ", ..." if found[MOST_NAMED:] else ""
                yield f"{len(found)} records of known classes {what}: {', '.join(found[:MOST_NAMED])}{more}"


def find_changes(run: Path, federation: SimulatedFederation, known: int) -> Changes:
    """Compare the records of the first `known` classes with those that a run folder noted.

    Natural sites are compared one by one, so a record that moved between them is removed and new.
    """
    found = Changes()
    # sites that exist one by one; those among which records were divided together, with the server's
    test = [] if federation.test is None else [federation.test]
    together = [([*federation.sites], [*federation.sites.values(), *test])]
    one_by_one = [([name], [site]) for name, site in federation.sites.items()]
    for names, sites in one_by_one if federation.natural else together:
        noted = read_noted([p for name in names for p in sorted(run.glob(f"sites/{escape(name)}/runs/*"))])
        found.learnt |= len(noted) > 0
        _compare(found, noted, sites, federation.classes, known)
    return found


def _note_now(site: SiteData, known: int) -> tuple[Noted, list[str]]:
    rows = torch.cat([site.find_task_indices(part, 0, known) for part in PARTS])
    places = [f"row {row + 1}" if site.places is None else site.places[row] for row in rows.tolist()]
    return as_noted(site, site.keyed.key, rows), places


def _compare(
    found: Changes, noted: Noted, sites: Sequence[SiteData], classes: Sequence[str], known: int
) -> None:
    """Add what happened to the records of some sites."""
    before: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for content, label, place in zip(
        *(v.tolist() for v in (noted.content, noted.label, noted.place)), strict=True
    ):
        before[content].append((label, place))
    now: defaultdict[int, dict[str, tuple[int, int, bool]]] = defaultdict(dict)
    for site in sites:
        held, places = _note_now(site, known)
        columns = (held.content, held.label, held.place, held.part == PARTS.index("train"))
        for name, content, label, place, trains in zip(places, *(v.tolist() for v in columns), strict=True):
            now[content][name] = (label, place, trains)
    for content, there in now.items():
        learnt = before.pop(content, [])
        labels, hashes = {label for label, _ in learnt}, {place for _, place in learnt}
        named = {name: f"{name} ({classes[label]})" for name, (label, _, _) in there.items()}
        if not learnt:
            found.new += named.values()
            found.training += sum(trains for _, _, trains in there.values())
        for name, (label, place, _) in there.items() if learnt else ():
            if label not in labels:
                former = "/".join(sorted({classes[label] for label in labels}))
                found.corrected.append(f"{name} ({former}, now {classes[label]})")
            elif place not in hashes and place != NOWHERE and len(there) <= len(learnt):
                found.moved.append(named[name])
        if len(there) > 1:
            found.duplicate += [*named.values()][1:]
        found.removed += [f"one of {classes[label]}" for label, _ in learnt[len(there) :]]
    found.removed += [f"one of {classes[label]}" for learnt in before.values() for label, _ in learnt]


@dataclass
class Stale:
    """What no longer matches the sites' records. sums: (task, site), of training records.

    added, subtracted: training records that the sums of all sites lack, and that they have and should not.
    judging: whether validation, calibration or test records have changed. maps: whether maps were chosen.
    """

    sums: list[tuple[int, str]] = field(default_factory=list)
    added: int = 0
    subtracted: int = 0
    judging: bool = False
    maps: bool = False

    def in_words(self, grows: bool) -> str:
        """Return what a resume does about it, or ''. grows: whether a new task follows."""
        again = self.maps and not grows
        told = [self._describe_sums("" if again else ", and they alone are asked again")] if self.sums else []
        if self.judging:
            then = (
                "the new task is measured with them, figures of earlier ones stay"
                if grows
                else "what they chose is chosen anew, and all figures are made anew"
            )
            told.append(f"validation, calibration or test records have changed: {then}")
        if told and again:
            told.append("the feature maps are chosen anew too, so that all sites are asked again")
        return "; ".join(told)

    def _describe_sums(self, alone: str) -> str:
        sites = sorted({name for _, name in self.sums})
        shown = ", ".join(sites[:MOST_NAMED]) + (", ..." if sites[MOST_NAMED:] else "")
        return (
            f"sums of {len(sites)} sites ({shown}) change{alone}: {self.added} training records are added, "
            f"{self.subtracted} subtracted"
        )


def find_stale_sums(run: Path, experiment: Experiment, schedule: TaskSchedule) -> Stale:
    """Find the sums of sites that noted their records and whose training records have changed since.

    Also whether records that choose or judge have changed: of sites that exist one by one, else of all
    together. run: its folder. schedule: its tasks and their classes. New sites are asked anyway, not listed.
    """
    federation, found = load_simulated_federation(experiment), Stale(maps=has_chosen_maps(run))
    was_all, there_all = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
    judged, judges = Counter[tuple[str, int, int]](), Counter[tuple[str, int, int]]()
    for folder in _list_noted(run):
        noted, name = read_noted([folder]), folder.parent.parent.name
        judging, noted = (noted.pick(each) for each in (noted.part > 0, noted.part == 0))
        now, classes = noted.pick(noted.part < 0), range(schedule.boundaries[-1])
        where = name if federation.natural else ""
        judged.update((where, *record) for record in _count_records(judging, classes).elements())
        if (site := federation.sites.get(name)) is not None:
            now = as_noted(site, site.keyed.key, site.find_task_indices("train", 0, classes.stop))
            there = _count_records(_note_judging(site, folder, schedule), classes)
            judges.update((where, *record) for record in there.elements())
        for task in range(1, schedule.count + 1):
            was, there = (_count_records(each, schedule.list_classes(task)) for each in (noted, now))
            was_all, there_all = was_all + was, there_all + there
            if was != there:
                found.sums.append((task, name))
    found.judging = judged != judges
    found.added, found.subtracted = (there_all - was_all).total(), (was_all - there_all).total()
    return found


def _list_noted(run: Path) -> list[Path]:
    """The folders of a run's sites in which these noted their records."""
    return sorted(path.parent for path in run.glob(f"sites/*/runs/*/{FOLDER}"))


def _list_notes(noted: Path) -> list[Path]:
    return sorted(noted.glob(f"{FOLDER}/task-*.safetensors"))


def _note_judging(site: SiteData, noted: Path, schedule: TaskSchedule) -> Noted:
    """The records that choose or judge, as a site has them now, of the tasks that it noted in a folder."""
    last = max((int(path.stem.removeprefix("task-")) for path in _list_notes(noted)), default=0)
    rows = torch.cat([site.find_task_indices(part, 0, schedule.boundaries[last]) for part in PARTS[1:]])
    return as_noted(site, site.keyed.key, rows)


def _note_judging_again(run: Path, sites: Mapping[str, SiteData], schedule: TaskSchedule) -> None:
    """Make all notes of records that choose or judge those of the present ones; sites are not asked again."""
    for folder in _list_noted(run):
        judging = (
            [_note_judging(site, folder, schedule)] if (site := sites.get(folder.parent.parent.name)) else []
        )
        for path in reversed(_list_notes(folder)):
            noted = read_notes(path)
            write_notes(path, Noted.joined([noted.pick(noted.part == 0), *judging]))
            judging = []


def _count_records(records: Noted, classes: range) -> Counter[tuple[int, int]]:
    here = np.isin(records.label, np.array(classes))
    return Counter(zip(records.content[here].tolist(), records.label[here].tolist(), strict=True))


def correct_sums(run: Path, experiment: Experiment, schedule: TaskSchedule, *, grows: bool) -> str:
    """Make a run ask again for sums of records that have changed, and measure; returns in words which, or ''.

    grows: whether a new task follows anyway, whose exchange asks for what is missing.
    """
    stale = find_stale_sums(run, experiment, schedule)
    sites = load_simulated_federation(experiment).sites
    new = not grows and any(not (run / "sites" / name).exists() for name in sites)
    if not (stale.sums or stale.judging or new):
        return ""
    for task, name in stale.sums:
        for path in run.glob(f"sites/{escape(name)}/runs/*/{FOLDER}/task-{task:05d}.safetensors"):
            path.unlink()
    ask_again(run, stale.sums, grows=grows)
    _note_judging_again(run, sites, schedule)
    return stale.in_words(grows)


def update_sums(run: Path, experiment: Experiment) -> str:
    """Mark the sums of a finished closed-form run whose records changed, so that a resume asks for them.

    Returns a sentence on what becomes of changed records, also for a run that cannot learn them; '' if
    nothing changed, the run is not finished, or the data are at the sites.
    """
    learnt = Learnt.of(run)
    own = experiment.data.kind.collected and not experiment.data.only_at_sites
    if learnt is None or not learnt.finished or not own:
        return ""
    federation = load_simulated_federation(experiment)
    grows = len(federation.classes) > len(learnt.registry.classes)
    if is_withdrawable(run):
        return correct_sums(run, experiment, learnt.registry.schedule, grows=grows)
    changes = find_changes(run, federation, len(learnt.registry.classes))
    return "" if grows else describe_unlearnt(changes, experiment)


def describe_unlearnt(changes: Changes, experiment: Experiment) -> str:
    """Say what is not made anew for changed records where no class is new and no sums change, or ''."""
    if not changes.learnt:
        return ""
    told = []
    if changes.training:
        told.append(NOTHING_LEARNT.format(changes.training, describe_learning(experiment)))
    if changes.corrected or changes.removed or len(changes.new) > changes.training:
        told.append(STAYS)
    return "; ".join(told)


def describe_learning(experiment: Experiment) -> str:
    """When records of known classes are learnt, by the kind of training."""
    if not experiment.strategy.trains:
        return (
            "no site's part can be taken out of these sums; a new run takes one exchange and has all of them"
        )
    if experiment.learner.memory is None:
        return "without learner.memory a task trains on its own classes alone; begin a new run"
    return "they are learnt with the next class that is new; to learn them now, begin a new run"
