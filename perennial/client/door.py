"""The first check of a deployed site: is this request one that the approved experiment makes?

What the request would release is judged afterwards, by client/policy.py, where it is computed.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from perennial.client.identity import Identity
from perennial.client.plan import Plan
from perennial.client.policy import check_secure
from perennial.client.release import has_read_data
from perennial.client.request_count import RequestCount
from perennial.client.site import build_registry_of_site, require_same_experiment, require_split_key
from perennial.client.state import Quota
from perennial.client.time_limit import LONGEST, time_limit
from perennial.config.site import SitePolicy
from perennial.foundation.errors import (
    ConfigError,
    DataError,
    PerennialError,
    PolicyRefusal,
    PrivacyError,
    ProtocolError,
    StateError,
)
from perennial.foundation.files import lock_folder, make_folder, replace_file
from perennial.protocol.messages import TrainRequest
from perennial.protocol.stamp import Stamp


@contextmanager
def admit_request(identity: Identity, request: Stamp) -> Iterator[None]:
    """Check and count a request of a deployed site; inside the block it is answered.

    Every request about a run passes here, whether it carries values or opens a masked sum. A simulated site
    admits everything. Raises ProtocolError for another experiment, PolicyRefusal naming the rule, StateError
    when the request cannot be counted.
    """
    if not identity.deployed:
        yield
        return
    policy, experiment = identity.policy, identity.experiment
    require_split_key(identity, request)
    registry = build_registry_of_site(identity)
    require_same_experiment(experiment, registry, request)
    plan = Plan(experiment, registry)
    kind = plan.check(request)
    folder = identity.state_dir / "runs" / request.run
    if identity.limits is not None:
        Quota(folder.parent, identity.limits).require(folder, 0)
    count = RequestCount(identity.state_dir)
    count.take(policy, plan, kind, request)
    if identity.own_data is not None:
        keep_split_key(folder, request.split_key)
    try:
        with time_limit(LONGEST):
            yield
    except PerennialError as error:
        # the server asks for the same round until it is served, and must not find the door shut once the
        # hospital has mended its disk, policy or budget; what failed after the data were read counts
        of_the_site = isinstance(error, StateError | DataError | PrivacyError)
        of_the_site |= isinstance(request, TrainRequest) and isinstance(error, PolicyRefusal)
        if of_the_site and not has_read_data():
            count.give_back(plan, kind, request)
        raise


def describe_unmet_demands(policy: SitePolicy, plan: Plan) -> Iterator[str]:
    """Yield, in words, each demand of the policy that the experiment as a whole does not meet."""
    try:
        check_secure(policy, plan.experiment, plan.experiment.data.sites)
    except PolicyRefusal as refusal:
        yield str(refusal)
    if policy.max_evaluations is not None and plan.count_questions() > policy.max_evaluations:
        yield (
            f"policy.max_evaluations: the experiment asks how many answers of {plan.count_questions()} "
            f"models are right, allowed {policy.max_evaluations}"
        )


RECORD = "split-key.sha256"


def keep_split_key(folder: Path, key: str) -> None:
    """Store the split key of a run's first request, and check that every later request has the same.

    folder: of the run in the site's state_dir. key: hexadecimal; its hash is stored. Raises ProtocolError on
    another key: a run that could change it would train on test samples, and two updates of one round by two
    splits would tell which records moved.
    """
    path = folder / RECORD
    found = hashlib.sha256(key.encode()).hexdigest()
    make_folder(folder)
    with lock_folder(folder):
        if not path.exists():
            replace_file(path, found.encode())
        elif path.read_text() != found:
            raise ProtocolError(
                "split_key: found another one than this run began with; a run keeps its key, and another one "
                "starts another run"
            )


@dataclass(frozen=True)
class WithdrawalForm:
    """A form of `perennial withdraw RUN --form`, for a site that keeps no key itself.

    experiment: digest. current: task -> hash of the statement that counts.
    """

    run: str
    experiment: str
    split_key: str
    current: Mapping[int, str]

    def check(self, state_dir: Path) -> None:
        """Check that the site answered this run of this experiment, and that its key is that of the run.

        The form comes from the operator: an experiment that is approved for another run, with other
        features, would tell of these records what no run was told.
        Raises StateError where the site took no part, ProtocolError where its run had another key.
        """
        folder = state_dir / "runs" / self.run
        began = self.run.isalnum() and (folder / RECORD).exists()
        if not began or not RequestCount(state_dir).has_counted(self.experiment, self.run):
            raise StateError(
                f"{state_dir}: nothing is kept of run {self.run!r:.40} of experiment {self.experiment:.12}; "
                "this site took no part in it, or removed its state"
            )
        keep_split_key(folder, self.split_key)


def read_withdrawal_form(form: Path) -> WithdrawalForm:
    """Raises ConfigError where the file is no form of `perennial withdraw --form`."""
    try:
        content = json.loads(form.read_text())
        run, experiment, key = (str(content[name]) for name in ("run", "experiment", "split_key"))
        current = {int(task): str(found) for task, found in content["statements"].items()}
        return WithdrawalForm(run, experiment, key, current)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{form}: no form of `perennial withdraw RUN --site NAME --form FILE`") from error
