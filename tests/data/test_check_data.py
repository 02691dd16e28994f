"""What `perennial check` shows of data before a run, and how a run tells how far it is."""

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from perennial.cli.check import check_command
from perennial.data.survey import survey
from perennial.foundation.errors import DataError

ROWS = "age,cp,sex,hospital,diagnosis\n" + "".join(
    f"{'' if i % 4 == 0 else 30 + i},{1 + i % 4},{'fm'[i % 2]},{'north' if i % 3 else 'south'},"
    f"{'ill' if i % 3 and i % 2 else 'well'}\n"
    for i in range(60)
)


def table(folder: Path, **changes: object) -> Path:
    (folder / "heart.csv").write_text(ROWS)
    data = {
        "source": "csv",
        "path": "heart.csv",
        "label_column": "diagnosis",
        "site_column": "hospital",
        "partition": {"kind": "natural"},
    }
    content = {"name": "heart", "data": data, "tasks": {"count": 1, "rounds": 2}, "model": {"name": "mlp"}}
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({**content, **changes}))
    return path


def test_check_shows_samples_columns_and_what_may_surprise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_command(table(tmp_path), None)
    told = capsys.readouterr().out
    for words in (
        "60 samples",
        "site 'south' holds one class alone, 'well'",
        "columns cp hold at most 10 different whole numbers",
        "2 categories: f, m",
        "15 (25 %)",
        "learner: default; written out:",
        "name: adam",
    ):
        assert words in told, told


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("t.sav", "a file of SPSS"),
        ("t.dta", "a file of Stata"),
        ("t.json", "a file of JSON"),
        ("t.feather", "a file of Feather"),
        ("scan.nii.gz", "a volume in NIfTI"),
    ],
)
def test_files_that_are_not_read_are_named(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / name).write_bytes(b"$FL2@(#) SPSS DATA FILE")
    with pytest.raises(DataError, match=said):
        survey(tmp_path / name)


def test_a_folder_of_volumes_is_named(tmp_path: Path) -> None:
    (tmp_path / "ct" / "ill").mkdir(parents=True)
    (tmp_path / "ct" / "ill" / "1.nii.gz").write_bytes(b"")
    with pytest.raises(DataError, match="volumes in NIfTI"):
        survey(tmp_path / "ct")


def write(folder: Path, header: str, rows: list[str]) -> Path:
    path = folder / "t.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def test_a_quantity_is_regression(tmp_path: Path) -> None:
    path = write(tmp_path, "age,label", [f"{i % 60},{i / 7:.2f}" for i in range(300)])
    with pytest.raises(DataError, match=r"300 different numbers, 0 to 42\.71: .* regression, which"):
        survey(path)


def test_a_time_beside_an_event_is_survival(tmp_path: Path) -> None:
    rows = [f"{40 + i % 30},{i * 37 % 900},{i * 7 % 2}" for i in range(100)]
    found = survey(write(tmp_path, "age,os_days,event", rows), label="event").questions
    assert [each.value for each in found] == [{"os_days": "ignore"}] and "survival analysis" in found[0].text
    assert not survey(write(tmp_path, "age,os_days,label", rows)).questions, "no event, no survival"


def test_several_classes_of_one_record_are_multi_label(tmp_path: Path) -> None:
    names = ["effusion", "nodule", "effusion|nodule", "nodule|mass"]
    rows = [f"{40 + i % 30},{names[i * 7 % 4]}" for i in range(200)]
    found = survey(write(tmp_path, "age,label", rows)).questions
    assert len(found) == 1 and "multi-label" in found[0].text
    tidy = [row.replace("|", "/") for row in rows]
    assert not survey(write(tmp_path, "age,label", tidy)).questions
    single = [f"{40 + i % 30},{['type A, mild', 'type B, severe'][i * 7 % 2]}" for i in range(100)]
    assert not survey(
        write(tmp_path, "age,label", [row.replace(",t", ',"t') + '"' for row in single])
    ).questions


def test_masks_are_segmentation(tmp_path: Path) -> None:
    for label in ("ill", "well"):
        (tmp_path / "skin" / label).mkdir(parents=True)
        for index in range(3):
            noise = np.random.default_rng(index).integers(0, 255, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "skin" / label / f"p{index}.png")
            if label == "ill":
                Image.fromarray(noise[..., 0]).save(tmp_path / "skin" / label / f"p{index}_mask.png")
    found = survey(tmp_path / "skin").questions
    assert len(found) == 1 and "3 images look like masks" in found[0].text and "segmentation" in found[0].text
