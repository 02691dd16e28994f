"""A site's own model as a file in its state folder, that can be served there."""

from torch import Tensor

from perennial.client.site import Site
from perennial.data.samples import stored_as
from perennial.foundation.files import make_folder
from perennial.models.incremental import IncrementalModel, complete_state
from perennial.models.saved import PERSONAL_MODEL, Inputs, save_model


def keep_own_model(site: Site, model: IncrementalModel, class_means: Tensor | None) -> None:
    """Replace the site's model file.

    class_means: (M, d), if the site classifies by the nearest mean of its own exemplars.
    """
    folder = site.identity.state_dir
    make_folder(folder)
    data = site.data
    save_model(
        folder / PERSONAL_MODEL,
        complete_state(model),
        Inputs(data.input_shape, stored_as(data.x), data.mean, data.std, data.columns, data.fill),
        site.process.registry.classes[: model.num_classes],
        site.experiment.model_dump_json(),
        class_means,
    )
