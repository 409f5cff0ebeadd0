"""Small networks of every kind that plures promises to work on; all take images [batch, 3, 16, 16]."""

import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES = 4
DEVICE = torch.device(os.environ.get("PLURES_TEST_DEVICE", "cpu"))  # `make gpu-check` sets another one


def images(batch: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def labels(batch: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, CLASSES, (batch,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def reproducible(make: Callable[[], nn.Module]) -> Callable[..., nn.Module]:
    """Let a network be the same whenever it is made with the same `seed`, and leave torch's generator alone."""

    @functools.wraps(make)
    def make_with(seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make().to(DEVICE)

    return make_with


@reproducible
def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(768, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES)
    )


@reproducible
def adapted() -> nn.Module:
    """A frozen network with adapters of peft, and a head of its own."""
    import peft

    settings = peft.LoraConfig(r=2, target_modules=["1", "3"], modules_to_save=["5"])
    return peft.get_peft_model(mlp(), settings)


class ResidualBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResidualNetwork(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1, bias=False)
        self.norm = norm(16)
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1, norm), ResidualBlock(16, 32, 2, norm))
        self.classifier = nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.classifier(x.mean((2, 3)))


@reproducible
def resnet() -> nn.Module:
    """A residual network with batch norm."""
    return ResidualNetwork(nn.BatchNorm2d)


@reproducible
def one_block() -> nn.Module:
    """A residual network of one block with a convolution in its shortcut: for what takes seconds per layer."""
    return nn.Sequential(
        ResidualBlock(3, 16, 2, nn.BatchNorm2d), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)
    )


@reproducible
def group_norm_resnet() -> nn.Module:
    """A residual network without buffers."""
    return ResidualNetwork(functools.partial(nn.GroupNorm, 4))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 16) * 0.02)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


@reproducible
def transformer() -> nn.Module:
    """An encoder with `nn.MultiheadAttention`, which uses its weights without calling a layer."""
    return Encoder()


@reproducible
def tied() -> nn.Module:
    """Two layers with one weight."""
    network = nn.Sequential(
        nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU()
    )
    network.append(nn.Linear(24, CLASSES))
    network[5].weight = network[3].weight
    return network


# transformers is imported where it is used: it takes seconds.


@reproducible
def transformers_resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=CLASSES
    )
    return ResNetForImageClassification(config)


@reproducible
def transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=4,
        num_labels=CLASSES,
    )
    return ViTForImageClassification(config)


@reproducible
def transformers_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    return BertForSequenceClassification(BertConfig(vocab_size=50, num_labels=CLASSES, **sizes))


@reproducible
def transformers_convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        num_stages=2, hidden_sizes=[16, 32], depths=[1, 1], patch_size=2, num_labels=CLASSES, drop_path_rate=0.0
    )
    return ConvNextForImageClassification(config)


ALL = [
    mlp,
    resnet,
    group_norm_resnet,
    transformer,
    tied,
    transformers_resnet,
    transformers_vit,
    transformers_convnext,
]
