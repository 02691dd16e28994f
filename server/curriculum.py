"""The run itself: tasks in order, rounds in each, exemplars and evaluation at the end of each task.

`progress`, the model's arrays and the strategy's state decide what comes next. One checkpoint stores them
together after each round; everything else here is built again from the experiment.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from secrets import token_hex

from flwr.serverapp import Grid
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.data.registry import Registry
from perennial.foundation.disk_writes import DiskWrites
from perennial.learning.batches import TrainingSet
from perennial.learning.worth import Scores
from perennial.models.class_means import never_predicted
from perennial.protocol.tensors import content_sha256
from perennial.server.attendance import Attendance
from perennial.server.central_privacy import CentralPrivacy
from perennial.server.checkpoint import (
    LATEST,
    Checkpoint,
    Standing,
    load_previous,
    save_checkpoint,
    save_previous,
)
from perennial.server.control import RunControl
from perennial.server.evaluation import Counts, Judge, evaluate_centrally
from perennial.server.global_model import GlobalModel
from perennial.server.history import History
from perennial.server.journal import Journal
from perennial.server.live_status import LiveStatusFile, ObservedGrid
from perennial.server.metrics import overall_accuracy
from perennial.server.position import Position
from perennial.server.releases import Releases
from perennial.server.roster import Roster
from perennial.server.rounds import Rounds
from perennial.server.run_folder import RunFolder
from perennial.server.run_measures import TaskMeasures
from perennial.server.run_states import State
from perennial.server.shared_clipping import SharedClipping
from perennial.server.stopped import what_to_try
from perennial.server.stopping import Stopping
from perennial.server.task_end import TaskEnd
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.outcome import RoundOutcome
from perennial.strategies.round.previous import PreviousModel
from perennial.strategies.round.request import TaskStart
from perennial.strategies.round.run_context import RunContext
from perennial.strategies.secure.masked_sums import MaskedSums


class Curriculum:
    """One run from where it stands to its end.

    registry: class order and schedule.
    test: the server's test samples of all classes, or None.
    registered: the operator's record of nodes and names, or None.
    patient: whether the run waits for sites that are away, and does not end.
    disk_writes: brings checkpoints to the disk beside the next round; None: a round ends with its own there.
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
        waits_for_sites: bool = False,
        disk_writes: DiskWrites | None = None,
    ) -> None:
        self.experiment, self.registry, self.schedule = experiment, registry, registry.schedule
        self.model, self.strategy, self.test = model, strategy, test
        self.folder, self.journal, self._disk_writes = folder, journal, disk_writes
        self._control = RunControl(folder.path, journal.write)
        self._grid = ObservedGrid(
            grid,
            LiveStatusFile(folder.path),
            lambda: self.roster.names,
            self._control.while_waiting,
            journal.tell,
        )
        self._settings = experiment.model_dump(mode="json")
        self._clock = time.monotonic()
        self.class_means: Tensor | None = None
        self._judgement: Judge | None = None
        self.roster = Roster(
            self._grid, experiment.digest, lambda text: journal.write("note", text=text), registered
        )
        self.attendance = Attendance(self.roster, experiment, journal, waits_for_sites, self._grid.poll)
        self.measuring = TaskMeasures(experiment, registry, folder.path, test)
        self.progress = folder.checkpoint.progress if folder.checkpoint else folder.first_progress()
        self.position = Position(experiment, registry, self.progress, model, PreviousModel())
        self.history = History(self.progress.history)
        self.releases = Releases(folder.path)
        self._rounds = Rounds(
            self._grid, self.position, strategy, self.attendance, self.history, self.releases, journal
        )
        if experiment.data.only_at_sites and not self.progress.secret:
            self.progress.secret = token_hex(16)
        self.sums = (
            MaskedSums(experiment, folder.checkpoint_folder) if experiment.secure is not None else None
        )
        if self.sums is not None and folder.checkpoint is None:
            self.progress.run = self.sums.token(self.progress.run)
        self._task_end = TaskEnd(self._grid, experiment, self.releases, self.sums, self._note_drop)
        strategy.attach(self._services())
        self._rounds.protect()
        self.stopping = Stopping(experiment.stopping, folder.checkpoint_folder, self.progress.stopping)
        if folder.checkpoint is not None:
            self._restore(folder.checkpoint)

    def run(self, expected_sites: int) -> None:
        """Train until every task of the schedule is learnt; a stop loses at most the round in progress.

        Raises RunStopped when the operator stops it; StateError when too few sites connect, or when a run
        that is not patient had rounds.max_skipped attempts in a row without a quorum.
        """
        self._begin()
        sites = self.attendance.wait_for_all(expected_sites)
        self.journal.write("sites", connected=list(sites), missing=self.attendance.missing(sites))
        while self.progress.state in (State.BETWEEN, State.TRAINING):
            task = self.progress.task
            if self.progress.round_in_task == 0:
                self._begin_task(task)
            while self._trains_on(task):
                self._control.between_rounds(self._grid.poll)
                self._round(task)
            self._choose_model(task)
            self._skip_remaining_rounds(task)
            self._finish_task(task)

    def finish(self) -> None:
        """Note that the results are written; the run's last checkpoint."""
        self.progress.results_written()
        self._save()
        if self._disk_writes is not None:
            self._disk_writes.wait()

    def _begin(self) -> None:
        """Fix the plan before any site is asked anything, where it is not fixed yet or goes further now."""
        progress, checkpoint = self.progress, self.folder.checkpoint
        if progress.state is State.NEW:
            progress.planned(self.registry)
            self._save(Standing({}, {}, None))
        elif progress.state is State.FINISHED and progress.registry != self.registry:
            assert checkpoint is not None
            progress.continued(self.registry)
            self._save(Standing(checkpoint.arrays, checkpoint.strategy, checkpoint.class_means))

    def _restore(self, checkpoint: Checkpoint) -> None:
        progress = self.progress
        if progress.previous:
            arrays = load_previous(self.folder.checkpoint_folder, progress.previous)
            self.position.previous = PreviousModel(progress.previous, arrays)
        if checkpoint.strategy:
            self.strategy.load_state_dict(checkpoint.strategy)
        self.class_means = checkpoint.class_means
        if progress.round_in_task:
            self.model.restore(progress.task, checkpoint.arrays, self.position.previous.arrays)
        elif progress.task > self.schedule.count and self.position.previous.arrays is not None:
            # nothing is left to do but to write down what there is
            self.model.stand_after(self.position.previous.arrays)

    def _services(self) -> RunContext:
        test = self.test
        return RunContext(
            experiment=self.experiment,
            schedule=self.schedule,
            input_shape=self.model.input_shape,
            device=self.model.device,
            constants=None if test is None else (test.mean, test.std),
            load=self.model.holding,
            measure=None if test is None else self._measure,
            judge=None if test is None else self._judge,
            descent=None if test is None else self._descent,
            folder=self.folder.checkpoint_folder,
            releases=self.releases if self.experiment.privacy.enabled else None,
            secret=int(self.progress.secret, 16) if self.progress.secret else None,
            sums=self.sums,
        )

    def _measure(self, arrays: Mapping[str, Tensor]) -> Counts:
        assert self.test is not None
        classes = self.schedule.num_classes(self.progress.task)
        with self.model.measuring():
            return evaluate_centrally(self.model.holding(arrays), self.test, classes)

    def _judge(self, arrays: Mapping[str, Tensor], samples: int) -> Scores:
        return self._judging(samples)(self.model.holding(arrays))

    def _descent(
        self, arrays: Mapping[str, Tensor], samples: int, held: Sequence[int | None]
    ) -> dict[str, Tensor]:
        return self._judging(samples).descent(self.model.holding(arrays), held)

    def _judging(self, samples: int) -> Judge:
        assert self.test is not None
        classes = self.schedule.num_classes(self.progress.task)
        if self._judgement is None or self._judgement.asked != (classes, samples):
            self._judgement = Judge(self.test, classes, samples, self.experiment.seed)
        return self._judgement

    # one task

    def _begin_task(self, task: int) -> None:
        self.model.begin_task(task, self.position.previous.arrays)
        classes = self.schedule.classes_of(task)
        self.strategy.begin_task(
            TaskStart(task, classes.stop, classes, self.model.arrays, tuple(self.roster.connected()))
        )
        self.history.task_begun()
        self.journal.write(
            "task_started",
            task=task,
            classes=[self.registry.classes[label] for label in classes],
            rounds=[self.position.rounds(number) for number in range(1, self.schedule.count + 1)],
        )

    def _round(self, task: int) -> None:
        """Ask for the next round once; its measures and its checkpoint, unless too few sites answered."""
        started = time.monotonic()
        progress, in_pretraining = self.progress, self.position.in_pretraining
        number = progress.round + 1
        outcome = self._rounds.run()
        self.position.apply_outcome(outcome)
        by_plan = outcome.skipped and self.attendance.lacks_by_plan(number)
        if by_plan:
            progress.passed_over(1, counted=True)
        counts = progress.round == number
        if not in_pretraining and not outcome.skipped:
            self._judge_round(number)
        accuracy = None
        if counts and self.experiment.evaluation.every == "round" and (found := self._central_counts(task)):
            accuracy = overall_accuracy(*found, self.schedule.boundaries[: task + 1])
        for warning in outcome.warnings:
            self.journal.write("note", text=f"round {number}: {warning}")
        self._record(task, number, outcome, accuracy, time.monotonic() - started)
        if counts:
            self._save()
        if outcome.skipped:
            self._rounds.wait_or_fail(outcome, passed_over=by_plan)
        else:
            self._rounds.served()

    def _judge_round(self, number: int) -> None:
        """Ask the sites for counts on their validation samples, where these decide when to stop."""
        if self.experiment.stopping is None:
            return
        end, classes = self._task_end, self.schedule.num_classes(self.progress.task)
        sites = self.attendance.available(number)
        end.begin(self.progress.run, self.progress.round, sites, self.position.asking)
        counts = end.counts(classes, None, validation=True).together(classes)
        value = self.stopping.judged(number, counts, self.model.arrays)
        self.history.sent_beside_rounds(*end.bytes)
        self.journal.write("validated", task=self.progress.task, round=number, value=value)

    def _trains_on(self, task: int) -> bool:
        done = self.progress.round_in_task
        if done and self.strategy.task_complete:
            return False
        left = done < self.position.rounds(task)
        return left and not self.stopping.over and self.experiment.learner.trains_in(task)

    def _choose_model(self, task: int) -> None:
        """Take the best round's model where the experiment says so."""
        if self.experiment.stopping is None or not self.experiment.learner.trains_in(task):
            return
        progress, planned = self.progress, self.position.rounds(task)
        first = progress.round - progress.round_in_task
        if words := self.stopping.in_words(task, progress.round, first + planned):
            self.journal.write("note", text=words)
        if (best := self.stopping.best()) is not None:
            self.model.arrays = {name: best[name].to(self.model.device) for name in self.model.arrays}
        self.stopping.next_task()

    def _skip_remaining_rounds(self, task: int) -> None:
        """Count the rounds that were left out, because the model was good enough or trains no more."""
        if self.experiment.stopping is None and self.experiment.learner.trains_in(task):
            return
        # the next task's rounds keep their numbers, by which sites know what they have approved
        self.progress.passed_over(self.position.rounds(task) - self.progress.round_in_task, counted=False)

    def _finish_task(self, task: int) -> None:
        """Freeze the model, let sites choose exemplars, measure, and checkpoint the next task."""
        progress, end = self.progress, self._task_end
        arrays = self.model.frozen()
        finished = PreviousModel(content_sha256(arrays), arrays)
        sites = self.attendance.available(progress.round)
        end.begin(progress.run, progress.round, sites, self.position.asking)
        holders, means = end.finish(finished.sha256, self.model.feature_width)
        self.class_means = means
        reported = end.counts(self.schedule.num_classes(task), means)
        with self.model.measuring():
            scored = self.measuring.score(self.model.loaded, task, means, reported.temperature)
        central = self._central_counts(task, means) if scored is None else (scored.correct, scored.total)
        facts = self.history.task_done(
            self.schedule.boundaries[: task + 1],
            central,
            reported,
            end.bytes,
        )
        unlearnt = never_predicted(arrays["head.bias"], means, self.model.feature_width)
        self.measuring.write(task, scored, reported, unlearnt, one_classifier=self.one_classifier)
        save_previous(self.folder.checkpoint_folder, finished.sha256, arrays, progress.previous)
        self.position.previous = finished
        progress.task_learnt(finished.sha256, holders)
        self.journal.write("task_finished", task=task, **facts)
        if signs := facts.get("stopped"):
            tries = "; or ".join(what_to_try(self.experiment))
            self.journal.write("note", text=f"learning has stopped: {'; '.join(signs)}. To try: {tries}")
        self._save()

    @property
    def bounds_met(self) -> dict[str, dict[str, int]]:
        """site -> in how many rounds its update was scaled down, or its claim capped."""
        return self._rounds.bounds_met

    @property
    def central(self) -> CentralPrivacy | SharedClipping | None:
        """What the server adds to the sites' protection, if it adds anything."""
        return self._rounds.central

    @property
    def one_classifier(self) -> bool:
        """Whether the saved model answers as the one that sites judged: not if each has its own means."""
        return self.experiment.learner.classifier != "nearest_mean" or self.class_means is not None

    def _note_drop(self, site: str, reason: str) -> None:
        self.journal.write("note", text=f"site {site}: {reason}")

    # who, and what was measured

    def _central_counts(self, task: int, means: Tensor | None = None) -> Counts | None:
        if self.test is None:
            return None
        with self.model.measuring():
            return evaluate_centrally(self.model.loaded(), self.test, self.schedule.num_classes(task), means)

    def _record(
        self, task: int, number: int, outcome: RoundOutcome, accuracy: float | None, seconds: float
    ) -> None:
        self.history.round_done(outcome)
        self.journal.write(
            "round",
            task=task,
            round=number,
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

    def _save(self, standing: Standing | None = None) -> None:
        """Write the checkpoint. standing: other arrays than the model's as it is now."""
        now = time.monotonic()
        self.progress.seconds += now - self._clock
        self._clock = now
        writes = self._disk_writes
        if writes is None:
            self.progress.journal_position = self.journal.durable_position()
        else:
            # the checkpoint that becomes the second newest is on the disk before the newest is replaced
            writes.wait()
            self.progress.journal_position = self.journal.position()
        standing = standing or Standing(self.model.arrays, self.strategy.state_dict(), self.class_means)
        checkpoint = Checkpoint(self.progress, self._settings, *standing)
        save_checkpoint(self.folder.checkpoint_folder, checkpoint, durable=writes is None)
        if writes is not None:
            writes.begin([self.journal.path, self.folder.checkpoint_folder / LATEST])
