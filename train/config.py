"""Names and types of every setting. The values are in conf/*.yaml, and in no second place."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

CONF_DIR = Path(__file__).resolve().parents[1] / "conf"


class _Choice(enum.Enum):
    def __str__(self) -> str:
        return self.name  # as in YAML, also where a folder's name is made of it


class Softmax(_Choice):
    """Which softmax the attention of the model runs."""

    native = "native"  # the chain of train/models/attention.py as it stands
    fused = "fused"  # sms_plugin.scaled_mask_softmax
    compiled = "compiled"  # torch.compile of the chain
    sdpa = "sdpa"  # the whole attention core by F.scaled_dot_product_attention


class ModelKind(_Choice):
    """What the model sees and predicts."""

    decoder = "decoder"  # the next token from those before it
    encoder = "encoder"  # masked tokens from both sides, in texts of different lengths


class Positions(_Choice):
    """How the model is told where a token stands."""

    learned = "learned"
    rotary = "rotary"
    relative = "relative"  # T5's bias, shared by all layers


class Source(_Choice):
    """Where tokens come from."""

    stdlib = "stdlib"  # the sources of Python's standard library
    text = "text"  # a file or a folder of the user's
    random = "random"  # nowhere: for runs that are about speed alone


class TokenKind(_Choice):
    """What text is cut into."""

    bytes = "bytes"
    bpe = "bpe"  # pieces of a byte-level BPE that is trained on the text


class LoggerName(_Choice):
    """A logger of Lightning's, beside metrics.csv."""

    csv = "csv"
    tensorboard = "tensorboard"


class Profiler(_Choice):
    """What else is recorded. A run with it is no measurement of speed."""

    none = "none"
    torch = "torch"  # a trace of a few steps, and a table of their kernels


@dataclass
class SoftmaxConfig:
    name: Softmax = MISSING


@dataclass
class ModelConfig:
    kind: ModelKind = MISSING
    n_layer: int = MISSING
    n_head: int = MISSING
    n_embd: int = MISSING
    positions: Positions = MISSING
    dropout: float = MISSING  # of embeddings, attention and residual branches
    learning_rate: float = MISSING  # peak; here since it goes with the model's size


@dataclass
class DataConfig:
    source: Source = MISSING
    path: str | None = MISSING  # of source=text
    tokenizer: TokenKind = MISSING
    vocab_size: int = MISSING  # 256 for bytes
    seq_len: int = MISSING  # tokens that a training example predicts
    min_len: int = MISSING  # of an encoder's examples: lengths are drawn evenly up to seq_len
    batch_size: int = MISSING  # examples a step, on each device
    val_batches: int = MISSING  # evenly spaced batches of the validation part
    val_fraction: float = MISSING  # of the files, by the hash of their names; of each, if few
    num_workers: int = MISSING


@dataclass
class OptimizerConfig:
    weight_decay: float = MISSING  # of matrices only
    beta1: float = MISSING
    beta2: float = MISSING
    warmup_steps: int = MISSING
    final_lr_ratio: float = MISSING  # where the cosine ends, as a share of the peak


@dataclass
class TrainerConfig:
    max_steps: int = MISSING  # optimizer steps
    val_every: int = MISSING  # optimizer steps from one validation to the next
    accelerator: str = MISSING
    strategy: str = MISSING  # of Lightning: auto, ddp, fsdp
    devices: int = MISSING
    precision: str = MISSING
    accumulate_grad_batches: int = MISSING
    gradient_clip_val: float = MISSING
    timer_warmup_steps: int = MISSING  # left out of the timing summary


@dataclass
class Config:
    softmax: SoftmaxConfig = MISSING
    model: ModelConfig = MISSING
    data: DataConfig = MISSING
    trainer: TrainerConfig = MISSING
    optimizer: OptimizerConfig = MISSING
    seed: int = MISSING
    compile: bool = MISSING  # the model, by torch.compile
    profiler: Profiler = MISSING
    loggers: list[LoggerName] = MISSING
    ckpt_path: str | None = MISSING  # to go on from: a file, or last
    run_dir: str = MISSING


AnyConfig = TypeVar("AnyConfig", bound=Config)


def register_schema(schema: type[Config] = Config) -> None:
    """Make the dataclasses the schema of conf/config.yaml (its first default)."""
    ConfigStore.instance().store(name="schema", node=schema)


def to_config(node: DictConfig, schema: type[AnyConfig]) -> AnyConfig:
    """The composed configuration as a checked dataclass; missing values raise."""
    config = OmegaConf.to_object(node)
    assert isinstance(config, schema)
    return config


def load_config(overrides: list[str]) -> Config:
    """Compose conf/ for a caller in Python; `run_dir=...` must be among `overrides`."""
    return compose_config("config", Config, overrides)


def compose_config(name: str, schema: type[AnyConfig], overrides: list[str]) -> AnyConfig:
    """The same of conf/`name`.yaml, whose settings are those of `schema`."""
    register_schema(schema)
    with initialize_config_dir(str(CONF_DIR), version_base="1.3"):
        return to_config(compose(name, overrides=overrides), schema)
