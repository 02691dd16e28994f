"""The operator's receipts: a ledger that was deleted, cut or put back is found by them alone."""

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, Context, Message, RecordDict

from perennial.cli.main import app as command
from perennial.client.app import app as client_app
from perennial.client.identity import Identity
from perennial.config.experiment import load_experiment
from perennial.config.site import load_site_config
from perennial.deploy.signing import make_signing_key
from perennial.engine.grid import InProcessGrid
from perennial.foundation.errors import ConfigError, ProtocolError, StateError
from perennial.foundation.registered import RECEIPTS_KEY, write_registered
from perennial.privacy.entries import Entry
from perennial.privacy.ledger import Ledger
from perennial.privacy.receipts import Receipt, ReceiptBook
from perennial.protocol.fields import read_kind
from perennial.protocol.messages import DescribeRequest, Refusal, TrainRequest
from perennial.protocol.receipts import LedgerReceipt, LedgerTip
from perennial.protocol.tensors import Tensors
from perennial.server.faults import WENT_BACK, WENT_ON, Fault, of_note
from perennial.server.receipts import ReceiptGrid
from tests.attacked_hospital import RUN, SITE, Hospital

NODE = 1
OPEN = {"answers": ["train", "evaluate"], "max_repeats": 1000}


@dataclass
class Federation:
    """One hospital that keeps receipts, and an operator with a key for them."""

    folder: Path
    hospital: Hospital
    notes: list[str]
    asked: int = 0
    running: ReceiptGrid | None = None
    """A server that goes on; None: each question meets one that was started again."""

    @classmethod
    def of(cls, folder: Path, **changes: Any) -> "Federation":
        hospital = Hospital(folder / "site", OPEN, **changes)
        content = yaml.safe_load(hospital.site_file.read_text())
        content["receipts"] = {"key": "receipts.pub", "file": "apart/newest.json"}
        hospital.site_file.write_text(yaml.safe_dump(content))
        hospital.config = load_site_config(hospital.site_file)
        (folder / "operator").mkdir()
        make_signing_key(folder / "operator" / RECEIPTS_KEY, folder / "site" / "receipts.pub")
        write_registered(folder / "nodes.json", {str(NODE): SITE})
        return cls(folder, hospital, [])

    @property
    def state(self) -> Path:
        return self.folder / "site" / "state"

    @property
    def book(self) -> ReceiptBook:
        return ReceiptBook(self.folder / "site" / "apart" / "newest.json")

    @property
    def ledger(self) -> Ledger:
        return Identity.of_site(self.hospital.config, self.hospital.experiment).ledger

    def grid(self) -> ReceiptGrid:
        """The server that goes on, or one that was started again."""
        if self.running is not None:
            return self.running
        settings = {"digest": self.hospital.experiment.digest}
        context = Context(1, NODE, {"site": str(self.hospital.site_file)}, RecordDict(), dict(settings))
        inner = InProcessGrid(client_app, {NODE: context})
        return ReceiptGrid(inner, self.folder / "operator", self.folder / "nodes.json", self.notes.append)

    def ask(self, request: Any = None, change: Callable[[RecordDict], None] | None = None) -> str:
        """'' when the site answered, else its refusal."""
        request = request or self.train()
        grid = self.grid()
        message = Message(request.to_record(), NODE, request.message_type)
        if change is not None:
            change(message.content)
            (reply,) = grid._grid.send_and_receive([message])
        else:
            (identifier,) = grid.push_messages([message])
            (reply,) = grid.pull_messages([identifier])
        if read_kind(reply.content) != Refusal.__name__:
            return ""
        refusal = Refusal.from_record(reply.content)
        return f"{refusal.kind}: {refusal.reason}"

    def train(self) -> TrainRequest:
        """About another model each time: the same question gets the first answer and is no new release."""
        self.asked += 1
        arrays = {name: tensor + 1e-3 * self.asked for name, tensor in self.hospital.arrays().items()}
        return TrainRequest(**self.hospital.stamp(), arrays=Tensors(arrays))

    def describe(self) -> DescribeRequest:
        return DescribeRequest(version=1, experiment=self.hospital.experiment.digest)


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Three releases, the first two of which are witnessed at the site, and the third at the server."""
    found = Federation.of(tmp_path)
    for _ in range(3):
        assert found.ask() == ""
    return found


def test_the_server_witnesses_each_release_and_the_site_keeps_its_word(federation: Federation) -> None:
    kept = federation.book.newest()
    known = ReceiptBook(federation.folder / "operator" / "receipts" / f"{SITE}.json").newest()
    assert kept is not None and known is not None
    assert (kept.lines, known.lines) == (2, 3) and len(federation.ledger.entries()) == 3
    tip = federation.ledger.mark()
    assert tip is not None and known.last == tip[0].last
    assert federation.book.path.stat().st_mode & 0o777 == 0o600
    assert federation.book.path.parent.stat().st_mode & 0o777 == 0o700
    assert federation.notes == []


def delete(state: Path, backup: Path) -> None:
    for name in ("ledger.jsonl", "ledger.tip"):
        (state / name).unlink()


def truncate(state: Path, backup: Path) -> None:
    lines = (state / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    os.truncate(state / "ledger.jsonl", len(lines[0]))
    (state / "ledger.tip").unlink()


def put_back(state: Path, backup: Path) -> None:
    shutil.rmtree(state)
    shutil.copytree(backup, state)


def write_anew(state: Path, backup: Path) -> None:
    delete(state, backup)
    forged = Ledger(state)
    for _ in range(9):
        forged.charge(
            Entry(
                run=RUN,
                experiment="e",
                recipient="server",
                kind="update",
                unit="site",
                relation="replace",
                mechanism="unprotected",
            )
        )


def lines_of(state: Path) -> bytes:
    path = state / "ledger.jsonl"
    return path.read_bytes() if path.exists() else b""


LOSSES = {loss.__name__: loss for loss in (delete, truncate, put_back, write_anew)}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("apart", [True, False], ids=["file kept", "file lost too"])
def test_a_lost_ledger_is_found_by_receipts_alone(tmp_path: Path, loss: str, apart: bool) -> None:
    federation = Federation.of(tmp_path)
    assert federation.ask() == ""
    backup = tmp_path / "backup"
    shutil.copytree(federation.state, backup)
    for _ in range(3):
        assert federation.ask() == ""
    LOSSES[loss](federation.state, backup)
    if not apart:
        federation.book.path.unlink()
    before = lines_of(federation.state)
    assert federation.ask().startswith("state: StateError")
    with pytest.raises(StateError, match=r"lacks line \d, which .*apart/newest\.json has noted"):
        federation.ledger.entries()
    assert before == lines_of(federation.state), "nothing charged"
    # asking for its name does not make the server forget what it has witnessed
    assert federation.ask(federation.describe()) == ""
    known = ReceiptBook(tmp_path / "operator" / "receipts" / f"{SITE}.json").newest()
    assert known is not None and (known.lines == 4 or loss == "write_anew")


def test_the_journal_names_a_ledger_that_went_back(federation: Federation) -> None:
    backup = federation.folder / "backup"
    shutil.copytree(federation.state, backup)
    federation.running = federation.grid()
    assert federation.ask() == "" and federation.ask() == ""
    put_back(federation.state, backup)
    federation.ask(federation.describe())
    assert [WENT_BACK in note for note in federation.notes] == [True]
    federation.ledger.restart(although_older=True)
    assert federation.ask() == "" and federation.ask() == ""
    assert [WENT_ON in note for note in federation.notes] == [False, True]
    found = [of_note("trial", note) for note in federation.notes]
    assert found == [(SITE, Fault("receipts", SITE, "trial")), (SITE, None)]


def test_a_new_ledger_sets_the_receipt_aside_and_earns_new_ones(federation: Federation) -> None:
    (federation.state / "ledger.jsonl").unlink()
    assert federation.ask().startswith("state:")
    lost, carried = federation.ledger.restart()
    assert carried == 3 and lost.exists()
    assert federation.ask() == "" and federation.ask() == ""
    newest = federation.book.newest()
    assert newest is not None and newest.lines == 2 and federation.notes == []
    delete(federation.state, federation.state)
    assert federation.ask().startswith("state:")


def test_a_tip_that_is_older_than_the_receipt_does_not_begin_a_ledger(federation: Federation) -> None:
    backup = federation.folder / "backup"
    shutil.copytree(federation.state, backup)
    for _ in range(3):
        assert federation.ask() == ""
    put_back(federation.state, backup)
    with pytest.raises(StateError, match="newest tip is of line 3, and the operator's receipt of line 5"):
        federation.ledger.restart()
    assert federation.ask().startswith("state:")
    federation.ledger.restart(although_older=True)
    assert federation.ask() == ""


@pytest.mark.parametrize("lie", ["key", "site", "longer", "line", "type", "not hex"])
def test_a_receipt_that_is_not_the_operators_is_refused_and_not_kept(
    federation: Federation, lie: str
) -> None:
    kept = federation.book.newest()
    assert kept is not None
    forged: dict[str, Any] = vars(replace(kept, lines=kept.lines + 1))
    if lie == "key":
        forged = vars(replace(kept, lines=9, signature="").signed(Ed25519PrivateKey.generate()))
    elif lie == "site":
        forged["site"] = "linz"
    elif lie == "longer":
        forged["length"] += 10**6
    elif lie == "type":
        forged["lines"] = "9"
    elif lie == "not hex":
        forged["signature"] = "z" * 128

    def beside(record: RecordDict) -> None:
        fields = LedgerReceipt(**vars(kept)).to_record()["fields"]
        for name, value in forged.items():
            fields[name] = value  # pyright: ignore[reportIndexIssue]
        record["receipt"] = fields

    said = federation.ask(change=beside)
    assert said.startswith("protocol: ") and ("receipt" in said or "LedgerReceipt" in said)
    assert federation.book.newest() == kept


def test_an_older_receipt_does_not_take_the_place_of_the_newest(federation: Federation) -> None:
    older = federation.book.newest()
    assert older is not None
    assert federation.ask() == ""
    newest = federation.book.newest()
    assert (
        federation.ask(
            change=lambda record: record.update(
                {"receipt": LedgerReceipt(**vars(older)).to_record()["fields"]}
            )
        )
        == ""
    )
    assert federation.book.newest() == newest != older


def test_a_node_cannot_have_a_receipt_in_anothers_name(federation: Federation) -> None:
    write_registered(federation.folder / "nodes.json", {str(NODE): "linz"})
    assert federation.ask() == ""
    assert [note for note in federation.notes if "the node is 'linz'" in note]
    assert not (federation.folder / "operator" / "receipts" / "linz.json").exists()


def test_without_the_key_in_site_yaml_no_tip_leaves_and_no_receipt_is_kept(tmp_path: Path) -> None:
    federation = Federation.of(tmp_path)
    content = yaml.safe_load(federation.hospital.site_file.read_text())
    del content["receipts"]
    federation.hospital.site_file.write_text(yaml.safe_dump(content))
    tips: list[LedgerTip | None] = []
    grid = federation.grid()
    inner = grid._grid.pull_messages

    def watched(identifiers: Iterable[str]) -> list[Message]:
        replies = list(inner(identifiers))
        tips.extend(LedgerTip.beside(reply.content) for reply in replies)
        return replies

    grid._grid.pull_messages = watched  # pyright: ignore[reportAttributeAccessIssue]
    message = Message(federation.train().to_record(), NODE, TrainRequest.message_type)
    assert list(grid.pull_messages(grid.push_messages([message])))
    assert tips == [None] and not federation.book.path.exists()


def test_a_file_of_receipts_beside_the_ledger_is_refused_by_its_key(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(
        yaml.safe_dump({"site": "a", "state_dir": "state", "receipts": {"file": "state/receipts"}})
    )
    with pytest.raises(ConfigError, match=r"receipts\.file: found .*lies in state_dir"):
        load_site_config(path)


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b'{"newest": 5, "aside": []}', b"[" * 10_000])
def test_a_damaged_file_of_receipts_stops_releases(federation: Federation, damage: bytes) -> None:
    federation.book.path.write_bytes(damage)
    with pytest.raises(StateError, match="not a file of receipts, or damaged"):
        federation.ledger.entries()
    assert federation.ask().startswith("state: ")


def test_a_tip_that_is_none_costs_the_reply_nothing(federation: Federation) -> None:
    with pytest.raises(ProtocolError, match="ledger: found ArrayRecord"):
        LedgerTip.beside(RecordDict({"ledger": ArrayRecord()}))
    with pytest.raises(ProtocolError, match="expected a LedgerTip"):
        LedgerTip.beside(RecordDict({"ledger": federation.train().to_record()["fields"]}))


def test_the_command_begins_a_new_ledger(federation: Federation) -> None:
    from typer.testing import CliRunner

    (federation.state / "ledger.jsonl").unlink()
    done = CliRunner().invoke(command, ["site", "restart-ledger", str(federation.hospital.site_file)])
    assert done.exit_code == 0 and "3 releases carried over" in done.output
    assert federation.book.newest() is None and len(federation.book.aside) == 1
    assert isinstance(load_experiment(federation.hospital.file).digest, str)
    assert Receipt.from_json(vars(Receipt(site="a", length=1, lines=1, newest=1, last="0" * 64))).lines == 1
