"""What one rank of a role holds, and what each of its calls takes beside that, in bytes.

Backward passes have three places where most memory can be in use at once: the head, where all layers' activations are
kept; the last layer, which with gradient checkpointing has just been run again; and the end, where the gradient of the
embeddings is made.
"""

from dataclasses import dataclass
from typing import Literal

from flowrl.config import EngineConfig, LoraConfig, shards_model
from flowrl.controller.placement.plan import Mesh
from flowrl.memory.activations import (
    Entropy,
    Head,
    Precision,
    backward_bytes,
    layer_bytes,
    no_head,
    policy_head,
    run_bytes,
)
from flowrl.memory.model_size import Linears, ModelSize

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class Call:
    """What a call takes for its length."""

    name: str
    gradients: int = 0
    activations: int = 0
    whole: int = 0
    """Weights put together from parts, or merged with an adapter; gradients of such."""
    cache: int = 0
    """Keys and values of a rollout."""
    optimizer: int = 0
    """State that comes to the device for a step."""

    @property
    def total(self) -> int:
        return self.gradients + self.activations + self.whole + self.cache + self.optimizer


@dataclass(frozen=True)
class RoleMemory:
    """One rank of a role."""

    weights: int
    optimizer: int
    calls: tuple[Call, ...]
    leaves: bool = False
    """Whether weights and optimizer state leave the device while other roles run."""
    borrows: bool = False
    """Whether it uses the actor's weights, which then stay."""
    copy: int = 0
    """Of a checkpoint that is being written, in host memory; counted where that is the device's."""
    cache: int = 0
    """Keys and values that a rollout keeps room for between calls."""

    @property
    def held(self) -> int:
        return self.weights + self.optimizer + self.copy + self.cache


@dataclass(frozen=True)
class RoleModel:
    """A model as one rank of a role has it."""

    size: ModelSize
    engine: EngineConfig
    mesh: Mesh
    kind: Kind
    item: int
    """Bytes of a parameter."""
    is_policy: bool
    """Whether it has a head over the vocabulary."""
    longest: int
    """Tokens of the longest row."""
    lora: LoraConfig | None = None
    alone: bool = False
    """Whether ranks know nothing of each other, as with the inline backend."""

    @property
    def is_cut(self) -> bool:
        """Whether ranks hold parts."""
        return not self.alone and shards_model(self.engine, self.mesh.size, self.mesh.tp)

    @property
    def parts(self) -> int:
        """Ranks that fsdp cuts the weights over."""
        return (self.engine.shard_ranks or self.mesh.dp) * self.mesh.sp if self.is_cut else 1

    @property
    def precision(self) -> Precision:
        if self.item == 4 and self.engine.compute_dtype in (None, "float32"):
            return "plain"
        return "half" if self.item == 2 or self.is_cut else "autocast"

    @property
    def at_home(self) -> bool:
        """Whether the weights are in host memory, and on the device for the length of a layer only."""
        return self.kind == "cuda" and self.engine.offload == "parameters" and self.is_cut

    @property
    def leaves(self) -> bool:
        """Whether weights and optimizer state leave the device while other roles run."""
        return self.kind == "cuda" and self.engine.offload == "idle"

    @property
    def ends(self) -> int:
        """Parameters outside of layers."""
        return self.size.ends if self.is_policy else self.size.backbone_ends

    @property
    def layer(self) -> int:
        """Parameters of a layer, of which tensor-parallel peers hold parts."""
        return self.size.layer_matrices // self.mesh.tp + self.size.layer_rest

    @property
    def weights(self) -> int:
        """Bytes of the weights that the rank holds."""
        return (self.size.layers * self.layer + self.ends) * self.item // self.parts + self._adapter

    @property
    def whole(self) -> int:
        """Bytes of the weights, uncut."""
        return (self.size.layers * self.size.layer + self.ends) * self.item

    @property
    def trained(self) -> int:
        """Bytes of the weights that it trains."""
        return self.weights if self.lora is None else self._adapter

    @property
    def _adapter(self) -> int:
        if self.lora is None:
            return 0
        widths = sum(inputs + outputs for _, inputs, outputs in self._adapted)
        return 4 * self.size.layers * self.lora.rank * widths // self.parts

    @property
    def merged(self) -> int:
        """Bytes of the weights that an adapter changes."""
        return self.item * self.size.layers * sum(inputs * outputs for _, inputs, outputs in self._adapted)

    @property
    def _adapted(self) -> Linears:
        return () if self.lora is None else self.size.adapted(self.lora.targets)

    def num_tokens(self, rows: int | None) -> int:
        """Tokens of a pass over so many rows (None: as many as you like): the budget, or one row that is longer."""
        budget = self.engine.max_tokens_per_microbatch
        most = budget if rows is None else min(budget, rows * self.longest // self.mesh.sp)
        return max(most, self.longest // self.mesh.sp)

    def head(self, num_tokens: int, entropy: Entropy) -> Head:
        if not self.is_policy:
            return no_head(self.size, self.precision, num_tokens)
        return policy_head(self.size, self.precision, num_tokens, entropy, self.kind)


def trained_role(model: RoleModel, rows: int | None, entropy: Entropy, *, saves: bool) -> RoleMemory:
    """A model with an optimizer, AdamW: two moments in the type of the weights.

    Args:
        rows: of one step on this rank, as far as known.
        saves: whether it copies its state to host memory for checkpoints.
    """
    moments = 2 * model.trained
    moves = model.kind == "cuda"  # on a CPU all memory is the host's
    away = moves and model.engine.offload == "optimizer"
    gradients = 0 if model.at_home else model.trained
    calls = [_update(model, gradients, model.num_tokens(rows), entropy), run_call(model, rows, "forward")]
    if away:
        calls.append(Call("step", gradients=gradients, optimizer=moments))
    return RoleMemory(
        weights=0 if model.at_home else model.weights,
        optimizer=0 if model.at_home or away else moments,
        calls=tuple(calls),
        leaves=model.leaves,
        copy=model.trained + moments if saves and not moves else 0,
    )


def run_role(model: RoleModel, rows: int | None, name: str) -> RoleMemory:
    """A model that is only run."""
    weights = 0 if model.at_home else model.weights
    return RoleMemory(weights, 0, (run_call(model, rows, name),), leaves=model.leaves)


def run_call(model: RoleModel, rows: int | None, name: str) -> Call:
    """A forward pass without gradient."""
    num_tokens = model.num_tokens(rows)
    head = model.head(num_tokens, "none")
    layer = num_tokens * run_bytes(model.size, model.precision, model.mesh.tp)
    if model.size.kind == "gemma2":
        layer += num_tokens * 8 * model.size.heads // model.mesh.tp * model.longest
    activations = max(layer, head.kept + head.forward) + _half_copies(model)
    return Call(name, activations=activations, whole=_gathered(model))


def _update(model: RoleModel, gradients: int, num_tokens: int, entropy: Entropy) -> Call:
    size, precision, tp = model.size, model.precision, model.mesh.tp
    rank = 0 if model.lora is None else model.lora.rank
    layer = num_tokens * layer_bytes(size, precision, longest=model.longest, tp=tp, sp=model.mesh.sp, adapter_rank=rank)
    checkpointing = model.engine.gradient_checkpointing
    stream = num_tokens * size.hidden * (2 if precision == "half" else 4)
    kept = size.layers * (stream if checkpointing else layer)
    copies = _half_copies(model)
    head = model.head(num_tokens, entropy)
    trains_ends = model.lora is None
    item = 2 if precision == "half" else 4
    of_head = item * size.embedding if trains_ends and model.is_policy else 0
    of_embedding = item * size.embedding if trains_ends else 0
    # A tied weight's gradient waits for that of the embeddings, at the end.
    waits = of_head if size.tied else 0
    at_head = kept + copies + head.kept + max(head.forward, head.backward + of_head)
    back = num_tokens * backward_bytes(size, precision, tp)
    at_layer = kept + waits + back + (layer if checkpointing else copies)
    whole = _gathered(model)
    if not model.is_cut:
        return Call("update", gradients, max(at_head, at_layer, waits + of_embedding))
    # Whole gradients of a layer, and their copy that is summed over ranks; at the end, of what is outside of layers.
    compute, reduced = _items(model)
    of_layer, of_ends = (count * (compute + reduced) if trains_ends else 0 for count in (model.layer, model.ends))
    in_layers = max(at_head, at_layer + of_layer)
    return Call("update", gradients, max(in_layers, of_ends), whole)


def _half_copies(model: RoleModel) -> int:
    """Weights in half precision, which autocast keeps for the length of a pass."""
    if model.precision != "autocast":
        return 0
    head = model.size.embedding if model.is_policy else 0
    return 2 * (model.size.layers * model.size.layer_matrices // model.mesh.tp + head)


def _gathered(model: RoleModel) -> int:
    """Weights that fsdp has put together: outside of layers for a whole pass, of a layer that runs, and of the next."""
    if not model.is_cut:
        return 0
    compute, _ = _items(model)
    layers = 2 if model.engine.reshard_after_forward else model.size.layers
    return compute * (model.ends + min(layers, model.size.layers) * model.layer)


def _items(model: RoleModel) -> tuple[int, int]:
    """Bytes of a gathered parameter, and of one whose gradient is summed over ranks."""
    compute = 2 if model.precision == "half" else 4
    return compute, compute if model.engine.compute_dtype is None else 4
