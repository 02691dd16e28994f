"""Bytes of one site's exact sums as they are sent: `python -m benchmarks.closed_form_bytes`.

Random features of the digits that scikit-learn ships, of one width, for growing numbers of records. Each
row says the bytes of the integers as they are stored, the bytes that leave, in which form, and whether the
receiver has the same integers. Results: results/closed_form_bytes.json.
"""

import json
import time

import torch
from sklearn.datasets import load_digits

from benchmarks.environment import machine, versions
from benchmarks.table import RESULTS
from perennial.foundation.files import replace_file
from perennial.learning.analytic.compact import compact_statistics, read_compact
from perennial.learning.analytic.statistics import Collector, SumsForm
from perennial.models.feature_maps.projection import round_to_grid

WIDTH, CLASSES = 2_560, range(10)
RECORDS = (100, 300, 600, 1_200, 1_797)


def measure(records: int) -> dict[str, object]:
    """Return the figures for so many records."""
    x, y = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, WIDTH, generator=generator) / 8
    bias = torch.randn(WIDTH, generator=generator) * 0.3
    inputs = torch.tensor(x / 16, dtype=torch.float32)
    features = round_to_grid(torch.relu((inputs - inputs.mean(0)) @ weight + bias))[:records]
    collector = Collector(WIDTH, CLASSES)
    collector.add(features, torch.tensor(y)[:records])
    sums, form = collector.finish(), SumsForm(WIDTH + 1)
    begun = time.process_time()
    sent = compact_statistics(sums)
    packed = time.process_time()
    back = read_compact(sent, form, CLASSES)
    read = time.process_time()
    return {
        "records": records,
        "bytes stored": form.bytes(len(CLASSES)),
        "bytes sent": sum(tensor.numel() * tensor.element_size() for tensor in sent.values()),
        "form": next(name for name in ("factor", "planes", "gram") if name in sent),
        "same integers": torch.equal(back["gram"], sums.gram),
        "processor seconds to send": round(packed - begun, 2),
        "processor seconds to read": round(read - packed, 2),
    }


def main() -> None:
    """Measure all rows and write them."""
    torch.set_num_threads(1)
    found = {
        "features with the constant": WIDTH + 1,
        "rows": [measure(records) for records in RECORDS],
        "machine": machine(),
        "versions": versions(),
    }
    text = json.dumps(found, indent=1) + "\n"
    replace_file(RESULTS / "closed_form_bytes.json", text.encode())
    print(text)


if __name__ == "__main__":
    main()
