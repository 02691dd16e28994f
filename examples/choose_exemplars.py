"""Which samples stand best for a class? Three ways to choose, and how far the mean of the chosen is off."""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

from perennial.client.exemplars import select_by_hash, select_by_herding, select_nearest
from perennial.data.splits import KeyedHash, derive_simulation_key, group_by_content

BUDGETS = (1, 2, 5, 10, 20)


def main(label: int) -> None:
    """Print the distance to the class mean for each way and budget."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels[labels == label])
    features = images / images.norm(dim=1, keepdim=True)
    keyed = KeyedHash(derive_simulation_key(seed=1), group_by_content(images))
    hashes = keyed.values("exemplars", np.arange(len(images)))
    ways = {
        "herding": lambda budget: select_by_herding(features, budget),
        "nearest": lambda budget: select_nearest(features, budget),
        "random": lambda budget: select_by_hash(hashes, budget),
    }
    print(f"{len(images)} images of a {label}; distance of the mean of the chosen to the class mean")
    print("budget  " + "".join(f"{budget:8d}" for budget in BUDGETS))
    for name, choose in ways.items():
        mean = features.mean(dim=0)
        distances = [float((features[choose(budget)].mean(dim=0) - mean).norm()) for budget in BUDGETS]
        print(f"{name:8s}" + "".join(f"{distance:8.4f}" for distance in distances))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
