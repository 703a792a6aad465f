"""The dictionary of columns: every column that flowrl itself reads or writes. docs/batch.md shows the same table."""

from typing import NamedTuple


class Field(NamedTuple):
    """One row of the dictionary of columns."""

    kind: str
    writer: str
    meaning: str


FIELDS: dict[str, Field] = {
    "input_ids": Field("token, int64", "rollout", "prompt, then response"),
    "response_mask": Field(
        "token, bool", "rollout", "the policy produced this token and it is trained on (EOS included)"
    ),
    "rollout_logprobs": Field("token, f32", "rollout", "behaviour log-probability under the distribution sampled from"),
    "weight_version": Field(
        "token, int32", "rollout", "version of the weights that sampled the token; -1 in the prompt"
    ),
    "truncated": Field("row, bool", "rollout", "ended by length, not by a stop"),
    "response": Field("row, object", "rollout", "the response as text, special tokens left out"),
    "old_logprobs": Field("token, f32", "actor", "trainer's log-probability before the update; 0 at position 0"),
    "ref_logprobs": Field("token, f32", "reference", "the reference's log-probability; 0 at position 0"),
    "values": Field("token, f32", "critic", "value of the state in which the token is chosen; 0 at position 0"),
    "scores": Field("row, f32", "reward", "one score per row"),
    "shaped_scores": Field("row, f32", "run", "with shaping: the score that advantages are made of"),
    "token_rewards": Field("token, f32", "run", "score on the last response token, KL penalty on every one"),
    "advantages": Field("token, f32", "run", "advantage of the token"),
    "returns": Field("token, f32", "run", "target of the critic"),
    "behavior_logprobs": Field(
        "token, f32", "run", "`rollout_logprobs` for a loss that tells the sampling policy from the old one"
    ),
    "selected": Field("token, bool", "run", "tokens that `clip_cov` or `kl_cov` treats apart"),
    "loss_weights": Field("token, f32", "run", "with a correction: what multiplies the token's policy loss"),
    "loss_mask": Field("token, bool", "run", "with a correction: the response tokens that the actor's loss is over"),
    "prompt_id": Field("row, int64", "data", "identity of a drawn prompt; keys the sampling randomness"),
    "sample": Field("row, int64", "data", "number of the sample among those of its prompt"),
    "group": Field("row, int64", "data", "samples of one prompt share a group"),
    "prompt": Field("row, object", "data", "the prompt as text"),
    "prompt_ids": Field("row, object", "data", "the prompt as a list of token ids"),
    "answer": Field("row, object", "data", "what rewards compare with"),
    "data_source": Field("row, object", "data", "where the row comes from; rewards may read it"),
}
