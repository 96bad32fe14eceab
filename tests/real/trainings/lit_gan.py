"""Lightning's GAN example: manual optimization of two Adams, on scikit-learn's digits."""

import lightning as L
import torch
from lit_autoencoder import MyDataModule, fit
from torch import nn
from torch.nn import functional as F


class GAN(L.LightningModule):
    def __init__(self, latent_dim=16, lr=2e-4, b1=0.5, b2=0.999):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 128), nn.BatchNorm1d(128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim).type_as(imgs)
        valid, fake = torch.ones(imgs.size(0), 1).type_as(imgs), torch.zeros(imgs.size(0), 1).type_as(imgs)

        self.toggle_optimizer(optimizer_g)
        g_loss = self.adversarial_loss(self.discriminator(self(z)), valid)
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def distance(self, imgs):
        """How far the mean and spread of made images are from those of real ones."""
        state = torch.random.get_rng_state()
        torch.manual_seed(0)
        made = self(torch.randn(512, self.hparams.latent_dim).to(self.device))
        torch.random.set_rng_state(state)
        imgs = imgs.flatten(1)
        return (made.mean(0) - imgs.mean(0)).norm() + (made.std(0) - imgs.std(0)).norm()

    def loss(self, batch):
        return self.distance(batch[0])

    def validation_step(self, batch, batch_idx):
        self.log("distance", self.distance(batch[0]))

    def configure_optimizers(self):
        lr, betas = self.hparams.lr, (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=lr, betas=betas)
        return [opt_g, opt_d], []


def train(batch_size, lr, report):
    fit(GAN(lr=lr), MyDataModule(batch_size), report)


# For batchtune:
def make():
    return GAN(), MyDataModule(batch_size=64)
