"""perennial predict."""

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from perennial.foundation.errors import ConfigError, DataError, StateError

if TYPE_CHECKING:
    from perennial.library import Prediction
    from perennial.models.saved import SavedModel

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".tsv": "text", ".txt": "text"}


def predict_command(
    run: Annotated[Path, typer.Argument(help="run folder, or a site's state folder for its own model")],
    paths: Annotated[
        list[Path], typer.Argument(help="image files, CSV tables, .npz arrays of samples, or folders of them")
    ],
    site: Annotated[str, typer.Option(help="of a simulated run: use this site's own model")] = "",
    form: Annotated[str, typer.Option("--format", help="text, csv or jsonl; default: by --output")] = "",
    output: Annotated[Path | None, typer.Option(help="file to write; default: standard output")] = None,
) -> None:
    """Class and confidence of images or rows; as csv or jsonl with every probability and prediction set.

    The classifier is the one that the experiment judged. Where only the sites have class means, the global
    model answers with its head, and standard error says so.
    """
    from perennial.library import Model
    from perennial.models.saved import find_model_file, load_saved

    form = form or ("" if output is None else SUFFIXES.get(output.suffix.lower(), "")) or "text"
    if form not in WRITERS:
        raise ConfigError(f"predict --format: found {form!r}, allowed {', '.join(WRITERS)}")
    saved = load_saved(find_model_file(run, site))
    if saved.class_means is None and saved.settings["learner"]["classifier"] == "nearest_mean":
        typer.echo(
            "predict: by the head; this run was judged by each site's own class means, which never left the "
            "sites: --site NAME uses those of one",
            err=True,
        )
    if saved.confidence.void:
        lacking = "the sets have no stated coverage"
        if saved.confidence.thresholds is None:
            lacking = "confidences are as the model states them, without prediction sets"
        typer.echo(f"predict: {lacking}: {saved.confidence.void}", err=True)
    model = Model(saved)
    for sentence in _describe_strangers(saved, paths):
        typer.echo(f"predict: {sentence}", err=True)
    with _open_output(output) as file:
        for line in WRITERS[form](
            model.predictions(paths), saved.classes, saved.confidence.thresholds is not None
        ):
            file.write(line + "\n")


def _describe_strangers(saved: "SavedModel", paths: Sequence[Path]) -> Iterator[str]:
    """Sentences on columns of tables that are unlike the training data; faulty tables are for the reading."""
    from perennial.data.config import DataConfig
    from perennial.data.inputs import describe_strange_columns, list_files
    from perennial.data.table import read_table

    inputs, data = saved.inputs, DataConfig.model_validate(saved.settings["data"])
    columns, files = inputs.columns, list[Path]()
    if columns is None:
        return
    with suppress(DataError):
        files = list_files(paths, of_images=False)
    for path in files:
        if path.suffix.lower() != ".npz":
            with suppress(DataError):
                file = read_table(data, path)
                for said in describe_strange_columns(file, columns, inputs.mean, inputs.std, data.missing):
                    yield f"{path}: {said}"


def _format_text(found: Iterable["Prediction"], classes: Sequence[str], sets: bool) -> Iterator[str]:
    """name, class and confidence, and prediction set and operating points where there are any, by tabs."""
    for each in found:
        points = "; ".join(f"{name}: {'yes' if found else 'no'}" for name, found in each.reached.items())
        line = [each.name, each.label, f"{each.confidence:.4f}", *([_set_in_words(each)] if sets else [])]
        yield "\t".join([*line, *([points] if points else [])])


def _format_csv(found: Iterable["Prediction"], classes: Sequence[str], sets: bool) -> Iterator[str]:
    """A header, then the same and the probability of each class."""
    columns = ["name", "class", "confidence", *(["prediction set"] if sets else [])]
    for number, each in enumerate(found):
        points = [f"at operating point of {name}" for name in each.reached]
        if not number:
            yield _format_row([*columns, *points, *(f"probability of {name}" for name in classes)])
        texts = [each.name, each.label, *([_set_in_words(each)] if sets else [])]
        name, label, *members = map(_write_as_text, texts)
        values = [name, label, f"{each.confidence:.6g}", *members]
        values += ["yes" if reached else "no" for reached in each.reached.values()]
        yield _format_row([*values, *(f"{share:.6g}" for share in each.probabilities.values())])


def _format_json_lines(found: Iterable["Prediction"], classes: Sequence[str], sets: bool) -> Iterator[str]:
    """One JSON object a line; an empty list is the set "none of the known classes"."""
    for each in found:
        line = {
            "name": each.name,
            "class": each.label,
            "confidence": each.confidence,
            "probabilities": dict(each.probabilities),
            **({"prediction_set": list(each.members or ())} if sets else {}),
            **({"at_operating_point": dict(each.reached)} if each.reached else {}),
        }
        yield json.dumps(line, ensure_ascii=False)


WRITERS = {"text": _format_text, "csv": _format_csv, "jsonl": _format_json_lines}


def _set_in_words(found: "Prediction") -> str:
    from perennial.models.prediction import NONE_OF_THE_KNOWN

    return "; ".join(found.members or ()) or NONE_OF_THE_KNOWN


def _write_as_text(cell: str) -> str:
    """The cell with a mark before it where a spreadsheet would take it for a formula and run it."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@", "\t", "\r")) else cell


def _format_row(values: Sequence[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(values)
    return text.getvalue()


@contextmanager
def _open_output(output: Path | None) -> Iterator[TextIO]:
    """Standard output, or a file that takes the place of output when everything was written."""
    if output is None:
        yield sys.stdout
        return
    partial = output.with_name(f".{output.name}.partial")
    try:
        with open(partial, "w", encoding="utf-8", newline="") as file:
            yield file
        partial.replace(output)
    except OSError as error:
        raise StateError(f"{output}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)
