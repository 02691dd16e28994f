"""The alert at the top of a report if the model has stopped learning: the signs, and what to try."""

from perennial.server.report.markup import Markup, element, join
from perennial.server.run_record import StoppedLearning


def stopped_alert(stopped: StoppedLearning | None) -> Markup:
    """The alert; empty for a run that learnt."""
    if stopped is None:
        return Markup("")
    last = stopped.tasks[-1]
    tasks = ", ".join(str(found.task) for found in stopped.tasks)
    words = f"This run stopped learning (after task {tasks}): {'; '.join(last.signs)}. To try:"
    tries = join([element("li", text) for text in stopped.to_try])
    return element("div", join([element("p", words), element("ul", tries)]), "alert")
