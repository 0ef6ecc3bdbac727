"""The commands, one file each: they parse options and print results; the other packages do the work."""
