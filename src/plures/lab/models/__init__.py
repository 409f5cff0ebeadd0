"""Network architectures, as plain functions that return modules."""

from plures.lab.models.build import build, mlp
from plures.lab.models.resnet import resnet8, resnet18, resnet20, resnet50
from plures.lab.models.wide_resnet import wide_resnet, wide_resnet28_10

__all__ = ["build", "mlp", "resnet8", "resnet18", "resnet20", "resnet50", "wide_resnet", "wide_resnet28_10"]
