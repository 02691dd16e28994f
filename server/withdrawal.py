"""After a closed-form run: withdraws a site or some of its records, merges two runs, and certifies models.

Sums are exact, so after a subtraction they have the bits that they would have had if the site had never taken
part. A subtraction does not undo models that were handed out before, nor what the difference of two models
reveals of what was subtracted.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from perennial.client.consent import withdraw as leave
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import make_folder, replace_file, sole_owner
from perennial.foundation.registered import RECEIPTS_KEY
from perennial.learning.analytic.files import read_by_task, write_statistics
from perennial.learning.analytic.statistics import Statistics
from perennial.models.saved import GLOBAL_MODEL
from perennial.privacy.secure.keys import new_secret
from perennial.privacy.signed_sums import Statement, Withdrawal
from perennial.protocol.certificates import Kind, Run, Values, issue
from perennial.server.opened_run import OpenedRun
from perennial.server.receipts import read_operator_key
from perennial.server.run_folder import CHECKPOINT
from perennial.strategies.statistics.kept import FOLDER, file_name
from perennial.strategies.statistics.versions import FOLDER as VERSIONS

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


def withdraw(
    folder: Path, site: str, shrinkage: float | None = None, receipt: Path | None = None
) -> Path | None:
    """Take a site's sums out of a run, solve anew, and write a certificate; returns its path.

    None: samples of all sites chose or weighed the head, so the run is left without a model, to be resumed;
    it then asks the sites that are left again. shrinkage: of the new head; None: the experiment's own, or
    chosen again from the sums. receipt: what the site signed with `perennial site withdraw`. Raises
    StateError or ConfigError saying why it cannot be done; a command that was stopped is completed by giving
    it again.
    """
    with sole_owner(folder, "withdraw"):
        run = OpenedRun.open(folder, unfinished=True)
        run.require_features_of_nobody()
        if run.strategy.asks_again(shrinkage):
            _begin_again(run, site)
            return None
        sums, strategy, start = run.strategy.kept_sums, run.strategy, datetime.now(UTC)
        if site not in strategy.withdrawn:
            before, contributed = run.total.sha256, sums.contributions_of(site)
            signed = run.statements({task: [site] for task in contributed})
            subtracted = sums.take_back(site)
            if not run.total.samples:
                raise StateError(f"{folder}: {site} is the only site; without it there is no model")
            hashes = tuple(statement.sha256 for statement in signed)
            agreed = Withdrawal(
                site=site,
                run=run.run,
                time=start.isoformat(timespec="seconds"),
                withdrawn=hashes,
                remaining=(),
            )
            strategy.withdrawn[site] = _withdrawal(run, before, subtracted, agreed)
        record = strategy.withdrawn[site]
        record["receipt"] = asdict(_agreed(run, Withdrawal.from_json(record["receipt"]), receipt))
        head, used = run.head(shrinkage)
        strategy.chosen[max(strategy.chosen, default=1)] = used
        if run.model is None:
            run.commit_unfinished(head, used)
        else:
            run.commit(head)
        for path in (folder / FOLDER).glob(f"{site}-task-*.safetensors"):
            path.unlink()
        return _certified(run, "withdraw", site, head, used, record, start)


def _begin_again(run: OpenedRun, site: str) -> None:
    """Leave a run without a site and without what samples of all sites made, to be resumed."""
    strategy, folder = run.strategy, run.folder
    if site not in strategy.withdrawn:
        if run.model is None:
            raise StateError(f"{folder}: samples of all sites choose its head; finish it, then withdraw")
        if site not in strategy.sums.sites:
            raise StateError(f"site {site!r}: its sums are in no task of this run")
        if strategy.sums.sites == [site]:
            raise StateError(f"{folder}: {site} is the only site; without it there is no model")
        if strategy.head != "balanced_ridge":
            strategy.kept_sums.take_back(site)
        strategy.withdrawn[site] = {"number": 1 + len(strategy.withdrawn)}
        run.begin_again()
    elif run.model is not None:
        return
    if (folder / "sites" / site / "runs" / run.run).exists():
        leave(folder / "sites" / site, run.run)
    gone = [*folder.glob(f"{VERSIONS}/*.safetensors"), *folder.glob(f"{CHECKPOINT}/previous-*")]
    every = strategy.kept_sums.total is None if strategy.head != "balanced_ridge" else False
    gone += folder.glob(f"{FOLDER}/{'*' if every else site}-task-*.safetensors")
    for path in (folder / GLOBAL_MODEL, *gone):
        path.unlink(missing_ok=True)


def write_form(folder: Path, site: str, path: Path) -> Path:
    """Write what a site needs to know of a finished run to take records back; returns path.

    In it is the key that divided the site's data, which the site does not keep. Raises StateError where the
    site's sums are in no task.
    """
    run = OpenedRun.open(folder)
    if not run.strategy.kept_sums.contributions_of(site):
        raise StateError(f"site {site!r}: its sums are in no task of this run")
    key = run.checkpoint.progress.split_key
    content = {"run": run.run, "experiment": run.experiment.digest, "split_key": key}
    content |= {"statements": run.current(site)}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def withdraw_records(folder: Path, site: str, group: Path, shrinkage: float | None = None) -> Path:
    """Take a group of a site's records out of a finished run; otherwise as withdraw.

    group: what the site wrote with `perennial site withdraw`.
    """
    with sole_owner(folder, "withdraw"):
        run, start = OpenedRun.open(folder), datetime.now(UTC)
        run.require_features_of_nobody()
        sums, strategy = run.strategy.kept_sums, run.strategy
        by_task, facts = read_by_task(group)
        expected = {
            "run": run.run,
            "experiment": run.experiment.digest,
            "site": site,
            "features": run.features,
        }
        for key, value in expected.items():
            if facts.get(key) != value:
                raise StateError(f"{group}: {key}: found {facts.get(key)!r:.40}, allowed {value!r:.40}")
        sha256 = hashlib.sha256(group.read_bytes()).hexdigest()
        if sha256 not in strategy.groups:
            before, remaining = run.total.sha256, sums.without_group(site, by_task)
            statements, agreed = _statements(group, facts, remaining, run, site)
            subtracted = _added_up(by_task.values())
            sums.replace(site, remaining, statements)
            if not run.total.samples:
                raise StateError(f"{folder}: nothing would be left, and without samples there is no model")
            strategy.groups[sha256] = _withdrawal(run, before, subtracted, agreed) | {"site": site}
        record = strategy.groups[sha256]
        head, used = run.head(shrinkage)
        strategy.chosen[max(strategy.chosen, default=1)] = used
        run.commit(head, group=True)
        sums.keep_again(site, by_task)
        return _certified(run, "withdraw records", site, head, used, record, start)


def certify(folder: Path, version: int | None = None) -> Path:
    """Write a certificate of a finished run's model, or of an asynchronous run's version; returns its path.

    version: round of that one. Raises ConfigError or StateError saying why there can be none.
    """
    with sole_owner(folder, "certify"):
        run = OpenedRun.open(folder)
        if version is None:
            heads = run.saved.model.state_dict()
            head = {name: heads[name] for name in ("head.weight", "head.bias")}
            return _certified(run, "run", "", head, run.strategy.chosen[max(run.strategy.chosen)])
        head, facts = run.version(version)
        given = {int(task): sites for task, sites in facts["given"].items()}
        return _certified(run, "version", str(version), head, facts["shrinkage"], given=given)


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
        return _certified(one, "merge", "", head, used, other=other, folder=output)


def _certified(
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
    """Write the certificate of a model.

    record: what is said of the withdrawal that made it. given: task -> sites whose sums are in it; None: all.
    other: the run that was merged with this one.
    """
    runs = [run] if other is None else [run, other]
    statements = [found for one in runs for found in one.statements(given)]
    says = {"sums_sha256": run.total.sha256, "finished": run.model is not None}
    if record is not None:
        says |= {name: value for name, value in record.items() if name not in ("receipt", "number")}
        says |= {"not_undone": list(NOT_UNDONE), "still_there": _still_there(run.folder, since)}
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
    """The operator's private signing key; a simulation's is made at the first call. folder: of a run."""
    deployed = folder.absolute().parents[1] / RECEIPTS_KEY
    if deployed.exists():
        return read_operator_key(deployed).private_bytes_raw()
    path = folder.absolute().parent / OPERATOR_KEY
    if not path.exists():
        replace_file(path, new_secret())
    return path.read_bytes()


def _agreed(run: OpenedRun, said: Withdrawal, receipt: Path | None) -> Withdrawal:
    """The receipt of a site's withdrawal: signed by the site where it signed, and by the operator."""
    simulated = run.folder / "sites" / said.site / "secure" / "identity.key"
    if receipt is not None:
        try:
            found = Withdrawal.from_json(json.loads(receipt.read_bytes()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{receipt}: no receipt of `perennial site withdraw` ({error})") from error
        keys = {signer.key for signer in run.strategy.kept_sums.signers if signer.site == said.site}
        if (found.site, found.run) != (said.site, said.run) or found.key not in keys or found.remaining:
            raise StateError(f"{receipt}: of another site or run, or by another key than signed the sums")
        if not set(found.withdrawn) >= set(said.withdrawn):
            raise StateError(f"{receipt}: does not name all statements of {said.site} in this run")
        said = found
    elif not said.key and simulated.exists():
        said = said.by_site(simulated.read_bytes())
    said = said.by_operator(operator_secret(run.folder))
    if not said.signed:
        raise StateError(f"{receipt}: its signature is not the site's")
    return said


def _statements(
    group: Path, facts: Mapping[str, Any], remaining: Mapping[int, Statistics], run: OpenedRun, site: str
) -> tuple[dict[int, Statement], Withdrawal]:
    """What the site signed of the sums that remain, and its receipt. Raises StateError where it did not."""
    try:
        signed = {s.task: s for s in map(Statement.from_json, facts["statements"])}
        agreed = Withdrawal.from_json(facts["receipt"]).by_operator(operator_secret(run.folder))
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{group}: without the site's statements and receipt ({error})") from error
    for task, left in remaining.items():
        former = Statement.from_json(run.strategy.kept_sums.contributions[task][site]["statement"])
        own, repeated = signed.get(task), ("site", "key", "experiment", "run", "class_order", "signers")
        if own is None or not own.signed or own.supersedes != former.sha256 or not own.is_of(left.sha256):
            raise StateError(f"{group}: task {task}: no statement of {site} of the sums that remain")
        if any(getattr(own, name) != getattr(former, name) for name in repeated):
            raise StateError(f"{group}: task {task}: the statement is of another run or key")
    hashes = {old.supersedes for old in signed.values()}, {new.sha256 for new in signed.values()}
    if not agreed.signed or not agreed.key or (set(agreed.withdrawn), set(agreed.remaining)) != hashes:
        raise StateError(f"{group}: the receipt is not of these statements")
    return signed, agreed


def _still_there(folder: Path, since: datetime | None) -> list[str]:
    """Files of a run's folder that may hold the old model: neither sums, nor written or removed just now."""
    for path in (folder / VERSIONS).glob("*.safetensors"):
        path.unlink()
    before = datetime.now(UTC).timestamp() if since is None else since.timestamp()
    found = (path for path in folder.rglob("*") if path.is_file() and path.suffix in HOLDS_MODELS)
    apart = (FOLDER, "certificates")
    return sorted(
        str(path.relative_to(folder))
        for path in found
        if path.relative_to(folder).parts[0] not in apart and path.stat().st_mtime < before - TICK
    )


def _added_up(parts: Iterable[Statistics]) -> Statistics:
    total = None
    for part in parts:
        total = part if total is None else total + part
    if total is None:
        raise StateError("a group of no task; nothing is withdrawn")
    return total


def _withdrawal(run: OpenedRun, before: str, subtracted: Statistics, agreed: Withdrawal) -> dict[str, Any]:
    """What is kept of a subtraction. before: SHA-256 of the sums."""
    left = run.total.over(range(len(run.classes))).counts
    former = [*run.strategy.withdrawn.values(), *run.strategy.groups.values()]
    return {
        "number": 1 + max((record["number"] for record in former), default=0),
        "receipt": asdict(agreed),
        "sums_before": before,
        "sums_after": run.total.sha256,
        "subtracted": subtracted.sha256,
        "classes_removed": [run.classes[label] for label in subtracted.classes if not int(left[label])],
    }
