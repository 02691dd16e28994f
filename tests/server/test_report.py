"""The report: what it shows, what it refuses, and that strangers' text stays text."""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perennial.foundation.errors import StateError
from perennial.server.charts.curves import Curve, Curves
from perennial.server.charts.frame import Axis
from perennial.server.report.markup import Picture, escape
from perennial.server.report.method_blocks import BLOCKS
from perennial.server.report.write import write_report
from tests.run_folders import HOSTILE, PIXEL, Page, every_block, round_event, write_run


def report(folder: Path) -> Page:
    return Page(write_report(folder))


def test_the_page_has_the_headline_numbers_and_every_common_section(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"))
    assert page.sections == ["accuracy", "training", "sites", "privacy", "experiment"]
    for text in (
        "small",
        "seed 1",
        "in-process engine",
        "21 November 2026, 03:31 UTC",
        "After 3 tasks and 3 rounds at 2 sites, the model tells all 3 classes apart with 70.0",
        "it has lost 25.0 points of its best",
        "76.7",
        "9.0",
        "1 min 12",
        "1 skipped, 1 reply dropped",
        "No formal privacy",
        "no answer within 60 s",
        "policy.min_samples: 50",
        "south reconnected",
        "Resumed at round 2.",
        "name: small",
        "c0ffee",
    ):
        assert text in page.text.replace("\N{NARROW NO-BREAK SPACE}", " "), text


def test_classes_of_very_different_size_are_reported_by_balanced_accuracy(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", balanced_accuracy=[0.9, 0.5, 0.4], unbalanced=True))
    assert "apart with 40.0" in page.text
    assert page.text.index("Final balanced accuracy") < page.text.index("Final accuracy")


def test_the_page_loads_nothing_and_only_its_own_scripts_may_run(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run"))
    assert not page.all("link")
    assert not [
        a for _, a in page.elements if {"src", "href"} & a.keys() and not str(a.get("href")).startswith("#")
    ]
    policy = str(page.all("meta")[1]["content"])
    assert "default-src 'none'" in policy
    script_policy = next(rule for rule in policy.split("; ") if rule.startswith("script-src"))
    assert "unsafe" not in script_policy
    (script,) = page.scripts
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in script_policy
    assert not [attributes for _, attributes in page.elements if {"onload", "onclick"} & attributes.keys()]


def test_text_from_other_institutions_stays_text(tmp_path: Path) -> None:
    plain = report(write_run(tmp_path / "plain", **every_block("north")))
    sites = {HOSTILE: {"samples": 3, "rounds": 1, "rejected": 1, "refused": 1}}
    event = round_event(
        1,
        1,
        participants=[HOSTILE],
        dropped=[{"site": HOSTILE + "2", "reason": HOSTILE}],
        refused=[{"site": HOSTILE + "3", "reason": HOSTILE}],
        absent=[HOSTILE + "4"],
    )
    epsilon = {
        "value": 1.0,
        "unit": HOSTILE,
        "delta": 1e-5,
        "accountant": HOSTILE,
        "per_site": {HOSTILE: 1.0},
    }
    folder = write_run(
        tmp_path / "hostile",
        events=[event, {"event": "note", "text": HOSTILE}],
        yaml=f"name: '{HOSTILE}'",
        experiment=HOSTILE,
        engine=HOSTILE,
        sites=sites,
        epsilon=epsilon,
        classes=[HOSTILE],
        tasks=[[HOSTILE]] * 3,
        versions={HOSTILE: HOSTILE},
        model_sha256=HOSTILE,
        **every_block(HOSTILE),
    )
    page = report(folder)
    assert page.text.count("<script>alert(1)</script>") > 20
    assert len(page.scripts) == len(plain.scripts)
    assert {tag for tag, _ in page.elements} <= {tag for tag, _ in plain.elements}
    attributes = {name for _, found in plain.elements for name in found}
    assert {name for _, found in page.elements for name in found} <= attributes
    assert all(str(image["src"]).startswith("data:image/png;base64,") for image in page.all("img"))
    assert any("<script" in told for chart in page.charts.values() for told in chart.tells)


@given(st.text(), st.text())
def test_no_text_can_leave_the_chart_that_shows_it(name: str, told: str) -> None:
    curve = Curve(name, [(1.0, 0.5), (2.0, None)], [told, told], labels=[told, told])
    chart = Curves([curve, curve], Axis(name), Axis(told, names=[name, told]), 300)
    drawn = Picture("any", name, told, chart).markup()
    tags = set(re.findall(r"<(/?[a-z0-9]+)", drawn))
    assert {tag.lstrip("/") for tag in tags} <= {
        *("figure", "figcaption", "h3", "p", "div", "ul", "li", "svg", "g", "path", "line", "rect", "text"),
        *("title", "circle"),
    }
    assert not {"<", ">", '"', "'"} & set(escape(told))


def test_ids_are_unique_and_charts_have_words(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", **every_block("north")))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert len(page.charts) == len([a for a in page.all("svg") if a.get("role") == "img"])
    assert all(len(chart.description) > 30 and chart.tells for chart in page.charts.values())
    assert len(page.all("h1")) == 1
    assert page.all("html") == [{"lang": "en"}]


def plain(texts: list[str]) -> list[str]:
    return [text.replace("\N{NARROW NO-BREAK SPACE}", " ") for text in texts]


def test_the_accuracy_charts_hold_the_matrix_and_the_forgetting_of_each_task(tmp_path: Path) -> None:
    charts = report(write_run(tmp_path / "run")).charts
    cells = charts["accuracy-matrix"]
    rows = {1: [90.0], 2: [60.0, 80.0], 3: [50.0, 70.0, 90.0]}
    assert plain(cells.tells) == [
        f"after {after}: {share} % on task {task}"
        for after, row in rows.items()
        for task, share in enumerate(row, 1)
    ]
    assert [text for text in cells.texts if "." in text] == [str(x) for row in rows.values() for x in row]
    assert plain(charts["accuracy-over-tasks"].tells) == [
        "after task 1\nall classes so far: 90.0 %\nnewest task: 90.0 %\nat the sites: 85.0 %",
        "after task 2\nall classes so far: 70.0 %\nnewest task: 80.0 %\nforgetting: 30.0 %",
        "after task 3\nall classes so far: 70.0 %\nnewest task: 90.0 %\nat the sites: 65.0 %\n"
        "forgetting: 25.0 %",
    ]


def test_a_matrix_that_is_no_triangle_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", accuracy_matrix=[[0.9], [0.8]])
    with pytest.raises(StateError, match="accuracy_matrix: .*row 2 has 1 columns, expected 2"):
        write_report(folder)


def test_charts_over_rounds(tmp_path: Path) -> None:
    charts = report(write_run(tmp_path / "run")).charts
    assert charts["train-loss"].tells == ["round 1: 1", "round 2: 0.5"]
    assert "accuracy-by-round" not in charts, "one point is no chart"


def test_who_took_part_and_what_was_not_used_stand_in_tables(tmp_path: Path) -> None:
    text = report(write_run(tmp_path / "run")).text
    for words in ("no answer within 60 s", "policy.min_samples: 50", "dropped", "refused"):
        assert words in text.partition("Replies not used")[2]


def test_epsilon_is_shown_with_its_unit_and_delta(tmp_path: Path) -> None:
    epsilon = {
        "value": 6.4213,
        "unit": "sample",
        "delta": 1e-5,
        "accountant": "prv",
        "per_site": {"north": 6.4213, "south": float("inf")},
    }
    page = report(write_run(tmp_path / "run", epsilon=epsilon))
    assert "ε = 6.42" in page.text
    assert "for one sample, δ = 1e\N{MINUS SIGN}5; the worst site" in page.text
    assert "prv accountant" in page.text
    assert "6.42" in page.text.partition("Privacy loss at each site")[2] and "infinite" in page.text
    assert "No formal privacy" not in page.text


def test_each_block_brings_its_section_and_none_appears_without(tmp_path: Path) -> None:
    blocks = every_block("north")
    assert blocks.keys() == BLOCKS.keys()
    bare = report(write_run(tmp_path / "bare"))
    for name, content in blocks.items():
        page = report(write_run(tmp_path / name, **{name: content}))
        assert len(page.sections) == len(bare.sections) + 1
    page = report(write_run(tmp_path / "all", **blocks))
    text = page.text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    assert "90.0 %" in text.partition("Personalised models")[2] and "10.0 % to 40.0 %" in text
    assert page.charts["attention"].tells == ["north, north: 1", "head.bias, other: 0.2"]
    assert page.charts["clusters"].tells == ["north", "other"]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_malformed_block_is_named(tmp_path: Path, name: str) -> None:
    blocks: dict[str, Any] = {name: "nonsense"}
    folder = write_run(tmp_path / "run", **blocks)
    with pytest.raises(StateError, match=rf"summary\.json: {name}: .*found 'nonsense'"):
        write_report(folder)


def test_pictures_come_from_the_run_folder_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", attacks=[{"name": "inversion", "images": ["pictures/one.png"]}])
    with pytest.raises(StateError, match=r"one\.png: cannot be read"):
        write_report(folder)
    (folder / "pictures").mkdir()
    (folder / "pictures/one.png").write_bytes(PIXEL)
    (image,) = report(folder).all("img")
    assert str(image["src"]).endswith(base64.b64encode(PIXEL).decode())
    (folder / "pictures/one.png").write_bytes(b"<svg onload='alert(1)'>")
    with pytest.raises(StateError, match="not a PNG or JPEG"):
        write_report(folder)


@pytest.mark.parametrize(
    "image", ["../secret.png", "/etc/passwd", "data:image/svg+xml;base64,PHN2Zz4=", "data:x"]
)
def test_other_pictures_are_refused(tmp_path: Path, image: str) -> None:
    (tmp_path / "secret.png").write_bytes(PIXEL)
    folder = write_run(tmp_path / "run", attacks=[{"name": "inversion", "images": [image]}])
    with pytest.raises(StateError, match="attacks: images: found .*allowed"):
        write_report(folder)
