"""The examples of the pages on extending, run as they stand there."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial import PerennialError, load_experiment, run
from perennial.config.methods import require_code_of_sites
from perennial.foundation import plugins
from tests.extend_pages import BLOCKS, MODULES

SETTINGS = [yaml.safe_load(block) for block in BLOCKS]
EXAMPLES = ("strategy", "measurements", "state", "wrapper", "site half", "loss", "source", "model")
EXPERIMENT: dict[str, Any] = {
    "name": "extended",
    "seed": 3,
    "data": {"source": "digits", "sites": 3, "samples_limit": 300, "partition": {"kind": "iid"}},
    "tasks": {"count": 2, "rounds": 2},
    "model": {"name": "mlp", "hidden": [16]},
    "learner": {"preset": "none", "epochs": 2, "optimizer": {"lr": 0.1}, "memory": {"per_class": 3}},
}


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds the pages' modules, under the names that their settings use."""
    assert len(MODULES) == len(SETTINGS) == len(EXAMPLES)
    for name, code in MODULES.items():
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def written(folder: Path, changes: dict[str, Any]) -> Path:
    """The experiment with some sections extended; a model or source of one's own replaces ours."""
    content = dict(EXPERIMENT)
    for key, value in changes.items():
        if key == "model":
            content[key] = value
        elif key == "data":
            content[key] = {"partition": {"kind": "iid"}, **value}
        else:
            content[key] = {**content.get(key, {}), **value}
    path = folder / "extended.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=EXAMPLES)
def test_an_example_of_the_page_runs_by_its_name(modules: Path, number: int) -> None:
    path = written(modules, SETTINGS[number])
    summary = run(path, runs=modules / "runs", device="cpu", plugins=[modules]).summary
    # three times what a guess is worth
    assert summary["average_incremental_accuracy"] > 3 / len(summary["classes"])


def test_a_proximal_half_of_ones_own_gives_the_bits_of_ours(modules: Path) -> None:
    own = written(modules, {"strategy": {"name": "my_prox:Prox", "mu": 0.3}})
    found = run(own, runs=modules / "own", device="cpu", plugins=[modules]).summary["model_sha256"]
    proximal = {"learner": {"correction": {"name": "fedprox", "mu": 0.3}}}
    ours = run(written(modules, proximal), runs=modules / "ours", device="cpu").summary["model_sha256"]
    plain = run(written(modules, {}), runs=modules / "plain", device="cpu").summary["model_sha256"]
    assert found == ours != plain


def test_a_site_without_the_code_of_a_half_refuses_the_experiment(modules: Path) -> None:
    path = written(modules, {"strategy": {"name": "my_prox:Prox", "mu": 0.3}})
    with plugins.use_also([modules]):
        experiment = load_experiment(path)
        require_code_of_sites(experiment)
    with plugins.use_only({}), pytest.raises(PerennialError, match="my_prox"):
        require_code_of_sites(experiment)


OUTGROWN = """
import torch
import torch.nn.functional as F

from perennial import Asks, FedAvg, Loss, SiteMethod, grown
from perennial.strategies.fedavg import WeightedMean


class Momentum(FedAvg):
    def __init__(self):
        super().__init__()
        self.velocity = {}

    def aggregator(self, ctx):
        return Moved(ctx, self)


class Moved(WeightedMean):
    def result(self):
        step = {name: mean - self.ctx.reference[name] for name, mean in super().result().items()}
        for name, last in self.method.velocity.items():
            step[name] = step[name] + 0.5 * last
        self.method.velocity = step
        return {name: before + step[name] for name, before in self.ctx.reference.items()}


class Grows(Momentum):
    def begin_task(self, task):
        zeros = {name: torch.zeros_like(tensor) for name, tensor in task.reference.items()}
        self.velocity = grown(self.velocity, zeros)


class Half(SiteMethod):
    def open(self, turn):
        self.turn, kept = turn, turn.records.get("own", turn.request.round)
        if kept is not None:
            self.shift = 0 * turn.flat.flatten_trained(self.fitting(kept[0]))

    def fitting(self, kept):
        return kept

    def close(self, update, steps):
        kept = {name: tensor.clone() for name, tensor in self.turn.flat.view_tensors(update).items()}
        self.turn.records.put("own", self.turn.request.round, kept, {})


class GrowingHalf(Half):
    def fitting(self, kept):
        shapes = self.turn.flat.shapes
        return grown(kept, {name: torch.zeros(shape) for name, shape in shapes.items()})


class Site(FedAvg):
    asks = Asks(site_half=True)
    site_half = Half


class GrowingSite(Site):
    site_half = GrowingHalf


class Weighted(Loss):
    def __init__(self):
        self.own = torch.ones(5)

    def __call__(self, batch):
        return F.cross_entropy(batch.logits, batch.labels, weight=self.own, reduction="none")
"""


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"strategy": {"name": "outgrown:Momentum"}},
            r"outgrown:Momentum: velocity\['head\.weight'\] .*\(5, 16\).*\(10, 16\)",
        ),
        (
            {"strategy": {"name": "outgrown:Site"}},
            r"outgrown:Half: tensor 'head\.weight': found \(5, 16\), allowed \(10, 16\)",
        ),
        (
            {"learner": {"classification": "outgrown:Weighted"}},
            r"outgrown:Weighted: own has shape \(5,\); the head now has 10 classes",
        ),
        ({"strategy": {"name": "outgrown:Grows"}}, ""),
        ({"strategy": {"name": "outgrown:GrowingSite"}}, ""),
    ],
)
def test_a_plug_in_whose_state_did_not_grow_with_the_head_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], words: str
) -> None:
    (tmp_path / "outgrown.py").write_text(OUTGROWN)
    monkeypatch.delitem(sys.modules, "outgrown", raising=False)
    path = written(tmp_path, {"tasks": {"count": 2, "rounds": 1}, **setting})
    settings: dict[str, Any] = {"runs": tmp_path / "runs", "device": "cpu", "plugins": [tmp_path]}
    if words:
        with pytest.raises(PerennialError, match=words):
            run(path, **settings)
    else:
        assert run(path, **settings).summary["rounds"] == 2


HEAD = (
    "import torch\n"
    "from perennial import Aggregator, Asks, FedAvg, IncrementalStrategy, Loss, Samples, SiteMethod, Source\n"
)
NETWORK = (
    "class Own(torch.nn.Module):\n    width = 5\n    def __init__(self, shape): super().__init__()\n"
    "    def forward(self, x): "
)
SOURCE = (
    "x, y, m = torch.ones(40, 2), torch.arange(40) % 2, torch.ones(2)\n"
    "def Own(config, seed): return Source(Samples(x, "
)
WRONG = {
    "class Own(FedAvg):\n    def aggregator(self, ctx): return None": r"aggregator\(\): returned None, all",
    "class Own(IncrementalStrategy): pass": r"strategy Own: has no aggregator\(ctx\)",
    "class Own(FedAvg):\n    def __init__(self): pass": r"its __init__ has to call super\(\)",
    "class Own(FedAvg):\n    def weight(self, reply): return None": r"weight\(\): returned None, allowed",
    "class Own(FedAvg):\n    def weight(self, reply): return 0": r"Own\.weight\(\): returned 0 for every",
    "class Own(FedAvg):\n    def state_dict(self): return None": r"state_dict\(\): returned None; allowed",
    "class Own(FedAvg):\n    def state_dict(self): return {'a': object}": r"state_dict\(\): .* not JSON",
    "class Own(FedAvg):\n    asks = 'held_out_accuracy'": r"asks is 'held_out_accuracy', allowed Asks",
    "class Own(FedAvg):\n    def aggregator(self, ctx): return Sums(ctx)\n"
    "class Sums(Aggregator):\n    def add(self, reply): pass\n    def result(self): return [1]": (
        r"Sums\.result\(\): returned \[1\], allowed a mapping"
    ),
    "class Half(SiteMethod):\n    def correct(self, gradient, parameters, received): return 2 * gradient\n"
    "class Own(FedAvg):\n    asks, site_half = Asks(site_half=True), Half": (
        r"Half\.correct: returned a Tensor; has to change the gradient in place"
    ),
    "class Own(FedAvg): pass\n1 / 0": r"cannot be imported \(line 4, ZeroDivisionError: ",
    "class Own(": r"cannot be imported \(SyntaxError: ",
    "class Own(Loss):\n    def __call__(self, batch): return batch.logits.mean()": (
        r"loss: returned tensor\(.*, allowed \(B,\) values, one for each sample"
    ),
    f"{NETWORK}return x.flatten(1)": r"forward of .* \(2, 1, 8, 8\): returned \(2, 64\), allowed .* \(2, 5\)",
    "class Own(torch.nn.Module):\n    def __init__(self, shape): self.one = torch.nn.Linear(1, 1)": (
        r"model.*wrong:Own: cannot assign .*; call super\(\)\.__init__\(\) first"
    ),
    f"{NETWORK}return x.nothing": r"forward of inputs of .*: AttributeError: ",
    f"{SOURCE}y[:9]), None, 'ab', m, m)": r"y: found torch.int64 of shape \(9,\), allowed .* \(40,\)",
    f"{SOURCE}y), None, 'a', m, m)": r"y: found 1, allowed 0 to 0",
    f"{SOURCE}y), None, 'ab', m, [1.0, 1.0])": r"std: found \[1\.0, 1\.0\], allowed \(2,\) float32",
    "def Own(): pass": r"data\.options: wrong:Own: takes 0 arguments, allowed 2 before its keys",
    "class Own(Loss): pass\n1 / 0": r"^learner\.classification\.name: .* cannot be imported \(line 4",
}


@pytest.mark.parametrize("code", WRONG)
def test_what_ones_own_code_gets_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    monkeypatch.delitem(sys.modules, "wrong", raising=False)
    (tmp_path / "wrong.py").write_text(HEAD + code)
    name = {"name": "wrong:Own"}
    changes: dict[str, Any] = {"strategy": name}
    if "Own(Loss)" in code:
        changes = {"learner": {"classification": name}}
    elif "Module" in code:
        changes = {"model": name}
    elif "def Own" in code:
        changes = {"data": {"source": "wrong:Own", "sites": 2}}
    path = written(tmp_path, {**changes, "tasks": {"count": 1, "rounds": 1}})
    with pytest.raises(PerennialError, match=WRONG[code]):
        run(path, runs=tmp_path / "runs", device="cpu", plugins=[tmp_path])
