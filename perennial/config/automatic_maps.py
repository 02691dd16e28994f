"""`features: auto`: the maps that fit the data's kind and shape, written into an experiment as it is read."""

from collections.abc import Callable
from typing import Any, TypeVar

from perennial.config.schema import ExperimentFields
from perennial.config.simulation import as_for, simulated_federation
from perennial.data.deployed import declared_input_shape
from perennial.foundation.errors import ConfigError
from perennial.models.feature_maps.automatic import maps_for, network_is_here

Checked = TypeVar("Checked", bound=ExperimentFields)


def with_maps(content: dict[str, Any], where: str, read: Callable[[dict[str, Any]], Checked]) -> Checked:
    """The experiment with feature maps chosen for its data in place of `features: auto`.

    content: of its file, named `where` in errors. read: validates such content. Raises ConfigError where it
    is faulty, or with privacy, under which validation samples may not choose.
    """
    model = dict(content["model"])
    privacy = content.get("privacy")
    if isinstance(privacy, dict) and privacy.get("mode", "none") != "none":
        raise ConfigError(
            f"{where}: model.features: found auto with privacy, where the counts of validation samples that "
            "choose would be a release of their own; write the maps out, as [inputs] or those that "
            "`perennial init DATA --epsilon E` writes"
        )
    # the shape of the data does not depend on the maps; these stand in until it is known
    draft = read(content | {"model": model | {"features": ["inputs"]}})
    data = draft.data
    if data.only_at_sites or (data.source == "folder" and data.size is not None and data.color is not None):
        shape, stored = declared_input_shape(data), "float32" if data.source == "csv" else "uint8"
    else:
        federation = simulated_federation(draft)
        shape, stored = federation.input_shape, federation.stored
    model["features"] = maps_for(
        shape, stored, network=network_is_here(), chooses=draft.data.validation_fraction > 0
    )
    return as_for(read(content | {"model": model}), draft)
