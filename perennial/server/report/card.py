"""card.md: the model card of a run (Mitchell et al. 2019, arXiv 1810.03993), from what the run recorded."""

from pathlib import Path

from perennial.config.strategies import find_asks, list_nested
from perennial.foundation.errors import StateError
from perennial.foundation.files import hash_file, replace_file
from perennial.learning.evaluation_tables import SCORE_BINS
from perennial.models.saved import GLOBAL_MODEL, SavedModel, load_saved
from perennial.server.measures.headline import SELDOM
from perennial.server.measures.record import FILE, Figure, Measures, PredictionSets, read_measures
from perennial.server.new_model_gate import write_verdicts
from perennial.server.report.comparison import build_markdown_table
from perennial.server.report.markup import MISSING, format_decimal, format_power
from perennial.server.report.recognition import SET_COLUMNS, explain_always_in_sets, explain_brackets
from perennial.server.run_record import Run, read_run

CARD = "card.md"
MOST_SITES = 50
EVALUATIONS = f"evaluations/*/{FILE}"
TABLES = (
    "exact tables of held-out, validation and calibration samples (how many of each class were called which, "
    f"and how many got a probability in each of {SCORE_BINS} steps)"
)
NOT_STATED = (
    "Nobody has stated what this model is for (`perennial card RUN --intended-use FILE` puts it here). Until "
    "somebody who answers for it does, it is for research."
)


def write_card(folder: Path, intended_use: Path | None = None) -> Path:
    """Write card.md into a run folder; returns its path.

    intended_use: a Markdown text by whoever answers for the model. Raises StateError naming what is missing.
    """
    run, saved = read_run(folder), load_saved(folder / GLOBAL_MODEL)
    try:
        use = NOT_STATED if intended_use is None else intended_use.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise StateError(f"{intended_use}: cannot be read as text ({error})") from error
    parts = [
        f"# {_escape_text(run.summary.experiment)}: model card",
        *filter(None, [_escape_text(run.withdrawn), write_verdicts(folder)]),
        _describe_model(run, saved),
        "## Intended use\n\n" + use,
        "## Data\n\n" + _describe_data(run),
        "## How well it works\n\n" + _describe_performance(run),
        *(
            ["## Judged outside the federation\n\n" + judged]
            if (judged := _describe_evaluations(folder))
            else []
        ),
        "## Privacy\n\n" + _describe_privacy(run, saved),
        "## Limits\n\n" + _describe_limits(run, saved, folder),
        "## What it is\n\n" + _list_hashes(run, folder),
    ]
    path = folder / CARD
    replace_file(path, ("\n\n".join(parts) + "\n").encode(errors="replace"), mode=0o644)
    return path


def _describe_model(run: Run, saved: SavedModel) -> str:
    model, inputs = saved.settings["model"], saved.inputs
    if len(inputs.shape) == 3:
        channels, height, width = inputs.shape
        kind = "grey" if channels == 1 else "colour"
        takes = f"{kind} images of {height} x {width} pixels"
    else:
        takes = f"rows of {len(inputs.columns or ()) or inputs.shape[0]} columns"
        if inputs.columns:
            takes += f" ({', '.join(map(_escape_text, inputs.columns))})"
    names = ", ".join(map(_escape_text, saved.classes))
    started = "" if run.started is None else f" on {run.started:%d %B %Y}"
    return (
        f"A classifier ({model['name']}) of {takes} into {len(saved.classes)} classes: {names}. Trained by "
        f"{len(run.summary.sites)} sites in {len(run.summary.tasks)} tasks and {run.summary.rounds} "
        f"rounds{started}, strategy {saved.settings['strategy']['name']}; no site's samples left it."
    )


def _describe_data(run: Run) -> str:
    sites = run.summary.sites
    ranked = sorted(sites.items(), key=lambda site: -site[1].samples)
    told = run.measures.sites if run.measures is not None else {}
    rows = [
        [
            name,
            f"{site.samples:,}" if site.samples else MISSING,
            f"{site.rounds} of {run.summary.rounds}",
            f"{told[name].samples:,}" if name in told else MISSING,
            _format_percent(told[name].accuracy) if name in told else MISSING,
        ]
        for name, site in ranked[:MOST_SITES]
    ]
    columns = ["site", "training samples", "rounds", "judged samples", "classified correctly"]
    text = build_markdown_table(columns, rows, "lrrrr", _escape_text)
    if len(ranked) > MOST_SITES:
        text += f"\n\nThese are {MOST_SITES} of {len(ranked):,} sites, those with most samples."
    note = "Training samples are those of the last round; under a protection their number is not told."
    return f"{text}\n\n{note}"


def _describe_performance(run: Run) -> str:
    measures = run.measures
    if measures is None:
        if run.summary.final_accuracy is None:
            return "Nobody measured this model."
        return "Nobody measured more than the share of right answers; see report.html."
    rows = [
        [
            each.name,
            f"{each.samples:,}",
            _format_percent(each.sensitivity),
            _format_percent(each.specificity),
            _format_percent(each.positive_predictive_value),
            _format_percent(each.negative_predictive_value),
            _share(each.auroc),
            _share(each.auprc),
        ]
        for each in measures.classes
    ]
    columns = ["class", "samples", "sensitivity", "specificity", "PPV", "NPV", "AUROC", "AUPRC"]
    source = {
        "server": "the server's test samples",
        "sites": "samples that sites held out",
        "external": "other data",
    }
    lines = [
        _escape_text(" ".join(measures.headline)),
        f"Judged on {measures.samples:,} samples: {source[measures.source]}. {explain_brackets(measures)}",
        build_markdown_table(columns, rows, "lrrrrrrr", _escape_text),
        f"Balanced accuracy {_format_percent(measures.balanced_accuracy)}.",
    ]
    calibration = measures.calibration
    if calibration.error.value is not None:
        text = f"Calibration error {_format_percent(calibration.error)}"
        if calibration.scaled_error.value is not None:
            scaled = _format_percent(calibration.scaled_error)
            text += f", and {scaled} with temperature {format_decimal(calibration.temperature)}"
        lines.append(text + ".")
    if (sets := measures.prediction_sets) is not None:
        void = f" Not guaranteed: {sets.void}." if sets.void else ""
        always = explain_always_in_sets(sets)
        lines.append(
            f"Prediction sets with coverage {100 * sets.coverage:.0f} % for each known class.{void}"
            + (f" {_escape_text(always)}" if always else "")
        )
        lines.append(build_markdown_table(SET_COLUMNS, _set_rows(sets), "lrrr", _escape_text))
    return "\n\n".join(lines)


def _read_evaluations(folder: Path) -> list[tuple[str, Measures]]:
    """(folder's name, measures) of each evaluation of a run's model; not of a site's own, or a former one."""
    model = hash_file(folder / GLOBAL_MODEL)
    found = [(path.parent.name, read_measures(path.parent)) for path in sorted(folder.glob(EVALUATIONS))]
    return [(name, measures) for name, measures in found if measures and measures.model_file_sha256 == model]


def _set_rows(sets: PredictionSets) -> list[list[str]]:
    return [
        [
            name,
            f"{100 * each.probability:.1f} %" if each.informative else "always",
            MISSING if each.samples is None else f"{each.samples:,}",
            _format_percent(each.covered),
        ]
        for name, each in sets.thresholds.items()
    ]


def _describe_evaluations(folder: Path) -> str:
    rows = [
        [
            name,
            f"{each.samples:,}",
            _format_percent(each.accuracy),
            _format_percent(each.balanced_accuracy),
            _share(each.macro_auroc),
        ]
        for name, each in _read_evaluations(folder)
    ]
    columns = ["data", "samples", "classified correctly", "balanced accuracy", "mean AUROC"]
    return build_markdown_table(columns, rows, "lrrrr", _escape_text) if rows else ""


def _describe_privacy(run: Run, saved: SavedModel) -> str:
    """What the approved experiment lets leave a site, and whether noise covers it; then the exact claim."""
    settings, epsilon = saved.settings, run.summary.epsilon
    keys = {key: value for key, value in settings["strategy"].items() if key != "name"}
    asks = [find_asks(*each) for each in list_nested(settings["strategy"]["name"], keys)]
    rounds = f"in each of {run.summary.rounds} rounds"
    sent = f"updates of the model, computed from its training samples, {rounds}"
    if any(each.statistics for each in asks):
        sent = "sums of fixed features of its training samples and of their products, once for each task"
    more = [name for each in asks for name in each.clear_uploads]
    told = [name.replace("_", " ") for name in more]
    told += ["feature summaries"] * bool(settings.get("digests"))
    evaluation = settings.get("evaluation", {})
    if evaluation.get("federated"):
        told.append("counts of right answers")
        # as config.evaluation.asks_for_tables, of settings that another release may have written
        if evaluation.get("measures") and evaluation.get("noise_multiplier") is None:
            told.append(TABLES)
    if told:
        sent += f", with {' and '.join(told)}"
    records = "images" if len(saved.inputs.shape) == 3 else "rows"
    masks = bool((settings.get("secure") or {}).get("masks"))
    covered = epsilon is not None and epsilon.value is not None and epsilon.claim is not None
    noise = "No noise covers this; epsilon is infinite."
    if covered:
        noise = "Noise covers it, as the claim below says."
    elif epsilon is not None:
        noise = "Updates were clipped, but no noise covers them: epsilon is infinite."
    end = f"A server that breaks the protocol can recover single {records} from it."
    if covered:
        end = "Whatever the claim names as not covered leaves without noise."
    elif masks:
        end = f"Masks hide all but the sum from an honest server; another can recover single {records}."
    lines = [f"By the approved experiment each site sends {sent}. {noise} {end}"]
    if covered and epsilon is not None and epsilon.claim is not None:
        claim = epsilon.claim
        lines += [
            "",
            f"Epsilon {format_decimal(epsilon.value)} at delta {format_power(epsilon.delta)} for one "
            f"{epsilon.unit}, at "
            f"the site that has spent most. Hides {claim.unit} ({claim.relation}) from {claim.adversary}, by "
            f"{claim.mechanism}.",
        ]
        lines += [f"- not covered: {item}" for item in claim.not_covered]
        lines += [f"- warning: {item}" for item in claim.warnings]
    return "\n".join(lines)


def _describe_limits(run: Run, saved: SavedModel, folder: Path) -> str:
    said = ", unless its prediction set is empty."
    if saved.confidence.thresholds is None:
        said = "; there are no prediction sets that could say so."
    items = [
        "It knows the classes above and no other. A sample of another class gets one of them all the same"
        + said,
        "The figures hold for patients like those of these sites. Judge it on your own before use: "
        "`perennial evaluate RUN DATA`.",
    ]
    measures = run.measures
    if measures is not None:
        items += map(_escape_text, measures.headline[:-1])
        weak = [each for each in measures.classes if (each.sensitivity.value or 0) < SELDOM]
        if not weak and not measures.headline[:-1]:
            items.append("No class is recognised in less than half of its cases on the judged samples.")
        items += map(_escape_text, measures.notes)
    if not _read_evaluations(folder):
        items.append("It was not judged on data from outside the federation.")
    return "\n".join(f"- {item}" for item in items)


def _list_hashes(run: Run, folder: Path) -> str:
    rows = [
        ["model.safetensors, SHA-256", hash_file(folder / GLOBAL_MODEL)],
        ["the model's tensors, SHA-256", run.summary.model_sha256],
        ["experiment.yaml, SHA-256", hash_file(folder / "experiment.yaml")],
        ["seed", str(run.summary.seed)],
        *([name, version] for name, version in run.summary.versions.items()),
    ]
    return build_markdown_table(["", ""], rows, "ll", _escape_text)


def _format_percent(figure: Figure) -> str:
    return (
        MISSING if figure.value is None else f"{100 * figure.value:.0f} % {figure.interval(100, 0)}".rstrip()
    )


def _share(figure: Figure) -> str:
    if figure.value is None:
        return MISSING
    return f"{figure.value:.2f} {figure.interval(1, 2)}".rstrip()


def _escape_text(text: str) -> str:
    """Text from other institutions on one line, without meaning to Markdown or HTML."""
    line = " ".join(str(text).split())
    for sign in "\\`*_[]<>#|":
        line = line.replace(sign, "&lt;" if sign == "<" else f"\\{sign}")
    return line
