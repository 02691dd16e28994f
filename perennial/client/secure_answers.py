"""What a site answers in the exchanges of secure aggregation that carry no values.

They are the introduction, the shares, the vote and the opening. None of them needs data or a model.
"""

from collections.abc import Sequence

from perennial.client.identity import Identity
from perennial.client.policy import check_answer, check_secure
from perennial.client.release import leave
from perennial.client.secure_state import SecureState
from perennial.client.state import Quota
from perennial.config.secure import SecureConfig
from perennial.foundation.errors import ProtocolError
from perennial.privacy.released import Public
from perennial.privacy.secure.roster import Attempt, Peer, require
from perennial.privacy.secure.site_session import SiteSession
from perennial.protocol.secure_messages import (
    IntroduceReply,
    IntroduceRequest,
    OpenReply,
    OpenRequest,
    ShareReply,
    ShareRequest,
    VoteReply,
    VoteRequest,
)
from perennial.protocol.stamp import Stamp


def open_secure_state(identity: Identity, request: Stamp) -> tuple[SecureConfig, SecureState]:
    """The experiment's setting and this site's state.

    Raises PolicyRefusal when the site does not take part or demands more than the setting, and ProtocolError
    when the experiment has no such setting or is another one.
    """
    trains = identity.experiment.strategy.trains
    check_answer(identity.policy, "train" if trains else "statistics")
    secure = identity.experiment.secure
    if secure is None or request.experiment != identity.experiment.digest:
        raise ProtocolError("secure: this site's experiment has no secure aggregation, or is another one")
    check_secure(identity.policy, identity.experiment)
    runs, limits = identity.state_dir / "runs", identity.limits
    quota = None if limits is None else Quota(runs, limits)
    return secure, SecureState(identity.state_dir, request.run, identity.name, identity.policy, quota)


def answer_introduce(identity: Identity, request: IntroduceRequest) -> IntroduceReply:
    """Introduce this site for a task by its signing key and its agreement key, made if missing."""
    _, state = open_secure_state(identity, request)
    with state.lock_attempts():
        cipher = state.load_cipher(request.task, make=True)
    peer = Peer.introduce(identity.name, state.identity, cipher, request.run, request.task)
    return leave(
        identity,
        request,
        IntroduceReply,
        identity=Public(peer.identity),
        cipher=Public(peer.cipher),
        signature=Public(peer.signature),
    )


def answer_share(identity: Identity, request: ShareRequest) -> ShareReply:
    """Make mask keys and sealed shares for an attempt; the same ones if it was asked before.

    Raises PolicyRefusal for too few peers, a peer that is not trusted, or other peers than the first time.
    """
    secure, state = open_secure_state(identity, request)
    peers = [
        Peer(*each)
        for each in align_columns(
            request.peers, request.peer_identities, request.peer_ciphers, request.peer_signatures
        )
    ]
    check_secure(identity.policy, identity.experiment, sites=len(peers))
    with state.lock_attempts():
        session = state.load_session(request.attempt)
        if session is None:
            state.check_new(request.attempt)
            shared = identity.experiment.privacy.shared
            session = SiteSession.prepare(
                identity.name,
                Attempt(request.run, request.task, request.attempt),
                secure.parameters(shared_noise=shared),
                peers,
                state.load_cipher(request.task),
                state.identity,
                state.trust,
            )
            state.keep_peers()
            state.keep(session)
    require(session.peers == peers, f"attempt {request.attempt} was prepared for other peers")
    advert = session.advert
    return leave(
        identity,
        request,
        ShareReply,
        attempt=Public(request.attempt),
        mask=Public(advert.member.mask),
        commitment=Public(advert.member.commitment),
        signature=Public(advert.member.signature),
        receivers=Public(list(advert.shares)),
        shares=Public(list(advert.shares.values())),
    )


def answer_vote(identity: Identity, request: VoteRequest) -> VoteReply:
    """A signature over the set of survivors."""
    _, state = open_secure_state(identity, request)
    check_secure(identity.policy, identity.experiment, sites=len(request.survivors))
    sealed = _map_by_name(request.senders, request.shares)
    with state.lock_attempts():
        session = _load_session(state, request.attempt)
        if session.subject is not None:
            about = session.subject.statistic, session.closes
            state.check_closed(session.attempt, *about, request.survivors)
        cipher = state.load_cipher(session.attempt.task)
        signature = session.sign(request.survivors, sealed, cipher, state.identity)
        state.keep(session)
    return leave(identity, request, VoteReply, attempt=Public(request.attempt), signature=Public(signature))


def answer_open(identity: Identity, request: OpenRequest) -> OpenReply:
    """Give out the shares that open an attempt's sum; its value then goes into no sum of other sites."""
    _, state = open_secure_state(identity, request)
    with state.lock_attempts():
        session = _load_session(state, request.attempt)
        opening = session.open(request.survivors, _map_by_name(request.voters, request.votes))
        assert session.subject is not None
        about = session.subject.statistic, session.closes
        state.note_opened(session.attempt, *about, session.survivors)
        state.keep(session)
    return leave(
        identity,
        request,
        OpenReply,
        attempt=Public(request.attempt),
        seeds_of=Public(list(opening.seeds)),
        seeds=Public(list(opening.seeds.values())),
        keys_of=Public(list(opening.keys)),
        keys=Public(list(opening.keys.values())),
    )


def _load_session(state: SecureState, number: int) -> SiteSession:
    session = state.load_session(number)
    if session is None:
        raise ProtocolError(f"secure: this site keeps nothing of attempt {number}")
    return session


def _map_by_name(names: Sequence[str], values: Sequence[str]) -> dict[str, str]:
    return {row[0]: row[1] for row in align_columns(names, values)}


def align_columns(*columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Rows of lists that must be of one length. Raises ProtocolError when they are not."""
    if len({len(column) for column in columns}) != 1:
        raise ProtocolError(
            f"secure: lists of {', '.join(str(len(c)) for c in columns)} entries side by side"
        )
    return list(zip(*columns, strict=True))
