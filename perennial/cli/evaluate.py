"""perennial evaluate."""

import hashlib
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perennial.foundation.errors import ConfigError, DataError

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from perennial.server.external import Outside
    from perennial.server.measures.record import Measures
    from perennial.server.new_model_gate import Verdict

OWN_DATA = (
    "These are data of the run itself, and no notes say which of them the model has learnt from: on new "
    "patients it is worse than these figures."
)
MOST_NAMED = 3


def evaluate(
    run: Annotated[Path, typer.Argument(help="run folder")],
    data: Annotated[Path, typer.Argument(help="labelled data: a folder, CSV table, manifest or .npz file")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE of a data block, e.g. label_column=diagnosis")
    ] = None,
    site: Annotated[str, typer.Option(help="of a simulated run: use this site's own model")] = "",
    output: Annotated[
        Path | None, typer.Option(help="folder; default: RUN/evaluations/NAME of the data")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(help="run folder of the approved model, than which RUN may not be worse")
    ] = None,
    margin: Annotated[
        list[str] | None,
        typer.Option(help="how much worse, as a share: 0.05, and NAME=0.2 for a class, site or subgroup"),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="state folder of a site: what it gave to any run is left out")
    ] = None,
    prevalence: Annotated[
        list[str] | None,
        typer.Option(help="NAME=SHARE: predictive values where a class is so frequent; may be given again"),
    ] = None,
) -> None:
    """Measure a finished model on other labelled data; with --against it must be as good as another one.

    Writes measures.json and report.html. Where the model is not shown to be as good, the exit status is 1.
    """
    from rich.console import Console

    from perennial.foundation.files import hash_file
    from perennial.models.saved import find_model_file, load_saved
    from perennial.server.external import Outside, build_data_config, judge, write_evaluation
    from perennial.server.measures.headline import describe_prevalence, read_shares
    from perennial.server.new_model_gate import note_verdict
    from perennial.server.report.card import CARD

    if (against is None) != (margin is None):
        raise ConfigError("evaluate: --against and --margin belong together, and one is missing")
    overrides, margins = overrides or [], margin or []
    console = Console(highlight=False, markup=False)
    path = find_model_file(run, site)
    saved = load_saved(path)
    outside = Outside.read(saved, build_data_config(saved, data, overrides), str(data))
    folders = [(run, saved.settings["seed"]), *([] if state is None else [(state, 0)])]
    other = None
    if against is not None:
        approved = load_saved(find_model_file(against, ""))
        if lost := [name for name in approved.classes if name not in saved.classes]:
            raise ConfigError(f"{path}: knows no {', '.join(lost)}, which the approved model knows")
        config = build_data_config(approved, data, overrides, saved.classes)
        other = Outside.read(approved, config, str(data))
        _require_same(outside, other, data)
        folders.append((against, approved.settings["seed"]))
    unseen, said = _find_unseen(outside, folders)
    outside = outside.pick(unseen)
    scored, verdict, sentence = None, None, ""
    if against is not None and other is not None:
        scored = outside.scored()
        right = scored.label == scored.predicted
        verdict = _judge(console, outside, other.pick(unseen), right, margins)
        models = path, find_model_file(against, "")
        sentence = _describe_verdict(verdict, models, site, len(outside.samples), data, margins, said)
    measures = judge(outside, scored)
    own = run / "evaluations" / _make_name(data.absolute(), site)
    worth = describe_prevalence(measures, read_shares(prevalence or [], saved.classes))
    strange = outside.list_strange_columns()
    first = [sentence] if sentence else said
    told = {"headline": [*first, *measures.headline], "notes": [*measures.notes, *worth, *strange]}
    measures = measures.model_copy(update={**told, "model_file_sha256": hash_file(path)})
    _show(console, measures)
    for text in (*worth, *strange):
        console.print(text, soft_wrap=True)
    name = saved.settings["name"] + (f", site {site}" if site else "")
    console.print(f"report: {write_evaluation(output or own, measures, name, data.name)}", soft_wrap=True)
    if verdict is not None:
        # also with --output: the card has every verdict
        note_verdict(run, own, sentence, run / CARD)
        console.print(f"card: {run / CARD}", soft_wrap=True)
        if not verdict.passes:
            raise typer.Exit(1)


def _make_name(data: Path, site: str) -> str:
    """The folder of an evaluation: that of other data of this name, or of another model, stays as it is."""
    path = hashlib.sha256(os.fsencode(data)).hexdigest()[:8]
    return "-".join(filter(None, [data.stem, site, path]))


def _show(console: "Console", measures: "Measures") -> None:
    from rich.table import Table

    for sentence in measures.headline:
        console.print(sentence, soft_wrap=True)
    table = Table()
    table.add_column("class")
    for column in ("samples", "sensitivity", "specificity", "AUROC"):
        table.add_column(column, justify="right")
    for each in measures.classes:
        figures = (each.sensitivity, each.specificity, each.auroc)
        shown = ["-" if figure.value is None else f"{figure.value:.3f}" for figure in figures]
        table.add_row(each.name, str(each.samples), *shown)
    console.print(table)


def _require_same(one: "Outside", other: "Outside", data: Path) -> None:
    """Raises DataError where two models do not read the same records, in the same order."""
    same = len(one.samples) == len(other.samples) and bool((one.samples.y == other.samples.y).all())
    if not same or one.samples.keys != other.samples.keys:
        raise DataError(
            f"{data}: the two models read {len(one.samples)} and {len(other.samples)} records of it, not "
            "the same ones; take out what one of them cannot read"
        )


def _judge(
    console: "Console", outside: "Outside", other: "Outside", right: "np.ndarray", margins: Sequence[str]
) -> "Verdict":
    """What the gate says, after margins and counts were printed, which no answer has a part in."""
    import numpy as np

    from perennial.server.new_model_gate import Kind, Verdict, compare, estimate_records_needed, read_margins

    samples, classes, before = outside.samples, outside.saved.classes, other.saved.classes
    labels = samples.y.numpy()
    groups: list[tuple[Kind, str, np.ndarray]] = [
        ("class", name, labels == label) for label, name in enumerate(classes) if name in before
    ]
    compared = np.isin(labels, [classes.index(name) for name in before])
    if samples.site is not None:
        site = samples.site.numpy()
        groups.extend(("site", n, compared & (site == i)) for i, n in enumerate(samples.site_names))
    if outside.config.subgroup is not None and samples.subgroup is not None:
        values = outside.config.subgroup.values
        groups.extend(("subgroup", str(n), compared & (samples.subgroup == i)) for i, n in enumerate(values))
    groups = [each for each in groups if each[0] == "class" or each[2].any()]
    found = read_margins(margins, [name for _, name, _ in groups])
    stated = ", ".join(f"{name or 'all parts'} {100 * margin:g}" for name, margin in found.items())
    console.print(f"margins in points: {stated}; said before any answer is looked at", soft_wrap=True)
    for kind, name, members in groups:
        fewest, usual = estimate_records_needed(found.get(name, found[""]))
        console.print(
            f"  {kind} {name}: {int(members.sum())} records; its margin needs at least {fewest}, and about "
            f"{usual} where two equally good models differ on a tenth of the records",
            soft_wrap=True,
        )
    scored = other.scored()
    approved = np.array([classes.index(name) for name in before])[scored.predicted] == labels
    parts = compare((approved, right), groups, found, outside.patients())
    for part in parts:
        console.print(f"  {'as good' if part.passes else 'NOT shown to be as good'}: {part}", soft_wrap=True)
    return Verdict(parts, tuple(name for name in classes if name not in before))


def _describe_verdict(
    verdict: "Verdict",
    paths: tuple[Path, Path],
    site: str,
    samples: int,
    data: Path,
    margins: Sequence[str],
    said: Sequence[str],
) -> str:
    """The verdict in words."""
    from perennial.foundation.files import hash_file

    model, approved = (hash_file(path)[:16] for path in paths)
    model += f" of site {site}" if site else ""
    text = (
        f"{datetime.now(UTC):%Y-%m-%d}, {'PASSED' if verdict.passes else 'REFUSED'}: model {model} against "
        f"the approved {approved} on {samples} records of {data.name!r}, margins {', '.join(margins)}."
    )
    if verdict.failing:
        text += f" Not shown to be as good: {'; '.join(map(str, verdict.failing))}."
    if verdict.new:
        text += f" Classes that the approved model does not know are not compared: {', '.join(verdict.new)}."
    return " ".join([text, *said])


def _find_unseen(outside: "Outside", folders: Sequence[tuple[Path, int]]) -> "tuple[np.ndarray, list[str]]":
    """((n,) bool of the records that no run is known to have learnt from or chosen by, what to say of it).

    folders: of runs with their seeds, and of a site's state. Raises DataError where no record is left.
    """
    import numpy as np

    from perennial.client.learnt import PARTS, hash_contents, read_noted
    from perennial.data.splits import derive_simulation_key
    from perennial.foundation.record_key import FOLDER, KEY, record_key

    seen, known = np.zeros(len(outside.samples), dtype=bool), False
    contents = outside.hash_contents()
    for folder, seed in folders:
        if (folder / FOLDER / KEY).exists():
            key, runs = record_key(folder), sorted(folder.glob("runs/*"))
        elif runs := sorted(folder.glob("sites/*/runs/*")):
            key = derive_simulation_key(seed)
        else:
            continue
        noted = read_noted(runs)
        noted = noted.pick(noted.part != PARTS.index("test"))
        known |= len(noted) > 0
        for each in contents:
            seen |= np.isin(hash_contents(key, "content", each), noted.content)
        if outside.samples.patients:
            seen |= np.isin(hash_contents(key, "patient", outside.samples.split_groups()), noted.patient)
    if seen.all():
        raise DataError(
            f"{outside.config.path}: a model has learnt from each of these {len(seen)} records or was chosen "
            "by it; give records of patients who took no part"
        )
    if seen.any():
        first = ", ".join(outside.where(row) for row in np.flatnonzero(seen)[:MOST_NAMED].tolist())
        return ~seen, [
            f"{int(seen.sum())} records are left out, which a model has learnt from or was chosen by: {first}"
            + (", ..." if seen.sum() > MOST_NAMED else "")
        ]
    if not known and outside.own:
        return ~seen, [OWN_DATA]
    return ~seen, [] if known else ["Which records the models have learnt from is not known here."]
