"""The operator's page in a real browser, over runs that go on."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from perennial.server.wishes import RunStopped, write_wish
from tests.live_pages import TOKEN, browser, going_on, needs_browser, operator_pages, until
from tests.run_folders import HOSTILE
from tests.switched_grid import SwitchedRun

pytestmark = [pytest.mark.slow, needs_browser]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def text(driver: Any, part: str = "main") -> str:
    """What a person reads in a part of the page; '' while another page loads."""
    return driver.execute_script("return document.getElementById(arguments[0])?.innerText ?? ''", part)


def test_a_run_is_watched_from_its_first_round_to_its_last(tmp_path: Path, driver: Any) -> None:
    run = SwitchedRun(tmp_path)
    run.grid.delay = 0.4
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
        assert "Nothing needs attention" in text(driver, "warnings")
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
        assert "not connected" not in text(driver)
        run.grid.off = {2}
        began = time.monotonic()
        until(lambda: "site-1 is not connected" in text(driver, "warnings"), 10)
        assert time.monotonic() - began < 10
        write_wish(run.folder, "stop")
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


def test_a_run_is_paused_and_resumed_by_keyboard(tmp_path: Path, driver: Any) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    run = SwitchedRun(tmp_path, tasks={"count": 1, "rounds": 300})
    run.grid.delay = 0.2
    thread = run.start()
    with operator_pages(run.folder.parent, TOKEN) as address:
        until(lambda: run.events("round"))
        driver.get(f"{address}/runs/switched")
        pause = driver.find_element(By.LINK_TEXT, "Pause")
        pause.send_keys(Keys.ENTER)
        driver.find_element(By.ID, "token").send_keys(TOKEN, Keys.ENTER)
        until(lambda: "finishes the round" in text(driver))
        driver.find_element(By.CSS_SELECTOR, ".ask button").send_keys(Keys.ENTER)
        until(lambda: "The run rests" in text(driver, "headline"))
        assert run.events("paused")
        driver.find_element(By.LINK_TEXT, "Resume").send_keys(Keys.ENTER)
        driver.find_element(By.CSS_SELECTOR, ".ask button").send_keys(Keys.ENTER)
        until(lambda: "answered" in text(driver, "headline") or "Finished" in text(driver, "headline"))
        assert run.events("went_on")
        write_wish(run.folder, "stop")
        thread.join(10)
    assert isinstance(run.error, RunStopped)


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
