"""What a run trains on: text as tokens in a memory map, or random tokens."""

from train.data.batches import TokenData, TrainBatches, ValBatches, token_data
from train.data.corpus import Corpus, load_corpus
from train.data.masking import MaskedBatch, MaskedBatches
from train.data.tokens import RandomTokens, TokenFile

__all__ = [
    "Corpus",
    "MaskedBatch",
    "MaskedBatches",
    "RandomTokens",
    "TokenData",
    "TokenFile",
    "TrainBatches",
    "ValBatches",
    "load_corpus",
    "token_data",
]
