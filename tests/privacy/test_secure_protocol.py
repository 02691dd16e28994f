"""The state machines of secure aggregation: right sums, named ends, and refusals."""

from itertools import combinations, product

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.privacy.secure.keys import PRIME, Words, add_masks, agree, derive, draw_secret, join, split
from perennial.privacy.secure.roster import Parameters, Peer, hash_peers, hash_roster
from perennial.privacy.secure.server_session import ServerSession
from perennial.privacy.secure.site_session import SiteSession
from tests.privacy.secure_sites import (
    RUN,
    MaskedFederation,
    accuse_nobody,
    attempt_of,
    random_values,
    run_attempt,
    signed,
    subject_of,
    trust_all,
)


def _all(federation: MaskedFederation) -> list[list[str]]:
    return [federation.names] * 4


@given(st.binary(min_size=32, max_size=32), st.integers(1, 7), st.data())
@settings(deadline=None, max_examples=30)
def test_any_threshold_of_shares_gives_the_secret_back(secret: bytes, threshold: int, data: st.DataObject):
    shares = split(secret, range(1, 8), threshold)
    chosen = data.draw(st.permutations(range(1, 8)))[:threshold]
    assert join({point: shares[point] for point in sorted(chosen)}) == secret


def test_fewer_shares_than_the_threshold_fit_every_secret():
    """Two shares of three: for each secret there is exactly one polynomial through them."""
    shares = split(bytes(31) + b"\x05", [1, 2, 3], 3)
    one, two = (int.from_bytes(shares[point], "big") for point in (1, 2))
    for secret in (0, 5, 2**255, PRIME - 1):
        # Lagrange at 3 of the polynomial through (0, secret), (1, one), (2, two)
        third = (secret - 3 * one + 3 * two) % PRIME
        given_three = {1: shares[1], 2: shares[2], 3: third.to_bytes(33, "big")}
        if secret < 2**256:
            assert join(given_three) == secret.to_bytes(32, "big")


@pytest.mark.parametrize(("sites", "colluders"), [(3, 0), (4, 1), (10, 3)])
def test_sum_has_the_same_words_as_without_masks(sites: int, colluders: int):
    federation = MaskedFederation(sites, Parameters(colluders))
    values = random_values(federation.names, 1000)
    found = run_attempt(federation, values, 1, _all(federation))
    assert not isinstance(found, str), found
    assert np.array_equal(found[0], sum(values.values(), np.zeros(1000, np.uint64)))


@pytest.mark.parametrize(("sites", "colluders"), [(2, 0), (3, 0), (3, 1), (4, 0), (4, 1)])
def test_every_pattern_of_drop_outs_ends_in_the_right_sum_or_in_a_named_skip(sites: int, colluders: int):
    federation = MaskedFederation(sites, Parameters(colluders), kill=True)
    values = random_values(federation.names, 5)
    needed = Parameters(colluders).count_survivors_needed
    opened = 0
    # the phase in which each site falls silent; 4: never
    for falls in product(range(5), repeat=sites):
        phases = [[n for n, at in zip(federation.names, falls, strict=True) if at > p] for p in range(4)]
        found = run_attempt(federation, values, 1, phases)
        threshold = Parameters(colluders).compute_threshold(sites)
        roster, survivors = len(phases[0]), len(phases[1])
        fine = survivors >= max(needed(roster), threshold) and len(phases[3]) >= threshold
        if isinstance(found, str):
            assert not fine, (falls, found)
        else:
            opened += 1
            assert found[1] == phases[1]
            assert np.array_equal(found[0], sum((values[n] for n in phases[1]), np.zeros(5, np.uint64)))
    assert opened >= 1


def test_survivor_of_one_round_that_drops_out_in_the_next_has_nothing_of_the_first_opened():
    """Its mask key of round 2 comes to light; the mask of round 1 was made with another one."""
    federation = MaskedFederation(4, Parameters(1))
    first, second = attempt_of(1), attempt_of(2)
    values = random_values(federation.names, 8)
    sessions = federation.prepared(first)
    victim = federation.names[0]
    secrets = {key: sessions[victim].to_json()[key] for key in ("mask_secret", "seed")}
    server = ServerSession(first, federation.parameters, federation.peers, subject_of())
    server.enrol({n: s.advert for n, s in sessions.items()}, federation.names)
    sent = {}
    for name, session in sessions.items():
        session.enrol(server.subject, server.members)
        sent[name] = values[name].copy()
        session.mask(sent[name])
        server.add(name, sent[name], len(sent[name]))
    server.close()
    for name, session in sessions.items():
        server.add_vote(name, signed(federation, server, session))
    for name, session in sessions.items():
        server.add_opening(name, session.open(server.survivors, server.votes))
    server.open(accuse_nobody)
    later = federation.prepared(second)
    old, new = sessions[victim], later[victim]
    assert (old.mask_secret, old.seed) == ("", ""), "the site forgets them as soon as its values are masked"
    assert secrets["mask_secret"] != new.mask_secret and secrets["seed"] != new.seed
    # all that was opened of the victim: its seed of round 1 (survivor) and its mask key of round 2 (gone)
    again = {**old.to_json(), **secrets, "stage": "prepared"}
    forged = SiteSession.from_json({**again, "mask_secret": new.mask_secret})
    guess = sent[victim].copy()
    stream = np.zeros_like(guess)
    forged.mask(stream)
    assert not np.array_equal(guess - stream, values[victim])
    genuine = SiteSession.from_json(again)
    stream = np.zeros_like(guess)
    genuine.mask(stream)
    assert np.array_equal(guess - stream, values[victim]), "the check above would notice the right key"


def _masked(
    federation: MaskedFederation, here: list[str] | None = None
) -> tuple[dict[str, SiteSession], ServerSession]:
    """Everybody has sent masked values. here: those that have; None: all."""
    attempt = attempt_of()
    sessions = federation.prepared(attempt)
    server = ServerSession(attempt, federation.parameters, federation.peers, subject_of())
    server.enrol({n: s.advert for n, s in sessions.items()}, federation.names)
    for name in federation.names if here is None else here:
        session = sessions[name]
        session.enrol(server.subject, server.members)
        words = np.zeros(3, np.uint64)
        session.mask(words)
        server.add(name, words, len(words))
    server.close()
    return sessions, server


def test_a_stage_leaves_no_secret_that_it_does_not_need() -> None:
    """What a thief of a site's disk finds after each stage; what was given out can be given out again."""
    federation = MaskedFederation(4, Parameters(1))
    sessions, server = _masked(federation)
    assert all(session.mask_secret == session.seed == "" for session in sessions.values())
    for name, session in sessions.items():
        server.add_vote(name, signed(federation, server, session))
    session = sessions[federation.names[0]]
    assert all(key and seed for key, seed in session.held.values())
    opening = session.open(server.survivors, server.votes)
    kept = SiteSession.from_json(session.to_json())
    assert kept.open(server.survivors, server.votes) == opening
    assert not any(key for key, _ in kept.held.values()) and not kept.sealed


def test_shrunk_set_of_survivors_is_refused():
    federation = MaskedFederation(5, Parameters(1))
    sessions, server = _masked(federation)
    name = federation.names[0]
    signed(federation, server, sessions[name])
    with pytest.raises(PolicyRefusal, match="shrunk set"):
        sessions[name].sign(server.survivors[:-1], {}, b"", federation.identity[name])


def test_both_kinds_of_shares_are_refused():
    """After the seed of a site, its mask key: that is a second unmasking with the site among the gone."""
    federation = MaskedFederation(5, Parameters(1))
    sessions, server = _masked(federation)
    for name, session in sessions.items():
        server.add_vote(name, signed(federation, server, session))
    name = federation.names[0]
    opening = sessions[name].open(server.survivors, server.votes)
    assert set(opening.seeds) == set(federation.names) and not opening.keys
    with pytest.raises(PolicyRefusal, match="second unmasking"):
        sessions[name].open(server.survivors[:-1], server.votes)
    assert sessions[name].open(server.survivors, server.votes) == opening


def test_set_without_a_threshold_of_signatures_is_refused():
    federation = MaskedFederation(5, Parameters(1))
    sessions, server = _masked(federation)
    for name, session in sessions.items():
        server.add_vote(name, signed(federation, server, session))
    name = federation.names[0]
    few = dict(list(server.votes.items())[:3])
    with pytest.raises(PolicyRefusal, match="3 valid signatures"):
        sessions[name].open(server.survivors, few)
    forged = {other: server.votes[name] for other in federation.names}
    with pytest.raises(PolicyRefusal, match="1 valid signatures"):
        sessions[name].open(server.survivors, forged)


def test_masks_serve_once_and_the_roster_is_fixed():
    federation = MaskedFederation(4, Parameters(0))
    sessions, server = _masked(federation)
    session = sessions[federation.names[0]]
    with pytest.raises(PolicyRefusal, match="masked its values already"):
        session.mask(np.zeros(3, np.uint64))
    with pytest.raises(PolicyRefusal, match="another roster"):
        session.enrol(server.subject, server.members[:-1])
    with pytest.raises(PolicyRefusal, match="another sum"):
        session.enrol(subject_of(2), server.members)


def test_messages_of_another_attempt_are_refused():
    """A replayed round: its members and shares are bound to the attempt that they were made for."""
    federation = MaskedFederation(4, Parameters(0))
    _, server = _masked(federation)
    name = federation.names[0]
    later = federation.prepared(attempt_of(2))[name]
    with pytest.raises(ProtocolError, match="not signed by it"):
        later.enrol(server.subject, server.members)


def test_sealed_shares_that_were_changed_or_swapped_are_left_out():
    federation = MaskedFederation(3, Parameters(0))
    sessions, server = _masked(federation)
    name, one, two = federation.names
    shares = server.select_shares(name)
    broken = shares[one][:-2] + ("00" if shares[one][-2:] != "00" else "01")
    keys = federation.cipher[name], federation.identity[name]
    sessions[name].sign(server.survivors, {one: broken, two: shares[two]}, *keys)
    assert set(sessions[name].held) == {name, two}
    sessions, server = _masked(federation)
    sessions[name].sign(server.survivors, {one: shares[two], two: shares[one]}, *keys)
    assert set(sessions[name].held) == {name}


def _opening(sites: int) -> ServerSession:
    """Everybody has given shares, but the last site, which sent no masked values."""
    federation = MaskedFederation(sites, Parameters(0))
    *here, gone = federation.names
    sessions, server = _masked(federation, here)
    assert gone in {member.name for member in server.members}
    for name in here:
        server.add_vote(name, signed(federation, server, sessions[name]))
    for name in here:
        server.add_opening(name, sessions[name].open(server.survivors, server.votes))
    return server


@pytest.mark.parametrize(("sites", "liars"), [(5, [0]), (5, [3]), (8, [0, 2]), (30, [0, 1, 2, 3, 9])])
def test_false_shares_are_left_out_and_their_givers_named(sites: int, liars: list[int]):
    server = _opening(sites)
    victim, gone = server.members[1].name, server.members[-1].name
    for of in (server.seeds[victim], server.keys[gone]):
        for liar in liars:
            of[server.members[liar].name] = "00" * 33
    named: list[tuple[str, str]] = []
    assert not server.open(lambda *each: named.append(each)).any()
    false = [server.members[liar].name for liar in liars]
    if 0 in liars:
        for of in (f"seed of site {victim!r}", f"mask key of site {gone!r}"):
            assert [by for by, told in named if f"a false share of the {of}" in told] == false
        assert not set(false) & {*server.seeds[victim], *server.keys[gone]}
    assert {by for by, _ in named} <= set(false)


@pytest.mark.parametrize("of_seed", [True, False])
def test_secret_that_was_dealt_out_falsely_is_named_by_its_own_site(of_seed: bool):
    server = _opening(5)
    of = server.members[0 if of_seed else -1].name
    shares = (server.seeds if of_seed else server.keys)[of]
    for number, by in enumerate(shares):
        shares[by] = f"{number:066x}"
    with pytest.raises(ProtocolError, match=f"of site {of!r} does not come of the 4 shares"):
        server.open(accuse_nobody)
    shares.clear()  # its shares could be opened by nobody
    with pytest.raises(ProtocolError, match=f"of site {of!r} does not come of the 0 shares"):
        server.open(accuse_nobody)


def test_words_of_another_length_are_those_of_one_site_alone():
    federation = MaskedFederation(3, Parameters(0))
    server = ServerSession(attempt_of(), federation.parameters, federation.peers, subject_of())
    server.enrol({n: s.advert for n, s in federation.prepared(attempt_of()).items()}, federation.names)
    liar, *others = federation.names
    for wrong in (np.zeros(2, np.uint64), np.zeros((3, 1), np.uint64)):
        with pytest.raises(ProtocolError, match="expected 3 words"):
            server.add(liar, wrong, 3)
    for name in others:
        server.add(name, np.zeros(3, np.uint64), 3)
    assert server.survivors == others


def test_peer_that_nobody_introduced_or_trusts_is_refused():
    federation = MaskedFederation(3, Parameters(0))
    name = federation.names[0]
    stranger = Peer.introduce(federation.names[1], draw_secret(), draw_secret(), RUN, 2)
    peers = [federation.peers[0], stranger, federation.peers[2]]
    keys = (federation.cipher[name], federation.identity[name])
    with pytest.raises(ProtocolError, match="not signed by its identity"):
        SiteSession.prepare(name, attempt_of(), Parameters(), peers, *keys, trust_all)

    def pinned(site: str, identity: str) -> None:
        if site == federation.names[1] and identity != federation.peers[1].identity:
            raise PolicyRefusal("pinned")

    honest = Peer.introduce(federation.names[1], draw_secret(), draw_secret(), RUN, 1)
    peers = [federation.peers[0], honest, federation.peers[2]]
    with pytest.raises(PolicyRefusal, match="pinned"):
        SiteSession.prepare(name, attempt_of(), Parameters(), peers, *keys, pinned)


def test_parameters_leave_an_honest_site_between_any_two_openings():
    for sites, colluders in product(range(2, 40), range(20)):
        threshold = Parameters(colluders).compute_threshold(sites)
        assert 2 * threshold - sites > colluders
    with pytest.raises(PolicyRefusal, match="a sum needs 4"):
        Parameters(colluders=2).check_roster(3)
    assert Parameters(colluders=1, honest=7).count_survivors_needed(10) == 8
    assert Parameters(least=5).count_survivors_needed(6) == 5


def test_a_roster_of_more_than_a_hundred_is_refused_by_name():
    Parameters().check_roster(100)
    with pytest.raises(PolicyRefusal, match="a roster of 101 sites; allowed 100"):
        Parameters().check_roster(101)


def _residual_of(
    victim: str, federation: MaskedFederation, others: list[str], value: int, number: int
) -> Words:
    """What is left of a site's masked words once everything is off that the server and `others` know.

    That are the pair masks with them, and the self mask, whose seed every opening gives out.
    """
    attempt = attempt_of(number)
    sessions = federation.prepared(attempt)
    members = [session.member for session in sessions.values()]
    session = sessions[victim]
    session.enrol(subject_of(), members)
    words = np.full(64, value, np.uint64)
    own_seed = bytes.fromhex(session.seed)
    session.mask(words)
    digest = hash_roster(hash_peers(attempt, federation.peers), subject_of(), members)
    own_mask = derive(own_seed, attempt.bound("self mask", victim, digest))
    add_masks(words, [own_mask], subtract=True)
    for other in others:
        pair = sorted((victim, other))
        secret = bytes.fromhex(sessions[other].mask_secret)
        mask = agree(secret, session.member.mask, attempt.bound("pair mask", *pair, digest))
        add_masks(words, [mask], subtract=victim == pair[0])
    return words


def _uniform(cells: np.ndarray) -> bool:
    """Chi-square over 16 cells: 99.99 % of it with 15 degrees of freedom lies below 42.6."""
    expected = cells.sum() / 16
    return bool(((cells - expected) ** 2 / expected).sum() < 42.6)


@pytest.mark.parametrize(("sites", "colluders"), [(3, 1), (4, 2), (5, 3)])
def test_after_the_opening_any_colluders_and_the_server_see_a_site_s_value_uniform(
    sites: int, colluders: int
):
    """Whatever the value, low bits of what is left of its words are uniform as long as one other site is
    honest; with all others dishonest the same measurement reads the value off."""
    federation = MaskedFederation(sites, Parameters(colluders))
    victim, *others = federation.names
    for chosen in combinations(others, colluders):
        for value in (0, 7):
            cells = np.zeros(16)
            for number in range(1, 9):
                found = _residual_of(victim, federation, list(chosen), value, number) & 15
                cells += np.bincount(found, minlength=16)
            assert _uniform(cells)
    alone = _residual_of(victim, federation, others, 7, 1)
    assert (alone == 7).all() and not _uniform(np.bincount(alone & 15, minlength=16))


def test_mask_is_aes_256_in_counter_mode_over_its_whole_length():
    """Beside the plain counter mode of the cipher, over several pieces and an end within a block."""
    vector: Words = np.zeros(150_001, dtype=np.uint64)
    add_masks(vector, [b"k" * 32])
    counter = Cipher(algorithms.AES(b"k" * 32), modes.CTR(bytes(15) + b"\x02")).encryptor()
    assert vector.tobytes() == counter.update(bytes(vector.nbytes))


def test_view_of_colluders_and_server_does_not_depend_on_a_value():
    """Low bits of what an honest site sends, for two different values, with everything that the colluder and
    the server hold beside it: chi-square over 16 cells, 480 attempts each."""
    federation = MaskedFederation(3, Parameters(1))
    victim, _, colluder = federation.names
    counts = {}
    for value in (0, 7):
        cells = np.zeros(16)
        for number in range(480):
            attempt = attempt_of(number + 1)
            sessions = federation.prepared(attempt)
            server = ServerSession(attempt, federation.parameters, federation.peers, subject_of())
            server.enrol({n: s.advert for n, s in sessions.items()}, federation.names)
            session = sessions[victim]
            session.enrol(server.subject, server.members)
            words = np.full(1, value, np.uint64)
            session.mask(words)
            # the colluder can take its own pair mask off, and holds a share of the seed
            own = sessions[colluder]
            own.enrol(server.subject, server.members)
            own.mask(np.zeros(1, np.uint64))
            keys = federation.cipher[colluder], federation.identity[colluder]
            own.sign(federation.names, server.select_shares(colluder), *keys)
            share = int(own.held[victim][1][-1], 16) & 3
            cells[(int(words[0]) & 3) * 4 + share] += 1
        counts[value] = cells
    expected = 480 / 16
    for cells in counts.values():
        # 99.99 % of chi-square with 15 degrees of freedom lies below 42.6
        assert ((cells - expected) ** 2 / expected).sum() < 42.6
