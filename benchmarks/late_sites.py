"""What recency is worth where sites are slow: PP-FCIL on digits, two of five sites one round late.

`python -m benchmarks.late_sites` writes benchmarks/results/late_sites.jsonl and .md. Time is
simulated, so that who is late does not depend on the machine: training takes none, and waiting out a deadline
costs none.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from flwr.app import Context, Message, RecordDict

from benchmarks.grid import read_results, revision_of, settings_hash
from benchmarks.markdown import age, figures, listed
from benchmarks.paper_claims import Claim, judge
from benchmarks.table import RESULTS, RESULTS_REVISION, STANDARD, TEN_SEEDS, Row, Table
from perennial.config.run import RunSettings
from perennial.engine.grid import FIRST_NODE, InProcessGrid, site_contexts
from perennial.engine.run import answer
from perennial.foundation.files import replace_file
from perennial.server.app import serve
from perennial.strategies.round import exchange

SITES = 5
SLOW = (0, 1)
"""Indices of the sites whose replies come a round late; they are not asked in the round in between."""
COMMON = ("evaluation.federated=false", "rounds.deadline=60")
DROPPED, PUNCTUAL = "late replies dropped", "late replies count as punctual ones"
RECENCY, BY_SIZE, BY_RECENCY = (
    "weights with recency, kappa 0.5",
    "weights by size alone",
    "weights by recency alone, kappa 0.5",
)


def _row(label: str, *changes: str) -> Row:
    return Row(label, "pp_fcil_digits", (*COMMON, *changes))


TABLE = Table(
    "PP-FCIL on digits, two of five sites slow: each of their replies comes one round late",
    [
        _row(DROPPED, "strategy.staleness=0"),
        _row(PUNCTUAL, "strategy.kappa=0"),
        _row(RECENCY),
        _row(BY_SIZE, "strategy={name: multi_factor, beta: 0, gamma: 0, delta: 0}"),
        _row(
            BY_RECENCY,
            "strategy={name: multi_factor, alpha: 0, beta: 1, gamma: 0, delta: 0}",
        ),
    ],
    measures={**STANDARD, "late replies used": lambda summary: summary["late"]},
    plain=frozenset({"late replies used"}),
    note="The experiment is that of `pp_fcil_digits`, 30 rounds. A late reply to the last round of a task is "
    "lost in every row: staleness is bounded by the task.",
    seeds=TEN_SEEDS,
    claims=[
        Claim("late replies are worth using", PUNCTUAL, DROPPED, "average incremental accuracy"),
        Claim(
            "a late reply should weigh less (kappa 0.5)", RECENCY, PUNCTUAL, "average incremental accuracy"
        ),
        Claim("recency in the weights over weights by size alone", RECENCY, BY_SIZE, "final accuracy"),
        Claim("weights by recency alone over weights by size alone", BY_RECENCY, BY_SIZE, "final accuracy"),
    ],
)


class SimulatedTime:
    """Stands in for the module `time`: only waiting takes time, and it takes none of ours."""

    def __init__(self) -> None:
        self._now = 0.0

    def monotonic(self) -> float:
        """Seconds."""
        return self._now

    def sleep(self, seconds: float) -> None:
        """Let simulated seconds pass."""
        self._now += seconds


class SlowSites(InProcessGrid):
    """Sites train at once, and the replies of the slow ones to training arrive with the next round's."""

    def __init__(self, run_config: dict[str, Any]) -> None:
        super().__init__(answer, site_contexts(SITES, run_config))
        self._round = 0
        self._held: list[tuple[int, Message]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                number = message.content.config_records["fields"]["round"]
                assert isinstance(number, int)
                self._round = number
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        wanted = set(message_ids)
        late = [reply for asked, reply in self._held if asked < self._round]
        self._held = [(asked, reply) for asked, reply in self._held if asked >= self._round]
        for reply in super().pull_messages(wanted):
            slow = reply.metadata.src_node_id - FIRST_NODE in SLOW
            if slow and reply.metadata.message_type == "train":
                self._held.append((self._round, reply))
            else:
                late.append(reply)
        return [reply for reply in late if reply.metadata.reply_to_message_id in wanted]


@contextmanager
def simulated_time() -> Iterator[None]:
    """The exchange with the sites reads a simulated clock."""
    with patch.object(exchange, "time", SimulatedTime()):
        yield


def run(row: Row, seed: int) -> dict[str, Any]:
    """The summary of one run, and under "late" how many replies counted in a later round than their own."""
    late = 0

    def listen(event: Mapping[str, Any]) -> None:
        nonlocal late
        if event["event"] == "round":
            late += len(set(event["participants"]) & {f"site-{index}" for index in SLOW})

    with tempfile.TemporaryDirectory(prefix="perennial-late-") as folder:
        overrides = ";".join((*row.changes, f"seed={seed}"))
        run_config = dict(vars(RunSettings(str(row.file), overrides, runs=folder)))
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
        with simulated_time():
            summary = serve(SlowSites(run_config), context, "in-process", listener=listen)
    return {**summary, "late": late}


def main() -> None:
    """Run what the result file lacks, and write the page."""
    path = RESULTS / "late_sites.jsonl"
    planned = [(row, seed, settings_hash(row.load(seed))) for row in TABLE.rows for seed in TABLE.seeds]
    current = [found for found in read_results(path) if revision_of(found) == RESULTS_REVISION]
    done = {found["settings"]: found for found in current}
    for row, seed, settings in planned:
        if settings in done:
            continue
        summary = run(row, seed)
        line = {"row": row.label, "seed": seed, "revision": RESULTS_REVISION, "settings": settings}
        line["measures"] = TABLE.measured(summary)
        done[settings] = line | {"model_sha256": summary["model_sha256"]}
        with path.open("a") as file:
            file.write(json.dumps(done[settings]) + "\n")
        print(line)
    kept = [done[settings] for _, _, settings in planned]
    replace_file(path, "".join(json.dumps(line) + "\n" for line in kept).encode(), mode=0o644)
    replace_file(path.with_suffix(".md"), page(kept).encode(), mode=0o644)


def page(runs: list[dict[str, Any]]) -> str:
    """The table in Markdown."""
    head = [
        f"# {TABLE.title}",
        "",
        f"`python -m benchmarks.late_sites`, seeds {listed(TABLE.seeds)}.",
    ]
    old = [age(runs), ""] if age(runs) else []
    verdicts = judge([(claim, runs) for claim in TABLE.claims])
    lines = [*head, "", TABLE.note, "", *old, *figures(TABLE, runs), ""]
    lines += ["| claim | here | difference, points |", "| --- | --- | --- |"]
    for claim, verdict in zip(TABLE.claims, verdicts, strict=True):
        lines.append(f"| {claim.text} | {verdict.word} | {verdict.difference or '-'} |")
    lines.append("")
    lines.append(f"The intervals are widened for the {len(verdicts)} claims here (Holm's procedure at 5 %).")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
