"""Lightning's segmentation example in small: Trainer(gradient_clip_val), a schedule by epochs, and two metrics."""

import lightning as L
import torch
from lit_autoencoder import fit
from torch.nn import functional as F
from torch.utils.data import DataLoader
from unet import Discs, UNet, dice_coefficient


class SegModel(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = UNet(width=8)

    def forward(self, image):
        return self.net(image)

    def loss(self, batch):
        return F.binary_cross_entropy_with_logits(self(batch["image"]), batch["mask"])

    def training_step(self, batch, batch_nb):
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        self.log("val_dice", dice_coefficient((self(batch["image"]) > 0).float(), batch["mask"]))

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=50)]


class SegData(L.LightningDataModule):
    def __init__(self, batch_size=16):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.trainset, self.validset = Discs(512, 0), Discs(64, 10_000)

    def train_dataloader(self):
        return DataLoader(self.trainset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.validset, batch_size=self.batch_size)


def train(batch_size, lr, report):
    fit(SegModel(lr=lr), SegData(batch_size), report, gradient_clip_val=1.0)


# For batchtune:
def make():
    return SegModel(), SegData()
