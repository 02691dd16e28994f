"""experiment.yaml: everything that a run needs, and nothing about a machine."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from perennial.config.combinations import CHECKS
from perennial.config.methods import resolve_targets
from perennial.config.presets import choose_preset, complete_learner, leave_out_usual_learner
from perennial.config.removed import drop_removed_from_experiment
from perennial.config.schema import ExperimentFields, StrategySpec
from perennial.config.yaml_file import apply_overrides, name_only, read_yaml, resolve_path, validate
from perennial.data.config import DataConfig
from perennial.foundation.errors import ConfigError
from perennial.foundation.plugins import replace_with_names
from perennial.models.config import ModelConfig
from perennial.models.feature_maps.config import choose_image_size


class Experiment(ExperimentFields):
    """One experiment. Build it with load_experiment."""

    @classmethod
    def of(cls, **content: Any) -> "Experiment":
        """The experiment whose keys are those of a file; the name is `experiment` where none is given.

        A strategy, loss, model or source may be a class of the program itself.
        Raises ConfigError, as load_experiment does.
        """
        named = {"name": "experiment", **replace_with_names(content)}
        return build_experiment(named, Path.cwd(), f"experiment {named['name']}")

    @model_validator(mode="before")
    @classmethod
    def _resolve_plugins(cls, content: Any) -> Any:
        if not isinstance(content, dict):
            return content
        try:
            resolved, found = resolve_targets(content)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        recorded = content.get("plugins")
        for target, sha256 in found.items():
            known = recorded.get(target, sha256) if isinstance(recorded, dict) else sha256
            if known != sha256:
                raise ValueError(
                    f"plugins: the source of {target} has SHA-256 {sha256:.12}, and this experiment was "
                    f"written with {known:.12}; install that version, or leave the line out to begin anew"
                )
        return {**resolved, "plugins": found} if found else resolved

    @model_validator(mode="before")
    @classmethod
    def _complete_learner(cls, content: Any) -> Any:
        """Where sites train, the learner's block is merged with its preset."""
        if not isinstance(content, dict):
            return content
        if (trains := _trains(content)) is None:
            return content
        block = content.get("learner")
        if not trains and block is None:
            return {key: value for key, value in content.items() if key != "learner"}
        privacy = content.get("privacy")
        mode = privacy.get("mode") if isinstance(privacy, dict) else getattr(privacy, "mode", None)
        try:
            return {**content, "learner": complete_learner(block, choose_preset(mode))}
        except ConfigError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="before")
    @classmethod
    def _fill_image_size(cls, content: Any) -> Any:
        if isinstance(content, dict) and isinstance(content.get("model"), str):
            # a network by its name alone; here, so that a plug-in's name is looked up after it
            content = {**content, "model": name_only(content["model"])}
        return _read_for_maps(content)

    @model_validator(mode="before")
    @classmethod
    def _keys_of_earlier_releases(cls, content: Any) -> Any:
        # the last of the validators that run before the fields are read: pydantic runs it first
        return drop_removed_from_experiment(content)

    @model_validator(mode="after")
    def _check_combinations(self) -> "Experiment":
        for check in CHECKS:
            check(self)
        return self


def load_experiment(
    path: Path | str, overrides: list[str] | None = None, seed: int | None = None
) -> Experiment:
    """The experiment in a YAML file, with overrides (KEY=VALUE) and seed applied.

    Relative paths of data are relative to the file's folder when
    they exist there, else to the working folder.
    Raises ConfigError naming the file, each faulty key, what was found and what is allowed.
    """
    path = Path(path)
    content = override_settings(read_yaml(path), overrides or [])
    if seed is not None:
        content["seed"] = seed
    return build_experiment(content, path.parent, str(path))


def override_settings(content: dict[str, Any], overrides: list[str]) -> dict[str, Any]:
    """An experiment's content, as a person or a run wrote it, with each KEY=VALUE applied.

    Raises ConfigError naming the first KEY=VALUE that is none.
    """
    if overrides and (trains := _trains(content)) is not None:
        content = leave_out_usual_learner(content, trains=trains)
    return apply_overrides(content, overrides)


def _trains(content: Mapping[str, Any]) -> bool | None:
    """Whether the strategy of an experiment's content trains; None where the strategy is faulty."""
    try:
        return StrategySpec.model_validate(name_only(content.get("strategy", "fedavg"))).trains
    except ValidationError:
        return None


def require_experiment(found: object, where: str) -> None:
    """Raises ConfigError for what is neither an experiment, its keys nor a path. where: for errors."""
    if not isinstance(found, Experiment | Mapping | Path | str):
        raise ConfigError(
            f"{where}: experiment: found {found!r:.80}, allowed an Experiment, a mapping with the keys of a "
            "file, or the path of a file"
        )


def build_experiment(content: dict[str, Any], folder: Path, where: str) -> Experiment:
    """The experiment of a mapping, whose relative paths are relative to a folder. where: named in errors."""
    _locate_data(content.get("data"), folder)
    model = content.get("model")
    if not isinstance(model, dict) or model.get("features") != "auto":
        return validate(Experiment, content, where)
    # here, because it reads the data and takes PyTorch, which no other experiment needs to be read
    from perennial.config.automatic_maps import replace_auto_maps

    return replace_auto_maps(content, where, lambda content: validate(Experiment, content, where))


def _read_for_maps(content: Any) -> Any:
    """An experiment's content with the `image_size` of files that `data` leaves to the maps.

    Content that is faulty elsewhere stays as it is.
    """
    try:
        data = DataConfig.model_validate(content.get("data"))
        model = ModelConfig.model_validate(content.get("model"))
    except (AttributeError, ValidationError):
        return content
    if (
        data.source != "folder"
        or data.image_size is not None
        or (size := choose_image_size(model.maps)) is None
    ):
        return content
    return {**content, "data": data.model_copy(update={"image_size": size})}


def _locate_data(data: Any, folder: Path) -> None:
    """Make data.path absolute, so that the run can be resumed from anywhere."""
    where = data.get("path") if isinstance(data, dict) else None
    if isinstance(where, str) and not Path(where).is_absolute():
        data["path"] = resolve_path(folder, where)
