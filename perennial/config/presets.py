"""Presets of `learner`: the settings that a block is completed with.

A block says what differs. Wherever it is written, in a file, by `--set` or in Python, it is merged with the
preset that it names: `learner: {preset: replay, epochs: 3}`. Where it names none, `sample_level` stands for
privacy mode sample and `default` for everything else.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from perennial.config.learner import DEFAULT_LEARNER, SAMPLE_LEVEL_LEARNER, LearnerConfig, Memory, Optimizer
from perennial.config.schema import ExperimentFields
from perennial.config.yaml_file import MEMORY_BUDGETS, name_only
from perennial.foundation.errors import ConfigError, suggest_nearest

NONE = "none"
"""The preset in which nothing is set but the keys' own defaults; `optimizer.lr` has none."""

_REPLAY = LearnerConfig(epochs=2, optimizer=Optimizer(name="adam", lr=0.001), memory=Memory(per_class=20))
_BARE = LearnerConfig(optimizer=Optimizer(lr=1.0))
_LEARNERS = {"default": DEFAULT_LEARNER, "sample_level": SAMPLE_LEVEL_LEARNER, "replay": _REPLAY, NONE: _BARE}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    name: {} if name == NONE else learner.model_dump(mode="json", exclude_unset=True)
    for name, learner in _LEARNERS.items()
}
"""Name -> the settings that it makes."""


def choose_preset(privacy_mode: str | None) -> str:
    """Name of the preset of a block that names none."""
    return "sample_level" if privacy_mode == "sample" else "default"


def complete_learner(block: Any, usual: str) -> Any:
    """A learner block merged with its preset, without the key `preset`.

    A block inside it is merged too, unless it has another name than the preset's, or is null, which removes
    it. A budget of the memory replaces the preset's.

    Args:
        block: as it was written; None for none. Anything but a mapping is returned as it is.
        usual: name of the preset where the block names none.

    Raises:
        ConfigError: naming a preset that does not exist, or that the block's own keys leave nothing of.
    """
    if block is None:
        block = {}
    if not isinstance(block, Mapping):
        return block
    name = block.get("preset") or usual
    if not isinstance(name, str) or name not in PRESETS:
        close = suggest_nearest(name, PRESETS) if isinstance(name, str) else ""
        raise ConfigError(f"learner.preset: found {name!r:.80}{close}; allowed: {', '.join(PRESETS)}")
    if block.get("preset") and _is_whole(block):
        raise ConfigError(
            f"learner.preset: found {name} with every key of a learner, as runs and Experiments have "
            f"them, so that it would change none; allowed: learner={{preset: {name}}} in their place"
        )
    return _merge(PRESETS[name], {key: value for key, value in block.items() if key != "preset"})


def leave_out_usual_learner(content: dict[str, Any], *, trains: bool) -> dict[str, Any]:
    """A resolved experiment's content without its learner, if nothing in it differs from its preset.

    trains: whether its strategy does; where none does, the learner is the preset in which nothing is set.

    Then nobody has set anything in it, and other settings, as another strategy, choose a learner anew.
    Content whose learner is not written out in every key, as a person writes it, is returned as it is.
    """
    block, privacy = content.get("learner"), content.get("privacy")
    if not isinstance(block, Mapping) or not _is_whole(block):
        return content
    usual = choose_preset(privacy.get("mode") if isinstance(privacy, Mapping) else None) if trains else NONE
    if block != _LEARNERS[usual].model_dump(mode="json"):
        return content
    return {key: value for key, value in content.items() if key != "learner"}


def _is_whole(block: Mapping[str, Any]) -> bool:
    """Whether a learner has every key, as runs and Experiments have it."""
    return _BARE.model_dump().keys() <= block.keys()


def _merge(base: Mapping[str, Any], block: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in block.items():
        there = base.get(key)
        if isinstance(there, Mapping):
            given = name_only(value)
            if isinstance(given, Mapping) and given.get("name", there.get("name")) == there.get("name"):
                merged[key] = _merge(_drop_budget(there) if _has_budget(key, given) else there, given)
                continue
        merged[key] = value
    return merged


def _has_budget(key: str, block: Mapping[str, Any]) -> bool:
    return key == "memory" and any(block.get(budget) is not None for budget in MEMORY_BUDGETS)


def _drop_budget(memory: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in memory.items() if key not in MEMORY_BUDGETS}


def describe_learner(experiment: ExperimentFields) -> str:
    """One line that names the preset nearest to an experiment's learner, and each setting that differs."""
    usual, found = choose_preset(experiment.privacy.mode), experiment.learner.model_dump(mode="json")
    whole = {name: preset.model_dump(mode="json") for name, preset in _LEARNERS.items()}
    whole[NONE].pop("optimizer")
    differences = {name: [*_describe_differences(whole[name], found)] for name in (usual, *PRESETS)}
    name = min(differences, key=lambda name: len(differences[name]))
    if name == NONE:
        return f"learner: {', '.join(differences[NONE])} (preset none)"
    return f"learner: {name}" + (f" with {', '.join(differences[name])}" if differences[name] else "")


def _describe_differences(
    base: Mapping[str, Any], found: Mapping[str, Any], prefix: str = ""
) -> Iterator[str]:
    for key, value in found.items():
        there, name = base.get(key), f"{prefix}{key}"
        if value == there and key in base:
            continue
        if (
            isinstance(value, Mapping)
            and isinstance(there, Mapping)
            and value.get("name") == there.get("name")
        ):
            yield from _describe_differences(there, value, f"{name}.")
        elif key in base or value is not None:
            yield f"{name} {_format_value(value)}"


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        parts = {key: part for key, part in value.items() if part is not None}
        if [*parts] == ["name"]:
            return str(parts["name"])
        return "{" + ", ".join(f"{key}: {_format_value(part)}" for key, part in parts.items()) + "}"
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)
