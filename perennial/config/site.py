"""site.yaml: the file of a hospital. It decides what the site answers, and no message can override it."""

from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from perennial.config.removed import drop_removed_from_site
from perennial.config.yaml_file import UsablePath, read_yaml, validate
from perennial.data.config import DataConfig
from perennial.foundation.errors import ConfigError
from perennial.foundation.files import find_user_state
from perennial.foundation.names import SITE_NAME
from perennial.foundation.plain import Block
from perennial.privacy.config import Mode, Unit

if TYPE_CHECKING:
    from perennial.privacy.ledger import Ledger, Limit

Answer = Literal["train", "evaluate", "measures", "digest", "sparsity", "statistics"]
ANSWERS: tuple[Answer, ...] = ("train", "evaluate", "measures", "digest", "sparsity", "statistics")
Release = Literal[
    "update",
    "evaluate",
    "class_means",
    "digest",
    "sparsity",
    "measurements",
    "statistics",
    "class_counts",
    "compare_heads",
]
"""What is computed from a site's data and leaves it."""
Few = Literal["evaluate", "class_means", "digest", "sparsity", "measurements"]
"""Those of them that a policy can let leave although they come from few samples."""


Demand = Mode | Literal["patient"]
"""A protection that a site can demand: a mode, or mode sample with unit patient."""


class SitePolicy(Block):
    """The hospital's policy: what the site answers, and what may leave it."""

    answers: list[Answer] = Field(default_factory=lambda: ["train", "evaluate"])
    min_samples: int = Field(default=1, ge=1)
    """Whatever leaves and is computed from data is computed from at least so many samples: an update, a
    ring's segment, a class's sum or count, a sparsity vector, a digest without a proven protection."""
    below_floor: list[Few] = Field(default_factory=list)
    """Releases to which min_samples does not apply."""
    require_privacy: Demand = "none"
    """What must hide everything that leaves: this one, since they hide different units from different
    adversaries. patient: mode sample with unit patient, which serves where sample is demanded,
    too; both serve where sample_shared is."""
    max_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Lifetime budget of this site, over all runs; None: no budget, which require_privacy
    other than none forbids."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    max_evaluations: int | None = Field(default=None, ge=0)
    """Most models whose right answers on held-out samples one approved experiment learns in all its runs,
    beside an update too; None: as many as it needs in max_runs runs, and a few more. What is asked again, of
    the same layers and exemplars of the site's own, is none."""
    max_runs: int = Field(default=3, ge=1)
    """Most runs of one approved experiment; a run that is resumed is the same run."""
    require_secure: bool = False
    """Whether this site's values leave as a part of masked sums only (docs/secure_aggregation.md)."""
    least_sites: int = Field(default=2, ge=2)
    """Fewer sites in a masked sum than this, and the site takes no part in it."""
    assumed_colluders: int = Field(default=0, ge=0)
    """Sites that may work together with the server, against which an experiment must protect this one."""
    peers: dict[str, str] = Field(default_factory=dict)
    """Fingerprints of the other sites' keys by name, as `perennial site check` shows them there;
    empty: each key is trusted when it is first met, which protects against a curious server only."""

    @model_validator(mode="after")
    def _require_budget(self) -> "SitePolicy":
        if self.require_privacy != "none" and self.max_epsilon is None:
            raise ValueError(
                f"max_epsilon: missing with require_privacy {self.require_privacy!r}, which without a limit "
                "would accept any noise, none included; allowed: a number above 0"
            )
        return self

    @property
    def unit(self) -> Unit | None:
        """What the budget must hide: the unit of the protection that the site demands.

        None stands for the largest unit that all releases hide.
        """
        if self.require_privacy == "none":
            return None
        if self.require_privacy in ("sample", "sample_shared"):
            return "sample"
        return "patient" if self.require_privacy == "patient" else "site"

    @property
    def limit(self) -> "Limit | None":
        """The lifetime privacy budget of all the site's releases; None without max_epsilon: no limit."""
        from perennial.privacy.ledger import Limit

        return None if self.max_epsilon is None else Limit(self.max_epsilon, self.delta, self.unit)


class StateLimits(Block):
    """How much of this site's disk runs and features may take. The ledger is not part of it."""

    runs: int = Field(default=20, ge=1)
    """Most runs of which the site keeps exemplars and models; `perennial site clean` removes old ones."""
    gigabytes: float = Field(default=32.0, gt=0, allow_inf_nan=False)
    """Most that all runs keep together, in units of 10^9 bytes, and one run a quarter of it; features of
    samples may take half as much besides."""


FLOWER_HOME = "flower"
"""Flower's folder below that of site.yaml; its apps/ holds the apps that may run here."""


class Connection(Block):
    """How the SuperNode reaches the SuperLink; `perennial site start` reads it.

    Paths are relative to the folder of the file.
    runtime_port: on loopback. Each SuperNode of a machine needs its own.
    """

    superlink: str = Field(pattern=r"^.+:[0-9]+$")
    ca: UsablePath = Path("ca.crt")
    key: UsablePath = Path("node.key")
    runtime_port: int = Field(default=9094, ge=1, lt=65535)


class SiteConfig(Block):
    """One site. Build it with load_site_config."""

    site: str = Field(pattern=SITE_NAME)
    data: DataConfig | None = None
    """This site's own data; None: the share of this name in the experiment's data
    (for trials without data)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpu: list[Literal["graphs", "benchmark"]] = Field(default=[])
    """What makes a GPU faster. graphs: steps are replayed as CUDA graphs, with the same bits. benchmark:
    cuDNN takes the algorithm that it finds fastest, which may be another one in the next round, with other
    last bits."""
    threads: int = Field(default=1, ge=1)
    """Processor threads for training; results repeat bit for bit with 1."""
    state_dir: UsablePath
    ledger_tip: UsablePath | None = None
    """A file outside state_dir, best on another disk, in which the site notes the ledger's head hash: a
    ledger that was deleted, truncated or put back from an older copy is then noticed. None: a file in the
    user's state folder, ~/.local/state/perennial/ledgers. Which data are counted by which ledger is noted
    there in any case, for all sites of this user."""
    state: StateLimits = StateLimits()
    approvals: UsablePath = Path("approvals")
    """Folder of the records of approved experiments; nothing else is answered. The SuperNode's user must not
    be able to write it."""
    plugins: dict[str, str] = Field(default_factory=dict)
    """Installed packages with models, losses or sources of others that an approved experiment may use:
    package -> SHA-256 of its source; where another one is installed, `perennial site review` tells it."""
    policy: SitePolicy = SitePolicy()
    connection: Connection | None = None

    @model_validator(mode="before")
    @classmethod
    def _keys_of_earlier_releases(cls, content: Any) -> Any:
        return drop_removed_from_site(content)

    @property
    def ledger(self) -> "Ledger":
        """The site's ledger, with the file that witnesses it and the data that it counts."""
        from perennial.privacy.ledger import Ledger

        data = None if self.data is None or self.data.path is None else Path(self.data.path)
        return Ledger(self.state_dir, self.ledger_tip, data)


def load_site_config(path: Path) -> SiteConfig:
    """The site in a YAML file; paths in it are taken from the file's folder.

    Raises ConfigError naming the file and each faulty key.
    """
    site = validate(SiteConfig, read_yaml(path), str(path))
    folder = path.absolute().parent
    found: dict[str, object] = {
        "state_dir": folder / site.state_dir.expanduser(),
        "approvals": folder / site.approvals.expanduser(),
    }
    state_dir = (folder / site.state_dir.expanduser()).resolve()
    tip = site.ledger_tip or find_user_state() / f"{sha256(str(state_dir).encode()).hexdigest()[:32]}.tip"
    found["ledger_tip"] = tip = folder / tip.expanduser()
    if tip.resolve().is_relative_to(state_dir):
        raise ConfigError(
            f"{path}: ledger_tip: found {tip}, which lies in state_dir; allowed a file that is not lost "
            "or put back together with the ledger"
        )
    if site.data is not None and site.data.path is not None:
        found["data"] = site.data.model_copy(update={"path": str(folder / Path(site.data.path).expanduser())})
    return site.model_copy(update=found)
