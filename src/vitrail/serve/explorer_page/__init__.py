"""The files of the explorer page."""
