"""A site's personal layers: trained here, kept on the site's disk, and never part of a message.

FedPer (Arivazhagan et al. 2019, arXiv 1912.00818).
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from perennial.client.site import Site
from perennial.foundation.errors import ProtocolError, StateError
from perennial.models.layers import with_rows
from perennial.protocol.tensors import Tensors

RECORD = "own-layers"


def with_own_layers(
    site: Site, run: str, arrays: Mapping[str, Tensor], names: Sequence[str], before_round: int
) -> Tensors:
    """arrays, with this site's own values for the named layers as they were before a round.

    A site without values of its own starts from those received; a classifier that has grown since keeps its
    own rows and takes the new ones from those received. Raises ProtocolError when a name is not in arrays,
    StateError when the kept layer is of another network.
    """
    if not names:
        return Tensors(arrays)
    unknown = sorted(set(names) - arrays.keys())
    if unknown:
        raise ProtocolError(f"personal: found {unknown[0]!r}, which is no tensor of the model received")
    record = site.state(run).get(RECORD, before_round)
    own = record[0] if record is not None else {}
    joined = Tensors(arrays)
    for name in names:
        if name in own:
            try:
                joined[name] = with_rows(own[name], arrays[name])
            except ValueError as error:
                raise StateError(f"own layer {name!r} of site {site.name!r}: {error}") from error
    return joined


def keep_own_layers(site: Site, run: str, layers: Mapping[str, Tensor], after_round: int) -> None:
    """Store the layers as they are after a round."""
    site.state(run).put(RECORD, after_round, layers, {})


def has_own_layers(site: Site, run: str, before_round: int) -> bool:
    """Whether the site had layers of its own before a round."""
    return site.state(run).get(RECORD, before_round) is not None


def shared_update(update: Mapping[str, Tensor], own: Sequence[str]) -> Tensors:
    """The part of an update that may leave the site."""
    return Tensors({name: tensor.contiguous() for name, tensor in update.items() if name not in own})
