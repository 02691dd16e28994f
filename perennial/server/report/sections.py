"""The sections that every report has, in the order of the page."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from perennial.server.report.markup import (
    Markup,
    Picture,
    Section,
    bar,
    decimal,
    element,
    escape,
    join,
    percent,
    points,
    power,
    table,
)
from perennial.server.report.round_figures import (
    accuracy_by_round,
    participation,
    rounds_table,
    time_by_round,
    traffic,
    train_loss,
)
from perennial.server.report.task_figures import accuracy_matrix, accuracy_over_tasks, epsilon_by_site
from perennial.server.run_record import Claim, Epsilon, Run, SiteSummary

UNMEASURED = (
    "A dash or an empty cell was not measured: the server held no test samples of those classes, and no site "
    "told what it counted on its own. Figures that would need it are missing too."
)


def panel(title: str, content: Markup, note: str = "", long: bool = False) -> Markup:
    """A part of the page with a small heading. long: whether it may break across printed pages."""
    head = element("h3", title) + (element("p", note) if note else "")
    return element("div", Markup(head + content), "panel long" if long else "panel")


def accuracy(run: Run) -> Section:
    """The section on accuracy after each task, and on what was not measured."""
    cells = [value for row in run.summary.accuracy_matrix for value in row]
    parts: list[Picture | Markup] = []
    if any(value is not None for value in cells):
        parts = [accuracy_matrix(run), accuracy_over_tasks(run)]
    if any(event.accuracy is not None for event in run.rounds):
        parts.append(accuracy_by_round(run))
    if run.summary.tasks:
        parts.append(panel("Tasks", _tasks_table(run), "What each task brought, and what is left of it."))
    return Section("Accuracy", parts, UNMEASURED if None in cells else "")


def _tasks_table(run: Run) -> Markup:
    matrix = run.summary.accuracy_matrix
    rows = []
    for index, (classes, row) in enumerate(zip(run.summary.tasks, matrix, strict=False)):
        learned, kept = row[index] if index < len(row) else None, matrix[-1][index]
        change = None if learned is None or kept is None else kept - learned
        rows.append([index + 1, ", ".join(classes), percent(learned), percent(kept), points(change)])
    columns = ["task", "classes", "when learned", "at the end", "change (points)"]
    return table(columns, rows, "llrrr", "Classes of each task and how well they are known")


def training(run: Run) -> Section | None:
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
    if any(event.train_loss is not None for event in run.rounds):
        part = replace(train_loss(run), numbers=rounds_table(run))
    else:
        part = panel("Rounds", rounds_table(run))
    return Section("Training", [part], lead)


def _site_names(run: Run) -> list[str]:
    """Sites of the summary, then those that only the journal names."""
    names = dict.fromkeys(run.summary.sites)
    for event in run.rounds:
        troubled = (entry.site for entry in (*event.dropped, *event.refused))
        names.update(dict.fromkeys((*event.participants, *event.absent, *troubled)))
    return list(names)


def sites(run: Run) -> Section | None:
    """The section on sites: who took part, who was away, and whose replies were not used and why."""
    names = _site_names(run)
    if not names:
        return None
    parts: list[Picture | Markup] = []
    if run.rounds:
        parts.append(participation(run, names))
    parts.append(panel("Contribution of each site", _sites_table(run, names)))
    dropped = [(event, entry) for event in run.rounds for entry in event.dropped]
    if dropped:
        rows = [[event.round, event.task, entry.site, entry.reason] for event, entry in dropped]
        numbers = table(["round", "task", "site", "reason"], rows, "llll", "Dropped replies")
        note = (
            "Replies that came too late, failed, or did not pass the server's checks; none reached the model."
        )
        parts.append(panel("Dropped replies", numbers, note, long=True))
    refusals = _refusals(run)
    if refusals:
        numbers = table(["site", "times", "rounds", "reason"], refusals, "llll", "Refusals")
        parts.append(
            panel("Refusals", numbers, "What sites declined to do under their own policy.", long=True)
        )
    return Section("Sites", parts)


def _sites_table(run: Run, names: Sequence[str]) -> Markup:
    largest = max((site.samples for site in run.summary.sites.values()), default=0)
    total = sum(site.samples for site in run.summary.sites.values())
    absent = Counter(site for event in run.rounds for site in event.absent)
    rows = []
    for name in names:
        site = run.summary.sites.get(name, SiteSummary())
        rows.append(
            [
                name,
                bar(f"{site.samples:,}", site.samples / largest if largest else 0),
                percent(site.samples / total if total else None),
                bar(f"{site.rounds} of {run.summary.rounds}", site.rounds / max(run.summary.rounds, 1)),
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
    return table(columns, rows, "lrrrrrr", "Contribution of each site")


def _refusals(run: Run) -> list[list[object]]:
    rounds: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for event in run.rounds:
        for entry in event.refused:
            rounds[entry.site, entry.reason].append(event.round)
    return [[site, len(numbers), _ranges(numbers), reason] for (site, reason), numbers in rounds.items()]


def _ranges(numbers: Sequence[int]) -> str:
    """Rising numbers as '1 to 4, 7'."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in spans)


def privacy(run: Run) -> Section:
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
            f"ε = {decimal(epsilon.value)} at δ = {power(epsilon.delta)} ({epsilon.accountant} accountant)."
        )
    parts: list[Picture | Markup] = [epsilon_by_site(epsilon)] if epsilon.per_site else []
    if epsilon.claim is not None:
        parts.append(panel("What is claimed", _claim(epsilon, epsilon.claim)))
    return Section("Privacy", parts, lead)


def _claim(epsilon: Epsilon, claim: Claim) -> Markup:
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
                f"ε = {decimal(epsilon.bayesian)} (Bayesian: {claim.bayesian_relation}; outliers are not "
                "covered, and it does not compare with the figure above)",
            ]
        )
    rows += [["not covered", item] for item in claim.not_covered]
    rows += [["warning", item] for item in claim.warnings]
    return element("div", table(["", ""], rows, "ll", "The privacy claim"), "facts-table")


def cost(run: Run) -> Section | None:
    """The section on the bytes and seconds of each round."""
    if not run.rounds:
        return None
    return Section("Traffic and time", [traffic(run), time_by_round(run)])


def origin(run: Run) -> Section:
    """The section on repeating the run: experiment, versions, model hash, and the journal's notes."""
    code = element("pre", element("code", run.experiment_text))
    parts: list[Picture | Markup] = []
    if run.notes:
        items = join([element("li", note) for note in run.notes])
        parts.append(panel("Notes of the journal", element("ul", items, "journal"), long=True))
    parts.append(
        panel("experiment.yaml", code, "Every setting of this run, defaults written out.", long=True)
    )
    facts = [["model's tensors, SHA-256", element("code", run.summary.model_sha256)]]
    if run.summary.model_file_sha256 is not None:
        facts.append(["model.safetensors, SHA-256", element("code", run.summary.model_file_sha256)])
    facts += [[name, escape(version)] for name, version in run.summary.versions.items()]
    note = (
        "The first hash is of the numbers alone: equal for two runs whose models are the same bit for bit. "
        "The second is of the file, as sha256sum shows it; the file also holds class names and settings."
    )
    parts.append(panel("Versions", table(["what", "version"], facts, "ll", "Versions"), note))
    return Section("Experiment", parts)
