"""Counts requests on the site's own disk, and refuses more than the approved experiment needs.

A request is counted before it is answered, so that a site that is killed in between has counted it. The
count belongs to the site's life: neither a restart nor a new run's token begins it anew.
"""

import sqlite3
from contextlib import AbstractContextManager
from dataclasses import fields
from hashlib import sha256
from pathlib import Path

from perennial.client.plan import Plan
from perennial.client.state import hash_records
from perennial.config.site import SitePolicy
from perennial.foundation.errors import PolicyRefusal
from perennial.foundation.files import open_transaction
from perennial.protocol.measurements import HELD_OUT_ACCURACY, parse_measurements
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Maskable, Stamp
from perennial.protocol.tensors import Tensors, hash_tensors

FILE = "requests.sqlite"
TABLES = (
    "asked (experiment TEXT, run TEXT, kind TEXT, place TEXT)",
    "questions (experiment TEXT, run TEXT, kind TEXT, place TEXT, question TEXT, models INTEGER)",
)
REPEATS = 3
"""How often a request of a round may be repeated, because a server that crashed asks again."""
OF_A_TASK = ("sparsity",)
"""Kinds that an experiment asks for once in a task, in whichever round; others are counted by round."""
UNCOUNTED = ("digest", "vote", "open")
"""Made once and sent again bit for bit, so that asking often gives nothing more. Their run is counted."""
OF_KNOWN_RUNS = ("vote", "open")
"""Kinds that no run begins with."""
COUNTS = ("evaluate", "compare_heads", "temperature")
"""Kinds that answer with counts on held-out samples; the last one of other samples than the first. Others do
where the experiment and the policy let them."""
OF_THE_REQUEST = ("compare_heads", "temperature")
"""Those whose answers follow from the request and the data alone."""


class RequestCount:
    """The file requests.sqlite in a site's state_dir, mode 0600, safe for several processes at once."""

    def __init__(self, state_dir: Path) -> None:
        self.path = state_dir / FILE

    def take(self, policy: SitePolicy, plan: Plan, kind: str, request: Stamp) -> None:
        """Count one request, if the experiment may still make it.

        A repeat counts again: REPEATS are allowed beyond what the plan needs. Kinds in UNCOUNTED
        are counted only when they begin a run, of which policy.max_runs are allowed.
        Raises PolicyRefusal naming the rule when it may not, StateError when it cannot be counted.
        """
        place, experiment = _place(kind, request), plan.experiment
        with self._open() as book:
            runs = {
                run
                for (run,) in book.execute(
                    "SELECT DISTINCT run FROM asked WHERE experiment = ?", (experiment.digest,)
                )
            }
            if request.run not in runs and kind in OF_KNOWN_RUNS:
                raise PolicyRefusal(f"{kind}: this site has begun no run {request.run} of this experiment")
            if request.run not in runs and len(runs) >= policy.max_runs:
                raise PolicyRefusal(
                    f"policy.max_runs: this experiment has had its {policy.max_runs} runs at this site; "
                    "resume one of them, or have the site allow more"
                )
            if kind in UNCOUNTED and request.run in runs:
                return
            (before,) = book.execute(
                "SELECT count(*) FROM asked WHERE experiment = ? AND run = ? AND kind = ? AND place = ?",
                (experiment.digest, request.run, kind, place),
            ).fetchone()
            most = plan.most(kind, request.round)
            if before >= most + REPEATS:
                raise PolicyRefusal(
                    f"repeated request: {kind} of {place} was asked for {before} times; the experiment "
                    f"needs {most}, and {REPEATS} repeats are allowed"
                )
            if _asks_right_answers(policy, plan, kind, request):
                self._note_question(book, policy, plan, (request.run, kind, place), request)
            book.execute(
                "INSERT INTO asked VALUES (?, ?, ?, ?)", (experiment.digest, request.run, kind, place)
            )

    def give_back(self, plan: Plan, kind: str, request: Stamp) -> None:
        """Remove the latest count of a request that was not answered after all."""
        with self._open() as book:
            book.execute(
                "DELETE FROM asked WHERE rowid = (SELECT max(rowid) FROM asked WHERE experiment = ? AND "
                "run = ? AND kind = ? AND place = ?)",
                (plan.experiment.digest, request.run, kind, _place(kind, request)),
            )

    def has_counted(self, experiment: str, run: str) -> bool:
        """Whether a request of this run of the experiment was counted. experiment: its digest."""
        if not self.path.exists():
            return False
        with self._open() as book:
            found = book.execute("SELECT 1 FROM asked WHERE experiment = ? AND run = ?", (experiment, run))
            return found.fetchone() is not None

    def count_requests(self, kind: str) -> int:
        """Requests of a kind that were counted in the site's life."""
        if not self.path.exists():
            return 0
        with self._open() as book:
            return book.execute("SELECT count(*) FROM asked WHERE kind = ?", (kind,)).fetchone()[0]

    def _note_question(
        self,
        book: sqlite3.Connection,
        policy: SitePolicy,
        plan: Plan,
        where: tuple[str, str, str],
        request: Stamp,
    ) -> None:
        """Count what is asked of each held-out sample; a question that was asked before tells nothing new.

        It is the same only where the site would answer it from the same records: from another layer of its
        own it gives another model's right answers.

        The limit is on questions about one sample, because that is what could single one out, however many
        come in one request. where: run, kind and place.
        """
        records = self._hash_records(plan, where[1], request)
        asked = (plan.experiment.digest, *where, hash_question(request, records))
        same = "experiment = ? AND run = ? AND kind = ? AND place = ? AND question = ?"
        (known,) = book.execute(f"SELECT count(*) FROM questions WHERE {same}", asked).fetchone()
        if known:
            return
        fitted = asked[2] == "temperature"
        (before,) = book.execute(
            "SELECT coalesce(sum(models), 0) FROM questions "
            "WHERE experiment = ? AND (kind = 'temperature') = ?",
            (asked[0], fitted),
        ).fetchone()
        models = request.models
        most = policy.max_evaluations
        if most is None:
            needed = len(plan.last_rounds) if fitted else plan.count_questions()
            most = needed * policy.max_runs + REPEATS
        if before + models > most:
            raise PolicyRefusal(
                f"policy.max_evaluations: this experiment has asked how many answers of {before} models are "
                f"right, and asks it of {models} more; {most} are all that this site answers"
            )
        book.execute("INSERT INTO questions VALUES (?, ?, ?, ?, ?, ?)", (*asked, models))

    def _hash_records(self, plan: Plan, kind: str, request: Stamp) -> str:
        """Hash of the site's records from which it answers a question; "" where the request alone decides."""
        if kind in OF_THE_REQUEST or (
            kind == "evaluate" and plan.experiment.learner.classifier != "nearest_mean"
        ):
            return ""
        # training reads what was there before its round, and the others what its round made
        return hash_records(self.path.parent / "runs" / request.run, request.round + (kind != "train"))

    def _open(self) -> AbstractContextManager[sqlite3.Connection]:
        return open_transaction(self.path, TABLES, "nothing is answered")


def _asks_right_answers(policy: SitePolicy, plan: Plan, kind: str, request: Stamp) -> bool:
    """Whether the answer tells how many held-out samples a model has right."""
    if isinstance(request, TrainRequest):
        told = HELD_OUT_ACCURACY in parse_measurements(request.settings)
        return told and "evaluate" in policy.answers
    if kind == "personal_model":
        return plan.experiment.evaluation.federated and "evaluate" in policy.answers
    return kind in COUNTS


def hash_question(request: Stamp, records: str = "") -> str:
    """SHA-256 of what a request asks: equal for requests that differ in stamp or attempt alone.

    records: hash of what the site answers it from.
    """
    whose = {field.name for kind in (Stamp, Maskable) for field in fields(kind)}
    found = [("records", records)] if records else []
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name not in whose:
            found.append((field.name, hash_tensors(value) if isinstance(value, Tensors) else repr(value)))
    return sha256(repr(found).encode()).hexdigest()


def _place(kind: str, request: Stamp) -> str:
    return f"task {request.task}" if kind in OF_A_TASK else f"round {request.round}"
