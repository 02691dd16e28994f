"""Perennial from a program: run an experiment, look at what came of it, use its model."""

import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perennial.config.experiment import Experiment, load_experiment, override_settings, require_experiment
from perennial.config.run import RunSettings, find_experiment
from perennial.engine.callbacks import Callback, notify_callbacks
from perennial.engine.cohorts import Asked
from perennial.engine.run import load_resumed_settings, run_in_process
from perennial.engine.run_folders import create_run_folder, require_own_folder
from perennial.foundation.errors import ConfigError, DataError, StateError
from perennial.foundation.installation import require_own_package
from perennial.foundation.plugins import Named, use_also

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from perennial.data.samples import Arrays
    from perennial.models.prediction import Answers
    from perennial.models.saved import SavedModel

SUMMARY = "summary.json"


@dataclass(frozen=True)
class Prediction:
    """The class that a model predicts for one sample.

    name: of the file, or of the row in it.
    label: the class's name.
    confidence: its probability.
    probabilities: of all classes, scaled where the run fitted a temperature.
    members: the prediction set, most probable first; empty: none of the known classes; None: not calibrated.
    reached: class -> whether its operating point is reached, where the run has any.
    """

    name: str
    label: str
    confidence: float
    probabilities: Mapping[str, float] = field(default_factory=dict)
    members: tuple[str, ...] | None = None
    reached: Mapping[str, bool] = field(default_factory=dict)


class Model:
    """A trained model, alone: class names, and predictions for files or tensors.

    >>> model = load_run("runs/quickstart").model
    >>> model.predict(["scan.png"])[0].label
    """

    def __init__(self, saved: "SavedModel") -> None:
        self.saved = saved

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by label."""
        return self.saved.classes

    def probabilities(self, x: "Tensor") -> "Tensor":
        """(B, M) probabilities, scaled where the run fitted a temperature.

        x: (B, *input_shape) as the data has it: uint8 pixels, or float32 numbers in the data's own scale.
        """
        return self.answers(x).probabilities

    def answers(self, x: "Tensor") -> "Answers":
        """Probabilities and prediction sets of samples, as probabilities() takes them."""
        import torch

        from perennial.data.samples import find_stored_type
        from perennial.learning.batches import to_float
        from perennial.models.prediction import predict_answers

        inputs = self.saved.inputs
        if tuple(x.shape[1:]) != inputs.shape:
            raise ConfigError(f"model: found inputs of shape {tuple(x.shape[1:])}, allowed {inputs.shape}")
        if (found := find_stored_type(x)) != inputs.stored:
            raise ConfigError(f"model: found {found} inputs, allowed {inputs.stored} (another scale)")
        with torch.no_grad():
            logits = self.saved.classifier(to_float(x, inputs.mean, inputs.std))
        return predict_answers(logits, self.saved.confidence, self.classes)

    def predict(self, samples: "Path | str | Sequence[Any] | np.ndarray | Tensor") -> list[Prediction]:
        """One prediction for each image file, and for each row of an array, table or .npz array; folders too.

        samples: a path or several, or an array as the data had it: (B, D) numbers or uint8 images of any
        layout. A tensor, and a list of samples that have one shape, are taken as an array.
        Raises DataError naming the file, and the line or column where there is one.
        """
        if isinstance(samples, Path | str):
            samples = [samples]
        if isinstance(samples, Sequence) and all(isinstance(each, Path | str) for each in samples):
            return [*self.predictions(samples)]
        import numpy as np

        from perennial.data.npz import convert_samples

        try:
            array = np.asarray(samples)
        except (RuntimeError, TypeError, ValueError):
            array = np.empty(0)  # samples of several shapes, or no numbers
        if array.ndim < 2:
            raise ConfigError(
                f"predict: found {samples!r:.80}, allowed paths, an array of samples, or a list of samples "
                "of one shape"
            )
        x = convert_samples(array, "predict")
        return [*self._name_answers([f"row {row}" for row in range(len(x))], self.answers(x))]

    def predictions(self, paths: Sequence[Path | str]) -> Iterator[Prediction]:
        """The same one after the other, for more samples than fit in memory."""
        from perennial.data.config import DataConfig
        from perennial.data.inputs import list_files, read_inputs

        inputs = self.saved.inputs
        data = DataConfig.model_validate(self.saved.settings["data"])
        shape, stored, fill = inputs.shape, inputs.stored, inputs.filling
        files = list_files([*map(Path, paths)], of_images=len(shape) == 3)
        for names, x in read_inputs(files, shape, stored, fill, data, inputs.columns):
            yield from self._name_answers(names, self.answers(x))

    def _name_answers(self, names: Sequence[str], answers: "Answers") -> Iterator[Prediction]:
        if not (finite := answers.probabilities.isfinite().all(dim=1)).all():
            name = names[int(finite.int().argmin())]
            raise DataError(
                f"predict: {name}: found numbers so large that the model's answer is not finite, allowed "
                "numbers of the size of the training data's"
            )
        sets = None if answers.sets is None else answers.sets.tolist()
        for row, (name, shares) in enumerate(zip(names, answers.probabilities.tolist(), strict=True)):
            reached = {label: bool(values[row]) for label, values in answers.reached.items()}
            found = self._build_prediction(name, shares, None if sets is None else sets[row])
            yield replace(found, reached=reached)

    def _repr_html_(self) -> str:
        shape = " x ".join(map(str, self.saved.inputs.shape))
        return (
            f"<p>Model of {len(self.classes)} classes ({escape(', '.join(self.classes))}), inputs {shape}</p>"
        )

    def _build_prediction(self, name: str, shares: list[float], members: list[bool] | None) -> Prediction:
        ranked = sorted(range(len(shares)), key=lambda label: -shares[label])
        inside = None if members is None else tuple(self.classes[label] for label in ranked if members[label])
        probabilities = dict(zip(self.classes, shares, strict=True))
        return Prediction(name, self.classes[ranked[0]], shares[ranked[0]], probabilities, inside)


@dataclass(frozen=True)
class Run:
    """A finished run. folder: with everything that it wrote. summary: the content of summary.json.

    >>> result = load_run("runs/quickstart")
    >>> result.summary["final_accuracy"], result.accuracy_matrix
    """

    folder: Path
    summary: Mapping[str, Any]

    @property
    def accuracy_matrix(self) -> "np.ndarray":
        """(T, T) float64: row t, column i is the accuracy on the classes of task i after task t.

        NaN if nothing was measured.
        """
        import numpy as np

        rows = self.summary["accuracy_matrix"]
        matrix = np.full((len(rows), len(rows)), np.nan)
        for index, row in enumerate(rows):
            matrix[index, : len(row)] = [np.nan if value is None else value for value in row]
        return matrix

    def _repr_html_(self) -> str:
        matrix, name = self.accuracy_matrix, escape(str(self.summary["experiment"]))
        head = [f"<th>classes of task {task}</th>" for task in range(1, len(matrix) + 1)]
        rows = [f"<tr><th></th>{''.join(head)}</tr>"]
        for task, row in enumerate(matrix, 1):
            cells = [f"<td>{value:.1%}</td>" for value in row[:task]]
            rows.append(f"<tr><th>after task {task}</th>{''.join(cells)}</tr>")
        folder = escape(str(self.folder))
        return f"<p>{name}: accuracy</p><table>{''.join(rows)}</table><p>{folder}</p>"

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment as it was run, every default written out."""
        return load_experiment(self.folder / "experiment.yaml")

    @cached_property
    def model(self) -> Model:
        """The global model."""
        from perennial.models.saved import GLOBAL_MODEL, load_saved

        return Model(load_saved(self.folder / GLOBAL_MODEL))

    def cross_site(self) -> dict[str, Any]:
        """What the sums that a closed-form run kept say of its sites beside each other.

        As summary.json has it under `cross_site`. Raises PerennialError saying why it cannot be said.
        """
        from perennial.server.opened_run import cross_site_of

        return cross_site_of(self.folder)

    def model_of(self, site: str) -> Model:
        """The model of one simulated site's own. Raises StateError where it has none."""
        from perennial.models.saved import find_model_file, load_saved

        return Model(load_saved(find_model_file(self.folder, site)))


def load_run(folder: Path | str) -> Run:
    """The finished run in a folder. Raises StateError when it is none.

    >>> load_run("runs/quickstart").summary["model_sha256"]
    """
    folder = Path(folder).resolve()
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StateError(f"{folder / SUMMARY}: missing or damaged, so this is no finished run") from error
    return Run(folder, summary)


def run(
    experiment: Experiment | Mapping[str, Any] | Path | str | None = None,
    *,
    data: "Arrays | None" = None,
    overwrite: bool = False,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    name: str = "",
    runs: Path | str = "runs",
    workers: int = 1,
    device: str = "auto",
    threads: int = 1,
    cohort: Asked | None = None,
    gpu: str = "",
    resume: Path | str | None = None,
    callbacks: Sequence[Callback] = (),
    plugins: Sequence[Named] = (),
) -> Run:
    """Run an experiment on this machine, to its end.

    >>> run("experiments/quickstart.yaml", overrides=["learner.epochs=3"], seed=2, name="three-epochs")

    experiment: an object, a mapping with the keys of a file, or the path of a file; None: what `resume` was.
    data: arrays in memory (Source.of) for a mapping, which are written to data.npz in the run's folder.
    overrides: KEY=VALUE, as --set.
    name: of the run's folder below `runs`, default: the experiment's; a number is added where an earlier run
    has that name. overwrite: remove that run instead. workers: processes; the result is the
    same for any number. device: auto, cpu, cuda or cuda:N. cohort: sites that train in one pass, or auto;
    None: 1, or as the run that is resumed began. gpu: graphs, benchmark, or both with a comma between.
    resume: a run folder to go on with. callbacks: told of each round and each task; a bar shows the rounds
    in a terminal, and a line in a notebook. With a GPU, workers begin as new processes: call this below
    `if __name__ == "__main__":`. A resumed run warns of what becomes of records that have changed.
    plugins: whose code the experiment may name: installed packages, folders of modules (a Path, or text with
    a separator), and classes and functions of this program.
    Raises a PerennialError that says what is wrong before anything starts.
    """
    require_own_package()
    if experiment is not None:
        require_experiment(experiment, "run")
    with use_also(plugins):
        if data is not None and not hasattr(data, "write"):
            raise ConfigError(f"run: data: found {type(data).__name__}, allowed Source.of(...) of it")
        if data is not None and not isinstance(experiment, Mapping):
            raise ConfigError(
                "run: data: goes with a mapping; a file or an Experiment says where its data are"
            )
        if resume is not None:
            if overwrite or data is not None:
                raise ConfigError(
                    f"run: {'overwrite' if overwrite else 'data'}: found with resume, which goes on in its "
                    "own folder with its own data"
                )
            require_own_folder(Path(resume), name, runs)
            more = Experiment.of(**experiment) if isinstance(experiment, Mapping) else experiment
            with _as_file(more) as path:
                settings = load_resumed_settings(path, [*overrides], seed, Path(resume), device, threads)
                folder = settings.folder(settings.load())
                settings, changed = replace(settings, gpu=gpu), list[str]()
                with notify_callbacks(callbacks, folder.name) as listener:
                    summary = run_in_process(settings, workers, listener, cohort, changed.append)
                for sentence in changed:
                    warnings.warn(sentence, stacklevel=2)
                return Run(folder, summary)
        changes = [*overrides, *([] if seed is None else [f"seed={seed}"])]
        if isinstance(experiment, Mapping):
            content = override_settings({"name": name or "experiment", **experiment}, changes)
            found: Experiment | None = None
            usual = str(content["name"])
        elif experiment is None:
            raise ConfigError("run: give an experiment, or resume=FOLDER")
        else:
            content, found = {}, _apply_changes(experiment, changes)
            usual = found.name
        with create_run_folder(name or usual, runs, overwrite) as folder:
            if found is None:
                if data is not None:
                    block = content.get("data") or {}
                    if not isinstance(block, Mapping):
                        raise ConfigError(
                            f"run: experiment: data: found {block!r:.80}, allowed a block of keys"
                        )
                    content["data"] = {**data.write(folder / "data.npz"), **block}
                found = Experiment.of(**content)
            with _as_file(found) as path:
                settings = RunSettings(
                    experiment=str(path),
                    name=folder.name,
                    runs=str(folder.parent),
                    device=device,
                    threads=threads,
                    gpu=gpu,
                )
                with notify_callbacks(callbacks, folder.name) as listener:
                    return Run(folder, run_in_process(settings, workers, listener, cohort))


def _apply_changes(experiment: Experiment | Path | str, changes: list[str]) -> Experiment:
    """An experiment with KEY=VALUE applied to what its file, or the object, says."""
    if not isinstance(experiment, Experiment):
        return load_experiment(find_experiment(Path(experiment)), changes)
    if not changes:
        return experiment
    return Experiment.of(**override_settings(experiment.model_dump(mode="json"), changes))


@contextmanager
def _as_file(experiment: Experiment | Path | str | None) -> Iterator[Path | None]:
    """A file that the server and all sites read the experiment from."""
    if not isinstance(experiment, Experiment):
        yield None if experiment is None else Path(experiment).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="perennial-") as folder:
        path = Path(folder) / f"{experiment.name}.yaml"
        path.write_text(experiment.to_yaml(), encoding="utf-8")
        yield path
