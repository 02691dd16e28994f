"""The privacy block of an experiment: what is protected, how strongly, and how it is accounted."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from perennial.foundation.plain import Block, FiniteBlock

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]

DigestProtection = Literal["none", "paper", "laplace", "gauss"]


class DigestConfig(Block):
    """What a site releases once for each task, for the server to keep.

    per_digest: samples in one digest. mix: whose features are mixed, any samples' or those of one class.
    protection: "laplace" and "gauss" size their noise by what one sample can change; "paper" is the published
    scale largest / (20000 * epsilon), for reproduction, and its epsilon is not a guarantee.
    largest: public bound of a feature, to which features are cut; "paper" without it takes the largest
    feature of the site, which is itself private. norm: public bound of a sample's L2 norm ("gauss").
    label_epsilon: of the random answer that stands for each label; None sends labels in the clear.
    """

    per_digest: int = Field(default=4, ge=1)
    mix: Literal["random", "within_class"] = "random"
    protection: DigestProtection = "none"
    epsilon: Positive | None = None
    largest: Positive | None = None
    norm: Positive | None = None
    label_epsilon: Positive | None = None

    @model_validator(mode="after")
    def _check_protection(self) -> Self:
        needs = {
            "none": (),
            "paper": ("epsilon",),
            "laplace": ("epsilon", "largest"),
            "gauss": ("epsilon", "norm"),
        }
        for key in ("epsilon", "largest", "norm"):
            if key in needs[self.protection] and getattr(self, key) is None:
                raise ValueError(f"{key} is missing: protection {self.protection!r} needs it")
        if self.protection == "none" and self.epsilon is not None:
            raise ValueError("epsilon is set, but protection is none, which adds no noise")
        if self.norm is not None and self.protection != "gauss":
            raise ValueError(f"norm belongs to protection gauss; found {self.protection!r}")
        if self.label_epsilon is not None and self.mix == "within_class":
            raise ValueError("mix within_class groups by the labels that label_epsilon is to hide")
        return self

    @property
    def labels_in_the_clear(self) -> bool:
        """Whether what leaves tells a sample's label without noise."""
        return self.label_epsilon is None

    @property
    def protects(self) -> bool:
        """Whether the noise provably hides one sample's features."""
        return self.protection in ("laplace", "gauss")


Mode = Literal["none", "client_local", "client_central", "client_shared", "sample", "sample_shared"]
Unit = Literal["site", "patient", "sample"]
"""Whose presence a guarantee hides, the largest first."""
AccountantName = Literal["rdp", "prv"]


Blocks = tuple[float, float, float]
"""Public weights (a, b, c) of products, sums and counts; see noised_sums.py."""
BLOCKS: Blocks = (0.5, 1.0, 0.2)
OF_UPDATES = ("clip_norm", "bayesian", "sample_rate")
"""Keys that say how an update, or a step of training, is protected."""


def convert_former_null(value: Any) -> Any:
    """False for the null that an earlier release wrote for no Bayesian figure."""
    return False if value is None else value


class PrivacyConfig(FiniteBlock):
    """What leaves a site, and under which guarantee.

    mode: "client_local" clips and noises the whole update at the site (adversary: the server);
    "client_central" clips at the site and the trusted server noises the sum once (adversary: whoever receives
    the model); "client_shared" clips at the site, where each adds a share of the noise, and the server sees
    the sum alone (adversary: the server, with the sites that may collude with it); "sample" is DP-SGD inside
    the site (unit: one training sample); "sample_shared" hides one training sample in sums of features, to
    which each site adds a share of the noise (adversary: as in client_shared).
    release: mode sample: what hides a sample: noise on each step of training, or on the sums of its features
    (strategy analytic), of which one a task is released; sums need no clip_norm and no sample_rate.
    sample_shared has sums alone.
    blocks: release sums: public weights of products, sums and counts of features. A larger weight means less
    noise on that block and more on the others; the first may be 0, which releases no products.
    noise_multiplier: standard deviation of the noise divided by clip_norm. It has no default, because it is
    the guarantee. 0 is allowed for measurements and is reported as an infinite epsilon.
    sample_rate: mode sample: probability with which each sample is in a batch, on its own. Public, so that
    the cost is the same at every site and no sample count is told; an epoch is 1 / sample_rate steps.
    bayesian: also estimate what a typical record loses (privacy/bayesian.py), which is never the headline.
    unit: mode sample: whom the guarantee hides, one sample (the default) or one patient with all of theirs at
    a site; sample_rate is then the probability of a patient, and clip_norm bounds the sum
    of a patient's gradients.
    """

    mode: Mode = "none"
    release: Literal["updates", "sums"] = Field(default="updates", exclude_if="updates".__eq__)
    blocks: tuple[Annotated[float, Field(ge=0)], Positive, Positive] = Field(
        default=BLOCKS, exclude_if=BLOCKS.__eq__
    )
    clip_norm: Positive | None = None
    noise_multiplier: float | None = Field(default=None, ge=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)
    accountant: AccountantName = "prv"
    bayesian: Annotated[bool, BeforeValidator(convert_former_null)] = False
    sample_rate: float | None = Field(default=None, gt=0, le=1)
    unit: Literal["sample", "patient"] | None = None

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.mode == "none":
            if idle := self._list_given("noise_multiplier", *OF_UPDATES, "unit"):
                raise ValueError(
                    f"mode is none, yet {idle} is set, which would protect nothing; choose client_local, "
                    "client_central, client_shared, sample or sample_shared, or remove it"
                )
            return self
        if self.noise_multiplier is None:
            raise ValueError(
                f"noise_multiplier is missing: mode {self.mode} needs it, and no default is right "
                "for every site (`perennial epsilon` shows what a value costs)"
            )
        if self.release == "sums":
            self._of_sums()
            return self
        if self.mode == "sample_shared":
            raise ValueError(
                "release: found 'updates' with mode sample_shared, whose noise is on sums of features; "
                "allowed: sums"
            )
        if self.clip_norm is None:
            raise ValueError(f"clip_norm is missing: mode {self.mode} bounds one contribution by it")
        if self.mode == "sample" and self.sample_rate is None:
            raise ValueError(
                "sample_rate is missing: mode sample draws each sample into a batch with this probability"
            )
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.blocks != BLOCKS and self.release != "sums":
            raise ValueError("blocks: they weigh sums of features; allowed with release: sums")
        if self.mode != "sample" and self._list_given("sample_rate", "unit"):
            raise ValueError(f"sample_rate and unit belong to mode sample; mode is {self.mode}")
        if self.unit == "patient" and self.bayesian:
            raise ValueError("bayesian accounting samples single records, and unit is patient; choose one")
        if self.shared:
            self._shared()
        if self.bayesian and self.mode == "client_central":
            raise ValueError(
                "bayesian: a site estimates it of its own noise; found mode client_central, "
                "allowed client_local and sample"
            )
        if self.bayesian and not self.noise_multiplier:
            raise ValueError("bayesian accounting needs noise: noise_multiplier is 0")
        return self

    def _of_sums(self) -> None:
        """Raises ValueError for what one release of sums a task does not have."""
        if self.mode not in ("sample", "sample_shared"):
            raise ValueError(
                f"release: found 'sums' with mode {self.mode}; allowed with modes sample and sample_shared"
            )
        if self.unit == "patient":
            raise ValueError(
                "unit: found 'patient' with release sums, whose noise hides one sample: a patient with k of "
                "them moves the sums k times as far; allowed unit sample, or release updates"
            )
        if idle := self._list_given(*OF_UPDATES):
            raise ValueError(
                f"release is sums, yet {idle} is set; a sample's features have length 1 at most and enter "
                "one release, so leave it out"
            )

    def _list_given(self, *names: str) -> str:
        """Those of the keys that are set, in words."""
        values = {name: getattr(self, name) for name in names}
        return ", ".join(name for name, value in values.items() if value is not None and value is not False)

    def _shared(self) -> None:
        """Raises ValueError for what a discrete share of the noise cannot have."""
        if self.accountant != "rdp":
            raise ValueError(
                f"accountant: found {self.accountant!r} with mode {self.mode}; allowed 'rdp', because a "
                "sum of discrete Gaussians has a proof by Renyi orders and none by privacy loss variables"
            )
        if not self.noise_multiplier:
            raise ValueError(f"noise_multiplier is 0; mode {self.mode} takes a number above 0")
        if self.bayesian:
            raise ValueError("bayesian accounting reads single updates; not with mode client_shared")

    @property
    def shared(self) -> bool:
        """Whether each site adds a share of the noise to a masked sum."""
        return self.mode in ("client_shared", "sample_shared")

    @property
    def enabled(self) -> bool:
        """Whether anything is protected at all."""
        return self.mode != "none"

    @property
    def hidden_unit(self) -> Unit | None:
        """The unit whose presence the guarantee hides; None without protection."""
        if self.mode == "none":
            return None
        return (self.unit or "sample") if self.mode in ("sample", "sample_shared") else "site"
