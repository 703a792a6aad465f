"""Pure functions on padded tensors with explicit masks: advantages, policy and preference losses, KL, corrections.

`flowrl.algorithms.registry` maps names in settings to these functions: a function is declared by its decorator, and
the settings read its parameters and docstring. The exports below are for programs; settings can name a function without
an export. The functions take no config object, write no logs and do not move tensors between devices.
May import `flowrl.data`. Only the registry may also import `flowrl.config`.
"""

from flowrl.algorithms.advantages.estimators import gae, reinforce_plus_plus, remax, whiten
from flowrl.algorithms.advantages.group_estimators import (
    gdpo,
    gpg,
    grpo,
    opo,
    pass_at_k,
    reinforce_plus_plus_baseline,
    rloo,
)
from flowrl.algorithms.advantages.reward_shaping import (
    RewardMoments,
    clip_rewards,
    length_penalty,
    normalize_rewards,
    overlong_penalty,
    update_moments,
    with_length_penalty,
    with_overlong_penalty,
)
from flowrl.algorithms.advantages.token_baselines import optimal_token_baseline
from flowrl.algorithms.best_of_n import best_of_n, best_of_n_kl_bound
from flowrl.algorithms.corrections import (
    Correlation,
    RatioLevel,
    RejectionLevel,
    WeightSums,
    masked_weights,
    mismatch_metrics,
    normalized_weights,
    rejection_mask,
    truncated_weights,
    weight_sums,
)
from flowrl.algorithms.hidden_logprobs import (
    logprobs_and_entropy_from_hidden,
    logprobs_from_hidden,
    top_tokens_from_hidden,
)
from flowrl.algorithms.kl.kl_control import AdaptiveKlControl, FixedKlControl, KlControl
from flowrl.algorithms.kl.kl_estimates import KlKind, kl_estimate, kl_loss, kl_shaped_rewards
from flowrl.algorithms.logprobs import candidate_logprobs, token_entropy, token_logprobs
from flowrl.algorithms.losses.covariance_losses import (
    CovarianceKl,
    clip_cov_loss,
    kl_cov_loss,
    select_clip_cov,
    select_kl_cov,
    token_covariances,
)
from flowrl.algorithms.losses.distillation import sampled_reverse_kl_loss, topk_forward_kl_loss
from flowrl.algorithms.losses.policy_losses import clipped_policy_loss, decoupled_policy_loss, sapo_loss
from flowrl.algorithms.losses.ptx import PtxForm, ptx_weights
from flowrl.algorithms.losses.score_losses import Divergence, cispo_loss, dppo_loss, gpg_loss, reinforce_loss
from flowrl.algorithms.losses.sequence_losses import gmpo_loss, gspo_loss, gspo_token_loss
from flowrl.algorithms.losses.value_loss import clipped_value_loss, explained_variance
from flowrl.algorithms.masking import (
    AggregationMode,
    aggregate,
    last_masked,
    masked_mean,
    masked_range,
)
from flowrl.algorithms.preference.kto import kto_loss, kto_reference_kl
from flowrl.algorithms.preference.pairwise import (
    DpoKind,
    SequenceMode,
    cpo_loss,
    dpo_loss,
    orpo_loss,
    pairwise_reward_loss,
    sequence_logprobs,
    simpo_loss,
)

__all__ = [
    "AdaptiveKlControl",
    "AggregationMode",
    "Correlation",
    "CovarianceKl",
    "Divergence",
    "DpoKind",
    "FixedKlControl",
    "KlControl",
    "KlKind",
    "PtxForm",
    "RatioLevel",
    "RejectionLevel",
    "RewardMoments",
    "SequenceMode",
    "WeightSums",
    "aggregate",
    "best_of_n",
    "best_of_n_kl_bound",
    "candidate_logprobs",
    "cispo_loss",
    "clip_cov_loss",
    "clip_rewards",
    "clipped_policy_loss",
    "clipped_value_loss",
    "cpo_loss",
    "decoupled_policy_loss",
    "dpo_loss",
    "dppo_loss",
    "explained_variance",
    "gae",
    "gdpo",
    "gmpo_loss",
    "gpg",
    "gpg_loss",
    "grpo",
    "gspo_loss",
    "gspo_token_loss",
    "kl_cov_loss",
    "kl_estimate",
    "kl_loss",
    "kl_shaped_rewards",
    "kto_loss",
    "kto_reference_kl",
    "last_masked",
    "length_penalty",
    "logprobs_and_entropy_from_hidden",
    "logprobs_from_hidden",
    "masked_mean",
    "masked_range",
    "masked_weights",
    "mismatch_metrics",
    "normalize_rewards",
    "normalized_weights",
    "opo",
    "optimal_token_baseline",
    "orpo_loss",
    "overlong_penalty",
    "pairwise_reward_loss",
    "pass_at_k",
    "ptx_weights",
    "reinforce_loss",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rejection_mask",
    "remax",
    "rloo",
    "sampled_reverse_kl_loss",
    "sapo_loss",
    "select_clip_cov",
    "select_kl_cov",
    "sequence_logprobs",
    "simpo_loss",
    "token_covariances",
    "token_entropy",
    "token_logprobs",
    "top_tokens_from_hidden",
    "topk_forward_kl_loss",
    "truncated_weights",
    "update_moments",
    "weight_sums",
    "whiten",
    "with_length_penalty",
    "with_overlong_penalty",
]
