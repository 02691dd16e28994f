"""Names of callables at every place of text that a file, an app, a model or a message has: none is imported.

The documents are made from the committed experiments, a site file, a model file and the
requests of the protocol. Each is read by what a person or a site would read it with, while
a hook watches every import and every process that is started.
"""

import copy
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from flwr.app import ConfigRecord, Context, Message, RecordDict
from safetensors.torch import save_file

from perennial.cli.check import check_command
from perennial.client.app import app as client_app
from perennial.config.document import read_document
from perennial.config.experiment import load_experiment
from perennial.data.config import SOURCES
from perennial.data.sources import load
from perennial.engine.grid import set_task_identity
from perennial.foundation.errors import PerennialError
from perennial.foundation.plain import PlainObject
from perennial.foundation.plugins import is_target
from perennial.learning.losses import build_classification
from perennial.library import Model
from perennial.models.factory import build_model
from perennial.models.saved import load_saved
from perennial.protocol.messages import CompareHeadsRequest, EvaluateRequest, SparsityRequest, TrainRequest
from perennial.protocol.tensors import Tensors
from perennial.strategies.factory import build_strategy
from tests.redteam.attacked_hospital import POLICIES, Hospital

EXPERIMENTS = Path(__file__).resolve().parents[2] / "perennial" / "experiments"
SECONDS, SAMPLE, ALL = 5.0, 60, 640
CANARY = "canary_of_the_red_team"
"""A module that can be imported and a name that an installed package offers, which nobody named."""
NAMES = (
    f"{CANARY}:run",
    f"{CANARY}.inner:Class",
    CANARY,
    "canary_point",
    "subprocess:getoutput",
    "pydoc:pipepager",
    "os:system",
    "builtins:eval",
    "perennial.foundation.files:make_folder",
)
COMMAND = f"echo {CANARY}"
OPTIONS = {"cmd": COMMAND, "_target_": f"{CANARY}:run", "__reduce__": [f"{CANARY}:run", [COMMAND]]}
TAGS = (f"!!python/name:{CANARY}.run ''", f"!!python/object/apply:{CANARY}.run ['{COMMAND}']")
SHA = "0" * 64

seen: list[str] = []
"""What the hook saw of the canary."""
watching = [False]


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    # a hook stays for good; it looks at what could run code, and asks for the canary alone
    if not watching[0] or event not in (
        "import",
        "subprocess.Popen",
        "os.system",
        "os.exec",
        "os.posix_spawn",
    ):
        return
    if CANARY in repr(arguments):
        seen.append(f"{event}: {arguments!r:.200}")


class Document(NamedTuple):
    """One document. make: its content. read: reads that from a folder of its own."""

    kind: str
    what: str
    make: Callable[[], Any]
    read: Callable[[Path, Any], object]


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Path of every text, and of every mapping, in which keys can be added."""
    if isinstance(value, dict):
        yield (*path, dict)
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    elif isinstance(value, str):
        yield path


def changed(content: Any, path: tuple[Any, ...], name: str) -> Any:
    """A copy with a name at a place of text, or as keys that stand in a mapping."""
    content = copy.deepcopy(content)
    target = content
    for key in path[:-1]:
        target = target[key]
    if path[-1] is dict:
        target.update(options={"name": name, **OPTIONS}, **{"class": name, "_target_": name, "layout": name})
    else:
        target[path[-1]] = name
    return content


def everywhere(content: Any, name: str) -> Any:
    """A copy with a name at every place of text."""
    for path in [*leaves(content)]:
        if path[-1] is not dict:
            content = changed(content, path, name)
    return content


def tagged(content: Any, tag: str) -> str:
    """YAML with a tag of Python's at every place of text."""
    return yaml.safe_dump(everywhere(content, CANARY)).replace(CANARY, tag)


def build_experiment(folder: Path, content: Any) -> None:
    """Read a file, and make what it names; its data are read only where a name could be code."""
    path = folder / "file.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    experiment = load_experiment(path)
    if experiment.data.source not in SOURCES:
        load(experiment.data, experiment.seed)
    build_strategy(experiment.strategy.name, experiment.strategy.parameters)
    build_classification(experiment.learner)
    if is_target(experiment.model.name) or is_target(experiment.model.backbone or ""):
        build_model(experiment.model, (3, 8, 8), 4, experiment.seed, with_weights=False)


def check_file(folder: Path, content: Any) -> None:
    path = folder / "file.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    check_command(path, None)


def read_app(folder: Path, content: Any) -> None:
    text = content if isinstance(content, str) else yaml.safe_dump(content)
    read_document(text, "app", {})


def read_model(folder: Path, content: Any) -> None:
    path = folder / "model.safetensors"
    tensors = {"head.weight": torch.zeros(2, 4), "head.bias": torch.zeros(2)}
    save_file(tensors, path, {key: json.dumps(value) for key, value in content.items()})
    (folder / "rows.csv").write_text("a,b\n1,2\n")
    with suppress(PerennialError):
        [*Model(load_saved(path)).predictions([folder / "rows.csv"])]


def at(hospital: Hospital) -> Callable[[Path, Any], None]:
    def send(_: Path, content: Any) -> None:
        fields = {**content["fields"], **{key: json.dumps(value) for key, value in content["json"].items()}}
        set_task_identity()
        try:
            message = Message(RecordDict({"fields": ConfigRecord(fields)}), 1, content["type"])
        except (TypeError, ValueError):
            # Flower itself carries no such thing
            return
        context = Context(1, 1, {"site": str(hospital.site_file)}, RecordDict(), content["run_config"])
        client_app(message, context)

    return send


def experiments() -> Iterator[dict[str, Any]]:
    for path in sorted(EXPERIMENTS.glob("*.yaml")):
        yield yaml.safe_load(path.read_text())


OTHERS: list[dict[str, Any]] = [
    {
        "name": "mapped",
        "data": {"source": "digits", "sites": 2, "samples_limit": 60, "partition": {"kind": "iid"}},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "features", "features": ["inputs"]},
        "strategy": {"name": "analytic", "head": "ridge"},
        "plugins": {f"{CANARY}:run": SHA, "subprocess:getoutput": SHA, "pydoc:pipepager": SHA},
    },
    {
        "name": "wrapped",
        "data": {"source": "digits", "sites": 2, "samples_limit": 60, "options": {"a": "b"}},
        "tasks": {"count": 1, "rounds": 1},
        "model": {"name": "mlp", "options": {"features": "x"}},
        "learner": {"optimizer": {"lr": 0.1}, "classification": {"name": "ce", "options": {"a": "b"}}},
        "strategy": {"name": "contribution", "base": {"name": "median", "base": "fedavg"}},
        "plugins": {f"{CANARY}:run": SHA, "subprocess:getoutput": SHA, "pydoc:pipepager": SHA},
    },
]
SITE = {
    "site": "graz",
    "state_dir": "state",
    "device": "cpu",
    "data": {"source": "csv", "path": "x.csv", "columns": {"a": "numeric", "b": ["x", "y"]}, "patient": "p"},
    "approvals": "approvals",
    "policy": {"answers": ["train"], "require_privacy": "none"},
    "connection": {"superlink": "host:9092"},
}
MODEL = {
    "experiment": {**OTHERS[0], "seed": 1, "model": {"name": "mlp", "hidden": [4]}, "digests": {}},
    "classes": ["a", "b"],
    "inputs": {"shape": [2], "stored": "float32", "mean": [0, 0], "std": [1, 1], "columns": {"a": "numeric"}},
    "confidence": {"void": "", "points": {"a": [0.9, 0.1]}},
}


def requests(hospital: Hospital) -> Iterator[dict[str, Any]]:
    """Fields of requests, with what their texts of settings say in the open."""
    stamp, arrays = hospital.stamp(), Tensors(hospital.arrays())
    orders = {
        "correction": {"name": "fedprox", "mu": 0.1},
        "turn": {"segment": 1, "features": {"name": "x"}},
        "prototypes": {"name": "x"},
        "rehearsal": {"generator": "x"},
        "tell": ["train_accuracy"],
    }
    for request in (
        TrainRequest(arrays=arrays, settings=json.dumps({"personal": ["head"]}), **stamp),
        EvaluateRequest(arrays=arrays, **stamp),
        SparsityRequest(arrays=arrays, **stamp),
        CompareHeadsRequest(features=SHA, heads=arrays, **stamp),
    ):
        fields = dict(request.to_record().config_records["fields"].items())
        told = {"settings": orders} if isinstance(request, TrainRequest) else {}
        run_config = {"experiment": str(hospital.file), "digest": hospital.experiment.digest, "name": "x"}
        run_config["plugins"] = "x"
        yield {"type": request.message_type, "fields": fields, "json": told, "run_config": run_config}


def documents(hospital: Hospital) -> list[Document]:
    """Every place of every document with every name, and those in which a name stands everywhere."""
    bases: list[tuple[str, Any, Callable[[Path, Any], object]]] = [
        *(("experiment", content, build_experiment) for content in experiments()),
        *(("experiment", content, check_file) for content in OTHERS),
        *(("app", content, read_app) for content in OTHERS),
        ("site file", SITE, check_file),
        ("model", MODEL, read_model),
        *(("message", content, at(hospital)) for content in requests(hospital)),
    ]
    found = []
    for kind, content, read in bases:
        for name in NAMES:
            found.append(Document(kind, f"{name} everywhere", partial(everywhere, content, name), read))
            for path in leaves(content):
                place = ".".join(map(str, path[:-1])) + f".{path[-1]}"
                make = partial(changed, content, path, name)
                found.append(Document(kind, f"{name} at {place}", make, read))
        if kind in ("experiment", "app", "site file"):
            for tag in TAGS:
                found.append(Document(kind, tag, partial(tagged, content, tag), read))
    return found


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Document]]:
    folder = tmp_path_factory.mktemp("canary")
    (folder / CANARY).mkdir()
    (folder / CANARY / "__init__.py").write_text("def run(*a, **k): ...\n")
    (folder / CANARY / "inner.py").write_text("class Class: ...\n")
    facts = folder / f"{CANARY}-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {CANARY}\nVersion: 1.0\n")
    groups = ("strategies", "sources", "models", "losses")
    points = "".join(f"[perennial.{group}]\ncanary_point = {CANARY}:run\n" for group in groups)
    (facts / "entry_points.txt").write_text(points)
    sys.addaudithook(_watch)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        hospital = Hospital(tmp_path_factory.mktemp("hospital"), POLICIES["defaults"])
        yield documents(hospital)


def read_watched(found: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read them. Fails for an import, a process, an error that is none of ours, and one that takes long."""
    monkeypatch.chdir(tmp_path)
    faults: list[str] = []
    for number, document in enumerate(found):
        folder = tmp_path / str(number)
        folder.mkdir()
        seen.clear()
        # of this thread: other programs of a busy machine do not count
        began, watching[0] = time.thread_time(), True
        try:
            document.read(folder, document.make())
        except PerennialError:
            pass
        except Exception as error:
            faults.append(f"{document.kind}, {document.what}: {error!r:.300}")
        finally:
            watching[0] = False
        if (seconds := time.thread_time() - began) > SECONDS:
            faults.append(f"{document.kind}, {document.what}: {seconds:.1f} s")
        if seen or CANARY in sys.modules:
            faults.append(f"{document.kind}, {document.what}: {seen}")
    assert not faults, "\n".join(faults)


def test_the_hook_sees_what_it_looks_for(every: list[Document]) -> None:
    watching[0] = True
    try:
        __import__(CANARY)
    finally:
        watching[0] = False
        sys.modules.pop(CANARY, None)
    assert seen
    kinds: PlainObject = {}
    for document in every:
        kinds[document.kind] = kinds.get(document.kind, 0) + 1
    assert len(every) > ALL and len(kinds) == 5 and min(kinds.values()) >= 30, kinds


def test_a_sample_imports_nothing(
    every: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_watched(random.Random(1).sample(every, SAMPLE), tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hundreds_import_nothing(
    every: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as many of each kind, as far as there are so many
    chosen, kinds = [], sorted({document.kind for document in every})
    for kind in kinds:
        own = [document for document in every if document.kind == kind]
        chosen += random.Random(2).sample(own, min(len(own), ALL // len(kinds)))
    assert len(chosen) >= 500
    read_watched(chosen, tmp_path, monkeypatch)
