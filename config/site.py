"""site.yaml: the file of a hospital. It decides what the site answers, and no message can override it."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from perennial.config.yaml_file import read_yaml, validate
from perennial.data.config import DataConfig
from perennial.foundation.names import SITE_NAME
from perennial.privacy.config import Mode

Answer = Literal["train", "evaluate", "digest", "sparsity"]
ANSWERS: tuple[Answer, ...] = ("train", "evaluate", "digest", "sparsity")


class SitePolicy(BaseModel):
    """What may leave the building."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    answers: list[Answer] = ["train", "evaluate"]
    min_samples: int = Field(default=1, ge=1)
    """Fewer samples to train on than this, and the site does not answer."""
    require_privacy: Mode = "none"
    """What must hide everything that leaves: this one, since they hide different units from different
    adversaries."""
    max_epsilon: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Lifetime budget of this site, over all runs; None: no budget, which require_privacy other than none
    forbids."""
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @model_validator(mode="after")
    def _protection_has_a_budget(self) -> "SitePolicy":
        if self.require_privacy != "none" and self.max_epsilon is None:
            raise ValueError(
                f"max_epsilon: missing with require_privacy {self.require_privacy!r}, which without a limit "
                "would accept any noise, none included; allowed: a number above 0"
            )
        return self

    @property
    def unit(self) -> Literal["site", "sample"] | None:
        """What the budget must hide: the unit of the protection demanded; None: the largest that all
        releases hide."""
        if self.require_privacy == "none":
            return None
        return "sample" if self.require_privacy == "sample" else "site"


class Connection(BaseModel):
    """How the SuperNode reaches the SuperLink; `perennial site start` reads it. Paths: from the file's
    folder.

    flower_home: Flower's folder; its apps/ holds the apps that may run here. any_app: run every app that the
    operator sends, without approval. trusted_entities: Flower's list of publishers' keys, for apps from
    Flower's hub. runtime_port: on loopback, with the next one for health checks; another for each SuperNode
    on a machine.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    superlink: str = Field(pattern=r"^.+:[0-9]+$")
    ca: Path = Path("ca.crt")
    key: Path = Path("node.key")
    flower_home: Path = Path("flower")
    any_app: bool = False
    trusted_entities: Path | None = None
    runtime_port: int = Field(default=9094, ge=1, lt=65535)


class SiteConfig(BaseModel):
    """One site. Build it with load_site_config."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    site: str = Field(pattern=SITE_NAME)
    data: DataConfig | None = None
    """This site's own data; None: the share of this name in the experiment's data (for trials without
    data)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(default=1, ge=1)
    """Processor threads for training; results repeat bit for bit with 1."""
    state_dir: Path
    policy: SitePolicy = SitePolicy()
    connection: Connection | None = None


def load_site_config(path: Path) -> SiteConfig:
    """The site in a YAML file; paths in it are taken from the file's folder.

    Raises ConfigError naming the file and each faulty key.
    """
    site = validate(SiteConfig, read_yaml(path), str(path))
    folder = path.absolute().parent
    found: dict[str, object] = {"state_dir": folder / site.state_dir.expanduser()}
    if site.data is not None and site.data.path is not None:
        found["data"] = site.data.model_copy(update={"path": str(folder / Path(site.data.path).expanduser())})
    return site.model_copy(update=found)
