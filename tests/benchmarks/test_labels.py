"""Labels of rows: each piece of one holds of the row's experiment, and together they say all that differs."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from benchmarks.table import Row, tables
from benchmarks.tables.analytic import DP_SGD, ONE_RELEASE
from perennial.foundation.plugins import load_ours
from perennial.strategies.factory import STRATEGIES
from tests.benchmarks.test_tables import one_fast, require_data

Facts = dict[str, Any]
BY_NOISE = {noise: epsilon for known in (ONE_RELEASE, *DP_SGD.values()) for epsilon, noise in known.items()}


def facts(row: Row) -> Facts:
    """The resolved experiment of a row, all strategies' keys in one, and what labels count.

    strategy: `chain` and `inner` are the strategies' names, outermost first, and the innermost.
    """
    found = row.load(1).model_dump(mode="json", exclude={"name", "seed", "plugins", "evaluation", "rounds"})
    chain, merged, inner = list[str](), Facts(), found["strategy"]
    while inner:
        inner = inner if isinstance(inner, dict) else {"name": inner}
        chain.append(inner["name"])
        ours = STRATEGIES.get(chain[-1])
        keys = inspect.signature(load_ours(ours)).parameters.values() if ours else ()
        merged = {each.name: each.default for each in keys if each.default is not each.empty} | inner | merged
        inner = inner.get("base")
    found["strategy"] = {**merged, "name": chain[0], "base": chain[1:], "chain": chain, "inner": chain[-1]}
    sites, maps = found["data"]["sites"] or NATURAL, found["model"].get("features") or ()
    noise, digests = found["privacy"]["noise_multiplier"], found["digests"] or {}
    counted = {
        "attack": row.attack,
        "absent": [each["site"] for each in found["absence"]],
        "left": sites - len(found["absence"]),
        "equal_work": found["learner"]["epochs"] == sites,
        "maps": [SHORT.get(each.get("network"), each["name"]) for each in maps],
        "patches": sum(each.get("filters", 0) for each in maps),
        "components": len(maps) * (found["model"].get("projection") or 0),
        "epsilon": digests.get("epsilon") or BY_NOISE.get(noise),
    }
    return {**found, "counted": counted}


SHORT = {"efficientnet_lite0": "Lite0", "efficientnet_lite2": "Lite2", "vit_small_focus": "ViT-S"}
PROTOCOL = ("data", "tasks", "absence")
NATURAL = 4
"""Sites of the data that come with sites, in every table with such a label."""


def get(found: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(found, list | tuple):
            found = found[int(part)] if int(part) < len(found) else None
        else:
            found = found.get(part) if found else None
    return found


def holds(found: Facts, said: str) -> bool:
    """KEY: it has a value; KEY=VALUE; KEY~VALUE: it contains that; KEY in [VALUE, ...]; after !: not."""
    ((denied, key, sign, text),) = re.findall(r"^(!?)([\w.]+)(=|~| in |)(.*)$", said)
    held = get(found, key)
    if not sign:
        return bool(held) != bool(denied)
    value = yaml.safe_load(text)
    result = held == value if sign == "=" else str(value) in (held or ()) if sign == "~" else held in value
    return result != bool(denied)


def leaves(found: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(found, dict) and found:
        for part, inner in found.items():
            yield from leaves(inner, f"{key}.{part}" if key else part)
    elif not key.startswith("counted"):
        yield key, str(found)


PLAIN = (
    "learner.memory; !learner.distillation; !learner.contrastive; !learner.consolidation; "
    "strategy.inner=fedavg; model.name in [small_cnn, mlp, resnet18, resnet20]"
)
"""Exemplars, one network, and averaging by size: no other term, no other weights."""
WHOLE = "model.name=dual_backbone; strategy.chain~multi_factor; learner.distillation; learner.contrastive"
CLUSTERS = "strategy.chain~clustered_personalisation"
LITE = "model.features.0.network=efficientnet_lite0; model.features.0.stages=4"
DIG = "strategy.chain=[digest_synthesis, fedavg]; model.name=digest_two_branch"

HOSPITALS = "rosendahl|vidir_modern|vidir_molemax|vienna_dias|Cleveland|Hungarian|Switzerland|VA Long Beach"

PIECES = {
    # data and tasks; a pooled or single site of a federation is one
    r"(\d+) tasks": "tasks.count={} | tasks",
    r"all classes in one task": "tasks.count=1",
    r"(?:then )?(\d+) rounds(?: a task)?": "tasks.rounds={}",
    r"(\d+) sites": "data.sites in [{}, 1] | data.partition absence",
    r"4 (?:clinics|hospitals)": "data.partition.kind in [natural, iid]",
    r"the four clinics": "data.partition.kind=natural; !absence",
    r"(?:Dirichlet|alpha) ([\d.]+)": "data.partition.kind=dirichlet; data.partition.alpha={} | data",
    r"([\d,]+) images(?: of four clinics)?": "data.samples_limit={}",
    r"(lymphoma|nci9|su|sorlie|glioma)": "data.arrays.x={}_x | data",
    r"digits": "data.source=digits",
    r"Fashion-MNIST": "data.path~fashion_mnist | data tasks",
    r"HAM10000|skin lesions": "data.path~ham10000 | data tasks",
    r"COIL-20": "data.path~coil20 | data tasks",
    r"heart disease(?: of four hospitals)?": "data.path~heart_disease | data tasks",
    r"a table": "data.source=csv; model.name=mlp",
    r"32 px": "data.path~_32",
    r"federated": "data.partition.kind in [dirichlet, natural]; !absence",
    r"pooled|one site|centralised": "data.sites=1; data.partition.kind=iid | data",
    rf"({HOSPITALS}|site-\d) alone": "counted.left=1; !counted.absent~{} | absence",
    r"iCaRL with all data in one place": (
        "data.sites=1; learner.classifier=nearest_mean; !pretraining | data strategy"
    ),
    r"joint|all samples": "learner.memory.per_class=100000",
    r"random mirror images": "data.augmentation.flip",
    # the learner
    r"(\d+) local epochs": "learner.epochs={}",
    r"equal work": "counted.equal_work | learner.epochs",
    r"plain SGD": "learner.optimizer.name=sgd; learner.optimizer.momentum=0 | learner.optimizer",
    r"plain replay": PLAIN,
    r"plain replay and FedAvg": f"{PLAIN} | learner.memory learner.classification",
    r"exemplars and cross entropy alone": f"{PLAIN}; learner.classification.name=ce",
    r"balanced softmax alone": f"{PLAIN}; learner.classification.name=balanced_softmax",
    r"balanced softmax": "learner.classification.name=balanced_softmax",
    r"distillation": "learner.distillation",
    r"contrastive term": "learner.contrastive",
    r"quickstart|replay": "learner.memory",
    r"full system|PP-FCIL|whole learner and weights": WHOLE,
    r"without distillation": "!learner.distillation",
    r"without contrastive term": "!learner.contrastive",
    r"without balanced softmax": "learner.classification.name=ce",
    r"without dual backbone": "model.name=small_cnn",
    r"without incremental parts": (
        "!learner.memory; !learner.distillation; !learner.contrastive; model.name=small_cnn"
    ),
    r"fine-tuning": "!learner.memory; !learner.distillation; learner.classification.name=ce",
    r"fine-tuning, equal budget": f"{CLUSTERS}; strategy.clusters=1; strategy.personal=['*']",
    r"contrastive term with positives inside the logarithm": "learner.contrastive.form=in",
    r"exemplars nearest to their mean": "learner.memory.selection=nearest",
    r"every class drawn equally often": "learner.memory.balanced",
    r"every sample drawn once|the same": "!learner.memory.balanced",
    r"classifying with its head": "learner.classifier=head",
    r"fused features distilled into one backbone": "learner.consolidation",
    r"log-prior added": "learner.classification.sign=1",
    r"log-prior subtracted": "learner.classification.sign=-1",
    r"iCaRL-FedAvg": "learner.memory; learner.classifier=nearest_mean; strategy.inner=fedavg; !pretraining",
    r"LwF-FedAvg": "!learner.memory; learner.distillation; strategy.inner=fedavg",
    r"GLFC's learner": "learner.classification.name=gradient_compensation",
    r"FedCBDR": "learner.classification.name=task_temperatures | learner model strategy",
    r"TARGET": "strategy.chain~target",
    r"no exemplars": "!learner.memory",
    # weights of PP-FCIL
    r"weights": "strategy.alpha",
    r"size alone|as FedAvg": "strategy.beta=0; strategy.gamma=0; strategy.delta=0",
    r"without recency": "strategy.beta=0",
    r"without held-out accuracy": "strategy.gamma=0",
    r"without inverse loss": "strategy.delta=0",
    r"share of classes in place of recency": "strategy.timeliness=coverage",
    r"training accuracy": "strategy.quality=train",
    # strategies
    r"FedAvg": "strategy.chain=[fedavg]",
    r"with FedDig's network": "model.name=digest_two_branch",
    r"FedNova": "strategy.chain=[fednova]",
    r"SCAFFOLD": "strategy.chain=[scaffold]",
    r"FedProx(?: \(mu ([\d.]+)\))?": "strategy.chain=[fedavg]; learner.correction.mu={} | learner.correction",
    r"FedDyn \(alpha ([\d.]+)\)": "strategy.chain=[feddyn]; strategy.alpha={}",
    r"AdaBest \(mu ([\d.]+), beta ([\d.]+)\)": "strategy.chain=[adabest]; strategy.mu={}; strategy.beta={}",
    r"FedDisco(?: \(a 0.5, b 0.1\))?": "strategy.chain=[feddisco]",
    r"cyclic weight transfer": "strategy.chain=[cyclic_weight_transfer]",
    r"ring": "strategy.chain~serial_ring",
    r"layer attention": "strategy.chain=[layer_attention]",
    r"(\d+) segments?": "strategy.segments={}",
    r"new order each sweep": "strategy.reshuffle=sweep",
    r"fixed order": "strategy.reshuffle=never",
    # FedDig
    r"FedDig(?: on FedAvg)?": DIG,
    r"FedDig on FedNova": "strategy.chain=[digest_synthesis, fednova]; model.name=digest_two_branch",
    r"FedDig on layer attention": "strategy.chain=[digest_synthesis, layer_attention]",
    r"FedDig on PP-FCIL's weights": "strategy.chain=[digest_synthesis, multi_factor]",
    r"FedDig on FedProx \(mu ([\d.]+)\)": f"{DIG}; learner.correction.mu={{}} | learner.correction",
    r"FedAvg with exemplars": "strategy.chain=[fedavg]; learner.memory",
    r"FedDig with exemplars": f"{DIG}; learner.memory",
    r"FedDig in clusters": "strategy.chain=[clustered_personalisation, digest_synthesis, fedavg]",
    r"clusters": "strategy.chain=[clustered_personalisation, fedavg]",
    r"heads at the sites": "strategy.personal=[head]",
    r"(\d+) server epochs": "strategy.server_epochs={}",
    r"(\d+)(?: sample)?(?: in a digest)?": "digests.per_digest={}",
    r"mix(?:ing|ed) at random": "digests.mix=random",
    r"mixing within classes": "digests.mix=within_class",
    r"spread": "strategy.spread",
    r"not spread": "!strategy.spread",
    r"honest Laplace noise": "digests.protection=laplace | digests",
    r"honest Gaussian noise": "digests.protection=gauss | digests",
    r"published noise": "digests.protection=paper",
    r"delta 1e-5": "digests.protection=gauss",
    r"nominal epsilon ([\d.]+) .*": "digests.epsilon={}",
    r"nobody|all stay": "!absence",
    r"one away(?: for good)?": "absence.0.first_round=7",
    r"one leaves for good": "absence.0.first_round=50",
    r"rounds (\d+) to (\d+)": "absence.0.first_round={}; absence.0.last_round={}",
    r"one away from 50 to 100": "absence.0.first_round=50; absence.0.last_round=99",
    r"two groups": "absence.0.first_round=11; absence.2.last_round=10",
    r"two come at 100": "absence.0.last_round=99; absence.1.last_round=99",
    r"all leave|one after the other": "absence.1",
    # FedPerC
    r"FedPerC": f"{CLUSTERS}; strategy.personal=[head]",
    r"the published vector": "strategy.layers=3; strategy.combine=average; strategy.channels=16",
    r"true groups": "strategy.grouping=fixed",
    r"random groups": "strategy.grouping=random; strategy.clusters in [2, 4]",
    r"FedPer": "strategy.grouping=random; strategy.clusters=1; strategy.personal=[head]",
    r"PFA on the same clusters": f"{CLUSTERS}; !strategy.personal",
    r"global model, equal budget": "strategy.chain=[fedavg]",
    # Incre-FL
    r"\+ pre-training.*": "pretraining; !model.squeeze_excitation; strategy.chain=[fedavg]",
    r"\+ channel attention.*": "!pretraining; model.squeeze_excitation; strategy.chain=[fedavg]",
    r"\+ layer attention.*": "!pretraining; !model.squeeze_excitation; strategy.chain=[layer_attention]",
    r"\+ both attentions.*": "!pretraining; model.squeeze_excitation; strategy.chain=[layer_attention]",
    r"Incre-FL|all three.*": "pretraining; !model.squeeze_excitation=false; strategy.chain=[layer_attention]",
    r"(\d+) rounds of pre-training with 7 samples a site": "pretraining.rounds={} | pretraining",
    r"uniform mean in place of layer attention": "strategy.chain=[uniform_mean]",
    r"no channel attention": "!model.squeeze_excitation",
    r"all else as in Incre-FL": "pretraining; model.squeeze_excitation",
    r"with iCaRL's sigmoids as printed": "learner.classification.name=icarl_bce",
    r"near sites trusted.*": "strategy.sign=-1; strategy.scale=mean",
    r"distances of the head from the sites' mean": "strategy.head_query=client_mean",
    r"pre-training samples left out afterwards": "pretraining.exclude",
    # protection
    r"no protection|without protection": "privacy.mode=none | privacy",
    r"(?:sigma|noise multiplier) ([\d.]+)": "privacy.noise_multiplier={} | privacy",
    r"sigma 2 sqrt\(n/m\)": "privacy.noise_multiplier=2.309401",
    r"(client_central|client_local|client_shared|sample)": "privacy.mode={}",
    r"clipped": "privacy.clip_norm | privacy",
    r"no noise": "privacy.noise_multiplier in [null, 0] | privacy secure",
    r"one noise in all": "privacy.mode=sample_shared; secure.masks | privacy secure",
    r"each (?:site|clinic) its own(?: noise)?": "privacy.mode=sample; !secure | privacy",
    r"m = n": "secure.quorum=40",
    r"m = 0.75 n": "secure.quorum=30",
    r"epsilon ([\d.]+)": "counted.epsilon={} | privacy secure digests.epsilon",
    r"DP-SGD": "privacy.mode=sample; privacy.sample_rate",
    r"class means alone": "privacy.blocks=[0, 1, 0.2]",
    r"the parts that a claim allows": (
        "!learner.contrastive; strategy.inner=multi_factor | learner.memory learner.classification"
    ),
    # attacks
    r"none": "!counted.attack",
    r"loss": "counted.attack=adaptive",
    r"backdoor": "counted.attack=adaptive_backdoor",
    r"mean": "strategy.chain=[fedavg]",
    r"bounds": "bounds.norm_multiple=3",
    r"median": "strategy.chain=[median]",
    r"trimmed mean": "strategy.name~TrimmedMean",
    r"multi-Krum of 2": "strategy.name~Krum",
    r"geometric median": "strategy.name~GeometricMedian",
    r"centred clipping": "strategy.name~CentredClipping",
    r"median of pairs": "strategy.name~Bucketing",
    r"a free-rider and a label-flipper": "adversaries.0.kind=free_rider; adversaries.1.kind=label_flip",
    r"nobody cheats": "!adversaries",
    # the analytic classifier
    r"closed form": "strategy.chain=[analytic]; strategy.head=gaussian",
    r"closed form as `perennial init` writes it": "strategy.head=auto; model.features | strategy",
    r"default learner": "learner.memory; learner.distillation; model.norm=group | learner model strategy",
    r"one exchange a task": "tasks.rounds=1",
    r"(?:closed form on )?(\d+) patches": "counted.patches={}; strategy.chain=[analytic] | model.features",
    r"ridge": "strategy.chain=[analytic]; strategy.head=ridge",
    r"ridge on 1,500 random features": "strategy.head=ridge; model.features.0.width=1500",
    r"class-balanced ridge": "strategy.head=balanced_ridge",
    r"Gaussian head(?: on the same)?": "strategy.chain=[analytic]; strategy.head=gaussian",
    r"64 features": "model.features.0.width=64",
    r"(\d+) components": "counted.components={} | model.projection",
    r"Lite0 at (\d+) px with its last four stages": f"{LITE}; model.features.0.image_size={{}}",
    r"Lite0": LITE,
    r"(Lite2|ViT-S)": "counted.maps~{} | model.features",
    r"(Lite0|Lite2|ViT-S) and patches": "counted.maps~{}; counted.maps~patches | model.features",
    r"Lite0 beside patches": f"{LITE}; model.features.1.name=patches | data.path",
    r"patches": "model.features.0.name=patches",
    r"each image as it is": "!model.features.0.symmetry; !model.features.1.symmetry",
    r"averages over eight symmetric images": "model.features.0.symmetry=square",
    r"roots": "model.features.0.power=0.5",
}
"""Piece of a label -> what holds of its row, the groups in place of {}; after | what else it is about."""
REMARKS = {
    "as printed": "in the paper, of what stands before it",
    "as the abstract has it": "the same",
    "no proxy": "GLFC's proxy is not among the methods here",
    "equal rounds": "beside a row of equal work",
}
"""Pieces that say nothing of a row's settings, and why they stand there."""
SILENT = {
    "analytic_digits": "tasks.rounds",  # a closed form has one
    "analytic_ham10000": "tasks.rounds strategy.shrinkage",
    "analytic_noise_digits": "tasks.rounds strategy.shrinkage strategy.standardise",
    "cifar100_resnet20": "data.augmentation",  # a closed form sees an image once
    "compositions_samples_digits": "learner.optimizer.lr",
    "compositions_samples_ham10000": "learner.optimizer.lr",
    "feddig_samples_digits": "strategy.spread",
    "feddig_stopping_digits": "strategy.spread strategy.server_epochs",
    "hospital_gains": "model.features strategy.shrinkage",
    "incre_fl_cifar100_subset": "learner.optimizer model.squeeze_excitation",
    "incre_fl_digits": "learner.optimizer model.squeeze_excitation",
    "incre_fl_fashion_mnist": "learner.optimizer model.squeeze_excitation",
    "own_data": "learner.memory.per_class",
    "privacy_samples": "learner.optimizer.lr",
    "privacy_samples_fashion_mnist": "learner.optimizer.lr learner.batch_size",
}
"""Table -> what its rows differ in though no label says so: its note does, or else a comment here."""


def pieces(label: str) -> list[str]:
    return re.split(r"[:,] (?!equal budget|[^(]*\))", label.rstrip("."))


def read(piece: str) -> tuple[list[str], set[str]] | None:
    """What must hold of a row with that piece, and the keys that it is for; None: no pattern matches."""
    for words, said in PIECES.items():
        if found := re.fullmatch(words, piece):
            checks, _, also = said.partition(" | ")
            keys = re.findall(r"(?:^|; )!?([\w.]+)", checks)
            named = {re.sub(r"\.(name|chain|inner|\d.*)$", "", key) for key in keys}
            filled = checks.format(*((group or "").replace(",", "") for group in found.groups()))
            return [check for check in filled.split("; ") if not check.endswith("=")], named | {*also.split()}
    return None


def within(key: str, wider: str) -> bool:
    return f"{key}.".startswith(f"{wider}.")


def differing(found: Facts, other: Facts, starts: tuple[str, ...] = ("",)) -> set[str]:
    keys = {key for key, _ in set(leaves(found)) ^ set(leaves(other))}
    return {key for key in keys if key.startswith(starts)}


@pytest.mark.parametrize("name", one_fast(tables()))
def test_labels_say_what_experiments_have_and_all_that_differs(name: str) -> None:
    """What differs from the first row with the same file; from the first of another file, PROTOCOL alone."""
    require_data(name)
    wrong, firsts, silent, needed = [], dict[str, Facts](), SILENT.get(name, "").split(), set[str]()
    for row in tables()[name].rows:
        found, said = facts(row), set[str]()
        for piece in pieces(row.label):
            meant = ([], set[str]()) if piece in REMARKS else read(piece)
            if meant is None:
                wrong.append(f"{row.label}: no pattern matches {piece!r}")
                continue
            wrong += [f"{row.label}: not {check}" for check in meant[0] if not holds(found, check)]
            said |= meant[1]
        first = firsts.setdefault(row.experiment, found)
        keys = differing(found, first) | differing(found, next(iter(firsts.values())), PROTOCOL)
        unsaid = {key for key in keys if not any(within(key, each) for each in said)}
        needed |= unsaid
        wrong += [
            f"{row.label}: says nothing of {key}"
            for key in sorted(unsaid)
            if not any(within(key, each) for each in silent)
        ]
    wrong += [
        f"SILENT: {each}, which no row needs" for each in silent if not any(within(k, each) for k in needed)
    ]
    assert not wrong, "\n".join(wrong)
