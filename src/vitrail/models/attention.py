"""Self-attention, full and axial, and attention pooling.

Each kind computes its output with torch's `scaled_dot_product_attention` (see `sdpa`). `with_weights` gives the same output,
with the matrix softmax(qkᵀ/√d) itself, computed from the same q and k; inspection uses it.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrail.models.config import Pair, ViTConfig
from vitrail.models.layers import Mlp

_BACKENDS = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled,
    SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled,
}
"""All but cuDNN's: its backward pass gave NaN for 64 tokens on an H200 where these did not, and it is no faster (docs/log.md)."""


class Attention(nn.Module):
    """Multi-head self-attention over all tokens (equation 2)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.qkv_bias)
        self.q_norm = _head_norm(config) if config.qk_norm else None
        self.k_norm = _head_norm(config) if config.qk_norm else None
        self.out = nn.Linear(config.width, config.width)
        self.dropout = config.attention_dropout

    def forward(self, x: Tensor, bias: Tensor | None = None, num_queries: int | None = None, *grid: Pair) -> Tensor:
        """With `num_queries` only for so many of the first tokens, which must be prefix tokens: these attend to all tokens."""
        q, k, v = self._split(x)
        bias = None if bias is None else bias[..., :num_queries, :]
        return self._merge(self._attend(q[:, :, :num_queries], k, v, bias, *grid))

    def with_weights(self, x: Tensor, bias: Tensor | None = None, *grid: Pair) -> tuple[Tensor, Tensor]:
        """Return the output, and the attention [batch, head, query, key] that produced it. Without dropout."""
        q, k, v = self._split(x)
        weights = attention_weights(q, k, self._with_mask(bias, x, *grid))
        return self._merge(weights.to(v.dtype) @ v), weights

    def scores(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return qkᵀ/√d [batch, head, query, key] with the bias, before softmax; −inf where a query may not look."""
        q, k, _ = self._split(x)
        return _scores(q, k, self._with_mask(bias, x))

    def _with_mask(self, bias: Tensor | None, x: Tensor, *grid: Pair) -> Tensor | None:
        return bias

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [batch, head, token, channel], as views into one matmul's output: nothing is copied.

        With `qk_norm` queries and keys are normalised, and are tensors of their own.
        """
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.q_norm is not None:
            q = self.q_norm(q).to(v.dtype)  # under autocast norms return float32
        if self.k_norm is not None:
            k = self.k_norm(k).to(v.dtype)
        return q, k, v

    def _merge(self, x: Tensor) -> Tensor:
        return self.out(x.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *grid: Pair) -> Tensor:
        # The kernel does not know about eval mode: dropout must be switched off here, or inference is random.
        dropout = self.dropout if self.training else 0.0
        if q.requires_grad and q.dtype is torch.bfloat16 and q.device.type == "cpu" and type(q) is Tensor:
            # On CPUs torch's backward pass of attention is slower in bf16 than in float32. (Fake tensors stand for a GPU's.)
            with torch.autocast("cpu", enabled=False):
                return sdpa(q.float(), k.float(), v.float(), bias, dropout).to(q.dtype)
        return sdpa(q, k, v, bias, dropout)


def _head_norm(config: ViTConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.width // config.heads, eps=config.norm_eps)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Compute attention with one of torch's kernels, of those that the caller has enabled, but not with cuDNN's."""
    with _without_cudnn(q):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=None if bias is None else bias.to(q.dtype), dropout_p=dropout)


def _without_cudnn(q: Tensor) -> AbstractContextManager[None]:
    # Not on CPUs: the settings are those of all threads, and some compute there side by side.
    kernels = _enabled_but_cudnn() if q.is_cuda else []
    return sdpa_kernel(kernels) if kernels else nullcontext()


def _enabled_but_cudnn() -> list[SDPBackend]:
    """Return the kernels that the caller has enabled, but not cuDNN's; none if cuDNN's is the only one, or is not enabled.

    torch.compile cannot read these settings: a compiled model keeps those with which it was compiled.
    """
    enabled = [backend for backend, is_enabled in _BACKENDS.items() if is_enabled()]  # type: ignore[no-untyped-call]
    return enabled if torch.backends.cuda.cudnn_sdp_enabled() else []


# What `torch.compiler.assume_constant_result` does, but that imports all of torch.compile.
_enabled_but_cudnn._dynamo_marked_constant = True  # type: ignore[attr-defined]


class AxialAttention(Attention):
    """Attention along one axis of the grid (App. D.6): a patch sees its row, or its column, and the prefix tokens.

    Prefix tokens see everything, so that a class token can still gather the whole image. The paper does not say what it does
    with its class token; this keeps the axial cost for the patches, which are nearly all of the tokens. `grid` is that of the
    tokens, where it is not `self.grid`.
    """

    def __init__(self, config: ViTConfig, axis: int) -> None:
        super().__init__(config)
        self.axis = axis  # 0: within a row, 1: within a column
        self.prefix = config.prefix
        self.grid = config.grid

    def _with_mask(self, bias: Tensor | None, x: Tensor, *grid: Pair) -> Tensor:
        outside = ~self.neighbourhood(x.device, *grid)
        mask = torch.zeros(outside.shape, dtype=x.dtype, device=x.device).masked_fill(outside, float("-inf"))
        return mask if bias is None else mask + bias

    def neighbourhood(self, device: torch.device, *grid: Pair) -> Tensor:
        """True where a query [row] may look at a key [column]."""
        rows, columns = grid[0] if grid else self.grid
        index = torch.arange(rows * columns, device=device)
        line = index // columns if self.axis == 0 else index % columns
        visible = torch.ones(self.prefix + len(index), self.prefix + len(index), dtype=torch.bool, device=device)
        visible[self.prefix :, self.prefix :] = line[:, None] == line[None, :]
        return visible

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *grid: Pair) -> Tensor:
        count, size = self.prefix, grid[0] if grid else self.grid
        if q.shape[2] <= count:  # the first of the prefix tokens alone
            return super()._attend(q, k, v, bias)
        prefix_k, prefix_v = (part[:, :, :count].repeat_interleave(size[self.axis], dim=0) for part in (k, v))
        patches = super()._attend(
            self._lines(q[:, :, count:], size),
            torch.cat([prefix_k, self._lines(k[:, :, count:], size)], dim=2),
            torch.cat([prefix_v, self._lines(v[:, :, count:], size)], dim=2),
            None if bias is None else self._line_bias(bias, size).repeat(q.shape[0], 1, 1, 1),
        )
        patches = self._unline(patches, size)
        if not count:
            return patches
        prefix = super()._attend(q[:, :, :count], k, v, None if bias is None else bias[..., :count, :])
        return torch.cat([prefix, patches], dim=2)

    def _lines(self, x: Tensor, grid: Pair) -> Tensor:
        """[batch, head, patch, d] → [batch · line, head, patch in the line, d]."""
        x = x.reshape(*x.shape[:2], *grid, x.shape[-1])
        x = x.permute(0, 2, 1, 3, 4) if self.axis == 0 else x.permute(0, 3, 1, 2, 4)
        return x.flatten(0, 1)

    def _unline(self, x: Tensor, grid: Pair) -> Tensor:
        x = x.reshape(-1, grid[self.axis], *x.shape[1:])
        x = x.permute(0, 2, 1, 3, 4) if self.axis == 0 else x.permute(0, 2, 3, 1, 4)
        return x.flatten(2, 3)

    def _line_bias(self, bias: Tensor, grid: Pair) -> Tensor:
        """Select from a full bias [head, token, token] what the patches of a line use: [line, head, patch, prefix + patch]."""
        count, (rows, columns) = self.prefix, grid
        bias = bias[:, count:]
        own = bias[..., count:].reshape(self.heads, rows, columns, rows, columns)
        first = bias[..., :count].reshape(self.heads, rows, columns, count)
        if self.axis == 1:
            own, first = own.permute(0, 2, 1, 4, 3), first.permute(0, 2, 1, 3)
        own = own.diagonal(dim1=1, dim2=3).permute(3, 0, 1, 2)
        return torch.cat([first.transpose(0, 1), own], dim=-1)


class AttentionPool(nn.Module):
    """Attention (MAP) pooling: a learned probe attends to all tokens, then an MLP with a residual."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.probe = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, config.width, bias=config.qkv_bias)
        self.kv = nn.Linear(config.width, 2 * config.width, bias=config.qkv_bias)
        self.out = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config.width, config.mlp, config.gelu, config.dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.out(sdpa(*self._split(tokens)).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm(x))
        return x[:, 0]

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the probe's attention [batch, head, 1, token]."""
        return self.scores(tokens).softmax(dim=-1)

    def scores(self, tokens: Tensor) -> Tensor:
        """Return the probe's scores qkᵀ/√d [batch, head, 1, token], before softmax."""
        q, k, _ = self._split(tokens)
        return _scores(q, k, None)

    def _split(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(self.probe).unflatten(-1, (self.heads, -1)).transpose(1, 2).expand(tokens.shape[0], -1, -1, -1)
        k, v = self.kv(tokens).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v


def attention_for(config: ViTConfig, block: int) -> Attention:
    """Return the attention of one block: axial attention alternates between rows and columns."""
    return AxialAttention(config, axis=block % 2) if config.attention == "axial" else Attention(config)


def grid_for(block: nn.Module, other: tuple[Pair, ...]) -> tuple[Pair, ...]:
    """Return the argument by which a block gets another grid than the model's: only axial attention has to know it."""
    return other if other and isinstance(getattr(block, "attention", None), AxialAttention) else ()


def attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return softmax(qkᵀ/√d) in float32, with a bias of the scores."""
    return _scores(q, k, bias).softmax(dim=-1)


def _scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = (q @ k.transpose(-2, -1)).float() * math.sqrt(1 / q.shape[-1])
    return scores if bias is None else scores + bias
