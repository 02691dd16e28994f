"""Sites and a server of secure aggregation without a wire: for tests and for `secure_dropouts`."""

import json
from collections.abc import Collection, Sequence

import numpy as np

from perennial.privacy.secure.keys import Words, draw_secret
from perennial.privacy.secure.roster import Attempt, Parameters, Peer, Subject
from perennial.privacy.secure.server_session import NotEnough, ServerSession
from perennial.privacy.secure.site_session import SiteSession

RUN = "a" * 16


def attempt_of(number: int = 1) -> Attempt:
    """An attempt of the run."""
    return Attempt(RUN, 1, number)


def subject_of(number: int = 1) -> Subject:
    """The update of one model."""
    return Subject(number, "update", "b" * 64)


def trust_all(name: str, identity: str) -> None:
    """A site that pins nobody."""


def accuse_nobody(name: str, reason: str) -> None:
    """Raises AssertionError: no share was false."""
    raise AssertionError(f"{name} {reason}")


class MaskedFederation:
    """Sites with keys of a task.

    kill: whether each site's session goes over its disk between any two requests.
    """

    def __init__(self, sites: int, parameters: Parameters, kill: bool = False) -> None:
        self.names = [f"site-{index:03d}" for index in range(sites)]
        self.parameters, self.kill = parameters, kill
        self.identity = {name: draw_secret() for name in self.names}
        self.cipher = {name: draw_secret() for name in self.names}
        self.peers = [
            Peer.introduce(name, self.identity[name], self.cipher[name], RUN, 1) for name in self.names
        ]

    def prepared(self, attempt: Attempt, names: Collection[str] | None = None) -> dict[str, SiteSession]:
        """Sessions of the sites that answer; the peers are all of them."""
        return {
            name: SiteSession.prepare(
                name, attempt, self.parameters, self.peers, self.cipher[name], self.identity[name], trust_all
            )
            for name in self.names
            if names is None or name in names
        }

    def restarted(self, session: SiteSession) -> SiteSession:
        """The session as a killed site finds it on its disk."""
        return SiteSession.from_json(json.loads(json.dumps(session.to_json()))) if self.kill else session


def run_attempt(
    federation: MaskedFederation, values: dict[str, Words], number: int, phases: Sequence[Collection[str]]
) -> tuple[Words, list[str]] | str:
    """One attempt in which phases[i] answer phase i (adverts, masked values, signatures, openings).

    Returns (sum, survivors), or the reason for which nothing was opened.
    """
    attempt = attempt_of(number)
    sessions = federation.prepared(attempt, phases[0])
    server = ServerSession(attempt, federation.parameters, federation.peers, subject_of(number))
    try:
        server.enrol({name: session.advert for name, session in sessions.items()}, federation.names)
        for member in server.members:
            name = member.name
            if name in phases[1]:
                session = sessions[name] = federation.restarted(sessions[name])
                session.enrol(server.subject, server.members)
                words = values[name].copy()
                session.mask(words)
                server.add(name, words, len(words))
        server.close()
        for name in server.survivors:
            if name in phases[2]:
                session = sessions[name] = federation.restarted(sessions[name])
                server.add_vote(name, signed(federation, server, session))
        server.require_votes()
        if federation.kill:
            stored = json.loads(json.dumps(server.to_json()))
            server = ServerSession.from_json(stored, server.total)
        for name in server.survivors:
            if name in phases[3]:
                session = sessions[name] = federation.restarted(sessions[name])
                server.add_opening(name, session.open(server.survivors, server.votes))
        return server.open(accuse_nobody), server.survivors
    except NotEnough as missing:
        return str(missing)


def signed(federation: MaskedFederation, server: ServerSession, session: SiteSession) -> str:
    """The session's vote for the server's survivors."""
    keys = federation.cipher[session.name], federation.identity[session.name]
    return session.sign(server.survivors, server.select_shares(session.name), *keys)


def random_values(names: Sequence[str], length: int, seed: int = 0) -> dict[str, Words]:
    """(length,) full-range words for each site."""
    generator = np.random.Generator(np.random.PCG64(seed))
    top = np.iinfo(np.uint64).max
    return {name: generator.integers(0, top, length, np.uint64, endpoint=True) for name in names}
