"""Small decoders with the attention of code that people copy, written anew: names, order of rows, wiring are theirs."""

import math

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEAD, HEADS, VOCAB, CONTEXT = 64, 16, 4, 96, 8


def sdpa(q, k, v, **options):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)


def by_hand(q, k, v):
    """Softmax attention as it was written before torch had it."""
    logits = (q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))
    above = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return F.softmax(logits.masked_fill(above, float("-inf")), dim=-1) @ v


def angles(length, device=None):
    turn = torch.outer(torch.arange(length, device=device).float(), 100.0 ** -torch.linspace(0, 1, HEAD // 2))
    return turn.cos(), turn.sin()


def by_halves(x):
    """Rotary positions of (B, T, heads, d), pairs (j, j + d/2)."""
    cos, sin = (y[:, None] for y in angles(x.shape[1]))
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class NanoGPT(nn.Module):
    kv, biased = HEADS, True

    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd, self.dropout = HEADS, WIDTH, 0.1

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = sdpa(q, k, v, dropout_p=self.dropout if self.training else 0)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class MinGPT(nn.Module):
    kv, biased = HEADS, True

    def __init__(self):
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.proj, self.drop, self.n_head = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), HEADS

    def forward(self, x):
        B, T, C = x.size()
        k, q, v = (f(x).view(B, T, self.n_head, -1).transpose(1, 2) for f in (self.key, self.query, self.value))
        return self.proj(self.drop(by_hand(q, k, v)).transpose(1, 2).contiguous().view(B, T, C))


class NanoChat(nn.Module):
    kv, biased = 2, False

    def __init__(self):
        super().__init__()
        self.n_head, self.n_kv_head, self.head_dim = HEADS, self.kv, HEAD
        self.c_q, self.c_proj = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(2))
        self.c_k, self.c_v = (nn.Linear(WIDTH, self.kv * HEAD, bias=False) for _ in range(2))

    def forward(self, x):
        B, T, _ = x.shape
        q = self.c_q(x).view(B, T, self.n_head, self.head_dim)
        k, v = (f(x).view(B, T, self.n_kv_head, self.head_dim) for f in (self.c_k, self.c_v))
        q, k = (F.rms_norm(by_halves(y), (self.head_dim,)) for y in (q, k))
        y = sdpa(*(z.transpose(1, 2) for z in (q, k, v)), enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class Llama2C(nn.Module):
    kv, biased = 2, False

    def __init__(self):
        super().__init__()
        self.n_kv_heads, self.n_local_heads, self.n_local_kv_heads = self.kv, HEADS, self.kv
        self.n_rep, self.head_dim = HEADS // self.kv, HEAD
        self.wq, self.wo = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(WIDTH, self.kv * HEAD, bias=False) for _ in range(2))

    def rotated(self, x):
        cos, sin = (y.view(1, x.shape[1], 1, -1) for y in angles(x.shape[1]))
        a, b = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(3).type_as(x)

    def repeated(self, x):
        B, T, h, d = x.shape
        return x[:, :, :, None, :].expand(B, T, h, self.n_rep, d).reshape(B, T, h * self.n_rep, d)

    def forward(self, x):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_local_heads, self.head_dim)
        k, v = (f(x).view(B, T, self.n_local_kv_heads, self.head_dim) for f in (self.wk, self.wv))
        q, k, v = self.rotated(q), self.repeated(self.rotated(k)), self.repeated(v)
        y = by_hand(*(z.transpose(1, 2) for z in (q, k, v)))
        return self.wo(y.transpose(1, 2).contiguous().view(B, T, -1))


class Config:
    n_head, n_query_groups, head_size, n_embd = HEADS, 2, HEAD, WIDTH
    num_attention_heads, num_query_groups, kv_channels = HEADS, 2, HEAD


class LitGPT(nn.Module):
    kv, biased = 2, True

    def __init__(self):
        super().__init__()
        self.config = config = Config()
        self.qkv = nn.Linear(WIDTH, (config.n_head + 2 * config.n_query_groups) * config.head_size)
        self.proj = nn.Linear(config.n_head * config.head_size, WIDTH)

    def forward(self, x):
        B, T, _ = x.size()
        heads, groups, size = self.config.n_head, self.config.n_query_groups, self.config.head_size
        q, k, v = self.qkv(x).split((heads * size, groups * size, groups * size), dim=-1)
        q = q.view(B, T, heads, size).transpose(1, 2)
        k, v = (y.view(B, T, groups, size).transpose(1, 2) for y in (k, v))
        cos, sin = angles(T)
        n = size // 2  # a part of each head is rotated
        q, k = (torch.cat([y[..., :n] * cos[..., :n] + y[..., :n].flip(-1) * sin, y[..., n:]], -1) for y in (q, k))
        k, v = (y.repeat_interleave(heads // groups, dim=1) for y in (k, v))
        return self.proj(sdpa(q, k, v).transpose(1, 2).reshape(B, T, -1))


class XTransformers(nn.Module):
    kv, biased = HEADS, False

    def __init__(self):
        super().__init__()
        self.heads, self.scale = HEADS, HEAD**-0.5
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = (
            f(x).reshape(B, T, self.heads, -1).permute(0, 2, 1, 3) for f in (self.to_q, self.to_k, self.to_v)
        )  # rearrange "b n (h d) -> b h n d"
        dots = torch.einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attend = dots.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -torch.finfo(dots.dtype).max).softmax(-1)
        y = torch.einsum("b h i j, b h j d -> b h i d", attend, v)
        return self.to_out(y.permute(0, 2, 1, 3).reshape(B, T, -1))


class TimmViT(nn.Module):
    kv, biased = HEADS, True

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim, self.scale = HEADS, HEAD, HEAD**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q) * self.scale, self.k_norm(k)
        return self.proj(((q @ k.transpose(-2, -1)).softmax(dim=-1) @ v).transpose(1, 2).reshape(B, N, C))


class OpenCLIP(nn.Module):
    """Its own attention; its other blocks have `nn.MultiheadAttention`."""

    kv, biased = HEADS, True

    def __init__(self):
        super().__init__()
        self.num_heads = HEADS
        self.in_proj_weight = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) * WIDTH**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * WIDTH))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.transpose(0, 1)  # (L, N, C)
        L, N, C = x.shape
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (y.reshape(L, N * self.num_heads, -1).transpose(0, 1) for y in (q, k, v))
        y = torch.bmm(torch.bmm(q * HEAD**-0.5, k.transpose(-1, -2)).softmax(-1), v)
        return self.out_proj(y.transpose(0, 1).reshape(L, N, C)).transpose(0, 1)


class TorchEncoder(nn.Module):
    kv, biased = HEADS, True

    def __init__(self):
        super().__init__()
        self.self_attn = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x):
        return self.self_attn(x, x, x, need_weights=False)[0]


class TorchTune(nn.Module):
    kv, biased = 2, False

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.embed_dim, self.head_dim = HEADS, self.kv, WIDTH, HEAD
        self.q_proj, self.output_proj = (nn.Linear(WIDTH, HEADS * HEAD, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(WIDTH, self.kv * HEAD, bias=False) for _ in range(2))

    def forward(self, x):
        B, T, _ = x.shape
        q = self.q_proj(x).view(B, T, self.num_kv_heads * (HEADS // self.kv), HEAD)
        k, v = (f(x).view(B, T, -1, HEAD) for f in (self.k_proj, self.v_proj))
        q, k = by_halves(q), by_halves(k)
        k, v = (y.unsqueeze(3).expand(B, T, self.kv, HEADS // self.kv, HEAD).flatten(2, 3) for y in (k, v))
        y = sdpa(*(z.transpose(1, 2) for z in (q, k, v)))
        return self.output_proj(y.transpose(1, 2).contiguous().view(B, T, -1))


class Megatron(nn.Module):
    """Rows by group: its queries, its key, its value."""

    kv, biased = 2, True

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.linear_qkv, self.linear_proj = nn.Linear(WIDTH, (HEADS + 2 * self.kv) * HEAD), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = x.transpose(0, 1)  # (s, b, h)
        s, b, _ = x.shape
        mixed = self.linear_qkv(x).view(s, b, self.kv, (HEADS // self.kv + 2) * HEAD)
        q, k, v = torch.split(mixed, [HEADS // self.kv * HEAD, HEAD, HEAD], dim=3)
        q = q.reshape(s, b, -1, HEAD)
        k, v = (y.repeat_interleave(HEADS // self.kv, dim=2) for y in (k, v))
        q, k, v = (y.reshape(s, b * HEADS, HEAD).transpose(0, 1) for y in (q, k, v))
        into = torch.empty(b * HEADS, s, s, dtype=x.dtype, device=x.device)
        logits = torch.baddbmm(into, q, k.transpose(1, 2), beta=0.0, alpha=HEAD**-0.5)
        y = torch.bmm((logits + torch.full((s, s), float("-inf")).triu(1)).softmax(-1), v)
        return self.linear_proj(y.transpose(0, 1).reshape(s, b, -1)).transpose(0, 1)


class ModdedStack(nn.Module):
    """Queries, keys and values stacked in one parameter (3, heads * d, width), multiplied by a learned number."""

    kv, biased = HEADS, False

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = HEADS, HEAD
        self.qkv_w = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * WIDTH**-0.5)
        self.lambdas = nn.Parameter(torch.tensor(1.0))
        self.c_proj = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        B, T = x.size(0), x.size(1)
        weight = (self.lambdas * self.qkv_w).flatten(end_dim=1).type_as(x)
        q, k, v = F.linear(x, weight).view(B, T, 3 * self.num_heads, self.head_dim).chunk(3, dim=-2)
        q, k = (by_halves(F.rms_norm(y, (y.size(-1),))) for y in (q, k))
        y = sdpa(*(z.transpose(1, 2) for z in (q, k, v)), scale=0.12).transpose(1, 2)
        return self.c_proj(y.contiguous().view(B, T, -1))


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Decoder(nn.Module):
    """Tokens -> logits, three blocks with attention of one class: six branches of the residual stream."""

    def __init__(self, attention):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.h = nn.ModuleList([Block(attention()) for _ in range(3)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, tokens, targets=None):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


ALL = (NanoGPT, MinGPT, NanoChat, Llama2C, LitGPT, XTransformers, TimmViT, OpenCLIP, TorchEncoder, TorchTune, Megatron)
ALL = {attention.__name__: attention for attention in (*ALL, ModdedStack)}
TOKENS = torch.arange(2 * CONTEXT).reshape(2, CONTEXT)
