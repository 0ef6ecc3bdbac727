"""`vitrail push`: upload a checkpoint to the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import tyro

from vitrail.commands.options import Json
from vitrail.commands.terminal import say
from vitrail.text import to_json


def push(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OWNER/NAME")],
    /,
    *,
    private: bool = False,
    message: str | None = None,
    licence: str | None = None,
    card: Literal["keep", "replace"] | None = None,
    json_: Json = False,
) -> None:
    """Upload a run or a checkpoint folder to the Hugging Face Hub, with a model card; hf:OWNER/NAME then loads it.

    Only the weights, config.json and the card are uploaded: no logs and no optimizer state, and of local paths only the last part.
    The card is the folder's README.md if it has one, else it is generated (`vitrail info FOLDER --card` shows it). A token that
    may write is needed: `hf auth login`, or HF_TOKEN.

    Example: vitrail push runs/pets my-name/vit-pets --private

    Example: vitrail push vit-b16 my-name/vit-b16 --licence apache-2.0 --message "Trained longer"

    Args:
        folder: A run folder, or a checkpoint folder of Vitrail (`vitrail convert` makes one of other weights).
        name: The repository. It is created if it does not exist.
        private: Create a private repository. The visibility of an existing one is not changed.
        message: The commit message.
        licence: The licence of the weights, as the Hub writes it: apache-2.0, cc-by-nc-4.0, … It is stated in the card.
        card: What to do with a README.md of the repository that was edited by hand: keep or replace it. Default: stop and ask.
        json_: Print JSON.
    """
    from vitrail.checkpoints.push import push as upload

    address = upload(folder, name, private=private, message=message, licence=licence, card=card)
    say(to_json({"url": address, "reference": f"hf:{name}"}) if json_ else f"uploaded to {address}: load it as hf:{name}")
