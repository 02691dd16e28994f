"""Layer attention under stress: sites of unequal size with different classes, and a site that lies.

`python -m benchmarks.attention_stress` writes benchmarks/results/attention_stress.jsonl and .md.
Unequal: one task of ten digits, one site holds all samples of seven classes, the other 100 samples of the
other three. Poisoned: five sites with equal shares, of which one sends its honest update times -3.
"""

import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from flwr.app import Context, Message, RecordDict

from benchmarks.grid import read_results, revision_of
from benchmarks.intervals import half_width
from benchmarks.markdown import listed
from benchmarks.table import RESULTS, RESULTS_REVISION, TEN_SEEDS
from perennial.config.run import RunSettings
from perennial.engine.grid import InProcessGrid, site_contexts
from perennial.engine.run import answer
from perennial.foundation.errors import StateError
from perennial.foundation.files import replace_file
from perennial.foundation.streams import stream
from perennial.protocol.messages import TrainReply
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve

FAR_CLASSES, FEW = 7, 100
POISON = -3.0
LEARNER = {"preset": "none", "epochs": 2, "batch_size": 32, "optimizer": {"lr": 0.05, "momentum": 0.9}}
NO_BOUNDS = {"norm_multiple": None, "share": 1}
"""The rules are measured alone, without the bounds that every experiment has (docs/robustness.md)."""


def _rule(name: str, bounds: Mapping[str, Any] | None = NO_BOUNDS, **keys: Any) -> dict[str, Any]:
    """The keys of an experiment that make up a rule. bounds: None for the default ones."""
    return {"strategy": {"name": name, **keys}, **({} if bounds is None else {"bounds": bounds})}


RULES: Mapping[str, Mapping[str, Any]] = {
    "FedAvg, by samples": _rule("fedavg"),
    "uniform mean": _rule("uniform_mean"),
    "attention, sign 1 (as printed)": _rule("layer_attention"),
    "attention, sign -1": _rule("layer_attention", sign=-1),
    "attention, sign 1, scale mean": _rule("layer_attention", scale="mean"),
    "attention, sign -1, scale mean": _rule("layer_attention", sign=-1, scale="mean"),
    "attention, sign 1, one weight a model": _rule("layer_attention", granularity="model"),
}
GUARDED: Mapping[str, Mapping[str, Any]] = {
    **{
        f"attention, sign 1, max_update_norm {bound:g}": _rule("layer_attention", max_update_norm=bound)
        for bound in (10.0, 5.0)
    },
    "attention, sign 1, default bounds": _rule("layer_attention", bounds=None),
    "FedAvg, default bounds": _rule("fedavg", bounds=None),
}
"""Honest updates of a first round have norms of 2.5 to 3 here, the lie one above 8."""


def unequal_sites(folder: Path, seed: int) -> dict[str, Any]:
    """An experiment on digits divided as the module says; the classes are drawn with the seed."""
    from sklearn.datasets import load_digits

    pixels, y = load_digits(return_X_y=True)
    x = (np.asarray(pixels).reshape(-1, 8, 8) * 16).clip(0, 255).astype(np.uint8)
    generator = stream(seed, "stress-split")
    order = generator.permutation(len(y))
    far = np.isin(y, generator.permutation(10)[:FAR_CLASSES])
    test, train = np.split(order, [len(y) // 5])
    few = train[~far[train]][:FEW]
    held = np.concatenate([train[far[train]], few])
    site = np.where(far, "large", "small")
    arrays = {"x": x[held], "y": y[held], "site": site[held]}
    arrays |= {"x_test": x[test], "y_test": y[test], "site_test": site[test]}
    np.savez(folder / "digits.npz", **arrays)
    data = {"source": "npz", "path": str(folder / "digits.npz"), "partition": {"kind": "natural"}}
    return experiment(seed, data | {"validation_fraction": 0.0}, rounds=12)


def equal_sites(_: Path, seed: int) -> dict[str, Any]:
    """Five sites with equal shares of every digit."""
    return experiment(seed, {"source": "digits", "sites": 5}, rounds=8)


def experiment(seed: int, data: Mapping[str, Any], rounds: int) -> dict[str, Any]:
    """One task of all classes."""
    return {
        "name": "attention-stress",
        "seed": seed,
        "data": dict(data),
        "tasks": {"count": 1, "rounds": rounds},
        "model": {"name": "small_cnn", "norm": "group"},
        "learner": LEARNER,
    }


def poisoning(message: Message, context: Context) -> Message:
    """The honest app, but the first site's updates leave turned round and three times as long."""
    reply = answer(message, context)
    if message.metadata.message_type != "train" or context.node_config["partition-id"] != 0:
        return reply
    content = TrainReply.from_record(reply.content)
    update = Tensors({name: POISON * tensor for name, tensor in content.update.items()})
    lie = TrainReply(**{**vars(content), "update": update})
    return Message(lie.to_record(), reply_to=message)


def run(content: dict[str, Any], folder: Path, sites: int, client: Callable[..., Message]) -> dict[str, Any]:
    """One run in process; the summary."""
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump(content))
    run_config = dict(vars(RunSettings(str(path), runs=str(folder / "runs"))))
    context = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=run_config)
    return serve(InProcessGrid(client, site_contexts(sites, run_config)), context, "in-process")


def outcome(
    content: dict[str, Any], folder: Path, sites: int, client: Callable[..., Message]
) -> dict[str, Any]:
    """What a line says of one run; one that diverged until no update fitted is at chance."""
    try:
        summary = run(content, folder, sites, client)
    except StateError as error:
        return {"accuracy": 0.1, "stopped": str(error)[:100]}
    small = summary["sites"].get("small", {}).get("accuracy")
    return {
        "accuracy": summary["final_accuracy"],
        "small": small,
        "model_sha256": summary["model_sha256"],
    }


Case = tuple[
    Callable[[Path, int], dict[str, Any]], int, Callable[..., Message], Mapping[str, Mapping[str, Any]]
]
CASES: Mapping[str, Case] = {
    "unequal": (unequal_sites, 2, answer, RULES),
    "honest": (equal_sites, 5, answer, {**RULES, **GUARDED}),
    "poisoned": (equal_sites, 5, poisoning, {**RULES, **GUARDED}),
}


def main() -> None:
    """Run every case, rule and seed that the result file lacks; then write the table."""
    path = RESULTS / "attention_stress.jsonl"
    lines = [line for line in read_results(path) if revision_of(line) == RESULTS_REVISION]
    done = {(line["case"], line["rule"], line["seed"]): line for line in lines}
    for case, (build, sites, client, rules) in CASES.items():
        for label, keys in rules.items():
            for seed in TEN_SEEDS:
                if (case, label, seed) in done:
                    continue
                with tempfile.TemporaryDirectory() as folder:
                    found = outcome(build(Path(folder), seed) | dict(keys), Path(folder), sites, client)
                line = {"case": case, "rule": label, "seed": seed, "revision": RESULTS_REVISION, **found}
                done[case, label, seed] = line
                with path.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line)
    replace_file(path, "".join(json.dumps(line) + "\n" for line in done.values()).encode(), mode=0o644)
    replace_file(path.with_suffix(".md"), page(list(done.values())).encode(), mode=0o644)


def page(lines: list[dict[str, Any]]) -> str:
    """Mean and half the 95 % t-interval over seeds, in per cent."""

    def cell(case: str, label: str, key: str) -> str:
        values = [100 * line[key] for line in lines if (line["case"], line["rule"]) == (case, label)]
        return f"{statistics.mean(values):.1f} ± {half_width(values):.1f}" if len(values) > 1 else ""

    cases = [case for case in CASES if any(line["case"] == case for line in lines)]
    columns = list(cases)
    columns.insert(1, "its small site")
    text = [
        "# Layer attention under stress",
        "",
        f"`python -m benchmarks.attention_stress`, seeds {listed(TEN_SEEDS)}. Digits,",
        "one task, final accuracy in per cent. Unequal: two sites with different classes, one with ten times",
        "the samples; the small site's classes beside it. Honest and poisoned: five equal sites, without and",
        "with one that sends its update times -3; a run that diverges is stopped and counts as chance, 10.",
        "Rules are measured without the bounds that are on by default, unless a row says otherwise.",
        "",
        f"| | {' | '.join(columns)} |",
        "| --- " * (len(columns) + 1) + "|",
    ]
    for label in dict.fromkeys(line["rule"] for line in lines):
        cells = [cell(case, label, "accuracy") for case in cases]
        cells.insert(1, cell("unequal", label, "small"))
        text.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(text) + "\n"


if __name__ == "__main__":
    main()
