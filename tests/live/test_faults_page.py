"""docs/faults.md has what the pages say: `python -m tests.live.test_faults_page` writes its table again."""

from pathlib import Path

from perennial.server.faults import FORGETTING, KINDS, Fault

PAGE = Path(__file__).resolve().parents[2] / "docs" / "faults.md"
BEGIN, END = "<!-- faults -->\n", "<!-- end of faults -->\n"


def table() -> str:
    """Each fault with its owner and command, and the surfaces that may name it."""
    columns = ["what is wrong", "whose turn", "what ends it", "named"]
    lines = [columns, ["---"] * len(columns)]
    for kind, facts in KINDS.items():
        fault = Fault(kind, "SITE", "RUN", key="KEY")
        lines.append([fault.cause, fault.owner, fault.command, facts.seen])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def renewed(text: str) -> str:
    """The page's text with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def test_the_page_of_faults_is_made_from_the_list_that_the_surfaces_use() -> None:
    text = PAGE.read_text()
    assert text == renewed(text), "python -m tests.live.test_faults_page"


def test_figures_in_sentences_are_those_of_the_rules() -> None:
    from perennial.live.diagnosis import NEARLY, SOON

    assert f"over {100 * FORGETTING:.0f} points" in KINDS["forgetting"].cause
    assert f"within {SOON:.0f} days" in KINDS["certificate_ends"].cause
    assert NEARLY == 0.8 and "our fifths" in KINDS["budget_low"].cause


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
