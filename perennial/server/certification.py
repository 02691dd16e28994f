"""Certifies the models of closed-form runs, and merges runs on disjoint data.

A certificate says from which signed sums a model follows; server/verification.py checks it.
"""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import make_folder, replace_file, sole_owner
from perennial.foundation.registered import RECEIPTS_KEY
from perennial.learning.analytic.files import write_statistics
from perennial.models.saved import GLOBAL_MODEL
from perennial.privacy.secure.keys import new_secret
from perennial.protocol.certificates import Kind, Run, Values, issue
from perennial.server.opened_run import OpenedRun
from perennial.server.receipts import read_operator_key
from perennial.strategies.statistics.kept import FOLDER, file_name

OPERATOR_KEY = "operator.key"
"""Beside the folders of simulated runs; a deployment's operator signs with its key for receipts."""
HOLDS_MODELS = {".safetensors", ".onnx", ".pt", ".html"}
TICK = 0.1
"""Seconds by which the clock of files may lag behind that of programs."""
NOT_UNDONE = (
    "models that were handed out before, and copies of the sums that somebody made",
    "the difference of the models before and after, which tells what was subtracted",
    "accuracy figures of the run, which are those of the model before",
)


def certify(folder: Path) -> Path:
    """Write a certificate of a finished run's model; returns its path.

    Raises ConfigError or StateError if it cannot be certified.
    """
    with sole_owner(folder, "certify"):
        run = OpenedRun.open(folder)
        heads = run.saved.model.state_dict()
        head = {name: heads[name] for name in ("head.weight", "head.bias")}
        return certified(run, "run", "", head, run.strategy.chosen[max(run.strategy.chosen)])


def merge(first: Path, second: Path, output: Path) -> Path:
    """Make one model of the sums of two finished runs on disjoint data, in a folder of its own.

    Returns its certificate. Raises ConfigError if the runs' maps, classes or heads differ, or if a
    site is in both.
    """
    one, other = OpenedRun.open(first), OpenedRun.open(second)
    if one.features != other.features:
        raise ConfigError(
            f"{second}: its features are {other.features:.12}, those of {first} {one.features:.12}"
        )
    if one.saved.classes != other.saved.classes:
        raise ConfigError(f"{second}: its classes, or their order, are not those of {first}")
    if one.experiment.strategy != other.experiment.strategy:
        raise ConfigError(f"{second}: its strategy's settings are not those of {first}")
    if one.experiment.bounds.share or one.experiment.bounds.registered:
        raise ConfigError(
            f"{first}: bounds.share, bounds.registered: what a site of a merged run counts for has not been "
            "worked out; allowed without them"
        )
    if both := sorted(set(one.strategy.sums.sites) & set(other.strategy.sums.sites)):
        raise ConfigError(
            f"{second}: {', '.join(both[:5])} took part in {first} too; its data would count twice"
        )
    make_folder(output)
    with sole_owner(output, "merge"):
        if (output / GLOBAL_MODEL).exists():
            raise StateError(f"{output}: holds a model already; choose another folder")
        for run in (one, other):
            for task, sites in run.strategy.kept_sums.contributions.items():
                for site in sites:
                    facts = {"site": site, "task": task}
                    kept = run.strategy.kept_sums.kept(task, site)
                    write_statistics(output / FOLDER / file_name(task, site), kept, facts)
        one.strategy.kept_sums.total = one.total + other.total
        head, used = one.head(None)
        one.write_model(output / GLOBAL_MODEL, head)
        return certified(one, "merge", "", head, used, other=other, folder=output)


def certified(
    run: OpenedRun,
    kind: Kind,
    about: str,
    head: Mapping[str, Tensor],
    shrinkage: float,
    record: Mapping[str, Any] | None = None,
    since: datetime | None = None,
    *,
    given: Mapping[int, list[str]] | None = None,
    other: OpenedRun | None = None,
    folder: Path | None = None,
) -> Path:
    """Sign and write the certificate of a model whose sums are in a run, and return its path.

    kind: of certificate. about: the site whose sums were withdrawn, the version, or ''. head, shrinkage: of
    the model.
    record: facts of the withdrawal that made it; with it all kept versions of the run's model are deleted.
    since: when the withdrawal began; older files that may hold the former model are listed. given: task ->
    sites whose sums are in the model; None: all. other: the run merged with this one. folder: to write in;
    None: the run's. Raises ConfigError when sums alone do not determine the model.
    """
    runs = [run] if other is None else [run, other]
    for one in runs:
        one.require_certifiable()
    statements = [found for one in runs for found in one.statements(given)]
    says = {"sums_sha256": run.total.sha256, "finished": run.model is not None}
    if record is not None:
        says |= {name: value for name, value in record.items() if name not in ("receipt", "number")}
        says |= {"not_undone": list(NOT_UNDONE), "still_there": still_there(run.folder, since)}
    return issue(
        folder or run.folder,
        operator_secret(run.folder),
        kind=kind,
        about=about,
        runs=[
            Run(
                run=one.run,
                experiments=_phases(one),
                settings=one.experiment.model_dump(mode="json"),
                signers=[(s.site, s.key, s.certified) for s in one.strategy.kept_sums.signers],
            )
            for one in runs
        ],
        features=statements[0].features if statements else "",
        classes=run.all_classes,
        statements=[asdict(statement) for statement in statements],
        withdrawn=[receipt for one in runs for receipt in one.receipts],
        shrinkage=shrinkage,
        head={name: Values.of(tensor) for name, tensor in head.items()},
        says=says,
    )


def _phases(run: OpenedRun) -> list[str]:
    """Digests under which a run's sums were given; the present one comes last."""
    now = run.experiment.digest
    return [*sorted({statement.experiment for statement in run.statements()} - {now}), now]


def operator_secret(folder: Path) -> bytes:
    """The operator's private signing key. folder: of a run; for a simulation, the first call makes a key."""
    deployed = folder.absolute().parents[1] / RECEIPTS_KEY
    if deployed.exists():
        return read_operator_key(deployed).private_bytes_raw()
    path = folder.absolute().parent / OPERATOR_KEY
    if not path.exists():
        replace_file(path, new_secret())
    return path.read_bytes()


def still_there(folder: Path, since: datetime | None) -> list[str]:
    """Files in a run's folder that may hold the old model, relative to it: models written before `since`.

    The folders of sums and certificates are left out. since: None means now.
    """
    before = datetime.now(UTC).timestamp() if since is None else since.timestamp()
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix in HOLDS_MODELS)
    apart = (FOLDER, "certificates")
    return sorted(
        str(path.relative_to(folder))
        for path in found
        if path.relative_to(folder).parts[0] not in apart and path.stat().st_mtime < before - TICK
    )
