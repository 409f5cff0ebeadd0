"""Bad data, on purpose or by accident: one sentence, no traceback, no hang, bounded memory."""

import io
import json
import os
import random
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from plures.errors import PluresError
from plures.lab.data import DataInfo, open_data, read_image

INFO = DataInfo("digits", ["0", "1"], 1, 8, 8, False, [0.5], [0.2])
SEEDED = settings(
    max_examples=100,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
IMAGE = b"P5 2 2 255\n" + bytes(4)


pytestmark = pytest.mark.usefixtures("_own_places")


def refused(action) -> str:
    with pytest.raises(PluresError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    message.encode()  # can be printed
    assert not message.endswith(".")
    return message


def png(width: int, height: int, pixels: bytes | None = None) -> bytes:
    """Write a grey PNG by hand: its head may promise what it likes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = bytes((width + 1) * height) if pixels is None else pixels
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


def parquet(path: Path, images=None, labels=(0, 1), metadata=None, columns=None) -> str:
    images = [{"bytes": IMAGE, "path": None}] * 2 if images is None else images
    table = pa.table(columns or {"image": images, "label": list(labels)})
    if metadata is not None:
        text = metadata if isinstance(metadata, bytes | str) else json.dumps(metadata)
        table = table.replace_schema_metadata({"huggingface": text})
    pq.write_table(table, path)
    return str(path)


def named(names):
    return {"info": {"features": {"label": {"names": names}}}}


# --- tables -----------------------------------------------------------------------------------------------------------

TABLES = {
    "label 2**40": ({"labels": [0, 2**40]}, "label 1099511627776"),
    "nested labels": ({"labels": [[0], [1]]}, "list<"),
    "nested labels with names": ({"labels": [[0], [1]], "metadata": named(["a", "b"])}, "list<"),
    "labels that are tables": ({"labels": [{"a": 1}, {"a": 2}]}, "struct<"),
    "no labels": ({"labels": pa.nulls(2)}, "label None"),
    "labels of bytes": ({"labels": [b"a", b"b"]}, "not one of the 0 classes"),
    "labels between": ({"labels": [0.0, 0.5], "metadata": named(["a", "b"])}, "label 0.5"),
    "metadata no JSON": ({"metadata": b"{"}, "metadata"),
    "metadata no text": ({"metadata": b"\xff\xfe"}, "metadata"),
    "metadata a list": ({"metadata": []}, "metadata"),
    "metadata a number": ({"metadata": 7}, "metadata"),
    "metadata deep": ({"metadata": "[" * 100_000}, "metadata"),
    "info a list": ({"metadata": {"info": [1]}}, "metadata"),
    "features a list": ({"metadata": {"info": {"features": ["label"]}}}, "metadata"),
    "names a word": ({"metadata": named("ab")}, "metadata"),
    "names a table": ({"metadata": named({"a": 0})}, "metadata"),
    "names of lists": ({"metadata": named([["a"], ["b"]])}, "metadata"),
    "names that are half a character": ({"metadata": named(["a", "\ud800"])}, "UTF-8"),
    "too many names": ({"metadata": named(list(range(100_001)))}, "100,001 classes"),
    "no image column": ({"columns": {"label": [0, 1]}}, "image or img"),
    "no columns": ({"columns": {"x": [0, 1]}}, "label or fine_label"),
    "images are numbers": ({"images": [1, 2]}, "no encoded image"),
    "images are nothing": ({"images": pa.nulls(2)}, "no encoded image"),
    "images without bytes": ({"images": [{"other": 1}] * 2}, "no encoded image"),
    "path of a file": ({"images": [{"bytes": None, "path": "nowhere.png"}] * 2}, "no encoded image"),
    "path that is a number": ({"images": [{"bytes": None, "path": 7}] * 2}, "no encoded image"),
    "no rows": ({"images": pa.array([], pa.binary()), "labels": pa.array([], pa.int64())}, "no images"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_bad_table(tmp_path, kind):
    options, words = TABLES[kind]
    name = parquet(tmp_path / "bad.parquet", **options)
    assert words in refused(lambda: open_data(name))


def test_column_twice(tmp_path):
    images, labels = pa.array([IMAGE] * 2), pa.array([0, 1])
    for names in (["image", "image", "label"], ["image", "label", "label"]):
        columns = [images if name == "image" else labels for name in names]
        pq.write_table(pa.Table.from_arrays(columns, names=names), tmp_path / "twice.parquet")
        assert "2 columns called" in refused(lambda: open_data(str(tmp_path / "twice.parquet")))


def test_tables_that_disagree_about_their_classes(tmp_path):
    parquet(tmp_path / "train.parquet", metadata=named(["ant", "bee"]))
    parquet(tmp_path / "test.parquet", metadata=named(["bee", "ant"]))
    assert "have different class names" in refused(lambda: open_data(str(tmp_path)))


@SEEDED
@given(seed=st.integers(0, 2**32), flips=st.integers(1, 30), cut=st.floats(0, 1))
def test_damaged_table_is_refused_or_read(tmp_path, seed, flips, cut):
    file = tmp_path / "damaged.parquet"
    parquet(file, metadata=named(["a", "b"]))
    content, rng = bytearray(file.read_bytes()), random.Random(seed)
    for _ in range(flips):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(content[: round(len(content) * cut)] if seed % 3 == 0 else content)
    try:
        open_data(str(file), validation=0)
    except PluresError as error:
        assert "\n" not in str(error)


# --- folders ----------------------------------------------------------------------------------------------------------


def test_paths_that_are_no_data(tmp_path):
    os.mkfifo(tmp_path / "pipe.parquet")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "folder.parquet").mkdir()
    for name, words in (
        ("/dev/null", "neither a folder nor"),
        ("/dev/zero", "neither a folder nor"),
        (str(tmp_path / "pipe.parquet"), "neither a folder nor"),
        (str(tmp_path / "folder.parquet"), "neither train.parquet"),
        (str(tmp_path / "loop"), "symbolic links"),
        ("x" * 300, "too long"),
        ("./" + "x/" * 5000, "too long"),
        ("a\0b", "null"),
        ("\udcff", "no data set"),
        ("~nobody-of-this-name/birds", "home folder"),
        ("", "no data is given"),
    ):
        assert words in refused(lambda name=name: open_data(name)), name
    refused(lambda: open_data("digits", data_dir="~nobody-of-this-name"))


def test_pipe_among_tables_does_not_keep_us_waiting(tmp_path):
    os.mkfifo(tmp_path / "train.parquet")
    assert "not a regular file" in refused(lambda: open_data(str(tmp_path)))


def test_folders_that_hold_odd_things(tmp_path):
    home = tmp_path / "odd"
    for name in ("ant", "bee"):
        (home / name).mkdir(parents=True)
        (home / name / "1.pgm").write_bytes(IMAGE)
        (home / name / "2.pgm").write_bytes(IMAGE)
    (home / os.fsdecode(b"ant/caf\xe9.pgm")).write_bytes(IMAGE)  # a file's name need not be UTF-8
    assert len(open_data(str(home), validation=0).test) == 1
    for odd, words in (("ant/pipe.png", "not a regular file"), ("ant/gone.png", "No such file")):
        os.mkfifo(home / odd) if "pipe" in odd else (home / odd).symlink_to("nowhere")
        assert words in refused(lambda: open_data(str(home)))
        (home / odd).unlink()
    (home / os.fsdecode(b"caf\xe9")).mkdir()
    (home / os.fsdecode(b"caf\xe9/1.pgm")).write_bytes(IMAGE)
    assert "is not written in UTF-8" in refused(lambda: open_data(str(home)))


def test_unreadable_folder_is_named_and_not_left_out(tmp_path, monkeypatch):
    for name in ("ant", "bee"):
        (tmp_path / "birds" / name).mkdir(parents=True)
        (tmp_path / "birds" / name / "1.pgm").write_bytes(IMAGE)

    def scandir(path, real=os.scandir):
        if Path(path).name == "bee":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)  # permissions do not bind every user
    assert refused(lambda: open_data(str(tmp_path / "birds"))).endswith("bee: Permission denied")


# --- images ---------------------------------------------------------------------------------------------------------


def test_paths_that_are_no_images(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "locked.png").write_bytes(IMAGE)
    with (tmp_path / "sparse.png").open("wb") as file:
        file.truncate(2**40)
    for path, words in (
        (tmp_path / "pipe.png", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        (tmp_path, "not a regular file"),
        (tmp_path / "sparse.png", "sparse.png is too large"),
        ("x" * 5000, "too long"),
        ("a\0b", "null"),
        ("\udcff.png", "No such file"),
    ):
        assert words in refused(lambda path=path: read_image(path, INFO))

    def denied(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    assert refused(lambda: read_image(tmp_path / "locked.png", INFO)).endswith("locked.png: Permission denied")


def test_image_that_is_too_large_is_called_so(tmp_path):
    for width, height in ((100_000, 100_000), (10_000, 10_000), (2**31 - 1, 1)):
        (tmp_path / "large.png").write_bytes(png(width, height, pixels=b""))
        message = refused(lambda: read_image(tmp_path / "large.png", INFO))
        assert "too large: images may have at most 89,478,485 pixels" in message


def test_nothing_but_pixels_is_opened(tmp_path):
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "EPS")  # would be drawn by another program
    (tmp_path / "program.png").write_bytes(stream.getvalue())
    assert "not an image" in refused(lambda: read_image(tmp_path / "program.png", INFO))


def test_image_without_pixels(tmp_path):
    for head in (b"P5 0 0 255\n", b"P5 0 7 255\n", b"P5 7 0 255\n"):
        (tmp_path / "nothing.pgm").write_bytes(head)
        refused(lambda: read_image(tmp_path / "nothing.pgm", INFO))


FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM")


@SEEDED
@given(
    kind=st.sampled_from(FORMATS),
    mode=st.sampled_from(["L", "RGB"]),
    seed=st.integers(0, 2**32),
    flips=st.integers(0, 20),
    cut=st.floats(0, 2),
)
def test_damaged_image_is_refused_or_read(tmp_path, kind, mode, seed, flips, cut):
    stream, rng = io.BytesIO(), random.Random(seed)
    Image.effect_noise((9, 7), 80).convert(mode).save(stream, kind)
    content = bytearray(stream.getvalue())
    for _ in range(flips):
        content[rng.randrange(len(content))] = rng.randrange(256)
    (tmp_path / "damaged.png").write_bytes(content[: round(len(content) * min(cut, 1))])
    try:
        assert read_image(tmp_path / "damaged.png", INFO).shape == (8, 8, 1)
    except PluresError as error:
        assert "\n" not in str(error)


def test_ribbon_is_cut_before_it_is_resized_and_nearly_as_before(tmp_path):
    from plures.lab.data import images

    ribbon = Image.fromarray(np.random.default_rng(0).integers(0, 256, (3, 3000), np.uint8))
    before = np.asarray(images.to_square(ribbon, 16), int)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "MOST_PIXELS", 1000)
        after = np.asarray(images.to_square(ribbon, 16), int)
    assert after.shape == (16, 16)
    assert np.abs(after - before).max() <= 1


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
from plures.errors import PluresError
from plures.lab.data import DataInfo, open_data, read_image
info = DataInfo("birds", ["a"], 3, 224, 256, True, [0.5] * 3, [0.2] * 3)
folder = sys.argv[1]
for name in ("tall.png", "wide.png", "large.png"):
    assert read_image(f"{folder}/birds/ant/{name}", info).shape == (224, 224, 3)
assert open_data(f"{folder}/birds", size=224, validation=0).train.images.shape[1:] == (224, 224, 1)
for name in ("label.parquet", "huge.parquet", "repeated.parquet"):
    try:
        open_data(f"{folder}/{name}", size=8)
        print("accepted")
    except PluresError as error:
        print(error)
"""


def test_memory_is_bounded(tmp_path):
    home = tmp_path / "birds"
    (home / "ant").mkdir(parents=True)
    (home / "ant" / "tall.png").write_bytes(png(1, 60_000))
    (home / "ant" / "wide.png").write_bytes(png(60_000, 1))
    (home / "ant" / "large.png").write_bytes(png(2000, 2000))
    parquet(tmp_path / "label.parquet", labels=[0, 2**40])
    parquet(tmp_path / "huge.parquet", images=[png(2**16, 2**16, b"")] * 2)
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 256, pa.int32()), pa.array([bytes(2**26)]))
    table = pa.table({"image": repeated, "label": [0, 1] * 128})  # 16 GB in a few kilobytes
    options = {"compression": "zstd", "store_schema": False, "dictionary_pagesize_limit": 2**30}
    pq.write_table(table, tmp_path / "repeated.parquet", **options)
    assert (tmp_path / "repeated.parquet").stat().st_size < 10_000
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)], capture_output=True, text=True, env=environment, check=False
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    assert "label 1099511627776" in answer.stdout
    assert "too large" in answer.stdout.splitlines()[1]
    assert "not an image" in answer.stdout.splitlines()[2]
    assert "accepted" not in answer.stdout


# --- what a stranger's config.json may claim --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"size": 10**9},
        {"size": 0},
        {"size": "8"},
        {"size": 8, "cache_size": 4},
        {"channels": 10**6},
        {"mean": [float("nan")]},
        {"mean": ["x"]},
        {"mean": [0.5, 0.5]},
        {"std": [0.0]},
        {"classes": [1, 2]},
    ],
)
def test_preparation_that_makes_no_sense(change):
    refused(lambda: replace(INFO, **change))
