"""`python -m vitrail` is `vitrail`, so that `torchrun -m vitrail` works unchanged."""

from vitrail.cli import main

if __name__ == "__main__":
    main()
