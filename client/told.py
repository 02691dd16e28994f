"""Numbers about a site's training set that a strategy may ask for, beside the update."""

import json
from typing import Any

from torch import Tensor

from client.site import Site
from foundation.errors import PrivacyError, ProtocolError
from protocol.messages import TrainRequest


def told_metrics(site: Site, request: TrainRequest, labels: Tensor) -> dict[str, Any]:
    """What `tell` in the request's settings asks for. labels: (n,) int64 of the samples trained on.

    label_counts: samples of each class. Raises PrivacyError under privacy, where no accountant covers them,
    and ProtocolError for a name that is not one of these.
    """
    asked = json.loads(request.settings).get("tell", [])
    if not asked:
        return {}
    if asked != ["label_counts"]:
        raise ProtocolError(f"TrainRequest: settings.tell: found {asked!r:.60}, allowed ['label_counts']")
    privacy = site.experiment.privacy
    if privacy.mode != "none" and not privacy.allow_unaccounted_metrics:
        raise PrivacyError(
            "label_counts: no accountant covers them; allowed without privacy, or with "
            "privacy.allow_unaccounted_metrics"
        )
    return {"label_counts": labels.bincount(minlength=request.num_classes).tolist()}
