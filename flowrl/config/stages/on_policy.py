"""Settings of policy-gradient runs, which train on scored responses of the policy."""

from pydantic import Field, PositiveInt, ValidationInfo, field_validator, model_validator

from flowrl.config.algorithm.advantage import AnyAdvantage, CorrectionConfig
from flowrl.config.algorithm.ptx_settings import PtxConfig
from flowrl.config.model import default_compute_dtype
from flowrl.config.rewards.reward_settings import RewardConfig
from flowrl.config.roles import ActorConfig, ReferenceConfig
from flowrl.config.run import SettingValues
from flowrl.config.stages.rollouts import RolloutRunConfig


class OnPolicyConfig(RolloutRunConfig):
    """Settings of recipes that generate rollouts, score them, and then take a few optimizer steps per training step."""

    ALTERNATIVES = ("reward", "environment")

    # The order matters, because some defaults derive from earlier fields: the number of updates from the sizes, the
    # temperature from the rollout, and the reference from actor and algorithm.

    ppo_epochs: PositiveInt = 1
    """Training passes over the sequences of a step."""

    actor: ActorConfig
    """The policy that is trained."""

    algorithm: AnyAdvantage
    """Advantage estimation, reward shaping and off-policy correction."""

    reference: ReferenceConfig | None = Field(default=None, validate_default=True)
    """The reference for the KL. It is loaded only if a KL term uses it. Null uses the actor's initial model."""

    reward: RewardConfig | None = None
    """The reward function or model. Null if `environment` gives the rewards."""

    ptx: PtxConfig | None = None
    """Language modeling on text in every policy update (PPO-ptx). Null disables it."""

    @classmethod
    def uses_reference(cls, actor: ActorConfig, algorithm: AnyAdvantage) -> bool | None:
        """Returns whether a KL term uses the reference. None if only user functions may use it. A reference that is set
        is then loaded.

        A recipe that uses the reference in another way overrides this method.
        """
        if actor.kl_loss_coef or algorithm.kl_penalty is not None:
            return True
        return None if ":" in f"{actor.loss.kind}{algorithm.estimator}" else False

    @field_validator("reference", mode="after")
    @classmethod
    def _resolve_reference(cls, reference: ReferenceConfig | None, info: ValidationInfo) -> ReferenceConfig | None:
        """Replaces null by the actor's model if a KL term needs a reference, and an unused reference by null."""
        actor, algorithm = info.data.get("actor"), info.data.get("algorithm")
        if actor is None or algorithm is None:
            return reference  # A missing group has an error of its own.
        is_used = cls.uses_reference(actor, algorithm)
        if is_used and reference is None:
            return ReferenceConfig(model=actor.model, engine=actor.engine, temperature=actor.temperature)
        return None if is_used is False else reference

    @classmethod
    def count_updates(cls, settings: SettingValues) -> int | None:
        """Returns steps times minibatches times epochs."""
        num_updates = super().count_updates(settings)
        assert num_updates is not None
        return num_updates * settings["ppo_epochs"]

    @field_validator("algorithm")
    @classmethod
    def _resolve_correction(cls, algorithm: AnyAdvantage, info: ValidationInfo) -> AnyAdvantage:
        """Replaces `correction: auto` by the actual correction, so that config.yaml records it."""
        actor, rollout, schedule = (info.data.get(name) for name in ("actor", "rollout", "schedule"))
        if algorithm.correction != "auto" or actor is None or rollout is None or schedule is None:
            return algorithm  # A missing group has an error of its own.
        is_exact = rollout.capabilities.matches_trainer and rollout.quantization is None
        differs = schedule.staleness > 0 or not is_exact
        is_weighted = actor.loss.weights_rollouts or actor.old_logprobs == "rollout"
        correction = CorrectionConfig.select("truncated") if differs and not is_weighted else None
        return algorithm.model_copy(update={"correction": correction})

    @model_validator(mode="after")
    def _check_correction(self) -> "OnPolicyConfig":
        correction = self.algorithm.applied_correction
        loss = self.actor.loss
        if loss.weights_rollouts and correction is not None and correction.returns_mask is False:
            raise ValueError(
                f"algorithm.correction.kind is {correction.kind}, but actor.loss {loss.kind} has its own weights: "
                "remove the correction, or set actor.loss: ppo"
            )
        quantization = self.rollout.quantization
        is_weighted = loss.weights_rollouts or (correction is not None and not correction.returns_mask)
        if quantization is not None and not is_weighted:
            name = correction.kind if correction else "null"
            fix = "actor.old_logprobs: auto" if self.actor.old_logprobs == "rollout" else "algorithm.correction: auto"
            raise ValueError(
                f"rollout.quantization is {quantization} and algorithm.correction is {name}, but a quantized rollout "
                f"requires importance weights: set {fix}"
            )
        return self

    @model_validator(mode="after")
    def _resolve_old_logprobs(self) -> "OnPolicyConfig":
        """Replaces `actor.old_logprobs: auto`, so that config.yaml records the choice. Rejects a wrong choice."""
        algorithm, loss, chosen = self.algorithm, self.actor.loss, self.actor.old_logprobs
        num_updates = -(-self.batch_size // self.minibatch_size) * self.ppo_epochs
        readers = {
            "algorithm.kl_coef": algorithm.kl_penalty is not None,
            "algorithm.correction": algorithm.applied_correction is not None,
            f"actor.loss {loss.kind}": loss.prepares_columns,
            f"algorithm.estimator {algorithm.estimator}": algorithm.needs_old_logprobs,
        }
        reader = next((setting for setting, reads in readers.items() if reads), None)
        comparing = readers | {"rollout.check strict": self.rollout.check == "strict"}
        compares_loss = (f"actor.loss {loss.kind}",) if loss.weights_rollouts else ()
        names = ("algorithm.correction", *compares_loss, "rollout.check strict")
        comparer = next((name for name in names if comparing.get(name)), None)
        if chosen == "current" and (reader or num_updates > 1):
            needs = f"{reader} needs old log-probabilities before the update"
            reason = f"a step has {num_updates} updates" if num_updates > 1 else needs
            raise ValueError(f"actor.old_logprobs is current, but {reason}: set auto or recompute")
        if chosen == "rollout" and comparer:
            raise ValueError(
                f"actor.old_logprobs is rollout, but {comparer} compares old and rollout log-probabilities, so it "
                f"would have no effect: set auto or recompute, or remove {comparer}"
            )
        if chosen == "auto":
            exact = "current" if num_updates == 1 and not reader else None
            chosen = exact or ("rollout" if self._rollout_matches_actor and not comparer else "recompute")
            # The model is frozen, and a validator after all fields may not return another instance.
            object.__setattr__(self, "actor", self.actor.model_copy(update={"old_logprobs": chosen}))
        return self

    @property
    def _rollout_matches_actor(self) -> bool:
        """Whether the rollout computes the actor's log-probabilities from the same weights, in float32."""
        rollout, actor, roles = self.rollout, self.actor, self.placement.roles
        # Device `auto` may be a CPU. On a GPU, the actor then computes in float32 too (flowrl.memory.device_settings).
        default = default_compute_dtype(actor.model, "cuda") if self.placement.device == "cuda" else None
        compute_dtype = actor.engine.compute_dtype or default or actor.model.dtype
        return (
            rollout.capabilities.matches_trainer
            and rollout.capabilities.shares_weights
            and actor.engine.capabilities.shares_weights
            and rollout.quantization is None
            and self.schedule.staleness == 0
            and {actor.model.dtype, compute_dtype} == {"float32"}
            and actor.lora is None
            and actor.temperature == rollout.temperature
            and {"actor", "rollout"} <= set(roles)
            and self.placement.role("actor") == self.placement.role("rollout")
            and self.placement.role("actor").tp == 1
        )

    @model_validator(mode="after")
    def _check_sampling(self) -> "OnPolicyConfig":
        rollout = self.rollout
        if rollout.top_k or rollout.top_p < 1:
            raise ValueError(
                f"rollout.top_k is {rollout.top_k}, top_p is {rollout.top_p:g}, but the loss needs top_k: 0, top_p: 1.0"
            )
        return self

    @model_validator(mode="after")
    def _check_algorithm(self) -> "OnPolicyConfig":
        for shaping in self.algorithm.shaping:
            if "groups" in shaping.inputs and self.samples_per_prompt < 2:
                raise ValueError(
                    f"samples_per_prompt is 1, but algorithm.shaping {shaping.kind} requires 2 or more: increase it"
                )
        facts = {
            "samples_per_prompt": self.samples_per_prompt,
            "batch_size": self.batch_size,
            "max_response_tokens": self.rollout.max_response_tokens,
        }
        penalty, correction = self.algorithm.kl_penalty, self.algorithm.applied_correction
        chosen = (self.actor.loss, self.algorithm, *self.algorithm.shaping, correction, penalty and penalty.kl_control)
        for settings in chosen:
            if settings is not None:
                settings.check(facts)
        return self
