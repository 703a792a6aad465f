"""Computes log-probabilities and entropies from hidden states and the LM head without materializing all logits.

Shape suffixes: B rows, T token positions, K candidate tokens of a position, H hidden size, V vocabulary, N unmasked
positions. n and v are the rows and columns of one tile of the logits.

The logits [N, V] are computed and reduced tile by tile. The backward pass computes them again. Memory holds the hidden
states, the weight, their gradients, and one tile. Recomputation increases the cost from three to four matrix products.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flowrl.algorithms.logprobs import Context
from flowrl.algorithms.masking import masked_tokens

_TILE_SIDES = {"cpu": (4096, 2048)}
"""Rows and columns of a tile by device type. The CPU tile has 32 MiB in float32. Smaller tiles would fit CPU caches
better, but would synchronize threads more often."""

_OTHER_TILE_SIDES = (4096, 8192)
"""Rows and columns of a tile on accelerators: 128 MiB in float32."""

_LOWEST_LOGPROB = -1e4
"""Finite replacement for -inf. Its exp is exactly 0 in float32 and float64, and 0 times this value is 0 instead of
NaN.
"""


def logprobs_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    num_targets: int | None = None,
    compiled: bool = False,
) -> Tensor:
    """Returns the log-probability of each token given the preceding tokens, from hidden states and the LM head.

        logits = hidden weight^T + bias      with a softcap:  logits = softcap tanh(logits / softcap)

    Args:
        hidden: [B, T, H], input of the LM head (after the last norm), of any float dtype.
        weight: [V, H], full (unsharded) weight of the head, of the same dtype.
        tokens: int64 [B, T], input of the model, in [0, V) where the mask is true. Or int64 [B, T, K], several
            candidate tokens of each position.
        mask: bool [B, T], tokens to compute.
        bias: [V] of the same dtype, or None. -inf excludes a token (without a softcap).
        temperature: > 0, sampling temperature of the rollout.
        softcap: > 0, bound of the logits before the temperature (30 for Gemma 2). None disables it.
        num_targets: number of true values of the mask after column 0, if the caller knows it. None: it is read from the
            device, so that the host waits for all earlier operations.
        compiled: whether torch.compile fuses the operations on a tile, which then reads and writes it fewer times. It
            compiles once for each head, and the results differ from those without it by rounding.
    Returns: a tensor of the shape of `tokens`, in at least float32. Where the mask is true, column t is
        `log_softmax(logits[:, t - 1] / temperature)[tokens[:, t]]`. It is NaN for an invalid token id. Column 0 and
        masked columns are 0.
    Raises: ValueError for mismatched shapes or dtypes, a temperature or softcap <= 0, or a mask that is not bool.

    The result is differentiable once in hidden, weight and bias. Gradients accumulate in float32 or float64.
    torch.autocast applies as in the model's head.

    Softcap: Gemma Team 2024, https://arxiv.org/abs/2408.00118. Recomputed tiles: Wijmans et al. 2024,
    https://arxiv.org/abs/2411.09009. Deviation: tiles with small probabilities are not skipped, so gradients are exact.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    head = _checked_head(hidden, weight, tokens, mask, bias, temperature, softcap, compiled)
    return _apply(hidden, tokens, mask, head, num_targets, with_entropy=False)[0]


def logprobs_and_entropy_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    num_targets: int | None = None,
    compiled: bool = False,
) -> tuple[Tensor, Tensor]:
    """Returns `logprobs_from_hidden` and the entropy of each token's distribution, from the same logits.

    Arguments and errors are those of `logprobs_from_hidden`.

    Returns: a tuple (logprobs, of the shape of `tokens`, and entropy [B, T] in nats), differentiable once. Both are 0
        in column 0 and where the mask is false. A detached entropy adds no cost to the backward pass.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    head = _checked_head(hidden, weight, tokens, mask, bias, temperature, softcap, compiled)
    return _apply(hidden, tokens, mask, head, num_targets, with_entropy=True)


@torch.no_grad()
def top_tokens_from_hidden(
    hidden: Tensor,
    weight: Tensor,
    mask: Tensor,
    *,
    k: int,
    bias: Tensor | None = None,
    softcap: float | None = None,
    num_targets: int | None = None,
) -> Tensor:
    """Returns the ids of the k most likely tokens of each position, from hidden states and the LM head.

    Args:
        k: in [1, V].
        hidden, weight, mask, bias, softcap, num_targets: as in `logprobs_from_hidden`.
    Returns: int64 [B, T, k], in descending order of probability. Column 0 and masked columns are 0.
    Raises: ValueError for mismatched shapes or dtypes, or a k out of range.
    """
    hidden, weight, bias = _autocast(hidden, weight, bias)
    head = _checked_head(hidden, weight, mask, mask, bias, 1.0, softcap)
    if not 1 <= k <= len(weight):
        raise ValueError(f"k is {k}, but must be in [1, {len(weight)}], the size of the vocabulary")
    index_N = _target_index(mask, num_targets)
    hidden_NH = _states_before(hidden, index_N)
    logits_NK = hidden_NH.new_empty((len(hidden_NH), 0), dtype=torch.promote_types(hidden.dtype, torch.float32))
    ids_NK = torch.empty_like(logits_NK, dtype=torch.int64)
    for columns in _tiles(len(weight), _sides(hidden)[1]):
        tops = [
            _tile_logits(hidden_NH[rows], head.tile(columns)).topk(min(k, columns.stop - columns.start))
            for rows in _tiles(len(hidden_NH), _sides(hidden)[0])
        ]
        if not tops:
            break
        candidates_NK = torch.cat([logits_NK, torch.cat([top.values for top in tops])], dim=-1)
        candidate_ids_NK = torch.cat([ids_NK, torch.cat([top.indices for top in tops]) + columns.start], dim=-1)
        logits_NK, chosen_NK = candidates_NK.topk(min(k, candidates_NK.shape[1]))
        ids_NK = candidate_ids_NK.gather(-1, chosen_NK)
    return _at_targets(ids_NK, index_N, mask.shape)


class _Head(NamedTuple):
    """The LM head, or the part of it for a tile, with its temperature and softcap."""

    weight_VH: Tensor
    bias_V: Tensor | None
    temperature: float
    softcap: float | None
    compiled: bool = False
    """Whether the operations on a tile are compiled."""

    def tile(self, columns: slice) -> "_Head":
        """Returns the part of the head for the v vocabulary entries `columns`."""
        bias_v = None if self.bias_V is None else self.bias_V[columns]
        return self._replace(weight_VH=self.weight_VH[columns], bias_V=bias_v)


def _tile_logits(hidden_nH: Tensor, head: _Head) -> Tensor:
    """Returns the logits [n, v] of n hidden states.

    The logits include softcap and temperature. The result is a new tensor in at least float32. The matrix product uses
    the dtype of the model.
    """
    logits_nv = torch.nn.functional.linear(hidden_nH, head.weight_VH, head.bias_V)
    logits_nv = logits_nv.to(torch.promote_types(logits_nv.dtype, torch.float32))
    if head.softcap is not None:
        logits_nv = logits_nv.div_(head.softcap).tanh_().mul_(head.softcap)
    return logits_nv if head.temperature == 1 else logits_nv.div_(head.temperature)


_Gradients = tuple[Tensor | None, ...]
"""Gradients with respect to the arguments of the forward pass."""


class _HiddenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        tokens_NK: Tensor,
        settings: tuple[float, float | None, bool],
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.head_settings = settings
        head = _Head(weight_VH, bias_V, *settings)
        logsumexp_N, chosen_NK, entropy_N = _reduce(head, hidden_NH, tokens_NK, with_entropy)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, tokens_NK, logsumexp_N, entropy_N)
        ctx.set_materialize_grads(False)
        return chosen_NK - logsumexp_N[:, None], entropy_N

    # The decorator hides the signature from the type checker.
    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad_logprobs_NK: Tensor | None, grad_entropy_N: Tensor | None) -> _Gradients:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden_NH, weight_VH, bias_V, tokens_NK, logsumexp_N, entropy_N = ctx.saved_tensors
        head = _Head(weight_VH, bias_V, *ctx.head_settings)
        if grad_logprobs_NK is None:
            grad_logprobs_NK = torch.zeros_like(tokens_NK, dtype=logsumexp_N.dtype)

        gradient = _compiled(_tile_gradient) if head.compiled else _tile_gradient

        def tile(rows: slice, columns: slice) -> Tensor:
            entropies = None if grad_entropy_N is None else (entropy_N[rows], grad_entropy_N[rows])
            index_nK, is_inside_nK = _tile_index(tokens_NK[rows], columns)
            grad_nK = torch.where(is_inside_nK, grad_logprobs_NK[rows], 0)
            grad_n1 = grad_logprobs_NK[rows].sum(-1, keepdim=True)
            arguments = (index_nK, grad_nK, grad_n1, logsumexp_N[rows], entropies)
            return gradient(hidden_NH[rows], head.tile(columns), *arguments)

        # Saved tensors have the dtype of the forward pass; autocast would change the recomputed logits.
        with torch.autocast(hidden_NH.device.type, enabled=False):
            return *_gradients(head, hidden_NH, logsumexp_N.dtype, tile, ctx.needs_input_grad), None, None, None


def _gradients(
    head: _Head,
    hidden_NH: Tensor,
    dtype: torch.dtype,
    tile: Callable[[slice, slice], Tensor],
    needs_grad: tuple[bool, ...],
) -> _Gradients:
    """Returns the gradients of hidden states, weight and bias, accumulated in `dtype` over the tiles of the logits."""
    weight_VH, (needs_hidden, needs_weight, needs_bias) = head.weight_VH, needs_grad[:3]
    grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=dtype) if needs_hidden else None
    grad_weight_VH = torch.empty_like(weight_VH) if needs_weight else None
    grad_bias_V = weight_VH.new_empty(len(weight_VH)) if needs_bias else None
    for columns in _tiles(len(weight_VH), _sides(hidden_NH)[1]):
        weight_vH = weight_VH[columns]
        grad_weight_vH = torch.zeros_like(weight_vH, dtype=dtype) if needs_weight else None
        grad_bias_v = weight_vH.new_zeros(len(weight_vH), dtype=dtype) if needs_bias else None
        for rows in _tiles(len(hidden_NH), _sides(hidden_NH)[0]):
            grad_nv = tile(rows, columns)
            if grad_bias_v is not None:
                grad_bias_v += grad_nv.sum(0)
            grad_nv = grad_nv.to(hidden_NH.dtype)
            if grad_hidden_NH is not None:
                _add_product(grad_hidden_NH[rows], grad_nv, weight_vH)
            if grad_weight_vH is not None:
                _add_product(grad_weight_vH, grad_nv.T, hidden_NH[rows])
        if grad_weight_VH is not None and grad_weight_vH is not None:
            grad_weight_VH[columns] = grad_weight_vH
        if grad_bias_V is not None and grad_bias_v is not None:
            grad_bias_V[columns] = grad_bias_v
    return None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype), grad_weight_VH, grad_bias_V


def _reduce(head: _Head, hidden_NH: Tensor, tokens_NK: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (logsumexp [N], logits of the tokens [N, K], entropy [N]). Without `with_entropy`, the entropy is 0."""
    dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
    logsumexp_N = hidden_NH.new_full(tokens_NK.shape[:1], -torch.inf, dtype=dtype)
    # Ids outside the vocabulary keep NaN. Checking ids would synchronize with the device.
    chosen_NK, entropy_N = torch.full_like(tokens_NK, torch.nan, dtype=dtype), torch.zeros_like(logsumexp_N)
    reduce_tile = _compiled(_reduce_tile) if head.compiled else _reduce_tile
    for columns in _tiles(len(head.weight_VH), _sides(hidden_NH)[1]):
        own = head.tile(columns)
        for rows in _tiles(len(hidden_NH), _sides(hidden_NH)[0]):
            index_nK, is_inside_nK = _tile_index(tokens_NK[rows], columns)
            known = (logsumexp_N[rows], entropy_N[rows])
            reduced = reduce_tile(hidden_NH[rows], own, index_nK, *known, with_entropy)
            chosen_nK, logsumexp_N[rows], entropy_N[rows] = reduced
            chosen_NK[rows] = torch.where(is_inside_nK, chosen_nK, chosen_NK[rows])
    return logsumexp_N, chosen_NK, entropy_N


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:  # Any: of a tile
    """Returns a function of a tile that is compiled at its first call.

    All sizes are dynamic, because the last tiles of rows and vocabulary are smaller.
    """
    return torch.compile(function, dynamic=True)


def _reduce_tile(
    hidden_nH: Tensor,
    head: _Head,
    index_nK: Tensor,
    before_n: Tensor,
    entropy_n: Tensor,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the logits of the tokens [n, K], and logsumexp and entropy [n] over this tile and those before it.

    Args:
        hidden_nH: hidden states.
        head: the head of this tile.
        index_nK: column of each token in the tile.
        before_n: logsumexp over the tiles before.
        entropy_n: entropy over the tiles before.
        with_entropy: whether to compute the entropy. Otherwise, it is returned unchanged.
    """
    logits_nv = _tile_logits(hidden_nH, head)
    chosen_nK = logits_nv.gather(-1, index_nK)
    # A tile of excluded tokens has the maximum -inf, for which -inf - (-inf) would be NaN.
    max_n = logits_nv.amax(-1).clamp_(min=torch.finfo(logits_nv.dtype).min)
    shifted_nv = logits_nv.sub_(max_n[:, None])
    weights_nv = shifted_nv.exp() if with_entropy else shifted_nv.exp_()
    # The largest logit contributes exactly 1, so this changes only tiles of excluded tokens.
    sum_n = weights_nv.sum(-1).clamp_(min=1)
    tile_n = max_n + sum_n.log()
    logsumexp_n = torch.logaddexp(before_n, tile_n)
    if not with_entropy:
        return chosen_nK, logsumexp_n, entropy_n
    mean_n = weights_nv.mul_(shifted_nv.clamp_(min=_LOWEST_LOGPROB)).sum(-1) / sum_n
    # Chain rule of entropy: the choice between previous tiles and this one, then within each.
    share_before_n, share_n = (before_n - logsumexp_n).exp(), (tile_n - logsumexp_n).exp()
    between_n = torch.special.entr(share_before_n) + torch.special.entr(share_n)
    return chosen_nK, logsumexp_n, between_n + share_before_n * entropy_n + share_n * (sum_n.log() - mean_n)


def _tile_gradient(
    hidden_nH: Tensor,
    head: _Head,
    index_nK: Tensor,
    grad_nK: Tensor,
    grad_n1: Tensor,
    logsumexp_n: Tensor,
    entropies: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Returns the gradient [n, v] of the raw logits, before softcap and temperature.

        d log p(v) / d z_u = [u = v] - p_u    d H / d z_u = -p_u (log p_u + H)    log p(v) = z_v - logsumexp(z)

    Args:
        hidden_nH: hidden states.
        head: the head of this tile.
        index_nK: column of each token in the tile.
        grad_nK: gradient of the log-probability of each token, and 0 for tokens outside of the tile.
        grad_n1: sum of the gradients of all tokens of a position.
        logsumexp_n: logsumexp over all tiles.
        entropies: (H, gradient of H). None without entropy.
    """
    temperature, softcap = head.temperature, head.softcap
    logits_nv = _tile_logits(hidden_nH, head)
    # Derivative of the capped logits with respect to the uncapped ones.
    slope_nv = None if softcap is None else (logits_nv * (temperature / softcap)).square_().neg_().add_(1)
    grad_nK, grad_n1 = grad_nK / temperature, grad_n1 / temperature
    logprobs_nv = logits_nv.sub_(logsumexp_n[:, None])
    if entropies is None:
        grad_nv = logprobs_nv.exp_().mul_(-grad_n1)
    else:
        entropy_n1, grad_entropy_n1 = entropies[0][:, None], entropies[1][:, None] / temperature
        probs_nv = logprobs_nv.exp()
        surprise_nv = logprobs_nv.clamp_(min=_LOWEST_LOGPROB).add_(entropy_n1)
        grad_nv = surprise_nv.mul_(-grad_entropy_n1).sub_(grad_n1).mul_(probs_nv)
    grad_nv.scatter_add_(-1, index_nK, grad_nK)
    return grad_nv if slope_nv is None else grad_nv.mul_(slope_nv)


def _tile_index(tokens_nK: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Returns each token's column in the tile, and whether the tile contains the token, each [n, K]. Clamps the column
    to the tile.
    """
    index_nK = tokens_nK - columns.start
    last = columns.stop - columns.start - 1
    return index_nK.clamp(0, last), (index_nK >= 0) & (index_nK <= last)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left @ right to `total`, which may have a higher precision than `left` and `right`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _tiles(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _sides(tensor: Tensor) -> tuple[int, int]:
    return _TILE_SIDES.get(tensor.device.type, _OTHER_TILE_SIDES)


def _apply(
    hidden: Tensor, tokens: Tensor, mask: Tensor, head: _Head, num_targets: int | None, *, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """Returns log-probabilities, of the shape of `tokens`, and entropies [B, T], computed where the mask is true."""
    index_N = _target_index(mask, num_targets)
    tokens_BTK = tokens[..., None] if tokens.dim() == 2 else tokens
    tokens_NK = tokens_BTK.flatten(0, 1).index_select(0, index_N)
    logprobs_NK, entropy_N = _HiddenLogprobs.apply(
        _states_before(hidden, index_N),
        head.weight_VH,
        head.bias_V,
        tokens_NK,
        (head.temperature, head.softcap, head.compiled),
        with_entropy,
    )
    logprobs = _at_targets(logprobs_NK, index_N, mask.shape).view(tokens.shape)
    return logprobs, _at_targets(entropy_N, index_N, mask.shape)


def _target_index(mask: Tensor, num_targets: int | None) -> Tensor:
    """Returns the index, int64 [N], of each target in the flattened mask [B, T]: true values after column 0."""
    is_target_BT = mask.clone()
    is_target_BT[:, :1].zero_()  # the first token has no preceding logits
    if num_targets is None:
        return is_target_BT.flatten().nonzero().squeeze(1)
    return is_target_BT.flatten().nonzero_static(size=num_targets).squeeze(1)


def _states_before(hidden: Tensor, index_N: Tensor) -> Tensor:
    """Returns the hidden state before each target, [N, H]."""
    return hidden.flatten(0, 1).index_select(0, index_N - 1)


def _at_targets(values: Tensor, index_N: Tensor, shape: torch.Size) -> Tensor:
    """Returns a tensor [B, T, ...] of zeros with the values [N, ...] at the targets. `shape` is [B, T]."""
    return values.new_zeros(shape.numel(), *values.shape[1:]).index_copy(0, index_N, values).unflatten(0, shape)


def _autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts the three tensors to the dtype of torch.autocast if it is enabled. float64 tensors keep their dtype."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    hidden, weight = (x if x.dtype == torch.float64 else x.to(dtype) for x in (hidden, weight))
    return hidden, weight, bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)


def _checked_head(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    mask: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    compiled: bool = False,
) -> _Head:
    masked_tokens(mask)
    if tokens.shape[:2] != mask.shape or tokens.dim() > 3:
        raise ValueError(f"tokens have shape {list(tokens.shape)}, but the mask has {list(mask.shape)}")
    if hidden.dim() != 3 or hidden.shape[:2] != mask.shape:
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, but must be [B, T, H] with [B, T] = {list(mask.shape)}"
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[2]:
        raise ValueError(f"weight has shape {list(weight.shape)}, but must be [V, H] with H = {hidden.shape[2]}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {list(bias.shape)}, but must be [V] = {list(weight.shape[:1])}")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but hidden is {hidden.dtype}: convert one of them")
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}, but must be above 0")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, but must be above 0, or None to disable it")
    return _Head(weight, bias, temperature, softcap, compiled)
