"""What is wrong with a run that is over, at the top of its report: the same words as on the live pages."""

from perennial.server.faults import Fault, grouped, of_note, of_summary
from perennial.server.report.markup import Markup, element, join
from perennial.server.run_record import Run


def faults_of(run: Run) -> list[Fault]:
    """Every fault that the run's folder tells of, the gravest first."""
    last = run.rounds[-1].task if run.rounds else 0
    by_round = [event.accuracy for event in run.rounds if event.task == last]
    behind = dict(found for text in run.notes if (found := of_note(run.folder.name, text)) is not None)
    learnt = of_summary(run.folder.name, run.summary, by_round)
    return grouped([*learnt, *(fault for fault in behind.values() if fault is not None)])


def alert(run: Run) -> Markup:
    """The faults as a list; empty for a run without."""
    items = [
        element("li", join([element("strong", fault.said), Markup(" "), fault.turn]))
        for fault in faults_of(run)
    ]
    return element("div", element("ul", join(items)), "alert") if items else Markup()
