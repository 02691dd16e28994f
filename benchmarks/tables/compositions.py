"""Methods inside one another: what a composition gains and costs beside its parts."""

from collections.abc import Mapping
from typing import Any

from benchmarks.table import STANDARD, Measure, Row, Table, of
from benchmarks.tables.privacy import epsilon

FEDDIG, RING, SAMPLES = "composed_feddig_attention", "composed_ring_memory", "composed_pp_fcil_sample"
BAYESIAN = "pp_fcil_bayesian_digits"
CLUSTERS = "composed_feddig_clusters"
LAST, WITHOUT_SITES = 5, "mean of the last 5 rounds"
UPLOADED = "MB uploaded"
UNPROTECTED = "privacy={mode: none}"
FEDAVG = "strategy=fedavg"


def last_rounds(summary: Mapping[str, Any]) -> float:
    """Mean accuracy of the rounds at the end."""
    accuracy = summary["accuracy_by_round"][-LAST:]
    return sum(accuracy) / len(accuracy)


def all_there(summary: Mapping[str, Any]) -> float:
    """Accuracy in the last round before the first site leaves."""
    return float(summary["accuracy_by_round"][7])


def bayesian_epsilon(summary: Mapping[str, Any]) -> float:
    """What a typical record loses at the worst site, as the sites estimate it."""
    return float(summary["epsilon"]["bayesian"])


def own_models_of(*sites: str) -> Measure:
    """Mean over some sites of each one's own model on its own held-out samples, after the last round.

    Where sites have no model of their own, the global model counts.
    """

    def measured(summary: Mapping[str, Any]) -> float:
        own = summary.get("personalised_accuracy")
        accuracy = {site: facts["accuracy"] for site, facts in summary["sites"].items()}
        accuracies = [accuracy[site] if own is None else own[site][-1] for site in sites]
        return sum(accuracies) / len(accuracies)

    return measured


def megabytes_up(summary: Mapping[str, Any]) -> float:
    """All that the sites sent in the run."""
    return summary["bytes_up"] / 1e6


def in_clusters(experiment: str, *settings: str) -> list[Row]:
    """FedDig inside clusters and what it is made of, from one experiment file."""
    plain, heads = "strategy.base=fedavg", "strategy.personal=[head]"
    alone = "strategy={name: digest_synthesis, base: fedavg, server_lr: 0.01, guidance_lr: 1.0}"
    return [
        Row("FedAvg", experiment, (*settings, FEDAVG)),
        Row("FedDig", experiment, (*settings, alone)),
        Row("clusters", experiment, (*settings, plain)),
        Row("FedDig in clusters", experiment, settings),
        Row("clusters, heads at the sites", experiment, (*settings, plain, heads)),
        Row("FedDig in clusters, heads at the sites", experiment, (*settings, heads)),
    ]


def _ring(noise_multiplier: float) -> str:
    """Seeded, so that the row can be run again to the same bits."""
    return (
        f"privacy={{mode: client_local, clip_norm: 1.0, noise_multiplier: {noise_multiplier:g}, "
        "accountant: rdp, delta: 0.001}"
    )


def _samples(noise_multiplier: float) -> tuple[str, ...]:
    return (f"privacy.noise_multiplier={noise_multiplier:g}",)


PLAIN_SGD = (UNPROTECTED, "learner.optimizer.lr=0.1")
WHOLE_LEARNER = (
    *PLAIN_SGD,
    "learner.classification=balanced_softmax",
    "learner.contrastive={weight: 0.1, temperature: 0.1}",
    "learner.memory={selection: herding, per_class: 14}",
    "strategy={name: multi_factor, alpha: 0.7, beta: 0.1, gamma: 0.1, delta: 0.1}",
)
PLAIN_REPLAY = ("model={name: mlp, hidden: [32]}", "learner.distillation=null", FEDAVG)
PRIVATE: dict[str, Measure] = {"epsilon": epsilon, **STANDARD}

TABLES = {
    "compositions_feddig_digits": Table(
        "FedDig around other aggregations, digits: three of four sites with disjoint classes leave for good",
        [
            Row("FedAvg", FEDDIG, (FEDAVG,)),
            Row("layer attention", FEDDIG, ("strategy=layer_attention",)),
            Row("FedDig on FedAvg", FEDDIG, ("strategy.base=fedavg",)),
            Row("FedDig on layer attention", FEDDIG),
            Row(
                "FedDig on PP-FCIL's weights",
                FEDDIG,
                ("strategy.base={name: multi_factor, alpha: 0.7, beta: 0.1, gamma: 0.1, delta: 0.1}",),
            ),
        ],
        measures={"round 8, all there": all_there, WITHOUT_SITES: last_rounds},
        note="24 rounds; one site each leaves after rounds 8, 12 and 16. All rows have the same network, "
        "with the branch that reads digests. The server's learning rates are those of feddig_digits; nothing "
        "was tuned for this table.",
    ),
    "compositions_clusters_digits": Table(
        "FedDig inside clusters, digits: two of three sites of each group are away while clusters train",
        in_clusters(CLUSTERS),
        measures={
            "own models, sites that were away": own_models_of("site-1", "site-2", "site-4", "site-5"),
            "own models, sites that stayed": own_models_of("site-0", "site-3"),
            "global model": of("final_accuracy"),
            UPLOADED: megabytes_up,
        },
        plain=frozenset({UPLOADED}),
        note="24 rounds, of which clusters have the last 16; four of six sites are away in rounds 10 to 23 "
        "and back in the last. A site's own model is its cluster's, with the site's own head where heads "
        "stay at the sites, and the global model in the first two rows. The groups are given, not found. The "
        "server's learning rates are those of feddig_digits; nothing was tuned for this table.",
    ),
    "compositions_ring_digits": Table(
        "A ring with exemplars, digits, 5 sites, 5 tasks of 2 classes, 4 rounds each: noise at the hand-over",
        [
            Row("ring, no protection", RING, (UNPROTECTED,)),
            Row("ring, clipped, no noise", RING, (_ring(0),)),
            *(
                Row(f"ring, noise multiplier {sigma:g}", RING, (_ring(sigma),))
                for sigma in (0.01, 0.03, 0.1, 1)
            ),
            Row("FedAvg, no protection", RING, (UNPROTECTED, FEDAVG)),
            *(
                Row(f"FedAvg, noise multiplier {sigma:g}", RING, (_ring(sigma), FEDAVG))
                for sigma in (0.03, 0.1, 1)
            ),
            Row("FedAvg, equal work: 5 local epochs", RING, (UNPROTECTED, FEDAVG, "learner.epochs=5")),
        ],
        measures=PRIVATE,
        plain=frozenset({"epsilon"}),
        note="Unit: a whole site; the server is not trusted. Epsilon at delta 0.001, Renyi accountant, worst "
        "case over sites, 20 rounds. The multipliers were chosen to span from harmless to useless; an "
        "epsilon of hundreds or more promises nothing. Noise comes from the system, so that protected runs "
        "do not repeat to the bit. The clip norm is not tuned.",
    ),
    "compositions_samples_digits": Table(
        "PP-FCIL's learner under DP-SGD, digits, 5 sites, 2 tasks of 5 classes, 5 rounds each",
        [
            Row("whole learner and weights, no protection", SAMPLES, WHOLE_LEARNER),
            Row("the parts that a claim allows, no protection", SAMPLES, PLAIN_SGD),
            Row("the parts that a claim allows, sigma 1", SAMPLES, _samples(1)),
            Row("the parts that a claim allows, sigma 2", SAMPLES, _samples(2)),
            Row("plain replay and FedAvg, no protection", SAMPLES, (*PLAIN_SGD, *PLAIN_REPLAY)),
            Row("plain replay and FedAvg, sigma 1", SAMPLES, (*_samples(1), *PLAIN_REPLAY)),
        ],
        measures=PRIVATE,
        plain=frozenset({"epsilon"}),
        note="Unit: one training sample; the server is not trusted. Epsilon at delta 0.0001, Renyi "
        "accountant. Off under DP-SGD: balanced softmax, the contrastive term, herding, weights by accuracy "
        "and loss. What stays: dual backbone, distillation, exemplars kept at random, weights by size (which "
        "sites do not tell, so all count alike) and recency. Learning rate 0.5 with DP-SGD and 0.1 without, "
        "as in privacy_samples; not tuned here. Noise comes from the system, so that protected runs do not "
        "repeat to the bit.",
    ),
    "pp_fcil_bayesian_digits": Table(
        "What PP-FCIL's learner under DP-SGD costs a typical record, digits, 5 sites, 2 tasks of 5 classes",
        [Row("sigma 1", BAYESIAN)],
        measures={"epsilon": epsilon, "Bayesian epsilon": bayesian_epsilon, **STANDARD},
        plain=frozenset({"epsilon", "Bayesian epsilon"}),
        note="Unit: one training sample; the server is not trusted. Delta 0.0001; the worst site of each. "
        "Epsilon (Renyi) is the promise. The Bayesian figure is a bound on an estimate from 10 sampled "
        "neighbours a step; it depends on private data, stays at the sites, and does not cover outliers. "
        "Here it is above the promise, so it says nothing that the promise does not.",
    ),
}
