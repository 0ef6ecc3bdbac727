"""The version of this package, as its installer wrote it down."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vitrail")
except PackageNotFoundError:  # run from its source, not installed
    __version__ = "unknown"
