"""White blood cells of several laboratories, from pictures that a user has.

`python -m benchmarks.blood_cells LABORATORY=FOLDER LABORATORY=FOLDER...` reads one folder a
laboratory, in which each class has a folder, and writes what benchmarks/natural_hospitals.py reads:
build/natural_hospitals/white_blood_cells.npz. Class folders may have English names, or those of ALSO, which
public sets use (Acevedo et al. 2020, Matek et al. 2019 and others). Other classes are left out with a note.
Nothing is downloaded.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from perennial.foundation.errors import DataError

SIDE = 32
KINDS = ("basophil", "eosinophil", "lymphocyte", "monocyte", "neutrophil")
ALSO: Mapping[str, str] = {
    **{
        "baso": "basophil",
        "bas": "basophil",
        "eosi": "eosinophil",
        "eos": "eosinophil",
        "lymp": "lymphocyte",
    },
    **{"lyt": "lymphocyte", "lym": "lymphocyte", "ly": "lymphocyte", "mono": "monocyte", "mon": "monocyte"},
    **{
        "neut": "neutrophil",
        "neu": "neutrophil",
        "ngs": "neutrophil",
        "sne": "neutrophil",
        "bne": "neutrophil",
    },
}
"""What class folders of public sets are called beside the words, in small letters."""
PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff")


def kind_of(folder: str) -> str | None:
    """The kind of cell that a class folder's name means; None: none of the five."""
    name = folder.lower()
    return next((kind for kind in KINDS if name.startswith(kind)), ALSO.get(name))


def convert(laboratories: Mapping[str, Path], target: Path) -> dict[str, Counter[str]]:
    """Write the pictures of all laboratories, SIDE x SIDE pixels in colour; returns how many of each kind.

    Folders train and test inside a laboratory's are looked into as well. Raises DataError on a folder without
    a known class, and on a file that is no picture.
    """
    x: list[np.ndarray] = []
    y: list[str] = []
    sites: list[str] = []
    found: dict[str, Counter[str]] = {}
    for laboratory, folder in laboratories.items():
        found[laboratory] = Counter()
        for path in sorted(each for each in folder.rglob("*") if each.suffix.lower() in PICTURES):
            kind = kind_of(path.parent.name)
            if kind is not None:
                x.append(_pixels(path))
                y.append(kind)
                sites.append(laboratory)
            found[laboratory][kind or path.parent.name] += 1
        if not set(KINDS) & found[laboratory].keys():
            raise DataError(
                f"{laboratory}: {folder} holds no folder of {', '.join(KINDS)}; found "
                f"{', '.join(found[laboratory]) or 'no picture'}"
            )
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez(target, x=np.stack(x), y=np.array(y), site=np.array(sites))
    return found


def _pixels(path: Path) -> np.ndarray:
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    except OSError as error:
        raise DataError(f"{path}: not a picture ({error})") from error


def main(arguments: Sequence[str]) -> None:
    """Convert, and say what was taken and what was left out."""
    from benchmarks.natural_places import BLOOD_CELLS

    pairs = [each.partition("=") for each in arguments]
    if len(pairs) < 2 or any(not folder for _, _, folder in pairs):
        raise SystemExit("give two or more LABORATORY=FOLDER")
    for laboratory, counts in convert({name: Path(folder) for name, _, folder in pairs}, BLOOD_CELLS).items():
        print(
            laboratory,
            *(f"{kind}: {n}{'' if kind in KINDS else ' (left out)'}" for kind, n in counts.items()),
        )
    print(BLOOD_CELLS)


if __name__ == "__main__":
    main(sys.argv[1:])
