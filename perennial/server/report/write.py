"""report.html: the results of a run on one page that can be read anywhere, offline.

It knows only the files of the run folder, so that it can be written again at any time, on any machine.
"""

from pathlib import Path
from statistics import median

from perennial.foundation.files import replace_file
from perennial.server.faults import Fault, grouped, of_summary
from perennial.server.report.markup import (
    MISSING,
    THIN_SPACE,
    Markup,
    Section,
    decimal,
    duration,
    element,
    escape,
    join,
    percent,
    plural,
    power,
    size,
)
from perennial.server.report.method_blocks import BLOCKS, section_of
from perennial.server.report.page import page
from perennial.server.report.recognition import recognition
from perennial.server.report.sections import accuracy, origin, privacy, sites, training
from perennial.server.run_record import Run, Summary, read_run

REPORT = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write report.html into a run folder; returns its path.

    It is made from summary.json, events.jsonl and experiment.yaml. Raises StateError naming the file that is
    missing or damaged, and what to do.
    """
    run = read_run(run_folder)
    path = run_folder / REPORT
    footer = element(
        "p",
        f"Written from summary.json, events.jsonl and experiment.yaml of the run {run.folder.name}. "
        "This page loads nothing from anywhere.",
    )
    content = page(run.summary.experiment, "Perennial run report", _header(run), _sections(run), footer)
    replace_file(path, content)
    return path


def _sections(run: Run) -> list[Section]:
    blocks = [section_of(run, name) for name in BLOCKS]
    common = [recognition(run), accuracy(run), training(run), sites(run), privacy(run)]
    every = [*common, *blocks, origin(run)]
    return [section for section in every if section is not None]


def _header(run: Run) -> Markup:
    summary = run.summary
    up = summary.bytes_up + (summary.task_end_bytes_up or 0)
    down = summary.bytes_down + (summary.task_end_bytes_down or 0)
    where = " (rounds alone)" if summary.task_end_bytes_up is None else ""
    known = [event.seconds for event in run.rounds if event.seconds is not None]
    round_in_words = f"{duration(median(known))} in the median round" if known else "from start to end"
    cards = [
        *_final_cards(summary),
        _card(
            "Average incremental accuracy",
            percent(summary.average_incremental_accuracy),
            "mean over tasks of the accuracy on all classes so far",
        ),
        _card("Forgetting", _points(summary.forgetting), "lost on old tasks from their best"),
        _card(
            "Backward transfer", _points(summary.backward_transfer), "gained on old tasks by later learning"
        ),
        _card("Rounds", f"{summary.rounds:,}", _rounds_note(run)),
        _card("Traffic", size(up + down), f"{size(up)} from the sites, {size(down)} to them{where}"),
        _card("Time", duration(summary.seconds), round_in_words),
        _privacy_card(run),
    ]
    facts = join([element("li", fact) for fact in _facts(run)])
    # warnings about the model stand before everything else
    wrong = run.measures.headline[:-1] if run.measures is not None else []
    alarms = element("div", join([element("p", sentence) for sentence in wrong]), "alarms") if wrong else ""
    story, figures = element("p", _story(run), "story"), element("dl", join(cards), "cards")
    return join([element("ul", facts, "facts"), _alert(run), alarms, story, figures])


def _final_cards(summary: Summary) -> list[Markup]:
    """What the last model knows; of classes of very different size first with every class counted alike."""
    name, value = summary.headline
    where = "all classes, after the last task" if value is not None else "not measured"
    if name == "accuracy":
        return [_card("Final accuracy", percent(value), where, chief=True)]
    return [
        _card("Final balanced accuracy", percent(value), f"{where}, every class counted alike", chief=True),
        _card("Final accuracy", percent(summary.final_accuracy), "every sample counted alike"),
    ]


def _card(name: str, value: str, note: str, chief: bool = False) -> Markup:
    """A headline number; the unit, set off by a thin space, is written small."""
    words = [word.partition(THIN_SPACE) for word in value.split(" ")]
    number = " ".join(
        f"{escape(figure)}{gap}{element('small', unit) if unit else ''}" for figure, gap, unit in words
    )
    content = element("dt", name) + element(
        "dd", Markup(element("span", Markup(number), "value") + element("span", note, "note"))
    )
    return element("div", Markup(content), "card chief" if chief else "card")


def _points(share: float | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share:z.1f}{THIN_SPACE}points".replace("-", "\N{MINUS SIGN}")


def _facts(run: Run) -> list[str]:
    summary = run.summary
    facts = [
        plural(len(summary.sites), "site"),
        plural(len(summary.accuracy_matrix), "task"),
        f"seed {summary.seed}",
        f"{summary.engine} engine",
    ]
    if summary.classes:
        facts.insert(2, plural(len(summary.classes), "class"))
    if run.started is not None:
        facts.append(f"{run.started:%d %B %Y, %H:%M %Z}".lstrip("0").strip())
    return facts


def _story(run: Run) -> str:
    """The run in two sentences."""
    summary = run.summary
    tasks = len(summary.accuracy_matrix)
    known = f"all {len(summary.classes)} classes" if summary.classes else "all classes"
    course = f"{plural(tasks, 'task')} and {plural(summary.rounds, 'round')}"
    after = f"After {course} at {plural(len(summary.sites), 'site')}"
    if summary.final_accuracy is None:
        return f"{after}, nobody measured how well the model tells {known} apart."
    if run.measures is not None and run.measures.headline:
        figures = run.measures.headline[-1]
        sentences = [f"{after}: {figures[0].lower()}{figures[1:]}"]
    else:
        name, value = summary.headline
        sentences = [f"{after}, the model tells {known} apart with {percent(value)} {name}."]
    if tasks > 1 and summary.forgetting is not None:
        change = f"{100 * abs(summary.forgetting):.1f} points"
        if summary.forgetting >= 0:
            sentences.append(f"On earlier tasks it has lost {change} of its best, on average.")
        else:
            sentences.append(f"On earlier tasks it is {change} better than its best before, on average.")
    return " ".join(sentences)


def _rounds_note(run: Run) -> str:
    skipped = sum(event.skipped for event in run.rounds)
    dropped = sum(len(event.dropped) for event in run.rounds)
    troubles = [f"{skipped} skipped"] if skipped else []
    if dropped:
        troubles.append("1 reply dropped" if dropped == 1 else f"{dropped} replies dropped")
    return ", ".join(troubles) or "none skipped, no reply dropped"


def _privacy_card(run: Run) -> Markup:
    epsilon = run.summary.epsilon
    if epsilon is None:
        return _card("Privacy", "none", "no formal privacy")
    note = f"for one {epsilon.unit}, δ = {power(epsilon.delta)}; the worst site"
    if epsilon.value is None:
        return _card("Privacy", "none", "clipped, but no noise was added")
    return _card("Privacy", f"ε = {decimal(epsilon.value)}", note)


def faults_of(run: Run) -> list[Fault]:
    """All faults that a run's folder shows, the gravest first."""
    last = run.rounds[-1].task if run.rounds else 0
    by_round = [event.accuracy for event in run.rounds if event.task == last]
    return grouped(of_summary(run.folder.name, run.summary, by_round))


def _alert(run: Run) -> Markup:
    """The faults as a list; empty for a run without."""
    items = [
        element("li", join([element("strong", fault.said), Markup(" "), fault.turn]))
        for fault in faults_of(run)
    ]
    return element("div", element("ul", join(items)), "alert") if items else Markup()
