"""Recipes: the paper's numbers, what is refused, and the learning rate that follows from them."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from plures import PluresError
from plures.lab.cli.main import parse
from plures.lab.recipes import RECIPES, Epochs, Recipe, get_recipe
from plures.lab.runs.config import train_words
from plures.lab.training.loop import rate_factor

PAPER = ["cifar10", "cifar100", "cub200", "tiny-imagenet"]


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_have_the_papers_numbers(name):
    recipe = get_recipe(name)
    assert recipe.epochs == Epochs(pretrain=200, prune=20, finetune=200, train=200)
    assert (recipe.members, recipe.batch_size, recipe.optimizer) == (5, 128, "sgd")
    assert (recipe.learning_rate, recipe.momentum, recipe.weight_decay) == (0.1, 0.9, 1e-4)
    assert (recipe.schedule, recipe.milestones, recipe.gamma) == ("step", (0.5, 0.75), 0.1)
    assert recipe.flip
    assert recipe.model == ("resnet18" if name.startswith("cifar") else "resnet50")


@pytest.mark.parametrize("name", ["cifar10-wrn", "cifar100-wrn"])
def test_wide_networks_have_the_numbers_of_the_mimo_paper(name):
    recipe = get_recipe(name)
    assert recipe.nesterov
    assert (recipe.epochs.train, recipe.weight_decay, recipe.gamma, recipe.warmup) == (250, 6e-4, 0.2, 1)
    rates = [recipe.learning_rate * rate_factor(recipe, epoch, 250, 1) for epoch in range(250)]
    drops = [epoch for epoch in range(1, 250) if rates[epoch] < rates[epoch - 1]]
    assert drops == [100, 200, 225]


@pytest.mark.parametrize("name", [name for name in RECIPES if name.endswith("-cpu")])
def test_small_recipes_keep_the_proportions_of_the_phases(name):
    epochs = get_recipe(name).epochs
    assert epochs.pretrain == 10 * epochs.prune == epochs.finetune == epochs.train


@pytest.mark.parametrize(("method", "epochs", "members"), [
    ("OrthogonalDropout", 200, 5),
    ("DeepEnsemble", 200, 5),
    ("BatchEnsemble", 500, 5),
    ("Masksembles", 500, 5),
    ("MIMO", 200, 2),
])  # fmt: skip
def test_each_method_gets_what_the_paper_gave_it(method, epochs, members):
    recipe = get_recipe("cifar10").for_method(method)
    assert (recipe.epochs.train, recipe.members) == (epochs, members)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_goes_through_json(name):
    recipe = get_recipe(name)
    again = Recipe.from_json(json.loads(json.dumps(recipe.as_json())))
    assert dataclasses.replace(again, about=recipe.about) == recipe


def test_json_with_an_unknown_field_is_refused():
    with pytest.raises(PluresError, match="lerning_rate"):
        Recipe.from_json({"lerning_rate": 0.1})
    with pytest.raises(PluresError, match="resized_crop: another version"):
        Recipe.from_json({"resized_crop": [0.25, 1.0]})
    assert Recipe.from_json({"resized_crop": None}) == Recipe()  # as version 0.1 wrote it
    assert Recipe.from_json({"label_smoothing": 0.1}) == Recipe()  # which trained with it


def test_an_unknown_recipe_is_answered_with_the_nearest():
    with pytest.raises(PluresError, match="did you mean .*cifar10-cpu"):
        get_recipe("cifar-10-cpu")
    with pytest.raises(PluresError, match="use one of digits, .*cifar10"):
        get_recipe("imagenet21k")


@pytest.mark.parametrize(("change", "named"), [
    ({"learning_rate": 0.0}, "learning_rate"),
    ({"momentum": 1.0}, "momentum"),
    ({"momentum": 0.0, "nesterov": True}, "nesterov"),
    ({"milestones": (0.75, 0.5)}, "milestones"),
    ({"milestones": (100, 150)}, "milestones"),
    ({"clip": 0.0}, "clip"),
    ({"members": 0}, "members"),
    ({"seed": -1}, "seed"),
    ({"seed": 1 << 63}, "seed"),
    ({"learning_rate": math.nan}, "learning_rate"),
    ({"learning_rate": math.inf}, "learning_rate"),
    ({"learning_rate": 10**400}, "learning_rate"),
    ({"width": True}, "width"),
    ({"width": "16"}, "width"),
    ({"schedule": "linear"}, "schedule.*one of step, cosine"),
])  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(change, named):
    with pytest.raises(PluresError, match=named):
        Recipe(**change)


def test_epochs_know_their_phases():
    assert Epochs(prune=7).of("prune") == 7
    with pytest.raises(PluresError, match="'warm'.*pretrain, prune, finetune, train"):
        Epochs().of("warm")
    with pytest.raises(PluresError, match=r"epochs\.train"):
        Epochs(train=-1)


def test_recipes_are_listed_without_torch():
    code = "import sys; from plures.lab.recipes import RECIPES; assert RECIPES; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- the learning rate


def rates(recipe, steps=100, per_epoch=10):
    return [recipe.learning_rate * rate_factor(recipe, step, steps, per_epoch) for step in range(steps)]


def test_steps_fall_at_the_milestones():
    got = rates(Recipe(learning_rate=0.5, schedule="step", milestones=(0.3, 0.7), gamma=0.1))
    assert got == pytest.approx([0.5] * 30 + [0.05] * 40 + [0.005] * 30)


def test_cosine_follows_its_formula_down_to_zero():
    got = rates(Recipe(learning_rate=0.2, schedule="cosine"))
    assert got == pytest.approx([0.1 * (1 + math.cos(math.pi * step / 100)) for step in range(100)])


def test_warm_up_rises_to_the_schedule_and_leaves_the_rest():
    plain = rates(Recipe(schedule="cosine"))
    warm = rates(Recipe(schedule="cosine", warmup=2.0))
    assert warm[20:] == plain[20:]
    assert [w / p for w, p in zip(warm[:20], plain[:20], strict=True)] == pytest.approx([n / 20 for n in range(1, 21)])


def test_wide_resnets_follow_the_mimo_paper() -> None:
    usual = {name: get_recipe("cifar10-wrn").for_method(name) for name in ("batch-ensemble", "mimo", "masksembles")}
    assert {recipe.epochs.train for recipe in usual.values()} == {250}
    assert (usual["batch-ensemble"].members, usual["mimo"].members) == (4, 3)


def test_the_fewer_images_the_more_epochs_up_to_the_least_number_of_steps() -> None:
    recipe = get_recipe("images")
    for images in (20, 60, 173, 240, 1000, 10**5):
        epochs = recipe.epochs_for(images)
        steps = max(1, images // recipe.batch_size) * epochs.train
        assert steps >= recipe.least_steps * 0.99
        assert (epochs == recipe.epochs) == (max(1, images // recipe.batch_size) * recipe.epochs.train >= 400)
    assert all(one.epochs_for(10) == one.epochs for name, one in RECIPES.items() if name != "images")


def test_a_folder_of_ones_own_has_a_recipe_of_its_own() -> None:
    found = parse(["train", "--data", "./birds"])
    assert (found.recipe, found.settings.data, found.settings.together) == ("images", "./birds", True)
    assert parse(["train", "--data=./birds", "--members", "3"]).settings.least_steps == 400
    assert parse(["train", "cifar10-cpu", "--data", "./birds"]).settings.data == "./birds"
    assert parse(["train", "--method", "mimo"]).recipe == "digits"
    words = train_words(found.settings.as_json(), found.method, (), Path("runs/birds"), found.recipe)
    assert words == ["train", "images", "--method", "orthogonal-dropout", "--data", "./birds", "--run", "runs/birds"]
    asked = ["train", "--data", "./birds", "--epochs.train", "5"]
    assert parse(asked).settings.least_steps is None, "as many epochs as asked for"
    both = parse([*asked, "--least-steps", "30"]).settings
    again = parse(train_words(both.as_json(), "mimo", (), Path("run"), "images"))
    assert (again.settings.epochs.train, again.settings.least_steps) == (5, 30)
