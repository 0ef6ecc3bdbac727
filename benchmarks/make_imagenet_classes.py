"""Write the class names of ImageNet-1k and ImageNet-21k that are part of the package.

    python benchmarks/make_imagenet_classes.py            # writes src/vitrail/data/imagenet_classes.tsv.gz

The WordNet IDs in the order of the outputs, and WordNet's words of each, are taken from the lists in the timm package. One line per
class: flags, WordNet ID, words. The first 21,843 lines are ImageNet-21k in the order of Google's weights; classes that only other
sets have follow. Flags: `k` in ImageNet-1k (whose order is that of the WordNet IDs), `a` in ImageNet-A, `r` in ImageNet-R, `-` only
in 21k.
"""

from __future__ import annotations

import gzip
from importlib.resources import files
from pathlib import Path

TARGET = Path(__file__).parents[1] / "src" / "vitrail" / "data" / "imagenet_classes.tsv.gz"
NOTICE = "# Words of WordNet 3.0, Copyright 2006 by Princeton University. All rights reserved. See docs/checkpoints.md.\n"
# Both of these have the single word "crane" in WordNet.
OVERRIDES = {"n02012849": "crane (bird)", "n03126707": "crane (machine)"}


def main() -> None:
    lists = files("timm.data") / "_info"

    def lines(name: str) -> list[str]:
        return (lists / name).read_text(encoding="utf-8").splitlines()

    words = dict(line.split("\t") for line in lines("imagenet_synset_to_lemma.txt")) | OVERRIDES
    google, thousand = lines("imagenet21k_goog_synsets.txt"), lines("imagenet_synsets.txt")
    flagged = {"k": set(thousand), "a": set(lines("imagenet_a_synsets.txt")), "r": set(lines("imagenet_r_synsets.txt"))}
    rows = []
    for wordnet_id in [*google, *(one for one in thousand if one not in set(google))]:
        flags = "".join(flag for flag, ids in flagged.items() if wordnet_id in ids)
        rows.append(f"{flags or '-'}\t{wordnet_id}\t{words[wordnet_id]}\n")
    TARGET.write_bytes(gzip.compress((NOTICE + "".join(rows)).encode(), mtime=0))
    print(f"{TARGET}: {len(rows):,} classes, {TARGET.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
