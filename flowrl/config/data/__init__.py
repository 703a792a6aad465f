"""Settings of datasets and of their preparation.

Entry points: `DataConfig`, `DataFile`, `EvaluationSet` and `PreparationConfig` (data_settings.py), and
`EvaluationConfig` (evaluation_settings.py). May import `flowrl.config.base`.
"""
