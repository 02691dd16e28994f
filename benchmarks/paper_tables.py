"""Which table here stands for which table or figure of the five papers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from perennial.benchmarks.table import Table


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper, and the tables here that stand for it.

    label: in the paper.
    subject: what it compares.
    names: of tables here, with * for any characters.
    """

    paper: str
    label: str
    subject: str
    names: tuple[str, ...]

    def found(self, tables: Mapping[str, Table], scale: str) -> list[str]:
        """Names of the tables of one scale that stand for it."""
        return [
            name
            for name, table in sorted(tables.items())
            if table.scale == scale and any(fnmatchcase(name, pattern) for pattern in self.names)
        ]


PAPER_TABLES = (
    PaperTable(
        "PP-FCIL",
        "tables 2 and 3",
        "accuracy by number of tasks, and its mean",
        ("pp_fcil_cifar100*", "pp_fcil_fashion_mnist", "pp_fcil_ham10000"),
    ),
    PaperTable("PP-FCIL", "table 4", "without each part", ("pp_fcil_digits", "pp_fcil_cifar100_parts*")),
    PaperTable("PP-FCIL", "table 5", "with and without privacy", ("pp_fcil_privacy*",)),
    PaperTable(
        "PP-FCIL",
        "table 6",
        "other class-incremental methods",
        ("pp_fcil_cifar100", "pp_fcil_fashion_mnist", "pp_fcil_ham10000", "rivals_digits"),
    ),
    PaperTable(
        "FedDig",
        "table I",
        "scenarios of absence",
        ("feddig_digits", "feddig_scenarios*", "feddig_bases*", "feddig_fashion_mnist*"),
    ),
    PaperTable(
        "FedDig",
        "figures 7, 8 and 12",
        "samples in a digest, noise, sites and skew",
        ("feddig_protection*", "feddig_noise*", "feddig_samples*", "feddig_skew*", "feddig_sites*"),
    ),
    *(
        PaperTable("Incre-FL", f"table {number}", subject, ("incre_fl_*",))
        for number, subject in enumerate(
            ("pre-training", "dual attention", "channel attention", "layer attention", "all parts"), 1
        )
    ),
    PaperTable(
        "TriCon-SF", "table II", "accuracy", ("tricon_sf_digits*", "tricon_sf_ham10000*", "tricon_sf_genes")
    ),
    PaperTable("TriCon-SF", "table IV", "contribution, detection", ("tricon_sf_detection",)),
    PaperTable("TriCon-SF", "table V", "communication", ("tricon_sf_communication", "tricon_sf_ham10000")),
    *(
        PaperTable("FedPerC", f"table {number}", subject, ("fedperc_*",))
        for number, subject in (
            ("III", "CIFAR-100, ResNet-34"),
            ("IV", "CIFAR-100, MobileNetV1"),
            ("V", "clusters by sparsity, by chance, none"),
            ("VI", "CIFAR-10"),
        )
    ),
)


def coverage(tables: Mapping[str, Table]) -> Iterator[str]:
    """The mapping as a Markdown table, line by line."""
    yield "| paper | its table | what | here, CPU size | here, the paper's size |"
    yield "| --- | --- | --- | --- | --- |"
    for each in PAPER_TABLES:
        cells = [
            ", ".join(f"`{name}`" for name in each.found(tables, scale)) or "none"
            for scale in ("cpu", "paper")
        ]
        yield f"| {each.paper} | {each.label} | {each.subject} | {' | '.join(cells)} |"
