"""The run itself: tasks in order, rounds in each, exemplars and evaluation at the end of each task.

What comes next is decided by `progress` and the model's arrays alone, which one checkpoint stores together
after each round; whatever else is here can be built again from the experiment.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config import charges
from perennial.config.experiment import Experiment
from perennial.data.registry import Registry
from perennial.foundation.errors import StateError
from perennial.learning.batches import TrainingSet
from perennial.learning.worth import Scores
from perennial.protocol.stamp import Stamp
from perennial.protocol.tensors import Tensors, content_sha256
from perennial.server.attendance import Attendance
from perennial.server.central_privacy import CentralPrivacy
from perennial.server.checkpoint import Checkpoint, load_previous, save_checkpoint, save_previous
from perennial.server.evaluation import Counts, Judge, evaluate_centrally
from perennial.server.global_model import GlobalModel
from perennial.server.history import History
from perennial.server.journal import Journal
from perennial.server.metrics import overall_accuracy
from perennial.server.now import NowFile, WatchedGrid
from perennial.server.releases import Releases
from perennial.server.roster import Roster
from perennial.server.run_folder import RunFolder
from perennial.server.run_measures import TaskMeasures
from perennial.server.shared_clipping import SharedClipping
from perennial.server.stopped import what_to_try
from perennial.server.stopping import Stopping
from perennial.server.task_end import TaskEnd
from perennial.server.wishes import Wishes
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel
from perennial.strategies.round.request import RoundRequest, TaskStart
from perennial.strategies.round.running_bounds import RunningBounds
from perennial.strategies.round.services import Services
from perennial.strategies.secure.masked_sums import MaskedSums

Sites = Mapping[str, int]
"""name -> node id, in canonical order."""


class Curriculum:
    """One run from where it stands to its end.

    registry: class order and schedule. test: the server's test samples of all classes, or None. registered:
    the operator's record of nodes and names, or None. patient: whether sites that are away may come back, so
    that the run waits for them and does not end.
    """

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        registry: Registry,
        model: GlobalModel,
        strategy: IncrementalStrategy,
        folder: RunFolder,
        journal: Journal,
        test: TrainingSet | None,
        registered: Path | None = None,
        patient: bool = False,
    ) -> None:
        self.experiment, self.registry, self.schedule = experiment, registry, registry.schedule
        self.model, self.strategy, self.folder, self.journal, self.test = (
            model,
            strategy,
            folder,
            journal,
            test,
        )
        self._wishes = Wishes(folder.path, journal.write)
        self._grid = WatchedGrid(
            grid,
            NowFile(folder.path),
            lambda: self.roster.names,
            self._wishes.while_waiting,
            journal.tell,
        )
        self._settings = experiment.model_dump(mode="json")
        self._averaging = FedAvg(strategy.max_update_norm)
        self._clock = time.monotonic()
        self._previous = PreviousModel()
        self.class_means: Tensor | None = None
        self._judgement: Judge | None = None
        self.roster = Roster(
            self._grid, experiment.digest, lambda text: journal.write("note", text=text), registered
        )
        self.attendance = Attendance(self.roster, experiment, journal, patient, self._grid.look)
        self.measuring = TaskMeasures(experiment, registry, folder.path, test)
        self.progress = folder.checkpoint.progress if folder.checkpoint else folder.first_progress()
        self.history = History(self.progress.history)
        self.releases = Releases(folder.path)
        # pre-training takes a few samples of each site, so its medians say nothing of the rounds after it
        medians = self.progress.bounds
        lead = medians.setdefault("pretraining", {}) if experiment.pretraining is not None else {}
        for each, state in ((strategy, medians), (self._averaging, lead)):
            each.bounds, each.sums, each.running = experiment.bounds, experiment.sums, self._running(state)
        if experiment.data.only_at_sites and not self.progress.secret:
            self.progress.secret = token_hex(16)
        self.sums = (
            MaskedSums(experiment, folder.checkpoint_folder) if experiment.secure is not None else None
        )
        if self.sums is not None and folder.checkpoint is None:
            self.progress.run = self.sums.token(self.progress.run)
        self._task_end = TaskEnd(self._grid, experiment, self.releases, self.sums, self._note_drop)
        strategy.attach(self._services())
        state = self.progress.privacy
        self.central = CentralPrivacy.of(
            experiment.privacy, strategy, state, experiment.seed
        ) or SharedClipping.of(experiment.privacy, strategy, state)
        self.stopping = Stopping(experiment.stopping, folder.checkpoint_folder, self.progress.stopping)
        if folder.checkpoint is not None:
            self._restore(folder.checkpoint)

    def run(self, expected_sites: int) -> None:
        """Train until every task of the schedule is learnt; a stop loses at most the round in progress.

        Raises RunStopped when someone wishes a stop; StateError when too few sites connect, or when a run
        that is not patient had rounds.max_skipped rounds in a row without a quorum.
        """
        sites = self.attendance.wait_for_all(expected_sites)
        self.journal.write("sites", connected=list(sites), missing=self.attendance.missing(sites))
        while self.progress.task <= self.schedule.count:
            task = self.progress.task
            if self.progress.round_in_task == 0:
                self._begin_task(task)
            while self.progress.round_in_task < self._rounds(task) and not self.stopping.over:
                self._wishes.between_rounds(self._grid.look)
                self._round(task)
                if self.strategy.task_complete:
                    break
            self._choose_model(task)
            self._finish_task(task)
        self.progress.finished = True
        self._save()

    def _restore(self, checkpoint: Checkpoint) -> None:
        progress = self.progress
        progress.finished = False
        if progress.previous:
            arrays = load_previous(self.folder.checkpoint_folder, progress.previous)
            self._previous = PreviousModel(progress.previous, arrays)
        self.strategy.load_state_dict(checkpoint.strategy)
        self.class_means = checkpoint.class_means
        if progress.round_in_task:
            self.model.restore(progress.task, checkpoint.arrays, self._previous.arrays)
        elif progress.task > self.schedule.count and self._previous.arrays is not None:
            # nothing is left to do but to write down what there is
            self.model.stand_after(self._previous.arrays)

    def _services(self) -> Services:
        test = self.test
        return Services(
            experiment=self.experiment,
            schedule=self.schedule,
            input_shape=self.model.input_shape,
            device=self.model.device,
            constants=None if test is None else (test.mean, test.std),
            load=self.model.holding,
            measure=None if test is None else self._measure,
            judge=None if test is None else self._judge,
            folder=self.folder.checkpoint_folder,
            releases=self.releases if self.experiment.privacy.enabled else None,
            secret=int(self.progress.secret, 16) if self.progress.secret else None,
            sums=self.sums,
        )

    def _running(self, medians: dict[str, Any]) -> RunningBounds | None:
        """Bounds by the medians of the checkpoint, which they keep up to date; None if none may apply.

        Under client_central and client_shared no site's norm may change what another counts, and under masks
        the server sees no norm.
        """
        if self.experiment.privacy.mode in ("client_central", "client_shared") or self.experiment.secure:
            return None
        return RunningBounds(self.experiment.bounds, medians)

    def _measure(self, arrays: Mapping[str, Tensor]) -> Counts:
        assert self.test is not None
        return evaluate_centrally(
            self.model.holding(arrays), self.test, self.schedule.num_classes(self.progress.task)
        )

    def _judge(self, arrays: Mapping[str, Tensor], samples: int) -> Scores:
        assert self.test is not None
        classes = self.schedule.num_classes(self.progress.task)
        if self._judgement is None or self._judgement.asked != (classes, samples):
            self._judgement = Judge(self.test, classes, samples, self.experiment.seed)
        return self._judgement(self.model.holding(arrays))

    # one task

    def _begin_task(self, task: int) -> None:
        self.model.begin_task(task, self._previous.arrays)
        classes = self.schedule.classes_of(task)
        self.strategy.begin_task(
            TaskStart(task, classes.stop, classes, self.model.arrays, tuple(self.roster.connected()))
        )
        self.history.task_begun(classes.stop)
        self.progress.classes = list(self.registry.classes[: classes.stop])
        self.journal.write(
            "task_started",
            task=task,
            classes=[self.registry.classes[label] for label in classes],
            rounds=[self._rounds(number) for number in range(1, self.schedule.count + 1)],
        )

    def _round(self, task: int) -> None:
        """One round, asked again where nobody served it and sites may come back."""
        started = time.monotonic()
        progress, rounds = self.progress, self.experiment.rounds
        leads = progress.round_in_task < self.experiment.lead_rounds(task)
        outcome = self._attempt(task)
        for _ in range(rounds.max_skipped - 1 if self.attendance.patient else 0):
            if outcome.participants or not outcome.skipped:
                break
            self.journal.write(
                "note", text=f"round {progress.round + 1}: nobody served it; asked again ({_faults(outcome)})"
            )
            outcome = self._attempt(task)
        progress.round, progress.round_in_task = progress.round + 1, progress.round_in_task + 1
        if outcome.arrays is not None:
            self.model.arrays = outcome.arrays
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if outcome.skipped else 0
        self._update_holders(outcome)
        if not leads and not outcome.skipped:
            self._judge_round(progress.round)
        accuracy = None
        if self.experiment.evaluation.every == "round" and (counts := self._central_counts(task)):
            accuracy = overall_accuracy(*counts, self.schedule.boundaries[: task + 1])
        for warning in outcome.warnings:
            self.journal.write("note", text=f"round {progress.round}: {warning}")
        self._record(task, outcome, accuracy, time.monotonic() - started)
        self._save()
        if outcome.skipped:
            self._rest_or_end(outcome)
        else:
            self.attendance.served()

    def _rest_or_end(self, outcome: RoundOutcome) -> None:
        """After a skipped round: rest where waiting helps. Raises StateError after too many where not."""
        in_a_row, rounds = self.progress.skipped_in_a_row, self.experiment.rounds
        unserved = self.attendance.patient and not outcome.participants
        if in_a_row < rounds.max_skipped and not unserved:
            return
        reason = f"{in_a_row} rounds in a row without {rounds.quorum} valid replies; last: {_faults(outcome)}"
        if not self.attendance.patient:
            raise StateError(f"{reason}; the model is as it was; the run can be resumed")
        self.attendance.rest(reason)
        self.progress.skipped_in_a_row = 0

    def _attempt(self, task: int) -> RoundOutcome:
        """Ask the sites that are there for the next round, and aggregate what they answer."""
        progress, rounds = self.progress, self.experiment.rounds
        number = progress.round + 1
        sites = self.attendance.available(number)
        asked = self.attendance.sampled(sites, number)
        # sums of features are a release of their own, which the strategy records when it asks for them
        charge = [charges.update(self.experiment, progress.run)] if self.experiment.strategy.trains else []
        if self.experiment.privacy.enabled and charge:
            self.releases.asked(number, asked, charge)
        lead = self.experiment.lead_rounds(task)
        strategy = self._strategy(task)
        self._grid.begin_round(
            task=task,
            tasks=self.schedule.count,
            round=number,
            rounds=sum(self._rounds(each) for each in range(1, self.schedule.count + 1)),
            deadline=rounds.deadline,
            missing=self.attendance.missing(sites),
        )
        outcome = strategy.train_round(
            self._grid,
            RoundRequest(
                stamp=self._stamp(number),
                arrays=self.model.arrays,
                sites=asked,
                deadline=rounds.deadline,
                quorum=rounds.quorum,
                progress=max(0, progress.round_in_task - lead) / self.schedule.rounds[task - 1],
                previous=self._needed_previous(),
                clip_norm=self.central.sent_clip_norm if self.central else None,
                resting=frozenset(sites) - asked.keys(),
                known=len(self.history.known_sites),
            ),
        )
        if self.central is not None:
            self.central.finish_round(outcome, number)
        if self.experiment.privacy.enabled and charge:
            self.releases.refused(number, [site for site, _ in outcome.refused], charge)
        outcome.absent += [site for site in self.history.known_sites if site not in (*sites, *outcome.absent)]
        if strategy.running is not None and not outcome.skipped:
            strategy.running.round_done(outcome.participants.values())
        return outcome

    def _rounds(self, task: int) -> int:
        return self.experiment.lead_rounds(task) + self.schedule.rounds[task - 1]

    def _strategy(self, task: int) -> IncrementalStrategy:
        """The experiment's strategy; plain averaging while pre-training lasts."""
        if self.progress.round_in_task < self.experiment.lead_rounds(task):
            return self._averaging
        return self.strategy

    def _judge_round(self, number: int) -> None:
        """Ask the sites for counts on their validation samples, where these decide when to stop."""
        if self.experiment.stopping is None:
            return
        end, classes = self._task_end, self.schedule.num_classes(self.progress.task)
        end.begin(self.progress.run, self.progress.round, self.attendance.available(number), self._asking)
        counts = end.counts(classes, None, validation=True).together(classes)
        value = self.stopping.judged(number, counts, self.model.arrays)
        self.history.sent_beside_rounds(*end.bytes)
        self.journal.write("validated", task=self.progress.task, round=number, value=value)

    def _choose_model(self, task: int) -> None:
        """Take the best round's model where the experiment says so; pass over rounds that are left out."""
        if self.experiment.stopping is None:
            return
        progress, planned = self.progress, self._rounds(task)
        first = progress.round - progress.round_in_task
        if words := self.stopping.in_words(task, progress.round, first + planned):
            self.journal.write("note", text=words)
        if (best := self.stopping.best()) is not None:
            self.model.arrays = {name: best[name].to(self.model.device) for name in self.model.arrays}
        # the next task's rounds keep their numbers, by which sites know what they have approved
        progress.passed += planned - progress.round_in_task
        progress.round, progress.round_in_task = first + planned, planned
        self.stopping.next_task()

    def _finish_task(self, task: int) -> None:
        """Freeze the model, let sites choose exemplars, measure, and checkpoint the next task."""
        progress, end = self.progress, self._task_end
        arrays = self.model.frozen()
        finished = PreviousModel(content_sha256(arrays), arrays)
        sites = self.attendance.available(progress.round)
        end.begin(progress.run, progress.round, sites, self._asking)
        holders, means = end.finish(finished.sha256, self.model.feature_width)
        self.class_means = means
        reported = end.counts(self.schedule.num_classes(task), means)
        scored = self.measuring.score(self.model.loaded, task, means)
        central = self._central_counts(task, means) if scored is None else (scored.correct, scored.total)
        facts = self.history.task_done(
            self.schedule.boundaries[: task + 1],
            central,
            reported,
            end.bytes,
        )
        self.measuring.write(task, scored, reported, one_classifier=self.one_classifier)
        save_previous(self.folder.checkpoint_folder, finished.sha256, arrays, progress.previous)
        self._previous = finished
        progress.previous, progress.holders = finished.sha256, holders
        progress.task, progress.round_in_task = task + 1, 0
        self.journal.write("task_finished", task=task, **facts)
        if signs := facts.get("stopped"):
            tries = "; or ".join(what_to_try(self.experiment))
            self.journal.write("note", text=f"learning has stopped: {'; '.join(signs)}. To try: {tries}")
        self._save()

    @property
    def one_classifier(self) -> bool:
        """Whether the saved model answers as the one that sites judged: not if each has its own means."""
        return self.experiment.learner.classifier != "nearest_mean" or self.class_means is not None

    def _asking(self, site: str) -> dict[str, Any]:
        """Fields of a request at the end of a task.

        The previous model is sent only to a site that does not hold it.
        """
        return {
            **self._stamp(self.progress.round).stamp_fields,
            "arrays": Tensors(self.model.arrays),
            **self._needed_previous().fields_of(site),
        }

    def _needed_previous(self) -> PreviousModel:
        """The model of the task before and who holds it; nothing where no site needs it."""
        if not self.experiment.needs_previous:
            return PreviousModel()
        return replace(self._previous, holders=frozenset(self.progress.holders))

    def _note_drop(self, site: str, reason: str) -> None:
        self.journal.write("note", text=f"site {site}: {reason}")

    # who, and what was measured

    def _stamp(self, number: int) -> Stamp:
        task = self.progress.task
        return Stamp(
            run=self.progress.run,
            experiment=self.experiment.digest,
            class_order=self.registry.order_hash,
            split_key=self.progress.split_key,
            task=task,
            round=number,
            num_classes=self.schedule.num_classes(task),
        )

    def _central_counts(self, task: int, means: Tensor | None = None) -> Counts | None:
        if self.test is None:
            return None
        return evaluate_centrally(self.model.loaded(), self.test, self.schedule.num_classes(task), means)

    def _update_holders(self, outcome: RoundOutcome) -> None:
        """Note who holds the previous model: a site that trained does; one that failed gets it again."""
        failed = {site for site, _ in (*outcome.dropped, *outcome.refused)}
        self.progress.holders = sorted(({*self.progress.holders} | {*outcome.participants}) - failed)

    def _record(self, task: int, outcome: RoundOutcome, accuracy: float | None, seconds: float) -> None:
        self.history.round_done(outcome)
        self.journal.write(
            "round",
            task=task,
            round=self.progress.round,
            participants=sorted(outcome.participants),
            dropped=[{"site": site, "reason": reason} for site, reason in outcome.dropped],
            refused=[{"site": site, "reason": reason} for site, reason in outcome.refused],
            absent=outcome.absent,
            skipped=outcome.skipped,
            train_loss=outcome.train_loss,
            accuracy=accuracy,
            bytes_up=outcome.bytes_up,
            bytes_down=outcome.bytes_down,
            seconds=round(seconds, 4),
            **({"details": outcome.details} if outcome.details else {}),
        )

    def _save(self) -> None:
        now = time.monotonic()
        self.progress.seconds += now - self._clock
        self._clock = now
        self.progress.journal_position = self.journal.durable_position()
        checkpoint = Checkpoint(
            self.progress,
            self._settings,
            self.model.arrays,
            self.strategy.state_dict(),
            self.class_means,
        )
        save_checkpoint(self.folder.checkpoint_folder, checkpoint)


def _faults(outcome: RoundOutcome) -> str:
    reasons = [f"{site}: {reason}" for site, reason in (*outcome.dropped, *outcome.refused)]
    return "; ".join(reasons) or "no site answered"
