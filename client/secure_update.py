"""An update as the words that a site sends into a masked sum."""

import math

import numpy as np

from perennial.client.site import Site
from perennial.config.secure_words import UpdateWords
from perennial.foundation.errors import PolicyRefusal, ProtocolError
from perennial.foundation.streams import stream
from perennial.privacy.clipping import clip_tensors
from perennial.privacy.discrete_gaussian import SecureWords, SeededWords, WordSource
from perennial.privacy.secure.masks import Words
from perennial.privacy.witness import Seen, tell, watched
from perennial.protocol.messages import TrainReply, TrainRequest


def update_words(site: Site, request: TrainRequest, reply: TrainReply) -> Words:
    """The words of what would have left in the clear, with this site's share of the noise.

    The gate of the server does not see single updates, so the site keeps the bounds itself: the largest norm
    of the sums, and the most samples that count.
    """
    if request.sum_updates is None:
        raise ProtocolError("TrainRequest: sum_updates: missing for a masked sum")
    layout = UpdateWords(site.experiment, request.sum_updates, request.clip_norm)
    weight = layout.weight(reply.num_examples)
    if not math.isfinite(clip_tensors(reply.update.values(), site.experiment.sums.largest_norm)):
        raise PolicyRefusal("secure: the update is not finite, and goes into no sum")
    words = layout.encode(reply.update, weight, reply.within_clip_norm)
    if layout.noise is not None:
        before = words.copy() if watched() else None
        layout.noise.add(words, _source(site, request.round), counts_within=layout.counts_within)
        if before is not None:
            values = (words - before)[: len(words) - 1 - layout.counts_within]
            noise = values.view(np.int64 if words.dtype == np.uint64 else np.int32) * layout.noise.step
            tell(Seen("share", noise, place=f"round {request.round}"))
    return words


def _source(site: Site, round_number: int) -> WordSource:
    if site.experiment.privacy.noise_source == "secure":
        return SecureWords()
    return SeededWords(stream(site.experiment.seed, "dp-noise", site.name, round_number))
