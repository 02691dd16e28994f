"""The measurements that a strategy may ask a site to report beside its update.

Asked for in TrainRequest.settings as {"tell": [names]}, answered in TrainReply.metrics as {name: value}. A
site under privacy refuses, unless the experiment allows metrics that no accountant covers.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perennial.foundation.errors import ProtocolError, suggest_nearest

if TYPE_CHECKING:
    from perennial.protocol.messages import TrainRequest

HELD_OUT_ACCURACY = "held_out_accuracy"
TRAIN_ACCURACY = "train_accuracy"
CLASSIFICATION_LOSS = "classification_loss"
CLASS_COVERAGE = "class_coverage"
LABEL_COUNTS = "label_counts"

MEASUREMENTS = {
    HELD_OUT_ACCURACY: "Share of right answers of the site's trained model on its own validation samples of "
    "all classes seen so far; not told where there is none, where its policy does not answer evaluate, or "
    "where fewer are right, or wrong, than its floor.",
    TRAIN_ACCURACY: "Share of right answers of that model on what it was trained on.",
    CLASSIFICATION_LOSS: "Mean classification loss of the last local epoch, without the other terms.",
    CLASS_COVERAGE: "Share of the classes seen so far that the site's training samples contain, so many of "
    "each as its floor at least.",
    LABEL_COUNTS: "Number of the site's training samples of each class seen so far; null for a class "
    "that the site's floor withholds.",
}


def add_measurements(request: "TrainRequest", names: Sequence[str]) -> "TrainRequest":
    """The request with settings that also ask for these measurements."""
    content = json.loads(request.settings)
    tell = list(dict.fromkeys([*content.get("tell", []), *names]))
    return replace(request, settings=json.dumps(content | {"tell": tell}, sort_keys=True))


def parse_measurements(settings: str) -> tuple[str, ...]:
    """Names of the measurements that a request's settings (JSON) ask for under "tell".

    Raises ProtocolError naming an unknown measurement, or settings of another form.
    """
    content = json.loads(settings)
    names = content.get("tell", []) if isinstance(content, dict) else None
    if not isinstance(names, list):
        raise ProtocolError(f"settings: found {settings:.60}, allowed a JSON object with a list `tell`")
    for name in names:
        if name not in MEASUREMENTS:
            raise ProtocolError(
                f"settings: tell: found {name!r}{suggest_nearest(str(name), MEASUREMENTS)}; "
                f"allowed: {', '.join(MEASUREMENTS)}"
            )
    return tuple(names)
