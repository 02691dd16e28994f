"""`perennial check` on files of strangers: one clean error, in bounded time and memory.

They run in a process of their own with a bound on its time, so that a file that grows ends it.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from perennial.config.experiment import load_experiment
from perennial.config.site import load_site_config
from perennial.config.yaml_file import LARGEST_FILE, MOST_VALUES, apply_overrides, parse_yaml, read_yaml
from perennial.foundation.errors import ConfigError

EXPERIMENT: dict[str, Any] = {
    "name": "stranger",
    "data": {"source": "digits", "sites": 2},
    "tasks": {"count": 2, "rounds": 1},
    "model": {"name": "mlp", "hidden": [8]},
    "learner": {"preset": "none", "optimizer": {"lr": 0.1}},
}
SITE = {"site": "graz", "state_dir": "state"}
BOMB = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    + [
        f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]"
        for before, name in zip("abcdefgh", "bcdefghi", strict=True)
    ]
)
CHECKED = """
import json, resource, sys, traceback
resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
from pathlib import Path
from perennial.cli.check import check_command
from perennial.foundation.errors import PerennialError
said = {}
for name, text in json.load(sys.stdin).items():
    path = Path("file.yaml")
    path.write_text(text)
    try:
        check_command(path, None)
        said[name] = ["passed", ""]
    except PerennialError as error:
        said[name] = ["error", str(error)]
    except BaseException:
        said[name] = ["fault", traceback.format_exc()[-2000:]]
# Linux keeps getrusage's peak across exec, so it may be the peak of the process that started this one.
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
peak = int(status["VmHWM"].split()[0]) * 1024
print("\\n" + json.dumps({"said": said, "peak": peak}))
"""

FILES: dict[str, str] = {
    "a null key": yaml.safe_dump({**EXPERIMENT, "strategy": {"name": "fedavg", None: 1}}),
    "a number as a key": yaml.safe_dump({**EXPERIMENT, "strategy": {"name": "fedavg", 1: 1}}),
    "a list as a key": "? [a, b]\n: 1\n",
    "a mapping as a key": "? {a: b}\n: 1\n",
    "a null key at the top": "~: 1\nname: x\n",
    "a billion sites": yaml.safe_dump({**EXPERIMENT, "data": {"source": "digits", "sites": 10**9}}),
    "a billion tasks": yaml.safe_dump({**EXPERIMENT, "tasks": {"count": 10**9, "rounds": 1}}),
    "a billion rounds": yaml.safe_dump({**EXPERIMENT, "tasks": {"count": 2, "rounds": 10**9}}),
    "a wide model": yaml.safe_dump({**EXPERIMENT, "model": {"name": "mlp", "hidden": [10**9]}}),
    "a deep model": yaml.safe_dump({**EXPERIMENT, "model": {"name": "mlp", "hidden": [8] * 10_000}}),
    "a model of many parameters": yaml.safe_dump(
        {**EXPERIMENT, "model": {"name": "mlp", "hidden": [60_000, 60_000]}}
    ),
    "large images": yaml.safe_dump(
        {**EXPERIMENT, "data": {"source": "digits", "sites": 2, "image_size": 4_000}}
    ),
    "huge images": yaml.safe_dump(
        {**EXPERIMENT, "data": {"source": "digits", "sites": 2, "image_size": 100_000}}
    ),
    "an overlong state_dir": yaml.safe_dump({**SITE, "state_dir": "s" * 5_000}),
    "an overlong path of many parts": yaml.safe_dump({**SITE, "state_dir": "s/" * 5_000}),
    "a state_dir with a null character": 'site: graz\nstate_dir: "a\\0b"\n',
    "an overlong data path": yaml.safe_dump(
        {**EXPERIMENT, "data": {"source": "folder", "path": "d" * 5_000, "sites": 2}}
    ),
    "an alias bomb": BOMB,
    "an alias bomb in a value": BOMB + "\nname: *i\n",
    "a list that holds itself": "a: &a [*a]\n",
    "a mapping that holds itself": "a: &a\n  b: *a\n",
    "a merge of a bomb": BOMB + "\n<<: *i\n",
    "nested lists": "a: " + "[" * 2_000 + "]" * 2_000,
    "a long number": "name: " + "1" * 5_000,
    "a number of base sixty": "name: " + "1:" * 100_000 + "1",
    "a long hexadecimal number": "name: 0x" + "f" * 500_000,
    "many unknown keys": "\n".join(f"key{number}: 1" for number in range(20_000)),
    "a long unknown key": f"{'k' * 100_000}: 1\n",
    "a long value": yaml.safe_dump({**EXPERIMENT, "seed": "x" * 500_000}),
    "an unknown tag": "a: !!python/object/apply:os.system ['true']\n",
    "not YAML": "{[}",
    "a control character": "a: \x01\n",
    "nothing": "",
    "an infinite rate": yaml.safe_dump(
        {**EXPERIMENT, "learner": {"preset": "none", "optimizer": {"lr": float("inf")}}}
    ),
    "a date that is none": "name: 2026-99-99\n",
}


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What check said of each file; one process for all, since starting one costs more than most checks."""
    done = subprocess.run(
        [sys.executable, "-c", CHECKED],
        input=json.dumps(FILES),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        cwd=tmp_path_factory.mktemp("files"),
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-3_000:]}"
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", FILES)
def test_check_ends_with_one_clean_error(checked: dict[str, Any], name: str) -> None:
    kind, text = checked["said"][name]
    assert kind == "error", text
    assert 0 < len(text) < 10_000


def test_no_file_takes_much_memory(checked: dict[str, Any]) -> None:
    assert checked["peak"] < 3 * 2**30


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_bytes(b"#" * (LARGEST_FILE + 1))
    with pytest.raises(ConfigError, match=rf"larger than {LARGEST_FILE} bytes"):
        read_yaml(path)


def test_a_nested_file_is_refused_before_it_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    fetch = yaml.SafeLoader.fetch_more_tokens

    def counted(loader: yaml.SafeLoader) -> None:
        nonlocal steps
        steps += 1
        fetch(loader)

    monkeypatch.setattr(yaml.SafeLoader, "fetch_more_tokens", counted)
    for text in ("a: " + "[" * 100_000, "{" * 100_000, "- " * 500_000, "? " * 500_000):
        steps = 0
        with pytest.raises(ConfigError, match="file.yaml: line 1: nested more than 40 deep"):
            parse_yaml(text, "file.yaml")
        assert steps < 2_000, "a key may be 1024 characters away from its colon, and no further"


@pytest.mark.parametrize("load", [load_experiment, load_site_config])
def test_a_file_that_is_none_is_named(tmp_path: Path, load: Any) -> None:
    for path in (tmp_path, Path("/dev/null/x"), Path("a\0b"), Path("n" * 5_000)):
        with pytest.raises(ConfigError):
            load(path)


def test_what_a_person_writes_is_far_below_the_bounds(tmp_path: Path) -> None:
    classes = [f"class-{number}" for number in range(10_000)]
    path = tmp_path / "experiment.yaml"
    path.write_text(yaml.safe_dump({**EXPERIMENT, "data": {"source": "folder", "classes": classes}}))
    assert len(load_experiment(path).data.classes or ()) == 10_000 < MOST_VALUES


def test_a_labels_own_name_may_be_a_number(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    data = {"source": "folder", "path": "data", "labels": {0: "zero", 1: "one"}}
    path.write_text(yaml.safe_dump({**SITE, "data": data}))
    site = load_site_config(path)
    assert site.data is not None and site.data.labels == {"0": "zero", "1": "one"}


def test_an_override_is_bounded_like_a_file() -> None:
    with pytest.raises(ConfigError, match="nested more than"):
        apply_overrides({}, ["a=" + "[" * 60 + "]" * 60])
