"""Every message between the server and a site, except those of secure aggregation.

These are in secure_messages.py; what is in neither file does not leave a site.
Units: bytes and losses are plain numbers; labels are positions in the class order.
"""

from dataclasses import dataclass

from perennial.foundation.names import SITE_NAME_RULE, is_site_name
from perennial.protocol.fields import WireMessage, at_most, bounded, hexadecimal, matching
from perennial.protocol.stamp import (
    CLASS_WEIGHT,
    KEY,
    LONGEST_METRICS,
    LONGEST_REASON,
    LONGEST_ROW,
    LONGEST_SETTINGS,
    MAX_CLASSES,
    MAX_EXAMPLES,
    MAX_TASKS,
    SHA256,
    Maskable,
    NeedsPrevious,
    Stamp,
)
from perennial.protocol.tensors import Tensors


@dataclass(frozen=True, kw_only=True)
class DescribeRequest(WireMessage):
    """Server to site: who are you?"""

    message_type = "query.describe"
    version: int = bounded(1)
    """Version of this protocol; server and site must speak the same."""
    experiment: str = hexadecimal(SHA256)
    """SHA-256 of the experiment's resolved settings as the server has them."""


@dataclass(frozen=True, kw_only=True)
class DescribeReply(WireMessage):
    """Site to server: its name, and whether it will take part. No count and no class leaves here."""

    message_type = "query.describe"
    public = (
        "version",
        "site",
        "experiment",
        "answers",
        "require_privacy",
        "signing_key",
        "certified",
    )
    version: int = bounded(1)
    """Version of this protocol; server and site must speak the same."""
    site: str = matching(is_site_name, SITE_NAME_RULE)
    """The name in site.yaml; in simulation `site-K`, or what the data call it."""
    experiment: str = hexadecimal(SHA256)
    """SHA-256 of the experiment's settings as the site has them."""
    answers: list[str]
    """What the site's policy answers: train, evaluate, digest, ..."""
    require_privacy: str
    """The protection that the site's policy demands."""
    signing_key: str = hexadecimal(KEY, default="")
    """The site's public key (Ed25519) for statements of its sums of features; '' where it sends none."""
    certified: str = at_most(LONGEST_REASON, default="")
    """The site's public node key and its signature of the signing key; '' without a node key."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest(Maskable, NeedsPrevious):
    """Server to site: train this model on your data of this task."""

    message_type = "train"
    arrays: Tensors
    """The global model: every floating tensor that travels."""
    method: Tensors | None = None
    """What the strategy adds for this site, for instance SCAFFOLD's control variate."""
    settings: str = at_most(LONGEST_SETTINGS, default="{}")
    """The strategy's settings for this round, a JSON object. `personal` names layers of which the site uses
    and trains its own values; they stay at the site and are not part of the update."""


@dataclass(frozen=True, kw_only=True)
class TrainReply(Stamp):
    """Site to server: what training changed."""

    message_type = "train"
    public = (
        "num_examples",
        "steps",
        "lends_digests",
    )
    update: Tensors
    """Model after training minus model received, same names and shapes but for personal layers; protected as
    the experiment says."""
    num_examples: int = bounded(1, MAX_EXAMPLES)
    """Samples trained on: new data and exemplars; 1 at every site under privacy."""
    train_loss: float | None = None
    """Mean loss of the last local epoch; absent under privacy."""
    steps: int = bounded(0, default=0)
    """Local optimiser steps; under privacy 0, or the public number of mode sample."""
    metrics: str = at_most(LONGEST_METRICS, default="{}")
    """Numbers that the strategy asked for, a JSON object; none of them under privacy."""
    lends_digests: bool = True
    """False from a site that lends digests no more; the server then forgets what it has."""


@dataclass(frozen=True, kw_only=True)
class FinishTaskRequest(Maskable, NeedsPrevious):
    """Server to site: the task is over; choose exemplars with this model and keep it as the teacher."""

    message_type = "train.finish_task"
    arrays: Tensors
    """The global model as the task's last round left it."""


@dataclass(frozen=True, kw_only=True)
class FinishTaskReply(Stamp):
    """Site to server: done. Exemplars stay at the site; so does their number."""

    message_type = "train.finish_task"
    public = ("model",)
    model: str = hexadecimal(SHA256, default="")
    """SHA-256 of the model that the site now keeps as the teacher."""


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(Maskable, NeedsPrevious):
    """Server to site: measure this model on your held-out samples of all classes seen so far."""

    message_type = "evaluate"
    arrays: Tensors
    """The global model to measure."""
    tables: bool = False
    """Whether tables of counts are asked for beside the right answers; a site's policy decides."""
    validation: bool = False
    """Count validation samples, by which the server chooses when to stop, and not test samples. With tables:
    how likely they are at each of the public temperatures, by which it chooses one."""
    temperature: float | None = bounded(0.0, default=None)
    """By which the model's logits are divided before tables count its probabilities; absent: 1."""

    @property
    def statistic(self) -> str:
        """Name of the masked sum that answers to this request enter."""
        if not self.validation:
            return "evaluation"
        return "temperature" if self.tables else "validation"


@dataclass(frozen=True, kw_only=True)
class EvaluateReply(Stamp):
    """Site to server: right answers and samples of each class, on data held out from training."""

    message_type = "evaluate"
    correct: list[int] = bounded(-MAX_EXAMPLES, MAX_EXAMPLES)
    """Right answers of each class; with the experiment's noise below 0 too."""
    total: list[int] = bounded(-MAX_EXAMPLES, MAX_EXAMPLES)
    """Held-out samples of each class, with noise likewise; of patients, where these are hidden,
    one sample of each."""
    withheld: list[int] | None = bounded(0, MAX_CLASSES, default=None)
    """Classes whose counts stay at the site, because they are below its floor or would give such counts away;
    0 in both lists."""
    tables: Tensors | None = None
    """`counts`: how samples of one class were called another, and how many have which probability by public
    edges, of test, validation and calibration samples; absent unless the site's policy answers measures."""
    uncalibrated: list[int] | None = bounded(0, MAX_CLASSES, default=None)
    """Classes whose calibration samples stay at the site, because they are below its floor."""


@dataclass(frozen=True, kw_only=True)
class DigestRequest(Stamp):
    """Server to site: lend digests of your new data of this task."""

    message_type = "query.digest"
    own_record = own_noise = True
    encoder: str = hexadecimal(SHA256)
    """SHA-256 of the fixed encoder that the server's model reads digests with."""


@dataclass(frozen=True, kw_only=True)
class DigestReply(Stamp):
    """From a site to the server, once for each task: mixed and noised features.

    The server keeps them for the time when the site is away.
    """

    message_type = "query.digest"
    public = (
        "encoder",
        "samples_per_digest",
    )
    encoder: str = hexadecimal(SHA256)
    """SHA-256 of the encoder that made them."""
    samples_per_digest: int = bounded(1, MAX_EXAMPLES)
    """Samples mixed in one digest, from which the server knows how many samples the digests stand for."""
    digests: Tensors | None = None
    """`features`, one row for each digest, and `labels`, the share of each class in it; absent from a site
    that lends none, and the server then forgets what it has."""


@dataclass(frozen=True, kw_only=True)
class SparsityRequest(NeedsPrevious):
    """Server to site: how often is each channel of this model silent on your samples?"""

    message_type = "query.sparsity"
    own_noise = True
    arrays: Tensors
    """The global model, whose first ReLU layers are looked at."""


@dataclass(frozen=True, kw_only=True)
class SparsityReply(Stamp):
    """Site to server: one number for each channel, a mean over all of the site's training samples."""

    message_type = "query.sparsity"
    public = ("extractor",)
    extractor: str = hexadecimal(SHA256)
    """SHA-256 of model, channels and layers that were used; vectors of different ones cannot be compared."""
    vector: Tensors
    """`sparsity`: the mean share of zeros, from 0 to 1, with the experiment's noise. It describes the
    site's data; without noise nothing is proven about what it gives away."""


@dataclass(frozen=True, kw_only=True)
class PersonalModelRequest(NeedsPrevious):
    """Server to site: join these shared layers with your own layers, and keep the result as your model."""

    message_type = "train.personal_model"
    arrays: Tensors
    """The shared layers of the site's cluster; for a personal layer, what a site without
    its own starts from."""
    personal: list[str] | None = None
    """Layers of which the site uses its own values."""


@dataclass(frozen=True, kw_only=True)
class PersonalModelReply(Stamp):
    """Site to server: done; and how good the model is there, where the experiment has sites evaluate."""

    message_type = "train.personal_model"
    correct: list[int] | None = bounded(-MAX_EXAMPLES, MAX_EXAMPLES, default=None)
    """Right answers of each class on data held out from training, as in EvaluateReply; absent where sites do
    not evaluate."""
    total: list[int] | None = bounded(-MAX_EXAMPLES, MAX_EXAMPLES, default=None)
    """Held-out samples of each class; absent where sites do not evaluate."""
    withheld: list[int] | None = bounded(0, MAX_CLASSES, default=None)
    """Classes whose counts stay at the site, as in EvaluateReply."""


@dataclass(frozen=True, kw_only=True)
class StatisticsRequest(Maskable):
    """Server to site: add up the features of your training samples of one task's classes."""

    message_type = "query.statistics"
    own_record = True
    of_task: int = bounded(1, MAX_TASKS)
    """The task whose classes are meant: this one, or an earlier one in which the site was away."""
    features: str = hexadecimal(SHA256)
    """SHA-256 of the fixed feature maps; a site with others refuses."""
    weights: list[int] | None = bounded(0, CLASS_WEIGHT, default=None)
    """How often each sample of each of these classes counts, in steps of 2^-20;
    with class-balanced ridge alone."""
    signers: list[str] | None = at_most(LONGEST_ROW, default=None)
    """Names and signing keys of all sites, in the order in which they came; the site signs its sums and this
    list. Absent where no statement is asked for: under noise or masks, and with class-balanced ridge."""


@dataclass(frozen=True, kw_only=True)
class StatisticsReply(Stamp):
    """Site to server, once a task: sums over the site's training samples of the task's classes."""

    message_type = "query.statistics"
    public = (
        "of_task",
        "features",
    )
    of_task: int = bounded(1, MAX_TASKS)
    """The task whose classes are meant."""
    features: str = hexadecimal(SHA256)
    """SHA-256 of the feature maps that were used."""
    statistics: Tensors
    """`gram`: the sum of products of every two features; `sums`: of the features of each class; `counts`: of
    samples of each class. Integers. In place of `gram` without noise: `factor` and `order`, computed from
    it alone, whose product rounds to it, or `planes`, its bytes compressed. Without noise, sums over fewer
    samples than features reveal the space in which these lie, and features of images can be turned back
    into pictures."""
    statement: str = at_most(LONGEST_REASON, default="")
    """What the site signs of these sums (privacy/signed_sums.py), a JSON object; '' where none is asked."""


@dataclass(frozen=True, kw_only=True)
class ClassCountsRequest(Stamp):
    """Server to site: how many training samples of each class of one task do you hold?"""

    message_type = "query.class_counts"
    of_task: int = bounded(1, MAX_TASKS)
    """The task whose classes are meant."""


@dataclass(frozen=True, kw_only=True)
class ClassCountsReply(Stamp):
    """Site to server: its training samples of each class, by which class-balanced ridge weighs classes."""

    message_type = "query.class_counts"
    public = ("of_task",)
    of_task: int = bounded(1, MAX_TASKS)
    """The task whose classes are meant."""
    counts: list[int] = bounded(0, MAX_EXAMPLES)
    """Training samples of each class of the task."""


@dataclass(frozen=True, kw_only=True)
class CompareHeadsRequest(Maskable):
    """Server to site: measure these heads on your validation samples of all classes seen so far."""

    message_type = "query.compare_heads"
    features: str = hexadecimal(SHA256)
    """SHA-256 of the fixed feature maps; a site with others refuses."""
    heads: Tensors
    """`weight` and `bias` of every head, one for each shrinkage that is tried."""

    @property
    def models(self) -> int:
        return max(len(self.heads["bias"]) if "bias" in self.heads else 1, 1)


@dataclass(frozen=True, kw_only=True)
class CompareHeadsReply(Stamp):
    """Site to server: right answers of each head, on samples that nothing was fitted to."""

    message_type = "query.compare_heads"
    correct: list[int] = bounded(0, MAX_EXAMPLES)
    """Right answers of the first head for each class, then of the second, and so on."""
    total: list[int] = bounded(0, MAX_EXAMPLES)
    """Validation samples of each class."""


@dataclass(frozen=True, kw_only=True)
class Refusal(WireMessage):
    """Site to server, instead of any reply: no, and why."""

    message_type = "refusal"
    site: str = matching(is_site_name, SITE_NAME_RULE)
    """The site's name."""
    kind: str = at_most(20)
    """policy, privacy, data, state, protocol or error."""
    reason: str = at_most(LONGEST_REASON)
    """One sentence for the operator. It names settings and limits, never samples."""


REQUESTS: tuple[type[WireMessage], ...] = tuple(
    kind for name, kind in list(globals().items()) if name.endswith("Request")
)
"""Every kind of request here, of the methods too."""
