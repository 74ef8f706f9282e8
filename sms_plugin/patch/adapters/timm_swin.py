"""The windows of timm's Swin: their bias of relative positions is the operator's `bias`.

Letters: B images, W windows in each, H heads, T positions in a window, D width of a head.
"""

from __future__ import annotations

import inspect

from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from sms_plugin.modules import ScaledMaskSoftmax
from sms_plugin.patch.adapters.windows import softmax_in_windows
from sms_plugin.patch.registry import register_adapter


class SoftmaxTimmWindowAttention(WindowAttention):
    """The same module with scale, bias, mask and softmax in one operator."""

    scaled_mask_softmax: ScaledMaskSoftmax

    def forward(
        self,
        x: Tensor,  # (B * W, T, C)
        mask: Tensor | None = None,  # (W, T, T), added
    ) -> Tensor:  # (B * W, T, C)
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B * W, H, T, D) each
        scores = q @ k.transpose(-2, -1)  # (B * W, H, T, T)
        probs = softmax_in_windows(
            self.scaled_mask_softmax, scores, self.scale, self._get_rel_pos_bias(), mask
        )
        out = (self.attn_drop(probs) @ v).transpose(1, 2).flatten(2)  # (B * W, T, H * D)
        return self.proj_drop(self.proj(out))


_ARGUMENTS = {"self", "x", "mask"}
_PARTS = {"qkv", "attn_drop", "proj", "proj_drop", "softmax"}


def _decline(module: nn.Module, softmax: str) -> str | None:
    """What another version of timm has that this forward does not."""
    unknown = inspect.signature(WindowAttention.forward).parameters.keys() - _ARGUMENTS
    unknown |= module._modules.keys() - _PARTS - {"scaled_mask_softmax"}
    if unknown:
        return f"this version of timm differs in {', '.join(sorted(unknown))}"
    return None


register_adapter(WindowAttention, SoftmaxTimmWindowAttention, decline=_decline)
