"""docs/operations.md says what the committed results say."""

from benchmarks.operations_page import PAGE, RESULTS, costs, rendered


def test_the_page_holds_the_committed_results() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "run: python -m benchmarks.operations_page"
    assert (RESULTS / "deployment.md").read_text() == costs()
