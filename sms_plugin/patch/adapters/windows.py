"""Softmax in the windows of an image, with a learned bias and the mask of shifted windows.

Letters: B images, W windows in each, H heads, T positions in a window.
"""

from torch import Tensor

from sms_plugin.modules import ScaledMaskSoftmax


def softmax_in_windows(
    softmax: ScaledMaskSoftmax,
    scores: Tensor,  # (B * W, H, T, T)
    scale: float,
    bias: Tensor,  # (H, T, T) or (1, H, T, T)
    shift_mask: Tensor | None,  # (W, T, T), added
) -> Tensor:  # (B * W, H, T, T)
    """Bias and mask as they are, instead of their sum for every window of every image."""
    if shift_mask is None:
        return softmax(scores, None, scale, bias=bias)
    by_image = scores.unflatten(0, (-1, len(shift_mask)))  # (B, W, H, T, T)
    return softmax(by_image, shift_mask[:, None], scale, bias=bias).flatten(0, 1)
