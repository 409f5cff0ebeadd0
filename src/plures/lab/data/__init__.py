"""Image data sets behind one small interface.

from plures.lab.data import Augment, batches, open_data

data = open_data("cifar10", data_dir="data", size=16)
for images, labels in batches(data.train, 128, seed=0, epoch=3, augment=Augment(crop=2, flip=True)):
    ...
"""

from plures.lab.data.cache import cache_folder
from plures.lab.data.dataset import Data, open_data
from plures.lab.data.images import read_image
from plures.lab.data.split import Augment, DataInfo, DataSplit, batches, steps

__all__ = [
    "Augment",
    "Data",
    "DataInfo",
    "DataSplit",
    "batches",
    "cache_folder",
    "open_data",
    "read_image",
    "steps",
]
