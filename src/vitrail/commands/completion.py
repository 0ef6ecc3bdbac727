"""`vitrail completion`: shell scripts that complete commands, options and names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import tyro

from vitrail.commands.help import Option, sections_of
from vitrail.commands.table import COMMANDS
from vitrail.commands.terminal import say

Shell = Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="bash|zsh|fish")]


def completion(shell: Shell, /) -> None:
    """Print a script that completes commands, options, and the names of recipes, studies and models in a shell.

    For one session: source <(vitrail completion bash), or vitrail completion fish | source. To keep it: write it to
    ~/.local/share/bash-completion/completions/vitrail (bash), to a file _vitrail in a folder of $fpath (zsh), or to
    ~/.config/fish/completions/vitrail.fish (fish).

    Example: vitrail completion bash > ~/.local/share/bash-completion/completions/vitrail

    Example: vitrail completion zsh > ~/.zfunc/_vitrail

    Args:
        shell: The shell.
    """
    say({"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]())


def words_of(name: str) -> tuple[list[Option], list[str]]:
    """Return the options of a command, and the words that its first argument can be."""
    module, function = COMMANDS[name][0].split(":")
    command: Any = getattr(importlib.import_module(module), function)
    sections = command.sections([]) if hasattr(command, "sections") else sections_of(command)
    options = [option for section in sections for option in section.options if option.flags]
    arguments = _ARGUMENTS.get(name, tuple)()
    return options, [*arguments, *(other.removeprefix(f"{name} ") for other in COMMANDS if other.startswith(f"{name} "))]


def values_of(option: Option) -> list[str]:
    """Return the values of an option that are known without a look at any file."""
    if option.choices:
        return list(option.choices)
    return list(_VALUES.get(option.flags[0].removeprefix("--"), tuple)())


def _recipes() -> Iterable[str]:
    from vitrail.recipes import RECIPES

    return RECIPES


def _studies() -> Iterable[str]:
    from vitrail.study import STUDIES

    return STUDIES


def _weights() -> Iterable[str]:
    from vitrail.checkpoints.pretrained import pretrained_models
    from vitrail.checkpoints.published import published_weights

    return dict.fromkeys([*pretrained_models(), *(one.name for one in published_weights())])


def _models() -> Iterable[str]:
    from vitrail.models import VARIANTS

    return VARIANTS


_CHECKPOINTS = (
    "info", "convert", "export", "serve", "explore", "eval", "reproduce", "fewshot", "probe", "vtab", "predict", "embed", "inspect",
)  # fmt: skip
_ARGUMENTS: dict[str, Callable[[], Iterable[str]]] = {
    **dict.fromkeys(_CHECKPOINTS, _weights),
    **dict.fromkeys(("train", "plan", "data sheet"), _recipes),
    **dict.fromkeys(("study", "study plot"), _studies),
    "models": _models,
    "completion": lambda: ("bash", "zsh", "fish"),
}
_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "from": _weights,
    "recipe": _recipes,
    "model": _models,
    "model.name": _models,
    "device": lambda: ("auto", "cpu", "cuda", "mps"),
    "preprocess": lambda: ("google-vit", "big-vision", "timm", "imagenet", "deit", "cifar"),
}


def _groups() -> dict[str, list[str]]:
    """Return the first words of commands, each with the second words that can follow."""
    groups: dict[str, list[str]] = {}
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        groups.setdefault(first, [])
        groups[first] += [second] if second else []
    return groups


def _bash() -> str:
    groups = _groups()
    commands = [
        f"    {_quoted(first)}) arguments={_quoted(' '.join(rest))} ;;" for first, rest in groups.items() if first not in COMMANDS
    ]
    values: list[str] = []
    for name in COMMANDS:
        options, arguments = words_of(name)
        flags = " ".join(flag for option in options for flag in option.flags)
        commands.append(f"    {_quoted(name)}) options={_quoted(flags)}; arguments={_quoted(' '.join(arguments))} ;;")
        for option in options:
            if found := values_of(option):
                keys = "|".join(_quoted(f"{name} {flag}") for flag in option.flags)
                values.append(f"    {keys}) values={_quoted(' '.join(found))} ;;")
    pairs = "|".join(_quoted(name) for name in COMMANDS if " " in name)
    return _BASH.format(first=" ".join(groups), pairs=pairs, commands="\n".join(commands), values="\n".join(values))


_BASH = """\
# Completion of vitrail for bash; written by `vitrail completion bash`.
_vitrail() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
  local command="${{COMP_WORDS[1]}}" options="" arguments="" values=""
  if (( COMP_CWORD == 1 )); then
    COMPREPLY=($(compgen -W "{first} --help --version" -- "$current"))
    return
  fi
  if (( COMP_CWORD > 2 )); then
    case "$command ${{COMP_WORDS[2]}}" in
      {pairs}) command="$command ${{COMP_WORDS[2]}}" ;;
    esac
  fi
  case "$command" in
{commands}
  esac
  case "$command $previous" in
{values}
  esac
  if [[ -n "$values" ]]; then
    COMPREPLY=($(compgen -W "$values" -- "$current"))
  elif [[ "$current" == -* ]]; then
    COMPREPLY=($(compgen -W "$options" -- "$current"))
  else
    COMPREPLY=($(compgen -W "$arguments" -- "$current") $(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _vitrail vitrail"""


def _zsh() -> str:
    """Let zsh run the functions of bash, which it can."""
    head = "#compdef vitrail\n# Completion of vitrail for zsh; written by `vitrail completion zsh`."
    script = _bash().partition("\n")[2]
    return f"{head}\nautoload -U +X bashcompinit && bashcompinit\n{script}"


def _fish() -> str:
    lines = ["# Completion of vitrail for fish; written by `vitrail completion fish`."]
    groups = _groups()
    for first in groups:
        text = COMMANDS.get(first, ("", f"{', '.join(groups[first])}"))[1]
        lines.append(f"complete -c vitrail -n __fish_use_subcommand -a {_quoted(first)} -d {_quoted(text)}")
    for name in COMMANDS:
        first, _, second = name.partition(" ")
        seen = f"__fish_seen_subcommand_from {first}"
        if second:
            lines.append(f"complete -c vitrail -n {_quoted(seen)} -a {_quoted(second)} -d {_quoted(COMMANDS[name][1])}")
            seen += f"; and __fish_seen_subcommand_from {second}"
        options, arguments = words_of(name)
        own = [word for word in arguments if word not in groups[first]]
        if own:
            lines.append(f"complete -c vitrail -n {_quoted(seen)} -a {_quoted(' '.join(own))}")
        for option in options:
            values = values_of(option)
            known = f" -x -a {_quoted(' '.join(values))}" if values else " -r" if option.metavar else ""
            about = _quoted(option.text.partition(". ")[0].rstrip("."))
            for flag in option.flags:
                kind = f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                lines.append(f"complete -c vitrail -n {_quoted(seen)} {kind}{known} -d {about}")
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "'\\''") + "'"
