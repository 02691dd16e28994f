"""docs/deploy.md, typed: every command of the operator's and of the hospital's path is run as it is written.

What the page leaves to the reader (host, names of files, checksum) is filled in; nothing else is changed. Run
by run.sh, which provides the engine and the images. Where the environment names a file as PERENNIAL_TIMES,
the times of each command and of all until the first round is over go there (benchmarks/first_round.py).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.containers.check_containers import EXPERIMENT
from tests.loopback import bound_by_permissions, digit_folders

ROOT = Path(__file__).resolve().parents[2]
OWNER = 1000
TIMES = os.environ.get("PERENNIAL_TIMES")
ENDED = "--- ended"
FOLLOWED_FOR = 5


def documented(section: str) -> list[str]:
    """The commands in the code blocks of one section of docs/deploy.md, in order."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE)
    assert body is not None, f"docs/deploy.md has no section {section!r}"
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", body[1], re.DOTALL | re.MULTILINE)
    typed = [block for language, block in blocks if not language]
    return [line.split("   #")[0].rstrip() for block in typed for line in block.splitlines() if line]


def note_time(what: str, began: float) -> None:
    """One line of the file of times, if there is one: from a moment until now (time.monotonic)."""
    if TIMES:
        with open(TIMES, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "began": began, "ended": time.monotonic()}) + "\n")


class Reader:
    """Somebody at a shell who types a section of the page. filled: what it leaves open -> what that is."""

    def __init__(self, section: str, filled: dict[str, str]) -> None:
        self.left, self.filled = documented(section), filled
        # root, which the page is not for, has to obey permissions too
        self._shell = subprocess.Popen(
            [*(bound_by_permissions() or []), "bash"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        )

    def close(self) -> None:
        self._shell.kill()

    def go(self, folder: Path) -> None:
        self.type(f"cd {folder}")

    def next(self, expected: str) -> str:
        """Type the page's next command, which has expected in it; what it said."""
        line = self.skip(expected)
        for blank, value in self.filled.items():
            line = line.replace(blank, value)
        return self.type(line)

    def skip(self, expected: str) -> str:
        """Leave the next command for later; returns it."""
        assert self.left and expected in self.left[0], f"expected {expected!r}, the page has {self.left[:1]}"
        return self.left.pop(0)

    def type(self, line: str) -> str:
        """Type one line; what it said. A command that follows a log for ever is left after some seconds."""
        if line.endswith("logs -f"):
            line = f"timeout {FOLLOWED_FOR} {line} || [ $? = 124 ]"
        assert self._shell.stdin is not None and self._shell.stdout is not None
        # nobody sits at a terminal here
        typed, began = line.replace(" -it ", " "), time.monotonic()
        self._shell.stdin.write(f"{{ {typed}; }} </dev/null; status=$?; echo; echo '{ENDED}' $status\n")
        said: list[str] = []
        for output in self._shell.stdout:
            if output.startswith(ENDED):
                assert output.split()[-1] == "0", f"{line}\n{''.join(said)}"
                note_time(line, began)
                return "".join(said)
            said.append(output)
        raise AssertionError(f"{line}: the shell ended\n{''.join(said)}")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="perennial-"))
    made.chmod(0o755)
    try:
        yield made
    finally:
        for inside in (made / "hospital" / "perennial", made / "federation"):
            if (inside / "compose.yaml").exists():
                down = ["docker", "compose", "down", "--volumes", "--timeout", "3"]
                subprocess.run(down, cwd=inside, capture_output=True, check=False)
        subprocess.run(["chmod", "-R", "u+w", str(made)], check=False)
        shutil.rmtree(made, ignore_errors=True)


def gateway() -> str:
    """The address at which containers reach ports of this machine."""
    # Debian's engine fills IPAM's gateway at its second start only, so the interface itself is asked
    template = '{{index .Options "com.docker.network.bridge.name"}}'
    command = ["docker", "network", "inspect", "bridge", "--format", template]
    bridge = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    command = ["ip", "-json", "-4", "address", "show", "dev", bridge]
    (found,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found["addr_info"][0]["local"]


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text, f"{path} has no {old!r}"
    path.write_text(text.replace(old, new))


def test_the_page_leads_from_nothing_to_a_finished_round(folder: Path) -> None:
    start = time.monotonic()
    federation, home = folder / "federation", folder / "hospital"
    home.mkdir()
    digit_folders(folder / "data", ["graz"], 150)
    operator = Reader("The operator", {"fl.example.org": gateway(), "NAME": EXPERIMENT["name"]})
    hospital = Reader("The hospital", {})
    try:
        set_up(operator, folder)
        hospital.go(home)
        hospital.next("perennial site open")
        shutil.copy(home / "node.key.pub", federation)
        fab, digest = stage_and_add(operator, federation)
        shutil.copy(federation / "bundles" / "graz.tar.gz", home)
        join(hospital, home / "perennial", folder / "data" / "graz", Path(fab).name, digest)
        operator.next("perennial deploy submit")
        assert EXPERIMENT["name"] in operator.next("perennial deploy status")
        events = federation / "state" / "runs" / EXPERIMENT["name"] / "events.jsonl"
        assert wait_for_rounds(events, 1)
        note_time("typed to the end of the first round", start)
        operator.next("perennial deploy logs")
        assert wait_for_rounds(events, 4) == 4
        hospital.next("docker compose --profile page up -d page")
        both_pages_answer()
        assert not operator.left and not hospital.left
    finally:
        operator.close()
        hospital.close()
    print(f"typed through in {time.monotonic() - start:.0f} s")


def set_up(operator: Reader, folder: Path) -> None:
    """The operator's steps 1 and 2."""
    operator.next("make install")
    operator.next("docker build")
    operator.go(folder)
    operator.next("perennial deploy init")
    operator.next("cd federation")
    operator.next("docker compose up -d")


def stage_and_add(operator: Reader, federation: Path) -> tuple[str, str]:
    """The operator's steps 3 and 4; the app and its checksum."""
    rounds = {"wait_for": 1, "quorum": 1, "deadline": 240}
    (federation / "experiment.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "rounds": rounds}))
    fab, digest = operator.next("perennial deploy stage").split()[-2:]
    healthy(federation)
    operator.next("perennial deploy add-site graz")
    return fab, digest


def join(hospital: Reader, own: Path, data: Path, fab: str, digest: str) -> None:
    """The hospital's steps 2 to 5. own: its folder."""
    in_the_image = hospital.skip("docker run --rm")
    hospital.next("mkdir perennial")
    hospital.next("perennial site open graz.tar.gz --folder perennial")
    hospital.next("cd perennial")
    assert (own / "data").is_dir()
    rewrite(own / ".env", "DATA=./data", f"DATA={data}")
    if os.getuid() == 0:  # the home is root's, and the container's user writes
        (own / "ledgers").mkdir()
        rewrite(own / ".env", "LEDGERS=${HOME}/.local/state/perennial", f"LEDGERS={own / 'ledgers'}")
    # what may leave is for the reader to decide: the template refuses plain training, this hospital allows it
    site = yaml.safe_load((own / "site.yaml").read_text())
    trusting = {"answers": ["train", "evaluate"], "min_samples": 1, "require_privacy": "none"}
    site["policy"] |= trusting | {"max_epsilon": None}
    (own / "site.yaml").write_text(yaml.safe_dump(site))
    hospital.filled = {"perennial.perennial.0-2-0.1a2b3c4d.fab": fab, "SHA256": digest}
    hospital.next("perennial site approve offered/")
    hospital.go(ROOT)
    hospital.next("docker build")
    hospital.go(own)
    hospital.type(in_the_image.replace("COMMAND", "open --folder /site/another"))
    assert (own / "another" / "node.key").exists()
    hospital.next("perennial site check")
    if os.getuid() == 0:
        subprocess.run(["chown", "-R", f"{OWNER}:{OWNER}", str(own)], check=True)
    hospital.next("docker compose up -d")
    hospital.next("docker compose logs -f")


def both_pages_answer() -> None:
    """What a person sees who opens the addresses that docs/deploy.md names: the sites are connected."""
    text = (ROOT / "docs" / "deploy.md").read_text()
    operators, hospitals = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
    assert operators in text and hospitals in text
    page = opened(urllib.request.build_opener(), operators)
    assert "The SuperLink serves; 1 of 1 registered site connected." in page and EXPERIMENT["name"] in page
    page = opened(urllib.request.build_opener(), hospitals)
    assert ">graz</h1>" in page and ">connected</span>" in page, page


def opened(browser: urllib.request.OpenerDirector, address: str) -> str:
    """A page, as soon as it answers."""
    until = time.monotonic() + 120
    while True:
        try:
            with browser.open(address, timeout=30) as answer:
                return answer.read().decode()
        except OSError:
            assert time.monotonic() < until, f"{address} does not answer"
            time.sleep(1)


def healthy(federation: Path) -> None:
    """Wait as a reader does who looks at `docker compose ps`."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        ps = ["docker", "compose", "ps", "superlink", "--format", "{{.Health}}"]
        done = subprocess.run(ps, cwd=federation, capture_output=True, text=True, check=False)
        if done.stdout.strip() == "healthy":
            return
        time.sleep(2)
    raise AssertionError("the SuperLink is not healthy")


def wait_for_rounds(events: Path, count: int) -> int:
    """Rounds in the journal of a run once it has count of them, or after four minutes."""
    until, found = time.monotonic() + 240, 0
    while time.monotonic() < until and found < count:
        lines = events.read_text().splitlines() if events.exists() else []
        found = sum(json.loads(line)["event"] == "round" for line in lines)
        time.sleep(2)
    return found
