"""A site's own model: the shared layers of its cluster and its own layers, in a file that can be served.

Personal layers are trained here, kept on the site's disk, and never part of a message. FedPer (Arivazhagan et
al. 2019, arXiv 1912.00818).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from perennial.client.class_means import own_class_means
from perennial.client.held_out import held_out_counts
from perennial.client.policy import check_answer
from perennial.client.release import leave
from perennial.client.site import Site
from perennial.config.evaluation import count_noise
from perennial.data.samples import stored_as
from perennial.foundation.errors import ProtocolError, StateError
from perennial.foundation.files import make_folder
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.models.layers import with_rows
from perennial.models.saved import PERSONAL_MODEL, Inputs, save_model
from perennial.protocol.messages import PersonalModelReply, PersonalModelRequest
from perennial.protocol.tensors import Tensors

RECORD = "own-layers"


def answer_personal_model(site: Site, request: PersonalModelRequest) -> PersonalModelReply:
    """Keep the site's personalised model on its disk; reply with its right answers if sites evaluate."""
    policy = site.identity.policy
    check_answer(policy, "train" if site.experiment.strategy.trains else "statistics")
    site.check_experiment(request)
    previous = site.previous_model(request)
    arrays = with_own_layers(
        site, request.run, request.arrays, request.personal or [], before_round=request.round + 1
    )
    model, _ = site.models.load(request.num_classes, arrays, previous)
    keep_own_model(site, model, own_class_means(site, request, model))
    experiment = site.experiment
    # noise that the server adds to sums is on no single site's counts
    on_sums_alone = experiment.privacy.mode == "client_central" and count_noise(experiment) is not None
    if not experiment.evaluation.federated or "evaluate" not in policy.answers or on_sums_alone:
        return leave(site.identity, request, PersonalModelReply)
    counts = held_out_counts(site, request, model)
    return leave(site.identity, request, PersonalModelReply, **counts.typed())


def keep_own_model(site: Site, model: IncrementalModel, class_means: Tensor | None) -> None:
    """Replace the site's model file. class_means: (M, d), if the site classifies by them."""
    folder = site.identity.state_dir
    make_folder(folder)
    data = site.data
    save_model(
        folder / PERSONAL_MODEL,
        complete_state(model),
        Inputs(data.input_shape, stored_as(data.x), data.mean, data.std, data.columns, data.fill),
        site.process.registry.classes[: model.num_classes],
        site.experiment.model_dump_json(),
        class_means,
    )


def with_own_layers(
    site: Site, run: str, arrays: Mapping[str, Tensor], names: Sequence[str], before_round: int
) -> Tensors:
    """arrays, with this site's own values for the named layers as they were before a round.

    A site without values of its own starts from those received; a classifier that has grown since keeps its
    own rows and takes the new ones from those received. Raises ProtocolError when a name is not in arrays,
    StateError when the kept layer is of another network.
    """
    if not names:
        return Tensors(arrays)
    unknown = sorted(set(names) - arrays.keys())
    if unknown:
        raise ProtocolError(f"personal: found {unknown[0]!r}, which is no tensor of the model received")
    record = site.state(run).get(RECORD, before_round)
    own = record[0] if record is not None else {}
    joined = Tensors(arrays)
    for name in names:
        if name in own:
            try:
                joined[name] = with_rows(own[name], arrays[name])
            except ValueError as error:
                raise StateError(f"own layer {name!r} of site {site.name!r}: {error}") from error
    return joined


def keep_own_layers(site: Site, run: str, layers: Mapping[str, Tensor], after_round: int) -> None:
    """Store the layers as they are after a round."""
    site.state(run).put(RECORD, after_round, layers, {})


def has_own_layers(site: Site, run: str, before_round: int) -> bool:
    """Whether the site had layers of its own before a round."""
    return site.state(run).get(RECORD, before_round) is not None
