"""What the reader of a page or a docstring has at hand: small stand-ins for a network, data, a training loop."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

import plures


class Network(nn.Module):
    """Stands for the reader's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.ModuleDict({"hidden": nn.Linear(8, 16), "fc": nn.Linear(16, 10)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.norm(self.stem(x)).relu().mean((2, 3))
        return self.head["fc"](self.head["hidden"](features).relu())


def at_hand() -> dict[str, Any]:
    """Make the names that examples use; a file of the ensemble lies in the working directory."""
    torch.manual_seed(0)
    network = Network()
    images, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 10
    ensemble = plures.OrthogonalDropout(network, members=5)
    for stage in ensemble.stages():  # noqa: B007 (the last one is of use below)
        pass
    plures.save(ensemble, "birds.safetensors")
    names = {"network": network, "ensemble": ensemble, "stage": stage, "make_network": Network}
    names["optimizer"] = torch.optim.SGD(stage.parameters(), lr=0.1)
    names |= {"images": images, "labels": labels, "loader": [(images, labels)] * 2, "train": lambda *a, **k: None}
    held_out = torch.randn(1000, 3, 8, 8)
    truth = ensemble.predict(held_out).label  # nobody trained it, but let it be right, as the reader's is
    truth[0] = (truth[1] + 1) % 10
    names |= {"held_out_images": held_out, "held_out_labels": truth}
    names |= {"held_out_loader": [(held_out[:100], truth[:100])]}
    x = torch.randn(16, 1)
    regressor = nn.Sequential(nn.Linear(1, 16), nn.ReLU(), nn.Linear(16, 2))
    forecaster = plures.DeepEnsemble(regressor, members=2, loss=plures.GaussianNLL())
    for _ in forecaster.stages():
        pass
    names |= {"x": x, "y": x.sin(), "regressor": regressor, "forecaster": forecaster}
    tagger = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    names |= {"tagger": tagger, "tokens": torch.randint(0, 50, (4, 7)), "tags": torch.randint(0, 3, (4, 7))}
    names |= {
        "validation_images": images,
        "validation_labels": labels,
        "epochs": dict.fromkeys(("pretrain", "prune", "finetune", "train"), 1),
    }
    return {"torch": torch, "nn": nn, "F": F, "parametrize": parametrize, "plures": plures, **names}
