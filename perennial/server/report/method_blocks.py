"""Sections that appear when summary.json holds the block of a method that has more to say.

To show a new block, write a function (content, run) -> Section and name it in BLOCKS with its content's type.
"""

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perennial.foundation.errors import StateError
from perennial.server.charts.curves import Curve, Curves, HeatMap
from perennial.server.charts.frame import Axis
from perennial.server.report.closed_form import (
    OwnHead,
    Table,
    Tried,
    show_cross_site,
    show_head_choice,
    show_map_choice,
    show_own_heads,
)
from perennial.server.report.markup import (
    MISSING,
    Markup,
    Picture,
    Section,
    build_bar,
    build_element,
    build_numbers_table,
    build_panel,
    build_table,
    escape,
    format_count,
    format_decimal,
    format_percent,
    join,
)
from perennial.server.run_record import Measured, Run

ATTENTION_WARNING = ": attention: site "
IMAGE_TYPES = {b"\x89PNG\r\n\x1a\n": "image/png", b"\xff\xd8\xff": "image/jpeg"}


class Share(BaseModel):
    """A site's share of the gain that all updates brought; low to high is its interval."""

    model_config = ConfigDict(frozen=True)
    share: float
    low: float | None = None
    high: float | None = None
    flag: bool | str | None = None
    """True or a reason for which the site is named."""


class Place(BaseModel):
    """A site on the plane, and its cluster."""

    model_config = ConfigDict(frozen=True, coerce_numbers_to_str=True)
    x: float
    y: float
    cluster: str


class Attack(BaseModel):
    """One attack on the run.

    figures: its numbers by name.
    images: data URIs, or files inside the run folder.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    figures: dict[str, float | int | str | None] = {}
    images: list[str] = []


def _build_error(run: Run, fault: str) -> StateError:
    return StateError(f"{run.folder / 'summary.json'}: {fault}; resume the run to write the file again")


def show_personalised_accuracy(values: dict[str, Measured | list[Measured]], run: Run) -> Section:
    """The section on sites' own models. values: site -> accuracy on its samples, one or one for each task."""
    lists = {site: value if isinstance(value, list) else [value] for site, value in values.items()}
    longest = max(map(len, lists.values()), default=1)
    tasks = [f"task {task}" for task in range(1, longest)]
    rows = [
        [
            site,
            *map(format_percent, row[:-1]),
            *[MISSING] * (longest - len(row)),
            _build_share_bar(row[-1] if row else None),
        ]
        for site, row in lists.items()
    ]
    body = build_table(["site", *tasks, "at the end"], rows, "l" + "r" * longest, "Personalised accuracy")
    note = "On the samples that the site held out, of its own model."
    return Section(
        "Personalised models", [build_panel("Accuracy of each site's own model", body, note, long=True)]
    )


def _build_share_bar(share: float | None) -> Markup:
    return build_bar(format_percent(share), share or 0.0)


def show_contribution(shares: dict[str, Share], run: Run) -> Section:
    """The section on contribution values. shares: by site."""
    columns = ["site", "share", "interval", ""]
    rows = []
    for site, each in shares.items():
        interval = "not known: the gain itself is in doubt"
        if each.low is not None and each.high is not None:
            interval = f"{format_percent(each.low)} to {format_percent(each.high)}"
        reason = each.flag if isinstance(each.flag, str) else "flagged"
        rows.append(
            [
                site,
                _build_share_bar(each.share),
                interval,
                build_element("span", reason, "flag") if each.flag else "",
            ]
        )
    note = (
        "Share of the run's gain that came with each site's updates. A low value is no fault: rare classes "
        "and late entry lower it. Null update: every update that the site sent was what it had got."
    )
    body = build_table(columns, rows, "lrrl", "Contribution")
    return Section(
        "Contribution values", [build_panel("Contribution value of each site", body, long=True)], note
    )


def show_digest(facts: dict[str, Any], run: Run) -> Section:
    """The section on digests. facts: figures by name, or groups of them, which become tables."""
    groups = {name: value for name, value in facts.items() if isinstance(value, dict)}
    plain = {name: value for name, value in facts.items() if name not in groups}
    parts: list[Picture | Markup] = []
    if plain:
        parts.append(build_panel("In all", _build_facts_table(plain, "Digests")))
    for name, group in groups.items():
        if all(isinstance(value, dict) for value in group.values()):
            columns = list(dict.fromkeys(key for value in group.values() for key in value))
            rows = [
                [key, *[_format_fact(value.get(column)) for column in columns]]
                for key, value in group.items()
            ]
            facts_of = build_table(["", *map(_format_key, columns)], rows, "l" + "r" * len(columns), name)
        else:
            facts_of = _build_facts_table(group, name)
        parts.append(build_panel(_format_key(name), facts_of))
    lead = "Mixed, noised features that stand in for sites while they are absent."
    return Section("Digests", parts, lead)


def _build_facts_table(facts: Mapping[str, object], caption: str) -> Markup:
    rows = [[_format_key(name), _format_fact(value)] for name, value in facts.items()]
    return build_element("div", build_table(["", "value"], rows, "lr", caption), "facts-table")


def _format_key(key: str) -> str:
    return key.replace("_", " ")


def _format_fact(value: object) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return MISSING
    if isinstance(value, float):
        return format_decimal(value, 4)
    if isinstance(value, list):
        return ", ".join(map(_format_fact, value))
    return str(value)


def show_attention(weights: dict[str, dict[str, Measured]], run: Run) -> Section:
    """The section on layer attention. weights: layer -> site -> weight.

    Above the picture stand the journal's last warning that one site decides layers alone, and the number of
    such warnings.
    """
    sites = list(dict.fromkeys(site for row in weights.values() for site in row))
    grid = [[row.get(site) for site in sites] for row in weights.values()]
    texts = [["" if value is None else f"{value:.2f}" for value in row] for row in grid]
    largest = max((value for row in grid for value in row if value is not None), default=1.0)
    layers = list(weights)
    height = min(100 + 28 * len(weights), 1200)
    rows = [[layer, *map(format_decimal, row)] for layer, row in zip(weights, grid, strict=True)]
    figure = Picture(
        "attention",
        "Weight of each site in each layer",
        "Rows are layers from the input to the head, columns are sites; a row adds up to one.",
        HeatMap(
            layers,
            sites,
            grid,
            texts,
            lambda row, column: f"{layers[row]}, {sites[column]}: {format_decimal(grid[row][column])}",
            largest,
            height,
        ),
        wide=True,
        numbers=build_numbers_table(["layer", *sites], rows, "Attention of each layer on each site"),
    )
    warnings = [note for note in run.notes if ATTENTION_WARNING in note]
    last = (
        f"The journal warns {format_count(len(warnings), 'time')}; last in {warnings[-1]}" if warnings else ""
    )
    return Section("Attention", [figure], last)


def show_clusters(indices: dict[str, Place], run: Run) -> Section:
    """The section on clusters of sites. indices: each site's place on the plane and its cluster."""
    members: dict[str, dict[str, Place]] = {}
    for site, place in indices.items():
        members.setdefault(place.cluster, {})[site] = place
    curves = [
        Curve(
            f"cluster {cluster}",
            [(place.x, place.y) for place in sites.values()],
            [*sites],
            joined=False,
            labels=[*sites] if len(indices) <= 30 else (),
        )
        for cluster, sites in sorted(members.items())
    ]
    axes = Axis("first direction", ticks=False), Axis("second direction", ticks=False)
    rows = [[cluster, ", ".join(sites)] for cluster, sites in sorted(members.items())]
    figure = Picture(
        "clusters",
        "Sites by likeness",
        "Near points are sites whose data look alike to the method; colour and shape tell the cluster.",
        Curves(curves, *axes, height=420),
        wide=True,
        numbers=build_numbers_table(["cluster", "sites"], rows, "Clusters", "ll"),
    )
    return Section("Clusters", [figure])


def show_attacks(entries: list[Attack], run: Run) -> Section:
    """The section on attacks that were tried on this run, and their results."""
    parts: list[Picture | Markup] = []
    for entry in entries:
        pictures = join(
            [
                Markup(f'<img src="{_embed_image(image, run)}" alt="{escape(entry.name)}, picture {number}">')
                for number, image in enumerate(entry.images, 1)
            ]
        )
        gallery = build_element("div", pictures, "gallery") if entry.images else Markup("")
        parts.append(build_panel(entry.name, _build_facts_table(entry.figures, entry.name) + gallery))
    return Section(
        "Attacks", parts, "Attacks that were run against this model. One that fails proves no safety."
    )


def _embed_image(image: str, run: Run) -> Markup:
    """A picture as a data URI.

    Raises StateError unless it is a PNG or JPEG, either as a data URI or as a file in the run folder.
    """
    if image.startswith("data:"):
        head, _, body = image.partition(",")
        if head not in {f"data:{kind};base64" for kind in IMAGE_TYPES.values()}:
            raise _build_error(run, f"attacks: images: found {head[:60]!r}, allowed PNG and JPEG in base64")
        return escape(f"{head},{body}")
    path = (run.folder / image).resolve()
    if not path.is_relative_to(run.folder.resolve()):
        raise _build_error(run, f"attacks: images: found {image!r}, allowed files inside the run folder")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(
            f"{path}: cannot be read ({error.strerror}); run the attack again to write it"
        ) from None
    for signature, kind in IMAGE_TYPES.items():
        if data.startswith(signature):
            return Markup(f"data:{kind};base64,{base64.b64encode(data).decode()}")
    raise StateError(f"{path}: not a PNG or JPEG picture; run the attack again to write it")


def show_bounds(met: dict[str, dict[str, int]], run: Run) -> Section:
    """The section on bounds. met: site -> kind of bound -> rounds in which it changed the site's update."""
    found = {site: [counts.get(kind, 0) for kind in ("scaled", "capped")] for site, counts in met.items()}
    rows = [[site, *map(str, counts)] for site, counts in found.items() if any(counts)]
    columns = ["site", "rounds with a shortened update", "rounds with a capped count"]
    said = str(run.blocks.get("bounds_set") or "")
    note = f"The experiment sets: {said}. " if said else ""
    if not rows:
        return Section("Bounds on sites", [], f"{note}No site met a bound.")
    note += (
        "An update longer than the experiment's bound is shortened to it, and a site with more samples "
        "than its share allows counts as fewer; both still take part. Most often the site has more records "
        "than the others, classes or images unlike theirs, or training that jumps. A fault at the site, or "
        "updates made longer on purpose, look the same here: ask the site."
    )
    return Section(
        "Bounds on sites", [build_panel("Who met a bound", build_table(columns, rows, "lrr", "Bounds"))], note
    )


BLOCKS: dict[str, tuple[Any, Callable[[Any, Run], Section]]] = {
    "own_heads": (dict[str, OwnHead], show_own_heads),
    "personalised_accuracy": (dict[str, Measured | list[Measured]], show_personalised_accuracy),
    "contribution": (dict[str, Share], show_contribution),
    "map_choice": (list[Tried], show_map_choice),
    "head_choice": (list[Tried], show_head_choice),
    "bounds": (dict[str, dict[str, int]], show_bounds),
    "cross_site": (Table, show_cross_site),
    "digest": (dict[str, Any], show_digest),
    "attention": (dict[str, dict[str, Measured]], show_attention),
    "clusters": (dict[str, Place], show_clusters),
    "attacks": (list[Attack], show_attacks),
}
"""Key of summary.json -> (what it must be, the function that shows it), in the order of the page."""


def report_block(run: Run, block: str) -> Section | None:
    """The section of a summary's block; None if there is none. Raises StateError if it is malformed."""
    content = run.blocks.get(block)
    if not content:
        return None
    expected, show = BLOCKS[block]
    try:
        return show(TypeAdapter(expected).validate_python(content), run)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join([block, *map(str, fault["loc"])])
        raise _build_error(run, f"{key}: {fault['msg']}, found {str(fault['input'])[:60]!r}") from None
