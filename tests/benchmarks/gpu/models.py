"""Random models of the sizes of Qwen2.5, rows to train on, and a loss."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from flowrl.controller.host.host import release_cached_memory
from flowrl.data.batch.tensordicts import make_tensordict
from flowrl.engines.train.base import Denominators, Outputs
from flowrl.engines.train.microbatch import MicroBatch

_QWEN = {
    "vocab_size": 151_936,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 151_643,
}
MODEL_SIZES = {
    "0.5B": _QWEN | {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": _QWEN
    | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": _QWEN
    | {"vocab_size": 8_192, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "eos_token_id": 1}
    | {"num_attention_heads": 4, "max_position_embeddings": 512},
}
"""Name -> settings of Qwen2.5-0.5B and Qwen2.5-1.5B, and of a model for rehearsals on the CPU, whose vocabulary is
just large enough for tiled logits."""


def model_config(size: str) -> Qwen2Config:
    return Qwen2Config.from_dict(MODEL_SIZES[size])


def build_model(size: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """Returns a random model, which is created on the device, because random numbers of a CPU take seconds."""
    torch.manual_seed(0)
    with device:
        return Qwen2ForCausalLM(model_config(size)).to(dtype=dtype).eval()  # pyright: ignore[reportCallIssue]


def make_rows(num_rows: int, length: int, vocabulary: int) -> TensorDict:
    """Returns rows of random tokens. All tokens but the first of each row are trained."""
    tokens = torch.randint(2, vocabulary, (num_rows * length,), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(num_rows, length, dtype=torch.bool)
    mask[:, 0] = False
    columns = {"input_ids": tokens, "response_mask": mask.flatten()}
    return make_tensordict({"prompt_id": torch.arange(num_rows)}, columns, torch.full((num_rows,), length))


LOGPROBS = Outputs(("logprobs",), "response_mask")
WITH_ENTROPY = Outputs(("logprobs", "entropy"), "response_mask")
WITH_DETACHED_ENTROPY = replace(WITH_ENTROPY, detached=("entropy",))


def token_loss(values: Mapping[str, Tensor], micro: MicroBatch, counts: Denominators) -> tuple[Tensor, dict]:
    """Returns the mean negative log-probability of the trained tokens, minus a hundredth of their entropy, if it is
    computed.
    """
    loss_BL = -values["logprobs"] - 0.01 * values["entropy"] if "entropy" in values else -values["logprobs"]
    return loss_BL.sum() / counts.tokens, {}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Frees the memory of unused models for other processes, and resets the peak."""
    release_cached_memory()
    if device.type == "cuda" and torch.cuda.is_initialized():  # torch cannot reset the peak before the first tensor
        torch.cuda.reset_peak_memory_stats(device)
