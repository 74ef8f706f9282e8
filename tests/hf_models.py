"""Tiny models of Hugging Face transformers, built from a config, and how two of them compare.

Letters: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip(
    "transformers", minversion="4.57", reason="the adapters need pip install 'sms_plugin[hf]'"
)
IS_4 = transformers.__version__.startswith("4.")
transformers.logging.set_verbosity_error()

B, T, VOCAB, LAYERS, HEADS = 3, 9, 40, 2, 4
PADDED = {"left": (0, 2, 4), "right": (0, 3, 1)}  # tokens of each text that are padding

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_IMAGE = {"image_size": 16, "patch_size": 4, "num_channels": 3}


@dataclass(frozen=True)
class Family:
    """How a kind of model is built, what it takes, and where its attention is."""

    model: str
    config: str
    settings: dict[str, Any]
    modules: int  # attention modules
    attention_dropout: str
    other_dropouts: tuple[str, ...] = ()
    takes: str = "text"  # or texts (two), image, audio
    is_causal: bool = False
    has_sdpa: bool = True  # transformers refuses to load the others with it

    def build(self, implementation: str = "eager", dropout: float = 0.0, **settings: Any) -> Any:
        torch.manual_seed(0)
        quiet = dict.fromkeys(self.other_dropouts, 0.0)
        config = getattr(transformers, self.config)(
            **{**self.settings, **quiet, self.attention_dropout: dropout, **settings}
        )
        config._attn_implementation = implementation
        model = getattr(transformers, self.model)(config)
        generator = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if "norm" not in name.lower() and "ln_" not in name:
                nn.init.normal_(weight, std=0.25, generator=generator)
        return model.eval()

    def inputs(self, padding: str | None = None, dtype: torch.dtype = torch.float32) -> dict:
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(3, VOCAB, (B, T), generator=generator)
        if self.takes == "image":
            return {"pixel_values": torch.randn(B, 3, 16, 16, generator=generator).to(dtype)}
        if self.takes == "audio":
            frames = torch.randn(B, 8, 24, generator=generator).to(dtype)
            return {"input_features": frames, "decoder_input_ids": tokens}
        given: dict[str, Tensor] = {"input_ids": tokens}
        if padding is not None:
            given["attention_mask"] = kept_tokens(padding).long()
            given["input_ids"] = tokens.where(kept_tokens(padding), 0)
        if self.takes == "texts":
            given["decoder_input_ids"] = tokens.flip(1)
        elif padding == "left" and self.is_causal:
            given["position_ids"] = (kept_tokens(padding).cumsum(1) - 1).clamp(min=0)
        return given

    def kept_outputs(self, padding: str | None) -> Tensor:
        """Which rows of the output are of tokens, and have a value in every implementation."""
        if padding is None or self.takes != "text":
            return torch.ones(B, 1, dtype=torch.bool)
        return kept_tokens(padding)


def kept_tokens(padding: str) -> Tensor:  # (B, T)
    padded = torch.tensor(PADDED[padding])[:, None]
    position = torch.arange(T)
    return position >= padded if padding == "left" else position < T - padded


FAMILIES = {
    "llama": Family(
        "LlamaForCausalLM",
        "LlamaConfig",
        {**TEXT, "num_key_value_heads": 2},
        LAYERS,
        "attention_dropout",
        is_causal=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "MistralConfig",
        {**TEXT, "num_key_value_heads": 2, "sliding_window": 4, "head_dim": 8},
        LAYERS,
        "attention_dropout",
        is_causal=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **TEXT,
            "num_key_value_heads": 2,
            "sliding_window": 4,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
        },
        LAYERS,
        "attention_dropout",
        is_causal=True,
        has_sdpa=IS_4,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCAB,
            "n_embd": 32,
            "n_layer": LAYERS,
            "n_head": HEADS,
            "n_positions": 32,
            "scale_attn_by_inverse_layer_idx": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        LAYERS,
        "attn_pdrop",
        ("resid_pdrop", "embd_pdrop"),
        is_causal=True,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT, LAYERS, "attention_dropout", is_causal=True
    ),
    "bert": Family(
        "BertModel",
        "BertConfig",
        TEXT,
        LAYERS,
        "attention_probs_dropout_prob",
        ("hidden_dropout_prob",),
    ),
    "esm": Family(
        "EsmModel",
        "EsmConfig",
        {**TEXT, "position_embedding_type": "rotary", "mask_token_id": 39, "token_dropout": False},
        LAYERS,
        "attention_probs_dropout_prob",
        ("hidden_dropout_prob",),
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 8,
            "pad_token_id": 0,
            "eos_token_id": 2,
            "decoder_start_token_id": 0,
        },
        3 * LAYERS,
        "dropout_rate",
        takes="texts",
        has_sdpa=not IS_4,
    ),
    "vit": Family(
        "ViTModel",
        "ViTConfig",
        {key: value for key, value in {**TEXT, **_IMAGE}.items() if "token" not in key},
        LAYERS,
        "attention_probs_dropout_prob",
        ("hidden_dropout_prob",),
        takes="image",
    ),
    "swin": Family(
        "SwinModel",
        "SwinConfig",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 2,
            "drop_path_rate": 0.0,
        },
        4,
        "attention_probs_dropout_prob",
        ("hidden_dropout_prob",),
        takes="image",
        has_sdpa=not IS_4,
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCAB,
            "d_model": 32,
            "encoder_layers": LAYERS,
            "decoder_layers": LAYERS,
            "encoder_attention_heads": HEADS,
            "decoder_attention_heads": HEADS,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "num_mel_bins": 8,
            "max_source_positions": 12,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
            "suppress_tokens": None,
            "begin_suppress_tokens": None,
        },
        3 * LAYERS,
        "attention_dropout",
        ("dropout", "activation_dropout"),
        takes="audio",
    ),
}


def implementations(*names: str) -> list[tuple[str, str]]:
    """Each with those of transformers that it can be loaded with."""
    return [
        (name, implementation)
        for name in names
        for implementation in ("eager", "sdpa")
        if implementation == "eager" or FAMILIES[name].has_sdpa
    ]


DECODERS = [name for name, family in FAMILIES.items() if family.is_causal]


@dataclass(frozen=True)
class Results:
    """What a forward and a backward give, in float64."""

    output: Tensor
    attentions: list[Tensor]
    gradients: dict[str, Tensor]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "output", self.output
        yield from ((f"attention {i}", probs) for i, probs in enumerate(self.attentions))
        yield from self.gradients.items()


def run(model: nn.Module, inputs: dict, kept: Tensor) -> Results:
    """Output and attentions where `kept`, and the gradients of a random loss on the output."""
    model.zero_grad()
    out = model(**inputs, output_attentions=True)
    output = out[0] * kept[..., None].to(out[0].dtype)
    output.backward(
        torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    )
    attentions = [
        probs.detach().double() * (kept[:, None, :, None] if len(kept) == len(probs) else 1)
        for key in ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")
        for probs in out.get(key) or ()
    ]
    gradients = {
        name: weight.grad.double()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    return Results(output.detach().double(), attentions, gradients)


def run_exactly(model: nn.Module, inputs: dict, kept: Tensor) -> Results:
    """`run` of the float64 model, with its softmax in float64 too: eager asks for float32.

    There the masks of float64 overflow, and make a row without a kept key NaN.
    """
    softmax = F.softmax

    def exact_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return softmax(x, dim=dim)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "softmax", exact_softmax)
        return run(model.double(), inputs, kept)


def agree(ours: Results, eager: Results, exact: Results, floor: float) -> list[str]:
    """Where ours is further from the float64 model than three times eager; [] is right.

    In 16 bits the two errors of one tensor in one run differ by up to twice and a bit, either way.
    `floor`: what is allowed besides, of the largest gradient or of the tensor itself. (Some true
    gradients are 0: a bias of the keys changes no softmax.)
    """
    largest = max(float(grad.norm()) for grad in exact.gradients.values())
    pairs = zip(ours.tensors(), eager.tensors(), exact.tensors(), strict=True)
    wrong = []
    for (name, our), (_, theirs), (_, right) in pairs:
        assert our.shape == theirs.shape == right.shape, name
        size = largest if name in exact.gradients else float(right.norm())
        allowed = 3 * float((theirs - right).norm()) + floor * size
        if not float((our - right).norm()) <= allowed:
            wrong.append(f"{name}: {(our - right).norm():.2e}, allowed {allowed:.2e}")
    return wrong


def copied(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    return copy.deepcopy(model).to(dtype)
