"""Random augmentation of training images, per image on the CPU or batched on the GPU."""

from vitrail.data.augment.spec import LEVELS as LEVELS
from vitrail.data.augment.spec import Augment as Augment
from vitrail.data.augment.spec import augment_level as augment_level
