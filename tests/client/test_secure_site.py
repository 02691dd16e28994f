"""What a site demands of masked sums, and what it keeps of them on its disk."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from perennial.cli.check import check_command
from perennial.cli.site import clean as clean_command
from perennial.client.policy import check_digests, check_evaluation, check_secure, check_update
from perennial.client.secure_state import SecureState, own_identity, own_key
from perennial.client.state import clean
from perennial.config.experiment import Experiment
from perennial.config.site import SitePolicy
from perennial.foundation.errors import ConfigError, PolicyRefusal, StateError
from perennial.privacy.config import DigestConfig
from perennial.privacy.secure.keys import Words, derive_signing_key, draw_secret, format_fingerprint
from perennial.privacy.secure.roster import Attempt
from tests.privacy.secure_sites import RUN, MaskedFederation, Parameters, attempt_of, subject_of

EXPERIMENT: dict[str, Any] = {
    "name": "demand",
    "data": {"source": "digits", "sites": 5},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp"},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}


SITES = ["site-000", "site-001", "site-002"]


def experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate(EXPERIMENT | changes)


def state(folder: Path, run: str = RUN, **policy: Any) -> SecureState:
    return SecureState(folder, run, "site-000", SitePolicy(**policy))


def test_site_that_demands_masked_sums_sends_nothing_else() -> None:
    policy = SitePolicy(require_secure=True)
    for check in (check_update, check_evaluation):
        with pytest.raises(PolicyRefusal, match="require_secure"):
            check(policy, experiment())
        check(policy, experiment(secure={"least": 3}))
    with pytest.raises(PolicyRefusal, match="masks false"):
        check_secure(policy, experiment(secure={"masks": False}))
    with pytest.raises(PolicyRefusal, match="no part of a masked sum"):
        check_digests(policy, experiment(secure={"least": 3}), DigestConfig(per_digest=2, largest=1.0))


def test_site_refuses_less_than_it_demands() -> None:
    secure = experiment(secure={"least": 3, "assumed_colluders": 1})
    with pytest.raises(PolicyRefusal, match="policy.least_sites: this site demands 4"):
        check_secure(SitePolicy(least_sites=4), secure)
    with pytest.raises(PolicyRefusal, match="policy.assumed_colluders: this site demands 2"):
        check_secure(SitePolicy(assumed_colluders=2), secure)
    policy = SitePolicy(least_sites=3)
    check_secure(policy, secure, sites=3)
    with pytest.raises(PolicyRefusal, match="2 sites; this site takes part from 3 on"):
        check_secure(policy, secure, sites=2)


def test_identity_lasts_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    first = own_key(tmp_path)
    assert own_key(tmp_path) == first == derive_signing_key(own_identity(tmp_path))
    (tmp_path / "secure" / "identity.key").write_bytes(b"short")
    with pytest.raises(StateError, match="identity.key"):
        own_identity(tmp_path)


def test_peers_are_pinned_or_kept_as_first_met(tmp_path: Path) -> None:
    known, other = (derive_signing_key(draw_secret()) for _ in range(2))
    met = state(tmp_path / "a")
    met.trust("north", known)
    met.keep_peers()
    with pytest.raises(PolicyRefusal, match="first met with"):
        state(tmp_path / "a").trust("north", other)
    pinned = state(tmp_path / "b", peers={"north": format_fingerprint(known)})
    pinned.trust("north", known)
    pinned.trust("site-000", derive_signing_key(own_identity(tmp_path / "b")))
    for name, key in (("north", other), ("south", known), ("site-000", other)):
        with pytest.raises(PolicyRefusal, match=r"policy\.peers"):
            pinned.trust(name, key)


def test_value_is_opened_once_in_a_site_s_life(tmp_path: Path) -> None:
    first, other = Attempt(RUN, 1, 1), Attempt("b" * 16, 1, 1)
    state(tmp_path).note_opened(first, "update", ["m" * 64, "k" * 64], SITES)
    another_run = state(tmp_path, run="b" * 16)
    with pytest.raises(PolicyRefusal, match="goes into no other one"):
        another_run.check_closed(other, "update", ["o" * 64, "k" * 64], SITES)
    another_run.check_closed(other, "evaluation", ["m" * 64], SITES)
    another_run.check_closed(other, "update", ["n" * 64], SITES)


def test_value_that_one_run_masked_goes_into_no_other_run(tmp_path: Path) -> None:
    """Others can open the first run's sum without this site's help, so it cannot wait until it helps."""
    first, again, other = Attempt(RUN, 1, 1), Attempt(RUN, 1, 2), Attempt("b" * 16, 1, 1)
    state(tmp_path).note_masked(first, "update", ["m" * 64], SITES)
    another_run = state(tmp_path, run="b" * 16)
    for act in (another_run.check_closed, another_run.note_masked, another_run.note_opened):
        with pytest.raises(PolicyRefusal, match=f"is masked in run {RUN}, whose sum may be opened"):
            act(other, "update", ["m" * 64], SITES)
    another_run.note_masked(other, "update", ["n" * 64], SITES)
    keeper = state(tmp_path)  # a restarted server's new attempt, and one that follows it
    for attempt in (first, again, again):
        keeper.note_masked(attempt, "update", ["m" * 64], SITES)
    for _ in range(2):  # the reply was lost, and the same shares leave again
        keeper.note_opened(again, "update", ["m" * 64], SITES)
    with pytest.raises(PolicyRefusal, match="is over"):
        keeper.note_masked(first, "update", ["m" * 64], SITES)


def test_opened_value_goes_into_another_sum_of_the_same_sites_alone(tmp_path: Path) -> None:
    """One site can spoil a sum. The difference of sums over two sets could be the value of a single site."""
    keeper, after = state(tmp_path), Attempt(RUN, 1, 2)
    keeper.note_opened(Attempt(RUN, 1, 1), "update", ["m" * 64], SITES)
    acts = (keeper.check_closed, keeper.note_masked, keeper.note_opened)
    for _ in range(2):
        for others in (SITES[:2], [*SITES, "site-003"]):
            for act in acts:
                with pytest.raises(PolicyRefusal, match="was opened in a sum; it goes into no other one"):
                    act(after, "update", ["m" * 64], others)
        # masked for the second sum, and opened in it, the value is still that of these sites
        for act in acts:
            act(after, "update", ["m" * 64], SITES)


def test_attempts_of_a_run_whose_folder_was_cleaned_still_go_forward(tmp_path: Path) -> None:
    state(tmp_path).note_masked(Attempt(RUN, 1, 2), "update", ["m" * 64], SITES)
    clean(tmp_path, days=0)
    with pytest.raises(PolicyRefusal, match="attempt 1 is over; this site has taken part in 2"):
        state(tmp_path).check_closed(Attempt(RUN, 1, 1), "update", ["n" * 64], SITES)


def test_run_that_the_site_gives_up_frees_what_it_masked_and_nothing_that_was_opened(tmp_path: Path) -> None:
    first, other = Attempt(RUN, 1, 1), Attempt("b" * 16, 1, 1)
    keeper = state(tmp_path)
    keeper.note_opened(first, "update", ["o" * 64], SITES)
    keeper.note_masked(first, "update", ["m" * 64], SITES)
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"site": "site-000", "state_dir": "."}))
    for name in ("skin", "../runs", RUN[:8]):
        with pytest.raises(ConfigError, match="--run: found .*allowed 16 hexadecimal digits"):
            clean_command(site, run=name)
    assert keeper.folder.exists()
    clean_command(site, run=RUN)
    assert not keeper.folder.exists()
    another_run = state(tmp_path, run="b" * 16)
    another_run.note_masked(other, "update", ["m" * 64], SITES)
    with pytest.raises(PolicyRefusal, match="was opened in a sum"):
        another_run.note_masked(other, "update", ["o" * 64], SITES)
    with pytest.raises(PolicyRefusal, match=f"gave run {RUN} up"):
        state(tmp_path).check_closed(Attempt(RUN, 1, 2), "update", ["k" * 64], SITES)


def test_note_of_an_earlier_version_closes_too_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    keeper, path = state(tmp_path), tmp_path / "secure" / "opened.json"
    path.write_text(json.dumps([["update", "m" * 64]]))
    with pytest.raises(PolicyRefusal, match="goes into no other one"):
        keeper.check_closed(Attempt(RUN, 1, 1), "update", ["m" * 64], SITES)
    for content in ("[[", "[1]", '[["update"]]'):
        path.write_text(content)
        with pytest.raises(StateError, match="opened.json"):
            keeper.check_closed(Attempt(RUN, 1, 1), "update", ["m" * 64], SITES)


def test_attempts_only_go_forward_and_old_secrets_are_deleted(tmp_path: Path) -> None:
    federation = MaskedFederation(3, Parameters())
    keeper = state(tmp_path)
    for number in (1, 2):
        session = federation.prepared(attempt_of(number))["site-000"]
        keeper.keep(session)
        members = sorted(
            (s.member for s in federation.prepared(attempt_of(number)).values() if s.name != "site-000"),
            key=lambda member: member.name,
        )
        session.enrol(subject_of(number), [session.member, *members])
        words: Words = np.zeros(4, np.uint64)
        session.mask(words)
        keeper.keep_sent(number, words)
        keeper.keep(session)
        assert np.array_equal(keeper.read_sent(number), words)
    assert keeper.load_session(1) is None and keeper.load_session(2) is not None
    assert not keeper.has_sent(1)
    with pytest.raises(PolicyRefusal, match="attempt 2 is over"):
        keeper.check_new(2)
    keeper.check_new(3)
    modes = {path.stat().st_mode & 0o777 for path in keeper.folder.iterdir()}
    assert modes == {0o600}


def test_check_names_the_rule_that_an_experiment_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, site = tmp_path / "experiment.yaml", tmp_path / "site.yaml"
    content = {"site": "site-0", "state_dir": "state", "device": "cpu"}

    def said(policy: dict[str, Any], *, takes_part: bool = False, **changes: Any) -> str:
        settings = experiment(**changes).model_dump(mode="json", exclude_unset=True)
        asked.write_text(yaml.safe_dump(settings))
        site.write_text(yaml.safe_dump(content | {"policy": policy}))
        with nullcontext() if takes_part else pytest.raises(PolicyRefusal, match="would take no part"):
            check_command(site, asked)
        return capsys.readouterr().out

    demands = {"require_secure": True, "least_sites": 4, "assumed_colluders": 1}
    assert "would refuse the experiment: policy.require_secure" in said(demands)
    assert "policy.least_sites: this site demands 4" in said(demands, secure={"least": 3})
    few = said(demands, secure={"least": 4, "assumed_colluders": 0})
    assert "policy.assumed_colluders: this site demands 1; the experiment has 0" in few
    enough = said(demands, takes_part=True, secure={"least": 4, "assumed_colluders": 1})
    assert "refuse" not in enough
