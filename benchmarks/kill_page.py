"""The page of benchmarks/kills.py."""

from typing import Any

PAID = "ledger"
"""How the names of the moments between a site's charge and its kept reply begin."""


def page(done: dict[str, Any], deployed: dict[str, Any]) -> str:
    """The results as a page. deployed: those of benchmarks/kills_deployed.py, in which only servers die."""
    kills: list[dict[str, Any]] = done["kills"]
    clean = sum(not one["differs"] for one in kills)
    paid = sum(paid_again(one) for one in kills)
    called = sum(not one.get("command", True) for one in kills)
    stopped = [status for one in kills for status in one.get("between", []) if "twice" not in one["case"]]
    lines = [
        "# Kills",
        "",
        f"`python -m benchmarks.kills`: {len(kills)} kills, {clean} of which changed nothing,",
        f"{paid} made sites pay once more, and {len(kills) - clean - paid} changed anything else.",
        "A fork ends (`_exit`) after a line of the journal, of a ledger or of the record of releases, or",
        "after a file has taken its place; `perennial run --resume` goes on in another. Compared with a run",
        "that nothing disturbed: tasks, model (SHA-256), rounds, accuracy, models of groups and sites,",
        "epsilon, and the charges in each site's ledger. `moments`: all there are in a run; those that were",
        "tried are drawn by a seed. In one process the sites die with the server: where that comes between",
        "a site's charge and its kept reply, the site pays once more, and `charges` differ.",
        *_over_grpc(deployed),
        f"{called} of the {len(kills)} kills were made before the program started the command itself: there",
        "the functions behind it were called, and no exit status was seen.",
        "",
        "refused, failed: at the first resume one of three sites, whose answers are all needed, refuses to",
        f"train, or its app fails; {sum(map(bool, stopped))} of {len(stopped)} such resumes ended with an",
        "exit status other than 0, and the others had finished. absent: the experiment says",
        "that a site is away for a while. continued: two classes come to the data of the finished run, and",
        "the kill is before or after. killed twice: the first resume is killed too.",
        "",
        "| run | moments | kills | nothing changed | what differed |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, moments in done["moments"].items():
        of = [one for one in kills if one["case"] == name]
        faults: dict[str, int] = {}
        for one in of:
            if one["differs"]:
                what = f"{', '.join(one['differs'])} after {one['after']}"
                faults[what] = faults.get(what, 0) + 1
        said = "; ".join(f"{count}: {what}" for what, count in sorted(faults.items())) or "-"
        lines.append(f"| {name} | {moments} | {len(of)} | {sum(not one['differs'] for one in of)} | {said} |")
    facts = ", ".join(f"{name} {number}" for name, number in done["versions"].items())
    return "\n".join([*lines, "", f"Seed {done['seed']}; {facts}; {done['machine']}."]) + "\n"


def _over_grpc(deployed: dict[str, Any]) -> list[str]:
    kills: list[dict[str, Any]] = deployed["kills"]
    same = sum(not one["differs"] for one in kills)
    return [
        "",
        f"`python -m benchmarks.kills_deployed`: {len(kills)} more, of ServerApps over gRPC at two",
        f"hospitals, by SIGKILL after a line of the journal; {same} changed nothing: model, tasks, rounds,",
        "accuracy and each site's charges. [Continuity](continuity.md) has kills of sites.",
        "",
    ]


def paid_again(kill: dict[str, Any]) -> bool:
    """Whether nothing differs but what a site paid, and it was killed between its charge and its reply.

    Where sites choose their noise anew, an epsilon that counts both charges differs with them.
    """
    if kill["differs"] not in (["charges"], ["epsilon", "charges"]):
        return False
    return kill["after"].startswith(PAID) or "twice" in kill["case"]
