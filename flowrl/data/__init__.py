"""Data types that all packages share: prompts, chat tokenization, batches, metrics, call events, checksummed files.

Entry points: `prompts.PromptStream` (dataset to rows), `chat.ChatTokenizer` (conversation to tokens),
`batch.batch.Batch` (rows on the driver), `metric.merge_metrics` (values of several ranks).
Imports only `flowrl.config`.
"""
