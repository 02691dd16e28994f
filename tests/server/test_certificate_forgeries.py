"""Forged certificates are refused by name; honest ones hold, however many withdrawals follow."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from perennial.cli.main import refuse_former
from perennial.client.certificates import check_certificate
from perennial.foundation.errors import ConfigError, PerennialError, StateError
from perennial.learning.analytic.files import read_statistics_file, write_statistics
from perennial.learning.analytic.statistics import Statistics
from perennial.privacy.secure.keys import new_secret, sign, signing_key
from perennial.privacy.signed_sums import Statement, Withdrawal, lists
from perennial.protocol.certificates import Certificate, read_certificate
from perennial.server.certification import certify, operator_secret
from perennial.server.verification import verify
from perennial.server.withdrawal import withdraw
from perennial.strategies.statistics.kept import file_name
from tests.strategies.test_analytic_runs import own_cache, run

__all__ = ["own_cache"]
DATA = {"sites": 4, "partition": {"kind": "iid"}, "validation_fraction": 0.0}
TASKS = {"count": 2, "rounds": 1}
WRONG = "0" * 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    run(folder, "one", data=DATA, tasks=TASKS)
    run(folder, "other", data=DATA, tasks=TASKS, seed=4)
    for name in ("one", "other"):
        certify(folder / "runs" / name)
        withdraw(folder / "runs" / name, "site-2")
    return folder / "runs"


@pytest.fixture
def certificate(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "runs")
    return tmp_path / "runs" / "one" / "certificates" / "0002-withdraw-site-2.json"


def keys_of(path: Path) -> dict[str, list[str]]:
    """What a verifier knows beforehand."""
    return {site: [key] for part in read_certificate(path).runs for site, key, _ in part.signers}


# what nobody signed again: any byte that was changed

FIELDS: dict[str, Any] = {
    "kind": "run",
    "number": 7,
    "previous": WRONG,
    "time": "2020-01-01T00:00:00+00:00",
    "about": "site-3",
    "runs": [],
    "features": WRONG,
    "classes": ["7"],
    "statements": [],
    "withdrawn": [],
    "shrinkage": 0.02,
    "head": {},
    "says": {"finished": False},
    "operator": WRONG,
    "signature": WRONG * 2,
    "note": "and everything else was undone too",
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_edited_field_is_refused(certificate: Path, field: str) -> None:
    content = json.loads(certificate.read_text())
    assert content.get(field) != FIELDS[field]
    certificate.write_text(json.dumps(content | {field: FIELDS[field]}))
    with pytest.raises(PerennialError):
        verify(certificate)


# an operator who lies, and signs what he says with his own key


def signed_again(path: Path, **changes: Any) -> None:
    found = Certificate.model_validate(json.loads(path.read_text()) | changes)
    path.write_text(found.signed_by(operator_secret(path.parents[1])).model_dump_json())


def statements(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["statements"]


def secret(folder: Path, site: str) -> bytes:
    return (folder / "sites" / site / "secure" / "identity.key").read_bytes()


def forged(statement: dict[str, Any], key: bytes, **changes: Any) -> dict[str, Any]:
    """Another statement, signed by the holder of a key."""
    found = replace(Statement.from_json(statement), key=signing_key(key), **changes)
    return asdict(replace(found, signature=sign(key, found.content)))  # pyright: ignore[reportPrivateUsage]


def swapped_statements(path: Path) -> str:
    all_of = statements(path)
    first, second = all_of[0], all_of[1]
    taken = ("sums", "salt", "signature")
    all_of[0] = first | {name: second[name] for name in taken}
    all_of[1] = second | {name: first[name] for name in taken}
    signed_again(path, statements=all_of)
    return "its signature is not of this key"


def another_site_s_name(path: Path) -> str:
    all_of = statements(path)
    all_of[0] |= {"site": "site-7"}
    signed_again(path, statements=all_of)
    return "not in the list of signers"


def an_invented_site(path: Path) -> str:
    """Its sums, statement and key are consistent with each other, and with nothing else."""
    key, all_of = new_secret(), statements(path)
    runs = json.loads(path.read_text())["runs"]
    new = forged(all_of[0], key, site="st-nowhere")
    signed_again(path, statements=[*all_of, new], runs=runs)
    return "not in the list of signers"


def an_invented_key_in_the_list(path: Path) -> str:
    """Put before others, it changes what every honest site signed."""
    key, all_of = new_secret(), statements(path)
    runs = json.loads(path.read_text())["runs"]
    runs[0]["signers"].insert(0, ["st-nowhere", signing_key(key), ""])
    signed_again(path, statements=[*all_of, forged(all_of[0], key, site="st-nowhere")], runs=runs)
    return "names another list of signers"


def a_key_taken_out_of_the_list(path: Path) -> str:
    runs = json.loads(path.read_text())["runs"]
    runs[0]["signers"] = [row for row in runs[0]["signers"] if row[0] != "site-2"]
    signed_again(path, runs=runs)
    return "names another list of signers|by no signer"


def the_statement_of_another_run(path: Path) -> str:
    other = path.parents[2] / "other" / "certificates" / path.name
    signed_again(path, statements=[*statements(path)[1:], statements(other)[0]])
    return "which is not the certificate's"


def signed_for_another_experiment(path: Path) -> str:
    all_of, folder = statements(path), path.parents[1]
    all_of[0] = forged(all_of[0], secret(folder, all_of[0]["site"]), experiment=WRONG)
    signed_again(path, statements=all_of)
    return "of another experiment"


def signed_for_other_maps(path: Path) -> str:
    all_of, folder = statements(path), path.parents[1]
    all_of[0] = forged(all_of[0], secret(folder, all_of[0]["site"]), features=WRONG)
    signed_again(path, statements=all_of)
    return "of other feature maps"


def signed_for_another_order_of_classes(path: Path) -> str:
    all_of, folder = statements(path), path.parents[1]
    all_of[0] = forged(all_of[0], secret(folder, all_of[0]["site"]), class_order=WRONG)
    signed_again(path, statements=all_of)
    return "of another order of classes"


def counted_twice(path: Path) -> str:
    all_of = statements(path)
    signed_again(path, statements=[*all_of, all_of[0]])
    return "count twice"


def two_statements_of_one_version(path: Path) -> str:
    """The site itself signed both; as sums of two names they would both count."""
    all_of, folder = statements(path), path.parents[1]
    runs = json.loads(path.read_text())["runs"]
    key = secret(folder, "site-0")
    runs[0]["signers"].append(["site-0b", signing_key(key), ""])
    listed = lists(f"{site} {known}" for site, known, _ in runs[0]["signers"])[-1]
    first = next(s for s in all_of if s["site"] == "site-0")
    second = forged(first, key, site="site-0b", signers=listed, sums=WRONG)
    signed_again(path, statements=[*all_of, second], runs=runs)
    return "two statements of version 1"


def a_superseded_statement(path: Path) -> str:
    """The site signed a second version; the operator uses the first."""
    all_of, folder = statements(path), path.parents[1]
    first = Statement.from_json(all_of[0])
    newer = forged(
        all_of[0], secret(folder, first.site), version=2, supersedes=first.sha256, task=first.task + 1
    )
    others = [s for s in all_of if (s["site"], s["task"]) != (first.site, first.task + 1)]
    signed_again(path, statements=[*others, newer])
    return "superseded by a later one"


def the_withdrawn_statement_again(path: Path) -> str:
    before = statements(path.with_name("0001-run.json"))
    signed_again(path, statements=before)
    return "superseded by a later one"


def a_withdrawn_site_signs_again(path: Path) -> str:
    before = next(s for s in statements(path.with_name("0001-run.json")) if s["site"] == "site-2")
    new = forged(before, secret(path.parents[1], "site-2"), version=2, salt=WRONG)
    signed_again(path, statements=[*statements(path), new])
    return "the site was withdrawn"


def nothing_withdrawn(path: Path) -> str:
    signed_again(path, withdrawn=[], statements=statements(path.with_name("0001-run.json")))
    return "nothing was withdrawn"


def a_receipt_by_another_key(path: Path) -> str:
    receipt = Withdrawal.from_json(json.loads(path.read_text())["withdrawn"][0])
    other = receipt.by_site(new_secret()).by_operator(operator_secret(path.parents[1]))
    signed_again(path, withdrawn=[asdict(other)])
    return "by no signer"


def a_receipt_that_names_other_statements(path: Path) -> str:
    receipt = json.loads(path.read_text())["withdrawn"][0]
    signed_again(path, withdrawn=[receipt | {"withdrawn": [WRONG]}])
    return "a signature is not its signer's"


def other_settings(path: Path) -> str:
    runs = json.loads(path.read_text())["runs"]
    runs[0]["settings"]["strategy"]["shrinkage"] = 0.5
    signed_again(path, runs=runs)
    return "not those whose hash the sites signed"


def another_shrinkage(path: Path) -> str:
    signed_again(path, shrinkage=0.5)
    return "its model: head.weight is not what the sums give"


def another_head(path: Path) -> str:
    other = json.loads((path.parents[2] / "other" / "certificates" / path.name).read_text())
    signed_again(path, head=other["head"])
    return "its model: head.weight is not what the sums give"


def a_statement_left_out(path: Path) -> str:
    signed_again(path, statements=statements(path)[1:])
    return "no statement in the certificate is of these sums"


def another_certificate_before(path: Path) -> str:
    signed_again(path, previous=WRONG)
    return "does not follow the one before"


def an_earlier_one_taken_out_of_the_chain(path: Path) -> str:
    """A third one says that it is the second."""
    third = withdraw(path.parents[1], "site-0")
    signed_again(third, number=2, previous=read_certificate(path).previous)
    return "does not follow the one before"


def a_withdrawal_taken_back(path: Path) -> str:
    third = withdraw(path.parents[1], "site-0")
    signed_again(third, withdrawn=json.loads(third.read_text())["withdrawn"][1:])
    return "takes withdrawals back"


# files changed in the folder


def places_changed(path: Path) -> str:
    first, second = (path.parents[1] / "statistics" / file_name(1, site) for site in ("site-0", "site-1"))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return "not the sums that site-0 signed"


def moved_between_sites(path: Path) -> str:
    """Their sum is as it was: what one site has more, the other has less."""
    paths = [path.parents[1] / "statistics" / file_name(1, site) for site in ("site-0", "site-1")]
    (mine, facts), (yours, others) = (read_statistics_file(each) for each in paths)
    nothing = Statistics.nothing(mine.width, mine.classes)
    write_statistics(paths[0], mine + yours, facts)
    write_statistics(paths[1], nothing, others)
    return "not the sums that site-0 signed"


def one_record_more(path: Path) -> str:
    each = path.parents[1] / "statistics" / file_name(1, "site-0")
    found, facts = read_statistics_file(each)
    found.counts[0] += 1
    write_statistics(each, found, facts)
    return "not the sums that site-0 signed"


def missing_file(path: Path) -> str:
    (path.parents[1] / "statistics" / file_name(1, "site-1")).unlink()
    return "missing or damaged"


def sums_that_nobody_signed(path: Path) -> str:
    folder = path.parents[1] / "statistics"
    found, facts = read_statistics_file(folder / file_name(1, "site-0"))
    write_statistics(folder / file_name(1, "st-nowhere"), found, facts | {"site": "st-nowhere"})
    return "no statement in the certificate is of these sums"


def sums_of_who_was_withdrawn(path: Path) -> str:
    folder = path.parents[1] / "statistics"
    found, facts = read_statistics_file(folder / file_name(1, "site-0"))
    write_statistics(folder / file_name(1, "site-2"), found, facts | {"site": "site-2"})
    return "which were withdrawn, are still here"


def other_model(path: Path) -> str:
    shutil.copy(path.parents[2] / "other" / "model.safetensors", path.parents[1] / "model.safetensors")
    return "its classes are not those"


def another_weight(path: Path) -> str:
    """One value of the head, by more than rounding."""
    model = path.parents[1] / "model.safetensors"
    with safe_open(model, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        facts = file.metadata()
    tensors["head.weight"][0, 0] += 1e-4 * tensors["head.weight"].abs().max()
    save_file(tensors, model, facts)
    return "the model: head.weight is not what the sums give"


def of_the_other_run(path: Path) -> str:
    shutil.copy(path.parents[2] / "other" / "certificates" / path.name, path)
    return "does not follow the one before"


def no_json(path: Path) -> str:
    path.write_text("withdrawn, honestly")
    return "no certificate"


FORGERIES: tuple[Callable[[Path], str], ...] = (
    swapped_statements,
    another_site_s_name,
    an_invented_site,
    an_invented_key_in_the_list,
    a_key_taken_out_of_the_list,
    the_statement_of_another_run,
    signed_for_another_experiment,
    signed_for_other_maps,
    signed_for_another_order_of_classes,
    counted_twice,
    two_statements_of_one_version,
    a_superseded_statement,
    the_withdrawn_statement_again,
    a_withdrawn_site_signs_again,
    nothing_withdrawn,
    a_receipt_by_another_key,
    a_receipt_that_names_other_statements,
    other_settings,
    another_shrinkage,
    another_head,
    a_statement_left_out,
    another_certificate_before,
    an_earlier_one_taken_out_of_the_chain,
    a_withdrawal_taken_back,
    places_changed,
    moved_between_sites,
    one_record_more,
    missing_file,
    sums_that_nobody_signed,
    sums_of_who_was_withdrawn,
    other_model,
    another_weight,
    of_the_other_run,
    no_json,
)


@pytest.mark.parametrize("forgery", FORGERIES, ids=lambda each: each.__name__)
def test_a_forgery_is_refused(certificate: Path, forgery: Callable[[Path], str]) -> None:
    assert verify(certificate)
    why = forgery(certificate)
    with pytest.raises(PerennialError, match=why):
        verify(certificate)


def test_an_invented_site_at_the_end_of_the_list_is_refused_by_who_knows_the_keys(certificate: Path) -> None:
    """Whoever brings no list of keys cannot tell it from a hospital that came late."""
    known, folder = keys_of(certificate), certificate.parents[1]
    key, content = new_secret(), json.loads(certificate.read_text())
    runs = content["runs"]
    runs[0]["signers"].append(["st-nowhere", signing_key(key), ""])
    listed = lists(f"{site} {own}" for site, own, _ in runs[0]["signers"])[-1]
    found, facts = read_statistics_file(folder / "statistics" / file_name(1, "site-0"))
    write_statistics(
        folder / "statistics" / file_name(1, "st-nowhere"), found, facts | {"site": "st-nowhere"}
    )
    new = forged(
        asdict(next(s for s in read_certificate(certificate).of_sites if (s.site, s.task) == ("site-0", 1))),
        key,
        site="st-nowhere",
        signers=listed,
    )
    signed_again(certificate, runs=runs, statements=[*content["statements"], new])
    with pytest.raises(StateError, match="st-nowhere, task 1: its key is not in the list that was brought"):
        verify(certificate, known)
    with pytest.raises(StateError, match="is not what the sums give"):
        verify(certificate)


def test_a_model_given_by_hand_is_compared(certificate: Path, tmp_path: Path) -> None:
    folder = certificate.parents[1]
    model = (folder / "model.safetensors").rename(tmp_path / "sent.safetensors")
    assert verify(certificate, keys_of(certificate), model)
    with pytest.raises(StateError, match="its classes are not those"):
        verify(certificate, model=folder.parent / "other" / "model.safetensors")


def test_a_certificate_says_who_vouches_for_what(certificate: Path) -> None:
    lines = verify(certificate)
    assert lines[0].startswith("This model follows from these sums, signed by these keys")
    assert "shrinkage 0.01: follows from settings and sums" in lines[0]
    assert "simulated: keys are this machine's" in lines
    assert any(line.startswith("No statement signed by site-2 is in it") for line in lines)
    assert any(line.startswith("the operator says: subtracted") for line in lines)
    assert any("report.html" in line for line in lines), "it shows figures of the model before"
    with_keys = verify(certificate, keys_of(certificate))
    assert not any("simulated" in line for line in with_keys)


def test_a_site_finds_its_own_lines_and_notices_a_second_certificate(certificate: Path) -> None:
    sites = certificate.parents[1] / "sites"
    lines = check_certificate(certificate, sites / "site-0")
    assert lines[:2] == ["own sums of task 1: in it", "own sums of task 2: in it"]
    assert check_certificate(certificate, sites / "site-2")[0] == "own sums of task 1: withdrawn"
    assert check_certificate(certificate, sites / "site-0") == lines, "looked at twice"
    signed_again(certificate, time="2020-01-01T00:00:00+00:00")
    with pytest.raises(StateError, match="another certificate of this number before"):
        check_certificate(certificate, sites / "site-0")
    all_of = statements(certificate)
    all_of[0] = forged(all_of[0], secret(certificate.parents[1], "site-0"), sums=WRONG)
    signed_again(certificate, statements=all_of)
    with pytest.raises(StateError, match="a statement that this site did not make"):
        check_certificate(certificate, sites / "site-0")


@pytest.mark.parametrize(
    "words",
    [["forget", "RUN", "--site", "a"], ["site", "withdraw-records", "RUN"], ["site", "withdraw-digests"]],
)
def test_the_old_words_name_the_new_one(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="the command is now `perennial (site )?withdraw"):
        refuse_former(words)


def hold_after_each(folder: Path, sites: list[str]) -> None:
    """Every certificate, after each further withdrawal, by who knows the keys beforehand."""
    known = keys_of(sorted((folder / "certificates").glob("*.json"))[0])
    for site in sites:
        last = withdraw(folder, site)
        for each in (folder / "certificates").glob("*.json"):
            assert any("were withdrawn since" in line for line in verify(each, known)) == (each != last)


def test_honest_certificates_hold_after_more_withdrawals(certificate: Path) -> None:
    hold_after_each(certificate.parents[1], ["site-0", "site-3"])


@pytest.mark.slow
def test_honest_certificates_hold_after_ten_more_withdrawals(tmp_path: Path) -> None:
    run(tmp_path, "many", data=DATA | {"sites": 13}, tasks=TASKS)
    folder = tmp_path / "runs" / "many"
    certify(folder)
    withdraw(folder, "site-2")
    hold_after_each(folder, [f"site-{k}" for k in range(13) if k not in (2, 5, 9)])
