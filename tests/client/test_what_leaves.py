"""The auditor's page is the code's own account of what leaves a site."""

from tests.what_leaves import PAGE, page


def test_the_page_is_what_the_messages_say() -> None:
    assert PAGE.read_text() == page(), "run: python -m tests.what_leaves"


def test_every_field_is_explained() -> None:
    for line in page().splitlines():
        if line.startswith("| `"):
            assert line.split("|")[3].strip(), f"a field without a text: {line}"
