"""Writes models to folders that transformers loads, one weight at a time.

The files of all weights are planned before the first weight is gathered or read. The writer therefore holds one weight
in memory, instead of a file or the model. Names and shapes are those that `save_pretrained` writes.
"""

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from flowrl.config import ExportConfig, ModelKind
from flowrl.data.dtypes import dtype_name, torch_dtype
from flowrl.data.folders.atomic_folder import write_atomically
from flowrl.engines.checkpoint.shards import tensor_bytes
from flowrl.engines.models.loading import (
    SCORE,
    CriticModel,
    ModelError,
    TrainedModel,
    describe_model,
    quiet_transformers,
    read_files,
)
from flowrl.engines.models.parameters import unique_parameters
from flowrl.engines.models.weights import WeightShape, cast_dtype, full_weights, weight_buckets, weight_shapes

DEFAULT_EXPORT = ExportConfig()

_NEW_PAD_TOKEN = "<|pad|>"

_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Maps torch's names of dtypes to safetensors' names."""


def export_dtype(config: ExportConfig) -> torch.dtype | None:
    """Returns the dtype to which floating-point weights are cast. None keeps the dtype of each weight."""
    return None if config.dtype is None else torch_dtype(config.dtype)


def in_file_order(shapes: Iterable[WeightShape]) -> list[WeightShape]:
    """Returns weights in the order in which `write_model` writes them.

    Larger dtypes come first, because readers of safetensors need aligned weights.
    """
    return sorted(shapes, key=lambda shape: -shape[1].itemsize)


def save_model(
    model: TrainedModel,
    tokenizer_path: Path,
    folder: Path,
    config: ExportConfig = DEFAULT_EXPORT,
    *,
    is_writer: bool = True,
) -> None:
    """Saves a model and its tokenizer to a folder that transformers can load. The folder is created atomically.

    Adapters are merged into the saved weights. `model` is unchanged. All ranks of a sharded model must call this
    together. Only the rank with `is_writer` writes files. `config` sets the dtype of the weights and the size of the
    files. For other arguments and errors, see `write_model`.
    """
    kind: ModelKind = "policy"
    if not isinstance(model, PreTrainedModel):
        kind = "critic" if isinstance(model, CriticModel) else "reward_model"
    dtype = export_dtype(config)
    shapes = in_file_order(weight_shapes(model, dtype=dtype))
    with gathered_by_all(full_weights(model, [name for name, _, _ in shapes], dtype)) as weights:
        if is_writer:
            write_model(kind, describe_model(model), shapes, weights, tokenizer_path, folder, config)


@contextmanager
def gathered_by_all(weights: Iterable[tuple[str, Tensor]]) -> Iterator[Iterator[tuple[str, Tensor]]]:
    """Yields an iterator over weights. All ranks gather each weight together when they read it. The end of the `with`
    block gathers all unread weights, also after an error, because the other ranks wait for this rank.
    """
    remaining = iter(weights)
    try:
        yield remaining
    finally:
        for _ in remaining:
            pass


def write_model(
    kind: ModelKind,
    files: Mapping[str, bytes],
    shapes: Sequence[WeightShape],
    weights: Iterable[tuple[str, Tensor]],
    tokenizer_path: Path,
    folder: Path,
    config: ExportConfig = DEFAULT_EXPORT,
) -> None:
    """Writes a model with its tokenizer to a folder that transformers can load. The folder is created atomically.

    A critic and a reward model become sequence classifiers with one label. Their pad token never ends a row. If the
    family of a critic has no sequence classifier, the folder has the critic's backbone. In both cases, the critic's
    value head has the names `score.weight` and `score.bias`.

    Args:
        kind: kind of the model.
        files: files of the model's folder except the weights, from `TrainEngine.describe_model`.
        shapes: weights by the names of `TrainEngine.export_weights`, in the order of `in_file_order`.
        weights: the full weights in the order of `shapes`. A weight may be freed when the next weight is read.
        tokenizer_path: folder of the tokenizer.
        folder: a new folder.
        config: size of the files. The weights already have the dtype of `config`.
    Raises ModelError if the folder exists, if the weights do not match the model, or if float16 cannot represent a
    value. Raises UserError if the folder cannot be written.
    """
    check_is_new(folder)
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
        if kind != "policy":
            _set_pad_token(tokenizer)
        with TemporaryDirectory() as name:
            _write_files(files, Path(name))
            layout = _Layout(kind, Path(name), shapes, None if kind == "policy" else tokenizer.pad_token_id)
    with write_atomically(folder) as partial, quiet_transformers():
        _write_files(files, partial)
        layout.save_config(partial)
        tokenizer.save_pretrained(partial)
        write_safetensors(partial, layout.shapes, layout.convert(weights), config.max_shard_gb * 1e9)


def _write_files(files: Mapping[str, bytes], folder: Path) -> None:
    for file, contents in files.items():
        (folder / file).write_bytes(contents)


def check_is_new(folder: Path) -> None:
    """Raises ModelError if the folder already exists."""
    if folder.exists():
        raise ModelError(f"{folder} already exists and would be overwritten: choose a new folder")


def describe_tokenizer(path: Path) -> dict[str, bytes]:
    """Returns the files of a tokenizer, as name -> contents."""
    with TemporaryDirectory() as name, quiet_transformers():
        AutoTokenizer.from_pretrained(path, local_files_only=True).save_pretrained(name)
        return read_files(name)


def copy_model(source: Path, folder: Path, config: ExportConfig) -> None:
    """Copies a model folder into an existing folder, with the file sizes and the dtype of `config`.

    Raises ModelError if a file with weights cannot be read.
    """
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name != SAFE_WEIGHTS_INDEX_NAME:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, folder / path.name)
    dtype, shapes, sources = export_dtype(config), [], {}
    for path in sorted(source.glob("*.safetensors")):
        with _open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118 (a file, not a dictionary)
                part = file.get_slice(name)
                stored = next(torch_dtype(known) for known, code in _DTYPES.items() if code == part.get_dtype())
                shapes.append((name, cast_dtype(stored, dtype), tuple(part.get_shape())))
                sources[name] = path
    if config.dtype is not None:
        settings = json.loads((folder / "config.json").read_text()) | {"dtype": config.dtype}
        (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")

    def read() -> Iterator[tuple[str, Tensor]]:
        for name, cast, _ in shapes:
            with _open_weights(sources[name]) as file:
                weight = file.get_tensor(name).to(cast)
            yield name, weight

    shapes = in_file_order(shapes)
    write_safetensors(folder, shapes, read(), config.max_shard_gb * 1e9)


@contextmanager
def _open_weights(path: Path) -> Iterator[safe_open]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read ({error}): restore the file, or choose another model") from error


def write_safetensors(
    folder: Path, shapes: Sequence[WeightShape], weights: Iterable[tuple[str, Tensor]], max_bytes: float
) -> None:
    """Writes safetensors files of at most `max_bytes`, and their index if there are several.

    Args:
        folder: an existing folder.
        shapes: names, dtypes and shapes of the weights.
        weights: the weights in the order of `shapes`. Each is written before the next one is read.
        max_bytes: maximum total size of the weights in a file. A weight that is larger gets its own file.
    """
    buckets, known, remaining = weight_buckets(shapes, max_bytes), {shape[0]: shape for shape in shapes}, iter(weights)
    stem, suffix = os.path.splitext(SAFE_WEIGHTS_NAME)
    files = [f"{stem}-{i:05}-of-{len(buckets):05}{suffix}" for i in range(1, len(buckets) + 1)]
    for file, names in zip(files if len(files) > 1 else [SAFE_WEIGHTS_NAME], buckets, strict=True):
        _write_file(folder / file, [known[name] for name in names], remaining)
    if len(files) > 1:
        sizes = [math.prod(shape) for _, _, shape in shapes]
        total = sum(size * dtype.itemsize for size, (_, dtype, _) in zip(sizes, shapes, strict=True))
        index = {
            "metadata": {"total_parameters": sum(sizes), "total_size": total},
            "weight_map": {name: file for file, names in zip(files, buckets, strict=True) for name in names},
        }
        (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _write_file(path: Path, shapes: Sequence[WeightShape], weights: Iterator[tuple[str, Tensor]]) -> None:
    """Writes a safetensors file one weight at a time. `safetensors.torch.save_file` would need all weights of the file
    at once.

    The file consists of the header's length in 8 bytes, the header in JSON, and the weights without gaps. See
    https://huggingface.co/docs/safetensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in shapes:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype_name(dtype)], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape in shapes:
            written, weight = next(weights)
            assert (written, weight.dtype, tuple(weight.shape)) == (name, dtype, shape), "the order of `shapes`"
            if dtype == torch.float16 and not weight.isfinite().all():
                raise ModelError(
                    f"the weight {name} has values that float16 cannot represent (at most 65504): export it in "
                    f"bfloat16 or float32"
                )
            file.write(tensor_bytes(weight))
            del weight  # before the next weight is gathered
        file.flush()
        os.fsync(file.fileno())


class _Layout:
    """Converts a model's weights to the names and shapes that they have in files."""

    def __init__(self, kind: ModelKind, folder: Path, shapes: Sequence[WeightShape], pad_token: int | None) -> None:
        """Raises ModelError if the weights do not match the configuration in `folder`.

        Args:
            kind: kind of the model.
            folder: folder with `config.json`.
            shapes: weights by the names of the engine, in the order of the files.
            pad_token: id of the pad token. If the input embeddings lack a row for it, zero rows are added. None adds no
                rows.
        """
        self._kind: ModelKind = kind
        self._model = _make_skeleton(kind, folder)
        embeddings = self._model.get_input_embeddings()
        self._embedding = next(f"{n}.weight" for n, module in self._model.named_modules() if module is embeddings)
        self._pad_token = pad_token
        empty = [
            (self._name_in_file(name), torch.empty(shape, dtype=dtype, device="meta")) for name, dtype, shape in shapes
        ]
        self._check(dict(empty), folder)
        sizes = Counter[torch.dtype]()
        for _, weight in empty:
            sizes[weight.dtype] += weight.numel() if weight.is_floating_point() else 0
        self._dtype = max(sizes, key=sizes.__getitem__, default=torch.float32)  # a head may have another dtype
        padded = [{name: self._pad(name, weight)} for name, weight in empty]
        converted = self._revert([*padded])
        whole = self._revert([dict(chain.from_iterable(part.items() for part in padded))])
        self._is_separable = {n: w.shape for n, w in converted.items()} == {n: w.shape for n, w in whole.items()}
        """Whether each weight can be converted alone. If not, some weights in the files are formed from several weights
        of the model.
        """
        self.shapes = [
            (name, weight.dtype, tuple(weight.shape))
            for name, weight in (converted if self._is_separable else whole).items()
        ]

    def _name_in_file(self, name: str) -> str:
        """Converts the engine's name of a weight to the name in the written transformers model."""
        if self._kind == "reward_model":
            return name.removeprefix("model.")
        if self._kind == "critic":
            if name.startswith("value_head."):
                return f"{SCORE}.{name.removeprefix('value_head.')}"
            # A backbone without a classifier around it has no prefix.
            prefix = "" if self._model.base_model is self._model else f"{self._model.base_model_prefix}."
            return prefix + name.removeprefix("backbone.")
        return name

    def _check(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        expected = self._model.state_dict(keep_vars=True)
        tied = [names for names, _ in unique_parameters(self._model)]
        # Critics have a head with a bias, and backbones have no head.
        heads = () if self._kind == "policy" else (f"{SCORE}.weight", f"{SCORE}.bias")
        wrong = [name for name in weights if name not in (*expected, *heads)]
        wrong += [names[0] for names in tied if not any(name in weights for name in names)]
        wrong += [name for name, weight in weights.items() if name in expected and expected[name].shape != weight.shape]
        if wrong:
            raise ModelError(
                f"the weights do not match the config.json of the model: {', '.join(wrong[:3])} are unexpected, "
                f"missing or of another shape; export with the model that the run started with"
            )

    def save_config(self, folder: Path) -> None:
        """Writes `config.json` with the class and the dtype of the model."""
        config = self._model.config
        config.architectures, config.dtype = [type(self._model).__name__], dtype_name(self._dtype)
        if self._pad_token is not None:
            text = config.get_text_config()
            text.pad_token_id, text.vocab_size = self._pad_token, max(text.vocab_size, self._pad_token + 1)
        config.save_pretrained(folder)

    def convert(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights with their names and shapes in the files. Holds one weight in memory at a time.

        If the files combine several weights into one, holds the complete model in memory.
        """
        remaining, collected = iter(weights), {}
        for name, weight in remaining:
            collected |= {(own := self._name_in_file(name)): self._pad(own, weight)}
            del weight
            if self._is_separable:
                converted, collected = self._revert([collected]), {}
                while converted:
                    key = next(iter(converted))
                    yield key, converted.pop(key)
        if collected:
            yield from self._revert([collected]).items()

    def _pad(self, name: str, weight: Tensor) -> Tensor:
        """Adds zero rows to the input embeddings, if they lack a row for the pad token."""
        missing = 0 if self._pad_token is None or name != self._embedding else self._pad_token + 1 - len(weight)
        return nn.functional.pad(weight, (0, 0, 0, missing)) if missing > 0 else weight

    def _revert(self, parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Converts weights to the names and shapes in files. For some families, one weight of the model becomes several
        weights in the files, such as one per expert.
        """
        return {
            name: weight for part in parts for name, weight in revert_weight_conversion(self._model, dict(part)).items()
        }


def _make_skeleton(kind: ModelKind, folder: Path) -> PreTrainedModel:
    """Returns the transformers model that a folder describes, on the meta device."""
    settings = AutoConfig.from_pretrained(folder, local_files_only=True)
    auto: Any = AutoModelForCausalLM  # Any: transformers' Auto classes share no typed base
    if kind != "policy":
        has_classifier = type(settings) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        auto, settings.num_labels = AutoModelForSequenceClassification if has_classifier else AutoModel, 1
    with torch.device("meta"):
        model = auto.from_config(settings)
        if kind == "critic" and not isinstance(dict(model.named_children()).get(SCORE), nn.Linear):
            return AutoModel.from_config(settings)
    return model


def _set_pad_token(tokenizer: Any) -> None:  # Any: as in flowrl.data.chat
    """Sets a pad token that is never the last token of a row: bos if it differs from eos, otherwise a new token.

    Many tokenizers use eos as the pad token. transformers would then skip the final eos, which `RewardModel` scores.
    Other pad tokens are replaced, too, because a conversation template may end a response with them.
    """
    bos = tokenizer.bos_token
    tokenizer.add_special_tokens({"pad_token": bos if bos and bos != tokenizer.eos_token else _NEW_PAD_TOKEN})
