"""Changing one thing in a site.yaml that a person has written, and nothing else of it."""

from pathlib import Path

import yaml

from perennial.config.site import Answer, load_site_config
from perennial.foundation.errors import ConfigError
from perennial.foundation.files import replace_file


def stop_answering(path: Path, answer: Answer) -> None:
    """Remove one kind of request from policy.answers of a site.yaml; comments and all else stay.

    Raises ConfigError if the file does not list it under a key `answers` of its own.
    """
    before = load_site_config(path)
    text = path.read_text(encoding="utf-8")
    listed = _answers(yaml.compose(text, yaml.SafeLoader))
    if listed is None or answer not in before.policy.answers:
        raise ConfigError(f"{path}: policy.answers: does not name {answer!r}")
    left = [kind for kind in before.policy.answers if kind != answer]
    # a list that is written in lines ends where the next key begins: its last item is its end
    end = listed.end_mark.index if listed.flow_style else listed.value[-1].end_mark.index
    changed = f"{text[: listed.start_mark.index]}[{', '.join(left)}]{text[end:]}"
    if not listed.flow_style:
        changed = text[: listed.start_mark.index].rstrip() + f" [{', '.join(left)}]{text[end:]}"
    after = yaml.safe_load(changed)
    if after != _without(yaml.safe_load(text), answer):
        raise ConfigError(f"{path}: policy.answers: cannot be changed without changing more; edit it by hand")
    replace_file(path, changed.encode(), mode=path.stat().st_mode & 0o777)


def _answers(root: yaml.Node | None) -> yaml.SequenceNode | None:
    node: yaml.Node | None = root
    for key in ("policy", "answers"):
        if not isinstance(node, yaml.MappingNode):
            return None
        node = next((value for name, value in node.value if name.value == key), None)
    return node if isinstance(node, yaml.SequenceNode) and node.value else None


def _without(content: dict[str, dict[str, list[str]]], answer: str) -> object:
    kept = [kind for kind in content["policy"]["answers"] if kind != answer]
    return content | {"policy": content["policy"] | {"answers": kept}}
