"""Lists which program made each committed result, and where that program is.

`python -m benchmarks.programs` writes benchmarks/results/PROGRAMS.md. Programs that answered one question
were deleted when it was answered; the commit that the tag names has them all.
"""

import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = RESULTS / "PROGRAMS.md"
TAG = "before-cut"
NAMED: Mapping[str, str] = {
    "bench_xeon": "benchmarks/bench.py",
    "dp_audit": "perennial/engine/dp_audit.py",
    "deciding": "benchmarks/power.py",
    "peers": "benchmarks/peers/__main__.py",
    "robust_even": "benchmarks/tables/robust.py",
    "robust_uneven": "benchmarks/tables/robust.py",
    "mutation_survivors": "benchmarks/mutation.py",
    "mutation_before_cut": "benchmarks/mutation.py",
    "tricon_sf_security": "benchmarks/ring_security.py",
    "twins": "benchmarks/twins/__main__.py",
    "w2_draws": "benchmarks/peers/draws.py",
}
"""Results whose name is not that of their program or of a table."""
HEAD = """# Which program made which result

`python -m benchmarks.programs` writes this page. A program that is not here has been deleted since; the tag
`{tag}` (commit {commit}) has it. A dash: a run by hand.

| result | program | where |
| --- | --- | --- |
"""


def main() -> None:
    """Write the page."""
    commit = _run_git("rev-parse", "--short", f"{TAG}^{{commit}}").strip()
    old = _read_programs(TAG)
    names = sorted({path.name.split(".")[0] for path in RESULTS.iterdir()} - {PAGE.stem})
    lines = []
    for name in names:
        files = ", ".join(f"[{path.name}]({path.name})" for path in sorted(RESULTS.glob(f"{name}.*")))
        program = find_program(name, old)
        lines.append(
            f"| {files} | {f'`{program}`' if program else '-'} | {_find_place(name, program, commit)} |"
        )
    PAGE.write_text(HEAD.format(tag=TAG, commit=commit) + "\n".join(lines) + "\n")


def find_program(name: str, programs: Mapping[str, str]) -> str:
    """The path of the program that wrote a result, '' for none.

    Args:
        name: The result's file name without its ending.
        programs: Path -> text of the programs among which to look.
    """
    if name in NAMED:
        return NAMED[name]
    if f"benchmarks/{name}.py" in programs:
        return f"benchmarks/{name}.py"
    return next(
        (
            path
            for path, text in programs.items()
            if path.startswith("benchmarks/tables/") and f'"{name}"' in text
        ),
        "",
    )


def _find_place(name: str, program: str, commit: str) -> str:
    here = ROOT / program
    if not program:
        return "-"
    is_table = program.startswith("benchmarks/tables/") and name not in NAMED
    return "here" if here.is_file() and (not is_table or f'"{name}"' in here.read_text()) else commit


def _read_programs(revision: str) -> dict[str, str]:
    listed = _run_git("ls-tree", "-r", "--name-only", revision, "benchmarks").split()
    return {name: _run_git("show", f"{revision}:{name}") for name in listed if name.endswith(".py")}


def _run_git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
