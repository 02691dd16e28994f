"""perennial evaluate."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def evaluate_command(
    run: Path, data: Path, overrides: Sequence[str], site: str = "", output: Path | None = None
) -> None:
    """Measure a model on labelled data, print warnings and the measures of each class, write the report."""
    from perennial.models.saved import load_saved, model_file
    from perennial.server.external import judge, outside_data, write_evaluation

    saved = load_saved(model_file(run, site))
    measures = judge(saved, outside_data(saved, data, overrides), str(data))
    console = Console(highlight=False, markup=False)
    for sentence in measures.headline:
        console.print(sentence, soft_wrap=True)
    table = Table()
    table.add_column("class")
    for column in ("samples", "sensitivity", "specificity", "AUROC"):
        table.add_column(column, justify="right")
    for each in measures.classes:
        figures = (each.sensitivity, each.specificity, each.auroc)
        shown = ["-" if figure.value is None else f"{figure.value:.3f}" for figure in figures]
        table.add_row(each.name, str(each.samples), *shown)
    console.print(table)
    folder = output or run / "evaluations" / data.stem
    name = saved.settings["name"] + (f", site {site}" if site else "")
    console.print(f"report: {write_evaluation(folder, measures, name, data.name)}", soft_wrap=True)
