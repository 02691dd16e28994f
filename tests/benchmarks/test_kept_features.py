"""Features of pretrained networks are computed once where a table says so; they stay what they were."""

import torch
from torch import Tensor, nn

from benchmarks.kept_features import kept_features
from perennial.models.feature_maps.pretrained import Pretrained


class Counted(nn.Module):
    """Means of colours, and how many images they were asked for."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return x.mean(dim=(2, 3))


def test_each_image_goes_through_a_network_once_and_keeps_its_features() -> None:
    images = torch.randint(0, 256, (6, 3, 5, 4), generator=torch.Generator().manual_seed(3)).float()
    network = Counted()
    fixed = Pretrained(network, None, "counted", (), (3, 5, 4))
    expected, whole = fixed(images), Pretrained.forward
    network.seen = 0
    with kept_features():
        assert torch.equal(fixed(images[:4]), expected[:4])
        assert torch.equal(fixed(images[[5, 2, 4, 5]]), expected[[5, 2, 4, 5]])
        assert network.seen == 6, "image 5 is there twice in one batch, and was computed once"
        assert torch.equal(fixed(images.flip(3)), fixed(images.flip(3)))
        assert network.seen == 12
    assert Pretrained.forward is whole
    fixed(images)
    assert network.seen == 18
