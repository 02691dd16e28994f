"""perennial init: inspects data and writes the files of a first run, with reasons as comments."""

import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast, get_args

from perennial.cli import init_private
from perennial.cli.init_private import format_yaml as _yaml
from perennial.config.automatic_maps import WIDEST_PAIRED, has_network
from perennial.config.experiment import build_experiment
from perennial.config.site import SiteConfig
from perennial.config.yaml_file import parse_yaml, validate
from perennial.data.csv_file import Decimal
from perennial.data.image_survey import Survey
from perennial.data.survey import Layout, TwoLevels, survey
from perennial.data.suspicion import answer
from perennial.data.table_columns import count_features
from perennial.deploy.bundle import read_template_policy
from perennial.foundation.errors import ConfigError, DataError
from perennial.foundation.files import make_folder, replace_file

LONGEST_SIDE = 64
"""Most pixels of an input on a processor; four times as many take about four times as long."""
NETWORK_SIDE = 128
STEPS = 600
"""Optimiser steps of one site in one task that a small network needs, roughly, from its first values."""
SITES = 4
NAMELESS = {"train", "training", "trainset", "data", "dataset", "images", "samples", "records", "all"}
"""Names of files and folders that data sets share."""
FEW_CLASSES = 3
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


def init_command(
    data: Path,
    output: Path,
    site: str,
    label: str | None = None,
    site_column: str | None = None,
    patient: str | None = None,
    layout: Layout | None = None,
    ask: Callable[[str, Sequence[str]], str] | None = None,
    epsilon: float | None = None,
    missing: Sequence[str] = (),
    decimal: Decimal | None = None,
    units: Mapping[str, str] | None = None,
    limits: Sequence[str] = (),
) -> list[str]:
    """Write experiment.yaml, experiment_trained.yaml and site.yaml to output; returns what to do next.

    epsilon: of each record, by noise at the sites, without experiment_trained.yaml; None: no noise.
    layout: of a folder of images. missing, decimal, units, limits: of a table, as in its data block.
    ask: from a question and the answers that are allowed to one of these; None: nobody is there to ask.
    Raises ConfigError where one of these files exists with another content, before anything is asked, and
    DataError on data that cannot be understood; then no file is written.
    """
    names = ["experiment.yaml", *["experiment_trained.yaml"] * (epsilon is None), "site.yaml"]
    there = [output / name for name in names if (output / name).exists()]

    def ask_if_new(question: str, allowed: Sequence[str]) -> str:
        # nobody answers questions for files that are kept
        _refuse(there)
        return ask(question, allowed) if ask is not None else ""

    try:
        found = survey(data, label, site_column, patient, layout, missing, decimal, units, limits)
    except TwoLevels as question:
        if ask is None:
            raise
        layout = cast(Layout, ask_if_new(str(question), LAYOUTS))
        found = survey(data, label, site_column, patient, layout, missing, decimal, units, limits)
    for question in found.questions:
        if ask is None or not question.key:
            continue
        if ask_if_new(f"{question.text}. Write `{question.line}`?", ("yes", "no")) == "yes":
            found = found.apply_answer(question)
        found = replace(found, questions=tuple(other for other in found.questions if other != question))
    texts = [_render_experiment(found, closed_form=True, epsilon=epsilon)]
    if epsilon is None:
        texts.append(_render_experiment(found, closed_form=False))
    files = dict(zip(names, [*texts, _render_site(found, site, private=epsilon is not None)], strict=True))
    for name, text in files.items():
        where = str(output / name)
        if name == "site.yaml":
            validate(SiteConfig, parse_yaml(text, where), where)
            continue
        try:
            build_experiment(parse_yaml(text, where), output, where)
        except DataError as error:
            options = " ".join(filter(None, (each.option for each in found.questions)))
            if not options:
                raise
            raise DataError(f"{error}\nor answer what init would ask in a terminal: {options}") from error
    # the same command again finds the same files
    _refuse([path for path in there if path.read_text(encoding="utf-8") != files[path.name]])
    make_folder(output)
    for name, text in files.items():
        replace_file(output / name, text.encode(), mode=0o644)
    shown = output / "experiment.yaml"
    return [
        *_describe_survey(found),
        *(f"wrote {output / name}" for name in files),
        f"next: perennial check {shown}",
        f"then: perennial run {shown}",
    ]


def _refuse(there: Sequence[Path]) -> None:
    if there:
        raise ConfigError(f"{there[0]}: exists already, and is kept; give another --output FOLDER")


def _describe_survey(found: Survey) -> list[str]:
    what = f"{found.path}: {found.total:,} samples of {len(found.samples)} classes"
    if found.sites:
        what += f" at {len(found.sites)} sites"
    lines = [f"{what}: " + ", ".join(f"{name} {count}" for name, count in [*found.samples.items()][:12])]
    if found.images and found.source == "folder":
        kinds = ", ".join(f"{count} {kind}" for kind, count in found.modes.most_common())
        lines.append(f"of the images looked at: {kinds}; {found.sizes_in_words}")
    if found.columns:
        lines.append(f"{len(found.columns)} columns become features")
    if len(found.samples) == 1:
        lines.append("one class alone: a model of it tells nothing apart; add samples of another class")
    return [*lines, *found.notes, *(f"question: {each}" for each in found.questions)]


def _render_experiment(found: Survey, *, closed_form: bool, epsilon: float | None = None) -> str:
    stem = found.path.stem
    if stem.casefold() in NAMELESS:
        # `train` says nothing: runs of two data sets are told apart by their folders
        stem = found.path.resolve().parent.name or stem
    plain = unicodedata.normalize("NFKD", stem).encode("ascii", "ignore").decode()
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", plain).strip("-.") or "own-data"
    if epsilon is not None:
        sites = len(found.sites) or SITES
        head, end = init_private.HEAD, init_private.render_private_keys(found, epsilon, sites)
    else:
        head = _render_introduction(found, closed_form)
        end = _render_closed_form(found) if closed_form else _render_trained(found)
    lines = [
        *head,
        f"name: {_yaml(name if closed_form else f'{name}-trained')}",
        "seed: 1",
        *_render_data(found, private=epsilon is not None),
        *_render_tasks(found, closed_form),
        *end,
    ]
    return "\n".join(lines) + "\n"


def _render_introduction(found: Survey, closed_form: bool) -> list[str]:
    check = "# Look first: perennial check FILE. Every key: docs/data_files.md."
    if closed_form:
        return [
            "# Begin here: closed form. No site trains; each sends sums of fixed features once, and "
            "the server solves for the",
            "# classifier of all data together. Nothing is forgotten, late sites are welcome, a "
            "site can be taken back exactly,",
            "# and it takes minutes. experiment_trained.yaml beside it trains a network on the same "
            "data, to compare:",
            "# perennial compare runs/*",
            check,
        ]
    return [
        "# A small network, trained in rounds at the sites. `learner` is left out: its default was "
        "chosen to learn on images and",
        "# tables of any size (Adam, balanced softmax, distillation, 20 kept samples of a class); "
        "`perennial check` prints it.",
        check,
    ]


def _render_data(found: Survey, *, private: bool) -> list[str]:
    lines = ["data:", f"  source: {found.source}", f"  path: {_yaml(str(found.path))}"]
    for key, value in found.options.items():
        lines.append(f"  {key}: {_yaml(value)}")
    lines += _render_partition(found)
    if found.patient is not None:
        lines.append(
            f"  patient: {_yaml(found.patient)} # all samples of a patient stay on one side of every split"
        )
    elif found.patient_guess is not None:
        lines += [
            "  # File names look as if this found the patient, all of whose images must stay on one "
            "side of every split;",
            "  # if it does, remove the #:",
            f"  # patient: {_yaml(found.patient_guess)}",
        ]
    elif found.source != "npz":
        lines.append(
            "  # patient: COLUMN or PATTERN # whose each sample is; without it one patient may be "
            "in train and test"
        )
    if found.images:
        by_map = private and init_private.read_by_the_map(found)
        lines += [line for line in _render_image_keys(found) if not (by_map and "image_size:" in line)]
    if private:
        lines += init_private.render_constants(found)
    elif found.columns:
        lines += _render_column_keys(found)
    lines += _list_questions(found)
    if not private and not found.sites and count_features(found.columns) > WIDEST_PAIRED:
        lines.append("  validation_fraction: 0 # a table this wide has one map, and its head needs no choice")
    lines.append("  test_fraction: 0.2 # of all records, by a hash of each; nobody trains on these")
    return [*lines, *_render_real_sites(found, private)]


def _list_questions(found: Survey) -> list[str]:
    """What nobody has answered, and with it the lines that would; one line for all questions of a key."""
    lines, texts = list[str](), list[tuple[str, str]]()
    lists, mappings = defaultdict[str, list[str]](list), defaultdict[str, dict[str, str]](dict)
    for each in found.questions:
        lines.append(f"  # question: {' '.join(each.text.split())}")
        if each.key == "column_kinds" and (found.codes or found.ignored):
            lines.append("  # if so, remove the # before its line in column_kinds")
        elif isinstance(each.value, Mapping):
            mappings[each.key] |= each.value
        elif isinstance(each.value, str):
            texts += [(each.key, each.value)] * bool(each.key)
        else:
            lists[each.key] += each.value
    for key, value in (*texts, *lists.items(), *mappings.items()):
        lines.append("  # if so, remove the # before the next line, and from the line what is not so:")
        lines.append(f"  # {answer(key, value)}")
    return lines


def _render_partition(found: Survey) -> list[str]:
    if found.sites:
        names = ", ".join([*found.sites][:6]) + (", ..." if len(found.sites) > 6 else "")
        return [f"  partition: {{kind: natural}} # the data name their sites: {names}"]
    kind = "{kind: dirichlet, alpha: 0.5}" if found.total >= 100 * len(found.samples) else "{kind: iid}"
    return [
        f"  sites: {SITES} # the data name no sites, so these are made up; with real ones use "
        f"<site>/<class>/<image>,",
        "  # or a column for the site, and partition: {kind: natural}",
        f"  partition: {kind}"
        + (" # each site has other shares of the classes" if "dirichlet" in kind else ""),
    ]


def _render_image_keys(found: Survey) -> list[str]:
    size, lines = _choose_image_size(found), list[str]()
    if found.source == "folder":
        as_it_is = len(set(found.sizes)) == 1 and size == init_private.measure_median_size(found)
        why = "as the files are" if as_it_is else "the files are larger; more pixels take longer"
        lines.append(f"  image_size: {_yaml(list(size))} # height, width: {why}")
        ratios = [width / height for width, height in found.sizes]
        if max(ratios) > 1.5 * min(ratios):
            lines.append(
                "  resize: pad # the files' shapes differ; stretch would distort them, crop lose their edges"
            )
        grey = not found.modes["colour"]
        lines.append(
            f"  color: {'gray' if grey else 'rgb'}" + (" # no image looked at has colour" if grey else "")
        )
    if found.modes["deep"]:
        top = 2 ** max(8, math.ceil(math.log2(found.deepest + 1))) - 1 if found.deepest else 4095
        lines.append(f"  window: [0, {top}] # the values that become black and white; the same at every site")
    if found.modes["dicom"] and "window" not in found.options:
        lines.append(
            "  # window: [-160, 240] # DICOM files are seen by their own window; this one is soft "
            "tissue in a CT"
        )
    if found.modes["unreadable"]:
        lines.append("  unreadable: skip # some files cannot be read; up to 5 % are left out and named")
    return lines


def _choose_image_size(found: Survey) -> tuple[int, int]:
    # what a network of photographs sees is read at its size, and not enlarged from less
    photographs = found.modes["colour"] and not found.modes["dicom"] and has_network()
    longest = NETWORK_SIDE if photographs else LONGEST_SIDE
    height, width = init_private.measure_median_size(found)
    scale = min(1.0, longest / max(height, width))
    return max(4, round(height * scale)), max(4, round(width * scale))


def _render_column_keys(found: Survey) -> list[str]:
    lines = []
    if found.codes or found.ignored:
        lines.append("  column_kinds:")
    for name in found.codes:
        lines.append(
            f"    {_yaml(name)}: category # few whole numbers, taken for codes; delete the line if a quantity"
        )
    for name, why in found.ignored.items():
        lines.append(f"    {_yaml(name)}: ignore # {' '.join(why.split())}")
    if lines:
        asked = [each.value for each in found.questions if each.key == "column_kinds"]
        lines += [
            f"    # {_yaml(name)}: ignore # see the question below" for value in asked for name in value
        ]
    lines.append(
        "  imputation: mean # of missing numbers; median or a constant too. An indicator says where they were"
    )
    return lines


def _render_real_sites(found: Survey, private: bool) -> list[str]:
    lines = [
        "  # For real sites (docs/deploy.md): take path, sites and partition out, and say what all "
        "must agree on:",
        f"  # classes: {_yaml(list(found.samples))}",
    ]
    if found.columns and not private:
        lines += [
            f"  # columns: {_yaml(init_private.convert_tuples(found.columns))}",
            "  # column_kinds goes; normalise needs public constants,",
            "  # {mean: {COLUMN: NUMBER, ...}, std: {...}}, for instance from the literature",
        ]
    return lines


def _render_tasks(found: Survey, closed_form: bool) -> list[str]:
    steps_of_a_round = 2 * math.ceil(0.72 * found.total / (len(found.sites) or SITES) / 32)
    rounds = 1 if closed_form else max(5, min(40, round(STEPS / steps_of_a_round)))
    lines = []
    if len(found.samples) > FEW_CLASSES:
        lines.append(
            "# All classes at once. `count: 2` tries what happens when half of them become known "
            "later; classes that are"
        )
        lines.append("# really new later join with: perennial run LONGER.yaml --resume RUN")
    why = "one exchange a task" if closed_form else f"about {STEPS} optimiser steps at a site of mean size"
    return [*lines, f"tasks: {{count: 1, rounds: {rounds}}} # {why}"]


def _render_closed_form(found: Survey) -> list[str]:
    return [
        "# auto: maps that nobody trains, by the data's shape: a row's values, and their products; of images",
        "# patches, as they are or averaged over mirror images and turns, and a network of photographs where",
        "# perennial-fl[pretrained] is installed. `perennial check` lists them.",
        "model: {name: features, features: auto}",
        "# auto: the sites' validation samples choose among the patches, then among heads, shrinkages, and "
        "each map alone",
        "# or all together, by a few more messages; report.html says what was tried and by how much it won. "
        "Under",
        "# privacy: head: gaussian, and maps written out, as features: [inputs].",
        "strategy: {name: analytic, head: auto}",
    ]


def _render_trained(found: Survey) -> list[str]:
    if not found.images:
        model = "model: {name: mlp, hidden: [64], norm: group} # a table: one hidden layer"
    else:
        model = "model: {name: small_cnn, norm: group} # two convolutions; resnet18 for more data and a GPU"
    return [
        f"{model}; group normalisation keeps it learning",
        "strategy: fedavg",
        "bounds: {norm_multiple: 3} # no update counts beyond 3 times the median norm, no site for more than "
        "all others",
    ]


def _render_site(found: Survey, site: str, *, private: bool) -> str:
    options = [f"  {key}: {_yaml(value)}" for key, value in found.options.items() if key != "site_column"]
    column = found.options.get("site_column")
    if column:
        options.append(f"  site_column: {_yaml(column)} # only the rows that name this site are read")
    if found.patient:
        options.append(f"  patient: {_yaml(found.patient)}")
    name = site or next(
        (name for name in found.sites if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name)),
        "my-hospital",
    )
    lines = [
        "# For real sites: this hospital's file, which no message can override. The operator's "
        "bundle (docs/deploy.md) brings one",
        "# with the connection and a policy in words; put this data block into it.",
        "# Check it with: perennial check site.yaml --experiment FILE",
        f"site: {name}",
        "state_dir: state # exemplars, past models, the privacy ledger; must outlive the process",
        "data:",
        f"  source: {found.source}",
        f"  path: {_yaml(str(found.path))}",
        *options,
        "",
    ]
    if private:
        return "\n".join(lines) + "\n" + init_private.render_policy(read_template_policy())
    lines += [
        "# The policy of every hospital's file, as the operator's bundle brings it. It answers training "
        "under sample-level privacy",
        "# alone, so `perennial check site.yaml --experiment FILE` says what it would refuse of "
        "experiment.yaml, which sends sums of",
        "# features without noise. `perennial run` on one machine does not read this file. For a trial "
        "of real processes on one",
        "# machine, without patients' data: answers: [train, evaluate, statistics], require_privacy: "
        "none, and max_epsilon deleted.",
    ]
    return "\n".join(lines) + "\n" + read_template_policy()
