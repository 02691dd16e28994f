"""The one import of torchvision, which works even if its compiled operators do not fit the installed torch.

The wheel of the package index is built for CUDA. Beside a CPU build of torch its operators do not load, and
`import torchvision` ends with "operator torchvision::nms does not exist", because it registers shapes for
operators that nobody declared. Models, transforms and datasets need none of these operators.
"""

import sys
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# A library that is garbage-collected takes its declarations with it.
_declared: list[Any] = []


@cache
def import_torchvision() -> ModuleType:
    """The module torchvision. Where its compiled operators load, nothing but the import happens."""
    if "torchvision" not in sys.modules and not _load_operators():
        import torch

        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _declared.append(library)
    return import_module("torchvision")


def _load_operators() -> bool:
    """Whether torchvision's own shared library fits this torch; it stays loaded if so."""
    import torch

    package = find_spec("torchvision")
    folders = (package.submodule_search_locations or []) if package else []
    for library in (path for folder in folders for path in sorted(Path(folder).glob("_C*"))):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            return False
        return True
    return False
