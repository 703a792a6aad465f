"""All settings, as frozen pydantic models, and the YAML reader (`load`, `loading`).

Recipe configs derive from `RunConfig`, `EpochConfig`, `RolloutRunConfig` or `OnPolicyConfig`. Every setting is a typed
field with a docstring. Schedules are a discriminated union with one class per choice. The settings of losses,
estimators, corrections and shapings are generated from the functions of flowrl.algorithms
(`flowrl.config.algorithm.declarations`). The names of the unions begin with `Any`. Field types for the settings of
recipes: `FilePath`, `ImportName`, `TokenIds`, `Device`, `KlKind`, `Aggregation`, `Options`, and `OneOf` with `Member`
for unions.

May import nothing else of flowrl, and neither torch nor Ray.
"""

from flowrl.config.algorithm.advantage import (
    AdvantageConfig,
    AnyAdvantage,
    AnyCorrection,
    AnyKlControl,
    AnyShaping,
    CorrectionConfig,
    KlControlConfig,
    ShapingConfig,
)
from flowrl.config.algorithm.loss_settings import (
    AnyDistillation,
    AnyPolicyLoss,
    AnyPreference,
    AnyRewardModelLoss,
    DistillationLossConfig,
    PolicyLossConfig,
    PreferenceConfig,
    RewardModelLossConfig,
)
from flowrl.config.algorithm.ptx_settings import PtxConfig
from flowrl.config.base import (
    Aggregation,
    Config,
    ConfigError,
    Device,
    FilePath,
    ImportName,
    ImportNameError,
    KlKind,
    Member,
    OneOf,
    Options,
    TokenIds,
    import_attribute,
    import_function,
    imported_module_name,
    is_import_name,
    parse,
)
from flowrl.config.data.data_settings import (
    DataConfig,
    DataFile,
    DifficultyConfig,
    PreparationConfig,
    RowsConfig,
)
from flowrl.config.data.evaluation_settings import EvaluationConfig
from flowrl.config.engines.rollout_engines import EngineCapabilities, Package, Quantization
from flowrl.config.engines.train_engines import TRAIN_ENGINES, TrainCapabilities
from flowrl.config.load import (
    import_recipe,
    load,
    load_located,
    load_recorded,
    loading,
    recipe_class,
    to_yaml,
    training_module,
)
from flowrl.config.model import (
    ADAPTER_SETTINGS,
    EMBEDDINGS,
    BaseQuantization,
    EngineConfig,
    ExportConfig,
    LoraConfig,
    ModelConfig,
    ModelKind,
    OptimizerConfig,
    WeightGroupConfig,
    compiles,
    default_compute_dtype,
    read_base_model,
    shards_model,
)
from flowrl.config.monitoring.health_settings import HealthCheck, HealthChecks, HealthConfig
from flowrl.config.placement import ONE_DEVICE, ROLES, SINGLE, Follower, Placement, ReplicaSizes, RolePlacement
from flowrl.config.rewards.environment_settings import EnvironmentConfig
from flowrl.config.rewards.judge_settings import JudgeConfig
from flowrl.config.rewards.reward_settings import RewardComponent, RewardConfig, ServiceConfig
from flowrl.config.roles import (
    ActorConfig,
    CriticConfig,
    ModelRoleConfig,
    PreferenceActorConfig,
    ReferenceConfig,
    RewardModelConfig,
    RoleConfig,
    RolloutConfig,
    ScoringModelConfig,
    StudentConfig,
    TrainedConfig,
    TransferConfig,
    VllmConfig,
    find_tokenizer_role,
    keys_of,
    models_of,
    roles_of,
)
from flowrl.config.run import (
    CheckpointConfig,
    DatasetConfig,
    ReportConfig,
    RolloutLogConfig,
    RunConfig,
    SettingValues,
)
from flowrl.config.schedule import AnySchedule, AsyncSchedule, ScheduleConfig
from flowrl.config.stages.epochs import EpochConfig
from flowrl.config.stages.evaluation_run import EvaluationRunConfig
from flowrl.config.stages.on_policy import OnPolicyConfig
from flowrl.config.stages.rollouts import DynamicSampling, RolloutRunConfig
from flowrl.config.user_errors import CheckFailed, UserError

__all__ = [
    "ADAPTER_SETTINGS", "EMBEDDINGS", "ONE_DEVICE", "ROLES", "SINGLE", "TRAIN_ENGINES", "ActorConfig",
    "AdvantageConfig", "Aggregation", "AnyAdvantage", "AnyCorrection", "AnyDistillation", "AnyKlControl",
    "AnyPolicyLoss", "AnyPreference", "AnyRewardModelLoss", "AnySchedule", "AnyShaping", "AsyncSchedule",
    "BaseQuantization", "CheckFailed", "CheckpointConfig", "Config", "ConfigError", "CorrectionConfig", "CriticConfig",
    "DataConfig", "DataFile", "DatasetConfig", "Device", "DifficultyConfig", "DistillationLossConfig",
    "DynamicSampling", "EngineCapabilities", "EngineConfig", "EnvironmentConfig", "EpochConfig", "EvaluationConfig",
    "EvaluationRunConfig", "ExportConfig", "FilePath", "Follower", "HealthCheck", "HealthChecks", "HealthConfig",
    "ImportName", "ImportNameError", "JudgeConfig", "KlControlConfig", "KlKind", "LoraConfig", "Member", "ModelConfig",
    "ModelKind", "ModelRoleConfig", "OnPolicyConfig", "OneOf", "OptimizerConfig", "Options", "Package", "Placement",
    "PolicyLossConfig", "PreferenceActorConfig", "PreferenceConfig", "PreparationConfig", "PtxConfig", "Quantization",
    "ReferenceConfig", "ReplicaSizes", "ReportConfig", "RewardComponent", "RewardConfig", "RewardModelConfig",
    "RewardModelLossConfig", "RoleConfig", "RolePlacement", "RolloutConfig", "RolloutLogConfig", "RolloutRunConfig",
    "RowsConfig", "RunConfig", "ScheduleConfig", "ScoringModelConfig", "ServiceConfig", "SettingValues",
    "ShapingConfig", "StudentConfig", "TokenIds", "TrainCapabilities", "TrainedConfig", "TransferConfig", "UserError",
    "VllmConfig", "WeightGroupConfig", "compiles", "default_compute_dtype", "find_tokenizer_role", "import_attribute",
    "import_function", "import_recipe", "imported_module_name", "is_import_name", "keys_of", "load", "load_located",
    "load_recorded", "loading", "models_of", "parse", "read_base_model", "recipe_class", "roles_of", "shards_model",
    "to_yaml", "training_module",
]  # fmt: skip
