"""Channel attention, and the network of Incre-FL that is built around it.

Hu et al. 2022 (Appl. Sci. 12(19):10025).
"""

from torch import Tensor, nn
from torch.nn import functional as F

from perennial.models.config import Norm
from perennial.models.normalisation import optional_norm

FEATURE_WIDTH = 512


class SqueezeExcitation(nn.Module):
    """Scales each channel by a factor in (0, 1) computed from the means of all channels.

    u_BCHW -> u_BCHW * e_BC with e = sigmoid(W_b relu(W_a mean_HW(u) + a) + b); hidden width channels // 2.

    Hu et al. 2018 (arXiv 1709.01507).
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(channels, channels // 2)
        self.excite = nn.Linear(channels // 2, channels)

    def forward(self, u: Tensor) -> Tensor:
        means = u.mean((2, 3))
        scale = self.excite(F.relu(self.squeeze(means))).sigmoid()
        return u * scale[:, :, None, None]


class SECNN(nn.Module):
    """1x1 convolution, channel attention, two 3x3 convolutions with pooling, two linear layers; d = 512.

    The paper gives the first convolution, the attention (16 to 8 channels, reduction 2) and the 512
    features; the widths between them are ours. No non-linearity but the attention
    follows the first convolution.
    """

    def __init__(self, input_shape: tuple[int, int, int], norm: Norm, attends: bool) -> None:
        """input_shape: (C, H, W), H and W at least 4. attends: with channel attention."""
        super().__init__()
        colours, height, width = input_shape
        self.conv1 = nn.Conv2d(colours, 16, 1)
        self.norm1 = optional_norm(norm, 16)
        self.attention = SqueezeExcitation(16) if attends else None
        self.conv2 = nn.Conv2d(16, 64, 3, padding=1)
        self.norm2 = optional_norm(norm, 64)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(64, 128, 3, padding=1)
        self.norm3 = optional_norm(norm, 128)
        self.relu3 = nn.ReLU()
        self.fc3 = nn.Linear(128 * (height // 4) * (width // 4), 512)
        self.relu4 = nn.ReLU()
        self.fc4 = nn.Linear(512, FEATURE_WIDTH)
        self.relu5 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        if self.norm1 is not None:
            x = self.norm1(x)
        x = self.conv2(x if self.attention is None else self.attention(x))
        if self.norm2 is not None:
            x = self.norm2(x)
        x = self.conv3(F.max_pool2d(self.relu2(x), 2))
        if self.norm3 is not None:
            x = self.norm3(x)
        x = F.max_pool2d(self.relu3(x), 2)
        return self.relu5(self.fc4(self.relu4(self.fc3(x.flatten(1)))))
