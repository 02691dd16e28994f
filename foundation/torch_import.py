"""How a process that trains imports PyTorch: its library ahead, and what only its compiler needs later."""

import ctypes
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

TRIED = ("2.13.",)
"""Releases of PyTorch with which the rules were postponed and the tests passed; others are imported whole."""
SHAPE_RULES = "torch._meta_registrations"
"""What each operation does to shapes without values: a fifth of the time that PyTorch takes to come in."""
USERS = frozenset({"torch._dynamo", "torch._decomp", "torch._refs", "torch._inductor", "torch.onnx"})
"""Who works with shapes without values: the compiler, and what it is made of."""
LIBRARY = "libtorch_cpu.so"
RTLD_NOW = 2
"""Of dlfcn.h."""


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import PyTorch at the end of the block, for a process that trains; in it, import what needs no PyTorch.

    Its largest library is brought in by a thread meanwhile. Its rules for shapes without values wait until
    its compiler or a plug-in is imported: only tensors on the device `meta` need them, and no value depends
    on them. If PyTorch is there already, nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    library = Thread(target=_load_library, daemon=True)
    library.start()
    yield
    library.join()
    if version("torch").startswith(TRIED):
        sys.modules[SHAPE_RULES] = _Postponed(SHAPE_RULES)
        sys.meta_path.insert(0, _Watch())
        # without this module, which otherwise comes in with the rules, PyTorch makes no random generator
        import_module("torch._prims")
    else:
        import_module("torch")


def complete_torch() -> None:
    """Import what was postponed: from here on PyTorch is whole. Does nothing if nothing was."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Watch)]
    if isinstance(sys.modules.get(SHAPE_RULES), _Postponed):
        del sys.modules[SHAPE_RULES]
        if "torch" in sys.modules:
            vars(sys.modules["torch"])["_meta_registrations"] = import_module(SHAPE_RULES)


class _Postponed(ModuleType):
    """Stands in the place of the rules; whoever asks it for something gets them."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        complete_torch()
        return getattr(sys.modules[SHAPE_RULES], name)


class _Watch(MetaPathFinder):
    """Finds no module; sees when one is imported that needs the rules."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname in USERS:
            complete_torch()


def _load_library() -> None:
    spec = find_spec("torch")
    if spec is None or spec.origin is None or not sys.platform.startswith("linux"):
        return
    library = Path(spec.origin).parent / "lib" / LIBRARY
    if library.exists():
        # through the C library's own function: ctypes holds the interpreter's lock while it loads one
        load = ctypes.CDLL(None).dlopen
        load.restype, load.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int)
        load(str(library).encode(), RTLD_NOW)
