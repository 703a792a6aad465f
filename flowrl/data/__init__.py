"""Data types of all packages: prompts, chat tokenization, batches, metrics, trace events, and files with checksums.

Entry points: `prompts.PromptStream` (reads prompts), `chat.ChatTokenizer` (tokenizes conversations),
`batch.batch.Batch` (rows by reference), `metric.merge_metrics` (merges metrics of ranks). May import `flowrl.config`.
"""
