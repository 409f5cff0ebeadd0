"""Train stages with the Trainer of Hugging Face transformers."""

from typing import Any

from torch import Tensor, nn

from plures.stage import Stage


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
