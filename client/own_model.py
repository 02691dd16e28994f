"""A site's own model: the shared layers of its cluster and its own layers, in a file that can be served."""

from perennial.client.class_means import own_class_means
from perennial.client.held_out import held_out_counts
from perennial.client.kept_model import keep_own_model
from perennial.client.own_layers import with_own_layers
from perennial.client.policy import check_answer
from perennial.client.site import Site
from perennial.config.evaluation import count_noise
from perennial.protocol.messages import PersonalModelReply, PersonalModelRequest


def answer_personal_model(site: Site, request: PersonalModelRequest) -> PersonalModelReply:
    """Keep the personalised model in the state folder; tell how good it is only where sites evaluate."""
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
        return PersonalModelReply(**request.stamp_fields)
    return PersonalModelReply(**request.stamp_fields, **vars(held_out_counts(site, request, model)))
