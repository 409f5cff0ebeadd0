"""Adapters between a stage and the trainers of other libraries."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from plures.stage import Stage

try:
    from lightning import LightningModule
except ModuleNotFoundError:  # then there is no Trainer to give a StageModule to
    LightningModule = nn.Module  # type: ignore[misc, assignment]


class StageModel(nn.Module):
    """Adapt a stage to a `transformers.Trainer`: named inputs and labels in, a loss out.

        for stage in ensemble.stages():
            arguments = TrainingArguments("out", remove_unused_columns=False, save_strategy="no")
            Trainer(StageModel(stage), arguments, train_dataset=dataset).train()

    The data set yields dicts, with the targets as `labels`; all other entries go to the network by name. The Trainer
    does not know these names, so `remove_unused_columns=False` is needed to keep them.
    """

    accepts_loss_kwargs = False  # or the Trainer would hand in numbers that the network does not take

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, labels: Tensor, **inputs: Any) -> dict[str, Tensor]:
        """Return the loss of a batch."""
        return {"loss": self.stage(inputs, labels)}


class StageModule(LightningModule):
    """Adapt a stage to a `lightning.Trainer`.

        def optimizer(stage):
            return torch.optim.AdamW(stage.parameter_groups(weight_decay=1e-4), lr=1e-3)

        for stage in ensemble.stages():
            Trainer(max_epochs=20).fit(StageModule(stage, optimizer), loader)

    Batches are pairs of inputs and targets. `optimizer` returns what `configure_optimizers` may return: an optimizer,
    or a dict with a schedule. Every step logs `train_loss`, and validation batches `validation_loss`, for callbacks.
    `fit(..., ckpt_path=...)` resumes the stage from a checkpoint.
    """

    def __init__(self, stage: Stage, optimizer: Callable[[Stage], Any]) -> None:
        super().__init__()
        self.stage = stage
        self.make_optimizer = optimizer

    def training_step(self, batch: Any, _index: int) -> Tensor:
        """Return the loss of a batch."""
        inputs, targets = batch
        loss: Tensor = self.stage(inputs, targets)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, _index: int) -> None:
        """Log the loss of a validation batch."""
        inputs, targets = batch
        self.log("validation_loss", self.stage(inputs, targets), prog_bar=True)

    def configure_optimizers(self) -> Any:
        """Make the optimizer of the stage."""
        return self.make_optimizer(self.stage)
