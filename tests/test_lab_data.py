import dataclasses
import io
import json
import math
import os
import sys
from pathlib import Path

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from plures.errors import PluresError
from plures.lab.data import Augment, DataInfo, batches, cache_folder, open_data, read_image, steps

pytestmark = pytest.mark.usefixtures("_own_places")


def encoded(pixels, format="PNG"):
    stream = io.BytesIO()
    Image.fromarray(np.asarray(pixels, np.uint8)).save(stream, format)
    return stream.getvalue()


def random_images(count, *shape, seed=0):
    rng = np.random.default_rng(seed)
    return [encoded(rng.integers(0, 256, shape)) for _ in range(count)]


def write_parquet(file, images, labels, names=("ant", "bee"), image="image", label="label", **columns):
    cells = [{"bytes": image, "path": None} for image in images]
    table = pa.table({image: cells, label: labels, **columns})
    if names is not None:
        features = {image: {"_type": "Image"}, label: {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file, row_group_size=7)


def write_folder(folder, images, labels, names=("ant", "bee"), suffix=".png"):
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = folder / names[label] / f"{number:03}{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(image)


@pytest.fixture
def bugs(tmp_path):
    """A data directory with a colour set of 40 training and 10 test images of 8 x 8 pixels, classes 0 and 1."""
    home = tmp_path / "data"
    write_parquet(home / "bugs" / "train.parquet", random_images(40, 8, 8, 3), [0, 1] * 20)
    write_parquet(home / "bugs" / "test.parquet", random_images(10, 8, 8, 3, seed=1), [0] * 5 + [1] * 5)
    return home


def loaded(split, *args, **options):
    found = list(batches(split, *args, **options))
    return torch.cat([images for images, _ in found]), torch.cat([labels for _, labels in found])


# --- what is opened ---------------------------------------------------------------------------------------------------


def test_digits_need_nothing_and_are_always_split_alike():
    data = open_data(validation=0)
    assert (len(data.train), len(data.validation), len(data.test)) == (1347, 0, 450)
    assert (data.info.channels, data.info.size, list(data.info.classes)) == (1, 8, [str(digit) for digit in range(10)])
    assert data.train.images.shape == (1347, 8, 8, 1)
    assert data.train.images.dtype == np.uint8
    assert (data.train.images.min(), data.train.images.max()) == (0, 255)
    counts = np.bincount(data.test.labels)
    assert counts.min() >= 43
    assert counts.max() <= 46
    assert open_data(validation=0, seed=5).fingerprint == data.fingerprint  # no choice was made by the seed


def test_digits_are_those_that_scikit_learn_loads():
    pixels, labels = load_digits(return_X_y=True)
    data = open_data(validation=0)
    every = np.concatenate([data.train.images, data.test.images]).reshape(-1, 64)
    expected = np.rint(pixels * (255 / 16)).astype(np.uint8)
    order, other = np.lexsort(every.T), np.lexsort(expected.T)
    assert np.array_equal(every[order], expected[other])
    assert np.array_equal(np.concatenate([data.train.labels, data.test.labels])[order], labels[other])


def test_splits_have_pixels_labels_and_names(bugs):
    data = open_data("bugs", data_dir=bugs, validation=0)
    assert data.test.labels.tolist() == [0] * 5 + [1] * 5
    assert data.test.labels.dtype == np.int64
    assert list(data.info.classes) == ["ant", "bee"]
    with Image.open(io.BytesIO(random_images(40, 8, 8, 3)[7])) as image:
        np.testing.assert_array_equal(data.train.images[7], np.asarray(image))


def test_data_directory_may_come_from_the_environment(bugs, monkeypatch):
    monkeypatch.setenv("PLURES_DATA", str(bugs))
    assert len(open_data("bugs").test) == 10


def test_paths_to_folders_and_files_are_names_too(bugs):
    assert len(open_data(str(bugs / "bugs")).test) == 10
    only_test = open_data(str(bugs / "bugs" / "test.parquet"))
    assert (len(only_test.train), len(only_test.test)) == (0, 10)
    only_train = open_data(str(bugs / "bugs" / "train.parquet"), validation=0)
    assert (len(only_train.train), len(only_train.test)) == (32, 8)  # a fifth is held out


def test_built_in_name_is_not_a_folder_that_happens_to_be_here():
    Path("digits").mkdir()  # such as a run folder
    assert len(open_data("digits").test) == 450


def test_local_folder_goes_before_the_built_in_data(tmp_path):
    write_parquet(tmp_path / "digits" / "test.parquet", random_images(3, 9, 9), [0, 1, 0])
    assert open_data("digits", data_dir=tmp_path).info.size == 9


def test_sharded_parquet_in_a_subfolder_of_a_clone(tmp_path):
    home = tmp_path / "clone" / "data"
    images = random_images(6, 4, 4)
    write_parquet(home / "train-00000-of-00002.parquet", images[:3], [0, 1, 0])
    write_parquet(home / "train-00001-of-00002.parquet", images[3:], [1, 1, 1])
    write_parquet(home / "test-00000-of-00001.parquet", images, [1] * 6)
    write_parquet(home / "extra-00000-of-00001.parquet", images, [0] * 6)
    data = open_data(str(tmp_path / "clone"), validation=0)
    assert data.train.labels.tolist() == [0, 1, 0, 1, 1, 1]


def test_columns_of_cifar100_the_fine_label_counts(tmp_path):
    names = ("apple", "bear", "cup")
    file = tmp_path / "c" / "train.parquet"
    images = random_images(3, 4, 4, 3)
    write_parquet(file, images, [2, 0, 1], names, image="img", label="fine_label", coarse_label=[0, 0, 0])
    file.rename(file.with_name("test.parquet"))
    data = open_data(str(tmp_path / "c"))
    assert data.test.labels.tolist() == [2, 0, 1]
    assert list(data.info.classes) == list(names)


def test_labels_without_names(tmp_path):
    write_parquet(tmp_path / "words" / "test.parquet", random_images(3, 4, 4), ["dog", "cat", "dog"], names=None)
    words = open_data(str(tmp_path / "words"), validation=0)
    assert (list(words.info.classes), words.test.labels.tolist()) == (["cat", "dog"], [1, 0, 1])
    write_parquet(tmp_path / "numbers" / "train.parquet", random_images(2, 4, 4), [2, 0], names=None)
    assert open_data(str(tmp_path / "numbers"), validation=0).info.classes == ("0", "1", "2")


def test_validation_split_stands_in_for_a_missing_test_split(tmp_path):
    write_parquet(tmp_path / "t" / "train.parquet", random_images(20, 4, 4), [0, 1] * 10)
    write_parquet(tmp_path / "t" / "valid.parquet", random_images(6, 4, 4, seed=1), [0, 1] * 3)
    data = open_data(str(tmp_path / "t"), validation=4)
    assert (len(data.train), len(data.validation), len(data.test)) == (16, 4, 6)
    write_parquet(tmp_path / "t" / "test.parquet", random_images(5, 4, 4, seed=2), [0] * 5)
    data = open_data(str(tmp_path / "t"), validation=4)  # its own validation images are kept
    assert (len(data.train), len(data.validation), len(data.test)) == (20, 6, 5)


def test_image_folder_and_parquet_give_the_same_images(tmp_path):
    images, labels = random_images(12, 6, 6, 3), [0] * 5 + [1] * 7
    for split in ("train", "test"):
        write_parquet(tmp_path / "parquet" / f"{split}.parquet", images, labels)
        write_folder(tmp_path / "folder" / split, images, labels)
    (tmp_path / "folder" / "train" / "ant" / "notes.txt").write_text("not an image")
    one = open_data(str(tmp_path / "parquet"))
    two = open_data(str(tmp_path / "folder"))
    assert one.fingerprint == two.fingerprint
    assert np.array_equal(one.train.images, two.train.images)
    assert one.info.classes == two.info.classes
    assert one.train.labels.tolist() == two.train.labels.tolist()


@pytest.mark.parametrize("kind", ["class folders", "a folder of tables", "a table"])
def test_without_test_images_a_fifth_is_held_out_always_the_same(tmp_path, caplog, kind):
    images, labels, plain = random_images(40, 5, 5), [0] * 20 + [1] * 20, tmp_path / "plain"
    if kind == "class folders":
        write_folder(plain, images, labels)
    elif kind == "a folder of tables":
        write_parquet(plain / "train.parquet", images, labels)
    else:
        plain = tmp_path / "plain.parquet"
        write_parquet(plain, images, labels)
    data = open_data(str(plain), validation=0)
    assert (len(data.train), list(data.info.classes), np.bincount(data.test.labels).tolist()) == (
        32,
        ["ant", "bee"],
        [4, 4],
    )
    assert "8 of its 40 training images are held out" in caplog.text
    assert sorted([*data.train.rows, *data.test.rows]) == list(range(40))
    for options in ({"seed": 7}, {"limit": 10}, {"validation": 8}):
        other = open_data(str(plain), **{"validation": 0, **options})
        assert np.array_equal(other.test.rows, data.test.rows)
        assert not set(other.test.rows) & {*other.train.rows, *other.validation.rows}
    unfamiliar = open_data(str(plain), like=data.info)  # nothing is trained on these
    assert (len(unfamiliar.train), len(unfamiliar.validation), len(unfamiliar.test)) == (0, 0, 40)
    write_folder(tmp_path / "single", random_images(1, 5, 5), [0])
    with pytest.raises(PluresError, match="single image"):
        open_data(str(tmp_path / "single"))


def test_hub_data_are_read_as_they_were_downloaded(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(hub_id, *, repo_type, allow_patterns, **_):
        calls.append((hub_id, repo_type, allow_patterns))
        (tmp_path / "cropped_digits").mkdir(exist_ok=True)
        for split in ("train", "test"):
            file = tmp_path / "cropped_digits" / f"{split}-00000-of-00001.parquet"
            write_parquet(file, random_images(300, 4, 4, 3), [0, 1] * 150, names=["no", "yes"])
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    data = open_data("svhn")
    assert calls == [("ufldl-stanford/svhn", "dataset", "cropped_digits*.parquet")]
    assert (list(data.info.classes), len(data.test), data.test.labels[:3].tolist()) == (["no", "yes"], 300, [0, 1, 0])
    assert open_data("svhn").fingerprint == data.fingerprint


# --- what is refused --------------------------------------------------------------------------------------------------


def test_without_network_one_sentence_says_where_to_put_the_data(tmp_path, monkeypatch):
    def unreachable(*args, **options):
        raise OSError("Name or service not known\nand much more noise")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(PluresError) as caught:
        open_data("cifar10", data_dir=tmp_path / "mine")
    message = str(caught.value)
    assert str(tmp_path / "mine" / "cifar10") in message
    assert "uoft-cs/cifar10" in message
    assert "\n" not in message
    assert "noise" not in message
    assert caught.value.__suppress_context__
    with pytest.raises(PluresError, match="PLURES_DATA"):
        open_data("cifar10")


@pytest.mark.parametrize(
    ("name", "words"), [("mnst", "mnist"), ("./nowhere", "nowhere"), ("/no/such/folder", "no/such/folder")]
)
def test_unknown_names(name, words):
    with pytest.raises(PluresError, match=words):
        open_data(name)


def test_folders_that_hold_no_data(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(PluresError, match="neither"):
        open_data(str(tmp_path / "empty"))
    (tmp_path / "broken.parquet").write_text("no")
    with pytest.raises(PluresError, match=r"broken\.parquet"):
        open_data(str(tmp_path / "broken.parquet"))
    write_parquet(tmp_path / "other.parquet", random_images(2, 4, 4), [0, 1], image="photo")
    with pytest.raises(PluresError, match="image or img"):
        open_data(str(tmp_path / "other.parquet"))
    write_parquet(tmp_path / "secret.parquet", random_images(2, 4, 4), [0, -1])
    with pytest.raises(PluresError, match="row 1 of .* label -1"):
        open_data(str(tmp_path / "secret.parquet"))


def test_class_of_the_test_folder_that_training_does_not_know(tmp_path):
    write_folder(tmp_path / "f" / "train", random_images(2, 4, 4), [0, 1])
    write_folder(tmp_path / "f" / "test", random_images(2, 4, 4), [0, 1], names=("ant", "images"))
    with pytest.raises(PluresError, match="images"):
        open_data(str(tmp_path / "f"))


@pytest.mark.parametrize("damage", [b"this is no image", random_images(1, 20, 20, 3)[0][:200]])
def test_damaged_image_is_named(tmp_path, damage):
    write_folder(tmp_path / "f", random_images(3, 20, 20, 3), [0, 1, 1])
    (tmp_path / "f" / "bee" / "broken.png").write_bytes(damage)
    with pytest.raises(PluresError, match=r"broken\.png"):
        open_data(str(tmp_path / "f"))


def test_without_a_place_for_the_cache_images_are_decoded_each_time(tmp_path, monkeypatch, caplog):
    usual = open_data("digits").fingerprint
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PLURES_CACHE", str(tmp_path / "file"))
    assert open_data("digits").fingerprint == usual
    assert caplog.text.count("choose another folder with PLURES_CACHE") == 1


@pytest.mark.parametrize(
    "options",
    [
        {"validation": 5000},
        {"validation": -1},
        {"limit": 0},
        {"size": 0},
        {"cache_size": 9},
        {"seed": -1},
        {"validation": math.nan},
        {"validation": math.inf},
        {"validation": 2.5},
        {"size": 10**9},
        {"size": 2.5},
        {"seed": 0.5},
        {"limit": 0.5},
        {"size": 4, "cache_size": 10**9},
    ],
)
def test_numbers_that_make_no_sense(options):
    with pytest.raises(PluresError):
        open_data("digits", **options)


# --- preparation ------------------------------------------------------------------------------------------------------


def test_exact_factors_are_averaged(bugs):
    full, half = (open_data("bugs", data_dir=bugs, size=size) for size in (None, 4))
    blocks = full.test.images.reshape(10, 4, 2, 4, 2, 3).astype(float).mean((2, 4))
    assert np.abs(half.test.images - blocks).max() <= 0.5
    assert half.info.size == 4


def test_photographs_of_different_sizes_need_a_size(tmp_path):
    photographs = [encoded(np.full((20, 30, 3), 9)), encoded(np.full((40, 25, 3), 7))]
    write_folder(tmp_path / "p" / "test", photographs, [0, 1])
    with pytest.raises(PluresError, match="size="):
        open_data(str(tmp_path / "p"))
    data = open_data(str(tmp_path / "p"), size=10)
    assert data.test.images.shape == (2, 10, 10, 3)
    assert data.test.images[:, 0, 0, 0].tolist() == [9, 7]


def test_middle_of_the_longer_side_is_kept(tmp_path):
    wide = np.zeros((10, 30, 3))
    wide[:, 10:20] = 255
    write_folder(tmp_path / "w" / "test", [encoded(wide)], [0])
    data = open_data(str(tmp_path / "w"), size=5)
    assert data.test.images[0, :, 1:4].min() == 255


def test_one_colour_image_makes_all_rgb(tmp_path):
    grey, colour = random_images(1, 6, 6), random_images(1, 6, 6, 3)
    write_folder(tmp_path / "grey", grey * 2, [0, 1])
    assert open_data(str(tmp_path / "grey"), validation=0).info.channels == 1
    write_folder(tmp_path / "mixed" / "test", grey + colour, [0, 1])
    mixed = open_data(str(tmp_path / "mixed"))
    assert mixed.info.channels == 3
    assert (mixed.test.images[0] == mixed.test.images[0][:, :, :1]).all()


def test_transparent_is_white_and_turned_photographs_stand_upright(tmp_path):
    clear = np.zeros((6, 6, 4))
    write_folder(tmp_path / "clear" / "test", [encoded(clear)], [0])
    assert open_data(str(tmp_path / "clear")).test.images.min() == 255
    image = Image.fromarray(np.vstack([np.full((8, 16, 3), 250), np.zeros((8, 16, 3))]).astype(np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    stream = io.BytesIO()
    image.save(stream, "JPEG", exif=exif, quality=95)
    write_folder(tmp_path / "turned" / "test", [stream.getvalue()], [0], suffix=".jpg")
    images = open_data(str(tmp_path / "turned")).test.images[0]
    assert images[:6].max() < 60
    assert images[-6:].min() > 190


def test_deep_pixels_are_refused_and_not_clipped(tmp_path):
    stream = io.BytesIO()
    Image.fromarray(np.full((4, 4), 3000, np.uint16)).save(stream, "PNG")
    write_folder(tmp_path / "deep", [stream.getvalue()], [0])
    with pytest.raises(PluresError, match="8 bits"):
        open_data(str(tmp_path / "deep"))


def test_constants_come_from_the_training_images_alone(bugs):
    data = open_data("bugs", data_dir=bugs, validation=0.25)
    train = torch.from_numpy(data.train.images).double() / 255
    mean, std = torch.tensor(data.info.mean), torch.tensor(data.info.std)
    torch.testing.assert_close(mean.double(), train.mean((0, 1, 2)), rtol=0, atol=1e-6)
    torch.testing.assert_close(std.double(), train.std((0, 1, 2), correction=0), rtol=0, atol=1e-6)
    images, _ = loaded(data.train, 7, shuffle=False)
    assert images.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(images.std((0, 2, 3), correction=0), torch.ones(3))
    assert images.is_contiguous(memory_format=torch.channels_last)
    expected = (torch.from_numpy(data.train.images).permute(0, 3, 1, 2) / 255 - mean[:, None, None]) / std[
        :, None, None
    ]
    torch.testing.assert_close(data.info.normalise(torch.from_numpy(data.train.images)), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(PluresError, match="uint8"):
        data.info.normalise(images)


def test_validation_is_carved_by_class_from_train(bugs):
    whole = open_data("bugs", data_dir=bugs, validation=0)
    data = open_data("bugs", data_dir=bugs, validation=0.2, seed=3)
    assert np.bincount(data.validation.labels).tolist() == [4, 4]
    assert sorted([*data.train.rows, *data.validation.rows]) == whole.train.rows.tolist()
    assert (data.test.images == whole.test.images).all()
    again, other = (open_data("bugs", data_dir=bugs, validation=0.2, seed=seed) for seed in (3, 4))
    assert again.fingerprint == data.fingerprint
    assert other.fingerprint != data.fingerprint
    assert other.validation.rows.tolist() != data.validation.rows.tolist()


def test_limit_takes_equally_many_of_each_class(tmp_path):
    labels = [0] * 30 + [1] * 10 + [2] * 3
    for split in ("train", "test"):
        write_parquet(tmp_path / "u" / f"{split}.parquet", random_images(43, 4, 4), labels, names=("a", "b", "c"))
    assert np.bincount(open_data(str(tmp_path / "u"), limit=9, validation=0).train.labels).tolist() == [3, 3, 3]
    uneven = open_data(str(tmp_path / "u"), limit=17, validation=0)
    assert np.bincount(uneven.train.labels).tolist() == [7, 7, 3]
    carved = open_data(str(tmp_path / "u"), limit=20, validation=4)
    assert (len(carved.train), len(carved.validation)) == (16, 4)


def test_data_with_a_test_split_only_are_prepared_like_other_data(bugs, tmp_path):
    write_parquet(tmp_path / "data" / "odd" / "test.parquet", random_images(5, 9, 9), [0, 1, 0, 1, 0])
    known = open_data("bugs", data_dir=bugs)
    odd = open_data("odd", data_dir=bugs, like=known.info)
    assert (odd.info.channels, odd.info.size) == (3, 8)
    assert odd.info.mean == known.info.mean
    images, labels = loaded(odd.test, 2, shuffle=False)
    assert images.shape == (5, 3, 8, 8)
    assert labels.tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(PluresError, match="odd has no train images"):
        batches(odd.train, 4)
    with pytest.raises(PluresError, match="like="):
        loaded(open_data("odd", data_dir=bugs).test, 2)


def test_info_survives_json(bugs):
    info = open_data("bugs", data_dir=bugs).info
    assert DataInfo(**json.loads(json.dumps(dataclasses.asdict(info)))) == info


# --- the cache --------------------------------------------------------------------------------------------------------


def cache_files(tmp_path):
    return sorted((tmp_path / "cache").glob("*.npy"))


def test_images_are_decoded_once(bugs, monkeypatch):
    first = open_data("bugs", data_dir=bugs)
    monkeypatch.setattr("plures.lab.data.cache.decode", lambda *_: pytest.fail("decoded again"))
    again = open_data("bugs", data_dir=bugs)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train.images, first.train.images)


def test_changed_source_is_decoded_again_whatever_its_size_and_time(bugs):
    file = bugs / "bugs" / "train.parquet"
    state, first = file.stat(), open_data("bugs", data_dir=bugs)
    write_parquet(file, random_images(40, 8, 8, 3, seed=9), [0, 1] * 20)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    second = open_data("bugs", data_dir=bugs)
    assert second.fingerprint != first.fingerprint
    assert not np.array_equal(second.train.images, first.train.images)


@pytest.mark.parametrize("damage", ["truncate", "head", "remove", "empty", "other"])
def test_damaged_cache_is_written_again(bugs, tmp_path, damage):
    before = open_data("bugs", data_dir=bugs, validation=0).train.images
    (file,) = cache_files(tmp_path)
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "other":
        np.save(file, np.zeros(3))
    else:
        file.write_bytes({"truncate": content[:-100], "head": b"\0" + content[1:], "empty": b""}[damage])
    np.testing.assert_array_equal(open_data("bugs", data_dir=bugs, validation=0).train.images, before)
    assert file.read_bytes() == content


def test_cache_of_the_system_is_used_unless_another_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "system"))
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("PLURES_CACHE")
    assert cache_folder().is_relative_to(tmp_path if sys.platform == "linux" else Path.home())
    assert cache_folder().name == "plures" or sys.platform == "win32"
    monkeypatch.setenv("PLURES_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(PluresError, match="home folder"):
        cache_folder()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_evaluation_sees_every_image_once_in_order():
    data = open_data("digits")
    found = list(batches(data.test, 64, shuffle=False))
    assert [len(labels) for _, labels in found] == [64] * 7 + [2]
    assert torch.cat([labels for _, labels in found]).tolist() == data.test.labels.tolist()
    assert len(found) == steps(data.test, 64) == 8


def test_epoch_is_a_function_of_seed_and_epoch_and_leaves_the_global_generator_alone():
    data = open_data("digits")
    options = {"augment": Augment(crop=1, flip=True), "seed": 4}
    state = torch.get_rng_state()
    one, labels = loaded(data.train, 100, epoch=2, **options)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    two, _ = loaded(data.train, 100, epoch=2, **options)
    assert torch.equal(one, two)
    for alone in ({"augment": None}, {"shuffle": False, "augment": Augment(crop=1)}):  # order, then augmentation
        first, next_epoch, other_seed = (
            loaded(data.train, 100, epoch=epoch, seed=seed, **alone)[0] for epoch, seed in ((2, 4), (3, 4), (2, 5))
        )
        assert not torch.equal(first, next_epoch)
        assert not torch.equal(first, other_seed)
    assert sorted(labels.tolist()) == sorted(data.train.labels.tolist())


def test_drop_last_drops_but_never_everything():
    data = open_data("digits", validation=0)
    assert [len(labels) for _, labels in batches(data.train, 1000, drop_last=True)] == [1000]
    with pytest.raises(PluresError, match="larger than"):
        batches(data.train, 2000, drop_last=True)


# --- augmentation -----------------------------------------------------------------------------------------------------


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_crops_are_shifted_images_with_zeros_outside():
    images = (1 + torch.rand(200, 3, 6, 6)).to(memory_format=torch.channels_last)
    changed = Augment(crop=2)(images, 6, generator())
    assert changed.is_contiguous(memory_format=torch.channels_last)
    padded = torch.nn.functional.pad(images, (2, 2, 2, 2))
    seen = set()
    for number in range(200):
        places = [
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(padded[number, :, y : y + 6, x : x + 6], changed[number])
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 25


def test_flip_mirrors_half_of_the_images():
    images = torch.rand(400, 1, 5, 5)
    changed = Augment(flip=True)(images, 5, generator())
    mirrored = (changed == images.flip(3)).flatten(1).all(1)
    kept = (changed == images).flatten(1).all(1)
    assert bool((mirrored ^ kept).all())
    assert 150 < int(mirrored.sum()) < 250


def test_larger_cache_is_cut_to_the_middle_or_at_random(bugs):
    data = open_data("bugs", data_dir=bugs, size=4, cache_size=8, validation=0)
    assert data.train.images.shape == (40, 8, 8, 3)
    images, _ = loaded(data.train, 40, shuffle=False)
    middle = data.info.normalise(torch.from_numpy(data.train.images[:, 2:6, 2:6].copy()))
    torch.testing.assert_close(images, middle)
    cropped, _ = loaded(data.train, 40, shuffle=False, augment=Augment())
    assert cropped.shape == images.shape
    assert not torch.equal(cropped, images)


def test_augmentation_that_makes_no_sense():
    with pytest.raises(PluresError, match="crop"):
        Augment(crop=-1)


# --- single images --------------------------------------------------------------------------------------------------


def test_read_image_prepares_a_file_as_the_data_were(bugs, tmp_path):
    file = tmp_path / "one.png"
    file.write_bytes(random_images(10, 8, 8, 3, seed=1)[4])
    for options in ({}, {"size": 4}, {"size": 4, "cache_size": 6}):
        data = open_data("bugs", data_dir=bugs, **options)
        expected, _ = loaded(data.test, 10, shuffle=False)
        pixels = read_image(file, data.info)
        assert torch.equal(data.info.normalise(torch.from_numpy(pixels)[None])[0], expected[4])
    file.write_bytes(random_images(1, 30, 20)[0])  # grey, and of another size
    assert read_image(file, data.info).shape == (4, 4, 3)


def test_read_image_brings_any_image_to_the_data_and_says_so(tmp_path, caplog):
    digits = open_data("digits")
    original = digits.test.images[3, :, :, 0]
    enlarged = np.kron(original, np.ones((4, 4), np.uint8))  # 32 x 32: averaging gives back the 8 x 8
    for name, pixels, said in (
        ("as it is", original, ""),
        ("enlarged", enlarged, "brought from 32 x 32 to 8 x 8 pixels"),
        ("coloured", np.stack([original] * 3, -1), "converted to grey"),
        ("both", np.stack([enlarged] * 3, -1), "converted to grey and brought from 32 x 32 to 8 x 8 pixels"),
    ):
        caplog.clear()
        (tmp_path / f"{name}.png").write_bytes(encoded(pixels))
        np.testing.assert_array_equal(read_image(tmp_path / f"{name}.png", digits.info)[:, :, 0], original)
        assert (f"{name}.png was {said}, as" in caplog.text) if said else not caplog.text
    (tmp_path / "28.png").write_bytes(random_images(1, 28, 30, 3)[0])
    assert read_image(tmp_path / "28.png", digits.info).shape == (8, 8, 1)


def test_fingerprints_and_constants_of_the_last_version():
    for config in (Path(__file__).parent / "data" / "v0.1" / "runs").glob("*/config.json"):
        stored = json.loads(config.read_text())["data"]
        data = open_data("digits", limit=200, validation=50)
        assert data.fingerprint == stored.pop("fingerprint")
        assert data.info == DataInfo(**stored)
