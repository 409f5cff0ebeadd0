"""Recipes: every setting of an experiment, in one place, with its reason.

This module does not import torch, so that the command line lists recipes at once.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Meta
from tyro.conf import Suppress

from plures.checks import unknown
from plures.errors import PluresError
from plures.lab.fields import check_fields
from plures.lab.method_names import known_method

Side = Annotated[int, Meta(ge=1, le=1 << 16)]  # pixels or channels: more is a mistake
Positive = Annotated[float, Meta(gt=0, le=1e300)]
AtLeastOne = Annotated[int, Meta(ge=1)]
NotNegative = Annotated[float, Meta(ge=0, le=1e300)]
BelowOne = Annotated[float, Meta(ge=0, lt=1)]
Inside = Annotated[float, Meta(gt=0, lt=1)]
Length = Annotated[int, Meta(ge=0, lt=1 << 31)]

# In the paper, methods whose members share one set of weights train for 500 epochs instead of 200, and MIMO has two
# members: a ResNet has no capacity for more. Wide ResNets are as in the MIMO paper: the same epochs for all methods.
LONGER = {"batch-ensemble": 2.5, "masksembles": 2.5}  # times the epochs of others
MEMBERS = {"mimo": 2}
WIDE_MEMBERS = {"batch-ensemble": 4, "mimo": 3}


@dataclass(frozen=True)
class Epochs:
    """How long each kind of stage trains; by default as in the paper.

        Epochs(pretrain=200, prune=20, finetune=200, train=200).of("prune")

    A method uses the phases that it has: orthogonal dropout the first three, most others only `train`.
    """

    pretrain: Length = 200  # epochs per member on all weights that are still free
    prune: Length = 20  # epochs per member on the scores that choose its weights
    finetune: Length = 200  # epochs per member on the weights that it owns
    train: Length = 200  # epochs of methods without these phases

    def __post_init__(self) -> None:
        check_fields(self, Epochs, "epochs.")

    def of(self, phase: str) -> int:
        """Return the epochs of one phase."""
        known = asdict(self)
        if phase not in known:
            raise PluresError(f"a recipe has no epochs for the phase {phase!r}; use one of {', '.join(known)}")
        return int(known[phase])

    def times(self, factor: float) -> "Epochs":
        """Return all epochs multiplied, rounded to integers."""
        return Epochs(**{phase: round(epochs * factor) for phase, epochs in asdict(self).items()})


@dataclass(frozen=True)
class Recipe:
    """All settings of an experiment: data, network, members and training.

        recipe = get_recipe("cifar10-cpu")
        longer = dataclasses.replace(recipe, epochs=Epochs(pretrain=60, prune=6, finetune=60, train=60))
        fit(ensemble, data, longer)

    `milestones` are fractions of a stage, so they suit stages of any length. `batch_size` counts the images of all
    processes together, so a recipe means the same on one device and on many.
    """

    about: Annotated[str, Suppress] = ""  # one line for people; not part of the experiment

    data: str = "digits"  # a built-in name, a folder of images (train/CLASS/ and test/CLASS/), or a hub id
    size: Side | None = None  # pixels per side of the network's input; None: the size of the images
    cache_size: Side | None = None  # pixels per side in the cache; larger than size leaves room for random crops
    limit: AtLeastOne | None = None  # the largest number of training images, balanced over the classes; None: all
    validation: NotNegative = 0.1  # images held out for validation: a fraction if below 1, else a number

    model: str = "resnet18"  # a built-in name, or module:function that takes classes and channels
    width: Side | None = None  # channels of the first layer; None: the model's default
    stem: Literal["cifar", "imagenet"] = "cifar"  # for small images, or for photographs (divides the sides by four)
    weights: str | None = None  # a run of the method deterministic, whose weights all members start from; None: random

    members: AtLeastOne = 5  # members of the ensemble
    together: bool | None = None  # train all members in one stage, as plures.split does; None: as the method does
    epochs: Epochs = field(default_factory=Epochs)  # by phase; a method uses the phases that it has
    least_steps: AtLeastOne | None = None  # train for more epochs if the longest stage has fewer steps; None: never
    batch_size: Annotated[int, Meta(ge=1, le=1 << 24)] = 128  # images per step
    optimizer: Literal["sgd", "adamw"] = "sgd"  # the optimizer
    learning_rate: Positive = 0.1  # the highest rate of the schedule
    momentum: BelowOne = 0.9  # momentum of sgd
    nesterov: bool = False  # use Nesterov momentum
    weight_decay: NotNegative = 1e-4  # the factor of weight decay
    schedule: Literal["step", "cosine"] = "step"  # of the learning rate; it restarts in every stage
    milestones: tuple[Inside, ...] = (0.5, 0.75)  # fractions of a stage at which "step" multiplies the rate by gamma
    gamma: Positive = 0.1  # factor of the rate at a milestone
    warmup: NotNegative = 0.0  # epochs at the start of every stage in which the rate rises from zero
    clip: Positive | None = None  # the largest norm of the gradient; None: no limit
    precision: Literal["auto", "no", "bf16", "fp16"] = "no"  # mixed precision; auto: bf16 on GPUs and CPUs made for it

    crop: Annotated[int, Meta(ge=0, le=1 << 16)] = 0  # pixels of padding before a random crop
    flip: bool = False  # flip half of the images horizontally

    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0  # the seed of all random numbers

    def __post_init__(self) -> None:
        check_fields(self, Recipe)
        if self.nesterov and not self.momentum:
            raise PluresError("nesterov is True, but momentum is 0: give a momentum above 0")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise PluresError(f"milestones are {self.milestones}, but must be rising fractions of a stage")

    def for_method(self, method: str) -> Self:
        """Return the recipe with the usual changes for a method; apply it before your own changes.

            get_recipe("cifar10").for_method("batch-ensemble").epochs.train  # 500

        BatchEnsemble and Masksembles train 2.5 times as long, and MIMO has two members, as in the paper. With wide
        ResNets, all methods train equally long, MIMO has three members and BatchEnsemble four, as in the MIMO paper.
        """
        method, wide = known_method(method), self.model.startswith("wide_resnet")
        longer = 1 if wide else LONGER.get(method, 1)
        members = (WIDE_MEMBERS if wide else MEMBERS).get(method, self.members)
        return replace(self, epochs=self.epochs.times(longer), members=members)

    def epochs_for(self, images: int) -> Epochs:
        """Return the epochs for a number of training images: more if there would be fewer than `least_steps`.

        >>> Recipe(epochs=Epochs(30, 3, 30, 60), batch_size=32, least_steps=600).epochs_for(192).train
        100
        """
        longest = max(asdict(self.epochs).values()) * max(1, images // self.batch_size)
        return self.epochs.times(max(1.0, (self.least_steps or 0) / max(1, longest)))

    def as_json(self) -> dict[str, Any]:
        """Return everything that affects the result as JSON values."""
        values = asdict(self)
        del values["about"]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Make a recipe from the values of `as_json`."""
        known = {one.name for one in fields(cls)} | {"label_smoothing"}  # of 0.1: it mattered in training only
        # A setting of another version that was off, such as resized_crop of 0.1, changes nothing.
        if others := sorted(name for name, value in values.items() if name not in known and value is not None):
            raise PluresError(
                f"the recipe has the unknown settings {', '.join(others)}: another version of plures wrote it"
            )
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise PluresError(f"the recipe does not make sense: {error}") from error


def get_recipe(name: str) -> Recipe:
    """Return a recipe by its name; for an unknown name, the error suggests similar ones.

    recipe = get_recipe("cifar10-cpu")
    """
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


# Embedded data, for a first try: orthogonal dropout with five members in under a minute.
DIGITS = Recipe(
    about="300 digits of 8 pixels from scikit-learn, two hidden layers: a first try in under a minute",
    data="digits",
    limit=400,  # with all 1,347 digits a single network is nearly perfect, and there is nothing to be unsure of
    validation=100,
    model="mlp",
    width=256,  # a fifth of it still learns digits
    epochs=Epochs(pretrain=30, prune=3, finetune=30, train=30),  # 10 : 1 : 10, as in the paper
    batch_size=32,  # 9 steps an epoch: 128 would leave two
    nesterov=True,
    weight_decay=5e-4,  # chosen for the single network, on training images that the limit leaves out
    schedule="cosine",  # short training ends best at a rate of zero
)

# The paper: the defaults, which are SGD as for ResNets on CIFAR (He et al., 2016), with plain momentum, rate 0.1 with
# two drops and batch 128. Mixed precision would be about twice as fast on recent GPUs, but was not published.
CIFAR10 = Recipe(
    about="CIFAR10, ResNet18, the paper's settings: for a GPU",
    data="cifar10",
    validation=1000,  # enough to fit one temperature; the paper holds out nothing, so keep it small
    crop=4,
    flip=True,
)

# Wide ResNets as in the MIMO paper (Havasi et al., 2021), whose figures the paper takes over.
CIFAR10_WRN = replace(
    CIFAR10,
    about="CIFAR10, WideResNet28-10, settings of the MIMO paper: for several GPUs",
    model="wide_resnet28_10",
    epochs=Epochs(pretrain=250, prune=25, finetune=250, train=250),
    nesterov=True,
    weight_decay=6e-4,  # their L2 of 3e-4 has no factor 1/2 in the loss, which doubles its gradient
    milestones=(0.4, 0.8, 0.9),  # epochs 100, 200 and 225 of 250
    gamma=0.2,
    warmup=1.0,
)

# Honest small versions for two cores: a quarter of the width, few images, few epochs, the proportions 10 : 1 : 10 kept.
# Few images for the size of the network, so that a single network overfits as it does in the paper.
CIFAR10_CPU = Recipe(
    about="CIFAR10, 10,000 images at 16 pixels, ResNet18 at quarter width: for two cores",
    data="cifar10",
    size=16,  # four pixels averaged into one: a quarter of the work
    limit=11_000,  # 10,000 to train on after validation
    validation=1000,
    width=16,  # a sixteenth of the weights
    epochs=Epochs(pretrain=30, prune=3, finetune=30, train=30),
    nesterov=True,
    weight_decay=5e-4,  # short training needs the stronger pull; 5e-4 is usual with cosine
    schedule="cosine",  # two drops need more epochs than 30 to pay off
    crop=2,  # an eighth of the side, as 4 of 32
    flip=True,
    precision="auto",  # bf16 if the processor has tiles for it (AMX): without them it is slower than float32
)
CIFAR10_WRN_CPU = replace(
    CIFAR10_CPU,
    about="CIFAR10, 10,000 images at 16 pixels, the smallest wide ResNet: for two cores",
    model="wide_resnet10_2",
)


def _on_cifar100(recipe: Recipe) -> Recipe:
    return replace(recipe, about=recipe.about.replace("CIFAR10", "CIFAR100"), data="cifar100")


RECIPES: dict[str, Recipe] = {
    "digits": DIGITS,
    # With convolutions: kernels as owners, and dropout between them.
    "digits-resnet": replace(
        DIGITS,
        about="300 digits of 8 pixels from scikit-learn, ResNet8: a first try with convolutions",
        model="resnet8",
        width=16,
    ),
    "digits-wrn": replace(
        DIGITS,
        about="300 digits of 8 pixels from scikit-learn, the smallest wide ResNet",
        model="wide_resnet10_2",
        width=8,
    ),
    "cifar10": CIFAR10,
    "cifar100": _on_cifar100(CIFAR10),
    "cub200": replace(
        CIFAR10,
        about="CUB200 birds from scratch, ResNet50, the paper's settings: for a GPU",
        data="cub200",
        size=224,  # the paper gives no size: ResNet50 was made for 224 of 256 pixels
        cache_size=256,
        validation=400,  # two images of each class, of 5,994
        model="resnet50",
        stem="imagenet",
        crop=0,  # the larger cache already leaves 32 pixels to shift
    ),
    "tiny-imagenet": replace(
        CIFAR10,
        about="Tiny-ImageNet, ResNet50, the paper's settings: for a GPU",
        data="tiny-imagenet",
        size=64,
        validation=2000,  # ten images of each class
        model="resnet50",
        stem="cifar",  # dividing 64 pixels by four at once would leave the last stage two
    ),
    "cifar10-wrn": CIFAR10_WRN,
    "cifar100-wrn": _on_cifar100(CIFAR10_WRN),
    "cifar10-cpu": CIFAR10_CPU,
    "cifar100-cpu": _on_cifar100(CIFAR10_CPU),
    "cifar10-half-cpu": replace(
        CIFAR10_CPU,
        about="CIFAR10, 10,000 images at 16 pixels, ResNet18 at half width: for two cores",
        width=32,  # four times the weights: the paper's claim is about networks with capacity to spare
    ),
    "tiny-imagenet-cpu": replace(
        CIFAR10_CPU,
        about="20 classes of Tiny-ImageNet at 64 pixels, ResNet18 at quarter width: for two cores",
        data="tiny-imagenet-20",
        size=64,
        limit=None,  # 9,500 remain to train on
        validation=500,
        stem="imagenet",  # 64 pixels at the price of 16
        epochs=Epochs(pretrain=20, prune=2, finetune=20, train=20),  # more and larger images: still under 25 minutes
        crop=8,  # an eighth of the side
    ),
    "cub200-cpu": replace(
        CIFAR10_CPU,
        about="30 birds of CUB200, 64-pixel photographs, ResNet18 at quarter width: for two cores",
        data="cub200-30",
        size=64,
        cache_size=72,  # an eighth of the side to shift
        limit=None,
        validation=60,  # two images of each class, of 900
        stem="imagenet",
        epochs=Epochs(pretrain=100, prune=10, finetune=100, train=100),  # 840 images make short epochs
        batch_size=32,  # 27 steps an epoch: 128 would leave seven
        learning_rate=0.05,  # lower, as the batch is smaller
        crop=0,  # the larger cache already leaves room
    ),
    "images": replace(
        CIFAR10_CPU,
        about="your own images at 64 pixels (--data FOLDER), ResNet18 at quarter width: for two cores",
        data="images",
        size=64,
        limit=None,
        validation=0.1,
        stem="imagenet",
        together=True,
        epochs=Epochs(pretrain=30, prune=3, finetune=30, train=60),
        least_steps=400,  # with a few dozen images, 60 epochs would end near chance
        batch_size=32,
        learning_rate=0.05,  # lower, as the batch is smaller
        crop=8,  # an eighth of the side
    ),
    "cifar10-wrn-cpu": CIFAR10_WRN_CPU,
    "cifar100-wrn-cpu": _on_cifar100(CIFAR10_WRN_CPU),
}
RECIPES |= {
    f"{name}-smoke": replace(
        RECIPES[name],
        about=f"64 {RECIPES[name].about.removeprefix('300 ')}".partition(":")[0]
        + ": one epoch, to see that all of it works",
        limit=84,
        validation=20,
        epochs=Epochs(pretrain=1, prune=1, finetune=1, train=1),
    )
    for name in ("digits", "digits-resnet", "digits-wrn")
}
