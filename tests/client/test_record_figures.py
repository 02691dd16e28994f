"""What the hospital's own page and command say of single records, and that they alone say it."""

from pathlib import Path

import pytest

from perennial.cli.privacy import ledger_command
from perennial.client.record_figures import record_figures
from perennial.foundation.record_key import record_key
from perennial.privacy.composition import compose
from perennial.privacy.ledger import Ledger
from perennial.privacy.record_book import RecordBook
from tests.privacy.budgets import budget_for
from tests.privacy.test_record_book import DELTA, gaussian, ids


def site(folder: Path) -> None:
    """a, b and c: 0.6, 0.5 and 0.1 of loss; x has 0.1."""
    ledger, book = Ledger(folder), RecordBook(folder, record_key(folder))
    for cost, names in ((0.1, "abcx"), (0.4, "ab"), (0.1, "a")):
        book.charge(ledger, gaussian(cost), None, ids(names))


def test_dearest_median_and_spent(tmp_path: Path) -> None:
    assert record_figures(tmp_path, DELTA) is None
    site(tmp_path)
    limit = budget_for([gaussian(0.65)], DELTA)
    found = record_figures(tmp_path, DELTA, limit)
    assert found is not None and (found.records, found.spent) == (4, 1)
    dearest = compose([gaussian(0.1), gaussian(0.4), gaussian(0.1)], DELTA)
    assert found.dearest.epsilon == pytest.approx(dearest.epsilon)
    assert found.median.epsilon == pytest.approx(compose([gaussian(0.1), gaussian(0.4)], DELTA).epsilon)


def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site(tmp_path)
    limit = budget_for([gaussian(0.65)], DELTA)
    ledger_command(tmp_path, DELTA, limit.epsilon)
    said = " ".join(capsys.readouterr().out.split())
    assert "4 records were in releases; 1 have spent their budget; epsilon of the dearest" in said
