"""The settings of a training run inside those of a comparison."""

from __future__ import annotations

from pathlib import Path

from omegaconf import OmegaConf

from sms_plugin.callbacks.whole_file import whole_file
from train.config import Config


def write_arm_config(cfg: Config, path: Path) -> Path:
    """Write the part of `cfg` that a training run has as YAML; the path again."""
    values = OmegaConf.to_container(OmegaConf.structured(cfg))
    assert isinstance(values, dict)
    kept = {name: values[name] for name in Config.__dataclass_fields__}
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as unfinished:
        unfinished.write_text(OmegaConf.to_yaml(OmegaConf.create(kept)))
    return path
