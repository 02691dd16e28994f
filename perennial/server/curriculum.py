"""The run itself: tasks in order, rounds in each, exemplars and evaluation at the end of each task.

`progress`, the model's arrays and the strategy's state decide what comes next. One checkpoint stores them
together after each round; everything else here is built again from the experiment.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.serverapp import Grid

from perennial.config import charges
from perennial.config.evaluation import asks_for_tables, fits_temperature
from perennial.config.experiment import Experiment
from perennial.foundation.errors import ProtocolError
from perennial.learning.evaluation_tables import MOST_CLASSES
from perennial.models.class_means import list_never_predicted
from perennial.protocol.messages import EvaluateRequest, FinishTaskReply, FinishTaskRequest
from perennial.protocol.tensors import hash_tensors
from perennial.server.checkpoint import CheckpointWriter, Standing
from perennial.server.control import RunControl
from perennial.server.evaluation import CentralEvaluation
from perennial.server.faults import of_learning
from perennial.server.journal import Journal
from perennial.server.live_status import LiveStatusFile, ObservedGrid
from perennial.server.measures.calibration import fit_temperature
from perennial.server.metrics import compute_overall_accuracy
from perennial.server.position import Position
from perennial.server.releases import Releases
from perennial.server.roster import Attendance, Roster
from perennial.server.rounds import History, Rounds
from perennial.server.run_folder import RunFolder
from perennial.server.run_measures import write_task_measures
from perennial.server.run_states import State
from perennial.server.site_counts import SiteCounts, ask_for_counts
from perennial.server.stopped import suggest_settings
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.round.context import RoundOutcome, RunContext
from perennial.strategies.round.exchange import Exchange, ask
from perennial.strategies.round.request import TaskStart

if TYPE_CHECKING:
    from perennial.strategies.secure.masked_sums import MaskedSums

Request = TypeVar("Request", FinishTaskRequest, EvaluateRequest)


class TaskEnd:
    """The exchanges at the end of each task of a run.

    sums: the masked sums, or None if the server sees each site's reply.
    note: called with (site, reason) for every site whose reply is missing, refused or not valid.
    """

    def __init__(
        self,
        grid: Grid,
        experiment: Experiment,
        releases: Releases,
        sums: "MaskedSums | None",
        note: Callable[[str, str], None],
    ) -> None:
        self._grid, self._experiment, self._releases = grid, experiment, releases
        self._sums, self._note = sums, note
        self._deadline = experiment.rounds.deadline
        self._exchange = Exchange()
        if sums is not None:
            sums.exchange = self._exchange

    def begin(
        self, run: str, number: int, sites: Mapping[str, int], fields: Callable[[str], dict[str, Any]]
    ) -> None:
        """Begin the exchanges of a task that is over.

        number: of its last round. sites: name -> node id of those to ask.
        fields: returns the fields that all requests to a site share.
        """
        self._run, self._round, self._sites, self._fields = run, number, sites, fields
        self._exchange.bytes_up = self._exchange.bytes_down = 0

    @property
    def bytes(self) -> tuple[int, int]:
        """(up, down) bytes of tensors since begin()."""
        return self._exchange.bytes_up, self._exchange.bytes_down

    def finish(self, sha256: str) -> list[str]:
        """Tell the sites that the task is over, so that they choose exemplars and freeze its model.

        sha256: of that model. Returns the sites that now hold it.
        """
        if not self._experiment.needs_previous:
            return []

        def check(reply: FinishTaskReply) -> None:
            if reply.model != sha256:
                raise ProtocolError(f"FinishTaskReply: model: found {reply.model:.12}, expected {sha256:.12}")

        requests = self._build_requests(FinishTaskRequest)
        return list(
            ask(self._grid, self._exchange, requests, FinishTaskReply, self._deadline, self._note, check)
        )

    def ask_counts(self, num_classes: int) -> SiteCounts:
        """Ask for counts on the sites' held-out samples, if the experiment wants them.

        num_classes: M, of the tasks so far.
        """
        experiment = self._experiment
        if not experiment.evaluation.federated:
            return SiteCounts({})
        tables = asks_for_tables(experiment) and num_classes <= MOST_CLASSES
        fitted = (
            self._asked(tables=True, validation=True) if tables and fits_temperature(experiment) else None
        )
        temperature = None
        if fitted is not None and fitted.tables.total is not None:
            temperature = fit_temperature(fitted.tables.total)
        found = self._asked(tables=tables, temperature=temperature)
        if fitted is not None and fitted.tables.total is not None and found.tables.total is not None:
            samples = fitted.tables.total.validation
            found.tables.total = replace(found.tables.total, validation=samples)
        return replace(found, temperature=temperature)

    def _asked(self, **more: Any) -> SiteCounts:
        """The sites' answers to one request. more: its fields."""
        experiment = self._experiment
        requests = self._build_requests(EvaluateRequest, **more)
        if experiment.evaluation.noise_multiplier is not None and requests:
            same = "" if self._sums is not None else _identify_question(requests[0][2])
            charge = [charges.price_evaluation(experiment, self._run).entry]
            self._releases.asked(self._round, self._sites, charge, same=same)
        return ask_for_counts(experiment, self._grid, self._exchange, requests, self._sums, self._note)

    def _build_requests(self, kind: type[Request], **more: Any) -> list[tuple[str, int, Request]]:
        return [(site, node, kind(**self._fields(site), **more)) for site, node in self._sites.items()]


def _identify_question(request: EvaluateRequest) -> str:
    """What sites are asked to count, by its content."""
    how = request.validation, request.tables, request.temperature
    return f"evaluation {how} {hash_tensors(request.arrays)}"


class Curriculum:
    """Drives one run from its checkpoint to its end.

    registered: the operator's record of nodes and names, or None.
    waits_for_sites: whether the run waits for sites that are away, and does not end.
    """

    def __init__(
        self,
        grid: Grid,
        position: Position,
        strategy: IncrementalStrategy,
        folder: RunFolder,
        journal: Journal,
        evaluation: CentralEvaluation,
        checkpoints: CheckpointWriter,
        registered: Path | None = None,
        waits_for_sites: bool = False,
    ) -> None:
        self.position, self.strategy, self.folder, self.journal = position, strategy, folder, journal
        self._evaluation, self._checkpoints = evaluation, checkpoints
        experiment, progress = position.experiment, position.progress
        self._control = RunControl(folder.path, journal.write)
        self._grid = ObservedGrid(
            grid,
            LiveStatusFile(folder.path),
            lambda: self.attendance.roster.names,
            self._control.while_waiting,
            journal.tell,
        )
        roster = Roster(self._grid, experiment.digest, journal.note, registered)
        self.attendance = Attendance(roster, experiment, journal, waits_for_sites, self._grid.poll)
        self.history = History(progress.history)
        self.releases = Releases(folder.path)
        self.rounds = Rounds(self._grid, position, strategy, self.attendance, self.history, self.releases)
        sums = None
        if experiment.secure is not None:
            from perennial.strategies.secure.masked_sums import MaskedSums

            sums = MaskedSums(experiment, folder.checkpoint_folder)
            if folder.checkpoint is None:
                progress.run = sums.store.keep_token(progress.run)
        self._task_end = TaskEnd(
            self._grid, experiment, self.releases, sums, lambda *drop: journal.note(f"site {': '.join(drop)}")
        )
        strategy.attach(self._build_context(sums))
        self.rounds.protect()
        if folder.checkpoint is not None and folder.checkpoint.strategy:
            strategy.load_state_dict(folder.checkpoint.strategy)

    def run(self, expected_sites: int) -> None:
        """Train until every task of the schedule is learnt; a stop loses at most the round in progress.

        Raises RunStopped when the operator stops it; StateError when too few sites connect, or when a run
        that does not wait for sites had rounds.max_skipped attempts in a row without a quorum.
        """
        self._begin()
        sites = self.attendance.wait_for_all(expected_sites)
        self.journal.write("sites", connected=list(sites), missing=self.attendance.list_missing(sites))
        progress = self.position.progress
        while progress.state in (State.BETWEEN, State.TRAINING):
            task = progress.task
            if progress.round_in_task == 0:
                self._begin_task(task)
            while progress.round_in_task < self.position.rounds(task):
                self._control.wait_while_paused(self._grid.poll)
                self._round(task)
            self._finish_task(task)

    def finish(self) -> None:
        """Write the run's last checkpoint, which says that the results are written."""
        self.position.progress.results_written()
        self._save()
        self._checkpoints.wait()

    def _begin(self) -> None:
        """Fix the plan before any site is asked anything, where it is not fixed yet or goes further now."""
        checkpoint, registry = self.folder.checkpoint, self.position.registry
        progress = self.position.progress
        if progress.state is State.NEW:
            progress.planned(registry)
            self._save(Standing({}, {}))
        elif progress.state is State.FINISHED and progress.registry != registry:
            assert checkpoint is not None
            progress.continued(registry)
            self._save(Standing(checkpoint.arrays, checkpoint.strategy))

    def _build_context(self, sums: "MaskedSums | None") -> RunContext:
        position, experiment = self.position, self.position.experiment
        run = RunContext(
            experiment=experiment,
            schedule=position.schedule,
            input_shape=position.model.input_shape,
            device=position.model.device,
            constants=position.model.constants,
            load=position.model.load_arrays,
            measure=None,
            folder=self.folder.checkpoint_folder,
            releases=self.releases if experiment.privacy.enabled else None,
            secret=int(position.progress.secret, 16) if position.progress.secret else None,
            sums=sums,
            signers=self.attendance.roster.signers,
        )
        return self._evaluation.lend(run)

    # one task

    def _begin_task(self, task: int) -> None:
        position, sites = self.position, tuple(self.attendance.roster.connected())
        position.model.begin_task(task, position.previous.read())
        classes = position.schedule.list_classes(task)
        self.strategy.begin_task(TaskStart(task, classes.stop, classes, position.model.arrays, sites))
        self.history.reset_loss()
        self.journal.write(
            "task_started",
            task=task,
            classes=[position.registry.classes[label] for label in classes],
            rounds=[position.rounds(number) for number in range(1, position.schedule.count + 1)],
        )

    def _round(self, task: int) -> None:
        """Ask for the next round once; its measures and its checkpoint, unless too few sites answered."""
        started = time.monotonic()
        position, progress = self.position, self.position.progress
        number = progress.round + 1
        outcome = self.rounds.run()
        position.apply_outcome(outcome)
        by_plan = outcome.skipped and self.attendance.is_short_by_plan(number)
        if by_plan:
            progress.passed_over()
        counts = progress.round == number
        accuracy = None
        measured = counts and position.experiment.evaluation.every == "round"
        if measured and (found := self._evaluation.counts()):
            accuracy = compute_overall_accuracy(*found, position.schedule.boundaries[: task + 1])
        for warning in outcome.warnings:
            self.journal.note(f"round {number}: {warning}")
        self._record(task, number, outcome, accuracy, time.monotonic() - started)
        if counts:
            self._save()
        if outcome.skipped:
            self.rounds.wait_or_fail(outcome, passed_over=by_plan)
        else:
            self.rounds.served()

    def _finish_task(self, task: int) -> None:
        """Freeze the model, let sites choose exemplars, measure, and checkpoint the next task."""
        position, progress, end = self.position, self.position.progress, self._task_end
        arrays = position.model.collect_tensors()
        sha256 = hash_tensors(arrays)
        sites = self.attendance.gather_available(progress.round)
        end.begin(progress.run, progress.round, sites, position.build_request_fields)
        holders = end.finish(sha256)
        reported = end.ask_counts(position.num_classes)
        scored = self._evaluation.scored(reported.temperature)
        central = self._evaluation.counts() if scored is None else (scored.correct, scored.total)
        boundaries = position.schedule.boundaries[: task + 1]
        facts = self.history.record_task(boundaries, central, reported, end.bytes)
        unlearnt = list_never_predicted(arrays["head.bias"])
        patients = self._evaluation.patients
        write_task_measures(self.folder.path, position, scored, patients, reported, unlearnt)
        position.task_learnt(sha256, arrays, holders, self.folder)
        self.journal.write("task_finished", task=task, **facts)
        if signs := facts.get("stopped"):
            tries = partial(suggest_settings, position.experiment)
            for fault in of_learning(self.folder.path.name, signs, tries, (), {}, None):
                self.journal.note(f"{fault.said} {fault.turn}")
        last, at_sites = task == position.schedule.count, self.history.data["federated"][-1]
        if last and not any(site["rounds"] for site in self.history.data["sites"].values()):
            self.journal.note("no site took part in any round: the model is the one that the run began with")
        if last and not position.one_classifier and central and at_sites:
            self.journal.note(
                "all figures of the server's test samples are those of the saved model's head; the sites "
                f"classify by the means of their own exemplars, and count {100 * at_sites:.1f} % at the end"
            )
        self._save()

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
        position, strategy = self.position, self.strategy
        self._checkpoints.write(standing or Standing(position.model.arrays, strategy.state_dict()))
