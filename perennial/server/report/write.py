"""report.html: the results of a run on one page that can be read anywhere, offline.

It knows only the files of the run folder, so that it can be written again at any time, on any machine.
"""

from pathlib import Path
from statistics import median

from perennial.foundation.files import replace_file
from perennial.server.faults import Fault, group_faults, of_summary
from perennial.server.report.markup import (
    MISSING,
    THIN_SPACE,
    Markup,
    Section,
    build_element,
    duration,
    escape,
    format_count,
    format_decimal,
    format_percent,
    format_power,
    format_size,
    join,
)
from perennial.server.report.method_blocks import BLOCKS, report_block
from perennial.server.report.page import build_page
from perennial.server.report.recognition import report_recognition
from perennial.server.report.sections import (
    report_accuracy,
    report_origin,
    report_privacy,
    report_sites,
    report_training,
)
from perennial.server.run_record import Run, Summary, read_run

REPORT = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write report.html into a run folder; returns its path.

    It is made from summary.json, events.jsonl and experiment.yaml. Raises StateError naming the file that is
    missing or damaged, and what to do.
    """
    run = read_run(run_folder)
    path = run_folder / REPORT
    footer = build_element(
        "p",
        f"Written from summary.json, events.jsonl and experiment.yaml of the run {run.folder.name}. "
        "This page loads nothing from anywhere.",
    )
    content = build_page(
        run.summary.experiment, "Perennial run report", _build_header(run), _build_sections(run), footer
    )
    replace_file(path, content)
    return path


def _build_sections(run: Run) -> list[Section]:
    blocks = [report_block(run, name) for name in BLOCKS]
    common = [
        report_recognition(run),
        report_accuracy(run),
        report_training(run),
        report_sites(run),
        report_privacy(run),
    ]
    every = [*common, *blocks, report_origin(run)]
    return [section for section in every if section is not None]


def _build_header(run: Run) -> Markup:
    summary = run.summary
    up = summary.bytes_up + (summary.task_end_bytes_up or 0)
    down = summary.bytes_down + (summary.task_end_bytes_down or 0)
    where = " (rounds alone)" if summary.task_end_bytes_up is None else ""
    known = [event.seconds for event in run.rounds if event.seconds is not None]
    round_in_words = f"{duration(median(known))} in the median round" if known else "from start to end"
    cards = [
        *_build_final_cards(summary),
        _build_card(
            "Average incremental accuracy",
            format_percent(summary.average_incremental_accuracy),
            "mean over tasks of the accuracy on all classes so far",
        ),
        _build_card("Forgetting", _format_points(summary.forgetting), "lost on old tasks from their best"),
        _build_card(
            "Backward transfer",
            _format_points(summary.backward_transfer),
            "gained on old tasks by later learning",
        ),
        _build_card("Rounds", f"{summary.rounds:,}", _describe_rounds(run)),
        _build_card(
            "Traffic",
            format_size(up + down),
            f"{format_size(up)} from the sites, {format_size(down)} to them{where}",
        ),
        _build_card("Time", duration(summary.seconds), round_in_words),
        _build_privacy_card(run),
    ]
    facts = join([build_element("li", fact) for fact in _list_facts(run)])
    # warnings about the model stand before everything else
    wrong = [run.withdrawn] if run.withdrawn else []
    wrong += run.measures.headline[:-1] if run.measures is not None else []
    alarms = (
        build_element("div", join([build_element("p", sentence) for sentence in wrong]), "alarms")
        if wrong
        else ""
    )
    story, figures = build_element("p", _tell_story(run), "story"), build_element("dl", join(cards), "cards")
    return join([build_element("ul", facts, "facts"), _build_alert(run), alarms, story, figures])


def _build_final_cards(summary: Summary) -> list[Markup]:
    """What the last model knows; of classes of very different size first with every class counted alike."""
    name, value = summary.headline
    where = "all classes, after the last task" if value is not None else "not measured"
    if name == "accuracy":
        return [_build_card("Final accuracy", format_percent(value), where, chief=True)]
    return [
        _build_card(
            "Final balanced accuracy",
            format_percent(value),
            f"{where}, every class counted alike",
            chief=True,
        ),
        _build_card("Final accuracy", format_percent(summary.final_accuracy), "every sample counted alike"),
    ]


def _build_card(name: str, value: str, note: str, chief: bool = False) -> Markup:
    """A headline number; the unit, set off by a thin space, is written small."""
    words = [word.partition(THIN_SPACE) for word in value.split(" ")]
    number = " ".join(
        f"{escape(figure)}{gap}{build_element('small', unit) if unit else ''}" for figure, gap, unit in words
    )
    content = build_element("dt", name) + build_element(
        "dd", Markup(build_element("span", Markup(number), "value") + build_element("span", note, "note"))
    )
    return build_element("div", Markup(content), "card chief" if chief else "card")


def _format_points(share: float | None) -> str:
    if share is None:
        return MISSING
    return f"{100 * share:z.1f}{THIN_SPACE}points".replace("-", "\N{MINUS SIGN}")


def _list_facts(run: Run) -> list[str]:
    summary = run.summary
    facts = [
        format_count(len(summary.sites), "site"),
        format_count(len(summary.accuracy_matrix), "task"),
        f"seed {summary.seed}",
        f"{summary.engine} engine",
    ]
    if summary.classes:
        facts.insert(2, format_count(len(summary.classes), "class"))
    if run.started is not None:
        facts.append(f"{run.started:%d %B %Y, %H:%M %Z}".lstrip("0").strip())
    return facts


def _tell_story(run: Run) -> str:
    """The run in two sentences."""
    summary = run.summary
    tasks = len(summary.accuracy_matrix)
    known = f"all {len(summary.classes)} classes" if summary.classes else "all classes"
    course = f"{format_count(tasks, 'task')} and {format_count(summary.rounds, 'round')}"
    after = f"After {course} at {format_count(len(summary.sites), 'site')}"
    if summary.final_accuracy is None:
        return f"{after}, nobody measured how well the model tells {known} apart."
    if run.measures is not None and run.measures.headline:
        figures = run.measures.headline[-1]
        sentences = [f"{after}: {figures[0].lower()}{figures[1:]}"]
    else:
        name, value = summary.headline
        sentences = [f"{after}, the model tells {known} apart with {format_percent(value)} {name}."]
    if tasks > 1 and summary.forgetting is not None:
        change = f"{100 * abs(summary.forgetting):.1f} points"
        if summary.forgetting >= 0:
            sentences.append(f"On earlier tasks it has lost {change} of its best, on average.")
        else:
            sentences.append(f"On earlier tasks it is {change} better than its best before, on average.")
    return " ".join(sentences)


def _describe_rounds(run: Run) -> str:
    skipped = sum(event.skipped for event in run.rounds)
    dropped = sum(len(event.dropped) for event in run.rounds)
    troubles = [f"{skipped} skipped"] if skipped else []
    if dropped:
        troubles.append("1 reply dropped" if dropped == 1 else f"{dropped} replies dropped")
    return ", ".join(troubles) or "none skipped, no reply dropped"


def _build_privacy_card(run: Run) -> Markup:
    epsilon = run.summary.epsilon
    if epsilon is None:
        return _build_card("Privacy", "none", "no formal privacy")
    note = f"for one {epsilon.unit}, δ = {format_power(epsilon.delta)}; the worst site"
    if epsilon.value is None:
        return _build_card("Privacy", "none", "clipped, but no noise was added")
    return _build_card("Privacy", f"ε = {format_decimal(epsilon.value)}", note)


def find_faults(run: Run) -> list[Fault]:
    """All faults that a run's folder shows, the gravest first."""
    last = run.rounds[-1].task if run.rounds else 0
    by_round = [event.accuracy for event in run.rounds if event.task == last]
    return group_faults(of_summary(run.folder.name, run.summary, by_round, run.measures))


def _build_alert(run: Run) -> Markup:
    """The faults as a list; empty for a run without."""
    items = [
        build_element("li", join([build_element("strong", fault.said), Markup(" "), fault.turn]))
        for fault in find_faults(run)
    ]
    return build_element("div", build_element("ul", join(items)), "alert") if items else Markup()
