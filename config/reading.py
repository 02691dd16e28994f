"""How images are read for an experiment's fixed maps: at their size, and a case's side by side."""

from typing import Any

from pydantic import ValidationError

from perennial.data.config import DataConfig
from perennial.models.config import ModelConfig
from perennial.models.feature_maps.config import size_to_read


def read_for_maps(content: Any) -> Any:
    """An experiment's content with what `data` leaves to the maps: `image_size` of files, places of a case.

    Content that is faulty elsewhere stays as it is. Raises ValueError where maps do not fit data.pool.
    """
    try:
        data = DataConfig.model_validate(content.get("data"))
        model = ModelConfig.model_validate(content.get("model"))
    except (AttributeError, ValidationError):
        return content
    found: dict[str, Any] = {}
    if data.source == "folder" and data.image_size is None:
        found["image_size"] = size_to_read(model.maps, tiled=data.pool is None)
    if data.pool is not None:
        tiles = {getattr(each, "tiles", 1) for each in model.maps}
        if len(tiles) != 1 or tiles == {1} or data.pool.images not in (None, *tiles):
            shown = ", ".join(map(str, sorted(tiles))) or "no map"
            raise ValueError(
                "data.pool: a case's images lie side by side as tiles of one, so that every map needs the "
                f"same `tiles`, as many as a case may have images; found {shown}"
            )
        found["pool"] = data.pool.model_copy(update={"images": tiles.pop()})
    found = {key: value for key, value in found.items() if value is not None}
    return {**content, "data": data.model_copy(update=found)} if found else content
