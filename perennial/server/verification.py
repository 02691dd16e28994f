"""From which signed sums a closed-form model follows, in a file, and the check of it by anybody.

Each site signs a statement: the hash of its sums of a task, with the hash of the settings that turn sums into
a model. The file holds these statements and the settings. Whoever has the sums adds them up, solves, and has
the model, or finds out who does not fit. A site that was withdrawn has no statement in it.
"""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from perennial.config.rounds import BoundsConfig
from perennial.config.schema import StrategySpec
from perennial.config.strategies import hash_solver_settings
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import replace_file
from perennial.foundation.plain import Block
from perennial.learning.analytic.statistics import read_statistics_file
from perennial.models.feature_maps.fixed import FixedFeatures
from perennial.models.saved import GLOBAL_MODEL, load_saved
from perennial.privacy.secure.keys import format_fingerprint
from perennial.privacy.signed_sums import Signer, Statement, hash_lists, is_allowed
from perennial.server.opened_run import OpenedRun
from perennial.strategies.analytic.kept import FOLDER, combine_sums, name_file
from perennial.strategies.analytic.method import Analytic
from perennial.strategies.factory import build_strategy

STATEMENTS = "statements.json"
"""In a run's folder."""
SAME_MODEL = 1e-6
"""By how much a head solved again may differ, relative to its largest value: float32's own rounding."""


class SignedModel(Block):
    """The content of STATEMENTS.

    strategy, bounds: blocks of the experiment that turn sums into a head. classes: in the order of the model.
    signers: (site, signing key, what its node key says of it), in the order in which they were listed.
    """

    run: str
    strategy: dict[str, Any]
    bounds: dict[str, Any]
    features: str
    classes: list[str]
    shrinkage: float
    signers: list[tuple[str, str, str]]
    statements: list[dict[str, str | int]]


def write_statements(run: OpenedRun, shrinkage: float) -> Path:
    """Write from which signed sums a run's present model follows; returns the file.

    Raises ConfigError if validation samples chose the head, which sums do not show, or a site signed nothing.
    """
    run.require_certifiable()
    statements, experiment = run.list_statements(), run.experiment
    found = SignedModel(
        run=run.run,
        strategy=experiment.strategy.model_dump(mode="json"),
        bounds=experiment.bounds.model_dump(mode="json"),
        features=statements[0].features if statements else "",
        classes=run.all_classes,
        shrinkage=shrinkage,
        signers=[(each.site, each.key, each.certified) for each in run.strategy.kept_sums.signers],
        statements=[vars(statement) for statement in statements],
    )
    path = run.folder / STATEMENTS
    replace_file(path, (found.model_dump_json(indent=1) + "\n").encode(), mode=0o644)
    return path


def verify(file: Path, keys: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Check that a model follows from signed sums; returns what was found, line by line.

    file: STATEMENTS, with model and sums beside it, or a run's folder, whose file is then written anew. keys:
    site -> keys that the verifier knows. Raises StateError or ConfigError naming what does not hold.
    """
    if file.is_dir():
        run = OpenedRun.open(file)
        file = write_statements(run, run.strategy.chosen[max(run.strategy.chosen)])
    try:
        found = SignedModel.model_validate_json(file.read_bytes())
        statements = [Statement.from_json(values) for values in found.statements]
        strategy, bounds = StrategySpec(**found.strategy), BoundsConfig(**found.bounds)
    except (OSError, ValueError, TypeError) as error:
        raise StateError(f"{file}: no statements of sums of this release ({str(error)!r:.200})") from error
    signers = [Signer(*row) for row in found.signers]
    _require_statements(statements, found, signers, hash_solver_settings(strategy, bounds), keys)
    analytic = build_strategy(strategy.name, strategy.parameters).find(Analytic)
    if analytic is None:
        raise StateError(f"{file}: strategy: found {strategy.name!r}, allowed analytic")
    kept, analytic.bounds = analytic.kept_sums, bounds
    kept.folder = file.absolute().parent / FOLDER
    for statement in statements:
        path = kept.folder / name_file(statement.task, statement.site)
        own, _ = read_statistics_file(path)
        if not statement.is_of(own.sha256):
            raise StateError(f"{path}: not the sums that {statement.site} signed")
        kept.total = own if kept.total is None else kept.total + own
        facts = {"sha256": own.sha256, "samples": own.samples}
        kept.contributions.setdefault(statement.task, {})[statement.site] = facts
    named = {name_file(statement.task, statement.site) for statement in statements}
    if stray := sorted(path for path in kept.folder.glob("*.safetensors") if path.name not in named):
        raise StateError(f"{stray[0]}: no statement is of these sums, and whose they are is not in the model")
    known = _require_model(file.absolute().parent / GLOBAL_MODEL, found, analytic)
    asked = analytic.settings.shrinkage == "validation"
    here = (
        None if asked else analytic.settings.choose_without_asking(combine_sums(kept, bounds, range(known)))
    )
    how = "follows from settings and sums" if here == found.shrinkage else "is what the operator says"
    names = sorted({statement.site for statement in statements})
    lines = [
        f"the model follows from {len(statements)} signed sums of {len(names)} sites and these settings; its "
        f"shrinkage {found.shrinkage:g} {how}"
    ]
    for each in (each for each in signers if each.site in names):
        by = "certified by a node key" if each.node_key else "certified by nobody"
        lines.append(
            f"{each.site}: key {format_fingerprint(each.key)}, {'in your list' if keys is not None else by}"
        )
    return [*lines, "whether a signer's sums hold another site's records, only that signer can say"]


def _require_statements(
    statements: Sequence[Statement],
    found: SignedModel,
    signers: Sequence[Signer],
    settings: str,
    brought: Mapping[str, Sequence[str]] | None,
) -> None:
    """Raises StateError naming the first statement that is not a listed site's, or not of this model."""
    orders = {sha256(",".join(found.classes[:n]).encode()).hexdigest() for n in range(len(found.classes) + 1)}
    by_key = {(signer.site, signer.key): signer for signer in signers}
    listed = set(hash_lists(signer.row for signer in signers))
    replaced = {statement.supersedes for statement in statements}
    once: set[tuple[str, int]] = set()
    if not statements:
        raise StateError("statements: none, and a model of nothing is none")
    for one in statements:
        signer = by_key.get((one.site, one.key))
        for holds, why in (
            (one.signed, "its signature is not of its key"),
            (signer is not None and one.signers in listed, "its key is not in the list of signers"),
            (brought is None or (signer and is_allowed(signer, brought)), "its key is not in your list"),
            (one.settings == settings, "its site signed other settings"),
            (one.run == found.run, "of another run"),
            (one.features == found.features, "of other feature maps"),
            (one.class_order in orders, "of another order of classes"),
            (one.sha256 not in replaced, "superseded by a later one"),
            ((one.site, one.task) not in once, "counts twice"),
        ):
            if not holds:
                raise StateError(f"statement of {one.site}, task {one.task}: {why}")
        once.add((one.site, one.task))


def _require_model(path: Path, found: SignedModel, analytic: Analytic) -> int:
    """Number of classes of the model in a file. Raises StateError unless the sums give it."""
    saved = load_saved(path)
    backbone = getattr(saved.model, "backbone", None)
    if not isinstance(backbone, FixedFeatures) or backbone.content != found.features:
        raise StateError(f"{path}: its feature maps are not those that the sites signed")
    if list(saved.classes) != found.classes[: len(saved.classes)]:
        raise StateError(f"{path}: its classes are not those that the sites signed")
    solved, _ = analytic.solve_again(len(saved.classes), found.shrinkage)
    for name, tensor in solved.list_tensors().items():
        now = saved.model.state_dict()[name]
        most = SAME_MODEL * float(tensor.abs().max())
        if now.shape != tensor.shape or not torch.allclose(now, tensor, rtol=0, atol=most):
            raise StateError(f"{path}: {name} is not what the sums give")
    return len(saved.classes)


def read_keys(path: Path) -> dict[str, list[str]]:
    """Keys that a verifier brings, from a file: name of a site -> keys.

    A line is a name and a signing key in hexadecimal digits, or a node key as an OpenSSH line with the site
    as its comment. Raises ConfigError naming the line that is neither.
    """
    found: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        parts = line.strip().split()
        if not parts or parts[0].startswith("#"):
            continue
        if len(parts) >= 3 and parts[0].startswith("ecdsa-"):
            found.setdefault(" ".join(parts[2:]), []).append(" ".join(parts[:2]))
        elif len(parts) >= 2 and len(parts[-1]) == 64 and set(parts[-1]) <= set("0123456789abcdef"):
            found.setdefault(" ".join(parts[:-1]), []).append(parts[-1])
        else:
            raise ConfigError(
                f"{path}: line {number}: found {line!r:.40}; allowed `NAME KEY` with a key of 64 hexadecimal "
                "digits, or `ecdsa-sha2-nistp384 KEY NAME`"
            )
    return found
