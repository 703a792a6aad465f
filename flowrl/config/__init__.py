"""What may be set: frozen pydantic models and the reader of YAML files. Loads neither torch nor ray."""

from flowrl.config.algorithm.advantage import AdvantageConfig, CorrectionConfig
from flowrl.config.algorithm.preference import PreferenceConfig, PtxConfig
from flowrl.config.algorithm.shaping import KlControlConfig, ShapingConfig
from flowrl.config.base import Config, ConfigError
from flowrl.config.checkpoint import CheckpointConfig
from flowrl.config.data import DataConfig
from flowrl.config.errors import CheckFailed, UserError
from flowrl.config.load import load, recipe_class, to_yaml
from flowrl.config.model import EngineConfig, LoraConfig, ModelConfig, OptimizerConfig, shards_model
from flowrl.config.placement import ROLES, SINGLE, Placement, RolePlacement
from flowrl.config.report import ReportConfig
from flowrl.config.roles import (
    ActorConfig,
    CriticConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    TransferConfig,
    VllmConfig,
    models_of,
)
from flowrl.config.run import OnPolicyConfig, RunConfig
from flowrl.config.schedule import ScheduleConfig

__all__ = [
    "ROLES",
    "SINGLE",
    "ActorConfig",
    "AdvantageConfig",
    "CheckFailed",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "CorrectionConfig",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "KlControlConfig",
    "LoraConfig",
    "ModelConfig",
    "OnPolicyConfig",
    "OptimizerConfig",
    "Placement",
    "PreferenceConfig",
    "PtxConfig",
    "ReferenceConfig",
    "ReportConfig",
    "RewardConfig",
    "RolePlacement",
    "RolloutConfig",
    "RunConfig",
    "ScheduleConfig",
    "ShapingConfig",
    "TransferConfig",
    "UserError",
    "VllmConfig",
    "load",
    "models_of",
    "recipe_class",
    "shards_model",
    "to_yaml",
]
