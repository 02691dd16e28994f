"""External validation: a finished model on labelled data from outside the federation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perennial.config.yaml_file import apply_overrides, read_yaml, validate
from perennial.data.config import DataConfig
from perennial.data.csv_file import read_csv
from perennial.data.folder import SUFFIXES
from perennial.data.inputs import describe_strange_columns
from perennial.data.samples import Samples, fill_missing, find_stored_type, join_samples
from perennial.data.sources import load
from perennial.data.splits import KeyedHash, record_contents
from perennial.data.table import read_table
from perennial.foundation.errors import DataError
from perennial.foundation.files import make_folder, replace_file
from perennial.learning.batches import TrainingSet
from perennial.learning.evaluation_tables import MOST_CLASSES, as_probability
from perennial.learning.scored import Scored, score_logits
from perennial.models.saved import SavedModel
from perennial.server.measures.assemble import assemble, estimate_patient_intervals, judge_sets
from perennial.server.measures.headline import judge_point
from perennial.server.measures.record import (
    Measures,
    OperatingPoint,
    PredictionSets,
    SetThreshold,
    write_measures,
)
from perennial.server.report.markup import build_element, join
from perennial.server.report.page import build_page
from perennial.server.report.recognition import build_recognition_parts, build_recognition_section

OF_THE_RUN = (
    *("labels", "label_column", "patient", "arrays", "dataset"),
    *("resize", "window", "missing", "decimal", "units", "limits", "subgroup"),
)
"""Keys that are taken over from the run's own data where they fit the source."""


def build_data_config(
    saved: SavedModel, path: Path, overrides: Sequence[str], classes: Sequence[str] = ()
) -> DataConfig:
    """The data block with which labelled data are read as the model's own were.

    path: a folder of class folders, a manifest, a table, an .npz file, or a YAML file with a data block.
    overrides: KEY=VALUE of the block. classes: that the data may have; (): the model's.
    Raises ConfigError naming a faulty key, DataError for another path.
    """
    content = read_yaml(path) if path.suffix in (".yaml", ".yml") else _infer_settings(saved, path)
    content["classes"] = list(classes or saved.classes)
    return validate(DataConfig, apply_overrides(content, list(overrides)), f"data block of {path}")


def _infer_settings(saved: SavedModel, path: Path) -> dict[str, Any]:
    settings, inputs = saved.settings["data"], saved.inputs
    of_images = len(inputs.shape) == 3
    source = _infer_source(path, of_images=of_images)
    content: dict[str, Any] = {"source": source, "path": str(path.absolute())}
    if settings.get("source") == source:
        content |= {key: settings[key] for key in OF_THE_RUN if settings.get(key)}
    if source == "csv":
        content["columns"] = inputs.columns
        if (sites := settings.get("site_column")) and sites in read_csv(path).columns:
            content["site_column"] = sites
    elif of_images and inputs.stored == "uint8":
        channels, height, width = inputs.shape
        content |= {"image_size": [height, width], "color": "gray" if channels == 1 else "rgb"}
    return content


def _infer_source(path: Path, *, of_images: bool) -> str:
    if path.is_dir():
        return "folder"
    if path.suffix.lower() == ".npz":
        return "npz"
    if path.suffix.lower() != ".csv":
        hint = "; an image alone has no label" if path.suffix.lower() in SUFFIXES else ""
        raise DataError(f"{path}: allowed a folder, .csv, .npz or .yaml with labelled data{hint}")
    return "folder" if of_images and {"path", "label"} <= read_csv(path).columns.keys() else "csv"


@dataclass(frozen=True, eq=False)
class Outside:
    """Labelled data from outside, read as one model reads data; numbers may still be missing."""

    saved: SavedModel
    config: DataConfig
    samples: Samples
    columns: dict[str, str | tuple[str, ...]] | None
    notes: tuple[str, ...]

    @classmethod
    def read(cls, saved: SavedModel, config: DataConfig, name: str) -> "Outside":
        """Read the data of config. name: for errors. Raises DataError if the model cannot take them."""
        source = load(config, seed=0)
        samples = source.train if source.test is None else join_samples(source.train, source.test)
        inputs = saved.inputs
        found = f"{find_stored_type(samples.x)} {tuple(samples.x.shape[1:])}"
        if found != f"{inputs.stored} {inputs.shape}":
            raise DataError(f"{name}: samples are {found}; this model takes {inputs.stored} {inputs.shape}")
        return cls(saved, config, samples, source.columns, source.notes)

    def pick(self, rows: np.ndarray) -> "Outside":
        """The records for which rows, (n,) bool, is True."""
        return replace(self, samples=self.samples.pick(torch.from_numpy(np.flatnonzero(rows))))

    def fill_inputs(self) -> torch.Tensor:
        """(n, ...) inputs, with missing numbers replaced as the model does."""
        x = self.samples.x.clone() if self.columns is not None else self.samples.x
        fill_missing(x, self.saved.inputs.filling)
        return x

    def list_strange_columns(self) -> list[str]:
        """Sentences on a table's columns that are unlike the model's training data."""
        inputs, path = self.saved.inputs, self.config.path
        if inputs.columns is None or self.config.source != "csv" or path is None:
            return []
        file = read_table(self.config)
        return describe_strange_columns(file, inputs.columns, inputs.mean, inputs.std, self.config.missing)

    def hash_contents(self) -> tuple[np.ndarray, ...]:
        """(n, 32) uint8 hashes of records, as a real site computes them and, of tables, a simulated one."""
        found = record_contents(self.samples.x, self.columns)
        return (
            (found,) if self.columns is None else (found, record_contents(self.fill_inputs(), self.columns))
        )

    def where(self, row: int) -> str:
        """The name of a record: an image's path, or `row N`, counted from 1."""
        return f"row {row + 1}" if self.samples.keys is None else self.samples.keys[row]

    def scored(self) -> Scored:
        """Score every record with the model."""
        inputs, saved = self.saved.inputs, self.saved
        data = TrainingSet(self.fill_inputs(), self.samples.y, inputs.mean, inputs.std)
        classify, temperature = saved.classifier, saved.confidence.temperature
        return score_logits(classify, data, len(saved.classes), temperature=temperature)

    def patients(self) -> np.ndarray | None:
        """(n,) the patient of each record, from 0; None if each patient has one record, or none is named."""
        if not self.samples.patients:
            return None
        groups = self.samples.split_groups()
        numbered = KeyedHash(b"", groups).number_groups(torch.arange(len(groups))).numpy()
        return numbered if len(np.unique(numbered)) < len(numbered) else None

    @property
    def own(self) -> bool:
        """Whether the data's path is that of the run's own data, or lies in it, or contains it."""
        own = self.saved.settings["data"].get("path")
        if own is None or self.config.path is None:
            return False
        one, other = Path(own).expanduser().resolve(), Path(self.config.path).expanduser().resolve()
        return one.is_relative_to(other) or other.is_relative_to(one)


def judge(outside: Outside, scored: Scored | None = None) -> Measures:
    """All measures of a model on labelled data. scored: from outside.scored(), if the caller has it."""
    saved, config, samples = outside.saved, outside.config, outside.samples
    if len(saved.classes) > MOST_CLASSES:
        raise DataError(f"evaluate: found a model of {len(saved.classes)} classes, allowed {MOST_CLASSES}")
    scored = outside.scored() if scored is None else scored
    temperature = saved.confidence.temperature
    tables = scored.build_tables()
    patients, groups = outside.patients(), None
    if config.subgroup is not None and samples.subgroup is not None:
        counted = scored.build_tables(None, samples.subgroup, len(config.subgroup.values)).subgroups
        groups = dict(zip(config.subgroup.values, counted, strict=True))
    sets = _build_sets(saved)
    return assemble(
        tables,
        saved.classes,
        None if patients is None else estimate_patient_intervals(scored, patients, temperature),
        temperature,
        _count_by_site(samples, scored, len(saved.classes)),
        groups or {},
        source="external",
        held_out=len(scored),
        subgroup_column="" if config.subgroup is None else config.subgroup.column,
        prediction_sets=None if sets is None else judge_sets(tables, sets),
        operating_points=[
            judge_point(
                tables,
                saved.classes,
                OperatingPoint(name=name, asked=asked, log_odds=least, by=by[0] if by else "specificity"),
            )
            for name, (asked, least, *by) in saved.confidence.points.items()
        ],
        notes=list(outside.notes),
    )


def _count_by_site(samples: Samples, scored: Scored, classes: int) -> dict[str, np.ndarray]:
    if samples.site is None:
        return {}
    site, right = samples.site.numpy(), scored.label == scored.predicted
    by_class = {}
    for index, name in enumerate(samples.site_names):
        here = site == index
        counted = [
            np.bincount(found, minlength=classes)
            for found in (scored.label[here], scored.label[here & right], scored.predicted[here])
        ]
        by_class[name] = np.stack(counted, axis=1)
    return by_class


def _build_sets(saved: SavedModel) -> PredictionSets | None:
    confidence = saved.confidence
    if confidence.thresholds is None or confidence.coverage is None:
        return None
    bounds = {
        name: SetThreshold(
            probability=as_probability(least), log_odds=least, informative=math.isfinite(least)
        )
        for name, least in zip(saved.classes, confidence.thresholds, strict=True)
    }
    return PredictionSets(coverage=confidence.coverage, thresholds=bounds, void=confidence.void)


def write_evaluation(folder: Path, measures: Measures, model: str, data: str) -> Path:
    """Write measures.json and report.html; returns the page. model, data: their names, for its title."""
    make_folder(folder, mode=0o755)
    write_measures(folder, measures)
    wrong = join([build_element("p", sentence) for sentence in measures.headline[:-1]])
    header = join(
        [
            build_element("ul", build_element("li", f"model {model}"), "facts"),
            build_element("div", wrong, "alarms") if wrong else "",
            build_element("p", measures.headline[-1], "story"),
        ]
    )
    footer = build_element("p", "Written by `perennial evaluate`. This page loads nothing from anywhere.")
    path = folder / "report.html"
    section = build_recognition_section(measures, build_recognition_parts(measures))
    replace_file(path, build_page(data, "Perennial external validation", header, [section], footer))
    return path
