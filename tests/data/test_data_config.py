"""The data and tasks blocks: what is refused, and with which words."""

from typing import Any

import pytest
from pydantic import ValidationError

from perennial.data.config import DataConfig
from perennial.data.tasks_config import TasksConfig

DIGITS = {"source": "digits", "sites": 5}


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({**DIGITS, "sourse": "digits"}, "sourse"),
        ({"source": "digit"}, "csv, digits, folder"),
        ({**DIGITS, "path": "/data"}, "path belongs to source folder"),
        ({**DIGITS, "columns": {"age": "numeric"}}, "columns belongs to source csv"),
        ({"source": "folder"}, "needs path; an experiment without data of its own must list classes"),
        ({"source": "pack"}, "source 'pack' needs path"),
        ({"source": "torchvision", "path": "/data"}, "needs dataset: cifar10"),
        ({**DIGITS, "sites": 0}, "greater than 0"),
        ({**DIGITS, "test_fraction": 1.0}, "less than 1"),
        ({**DIGITS, "classes": ["0", "1", "0"]}, "listed more than once: 0"),
        ({**DIGITS, "classes": ["0", " 1"]}, "space at an end"),
        ({**DIGITS, "partition": {"kind": "natural"}}, "'digits' has no sites of its own"),
        ({"source": "synth_groups"}, "set partition.kind 'natural', not 'iid'"),
        ({"source": "csv", "path": "a.csv", "partition": {"kind": "natural"}}, "needs site_column"),
        ({"source": "csv", "path": "a.csv", "augmentation": {"flip": True}}, "augmentation is for images"),
        ({"source": "csv", "path": "a.csv", "columns": {"label": "numeric"}}, "which is the label_column"),
        ({"source": "csv", "path": "a.csv", "columns": {"sex": ["m", "m"]}}, "listed more than once: m"),
        (
            {"source": "csv", "path": "a.csv", "normalise": {"mean": 0, "std": 1}},
            "names columns for source 'csv'",
        ),
        ({**DIGITS, "normalise": {"mean": 0.5, "std": [0.2, 0]}}, "std must be positive"),
        ({**DIGITS, "partition": {"kind": "dirichlet"}}, "kind 'dirichlet' needs alpha"),
        ({**DIGITS, "partition": {"kind": "dirichlet", "alpha": 0}}, "greater than 0"),
        ({**DIGITS, "partition": {"kind": "iid", "alpha": 0.5}}, "alpha belongs to kind 'dirichlet'"),
        ({**DIGITS, "partition": {"kind": "class_subset"}}, "needs classes_per_site"),
    ],
)
def test_a_wrong_data_block_is_refused_with_its_reason(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(block)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("block", "words"),
    [
        ({"rounds": 2}, "exactly one of count and increments; found neither"),
        ({"rounds": 2, "count": 2, "increments": 1}, "found both"),
        ({"count": 2}, "rounds"),
        ({"count": 0, "rounds": 1}, "greater than 0"),
        ({"count": 2, "rounds": [1, 0]}, "greater than 0"),
        ({"count": 2, "rounds": 1, "order": "sedeed"}, "did you mean 'seeded'?"),
        ({"count": 2, "rounds": 1, "order": ["a", "a"]}, "listed more than once: a"),
    ],
)
def test_a_wrong_tasks_block_is_refused_with_its_reason(block: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        TasksConfig.model_validate(block)
    assert words in str(caught.value)
