"""Train with a gradient penalty in Lightning. Needs lightning.

FastGradients fills the gradients itself, so there is no backward pass to call and optimization is manual. With an eager
objective, automatic optimization works: return `objective(self.network, *batch).total` from `training_step`.
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

import wassersmooth as ws


class Classifier(lightning.LightningModule):
    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.network = network
        self.gradients = ws.FastGradients(ws.GradientPenalty(ws.Euclidean(), eta=0.3), network)

    def training_step(self, batch, batch_idx):
        terms = self.gradients(*batch)
        for parameter in self.network.parameters():  # over several devices: Lightning averages only in its own backward pass
            parameter.grad = self.trainer.strategy.reduce(parameter.grad, reduce_op="mean")
        self.optimizers().step()
        self.log_dict({"loss": terms.loss, "penalty": terms.penalty}, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.network.parameters(), lr=0.1)


lightning.seed_everything(0, verbose=False)
network = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.SiLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten(), torch.nn.Linear(128, 10)
)
loader = DataLoader(TensorDataset(torch.rand(64, 1, 8, 8), torch.randint(10, (64,))), batch_size=16)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
)
trainer.fit(Classifier(network), loader)
print({name: round(float(value), 4) for name, value in trainer.callback_metrics.items()})
