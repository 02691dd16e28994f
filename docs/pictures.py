"""Makes the pictures of pages: `python docs/pictures.py [RUN]`, with a Chromium on PATH.

RUN is a finished run of experiments/quickstart.yaml. Its summary, measures, journal and experiment are kept
in docs/report_run/, so that the words of the picture can be compared with those of today's report. Without
RUN the run that is kept is drawn again. docs/report.png is the top of the report, docs/report.txt its words.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from html import unescape
from pathlib import Path

from perennial.server.report.write import write_report

DOCS = Path(__file__).resolve().parent
KEPT = DOCS / "report_run"
FILES = ("summary.json", "measures.json", "events.jsonl", "experiment.yaml")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1280, 1400
SKIPPED = re.compile(r"<(style|script|svg)\b.*?</\1>", re.DOTALL)


def page_of_kept_run() -> str:
    """The report that today's code makes of the run that is kept."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "quickstart"
        shutil.copytree(KEPT, run)
        return write_report(run).read_text(encoding="utf-8")


def words_of(page: str) -> str:
    """The words of a report's head and of its first section, one text a line; charts are left out."""
    body = SKIPPED.sub(" ", page[page.index("<body") :])
    second = [match.start() for match in re.finditer(r"<section\b", body)][1]
    texts = re.sub(r"<[^>]+>", "\n", body[:second]).splitlines()
    return "\n".join(filter(None, (" ".join(unescape(text).split()) for text in texts))) + "\n"


def main(arguments: list[str]) -> int:
    """Make the pictures; the exit status is 1 where there is no browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(
            f"no browser: found none of {', '.join(BROWSERS)} on PATH; nothing was changed", file=sys.stderr
        )
        return 1
    if arguments:
        KEPT.mkdir(exist_ok=True)
        for name in FILES:
            shutil.copyfile(Path(arguments[0]) / name, KEPT / name)
    page = page_of_kept_run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.html"
        path.write_text(page, encoding="utf-8")
        picture = f"--screenshot={DOCS / 'report.png'}"
        size = f"--window-size={WIDTH},{HEIGHT}"
        still = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        subprocess.run([browser, *still, size, picture, path.as_uri()], check=True, timeout=300)
    (DOCS / "report.txt").write_text(words_of(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
