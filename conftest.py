"""What the examples in docstrings may use without an import, as their reader would."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import plures
from plures.lab.models import resnet18


@pytest.fixture(autouse=True, scope="session")
def _names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(np=np, torch=torch, nn=nn, plures=plures, resnet18=resnet18)
