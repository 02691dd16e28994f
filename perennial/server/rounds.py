"""Runs one round: chooses sites and strategy, and decides what happens if too few answer."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from perennial.config import charges
from perennial.foundation.errors import StateError
from perennial.models.layers import explain_stale_tensors
from perennial.protocol.tensors import hash_tensors
from perennial.server.evaluation import Counts
from perennial.server.live_status import ObservedGrid
from perennial.server.metrics import (
    average_accuracy,
    compute_balanced_accuracy,
    compute_task_accuracies,
    is_unbalanced,
)
from perennial.server.position import Position
from perennial.server.preflight import CentralPrivacy
from perennial.server.releases import Releases
from perennial.server.roster import Attendance
from perennial.server.site_counts import ALL_SITES, SiteCounts, clamp_counts
from perennial.server.stopped import LossCourse, find_signs_of_stopping
from perennial.strategies.base import IncrementalStrategy
from perennial.strategies.fedavg import FedAvg
from perennial.strategies.round.context import RoundOutcome
from perennial.strategies.round.gate import RunningBounds
from perennial.strategies.round.request import RoundRequest

MEASURED = (
    *("central", "average", "balanced", "class_accuracy"),
    *("federated", "federated_interval", "federated_noise"),
)
"""Lists of which each task adds one item."""


class History:
    """A view of one JSON-able dict, so that the checkpoint stores it as it is.

    bytes_up, bytes_down: what the rounds sent, as the journal has it of each. task_end_bytes_up,
    task_end_bytes_down: what the ends of tasks sent beside that. All count tensors, of valid replies alone.
    loss: its course over the rounds of the latest task. stopped: signs that learning had stopped, of
    each task with some.
    """

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        for name in MEASURED:
            data.setdefault(name, [])
        data.setdefault("sites", {})
        data.setdefault("loss", vars(LossCourse()))
        data.setdefault("stopped", [])
        for name in ("bytes_up", "bytes_down", "task_end_bytes_up", "task_end_bytes_down"):
            data.setdefault(name, 0)

    @property
    def known_sites(self) -> list[str]:
        return list(self.data["sites"])

    def site(self, name: str) -> dict[str, Any]:
        """The counters of one site, made at the first call."""
        return self.data["sites"].setdefault(name, {"samples": 0, "rounds": 0, "rejected": 0, "refused": 0})

    def forget_measures(self, gone: Collection[str], left: Mapping[str, int]) -> None:
        """Forget every figure, because records that the models had learnt from were withdrawn.

        gone: sites to forget with theirs. left: number of the others' samples.
        """
        for name in MEASURED:
            self.data[name] = [
                [None] * len(each) if name in ("central", "class_accuracy") else None
                for each in self.data[name]
            ]
        self.data["stopped"] = []
        self.data["sites"] = {
            site: {**facts, "samples": left.get(site, facts["samples"]), "accuracy": None}
            for site, facts in self.data["sites"].items()
            if site not in gone
        }

    def round_done(self, outcome: RoundOutcome) -> None:
        """Count one round."""
        for site, reply in outcome.participants.items():
            counters = self.site(site)
            counters["rounds"] += not outcome.skipped
            counters["samples"] = reply.num_examples
        for site, _ in outcome.dropped:
            self.site(site)["rejected"] += 1
        for site, _ in outcome.refused:
            self.site(site)["refused"] += 1
        self.data["bytes_up"] += outcome.bytes_up
        self.data["bytes_down"] += outcome.bytes_down
        if not outcome.skipped:
            self.data["loss"] = vars(LossCourse(**self.data["loss"]).add_round(outcome.train_loss))

    def reset_loss(self) -> None:
        """Forget the course of the loss, because a new task begins."""
        self.data["loss"] = vars(LossCourse())

    def record_task(
        self,
        boundaries: Sequence[int],
        central: Counts | None,
        federated: SiteCounts,
        sent: tuple[int, int] = (0, 0),
    ) -> dict[str, Any]:
        """Add a row of the accuracy matrix; returns what the journal says of it.

        boundaries: 0, M_1, ..., M_t. federated: what the sites reported. sent: bytes up and down at the
        end of this task.
        """
        together = federated.sum_counts(boundaries[-1])
        interval = federated.interval(boundaries[-1])
        at_sites, site_sizes = compute_task_accuracies(*together, boundaries)
        counts = central or together
        row, sizes = compute_task_accuracies(*counts, boundaries)
        average = average_accuracy(row, sizes)
        self.data["central"].append(row)
        # kept as it was measured: another evaluation may find other samples at the sites
        self.data["average"].append(average)
        self.data["balanced"].append(compute_balanced_accuracy(*counts))
        self.data["unbalanced"] = is_unbalanced(counts[1])
        self.data["class_accuracy"].append(
            [right / samples if samples else None for right, samples in zip(*counts, strict=True)]
        )
        signs = find_signs_of_stopping(*counts, LossCourse(**self.data["loss"]))
        if signs:
            self.data["stopped"].append({"task": len(boundaries) - 1, "signs": signs})
        self.data["federated"].append(average_accuracy(at_sites, site_sizes))
        self.data["federated_interval"].append(None if interval is None else list(interval))
        self.data["federated_noise"].append(federated.std or None)
        self.data["task_end_bytes_up"] += sent[0]
        self.data["task_end_bytes_down"] += sent[1]
        for site, counts in federated.by_site.items():
            if site == ALL_SITES:
                continue
            correct, total = clamp_counts(*counts) if federated.std else counts
            samples = sum(count or 0 for count in total)
            self.site(site)["accuracy"] = sum(correct) / samples if samples else None
        return {
            "accuracy": row,
            "average_accuracy": average,
            "class_accuracy": self.data["class_accuracy"][-1],
            "balanced_accuracy": self.data["balanced"][-1],
            "unbalanced": self.data["unbalanced"],
            **({"stopped": signs} if signs else {}),
            "federated": at_sites if federated.by_site else None,
            "federated_interval": None if interval is None else [round(bound, 6) for bound in interval],
            "federated_noise": federated.std or None,
            "bytes_up": sent[0],
            "bytes_down": sent[1],
        }


class Rounds:
    """Asks the sites for rounds of training and aggregates their answers.

    strategy: the experiment's; rounds of pre-training are averaged instead.
    """

    def __init__(
        self,
        grid: ObservedGrid,
        position: Position,
        strategy: IncrementalStrategy,
        attendance: Attendance,
        history: History,
        releases: Releases,
    ) -> None:
        self._grid, self._position, self._strategy = grid, position, strategy
        self._attendance, self._history, self._releases = attendance, history, releases
        self._experiment = experiment = position.experiment
        self._averaging = FedAvg()
        self._failed = self._attempt = 0
        # pre-training takes a few samples of each site, so its medians say nothing of the rounds after it
        medians = position.progress.bounds
        lead = medians.setdefault("pretraining", {}) if experiment.pretraining is not None else {}
        self._running, self._lead_running = self._build_bounds(medians), self._build_bounds(lead)
        self.central: CentralPrivacy | None = None
        """What the server adds to the sites' protection, once `protect` was called."""

    def protect(self) -> None:
        """Begin the server's part of the privacy protection, if any, after the strategy is attached."""
        self.central = CentralPrivacy.of(self._experiment.privacy, self._strategy)

    def run(self) -> RoundOutcome:
        """Ask the connected sites for the next round, once, and aggregate their answers.

        The model and the progress stay as they are: the outcome has the new arrays, for the caller to apply,
        or none if too few valid updates came.
        """
        position, experiment, rounds = self._position, self._experiment, self._experiment.rounds
        progress, schedule = position.progress, position.registry.schedule
        task, number = progress.task, progress.round + 1
        sites = self._attendance.gather_available(number)
        asked = self._attendance.sample_sites(sites, number, self._attempt)
        # sums of features are a release of their own, which the strategy records when it asks for them
        charge = [charges.price_update(experiment, progress.run).entry] if experiment.strategy.trains else []
        same = self._identify_question(number) if experiment.privacy.enabled else ""
        if experiment.privacy.enabled and charge:
            self._releases.asked(number, asked, charge, same=same)
        lead = experiment.lead_rounds(task)
        strategy = self._averaging if position.in_pretraining else self._strategy
        running = self._lead_running if position.in_pretraining else self._running
        central = self.central
        self._grid.begin_round(
            task=task,
            tasks=schedule.count,
            round=number,
            rounds=sum(position.rounds(each) for each in range(1, schedule.count + 1)),
            deadline=rounds.deadline,
            missing=self._attendance.list_missing(sites),
            refusing=self._attendance.roster.list_barred(),
        )
        outcome = self._train(
            strategy,
            RoundRequest(
                stamp=position.stamp(number),
                arrays=position.model.arrays,
                sites=asked,
                deadline=rounds.deadline,
                quorum=rounds.quorum,
                progress=max(0, progress.round_in_task - lead) / schedule.rounds[task - 1],
                previous=position.select_previous(),
                resting=frozenset(sites) - asked.keys(),
                known=len(self._history.known_sites),
                bounds=experiment.bounds,
                running=running,
                max_update_norm=central.max_update_norm if central else None,
            ),
        )
        if central is not None:
            central.finish_round(outcome)
        if experiment.privacy.enabled and charge:
            # a site whose disk failed may have charged its ledger before
            said_no = [site for site, reason in outcome.refused if not reason.startswith("state:")]
            self._releases.refused(number, said_no, charge, same=same)
        away = sorted(self._attendance.list_declared_away(number))
        known = dict.fromkeys((*self._history.known_sites, *away))
        outcome.absent += [site for site in known if site not in (*sites, *outcome.absent)]
        if running is not None and not outcome.skipped:
            running.round_done(outcome.participants.values())
        return outcome

    def _train(self, strategy: IncrementalStrategy, request: RoundRequest) -> RoundOutcome:
        """Train one round; under `secure` in one of which the server sees the sum of the updates alone."""
        sums, mean = strategy.run.sums if strategy.attached else None, strategy.find(FedAvg)
        if sums is None or mean is None:
            with explain_stale_tensors((strategy, *strategy.inner), request.arrays):
                return strategy.train_round(self._grid, request)
        from perennial.strategies.secure.masked_round import MaskedRound

        return MaskedRound(sums).train_round(mean, self._grid, request)

    @property
    def bounds_met(self) -> dict[str, dict[str, int]]:
        """site -> in how many rounds its update met a bound that follows from earlier rounds, by bound."""
        return {} if self._running is None else self._running.met

    def served(self) -> None:
        """Note that a round was aggregated, so that earlier failures no longer count."""
        self._failed = self._attempt = 0
        self._attendance.served()

    def _identify_question(self, number: int) -> str:
        """What the sites are asked in a round, by its content; '' where it is not the global model alone."""
        base, kind = IncrementalStrategy, type(self._strategy)
        plain = kind.train_round == base.train_round and kind.requests == base.requests
        if self._experiment.secure is not None or not (plain or self._position.in_pretraining):
            return ""
        return f"update {number} {hash_tensors(self._position.model.arrays)}"

    def wait_or_fail(self, outcome: RoundOutcome, *, passed_over: bool) -> None:
        """Wait, after an attempt that too few sites answered, for sites that may answer later.

        passed_over: whether the round is left out, since the experiment declares too many sites absent;
        otherwise it keeps its number and is asked again. Raises StateError after rounds.max_skipped attempts
        in a row, unless the run waits for sites.
        """
        waits_for_sites = self._attendance.waits_for_sites
        self._attempt = 0 if passed_over else self._attempt + 1
        self._failed += not (passed_over and waits_for_sites)
        rounds, number = self._experiment.rounds, self._position.progress.round + 1
        if self._failed < rounds.max_skipped:
            return
        reason = (
            f"round {number}: {self._failed} times in a row without "
            f"{_describe_lack(outcome, rounds.quorum)}; last: {_describe_faults(outcome)}"
        )
        if not waits_for_sites:
            raise StateError(f"{reason}; the model is as it was; the run can be resumed")
        self._failed = 0
        self._attendance.rest(reason, dict(outcome.refused))

    def _build_bounds(self, medians: dict[str, Any]) -> RunningBounds | None:
        """Bounds by the medians of the checkpoint, which they keep up to date; None if none may apply.

        Under client_central and client_shared no site's norm may change what another counts, and under masks
        the server sees no norm.
        """
        if self._experiment.privacy.mode in ("client_central", "client_shared") or self._experiment.secure:
            return None
        return RunningBounds(self._experiment.bounds, medians)


def _describe_lack(outcome: RoundOutcome, quorum: int) -> str:
    enough = len(outcome.participants) >= quorum
    return "a model, though sites answered" if enough else f"{quorum} valid replies"


def _describe_faults(outcome: RoundOutcome) -> str:
    reasons = [f"{site}: {reason}" for site, reason in (*outcome.dropped, *outcome.refused)]
    return "; ".join([*reasons, *outcome.warnings]) or "no site answered"
