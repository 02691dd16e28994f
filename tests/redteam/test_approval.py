"""What a hospital approves is all that runs: its words are those of the run, and its settings bind."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from perennial.cli.main import app as command
from perennial.client.app import app as client_app
from perennial.client.identity import identify
from perennial.client.request_count import RequestCount
from perennial.config.approval import read_approvals
from perennial.config.experiment import load_experiment
from perennial.config.run import RunSettings
from perennial.config.site import SitePolicy, load_site_config
from perennial.deploy.application import Offer
from perennial.deploy.review import describe_asked, offer_in_words
from perennial.engine.grid import InProcessGrid, build_site_contexts
from perennial.foundation.errors import PolicyRefusal
from perennial.privacy.composition import compose
from perennial.privacy.ledger import Ledger
from perennial.protocol.messages import DescribeRequest, PersonalModelRequest, TrainRequest
from perennial.protocol.stamp import VERSION
from perennial.protocol.tensors import Tensors
from perennial.server.app import serve
from tests.approved import approve_installed
from tests.redteam.attacked_hospital import BASE, SITE, Hospital, template_policy
from tests.redteam.hostile_server import SAMPLE

MEASURED: dict[str, Any] = {
    "privacy": SAMPLE | {"noise_multiplier": 2.0},
    "evaluation": {"noise_multiplier": 8.0},
    "learner": BASE["learner"] | {"memory": {"selection": "random", "share": 0.5}},
}


def words(hospital: Hospital, policy: SitePolicy | None = None) -> list[str]:
    return [*describe_asked(hospital.experiment, policy or hospital.config.policy, None)]


def test_the_words_that_are_approved_are_those_of_the_run(tmp_path: Path) -> None:
    """Epsilon and how often each thing leaves, against the ledger and the count of requests of a run."""
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump(BASE | MEASURED))
    digest = load_experiment(path).digest
    run = RunSettings(str(path), name="run", runs=str(tmp_path / "runs"), device="cpu", digest=digest)
    settings = dict(vars(run))
    contexts = build_site_contexts(BASE["data"]["sites"], settings)
    policy = template_policy() | {"answers": ["train", "evaluate"], "max_epsilon": 30, "min_samples": 1}
    for index, (node, context) in enumerate(contexts.items()):
        folder = tmp_path / f"site-{index}"
        folder.mkdir()
        content = {"site": f"site-{index}", "state_dir": "state", "device": "cpu", "policy": policy}
        (folder / "site.yaml").write_text(yaml.safe_dump(content))
        approve_installed(path, folder / "approvals")
        place: Any = {"site": str(folder / "site.yaml")}
        contexts[node] = Context(1, node, place, context.state, context.run_config)
    server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings)
    serve(InProcessGrid(client_app, contexts), server, engine="in-process")
    text = "\n".join(describe_asked(load_experiment(path), SitePolicy.model_validate(policy), None))
    state = tmp_path / SITE / "state"
    entries = Ledger(state).read_entries()
    cost = compose(entries, 1e-5)
    assert f"epsilon {cost.epsilon:.4g} for one sample at delta 1e-05, {len(entries)} releases" in text
    asked = dict(re.findall(r"^  (\w+), (\d+) times: ", text, re.MULTILINE))
    counted = {kind: RequestCount(state).count_requests(kind) for kind in asked}
    assert counted == {kind: int(times) for kind, times in asked.items()}
    assert asked.keys() == {"train", "finish_task", "evaluate"}
    assert "this site would refuse it" not in text


def test_the_words_name_data_tasks_protection_and_what_leaves(tmp_path: Path) -> None:
    said = "\n".join(words(Hospital(tmp_path, {}, **MEASURED)))
    for part in (
        "data: source digits",
        "task 1: ",
        "task 2: ",
        "protection: privacy.mode sample: hides one training sample of one site",
        "updates of the model, computed from the training samples",
        "counts of right answers on held-out samples",
        "no experiment was approved here before",
    ):
        assert part in said
    clear = "\n".join(words(Hospital(tmp_path / "clear", {}, strategy="scaffold")))
    assert "can read single samples out of what leaves" in clear and "epsilon infinite" in clear
    assert "training loss" in clear


def test_what_the_policy_would_refuse_is_said_before_the_approval(tmp_path: Path) -> None:
    policy = SitePolicy(max_evaluations=0)
    said = [line for line in words(Hospital(tmp_path, {}), policy) if "would refuse" in line]
    assert len(said) == 1 and "policy.max_evaluations" in said[0]
    noised = Hospital(tmp_path / "noised", {}, **MEASURED)
    for limit, refused in ((30, []), (0.1, ["policy.max_epsilon: the whole run would cost epsilon "])):
        policy = SitePolicy(require_privacy="sample", max_epsilon=limit)
        said = [line for line in words(noised, policy) if "would refuse" in line]
        assert len(said) == len(refused) and all(part in "".join(said) for part in refused)


def test_the_differences_from_the_last_approval_are_listed_each(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {}, **MEASURED)
    (earlier,) = read_approvals(hospital.config.approvals)
    changed = load_experiment(hospital.file, ["privacy.noise_multiplier=0.1", "learner.epochs=9"])
    said = [*describe_asked(changed, hospital.config.policy, earlier)]
    first = next(index for index, line in enumerate(said) if line.endswith("2 settings differ"))
    assert said[first + 1 : first + 3] == [
        "  privacy.noise_multiplier: 2.0 -> 0.1 (changes what leaves this site)",
        "  learner.epochs: 1 -> 9",
    ]


@pytest.mark.parametrize("key", ["name", "runs", "resume", "device", "threads"])
def test_a_run_may_choose_these_and_they_change_nothing_here(key: str, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {})
    chosen: Any = {"name": "other", "runs": "/elsewhere", "resume": "yes", "device": "cuda", "threads": 7}
    settings: Any = {"digest": hospital.experiment.digest}
    place: Any = {"site": str(hospital.site_file)}
    plain = identify(Context(1, 1, place, RecordDict(), settings))
    other = identify(Context(1, 1, place, RecordDict(), {**settings, key: chosen[key]}))
    assert plain == other and (other.device, other.threads) == ("cpu", 1)
    assert other.state_dir == tmp_path / "state"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("overrides", "seed=1"),
        ("overrides", '["learner.batch_size=1"]'),
        ("digest", "0" * 64),
        ("digest", ""),
    ],
)
def test_nothing_else_of_a_runs_settings_is_taken(key: str, value: str, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {})
    settings: Any = {"digest": hospital.experiment.digest} | {key: value}
    place: Any = {"site": str(hospital.site_file)}
    with pytest.raises(PolicyRefusal, match=f"run config: {key}: found"):
        identify(Context(1, 1, place, RecordDict(), settings))
    hospital.ask(DescribeRequest(version=VERSION, experiment=hospital.experiment.digest), **{key: value})
    assert f"policy: run config: {key}: found" in hospital.refusal
    assert not (tmp_path / "state").exists(), "nothing was read or written for it"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (BASE["data"], "divides its data among site-0, site-1, site-2"),
        ({"source": "folder", "classes": ["a", "b"], "image_size": 8}, "has none"),
    ],
    ids=["of other sites", "at sites alone"],
)
def test_a_site_without_data_for_an_experiment_says_so_before_a_round(
    data: dict[str, Any], found: str, tmp_path: Path
) -> None:
    hospital = Hospital(tmp_path, {}, data=data)
    content = yaml.safe_load(hospital.site_file.read_text())
    hospital.site_file.write_text(yaml.safe_dump({**content, "site": "graz"}))
    hospital.ask(DescribeRequest(version=VERSION, experiment=hospital.experiment.digest))
    words = f"data: site.yaml of graz has no `data`, and experiment hostile {found}; write under `data`"
    assert words in hospital.refusal
    offer = Offer(hospital.file, "", hospital.experiment, "", {})
    said = [*offer_in_words(offer, load_site_config(hospital.site_file), None)]
    assert said[-1].startswith(f"this site would refuse it: {words}")


def test_the_words_name_the_settings_that_a_request_may_have(tmp_path: Path) -> None:
    strategy = {"name": "contribution", "base": {"name": "feddyn", "alpha": 0.1}}
    assert "a request may set: correction.name: 'feddyn'" in words(
        Hospital(tmp_path / "a", {}, strategy=strategy)
    )
    assert not [line for line in words(Hospital(tmp_path / "b", {})) if line.startswith("a request may set")]


def test_site_check_and_review_are_commands(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {})
    fab = tmp_path / "none.fab"
    fab.write_bytes(b"no app")
    done = CliRunner().invoke(command, ["site", "review", str(fab), "--site", str(hospital.site_file)])
    assert done.exit_code != 0 and "not an app bundle" in f"{done.output}{done.exception}"


def refuse(hospital: Hospital, number: int, settings: dict[str, Any]) -> str:
    """Why the hospital does not train in a round with these settings; "" if it does."""
    hospital.refusal = ""
    arrays = Tensors(hospital.arrays())
    asked = TrainRequest(**hospital.stamp(number), arrays=arrays, settings=json.dumps(settings))
    reply = hospital.ask(asked)
    assert (reply is None) == bool(hospital.refusal)
    return hospital.refusal


def test_a_round_of_which_the_experiment_does_not_say_whether_it_is_global_is_refused(tmp_path: Path) -> None:
    hospital = Hospital(tmp_path, {"answers": ["train"]}, strategy=FEDPERC | {"global_rounds": []})
    assert "no number for task 1" in refuse(hospital, 1, {})


OWN = {"personal": ["head.weight", "head.bias"]}
FEDPERC = {"name": "clustered_personalisation", "base": "fedavg", "global_rounds": 1, "clusters": 1}


@pytest.mark.parametrize(
    ("strategy", "number", "asked", "others"),
    [
        ({"name": "fedper"}, 2, OWN, [{}, {"personal": []}, {"personal": ["head.bias"]}]),
        (FEDPERC, 1, {}, [OWN]),
        (FEDPERC, 2, OWN, [{}]),
        ({"name": "pfa", "global_rounds": 1, "layer": 1}, 2, {"personal": []}, [OWN]),
        (
            {"name": "serial_ring", "segments": 4},
            1,
            {"turn": {"sweep": 1, "segments": 4}},
            [{}, {"turn": {"sweep": 1, "segments": 1}}],
        ),
    ],
)
def test_layers_that_stay_and_turns_are_those_of_the_approved_experiment(
    tmp_path: Path, strategy: dict[str, Any], number: int, asked: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    learner = {"preset": "none", "optimizer": {"lr": 0.01}, "batch_size": 8}
    hospital = Hospital(tmp_path, {"answers": ["train"]}, strategy=strategy, learner=learner)
    for settings in others:
        assert "approved experiment" in refuse(hospital, number, settings), settings
    assert refuse(hospital, number, asked) == ""
    if "personal" in asked:
        arrays = Tensors(hospital.arrays())
        wrong = asked["personal"][:-1] or [*arrays]
        request = PersonalModelRequest(**hospital.stamp(number), arrays=arrays, personal=wrong)
        assert hospital.ask(request) is None and "personal: found" in hospital.refusal
