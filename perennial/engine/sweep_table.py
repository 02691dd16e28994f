"""The table of a sweep, a row for each setting: mean and interval over seeds, as text, CSV, LaTeX and PNG."""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from perennial.foundation.files import make_folder, replace_file

LEVEL = 0.95
MEASURES: Mapping[str, str] = {
    "final accuracy": "final_accuracy",
    "average incremental accuracy": "average_incremental_accuracy",
    "forgetting": "forgetting",
}
"""Column of the table -> key of summary.json; shares, shown in per cent. Balanced accuracy stands in place of
accuracy where class sizes differ much."""
NOTE = "Per cent, forgetting in points; mean and half its 95 % t-interval over seeds."
FONT = 20
"""Size of the letters of table.png, in pixels."""


@dataclass(frozen=True)
class Sweep:
    """The results of a sweep, one row for each setting.

    rows: label -> seed -> summary.json of the run. folder: holds the table as text, CSV, LaTeX and PNG.
    runs: the folders of all runs.

    >>> run_sweep("experiments/quickstart.yaml", seeds="1:3", sweep={"strategy": ["fedavg", "fednova"]})
    """

    rows: Mapping[str, Mapping[int, Mapping[str, Any]]]
    folder: Path
    runs: tuple[Path, ...]

    @property
    def columns(self) -> list[str]:
        """Names of the measures; the first is the one to report."""
        unbalanced = any(one.get("unbalanced") for runs in self.rows.values() for one in runs.values())
        names = [*MEASURES]
        return ["final balanced accuracy", *names[1:]] if unbalanced else names

    def values(self, label: str, column: str) -> list[float]:
        """One measure of all runs of a row, in per cent or points, in the order of the seeds."""
        found = []
        for _, summary in sorted(self.rows[label].items()):
            if column == "final balanced accuracy":
                value = (summary.get("balanced_accuracy") or [None])[-1]
            else:
                value = summary[MEASURES[column]]
            if value is not None:
                found.append(100 * value)
        return found

    def write(self) -> None:
        """Write table.txt, .csv, .tex and .png to the folder."""
        make_folder(self.folder)
        texts = {"txt": f"{self}\n", "csv": self.to_csv(), "tex": self.to_latex()}
        files = {ending: text.encode() for ending, text in texts.items()} | {"png": self.to_png()}
        for ending, content in files.items():
            replace_file(self.folder / f"table.{ending}", content, mode=0o644)

    def cells(self) -> Iterator[tuple[str, int, list[tuple[float | None, float | None]]]]:
        """(label, number of seeds, (mean, half its 95 % t-interval) of each measure).

        None: not measured, or not with each seed; a mean over some of them would be another row's.
        """
        for label, runs in self.rows.items():
            found = [self.values(label, column) for column in self.columns]
            yield (
                label,
                len(runs),
                [mean_and_half(values if len(values) == len(runs) else []) for values in found],
            )

    def __str__(self) -> str:
        """The table in aligned columns, as table.txt has it."""
        lines = self._format_cells()
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if place == 0 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        text.insert(1, "-" * len(text[0]))
        return "\n".join([*text, NOTE])

    def _format_cells(self) -> list[list[str]]:
        """The texts of the head and of each row."""
        rows = [[label, str(seeds), *map(_format_figures, found)] for label, seeds, found in self.cells()]
        return [["setting", "seeds", *self.columns], *rows]

    def to_csv(self) -> str:
        """A line for each row and measure: setting, measure, seeds, mean, half_interval."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["setting", "measure", "seeds", "mean", "half_interval"])
        for label, seeds, found in self.cells():
            for column, figures in zip(self.columns, found, strict=True):
                numbers = ["" if figure is None else f"{figure:.4f}" for figure in figures]
                writer.writerow([label, column, seeds, *numbers])
        return out.getvalue()

    def to_latex(self) -> str:
        """A tabular, without packages."""
        head = " & ".join(["setting", "seeds", *self.columns])
        lines = [
            " & ".join(
                [
                    _escape_latex(label),
                    str(seeds),
                    *(_format_figures(f).replace("±", r"$\pm$") for f in found),
                ]
            )
            for label, seeds, found in self.cells()
        ]
        body = " \\\\\n".join(lines)
        columns = "lr" + "r" * len(self.columns)
        parts = [rf"\begin{{tabular}}{{{columns}}}", r"\hline", rf"{head} \\", r"\hline", rf"{body} \\"]
        return "\n".join([*parts, r"\hline", r"\end{tabular}", ""])

    def to_png(self) -> bytes:
        """A picture of the table, black on white."""
        from PIL import Image, ImageDraw, ImageFont

        font, height, gap = ImageFont.load_default(FONT), 2 * FONT, 2 * FONT
        lines = self._format_cells()
        widths = [max(map(font.getlength, column)) + gap for column in zip(*lines, strict=True)]
        width = max(sum(widths), font.getlength(NOTE) + gap)
        picture = Image.new("L", (math.ceil(width), height * (len(lines) + 2)), "white")
        draw = ImageDraw.Draw(picture)
        for number, line in enumerate(lines):
            right, middle = 0.0, height * (number + 1)
            for place, (cell, column) in enumerate(zip(line, widths, strict=True)):
                left, right = right, right + column
                x, anchor = (left + gap / 2, "lm") if place == 0 else (right - gap / 2, "rm")
                draw.text((x, middle), cell, "black", font, anchor)
        draw.line((gap / 2, 1.5 * height, sum(widths) - gap / 2, 1.5 * height), "black")
        draw.text((gap / 2, height * (len(lines) + 1)), NOTE, "black", font, "lm")
        out = io.BytesIO()
        picture.save(out, "png")
        return out.getvalue()

    def _repr_html_(self) -> str:
        head, *rows = ("".join(f"<td>{escape(cell)}</td>" for cell in line) for line in self._format_cells())
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><tr>{head.replace('td>', 'th>')}</tr>{body}</table>"


def mean_and_half(values: Sequence[float]) -> tuple[float | None, float | None]:
    """(mean, half its 95 % t-interval); the second is None for fewer than two values."""
    if not values:
        return None, None
    if len(values) == 1:
        return values[0], None
    from scipy.special import stdtrit

    quantile = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2))
    return fmean(values), quantile * stdev(values) / math.sqrt(len(values))


def _format_figures(figures: tuple[float | None, float | None]) -> str:
    mean, half = figures
    if mean is None:
        return "-"
    return f"{mean:z.1f}" if half is None else f"{mean:z.1f} ± {half:.1f}"


def _escape_latex(text: str) -> str:
    return re.sub(r"([&%$#_{}])", r"\\\1", text)
