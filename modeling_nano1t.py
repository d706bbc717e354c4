"""The model as `transformers` runs it, for weights that no architecture of its own fits: copied beside them by export.py.

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

A decoder-only Mixture-of-Experts transformer. What others do not have: the router takes at most `max_per_group` experts of
each group of consecutive experts, then the best `experts_per_token` of those (MoGE, Tang et al. 2025), and only every
`rope_every`-th layer has RoPE; the others see positions through the causal mask alone. A server that took the router for
plain top-k would run another model, so the architecture, the settings and the router's tensors have names of their own.

Shape suffixes: B rows, T tokens, L positions in the cache and now, D width, H heads, K head dimension, N = B * T,
X experts, k chosen experts.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

# transformers 5 renames it; the model takes both
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


class Nano1tConfig(PretrainedConfig):
    model_type = "nano1t"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    def __init__(self, vocab_size=4096, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
                 head_dim=64, max_position_embeddings=512, theta=1e4, rope_every=2, experts=16, experts_per_token=4, groups=4,
                 max_per_group=1, expert_width=128, shared_experts=0, router="softmax", rms_norm_eps=1e-6, use_cache=True,
                 **others):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        self.num_attention_heads, self.num_key_value_heads, self.head_dim = num_attention_heads, num_key_value_heads, head_dim
        self.max_position_embeddings, self.theta, self.rope_every = max_position_embeddings, theta, rope_every
        self.experts, self.experts_per_token, self.groups, self.max_per_group = experts, experts_per_token, groups, max_per_group
        self.expert_width, self.shared_experts, self.router = expert_width, shared_experts, router
        self.rms_norm_eps, self.use_cache = rms_norm_eps, use_cache
        super().__init__(**others)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()).to(x.dtype)


def rotate(x_BHTK, cos_B1TK, sin_B1TK):
    """Half-rotation RoPE in fp32: the pairs are (x[i], x[i + K/2])."""
    a, b = x_BHTK.float().chunk(2, -1)
    return torch.cat((a * cos_B1TK - b * sin_B1TK, b * cos_B1TK + a * sin_B1TK), -1).to(x_BHTK.dtype)


class Attention(nn.Module):
    """Causal, grouped queries, RMSNorm on each head's q and k."""

    def __init__(self, c: Nano1tConfig, layer: int):
        super().__init__()
        self.layer, self.head_dim = layer, c.head_dim
        self.has_rope = layer % c.rope_every == c.rope_every - 1
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)

    def forward(self, x_BTD, mask_B1TL, rope, cache):
        q, k, v = (project(x_BTD).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q_BHTK, k_BHTK, v_BHTK = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        if self.has_rope:
            q_BHTK, k_BHTK = rotate(q_BHTK, *rope), rotate(k_BHTK, *rope)
        if cache is not None:  # of all positions up to here
            k_BHTK, v_BHTK = cache.update(k_BHTK, v_BHTK, self.layer)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask_B1TL, enable_gqa=True)
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(-2))


class Router(nn.Module):
    """Which experts a token goes to, and with what weight. In fp32 whatever the model's type: in bf16, tokens tie at the cut."""

    def __init__(self, c: Nano1tConfig):
        super().__init__()
        self.kind, self.groups, self.max_per_group, self.top_k = c.router, c.groups, c.max_per_group, c.experts_per_token
        self.weight = nn.Parameter(torch.zeros(c.experts, c.hidden_size, dtype=torch.float32))
        self.selection_bias = nn.Parameter(torch.zeros(c.experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x_ND):
        logits_NX = x_ND.float() @ self.weight.float().T
        score_NX = logits_NX.softmax(-1) if self.kind == "softmax" else logits_NX.sigmoid()
        ranked_NX = score_NX + self.selection_bias.float()  # the bias takes part in the choice only
        in_group = ranked_NX.unflatten(1, (self.groups, -1))
        beyond = best(in_group, in_group.shape[-1])[..., self.max_per_group:]
        allowed_NX = in_group.scatter(-1, beyond, -torch.inf).flatten(1)
        chosen_Nk = best(allowed_NX, self.top_k)
        picked_Nk = logits_NX.gather(1, chosen_Nk)
        # sigmoid: s / sum(s) of the chosen, as a softmax of log s
        return chosen_Nk, torch.softmax(picked_Nk if self.kind == "softmax" else F.logsigmoid(picked_Nk), -1)


def best(x, n: int):
    """Indices of the n largest along the last dimension; the lower index wins a tie."""
    return x.sort(dim=-1, descending=True, stable=True).indices[..., :n]


class Expert(nn.Module):
    """SwiGLU. The routing weight, where there is one, multiplies before the down-projection."""

    def __init__(self, width: int, expert_width: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, expert_width, bias=False)
        self.up_proj = nn.Linear(width, expert_width, bias=False)
        self.down_proj = nn.Linear(expert_width, width, bias=False)

    def forward(self, x_ND, weight_N1=1.0):
        hidden = F.silu(self.gate_proj(x_ND).float()) * self.up_proj(x_ND).float() * weight_N1
        return self.down_proj(hidden.to(x_ND.dtype))


class SparseExperts(nn.Module):
    def __init__(self, c: Nano1tConfig):
        super().__init__()
        self.router = Router(c)
        self.experts = nn.ModuleList(Expert(c.hidden_size, c.expert_width) for _ in range(c.experts))
        self.shared_experts = Expert(c.hidden_size, c.expert_width) if c.shared_experts else None

    def forward(self, x_BTD):
        x_ND = x_BTD.flatten(0, 1)
        chosen_Nk, weights_Nk = self.router(x_ND)
        sum_ND = torch.zeros_like(x_ND, dtype=torch.float32)
        for x in chosen_Nk.unique().tolist():
            token, slot = torch.where(chosen_Nk == x)
            sum_ND.index_add_(0, token, self.experts[x](x_ND[token], weights_Nk[token, slot, None]).float())
        y_ND = sum_ND.to(x_ND.dtype)
        if self.shared_experts is not None:
            y_ND = y_ND + self.shared_experts(x_ND)
        return y_ND.view_as(x_BTD)


class Layer(nn.Module):
    def __init__(self, c: Nano1tConfig, layer: int):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = SparseExperts(c)

    def forward(self, x_BTD, mask_B1TL, rope, cache):
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), mask_B1TL, rope, cache)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Trunk(nn.Module):
    """All but the head; named as other models have it, so that tools find the embedding."""

    def __init__(self, c: Nano1tConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Nano1tForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = Nano1tConfig
    base_model_prefix = "model"
    _no_split_modules = ["Layer"]
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["router", "norm", "q_norm", "k_norm", "input_layernorm", "post_attention_layernorm"]

    def __init__(self, config: Nano1tConfig):
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.embed_tokens = value

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, cache=None, return_dict=None, num_items_in_batch=None, **_):
        """num_items_in_batch: targets of all passes that one update sums over, as transformers' Trainer gives it; the loss is
        then this pass's share of their mean."""
        x_BTD = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        before, T = cache.get_seq_length() if cache is not None else 0, x_BTD.shape[1]
        if position_ids is None:
            position_ids = torch.arange(before, before + T, device=x_BTD.device)[None]
        rope, mask_B1TL = self.rope(position_ids), causal_mask(attention_mask, before, T, x_BTD.device)
        for layer in self.model.layers:
            x_BTD = layer(x_BTD, mask_B1TL, rope, cache)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(self.model.norm(x_BTD[:, keep]))
        loss = None
        if labels is not None:
            losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")
            count = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
            loss = losses.sum() / torch.as_tensor(count, device=losses.device)
        out = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
        return out if return_dict is not False else out.to_tuple()

    def rope(self, position_ids_BT):
        """cos and sin [B, 1, T, K/2] in fp32. The angles are formed in fp64, and here rather than in a buffer that the model's
        type could round."""
        K = self.config.head_dim
        inv_freq = self.config.theta ** (-torch.arange(0, K, 2, dtype=torch.float64, device=position_ids_BT.device) / K)
        angle = position_ids_BT[:, None, :, None].double() * inv_freq
        return angle.cos().float(), angle.sin().float()


def causal_mask(attention_mask, before: int, T: int, device):
    """bool [B or 1, 1, T, before + T]: which earlier positions a token sees; attention_mask [B, L] is 0 for padding, and may be a
    finished mask of four dimensions."""
    if attention_mask is not None and attention_mask.dim() == 4:
        return attention_mask
    mask = torch.ones(T, before + T, dtype=torch.bool, device=device).tril(before)[None, None]
    if attention_mask is None:
        return mask
    seen = mask & attention_mask[:, None, None, : before + T].bool()
    return seen | ~seen.any(-1, keepdim=True)  # a row that sees nothing, which padding is, would be NaN
