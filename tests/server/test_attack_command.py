"""`perennial attack`: figures in summary.json, a picture in the run folder, both in the report."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.cli.privacy import attack_command
from perennial.config.run import RunSettings
from perennial.engine.run import run_in_process
from perennial.server.attacks.run import attack_run
from perennial.server.report.write import write_report

SMALL = {
    "name": "small",
    "data": {"source": "digits", "sites": 2, "samples_limit": 200},
    "tasks": {"count": 1, "rounds": 1},
    "model": {"name": "mlp", "hidden": [32]},
    "learner": {"preset": "none", "epochs": 1, "optimizer": {"lr": 0.05}},
}


def test_a_run_is_attacked_and_its_report_shows_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(SMALL))
    run_in_process(RunSettings(str(experiment), runs=str(tmp_path)))
    folder = tmp_path / "small"
    attack_command(folder, victims=2, steps=60)
    loss, ratio, inversion = json.loads((folder / "summary.json").read_text())["attacks"]
    assert loss["figures"].keys() == ratio["figures"].keys()
    assert 0.3 < loss["figures"]["auc"] < 0.9
    figures = inversion["figures"]
    clear, hidden = (figures[f"mean_structural_similarity_{kind}"] for kind in ("in_the_clear", "protected"))
    assert clear > 0.8 and hidden < 0.4
    assert (folder / "attacks" / "inversion.png").read_bytes().startswith(b"\x89PNG")
    assert "Gradient inversion" in write_report(folder).read_text()
    assert "picture" in capsys.readouterr().out


def attacked(folder: Path, victims: int, steps: int, **changes: Any) -> dict[str, dict[str, Any]]:
    """The attacks' entries by the first word of their names."""
    content = SMALL | changes
    experiment = folder / f"{content['name']}.yaml"
    experiment.write_text(yaml.safe_dump(content))
    run_in_process(RunSettings(str(experiment), runs=str(folder)))
    entries = attack_run(folder / content["name"], victims, steps)
    return {entry["name"].split()[0]: entry for entry in entries}


def test_a_run_with_digests_gets_reconstruction_from_them(tmp_path: Path) -> None:
    entries = attacked(
        tmp_path,
        victims=2,
        steps=60,
        name="digests",
        model={"name": "digest_two_branch", "backbone": "mlp"},
        strategy={"name": "digest_synthesis", "base": "fedavg"},
        digests={"per_digest": 4, "mix": "within_class"},
    )
    assert "Gradient" in entries
    figures = entries["Digest"]["figures"]
    alone, mixed, noised = (
        figures[f"mean_structural_similarity_{kind}"] for kind in ("alone", "mixed", "mixed_and_noised")
    )
    # both mixtures are judged by the best of their four images; a sample alone has but one
    assert mixed > noised + 0.15
    assert alone > noised
    assert figures["noise_of_the_last_row"] == "gauss, epsilon 8"
    folder = tmp_path / "digests"
    assert (folder / entries["Digest"]["images"][0]).read_bytes().startswith(b"\x89PNG")
    assert "Digest reconstruction" in (folder / "report.html").read_text()


def test_a_ring_run_gets_linkage(tmp_path: Path) -> None:
    strategy = {"name": "contribution", "base": {"name": "serial_ring", "segments": 2}}
    entries = attacked(tmp_path, victims=1, steps=5, name="ring", strategy=strategy)
    figures = entries["Linkage"]["figures"]
    # renaming neurons hides a turn from whoever compares index by index, and from nobody else
    assert figures["update_cosine_index_by_index_in_the_clear"] < 0.3
    assert figures["update_cosine_neurons_matched_in_the_clear"] > 0.9
    assert figures["linked_neurons_matched_in_the_clear"] == 1
    assert figures["update_cosine_neurons_matched_protected"] < 0.3
    assert "Linkage" in (tmp_path / "ring" / "report.html").read_text()


def test_attacks_that_do_not_apply_are_left_out(tmp_path: Path) -> None:
    names = attacked(tmp_path, victims=1, steps=5, name="plain")
    assert set(names) == {"Membership,", "Gradient"}
