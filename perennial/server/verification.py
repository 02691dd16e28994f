"""Checks certificates: signatures, sums, and the model that follows from them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.foundation.errors import StateError
from perennial.learning.analytic.files import read_statistics_file
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.saved import GLOBAL_MODEL, load_saved
from perennial.privacy.secure.keys import fingerprint
from perennial.privacy.signed_sums import Signer
from perennial.protocol.certificates import (
    Certificate,
    paths_of,
    read_certificate,
    require_chain,
    require_sound,
)
from perennial.strategies.analytic import Analytic
from perennial.strategies.factory import build_strategy
from perennial.strategies.statistics.counted import counted_sums
from perennial.strategies.statistics.kept import FOLDER, KeptSums, file_name

SAME_MODEL = 1e-6
"""By how much a head solved again may differ, relative to its largest value: float32's own rounding."""


def verify(
    certificate: Path,
    keys: Mapping[str, Sequence[str]] | None = None,
    model: Path | None = None,
    sums: Path | None = None,
) -> list[str]:
    """Check a certificate; returns what was found to hold, line by line.

    keys: site -> keys that the verifier knows. model: file of the model; None: the one beside the
    certificate, if that is the newest. sums: folder of the sites' sums; None: beside the certificate.

    Later withdrawals do not void a certificate: the newest one is checked in its place, and what became of
    each statement in between. Raises StateError or ConfigError naming what does not hold.
    """
    found, folder = read_certificate(certificate), certificate.absolute().parent.parent
    chain = [read_certificate(path) for path in paths_of(folder)]
    # one that lies alone has no chain
    found, chain = next(((each, chain) for each in chain if each == found), (found, [found]))
    for each in chain[chain.index(found) :]:
        require_sound(each, keys)
    require_chain(chain)
    last = chain[-1]
    remaining = {statement.sha256 for statement in last.of_sites} | last.superseded
    if lost := [s.site for s in found.of_sites if s.sha256 not in remaining]:
        raise StateError(f"{certificate}: {lost[0]}: its statement is gone, and no later withdrawal says why")
    gone = {s.sha256 for s in found.of_sites} & last.superseded
    judged = last if gone else found
    newest = (
        judged.number == last.number and judged.kind != "version" and bool(judged.says.get("finished", True))
    )
    follows = _solved_again(judged, sums or folder / FOLDER, newest)
    if model is not None or (newest and (folder / GLOBAL_MODEL).exists()):
        _require_model(judged, model or folder / GLOBAL_MODEL)
    return [*_words(judged, follows, keys), *_said(judged)] + (
        [
            f"certificate {found.number} itself: {len(gone)} of its statements were withdrawn since; sums "
            f"and model are those of certificate {last.number}, after {last.number - found.number} more"
        ]
        if gone
        else []
    )


def _solved_again(found: Certificate, folder: Path, newest: bool) -> str:
    """Add up the sums and solve; returns how the shrinkage is known."""
    settings = Experiment.model_validate(found.runs[0].settings)
    for part in found.runs:
        own = Experiment.model_validate(part.settings)
        if own.digest != part.experiments[-1]:
            raise StateError("certificate: settings: not those whose hash the sites signed")
        if (own.strategy, own.bounds) != (settings.strategy, settings.bounds):
            raise StateError("certificate: settings: of two methods")
    strategy = build_strategy(settings.strategy.name, settings.strategy.parameters).find(Analytic)
    if strategy is None:
        raise StateError("certificate: settings: no strategy analytic")
    kept, strategy.bounds = strategy.kept_sums, settings.bounds
    kept.folder = folder
    for statement in found.of_sites:
        path = folder / file_name(statement.task, statement.site)
        statistics, _ = read_statistics_file(path)
        if not statement.is_of(statistics.sha256):
            raise StateError(f"{path}: not the sums that {statement.site} signed")
        own = {"sha256": statistics.sha256, "samples": statistics.samples}
        kept.total = statistics if kept.total is None else kept.total + statistics
        kept.contributions.setdefault(statement.task, {})[statement.site] = own
    _require_nothing_else(found, folder, newest)
    head = {name: values.tensor for name, values in found.head.items()}
    solved, _ = strategy.solved_again(len(head["head.bias"]), found.shrinkage)
    _require_same(solved.tensors(), head, "certificate: its model")
    return _of_shrinkage(strategy, kept, len(head["head.bias"]), found.shrinkage)


def _of_shrinkage(strategy: Analytic, kept: KeptSums, classes: int, shrinkage: float) -> str:
    sums = counted_sums(kept, strategy.bounds, range(classes))
    if strategy.settings.shrinkage == "validation" or strategy.settings.without_asking(sums) != shrinkage:
        return f"shrinkage {shrinkage:g}: the operator says"
    return f"shrinkage {shrinkage:g}: follows from settings and sums"


def _require_nothing_else(found: Certificate, folder: Path, newest: bool) -> None:
    """Raises StateError for sums of whom was withdrawn, old heads, and sums that nobody's statement names."""
    named = {file_name(statement.task, statement.site) for statement in found.of_sites}
    for path in sorted(folder.glob("*.safetensors")):
        site = str(read_statistics_file(path)[1].get("site"))
        if site in found.gone:
            raise StateError(f"{path}: sums of {site}, which were withdrawn, are still here")
        if newest and path.name not in named:
            raise StateError(f"{path}: no statement in the certificate is of these sums")


def _require_model(found: Certificate, path: Path) -> None:
    saved = load_saved(path)
    backbone = getattr(saved.model, "backbone", None)
    if not isinstance(backbone, FixedFeatures) or backbone.content != found.features:
        raise StateError(f"{path}: its feature maps are not those that the sites signed")
    if list(saved.classes) != found.classes[: len(saved.classes)]:
        raise StateError(f"{path}: its classes are not those of the certificate")
    head = {name: values.tensor for name, values in found.head.items()}
    now = {name: saved.model.state_dict()[name] for name in head}
    _require_same(now, head, f"{path}: the model")


def _require_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str) -> None:
    for name, tensor in expected.items():
        same = found[name].shape == tensor.shape and torch.allclose(
            found[name], tensor, rtol=0, atol=SAME_MODEL * float(tensor.abs().max())
        )
        if not same:
            raise StateError(f"{what}: {name} is not what the sums give")


def _words(found: Certificate, shrinkage: str, keys: Mapping[str, Sequence[str]] | None) -> list[str]:
    signed = {(s.site, s.key) for s in found.of_sites}
    signers = [s for run in found.runs for s in run.keys if (s.site, s.key) in signed]
    lines = [
        f"This model follows from these sums, signed by these keys, with these settings ({shrinkage}), and "
        f"from nothing else: {len(found.statements)} statements of {len({s for s, _ in signed})} sites"
    ]
    lines += [f"{s.site}: key {fingerprint(s.key)}, {_known(s, keys)}" for s in signers]
    if keys is None and not any(s.node_key for s in signers):
        lines.append("simulated: keys are this machine's")
    for site, receipt in found.gone.items():
        lines.append(
            f"No statement signed by {site} is in it; whether another signer included {site}'s records only "
            "that signer can say."
        )
        by = (
            f"{site} and the operator"
            if receipt.key
            else "the operator alone; that the site agrees, the operator says"
        )
        lines.append(f"the withdrawal of {site} is signed by {by}")
    return lines


def _known(signer: Signer, keys: Mapping[str, Sequence[str]] | None) -> str:
    if keys is not None:
        return "in the list that was brought"
    return "certified by a node key" if signer.node_key else "certified by nobody"


def _said(found: Certificate) -> list[str]:
    lines = [f"the operator says: {found.kind} at {found.time}"]
    for name, value in found.says.items():
        if name == "still_there":
            lines += [f"the operator says: may still hold the model before: {path}" for path in value]
        elif name == "not_undone":
            lines += [f"not undone: {text}" for text in value]
        elif value:
            lines.append(f"the operator says: {name}: {value}")
    return lines
