"""How a process that trains imports PyTorch: its largest library beside other imports."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

LIBRARY = "libtorch_cpu.so"
RTLD_NOW = 2
"""Of dlfcn.h."""


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import PyTorch at the end of the block, for a process that trains; in it, import what needs no PyTorch.

    Its largest library is brought in by a thread meanwhile. If PyTorch is there already, nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    library = Thread(target=_load_library, daemon=True)
    library.start()
    yield
    library.join()
    import_module("torch")


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
