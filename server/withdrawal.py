"""After a closed-form run: withdraws a site's sums, merges two runs, and writes certificates of both.

Sums are exact, so after a subtraction they have the bits that they would have had if the site had never taken
part. A subtraction does not undo models that were handed out before, nor what the difference of two models
reveals of what was subtracted.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perennial.config.experiment import Experiment
from perennial.foundation.errors import ConfigError, StateError
from perennial.foundation.files import make_folder, replace_file, sole_owner
from perennial.learning.analytic.files import read_by_task, read_statistics_file, write_statistics
from perennial.learning.analytic.statistics import Statistics
from perennial.models.saved import GLOBAL_MODEL, SavedModel, load_saved
from perennial.protocol.tensors import content_sha256
from perennial.server.opened_run import OpenedRun
from perennial.strategies.analytic import Analytic
from perennial.strategies.factory import build_strategy
from perennial.strategies.statistics.kept import FOLDER, KeptSums, file_name
from perennial.strategies.statistics.versions import FOLDER as VERSIONS
from perennial.strategies.statistics.versions import version_facts

CERTIFICATES = "certificates"
NOT_UNDONE = (
    "models that were handed out before, and copies of the sums that somebody made",
    "the difference of the models before and after, which tells what was subtracted",
    "accuracy figures of the run, which are those of the model before",
)
SAME_MODEL = 1e-6
"""By how much a head solved again may differ, relative to its largest value: float32's own rounding."""


def forget(folder: Path, site: str, shrinkage: float | None = None) -> Path:
    """Take a site's sums out of a finished run, solve anew, and write a certificate; returns its path.

    shrinkage: of the new head; None: the experiment's own, or chosen again from the sums. Raises StateError
    or ConfigError saying why it cannot be done; a command that was stopped is completed by giving it again.
    """
    with sole_owner(folder, "forget"):
        run = OpenedRun.open(folder, unfinished=True)
        run.require_features_of_nobody()
        sums, strategy = run.strategy.kept_sums, run.strategy
        if site not in strategy.withdrawn:
            before, contributed = run.total.sha256, sums.contributions_of(site)
            subtracted = sums.take_back(site)
            if not run.total.samples:
                raise StateError(f"{folder}: {site} is the only site; without it there is no model")
            by_task = {task: found["sha256"] for task, found in contributed.items()}
            strategy.withdrawn[site] = _withdrawal(run, before, subtracted, by_task)
        head, used = run.head(shrinkage)
        strategy.withdrawn[site] |= _of_model(head, used) | {"finished": run.model is not None}
        if run.model is None:
            run.commit_unfinished(head, used)
        else:
            run.commit(head)
        for path in (folder / FOLDER).glob(f"{site}-task-*.safetensors"):
            path.unlink()
        for path in (folder / VERSIONS).glob("*.safetensors"):
            path.unlink()
        return _write_certificate(folder, f"forget-{site}", _of_site(run, site))


def write_form(folder: Path, site: str, path: Path) -> Path:
    """Write what a site needs to know of a finished run to take records back; returns path.

    In it is the key that divided the site's data, which the site does not keep. Raises StateError where the
    site's sums are in no task.
    """
    run = OpenedRun.open(folder)
    if not run.strategy.kept_sums.contributions_of(site):
        raise StateError(f"site {site!r}: its sums are in no task of this run")
    progress = run.checkpoint.progress
    content = {"run": progress.run, "experiment": run.experiment.digest, "split_key": progress.split_key}
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode())
    return path


def forget_group(folder: Path, site: str, group: Path, shrinkage: float | None = None) -> Path:
    """Take a group of a site's records out of a finished run; otherwise as forget.

    group: what the site wrote with `perennial site withdraw-records`.
    """
    with sole_owner(folder, "forget"):
        run = OpenedRun.open(folder)
        run.require_features_of_nobody()
        sums, strategy = run.strategy.kept_sums, run.strategy
        by_task, facts = read_by_task(group)
        expected = {
            "run": run.checkpoint.progress.run,
            "experiment": run.experiment.digest,
            "site": site,
            "features": _features(run),
        }
        for key, value in expected.items():
            if facts.get(key) != value:
                raise StateError(f"{group}: {key}: found {facts.get(key)!r:.40}, allowed {value!r:.40}")
        sha256 = hashlib.sha256(group.read_bytes()).hexdigest()
        if sha256 not in strategy.groups:
            before, remaining = run.total.sha256, sums.without_group(site, by_task)
            subtracted = _added_up(by_task.values())
            sums.replace(site, remaining)
            if not run.total.samples:
                raise StateError(f"{folder}: nothing would be left, and without samples there is no model")
            parts = {task: part.sha256 for task, part in sorted(by_task.items())}
            strategy.groups[sha256] = _withdrawal(run, before, subtracted, parts)
        head, used = run.head(shrinkage)
        strategy.groups[sha256] |= _of_model(head, used) | {"finished": True, "site": site}
        run.commit(head, group=True)
        sums.keep_again(site, by_task)
        for path in (folder / VERSIONS).glob("*.safetensors"):
            path.unlink()
        return _write_certificate(folder, f"forget-{site}-group-{sha256[:12]}", _of_group(run, sha256))


def merge(first: Path, second: Path, output: Path) -> Path:
    """Make one model of the sums of two finished runs on disjoint data, in a folder of its own.

    Returns its certificate. Raises ConfigError if the runs' maps, classes or heads differ, or if a
    site is in both.
    """
    one, other = OpenedRun.open(first), OpenedRun.open(second)
    features = _features(one), _features(other)
    if features[0] != features[1]:
        raise ConfigError(f"{second}: its features are {features[1]:.12}, those of {first} {features[0]:.12}")
    if one.saved.classes != other.saved.classes:
        raise ConfigError(f"{second}: its classes, or their order, are not those of {first}")
    if one.experiment.strategy != other.experiment.strategy:
        raise ConfigError(f"{second}: its strategy's settings are not those of {first}")
    if one.experiment.bounds.share or one.experiment.bounds.registered:
        raise ConfigError(
            f"{first}: bounds.share, bounds.registered: what a site of a merged run counts for has not been "
            "worked out; allowed without them"
        )
    sites = [
        sorted({s for sites in run.strategy.kept_sums.contributions.values() for s in sites})
        for run in (one, other)
    ]
    if both := sorted(set(sites[0]) & set(sites[1])):
        raise ConfigError(
            f"{second}: {', '.join(both[:5])} took part in {first} too; its data would count twice"
        )
    hashes = one.total.sha256, other.total.sha256
    one.strategy.kept_sums.total = one.total + other.total
    head, used = one.head(None)
    make_folder(output)
    with sole_owner(output, "merge"):
        if (output / GLOBAL_MODEL).exists():
            raise StateError(f"{output}: holds a model already; choose another folder")
        write_statistics(output / FOLDER / "all.safetensors", one.total, {"sites": sites[0] + sites[1]})
        one.write_model(output / GLOBAL_MODEL, head)
        content = {
            "kind": "merge",
            "runs": [run.checkpoint.progress.run for run in (one, other)],
            "experiment": one.experiment.digest,
            "sites": sites,
            "sums_before": list(hashes),
            "sums_after": one.total.sha256,
            **_of_model(head, used),
        }
        return _write_certificate(output, "merge", content)


def verify(certificate: Path) -> list[str]:
    """What was found to hold, from the folder that the certificate lies in alone.

    A certificate of a withdrawal must say, field by field, what the run's own record says. The sums are added
    up again from what the folder keeps of every site, and the head is solved again. Later withdrawals do not
    void it. Nothing here is signed: who can change the whole folder can change the certificate with it.
    Raises StateError naming what does not hold.
    """
    try:
        content = json.loads(certificate.read_text())
        kind, after, model = content["kind"], content["sums_after"], content["model"]
        if kind == "merge":
            content["sites"] = [site for sites in content["sites"] for site in sites]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(f"{certificate}: no certificate ({error!r})") from error
    folder = certificate.absolute().parent.parent
    later, recorded = 0, dict[int, dict[str, Any]]()
    if kind != "merge":
        run = OpenedRun.open(folder)
        later = _require_recorded(certificate, content, run)
        recorded = {task: sites for task, sites in run.strategy.kept_sums.contributions.items() if sites}
        after, model = run.total.sha256, content_sha256(_heads(run.saved))
    saved = load_saved(folder / GLOBAL_MODEL)
    experiment = Experiment.model_validate(saved.settings)
    strategy = build_strategy(experiment.strategy.name, experiment.strategy.parameters).find(Analytic)
    if strategy is None:
        raise StateError(f"{folder}: its model is none of strategy analytic")
    if kind == "merge" and content.get("experiment") != experiment.digest:
        raise StateError(f"{certificate}: experiment: not the one that {GLOBAL_MODEL} says")
    files = sorted((folder / FOLDER).glob("*.safetensors"))
    sums = strategy.kept_sums
    sums.folder, strategy.bounds = folder / FOLDER, experiment.bounds
    total = _kept(files, content, sums)
    if total is None or total.sha256 != after:
        found = "none" if total is None else f"{total.sha256:.12}"
        raise StateError(f"{folder}: the sums kept add up to {found}, and should to {after:.12}")
    if sums.contributions != recorded:
        raise StateError(f"{folder}: the sums kept are not, site by site, those that the run's record says")
    sums.total = total
    shrinkage = float(content["shrinkage"]) if not later else _latest(folder)["shrinkage"]
    head, _ = strategy.solved_again(len(saved.classes), shrinkage)
    solved = head.tensors()
    now = {name: saved.model.state_dict()[name] for name in solved}
    if content_sha256(now) != model or (not later and model != content["model"]):
        raise StateError(f"{folder}: its model is another one than the certificate's, {content['model']:.12}")
    for name, tensor in solved.items():
        if not torch.allclose(tensor, now[name], rtol=0, atol=SAME_MODEL * float(tensor.abs().max())):
            raise StateError(f"{folder}: {name} is not what the sums give")
    held = [
        f"the sums of {len(files)} files add up to {after}",
        f"the model is the one that these sums give, {model}",
    ]
    if later:
        held.append(
            f"since then there were {later} more withdrawals; sums and model are those after the last"
        )
    if kind == "forget_group":
        held.append(
            f"some records of {content['site']} are out; their sums had SHA-256 {content['subtracted']}"
        )
    if kind == "forget":
        held.append(f"nothing of {content['site']} is kept; its sums had SHA-256 {content['subtracted']}")
    return held + [f"not undone: {text}" for text in content.get("not_undone", ())]


def _kept(files: list[Path], content: dict[str, Any], sums: KeptSums) -> Statistics | None:
    """The total of a folder's files, each noted in sums. Raises StateError for one that is wrong."""
    total = None
    for path in files:
        statistics, facts = read_statistics_file(path)
        if content["kind"] == "forget" and facts.get("site") == content["site"]:
            raise StateError(f"{path}: sums of {content['site']}, which were withdrawn, are still here")
        if content["kind"] == "merge" and facts.get("sites") != content["sites"]:
            raise StateError(f"{path}: sites: not those that the certificate says")
        total = statistics if total is None else total + statistics
        if "task" in facts:
            task, site = int(facts["task"]), str(facts["site"])
            if path.name != file_name(task, site):
                raise StateError(f"{path}: holds the sums of {site} in task {task}")
            given = {"sha256": statistics.sha256, "samples": statistics.samples}
            sums.contributions.setdefault(task, {})[site] = given
    return total


def _require_recorded(certificate: Path, content: dict[str, Any], run: OpenedRun) -> int:
    """How many withdrawals followed this one. Raises StateError unless the run's record says the same."""
    strategy = run.strategy
    if content["kind"] == "forget" and content.get("site") in strategy.withdrawn:
        expected = _of_site(run, content["site"])
    elif content["kind"] == "forget_group" and content.get("group") in strategy.groups:
        expected = _of_group(run, content["group"])
    else:
        raise StateError(f"{certificate}: the run's record has no such withdrawal")
    for key in sorted({*content, *expected}):
        if content.get(key) != expected.get(key):
            raise StateError(
                f"{certificate}: {key}: found {content.get(key)!r:.60}, the run's record says "
                f"{expected.get(key)!r:.60}"
            )
    if content["sums_before"] == content["sums_after"]:
        raise StateError(f"{certificate}: nothing was withdrawn")
    for path in (run.folder / VERSIONS).glob("*.safetensors"):
        if content["site"] in version_facts(path).get("sites", ()) and content["kind"] == "forget":
            raise StateError(f"{path}: a head that {content['site']} is in is still here")
    records = [*strategy.withdrawn.values(), *strategy.groups.values()]
    place, later = content["sums_after"], 0
    if not all(record["finished"] for record in records):
        # the run went on in between, and sums of other tasks came
        return sum(record["number"] > expected["number"] for record in records)
    while place != run.total.sha256:
        following = [record for record in records if record["sums_before"] == place]
        if len(following) != 1 or later > len(records):
            raise StateError(f"{certificate}: no withdrawals lead from its sums to those of the run")
        place, later = following[0]["sums_after"], later + 1
    return later


def _latest(folder: Path) -> dict[str, Any]:
    strategy = OpenedRun.open(folder).strategy
    records = [*strategy.withdrawn.values(), *strategy.groups.values()]
    return max(records, key=lambda record: record["number"])


def _heads(saved: SavedModel) -> dict[str, Tensor]:
    state = saved.model.state_dict()
    return {name: state[name] for name in ("head.weight", "head.bias")}


def _of_site(run: OpenedRun, site: str) -> dict[str, Any]:
    """The certificate of a withdrawn site, from the run's record."""
    return {"kind": "forget", **_of_run(run), "site": site, **run.strategy.withdrawn[site]} | {
        "not_undone": list(NOT_UNDONE)
    }


def _of_group(run: OpenedRun, sha256: str) -> dict[str, Any]:
    """The certificate of a withdrawn group, from the run's record."""
    return {"kind": "forget_group", **_of_run(run), "group": sha256, **run.strategy.groups[sha256]} | {
        "not_undone": [*NOT_UNDONE, "the group's own sums, which the site has sent for this"]
    }


def _of_run(run: OpenedRun) -> dict[str, Any]:
    return {"run": run.checkpoint.progress.run, "experiment": run.experiment.digest}


def _added_up(parts: Iterable[Statistics]) -> Statistics:
    total = None
    for part in parts:
        total = part if total is None else total + part
    if total is None:
        raise StateError("a group of no task; nothing is withdrawn")
    return total


def _withdrawal(
    run: OpenedRun, before: str, subtracted: Statistics, by_task: Mapping[int, str]
) -> dict[str, Any]:
    """What a certificate says of a subtraction.

    before: SHA-256 of the sums. by_task: SHA-256 of what each task lost.
    """
    former = [*run.strategy.withdrawn.values(), *run.strategy.groups.values()]
    return {
        "number": 1 + max((record["number"] for record in former), default=0),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "sums_before": before,
        "sums_after": run.total.sha256,
        "subtracted": subtracted.sha256,
        "by_task": {str(task): sha256 for task, sha256 in by_task.items()},
        "classes_removed": _classes_removed(run, subtracted),
    }


def _classes_removed(run: OpenedRun, subtracted: Statistics) -> list[str]:
    """Classes of what was subtracted of which no sample is left."""
    left = run.total.over(range(len(run.classes))).counts
    return [run.classes[label] for label in subtracted.classes if not int(left[label])]


def _features(run: OpenedRun) -> str:
    return json.loads((run.folder / "summary.json").read_text())["analytic"]["features"]


def _of_model(head: dict[str, Tensor], shrinkage: float) -> dict[str, Any]:
    return {"shrinkage": shrinkage, "model": content_sha256(head)}


def _write_certificate(folder: Path, name: str, content: dict[str, Any]) -> Path:
    make_folder(folder / CERTIFICATES, mode=0o755)
    path = folder / CERTIFICATES / f"{name}.json"
    replace_file(path, (json.dumps(content, indent=2) + "\n").encode(), mode=0o644)
    return path
