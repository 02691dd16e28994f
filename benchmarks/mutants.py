"""Mutants of the code, one small change each by Cosmic Ray's operators, and a seeded sample of them.

Left out are changes that no test could miss or see: annotations, imports for type checkers, text that does
not parse, and text whose syntax tree is the one before. Of all changes at one position one is drawn, because
a multiplication has eleven replacements and would otherwise fill the sample.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from perennial.data.apportion import apportion
from perennial.foundation.streams import stream

ROOMS = ("learning", "strategies", "baselines", "privacy", "data")
LEFT_OUT = ("core/NoOp", "core/VariableInserter", "core/VariableReplacer")
"""Operators that change nothing, or that must be told a variable."""


@dataclass(frozen=True)
class Mutant:
    """One change at one position of one file.

    statement: first line of the statement that it is in; 0 when that runs at import.
    occurrence: how many positions of this operator come before it in the file.
    """

    file: str
    line: int
    column: int
    statement: int
    operator: str
    occurrence: int

    @property
    def key(self) -> str:
        """What names this mutant in the results."""
        return f"{self.file}:{self.line}:{self.column} {self.operator}#{self.occurrence}"

    def facts(self) -> dict[str, Any]:
        """For a line of JSON."""
        return asdict(self)

    def source(self, root: Path) -> str:
        """The text of the changed file. Raises ValueError when there is no such occurrence."""
        changed = mutate_code((root / self.file).read_text(), _operator(self.operator), self.occurrence)
        if changed is None:
            raise ValueError(f"{self.key}: no such occurrence")
        return changed


def files(root: Path) -> list[str]:
    """The code of the four rooms, sorted, without files that hold a docstring alone."""
    found = sorted(path for room in ROOMS for path in (root / room).rglob("*.py"))
    return [str(path.relative_to(root)) for path in found if path.name != "__init__.py"]


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """count mutants, in a random order: each file gives in proportion to its positions, and at least one."""
    by_file = {file: _by_position(root, file) for file in files(root)}
    by_file = {file: positions for file, positions in by_file.items() if positions}
    sizes = np.array([[len(positions) for positions in by_file.values()]])
    shares = np.maximum(apportion(np.array([count]), sizes)[0], 1)
    chosen: list[Mutant] = []
    for (file, positions), share in zip(by_file.items(), shares.tolist(), strict=True):
        generator = stream(seed, "mutants", file)
        order = generator.permutation(len(positions))
        drawn = (_one_of(positions[index], root, generator) for index in order)
        chosen += [mutant for mutant, _ in zip(filter(None, drawn), range(share), strict=False)]
    order = stream(seed, "mutants-order").permutation(len(chosen))
    return [chosen[index] for index in order]


def _one_of(mutants: Sequence[Mutant], root: Path, generator: np.random.Generator) -> Mutant | None:
    """The first, in a random order, that changes the syntax tree and can be parsed."""
    for index in generator.permutation(len(mutants)):
        before = (root / mutants[index].file).read_text()
        try:
            after = ast.dump(ast.parse(mutants[index].source(root)))
        except SyntaxError:
            continue
        if after != ast.dump(ast.parse(before)):
            return mutants[index]
    return None


def _by_position(root: Path, file: str) -> list[list[Mutant]]:
    """The mutants of a file, those of one position together, in the order of the text."""
    text = (root / file).read_text()
    parsed = ast.parse(text)
    excluded = _spans_without_behaviour(parsed)
    statements: dict[int, int] = {}
    _note_statements(parsed.body, False, statements)
    found: dict[tuple[int, int], list[Mutant]] = {}
    tree = get_ast(text)
    for name in sorted(operator_names()):
        if name in LEFT_OUT:
            continue
        occurrence = 0
        for node in ast_nodes(tree):
            for (line, column), _ in _operator(name).mutation_positions(node):
                if not any(start <= (line, column) < stop for start, stop in excluded):
                    mutant = Mutant(file, line, column, statements.get(line, 0), name, occurrence)
                    found.setdefault((line, column), []).append(mutant)
                occurrence += 1
    return [found[position] for position in sorted(found)]


def _note_statements(body: Sequence[ast.stmt], called: bool, lines: dict[int, int]) -> None:
    """Write down, for each line, where its innermost statement begins. called: inside a function."""
    for node in body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        for line in range(first, (node.end_lineno or first) + 1):
            lines[line] = first if called else 0
        within = called or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in ("body", "orelse", "finalbody"):
            _note_statements(getattr(node, name, []), within, lines)
        for part in (*getattr(node, "handlers", []), *getattr(node, "cases", [])):
            _note_statements(part.body, within, lines)


Span = tuple[tuple[int, int], tuple[int, int]]


def _spans_without_behaviour(tree: ast.Module) -> list[Span]:
    """(start, stop) of annotations and of what only type checkers import."""
    return [
        ((part.lineno, part.col_offset), (part.end_lineno or part.lineno, part.end_col_offset or 0))
        for node in ast.walk(tree)
        for part in _without_behaviour(node)
    ]


def _without_behaviour(node: ast.AST) -> Iterator[ast.stmt | ast.expr]:
    if isinstance(node, ast.AnnAssign):
        yield node.annotation
    if isinstance(node, ast.arg) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield node.returns
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        yield node


@cache
def _operator(name: str) -> Any:
    return get_operator(name)()
