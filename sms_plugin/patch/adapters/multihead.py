"""`torch.nn.MultiheadAttention`, alone and inside `nn.TransformerEncoder` and `Decoder`.

Letters: N batch, H heads, L queries, S keys, D width of a head, E = H * D.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.registry import register_adapter


class SoftmaxMultiheadAttention(nn.MultiheadAttention):
    """The same module with scale, masks and softmax in one operator, in training and evaluation.

    Masks are the original's: bool, True = ignored, or float, added. It differs where the original
    has three answers: a row in which every key is masked has weights of 0 and finite gradients.
    """

    scaled_mask_softmax: ScaledMaskSoftmax

    @property
    def _qkv_same_embed_dim(self) -> bool:
        """Asked by `nn.TransformerEncoderLayer`, which would otherwise go round this module.

        A property of the class hides the instance's own value, which is there again afterwards.
        """
        return False

    def forward(
        self,
        query: Tensor,  # (L, N, E), (N, L, E) if batch_first, or (L, E)
        key: Tensor,  # the same with S
        value: Tensor,
        key_padding_mask: Tensor | None = None,  # (N, S) or (S,)
        need_weights: bool = True,
        attn_mask: Tensor | None = None,  # (L, S) or (N * H, L, S)
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint about attn_mask
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested:
            return self._forward_nested(query, key, value, key_padding_mask, attn_mask)
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is, and there is no attn_mask")
        is_batched = query.dim() == 3
        # What is one tensor stays one, so that self-attention is one projection.
        first = {id(x): self._batch_first(x, is_batched) for x in (query, key, value)}
        q, k, v = self._project(*(first[id(x)] for x in (query, key, value)))  # (N, L or S, E)
        if not is_batched and key_padding_mask is not None:
            key_padding_mask = key_padding_mask[None]
        k, v, extra = self._append_keys(k, v)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        mask, bias = self._masks(attn_mask, key_padding_mask, q, extra)
        scores = q @ k.transpose(-2, -1)  # (N, H, L, S)
        probs = self.scaled_mask_softmax(scores, mask, self.head_dim**-0.5, bias=bias)
        probs = F.dropout(probs, self.dropout, self.training)
        out = self.out_proj((probs @ v).transpose(1, 2).flatten(2))  # (N, L, E)
        if not self.batch_first and is_batched:
            out = out.transpose(0, 1)
        weights = None
        if need_weights:  # after dropout, as the original gives them
            weights = probs.mean(dim=1) if average_attn_weights else probs
        if is_batched:
            return out, weights
        return out[0], None if weights is None else weights[0]

    def _batch_first(self, x: Tensor, is_batched: bool) -> Tensor:
        if not is_batched:
            return x[None]
        return x if self.batch_first else x.transpose(0, 1)

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        if self.in_proj_weight is None:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        elif query is key and key is value:
            return F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return tuple(
            F.linear(x, weight, bias)
            for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
        )

    def _append_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """With the learned key and the one of zeros, where there are: and how many were added."""
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat([k, self.bias_k.to(k.dtype).expand(len(k), 1, -1)], dim=1)
            v = torch.cat([v, self.bias_v.to(v.dtype).expand(len(v), 1, -1)], dim=1)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        return k, v, extra

    def _masks(
        self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor, extra: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Both as terms of the operator that broadcast to (N, H, L, S).

        Two bool masks are joined; of two others, one is the mask and one the bias. Keys that were
        appended are seen by all.
        """
        N, H, L, _ = q.shape
        if attn_mask is not None:
            expected = (L, attn_mask.shape[-1]), (N * H, L, attn_mask.shape[-1])
            if tuple(attn_mask.shape) not in expected:
                raise RuntimeError(
                    f"attn_mask must be (L, S) or (N * H, L, S), here L = {L} and N * H = {N * H}; "
                    f"got {tuple(attn_mask.shape)}"
                )
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (N, H))
        if padding is not None:
            padding = padding[:, None, None]  # (N, 1, 1, S)
        terms = [F.pad(term, (0, extra)) for term in (attn_mask, padding) if term is not None]
        bools = [term for term in terms if term.dtype == torch.bool]
        floats = [term for term in terms if term.dtype != torch.bool]
        mask = bools[0] | bools[1] if len(bools) == 2 else bools[0] if bools else None
        if mask is None and len(floats) == 2:
            return floats[0], floats[1]
        return mask, floats[0] if floats else None

    def _forward_nested(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
    ) -> tuple[Tensor, None]:
        """Texts of different lengths as `nn.TransformerEncoder` nests them in evaluation."""
        if query is not key or key is not value or not self.batch_first:
            raise RuntimeError("nested tensors are for self-attention with batch_first=True")
        if key_padding_mask is not None or attn_mask is not None:
            raise RuntimeError("nested tensors come without masks")
        lengths = torch.tensor([len(text) for text in query.unbind()], device=query.device)
        padded = query.to_padded_tensor(0.0)  # (N, L, E)
        padding = torch.arange(padded.shape[1], device=query.device) >= lengths[:, None]
        out, _ = self.forward(padded, padded, padded, padding, need_weights=False)
        texts = [text[:length] for text, length in zip(out, lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(texts), None


def _is_unread(module: nn.Module, parent: nn.Module | None) -> bool:
    """Torch's own layers ask for no weights; whoever else calls the module may."""
    return type(parent) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


register_adapter(nn.MultiheadAttention, SoftmaxMultiheadAttention, is_unread=_is_unread)
