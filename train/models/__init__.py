"""The models that can be trained."""

from train.models.attention import Attention, AttentionCore
from train.models.relative_bias import RelativePositionBias
from train.models.transformer import Transformer

__all__ = ["Attention", "AttentionCore", "RelativePositionBias", "Transformer"]
