"""The sections that every report has, in the order of the page, with their charts."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from perennial.server.charts.curves import Curve, Curves, HeatMap, Span
from perennial.server.charts.frame import SHARES, Axis, build_task_axis, format_whole_percent
from perennial.server.metrics import compute_forgetting
from perennial.server.report.markup import (
    Markup,
    Picture,
    Section,
    build_bar,
    build_element,
    build_numbers_table,
    build_panel,
    build_table,
    escape,
    fold_content,
    format_count,
    format_decimal,
    format_percent,
    format_points,
    format_power,
    format_size,
    join,
)
from perennial.server.run_record import Claim, Epsilon, RoundEvent, Run, SiteSummary

UNMEASURED = (
    "A dash or an empty cell was not measured: the server held no test samples of those classes, and no site "
    "told what it counted on its own. Figures that would need it are missing too."
)


def report_accuracy(run: Run) -> Section:
    """The section on accuracy after each task, and on what was not measured."""
    cells = [value for row in run.summary.accuracy_matrix for value in row]
    parts: list[Picture | Markup] = []
    if any(value is not None for value in cells):
        parts = [draw_accuracy_matrix(run), draw_accuracy_over_tasks(run)]
    if any(event.accuracy is not None for event in run.rounds):
        chart = _plot_by_round(
            run, "accuracy", [event.accuracy for event in run.rounds], format_percent, SHARES
        )
        words = "On all classes so far. New classes of a task lower it, until they are learnt."
        parts.append(Picture("accuracy-by-round", "Accuracy in each round", words, chart, wide=True))
    if run.summary.tasks:
        parts.append(
            build_panel("Tasks", _build_tasks_table(run), "What each task brought, and what is left of it.")
        )
    return Section("Accuracy", parts, UNMEASURED if None in cells else "")


def _build_tasks_table(run: Run) -> Markup:
    matrix = run.summary.accuracy_matrix
    rows = []
    for index, (classes, row) in enumerate(zip(run.summary.tasks, matrix, strict=False)):
        learned, kept = row[index] if index < len(row) else None, matrix[-1][index]
        change = None if learned is None or kept is None else kept - learned
        rows.append(
            [
                index + 1,
                ", ".join(classes),
                format_percent(learned),
                format_percent(kept),
                format_points(change),
            ]
        )
    columns = ["task", "classes", "when learned", "at the end", "change (points)"]
    return build_table(columns, rows, "llrrr", "Classes of each task and how well they are known")


def draw_accuracy_matrix(run: Run) -> Picture:
    """Row t, column i: accuracy on task i after task t."""
    matrix = run.summary.accuracy_matrix
    count = len(matrix)
    tasks = [str(task) for task in range(1, count + 1)]
    padded = [[*row, *[None] * (count - len(row))] for row in matrix]
    digits = 1 if count <= 6 else 0
    texts = [["" if value is None else f"{100 * value:.{digits}f}" for value in row] for row in padded]
    return Picture(
        name="accuracy-matrix",
        title="Accuracy matrix",
        description="Each row is the model after one task, each column how well it knows one task's classes.",
        chart=HeatMap(
            [f"after {t}" for t in tasks],
            tasks,
            padded,
            texts,
            lambda after, task: (
                f"after {after + 1}: {format_percent(padded[after][task])} on task {task + 1}"
            ),
            largest=1.0,
            height=max(220, min(90 + 56 * count, 560)),
            titles=("accuracy (%) on the classes of task", ""),
        ),
        numbers=build_numbers_table(
            ["after task", *[f"task {t}" for t in tasks]],
            [[t, *map(format_percent, row)] for t, row in zip(tasks, padded, strict=True)],
            "Accuracy matrix",
        ),
    )


def trace_forgetting(matrix: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Forgetting after each task; None after the first, and where the matrix has holes."""
    return [compute_forgetting(matrix[:tasks]) for tasks in range(1, len(matrix) + 1)]


def _list_intervals(run: Run) -> list[tuple[float, float] | None]:
    """The 95 % intervals of what the sites told, noise included."""
    known = zip(run.summary.federated_accuracy, run.summary.federated_interval, strict=False)
    return [None if a is None or ends is None else (ends[0], ends[1]) for a, ends in known]


def draw_accuracy_over_tasks(run: Run) -> Picture:
    """Curves after each task: accuracy on all classes, on the newest task, at the sites, and forgetting."""
    matrix = run.summary.accuracy_matrix
    at_sites = "at the sites (noised)" if any(run.summary.federated_noise) else "at the sites"
    curves: dict[str, Sequence[float | None]] = {
        "all classes so far": run.summary.average_accuracy,
        "newest task": [row[-1] if row else None for row in matrix],
        at_sites: run.summary.federated_accuracy,
        "forgetting": trace_forgetting(matrix),
    }
    curves = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    tasks = list(range(1, len(matrix) + 1))
    courses = curves.values()
    lowest = min((value for values in courses for value in values if value is not None), default=0.0)
    return Picture(
        name="accuracy-over-tasks",
        title="Accuracy and forgetting over tasks",
        description="How much the model knows of everything so far and of the newest task, and how far "
        "earlier tasks have fallen from their best.",
        chart=Curves(
            [
                Curve(
                    name,
                    [*zip(tasks, values, strict=False)],
                    [format_percent(value) for value in values],
                    intervals=_list_intervals(run) if name == at_sites else (),
                )
                for name, values in curves.items()
            ],
            build_task_axis(len(tasks)),
            Axis(low=min(0.0, lowest) - 0.02, high=1.03, words=format_whole_percent),
            height=max(220, min(90 + 56 * len(tasks), 560)),
            together=True,
            place="after task",
        ),
        numbers=build_numbers_table(
            ["after task", *curves],
            [
                [t, *(format_percent(values[t - 1] if t <= len(values) else None) for values in courses)]
                for t in tasks
            ],
            "Accuracy and forgetting over tasks",
        ),
    )


def report_training(run: Run) -> Section | None:
    """The section on training: loss over rounds, and every round in numbers."""
    if not run.rounds:
        return None
    skipped = [str(event.round) for event in run.rounds if event.skipped]
    lead = ""
    if skipped:
        lead = (
            f"Skipped for too few valid updates, so that the model stayed as it was: "
            f"{'round' if len(skipped) == 1 else 'rounds'} {', '.join(skipped)}."
        )
    part: Picture | Markup = build_panel("Rounds", _build_rounds_table(run))
    losses = [event.train_loss for event in run.rounds]
    if any(loss is not None for loss in losses):
        chart = _plot_by_round(
            run, "training loss", losses, lambda loss: format_decimal(loss, 4), Axis(low=0.0)
        )
        words = "Mean over the sites that took part; new classes raise it at the start of a task."
        title = "Training loss in each round"
        part = Picture("train-loss", title, words, chart, wide=True, numbers=_build_rounds_table(run))
    return Section("Training", [part], lead)


def _mark_task_spans(rounds: Sequence[RoundEvent]) -> list[Span]:
    """Every other task is shaded, and each is named over the plot."""
    spans: dict[int, list[int]] = {}
    for event in rounds:
        spans.setdefault(event.task, []).append(event.round)
    words = ("task {}" if len(spans) <= 6 else "{}") if len(spans) <= 20 else ""
    return [
        Span(min(numbers) - 0.5, max(numbers) + 0.5, words.format(task), index % 2 == 0)
        for index, (task, numbers) in enumerate(spans.items())
    ]


def _plot_by_round(
    run: Run, name: str, values: Sequence[float | None], words: Callable[[float | None], str], up: Axis
) -> Curves:
    rounds = run.rounds
    curve = Curve(
        name,
        [(event.round, value) for event, value in zip(rounds, values, strict=True)],
        [f"round {event.round}: {words(value)}" for event, value in zip(rounds, values, strict=True)],
        dots=len(values) <= 60,
        bridged=True,
    )
    first, last = rounds[0].round - 0.5, rounds[-1].round + 0.5
    across = Axis("round", first, last, "{:.0f}".format, whole=True, grid=False)
    return Curves([curve], across, up, 300, _mark_task_spans(rounds))


def _build_rounds_table(run: Run) -> Markup:
    """The numbers behind every chart over rounds."""
    rows = [
        [
            event.round,
            event.task,
            len(event.participants),
            "skipped" if event.skipped else "",
            format_decimal(event.train_loss, 4),
            format_percent(event.accuracy),
            format_size(event.bytes_up),
            format_size(event.bytes_down),
            format_decimal(event.seconds),
        ]
        for event in run.rounds
    ]
    columns = ["round", "task", "sites", "", "training loss", "accuracy", "up", "down", "seconds"]
    numbers = build_table(columns, rows, "lrrlrrrrr", "Rounds")
    return fold_content(f"All {format_count(len(rows), 'round')} in numbers", numbers, len(rows))


def _list_site_names(run: Run) -> list[str]:
    """Sites of the summary, then those that only the journal names."""
    names = dict.fromkeys(run.summary.sites)
    for event in run.rounds:
        troubled = (entry.site for entry in (*event.dropped, *event.refused))
        names.update(dict.fromkeys((*event.participants, *event.absent, *troubled)))
    return list(names)


def report_sites(run: Run) -> Section | None:
    """The section on sites: who took part, who was away, and whose replies were not used and why."""
    names = _list_site_names(run)
    if not names:
        return None
    parts: list[Picture | Markup] = [build_panel("Participation", _build_sites_table(run, names), long=True)]
    faults = _list_faults(run)
    if faults:
        found = build_table(
            ["site", "what", "times", "rounds", "reason"], faults, "lllll", "Replies that were not used"
        )
        note = (
            "Dropped replies came too late, failed, or did not pass the server's checks; refusals are what "
            "sites declined to do under their own policy."
        )
        parts.append(build_panel("Replies not used", found, note, long=True))
    return Section("Sites", parts)


def _build_sites_table(run: Run, names: Sequence[str]) -> Markup:
    largest = max((site.samples for site in run.summary.sites.values()), default=0)
    total = sum(site.samples for site in run.summary.sites.values())
    absent = Counter(site for event in run.rounds for site in event.absent)
    present = Counter(site for event in run.rounds for site in event.participants)
    rows = []
    for name in names:
        # one that was withdrawn is in the journal alone
        site = run.summary.sites.get(name, SiteSummary(rounds=present[name]))
        rows.append(
            [
                name,
                build_bar(f"{site.samples:,}", site.samples / largest if largest else 0),
                format_percent(site.samples / total if total else None),
                build_bar(f"{site.rounds} of {run.summary.rounds}", site.rounds / max(run.summary.rounds, 1)),
                absent[name],
                site.rejected,
                site.refused,
            ]
        )
    columns = [
        "site",
        # with memory they are the newest task's and what is kept of earlier ones
        "samples in its last round",
        "share of these",
        "rounds taken part in",
        "absent",
        "rejected updates",
        "refusals",
    ]
    return build_table(columns, rows, "lrrrrrr", "Participation")


def _list_faults(run: Run) -> list[list[object]]:
    rounds: defaultdict[tuple[str, str, str], list[int]] = defaultdict(list)
    for event in run.rounds:
        for what, entries in (("dropped", event.dropped), ("refused", event.refused)):
            for entry in entries:
                rounds[entry.site, what, entry.reason].append(event.round)
    return [
        [site, what, len(numbers), _format_ranges(numbers), reason]
        for (site, what, reason), numbers in rounds.items()
    ]


def _format_ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as '1 to 4, 7'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def report_privacy(run: Run) -> Section:
    """The section on privacy: each site's epsilon with its unit, or the statement that there is none."""
    epsilon = run.summary.epsilon
    if epsilon is None:
        lead = (
            "No formal privacy: updates left the sites without differential privacy. Raw data stayed where "
            "it was, but what an update reveals about it is not bounded."
        )
        return Section("Privacy", [], lead)
    if epsilon.value is None:
        lead = "No formal privacy: updates were clipped, but no noise was added, so epsilon is infinite."
    else:
        lead = (
            f"At the site that has spent most, the privacy loss for one {epsilon.unit} is "
            f"ε = {format_decimal(epsilon.value)} at δ = {format_power(epsilon.delta)} "
            f"({epsilon.accountant} accountant)."
        )
    parts: list[Picture | Markup] = [_build_epsilon_table(epsilon)] if len(epsilon.per_site) > 1 else []
    if epsilon.claim is not None:
        parts.append(build_panel("What is claimed", _build_claim_table(epsilon, epsilon.claim)))
    return Section("Privacy", parts, lead)


def _build_epsilon_table(epsilon: Epsilon) -> Markup:
    known = [value for value in epsilon.per_site.values() if value is not None]
    largest = max(known, default=0.0)
    rows = [
        [site, "infinite" if value is None else build_bar(format_decimal(value), value / (largest or 1.0))]
        for site, value in epsilon.per_site.items()
    ]
    note = f"Epsilon for one {epsilon.unit}, δ = {format_power(epsilon.delta)}; smaller is more private."
    body = build_table(["site", "ε"], rows, "lr", "Epsilon of each site")
    return build_panel("Privacy loss at each site", body, note, long=True)


def _build_claim_table(epsilon: Epsilon, claim: Claim) -> Markup:
    """The claim as a table: every word of it, and what it leaves open."""
    rows = [
        ["hides", f"{claim.unit} ({claim.relation})"],
        ["from", claim.adversary],
        ["by", claim.mechanism],
    ]
    if epsilon.bayesian is not None:
        rows.append(
            [
                "typical record",
                f"ε = {format_decimal(epsilon.bayesian)} (Bayesian: {claim.bayesian_relation}; outliers are "
                "not covered, and it does not compare with the figure above)",
            ]
        )
    rows += [["not covered", item] for item in claim.not_covered]
    rows += [["warning", item] for item in claim.warnings]
    return build_element("div", build_table(["", ""], rows, "ll", "The privacy claim"), "facts-table")


def report_origin(run: Run) -> Section:
    """The section on repeating the run: experiment, versions, model hash, and the journal's notes."""
    code = build_element("pre", build_element("code", run.experiment_text))
    parts: list[Picture | Markup] = []
    if run.notes:
        items = join([build_element("li", note) for note in run.notes])
        parts.append(build_panel("Notes of the journal", build_element("ul", items, "journal"), long=True))
    parts.append(
        build_panel("experiment.yaml", code, "Every setting of this run, defaults written out.", long=True)
    )
    facts = [["model's tensors, SHA-256", build_element("code", run.summary.model_sha256)]]
    if run.summary.model_file_sha256 is not None:
        facts.append(["model.safetensors, SHA-256", build_element("code", run.summary.model_file_sha256)])
    facts += [[name, escape(version)] for name, version in run.summary.versions.items()]
    note = (
        "The first hash is of the numbers alone: equal for two runs whose models are the same bit for bit. "
        "The second is of the file, as sha256sum shows it; the file also holds class names and settings."
    )
    parts.append(build_panel("Versions", build_table(["what", "version"], facts, "ll", "Versions"), note))
    return Section("Experiment", parts)
