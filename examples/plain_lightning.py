"""An autoencoder trained with Lightning, which starts the workers itself.

python examples/plain_lightning.py
"""

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 256))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def waves(count: int) -> TensorDataset:
    """Sums of two sines with random frequencies and amplitudes."""
    generator = torch.Generator().manual_seed(0)
    frequency, amplitude = torch.rand(2, count, 2, 1, generator=generator)
    times = torch.linspace(0, 6.28, 256)
    return TensorDataset(((0.5 + frequency) * times).sin().mul(amplitude).sum(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--root", help="folder to save checkpoints to")
    arguments = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=arguments.devices,
        strategy="ddp",
        max_epochs=arguments.epochs,
        enable_checkpointing=arguments.root is not None,
        default_root_dir=arguments.root,
        logger=False,
    )
    trainer.fit(
        Autoencoder(),
        DataLoader(waves(4096), batch_size=64, shuffle=True),
        DataLoader(waves(512), batch_size=64),
    )
    trainer.print(f"validation loss {trainer.callback_metrics['val_loss']:.4f}")


if __name__ == "__main__":
    main()
