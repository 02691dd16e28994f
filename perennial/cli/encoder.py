"""perennial digest train-encoder: an encoder of digests, trained on public data before any federation."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from perennial.config.encoder_training import EncoderTraining, load_encoder_training
from perennial.foundation.errors import ConfigError


def train_encoder_command(
    settings_file: Path, output: Path, overrides: list[str], say: Callable[[str], None]
) -> str:
    """Train an encoder, write it to output (.safetensors), and return the text to print.

    settings_file: of EncoderTraining. overrides: KEY=VALUE. say: called with a line on the loss of each
    epoch. Raises ConfigError or DataError naming what is wrong with the settings, the output's suffix or the
    data.
    """
    if output.suffix != ".safetensors":
        raise ConfigError(f"{output}: found suffix {output.suffix or 'none'!r}, allowed .safetensors")
    settings = load_encoder_training(settings_file, overrides)
    samples = _train(settings, output, say)
    digest = hashlib.sha256(output.read_bytes()).hexdigest()
    return (
        f"{output}: trained on {samples} samples of {source_name(settings)}, SHA-256 {digest}\n"
        f"in an experiment: digests: {{encoder: {{name: autoencoder, file: {output.name}}}}}"
    )


def source_name(settings: EncoderTraining) -> str:
    """The name of the training data for the encoder's file: without its path, which can reveal too much."""
    data = settings.data
    return data.dataset or (data.source if data.path is None else f"{data.source} {Path(data.path).name}")


def _train(settings: EncoderTraining, output: Path, say: Callable[[str], None]) -> int:
    """Returns the number of samples."""
    import torch
    from torch import Tensor

    from perennial.data.augmentation import to_float
    from perennial.data.samples import fill_missing
    from perennial.data.sources import load
    from perennial.foundation.streams import stream
    from perennial.models.autoencoder import train_autoencoder
    from perennial.models.encoder_file import write_autoencoder

    torch.set_num_threads(1)
    source = load(settings.data, settings.seed)
    mean, std = source.mean, source.std
    if bool(mean.isnan().any()) or (source.fill is not None and bool(source.fill.isnan().any())):
        raise ConfigError(
            "data.normalise, data.imputation: give the constants by which the experiment normalises and fills"
        )
    order = stream(settings.seed, "encoder-samples").permutation(len(source.train))
    x = source.train.x[torch.from_numpy(order[: settings.data.samples_limit])]
    fill_missing(x, mean if source.fill is None else source.fill)
    is_image = x.ndim == 4
    zeros, ones = torch.zeros_like(mean), torch.ones_like(std)

    def batch(rows: Tensor) -> tuple[Tensor, Tensor]:
        inputs = to_float(x[rows], mean, std)
        return inputs, to_float(x[rows], zeros, ones).clamp(0, 1) if is_image else inputs

    shape = tuple(x.shape[1:])
    encoder = train_autoencoder(
        shape,
        len(x),
        batch,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        lr=settings.lr,
        seed=settings.seed,
        say=lambda epoch, loss: say(f"epoch {epoch}: loss {loss:.5f}"),
    )
    about = {
        "input_shape": list(shape),
        "source": source_name(settings),
        "samples": len(x),
        "mean": mean.tolist(),
        "std": std.tolist(),
        "seed": settings.seed,
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "lr": settings.lr,
    }
    write_autoencoder(output, encoder.layers.state_dict(), about)
    return len(x)
