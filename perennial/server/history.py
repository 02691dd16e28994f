"""What a run has measured so far: the part of `progress` that the summary and the report are made of."""

from collections.abc import Sequence
from typing import Any

from perennial.server.evaluation import Counts
from perennial.server.metrics import average_accuracy, balanced_accuracy, task_accuracies, unbalanced
from perennial.server.site_counts import ALL_SITES, SiteCounts, possible
from perennial.server.stopped import LossCourse, signs_of_stopping
from perennial.strategies.round.context import RoundOutcome

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
            self.data["loss"] = vars(LossCourse(**self.data["loss"]).then(outcome.train_loss))

    def task_begun(self) -> None:
        """Forget the course of the loss, because a new task begins."""
        self.data["loss"] = vars(LossCourse())

    def task_done(
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
        together = federated.together(boundaries[-1])
        interval = federated.interval(boundaries[-1])
        at_sites, site_sizes = task_accuracies(*together, boundaries)
        counts = central or together
        row, sizes = task_accuracies(*counts, boundaries)
        average = average_accuracy(row, sizes)
        self.data["central"].append(row)
        # kept as it was measured: another evaluation may find other samples at the sites
        self.data["average"].append(average)
        self.data["balanced"].append(balanced_accuracy(*counts))
        self.data["unbalanced"] = unbalanced(counts[1])
        self.data["class_accuracy"].append(
            [right / samples if samples else None for right, samples in zip(*counts, strict=True)]
        )
        signs = signs_of_stopping(*counts, LossCourse(**self.data["loss"]))
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
            correct, total = possible(*counts) if federated.std else counts
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
