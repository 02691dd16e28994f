"""The operator's page in a real browser, over runs that go on."""

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from perennial.server.control import write_request
from tests.live_pages import browser, going_on, needs_browser, operator_pages, until
from tests.run_folders import HOSTILE
from tests.server.switched_grid import SwitchedRun

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


CONTROLS = "[...document.querySelectorAll('a[href], button, input, select, summary, [tabindex=\"0\"]')]"
# what the polite region has said since
HEAR = """
window.heard = [];
new MutationObserver(() => window.heard.push(document.getElementById("voice").textContent))
  .observe(document.getElementById("voice"), {childList: true});
"""
# each text that stands out too little from what is behind it, with its contrast
FAINT = """
const channels = (color) => color.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => {
  const part = (c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
};
const behind = (element) => {
  for (; element; element = element.parentElement) {
    const color = channels(getComputedStyle(element).backgroundColor);
    if (color.length < 4 || color[3] > 0) return color;
  }
  return [255, 255, 255];
};
const faint = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const text = walker.currentNode.textContent.trim(), element = walker.currentNode.parentElement;
  const style = getComputedStyle(element), box = element.getBoundingClientRect();
  if (!text || box.width < 2 || box.height < 2 || ["SCRIPT", "OPTION"].includes(element.tagName)) continue;
  const ink = element instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(channels(ink)), light(behind(element))].sort((x, y) => y - x);
  const size = parseFloat(style.fontSize), large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < (large ? 3 : 4.5)) faint.push(`${text}: ${contrast.toFixed(2)}`);
}
return faint;
"""


def text(driver: Any, part: str = "main") -> str:
    """What a person reads in a part of the page; '' while another page loads."""
    return driver.execute_script("return document.getElementById(arguments[0])?.innerText ?? ''", part)


def test_a_run_is_watched_from_its_first_round_to_its_last(tmp_path: Path, driver: Any) -> None:
    run = SwitchedRun(tmp_path)
    run.grid.delay = 1.5
    run.folder.parent.mkdir(parents=True)
    with operator_pages(run.folder.parent) as address:
        driver.get(address)
        thread = run.start()
        # the overview shows the run by itself, without a reload
        until(lambda: "switched" in text(driver, "runs"), 30)
        driver.get(f"{address}/runs/switched")
        driver.execute_script("window.neverReloaded = true")
        seen = set()

        def over() -> bool:
            seen.add(text(driver, "headline").split("Round ")[-1].split(" of")[0])
            return "Finished after 6 rounds" in text(driver, "headline")

        until(over, 90)
        thread.join(10)
        assert len(seen & {"1", "2", "3", "4", "5", "6"}) >= 4
        assert driver.execute_script("return window.neverReloaded") is True
        assert "does not tell classes apart" in text(driver, "warnings"), "of 10 classes it knows two"
        assert "task 1" in text(driver, "learning")
        assert not [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def test_a_site_that_stops_is_named_within_ten_seconds(tmp_path: Path, driver: Any) -> None:
    run = SwitchedRun(tmp_path, "grpc", tasks={"count": 1, "rounds": 300})
    run.grid.delay = 0.3
    thread = run.start()
    with operator_pages(run.folder.parent) as address:
        until(lambda: run.events("round"))
        driver.get(f"{address}/runs/switched")
        until(lambda: "site-1" in text(driver, "sites"))
        assert "No sign of life" not in text(driver)
        run.grid.off = {2}
        began = time.monotonic()
        until(lambda: "No sign of life of the SuperNode of site-1" in text(driver, "warnings"), 10)
        assert time.monotonic() - began < 10
        write_request(run.folder, "stop")
        until(lambda: "stopped" in text(driver, "headline"))
        thread.join(10)


def test_scripts_in_names_and_reasons_stay_text(tmp_path: Path, driver: Any) -> None:
    name = HOSTILE[:70]
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(1, [name, "graz"])
        driver.get(f"{address}/runs/trial")
        run.answer(name, HOSTILE, refused=True)
        run.journal.write("note", text=HOSTILE)
        until(lambda: "alert(1)" in text(driver, "warnings") and "alert(1)" in text(driver, "notes"))
        assert driver.execute_script("return document.querySelectorAll('main script, main img').length") == 0
        assert name.replace("\\", "") in text(driver, "sites").replace("\n", "")


def test_screen_readers_hear_of_new_warnings_once_and_not_of_growing_figures(
    tmp_path: Path, driver: Any
) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(1, ["graz", "linz"])
        driver.get(f"{address}/runs/trial")
        driver.execute_script(HEAR)
        run.answer("graz", "policy: no", refused=True)
        until(lambda: "The policy of graz refuses" in text(driver, "voice"))
        run.answer("linz", "state: full", refused=True)
        until(lambda: "linz does not answer" in text(driver, "voice"))
        for number in (1, 2, 3):
            run.end_round(number, ["graz", "linz"])
        until(lambda: "3" in text(driver, "figures"))
        heard = driver.execute_script("return window.heard")
        assert len(heard) == 2 and "graz" not in heard[1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_every_text_can_be_read_in_light_and_dark(
    tmp_path: Path, driver: Any, scheme: str, width: int
) -> None:
    """WCAG 2.2, 1.4.3 (AA): 4.5 to 1, and 3 to 1 for large text."""
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(4, ["graz", "linz", "wels"], missing=["steyr"])
        for number in (1, 2, 3):
            run.end_round(number, ["graz", "linz"], accuracy=0.5 + number / 10)
        run.journal.write("note", text="a note")
        run.answer("graz", "policy: no", refused=True)
        run.answer("linz", "lost")
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        try:
            driver.get(f"{address}/runs/trial")
            until(lambda: "The policy of graz refuses" in text(driver, "warnings"))
            dark = driver.execute_script("return matchMedia('(prefers-color-scheme: dark)').matches")
            assert dark == (scheme == "dark")
            faint = driver.execute_script(FAINT)
            assert not faint, faint
        finally:
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("page", ["", "runs/trial"])
def test_a_screen_reader_finds_one_heading_landmarks_and_a_name_for_all(
    tmp_path: Path, driver: Any, page: str
) -> None:
    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(2, ["graz", "linz"])
        run.end_round(1, ["graz", "linz"], accuracy=0.5)
        driver.get(f"{address}/{page}")
        until(lambda: text(driver))
        tree = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    there = [node for node in tree if not node.get("ignored") and "role" in node]
    roles = [node["role"]["value"] for node in there]
    assert {"main", "banner", "navigation"} <= set(roles)
    levels = [
        property["value"]["value"]
        for node in there
        if node["role"]["value"] == "heading"
        for property in node["properties"]
        if property["name"] == "level"
    ]
    assert levels.count(1) == 1 and all(b - a <= 1 for a, b in pairwise(levels))
    named = {"link", "button", "textbox", "checkbox", "combobox", "image", "table", "region", "img"}
    nameless = [node for node in there if node["role"]["value"] in named and not node["name"]["value"]]
    assert not nameless


def test_every_control_is_reached_by_the_tab_key_and_can_be_seen(tmp_path: Path, driver: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with going_on(tmp_path) as run, operator_pages(tmp_path) as address:
        run.begin_round(2, ["graz", "linz"])
        driver.get(f"{address}/runs/trial")
        until(lambda: "graz" in text(driver))
        expected = driver.execute_script(f"return {CONTROLS}.length")
        reached = set()
        for _ in range(expected + 2):
            ActionChains(driver).send_keys(Keys.TAB).perform()
            place, outline = driver.execute_script(
                f"const e = document.activeElement; return [{CONTROLS}.indexOf(e), "
                "getComputedStyle(e).outlineStyle]"
            )
            if place >= 0:
                assert outline != "none", place
                reached.add(place)
        assert reached == set(range(expected))


def test_a_lost_server_is_said_and_the_page_fits_a_phone(tmp_path: Path, driver: Any) -> None:
    with going_on(tmp_path) as run:
        run.begin_round(1, ["graz", "a-site-with-a-name-of-" + "x" * 40])
        with operator_pages(tmp_path) as address:
            driver.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True},
            )
            driver.get(f"{address}/runs/trial")
            until(lambda: "graz" in text(driver))
            assert driver.execute_script("return document.documentElement.scrollWidth") <= 360
            unnamed = (
                "[...document.querySelectorAll('a, button, input, select, svg[role=img]')].filter(e => !("
                "e.innerText || e.getAttribute('aria-label') || (e.labels || []).length)).length"
            )
            assert driver.execute_script(f"return {unnamed}") == 0
            driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        until(
            lambda: "No connection to the server" in driver.execute_script("return document.body.innerText")
        )
