"""A mistyped option or key is answered with what there is to choose from."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import sys
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from train.config import CONF_DIR, Config


class OverrideError(ValueError):
    """An override that names no group, option or key."""


def exit_on_mistakes(arguments: Sequence[str], schema: type[Config] = Config) -> None:
    """End with status 2 and the choices when an override is mistyped.

    Args:
        arguments: the command line without the program; what is no override is left to Hydra.
        schema: of the settings.
    """
    try:
        check_overrides(arguments, schema)
    except OverrideError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)


def check_overrides(arguments: Sequence[str], schema: type[Config] = Config) -> None:
    """Raise OverrideError with the choices for the first override that is mistyped."""
    sweep = bool({"-m", "--multirun"} & set(arguments))
    texts = [a for a in arguments if not a.startswith("-") and ("=" in a or a.startswith("~"))]
    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            raise OverrideError(
                f"{text!r} can't be read: a value with '=', ',', quotes or letters beyond ASCII "
                f"needs quotes of its own, as in 'key=\"a=b\"'\n{error}"
            ) from error
        if override.package is None and override.key_or_group.split(".")[0] != "hydra":
            _check(override, text, sweep, schema)


def _check(override: Override, text: str, sweep: bool, schema: type[Config]) -> None:
    key = override.key_or_group
    if key.startswith("hydra/"):
        return
    groups = {folder.name: _options(folder) for folder in CONF_DIR.iterdir() if folder.is_dir()}
    if schema is Config:
        groups.pop("experiment")  # of A/B runs
    if key in groups:
        _check_group(override, text, groups[key], sweep)
    else:
        _check_key(override, schema)


def _options(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _check_group(override: Override, text: str, options: list[str], sweep: bool) -> None:
    key, choices = override.key_or_group, ", ".join(options)
    if override.is_delete() or override.is_add():
        raise OverrideError(f"{text}: {key} is always set; write {key}=<one of: {choices}>")
    if override.is_sweep_override() and not sweep:
        raise OverrideError(f"{text}: one run takes one of: {choices}; for several, add -m")
    for value in override.get_value_string().split(","):
        if value not in options and (not override.is_sweep_override() or value.isidentifier()):
            raise OverrideError(
                f"{key}={value}: {key} must be one of: {choices}{_did_you_mean(value, options)}"
            )


def _check_key(override: Override, schema: type[Config]) -> None:
    key, so_far = override.key_or_group, ""
    known: type = schema
    for part in key.split("."):
        if not dataclasses.is_dataclass(known):
            raise OverrideError(f"{key}: {so_far.rstrip('.')} has no parts")
        names = typing.get_type_hints(known)
        if part not in names:
            where = f"in {so_far.rstrip('.')}" if so_far else "here"
            raise OverrideError(
                f"{so_far}{part}: there is no such key {where}; there are: "
                f"{', '.join(names)}{_did_you_mean(part, names)}"
            )
        known, so_far = names[part], f"{so_far}{part}."
    if typing.get_origin(known) is list and not override.is_sweep_override():
        _check_list(override, typing.get_args(known)[0])
    if isinstance(known, enum.EnumMeta) and not override.is_sweep_override():
        value, options = override.get_value_string(), list(known.__members__)
        if value not in options:
            raise OverrideError(
                f"{key}={value}: {key} must be one of: {', '.join(options)}"
                f"{_did_you_mean(value, options)}"
            )


def _check_list(override: Override, kind: type) -> None:
    key, value = override.key_or_group, override.value()
    if not isinstance(value, list):
        raise OverrideError(f"{key}={value}: {key} takes a list; write '{key}=[{value}]'")
    options = list(kind.__members__) if isinstance(kind, enum.EnumMeta) else []
    for item in value:
        if options and str(item) not in options:
            raise OverrideError(
                f"{key}: {item} is none of {', '.join(options)}{_did_you_mean(str(item), options)}"
            )


def _did_you_mean(word: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""
