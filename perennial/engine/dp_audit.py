"""`perennial audit`: compares what canary records prove, from file to release, with the claimed epsilon.

Worst-case data take the place of the experiment's, and a linear model that of its own; loader, split,
memory, training, release, ledger and server are those of any run. Each class has a feature of its own, so
that what one canary does shows in one weight and nowhere else:

- mode sample: a canary is a record (or a patient) of a class. The others of its class are signed so that
  they weigh most if the canary's presence moves any of them between parts.
- release sums (modes sample and sample_shared): a canary is a record of a class, seen in the class's sum and
  count (engine/sums_audit.py).
- client_local: a canary is a site, whose data are one of two sets. The server looks at its updates.
- client_central and client_shared: a canary is a site, which sends its update or zero. A recipient looks at
  the model.

The guesses use the key of the splits, as a server would. privacy/attacks/one_run.py turns them into a floor.
"""

import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flwr.app import Context, Message, RecordDict

from perennial.config.experiment import Experiment
from perennial.config.run import RunSettings
from perennial.config.simulation import simulated_site_names
from perennial.data.federation import build
from perennial.engine.grid import InProcessGrid, set_task_identity, site_contexts
from perennial.engine.run import answer
from perennial.engine.sums_audit import sums_seen
from perennial.engine.white_box import ledger_entries, recording_of
from perennial.foundation.errors import PrivacyError
from perennial.foundation.streams import stream
from perennial.models.saved import load_saved
from perennial.privacy.attacks.gaussian_estimate import MuEstimate, estimate_mu
from perennial.privacy.attacks.one_run import OneRunAudit, one_run_audit
from perennial.privacy.attacks.white_box import Recording, findings
from perennial.privacy.witness import watching
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import TrainReply, TrainRequest

HEAD = "head.weight"
SCALE = 20.0
"""Of a record's one feature: the gradient is far above any usual clip norm, and lies in one weight."""
COPIES = 3
"""Samples of a canary that is a patient; records of each canary site."""
LEAST_CANARIES = 10


@dataclass(frozen=True)
class DpAudit:
    """The claimed epsilon of an experiment, infinite without noise, and what an audit found against it.

    found: the lower bound that guesses prove. mu: an estimate, with an assumption of its own. objections: of
    the white-box tests, which examined `watched` releases.
    """

    mode: str
    unit: str
    claim: float
    found: OneRunAudit
    mu: MuEstimate
    objections: tuple[str, ...]
    watched: int

    @property
    def contradictions(self) -> list[str]:
        """Everything that contradicts the claim, in words."""
        found = [*self.objections]
        if self.found.epsilon_floor > self.claim:
            found.append(
                f"canaries: the floor {self.found.epsilon_floor:.4g} is above the claim {self.claim:.4g}: "
                "the release depends on something that no accountant covers"
            )
        if self.mu.contradicts:
            found.append(
                f"canaries: mu is estimated as {self.mu.mu:.3g}, at least {self.mu.low:.3g}, and claimed as "
                f"{self.mu.claimed:.3g}"
            )
        if not self.watched and self.found.refutable < self.claim:
            found.append(
                f"no release was watched, and {self.found.canaries} canaries cannot refute a claim above "
                f"{self.found.refutable:.3g}: nothing was tested; allowed: more canaries"
            )
        return found


@dataclass(frozen=True)
class _Records:
    """Records of the audit's data. slot, owner: (n,); signs: (n,) of each one's feature."""

    slot: np.ndarray
    owner: np.ndarray
    signs: np.ndarray
    slots: int

    def write(self, path: Path, chosen: np.ndarray) -> None:
        """The chosen rows as a file. A second feature makes each record's content its own."""
        x = np.zeros((len(self.slot), self.slots + 1), dtype=np.float32)
        x[np.arange(len(x)), self.slot] = SCALE * self.signs
        x[:, -1] = 1e-3 * np.arange(len(x))
        names = np.array([f"{slot:05d}" for slot in self.slot])
        np.savez(path, x=x[chosen], y=names[chosen], patient=self.owner[chosen], site=names[chosen])


def audit_experiment(experiment: Experiment, canaries: int = 100, others: int = 20) -> DpAudit:
    """Audit the privacy block of an experiment with its learner, strategy, fractions and rounds.

    canaries: independent ones, one for each class. others: records beside a canary in its class, in mode
    sample. Raises PrivacyError in mode none, which claims nothing.
    """
    mode = experiment.privacy.mode
    if mode == "none":
        raise PrivacyError("privacy.mode: found 'none', which claims nothing that could be audited")
    if canaries < LEAST_CANARIES:
        raise PrivacyError(f"canaries: found {canaries}, allowed {LEAST_CANARIES} or more")
    with tempfile.TemporaryDirectory(prefix="perennial-audit-") as folder:
        run = _Run(experiment, Path(folder), canaries)
        if experiment.privacy.release == "sums":
            return run.of_sums()
        return run.of_samples(others) if mode == "sample" else run.of_sites()


class _Run:
    def __init__(self, experiment: Experiment, folder: Path, canaries: int) -> None:
        self.experiment, self.folder, self.canaries = experiment, folder, canaries
        self.data = folder / "canaries.npz"
        self.recording: Recording | None = None
        self.present = stream(experiment.seed, "audit-canaries").random(canaries) < 0.5

    def of_samples(self, others: int) -> DpAudit:
        """Canaries are records, or patients."""
        copies = COPIES if self.experiment.privacy.unit == "patient" else 1
        slot = np.repeat(np.arange(self.canaries), others + copies)
        place = np.tile(np.arange(others + copies), self.canaries)
        canary = place >= others
        owner = slot * (others + copies) + np.minimum(place, others)
        records = _Records(slot, owner, np.ones(len(slot)), self.canaries)
        settings, everything = self._settings("sample"), np.ones_like(canary)
        inside, outside = (self._trained(settings, records, chosen) for chosen in (everything, ~canary))
        moved = inside.astype(int) - outside.astype(int)
        # records that a canary moves between parts pull in its direction; all others cancel out
        signs = np.where(moved != 0, moved, np.where(place % 2 == 0, 1, -1))
        records = replace(records, signs=np.where(canary, 1, signs).astype(float))
        pulls = [
            np.bincount(
                slot, records.signs * self._trained(settings, records, chosen), minlength=self.canaries
            )
            for chosen in (everything, ~canary)
        ]
        direction, middle = pulls[0] - pulls[1], (pulls[0] + pulls[1]) / 2
        chosen = ~canary | self.present[slot]
        updates, _, summary = self._train(settings, records, chosen)
        seen = sum(updates.values(), np.zeros(self.canaries))
        # classes of one task were trained alike, so the effect of one record is estimated over all of them
        for part in np.array_split(np.arange(self.canaries), settings["tasks"]["count"]):
            weight = middle[part] @ middle[part]
            seen[part] -= middle[part] * (seen[part] @ middle[part] / weight if weight else 0.0)
        scores = seen * direction
        return self._judged(summary, scores, direction != 0)

    def of_sites(self) -> DpAudit:
        """Audit with whole sites as canaries."""
        local = self.experiment.privacy.mode == "client_local"
        slot = np.repeat(np.arange(self.canaries), COPIES)
        signs = np.where(self.present[slot], 1.0, -1.0) if local else np.ones(len(slot))
        records = _Records(slot, slot, signs, self.canaries)
        settings, everything = self._settings("natural"), np.ones(len(slot), dtype=bool)
        trained = np.bincount(slot, self._trained(settings, records, everything), minlength=self.canaries)
        taking_part = trained > 0
        if not local:
            settings["adversaries"] = [
                {"site": f"{site:05d}", "kind": "free_rider"}
                for site in np.flatnonzero(~self.present & taking_part)
            ]
        updates, change, summary = self._train(settings, records, everything)
        if local:
            own = [updates.get(f"{site:05d}", np.zeros(self.canaries))[site] for site in range(self.canaries)]
            return self._judged(summary, np.array(own), taking_part)
        return self._judged(summary, change, taking_part)

    def of_sums(self) -> DpAudit:
        """Canaries are records whose features enter sums."""
        seen = sums_seen(self.experiment, self.folder, self.present)
        self.recording = seen.recording
        return self._judged(seen.summary, seen.scores, seen.trains)

    def _settings(self, kind: str) -> dict[str, Any]:
        """The experiment with the audit's data and model."""
        content = self.experiment.model_dump(mode="json", exclude_unset=True)
        # settings name a simulation's data in this process, and a file's content is none of them
        content["name"] = f"audit-{secrets.token_hex(8)}"
        fractions = {key: content["data"].get(key) for key in ("test_fraction", "validation_fraction")}
        content["data"] = {
            **{key: value for key, value in fractions.items() if value is not None},
            **{"source": "npz", "path": str(self.data), "normalise": {"mean": 0.0, "std": 1.0}},
        }
        if kind == "natural":
            content["data"] |= {"partition": {"kind": "natural"}, "validation_fraction": 0}
        else:
            content["data"] |= {"sites": 1}
            if self.experiment.privacy.unit == "patient":
                content["data"]["patient"] = "patient"
        count = 1 if kind == "natural" or self.experiment.tasks.count == 1 else 2
        rounds = self.experiment.tasks.rounds
        rounds = rounds if isinstance(rounds, int) else rounds[0]
        content["tasks"] = {"count": count, "rounds": rounds, "order": "natural"}
        content["model"] = {"name": "mlp", "hidden": [], "norm": "none"}
        # small steps keep the gradients as they are at first; a site's whole update is to reach the clip norm
        rate = 1.0 if kind == "natural" else 1e-3
        content["learner"]["optimizer"] = {"name": "sgd", "lr": rate}
        content["evaluation"] = {"federated": False}
        content["rounds"] = {}
        for key in ("absence", "adversaries", "pretraining"):
            content.pop(key, None)
        return content

    def _trained(self, settings: dict[str, Any], records: _Records, chosen: np.ndarray) -> np.ndarray:
        """(n,) bool: which records are training samples when the chosen ones are there."""
        records.write(self.data, chosen)
        experiment = Experiment.model_validate(settings | {"adversaries": []})
        rows = np.flatnonzero(chosen)
        found = np.zeros(len(chosen), dtype=bool)
        for site in build(experiment.data, experiment.tasks, experiment.seed).sites.values():
            found[rows[site.train.numpy()]] = True
        return found

    def _train(
        self, settings: dict[str, Any], records: _Records, chosen: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, dict[str, Any]]:
        """What updates did in one run: (what each site's did, what the run did, summary).

        The first is site -> (m,), what its updates did to each class's own weight; the second is (m,), what
        the run did to them in the model.
        """
        from perennial.server.app import serve

        records.write(self.data, chosen)
        path = self.folder / "experiment.yaml"
        path.write_text(yaml.safe_dump(settings))
        run = RunSettings(str(path), runs=str(self.folder / "runs"), device="cpu")
        set_task_identity()
        made = run.load()
        names = simulated_site_names(made)
        contexts = site_contexts(len(names), dict(vars(run)))
        grid = _WatchingGrid(contexts, names, self.canaries)
        context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=dict(vars(run)))
        with watching() as seen:
            summary = serve(grid, context, "in-process")
        self.recording = recording_of(made, seen, ledger_entries(run.folder(made)), len(names))
        saved = load_saved(run.folder(made) / "model.safetensors")
        final = saved.model.get_parameter(HEAD).detach().numpy()
        change = np.diagonal(final)[: self.canaries] - grid.first
        return grid.updates, change, summary

    def _judged(self, summary: dict[str, Any], scores: np.ndarray, known: np.ndarray) -> DpAudit:
        privacy = self.experiment.privacy
        value = summary["epsilon"]["value"]
        found = one_run_audit(scores[known], self.present[known], privacy.delta)
        claim = float("inf") if value is None else float(value)
        mu = estimate_mu(scores[known], self.present[known], claim, privacy.delta)
        assert self.recording is not None
        objections, watched = tuple(findings(self.recording)), len(self.recording.noise)
        return DpAudit(privacy.mode, summary["epsilon"]["unit"], claim, found, mu, objections, watched)


class _WatchingGrid(InProcessGrid):
    """Sees what the server sees: the updates of every site."""

    def __init__(self, contexts: dict[int, Context], names: Iterable[str], classes: int) -> None:
        super().__init__(answer, contexts)
        self._names = dict(zip(contexts, names, strict=True))
        self._classes = classes
        self.updates: dict[str, np.ndarray] = {}
        self.first = np.zeros(classes)
        self._begun = False

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if not self._begun and messages and read_kind(messages[0].content) == "TrainRequest":
            request = TrainRequest.from_record(messages[0].content)
            self.first, self._begun = self._own_weights(request.arrays), True
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        replies = list(super().pull_messages(message_ids))
        for reply in replies:
            if reply.has_content() and read_kind(reply.content) == "TrainReply":
                update = self._own_weights(TrainReply.from_record(reply.content).update)
                site = self._names[reply.metadata.src_node_id]
                self.updates[site] = self.updates.get(site, np.zeros(self._classes)) + update
        return replies

    def _own_weights(self, tensors: Any) -> np.ndarray:
        """(m,) weight of each class on its own feature; 0 of a class that is not known yet."""
        known = np.diagonal(tensors[HEAD].detach().cpu().numpy().astype(np.float64))
        return np.concatenate([known, np.zeros(self._classes)])[: self._classes]
