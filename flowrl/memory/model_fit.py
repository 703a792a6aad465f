"""What a model's `config.json` tells against the ranks and the adapter that it is given, before anything is loaded."""

from flowrl.config import ActorConfig, ConfigError, CriticConfig, ReferenceConfig, RewardConfig
from flowrl.controller.placement.plan import RolePlan
from flowrl.memory.model_size import ModelSize, model_size

_WITHOUT_TP_PLAN = ("gpt2", "opt")
"""Families that transformers has no tensor-parallel plan for (docs/models.md)."""


def check_fit(
    role: str, key: str, model: ActorConfig | CriticConfig | ReferenceConfig | RewardConfig, place: RolePlan
) -> None:
    """Refuses sizes that the model's do not divide by, and an adapter on layers that it has not.

    Models of other families than those of docs/models.md, or of folders that are not there, are left to who loads them.

    Args:
        key: of the role's settings, with its dot; empty where they are at the top.
    Raises: ConfigError.
    """
    size = None if model.model is None else model_size(model.model.path)
    if size is None:
        return
    if place.mesh.tp > 1:
        _check_tp(role, size, place.mesh.tp)
    if place.mesh.sp > 1:
        _check_heads(role, "sp", size, place.mesh.sp)
    lora = model.lora if isinstance(model, ActorConfig | CriticConfig) else None
    if lora is not None and lora.targets != "all_linear":
        for target in lora.targets:
            if not size.adapted((target,)):
                names = {name for name, _, _ in size.linears}
                raise ConfigError(
                    f"{key}lora.targets names {target}, which is no inner linear layer of {size.kind}: choose of "
                    f"{', '.join(sorted(names))}"
                )


def _check_tp(role: str, size: ModelSize, tp: int) -> None:
    where = f"placement.roles.{role} has tp {tp}"
    if size.kind in _WITHOUT_TP_PLAN:
        raise ConfigError(
            f"{where}, but transformers has no tensor-parallel plan for {size.kind}: remove tp, and cut the model with "
            f"strategy: fsdp"
        )
    for what, count in (
        ("attention heads", size.heads),
        ("heads of keys", _key_heads(size)),
        ("columns of its MLP", size.mlp),
    ):
        if count % tp:
            raise ConfigError(f"{where}, which does not divide the model's {count} {what}: set tp to a divisor")


def _check_heads(role: str, name: str, size: ModelSize, ranks: int) -> None:
    """Sequence parallelism gives each rank some heads, or several ranks one head of keys."""
    keys = _key_heads(size)
    if size.heads % ranks or (keys % ranks and ranks % keys):
        raise ConfigError(
            f"placement.roles.{role} has {name} {ranks}, but the model has {size.heads} attention heads and {keys} of "
            f"keys: set {name} to a divisor of both"
        )


def _key_heads(size: ModelSize) -> int:
    return size.keys * size.heads // size.queries
