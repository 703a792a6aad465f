"""The standard columns that flowrl reads or writes. docs/batch.md contains the same table."""

from typing import NamedTuple


class Field(NamedTuple):
    """One standard column of a batch."""

    kind: str
    """`token` or `row`, and the dtype of the values."""
    writer: str
    """Role or component that computes the column."""
    meaning: str


FIELDS: dict[str, Field] = {
    "input_ids": Field("token, int64", "rollout", "prompt tokens, then response tokens of all segments"),
    "response_mask": Field(
        "token, bool",
        "rollout",
        "true for the response tokens to train on: those that the policy sampled, EOS included",
    ),
    "rollout_logprobs": Field(
        "token, f32", "rollout", "log-probability under the sampling distribution; 0 outside `response_mask`"
    ),
    "weight_version": Field(
        "token, int32", "rollout", "version of the weights that sampled the token; -1 outside `response_mask`"
    ),
    "truncated": Field("row, bool", "rollout", "the response reached the length limit before a stop token"),
    "response": Field(
        "row, object", "rollout", "text of all segments, without special tokens and the stop sequence that ends it"
    ),
    "tagged_response": Field(
        "row, object",
        "rollout",
        "the tags that the prompt opened, then `response` with special tokens; None if equal to `response`",
    ),
    "segments": Field(
        "row, object",
        "rollout",
        "with an environment: parts of the response with `kind`, `start`, `end` (tokens) and `text`",
    ),
    "routes": Field(
        "token, uint8 or int16",
        "rollout",
        "with `rollout.router_replay`: 1 + index of each chosen expert, for all layers; 0 where the rollout has not "
        "processed the token",
    ),
    "old_logprobs": Field(
        "token, f32",
        "actor",
        "the actor's log-probability before the update; 0 at position 0; absent with `actor.old_logprobs: current`",
    ),
    "ref_logprobs": Field("token, f32", "reference", "the reference's log-probability; 0 at position 0"),
    "values": Field("token, f32", "critic", "value of the state before the token; 0 at position 0"),
    "scores": Field("row, f32", "reward", "score of the response"),
    "reward_failed": Field("row, bool", "reward", "a reward failed for the response"),
    "reward_calls": Field(
        "row, object", "reward", "by the name of the reward: score, seconds, kind and cause of a failure"
    ),
    "turn_rewards": Field("token, f32", "environment", "reward of a turn, at the last token of its response"),
    "episode": Field("row, object", "environment", "turns, restarts, counted events, reason of the end, own prompt"),
    "reward_truncated": Field(
        "row, bool", "reward", "the row is longer than the reward model supports, so only its last tokens are scored"
    ),
    "failed": Field("row, bool", "reward", "the row has no valid score, such as an unreadable verdict of a judge"),
    "judgment": Field("row, object", "reward", "the text that a judge generated about the response"),
    "shaped_scores": Field("row, f32", "run", "score after reward shaping; advantages are computed from it"),
    "token_rewards": Field(
        "token, f32", "run", "score at the last token of `response_mask`, minus the KL penalty per token"
    ),
    "advantages": Field("token, f32", "run", "advantage of the token"),
    "returns": Field("token, f32", "run", "regression target of the critic"),
    "behavior_logprobs": Field(
        "token, f32", "run", "`rollout_logprobs`, for losses that distinguish sampling and old policy"
    ),
    "selected": Field("token, bool", "run", "tokens that `clip_cov` or `kl_cov` selects"),
    "loss_weights": Field("token, f32", "run", "importance weight of the token's policy loss, from the correction"),
    "loss_mask": Field(
        "token, bool", "run", "response tokens that a correction or `mask_truncated` keeps in the policy loss"
    ),
    "prompt_id": Field("row, int64", "data", "unique id of a drawn prompt; seeds the sampling"),
    "sample": Field("row, int64", "data", "index of the sample among the samples of its prompt"),
    "group": Field("row, int64", "data", "group id, shared by all samples of a prompt"),
    "prompt": Field("row, object", "data", "text of the last user message"),
    "conversation": Field(
        "row, object", "data", "all messages before the response, a list of `{role, content}` dictionaries"
    ),
    "prompt_ids": Field("row, object", "data", "the prompt as a list of token ids"),
    "answer": Field("row, object", "data", "ground truth that the reward function compares with"),
    "data_source": Field("row, object", "data", "name of the dataset, for reward functions"),
    "entropies": Field(
        "token, f32",
        "actor",
        "entropy of the distribution of each token, in nats; 0 outside `response_mask`; only with "
        "`actor.logprobs(batch, entropy=True)`",
    ),
    "sum_squared_probs": Field(
        "token, f32", "actor", "sum over the vocabulary of the squared probabilities; 0 outside `response_mask`"
    ),
    "greedy_scores": Field("row, f32", "reward", "score of a greedy response to the row's prompt"),
    "response_logprobs": Field(
        "row, f32", "actor", "log-probability of the response, summed over the tokens of `response_mask`"
    ),
    "ref_response_logprobs": Field("row, f32", "reference", "log-probability of the response under the reference"),
    "teacher_logprobs": Field("token, f32", "teacher", "the teacher's log-probability; 0 outside `response_mask`"),
    "topk_ids": Field("token, int32", "teacher", "most likely tokens of the teacher, k per position"),
    "teacher_topk_logprobs": Field("token, f32", "teacher", "the teacher's log-probabilities of `topk_ids`"),
    "pair": Field("row, int64", "data", "id of a preference pair; its rows are adjacent, the chosen response first"),
    "desirable": Field("row, bool", "data", "KTO: whether the response is desirable"),
    "mismatched": Field("row, bool", "data", "KTO: the response belongs to another prompt; used to estimate the KL"),
    "reference_kl": Field("row, f32", "run", "KTO's estimate of the KL, the same in all rows of a step"),
}
