"""Federated baselines under one class-incremental learner, and class-incremental baselines beside them."""

from typing import Any

from benchmarks.paper_claims import Claim
from benchmarks.table import STANDARD, TEN_SEEDS, Row, Table


def at_the_sites(summary: dict[str, Any]) -> float | None:
    """Accuracy of the last model on the sites' own held-out samples, by the learner's classifier."""
    return summary["federated_accuracy"][-1]


RIVALS = {
    "FedAvg": "fedavg",
    "FedNova": "fednova",
    "SCAFFOLD": "scaffold",
    "FedDyn (alpha 0.1)": "{name: feddyn, alpha: 0.1}",
    "AdaBest (mu 0.02, beta 0.3)": "{name: adabest, mu: 0.02, beta: 0.3}",
    "FedDisco (a 0.5, b 0.1)": "feddisco",
    "cyclic weight transfer": "cyclic_weight_transfer",
}

PROX, ICARL, TARGET = "FedProx (mu 0.1)", "iCaRL-FedAvg", "TARGET"
GLFC = "GLFC's learner, no proxy"
LWF, FINE = "LwF-FedAvg", "fine-tuning"
FINE_TUNING = ("learner.distillation=null", "name=finetune-plain-digits")
SITES = "final accuracy at the sites"


def beats(text: str, better: str, worse: str = "FedAvg", measure: str = "final accuracy") -> Claim:
    return Claim(text, better, worse, measure)


CLAIMS = (
    beats("FedProx over FedAvg (Li et al. 2020, arXiv 1812.06127)", PROX),
    beats("FedNova over FedAvg (Wang et al. 2020, arXiv 2007.07481)", "FedNova"),
    beats("SCAFFOLD over FedAvg (Karimireddy et al. 2020, arXiv 1910.06378)", "SCAFFOLD"),
    beats("FedDyn over FedAvg (Acar et al. 2021, arXiv 2111.04263)", "FedDyn (alpha 0.1)"),
    beats("AdaBest over FedAvg (Varno et al. 2022, arXiv 2204.13170)", "AdaBest (mu 0.02, beta 0.3)"),
    beats(
        "AdaBest over FedDyn (Varno et al. 2022, arXiv 2204.13170)",
        "AdaBest (mu 0.02, beta 0.3)",
        "FedDyn (alpha 0.1)",
    ),
    beats("FedDisco over FedAvg (Ye et al. 2023, arXiv 2305.19229)", "FedDisco (a 0.5, b 0.1)"),
    beats("FedAvg over cyclic transfer (Sheller et al. 2019)", "FedAvg", "cyclic weight transfer"),
    beats("GLFC over iCaRL-FedAvg (Dong et al. 2022, arXiv 2203.14867)", GLFC, ICARL, SITES),
    beats("iCaRL over LwF (Rebuffi et al. 2017, arXiv 1611.07725)", ICARL, LWF, SITES),
    beats("LwF over fine-tuning (Li and Hoiem 2016, arXiv 1606.09282)", LWF, FINE),
)

TABLES = {
    "rivals_digits": Table(
        "Digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.3: baselines",
        [
            *[Row(label, "rivals_digits", (f"strategy={name}",)) for label, name in RIVALS.items()],
            Row(PROX, "rivals_digits", ("learner.correction={name: fedprox, mu: 0.1}",)),
            Row(ICARL, "icarl_fedavg_digits"),
            Row(GLFC, "glfc_digits"),
            Row(LWF, "lwf_fedavg_digits"),
            Row(FINE, "lwf_fedavg_digits", FINE_TUNING),
            Row("centralised, one site", "centralised_digits"),
            Row("joint, one site, all samples", "joint_digits"),
        ],
        measures={**STANDARD, SITES: at_the_sites},
        note="The first eight rows share one learner (replay, balanced softmax, distillation, plain SGD) and "
        "differ in the strategy alone. iCaRL classifies by the nearest mean of exemplars at the sites, which "
        "have them, and by its head at the server. GLFC's learner keeps as many exemplars. The federated "
        "baselines' claims were made for tasks that stay; here classes keep coming, with a few sites that "
        "all take part, and a strength of each method that was looked at on one seed only.",
        claims=CLAIMS,
        seeds=TEN_SEEDS,
    ),
    "exemplar_free_digits": Table(
        "Digits, 5 sites, 5 tasks of 2 classes, Dirichlet 0.3: without exemplars",
        [
            Row(TARGET, "target_digits"),
            Row(LWF, "lwf_fedavg_digits"),
            Row(FINE, "lwf_fedavg_digits", FINE_TUNING),
        ],
        note="Nobody keeps a sample of an old class. TARGET's inputs come from 200 steps of a generator that "
        "sees the old model alone; its classification is over the classes that a site holds.",
        claims=(beats("TARGET over LwF (Zhang et al. 2023, arXiv 2303.06937)", TARGET, LWF),),
        seeds=TEN_SEEDS,
    ),
}
