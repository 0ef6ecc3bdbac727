"""Augmentation: what is done to training images by chance, on the CPU or batched on the GPU."""

from vitrail.data.augment.spec import LEVELS as LEVELS
from vitrail.data.augment.spec import Augment as Augment
from vitrail.data.augment.spec import augment_level as augment_level
