"""Data types of all packages: prompts, chat tokenization, batches, metrics, trace events, files and private folders.

Entry points: `prompts.PromptStream` (prompts in random order), `chat.ChatTokenizer` (tokenizes conversations),
`reading` (reads rows of any format and shape), `batch.batch.Batch` (rows by reference), `metric.merge_metrics` (merges
metrics of ranks), `folders` (private and atomic folders). May import `flowrl.config`.
"""
