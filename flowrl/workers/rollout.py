"""Rollout: the actor's weights answering prompts."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from flowrl.config import CheckFailed, ModelConfig, RolloutConfig
from flowrl.controller.placement.plan import Mesh
from flowrl.controller.worker import Dispatch, Worker, register
from flowrl.data.batch.tensordicts import objects
from flowrl.data.chat import ChatTokenizer
from flowrl.engines.models.int8 import quantized_copy
from flowrl.engines.models.loading import LanguageModel, load_policy
from flowrl.engines.models.sharded_loading import stream_full_weights
from flowrl.engines.models.weights import full_weights, gathered_weights, meta_copy, to_tensors, write_weights
from flowrl.engines.rollout.hf.engine import HfRollout
from flowrl.engines.rollout.requests import Prompt
from flowrl.engines.rollout.responses import PromptError, RolloutError
from flowrl.engines.rollout.serving import State
from flowrl.engines.rollout.weight_check import Compared, WeightSamples, refuse_wrong
from flowrl.workers.actor import Actor
from flowrl.workers.group_buffer import Groups
from flowrl.workers.response_tensordict import RESPONSE_COLUMNS, response_table

if TYPE_CHECKING:
    from flowrl.engines.rollout.vllm.links import Described, SharedPart


class Rollout(Worker):
    """Samples responses. In one process with the actor it samples from the very weights that are trained, or from a
    quantised copy that it makes anew of each version.

    Args:
        config: the engine and how it samples.
        model: what the actor starts from.
        seed: keys the sampling, together with each row's `prompt_id` and `sample`.
    """

    replicated = stateless = True

    @classmethod
    def select_class(
        cls, mesh: Mesh, config: RolloutConfig, *_: Any, **__: Any
    ) -> type[Worker]:  # Any: the constructor's
        """The worker of the engine that the config asks for."""
        return _VllmRollout if config.engine == "vllm" else cls

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        self.seed, self._groups, self._max_rows = seed, Groups(), config.max_num_seqs
        actor = self.peer("actor")
        # Of an actor that ranks hold in parts, all of them must live here: they put its weights together.
        self._actor = actor if isinstance(actor, Actor) and actor.shares_weights_with(self) else None
        self._quantized = config.quantization is not None
        self.model = self._model(model)
        self.tokenizer = ChatTokenizer(model.path)
        self.engine = HfRollout(self.model, self.tokenizer.tokenizer, config, torch.device(self.device))

    def _model(self, config: ModelConfig) -> LanguageModel:
        """What it samples from: the actor's own or what takes the place of that, or another that starts alike."""
        if self._quantized:
            source = load_policy(config, on_meta=True)
            copy = quantized_copy(source, torch.device(self.device))
            write_weights(copy, stream_full_weights(source))
            return copy
        if self._actor is None:
            return load_policy(config)
        return meta_copy(self._actor.model) if self._actor.lends_copies else self._actor.model

    @register(
        Dispatch.DP_COMPUTE_PROTO,
        blocking=False,
        reads=("prompt_ids", "prompt_id", "sample"),
        writes=RESPONSE_COLUMNS,
    )
    def generate(self, batch: TensorDict, greedy: bool = False) -> TensorDict:
        """A response to every row's prompt: sampled, or the likeliest token each time with `greedy`."""
        prompts = objects(batch, "prompt_ids")
        with self._weights():
            answers = self.engine.generate(
                prompts, batch["rows", "prompt_id"], batch["rows", "sample"], seed=self.seed, greedy=greedy
            )
        return response_table(prompts, answers, self.tokenizer)

    # Groups as they come.

    @register(Dispatch.ONE_TO_ALL, blocking=False, reads=("prompt_ids", "prompt_id", "sample"), resend=False)
    def add(self, batch: TensorDict, samples: int) -> dict[int, str | None]:
        """Takes groups, which `poll` works on: the rows of prompts, so many of each.

        Returns: for the `prompt_id` of each why the engine refuses it, which goes on after 'the prompt'; None where it
            is taken.
        Raises:
            RolloutError: it samples from an actor's weights, which training changes without a word.
        """
        if self._actor is not None:
            raise RolloutError(
                "the rollout answers with the weights of the actor in its process, which training changes while rows "
                "run: give rollout a pool of its own in the placement, or set schedule.kind to sync or one_step_off"
            )
        answers = {number: self._refused(rows) for number, rows in self._groups.requests(batch, samples, self.seed)}
        self._groups.add(batch, {number for number, why in answers.items() if why is None})
        return answers

    def _refused(self, rows: Sequence[Prompt]) -> str | None:
        """Has the engine take the rows of a prompt, all or none; why it has not."""
        try:
            self.engine.add(rows)
        except PromptError as error:
            return error.why
        return None

    @register(
        Dispatch.COLLECT,
        blocking=False,
        rows="unknown",
        writes=(*RESPONSE_COLUMNS, "prompt_id", "sample"),
        resend=False,
    )
    def poll(self, slice_s: float) -> TensorDict:
        """Works until all rows of some group are answered and none waits to take their place, or for so long and the
        step that is running then; gives the rows of all answered groups, in the order in which they were added.

        With nothing to work on, and in the middle of an update, it gives at once what there is, so that what comes next
        need not wait: whoever asks knows whether it was given anything.
        """
        deadline = time.monotonic() + slice_s
        if self.engine.state is not State.UPDATING:
            self._work(deadline)
        return self._groups.pop_complete(self.tokenizer)

    def _work(self, deadline: float) -> None:
        while self.engine.num_running and not (self._groups.any_whole and self.engine.num_running <= self._max_rows):
            left_s = deadline - time.monotonic()
            self._groups.answered(self.engine.poll(max(0.0, left_s)))
            if left_s <= 0:
                return

    @register(Dispatch.ONE_TO_ALL, blocking=False, resend=False)
    def abort(self, prompt_ids: Sequence[int]) -> None:
        """Drops the groups of these prompts, whole or not; prompts that it does not work on are none."""
        self.engine.abort(self._groups.drop(prompt_ids))

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def abort_all(self) -> None:
        """Drops every group; of a process that was lost, those that the one in its place was given."""
        self.engine.abort(self._groups.drop())

    @property
    def shares_weights(self) -> bool:
        """Whether it samples from the very weights that are trained."""
        return self._actor is not None and not self._quantized

    @property
    def weight_owners(self) -> tuple[Worker, ...]:
        return () if self._actor is None else (self._actor,)

    def _weights(self) -> AbstractContextManager[None]:
        """Whole weights, for a call: those of an actor in parts or with an adapter are put together for its length."""
        if self._actor is None or not self.shares_weights or not self._actor.lends_copies:
            return nullcontext()
        return gathered_weights(self.engine.model, self._actor.model)

    @register(Dispatch.ONE_TO_ALL, blocking=False)
    def set_version(self, version: int) -> None:
        """Numbers the weights that are sampled from, where they are the actor's own, and quantises them anew."""
        assert self._actor is not None, "weights of another process come through load_weights"
        if self._quantized:
            write_weights(self.model, full_weights(self._actor.model))
        self.engine.version = version

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_weights(self, weights: Mapping[str, np.ndarray], version: int, chunk: int = 0, of: int = 1) -> None:
        """Takes the actor's weights from another process, in so many calls; a rank with the actor's own has them.

        From the first part to the last the engine refuses to answer, and after an update that was not finished too,
        until a whole one has come. A first part in the middle of an update begins anew: a process that has taken a lost
        one's place may be told twice.
        """
        if self.shares_weights:
            self.engine.version = version
        else:
            self._receive(weights, version, chunk, of)

    def _receive(self, part: Any, version: int, chunk: int, of: int) -> None:  # Any: as the engine takes it
        if chunk == 0:
            if self.engine.state is State.UPDATING:
                self.engine.abort_update()
            self.engine.begin_update(version)
        self.engine.receive(part)
        if chunk == of - 1:
            self.engine.commit()

    @register(Dispatch.ONE_TO_ALL, blocking=False, memory=("weights",))
    def check_weights(self, samples: WeightSamples) -> Compared:
        """Compares what is served with samples of the actor's weights. Raises CheckFailed where they differ.

        A process that has taken a lost one's place may be asked after it was given newer weights, which have a check
        of their own.
        """
        is_newer = self.engine.state is State.UPDATING or self.engine.version > samples.version
        if self.shares_weights or (is_newer and self.context.replaced):
            return Compared()
        if self.engine.version != samples.version:
            raise CheckFailed(
                f"the rollout serves version {self.engine.version} of the weights, and the actor's is "
                f"{samples.version}: the update has not arrived"
            )
        compared = self.engine.compare_weights(samples)
        refuse_wrong(compared, samples.version)
        return compared


class _VllmRollout(Rollout):
    """A rollout with vLLM, alone in its process. Weights come to it from whichever process trains them."""

    def __init__(self, config: RolloutConfig, model: ModelConfig, *, seed: int) -> None:
        from flowrl.engines.rollout.vllm.engine import VllmRollout  # noqa: PLC0415 (an extra, and it takes the process over)

        self.seed, self._actor, self._quantized = seed, None, config.quantization is not None
        self._groups, self._max_rows = Groups(), config.max_num_seqs
        self.tokenizer = ChatTokenizer(model.path)
        self.engine = VllmRollout(
            model, self.tokenizer.tokenizer, config, tp=self.context.num_tp_devices, sleeps=self.context.can_offload
        )

    @classmethod
    def can_offload_device(
        cls, device: str, config: RolloutConfig, *_: Any, **__: Any
    ) -> bool:  # Any: the constructor's
        return config.leaves_devices(gpus=device != "cpu")

    def offload(self, *, keep_weights: bool) -> None:
        if self.context.can_offload and self.engine.awake:
            self.engine.sleep()

    def onload(self) -> None:
        if self.engine.asleep:
            self.engine.wake()

    def onload_parts(self, parts: tuple[str, ...]) -> None:
        if self.engine.asleep.intersection(parts):
            self.engine.wake(parts)

    def _receive(self, part: Any, version: int, chunk: int, of: int) -> None:
        super()._receive(to_tensors(part) if isinstance(part, dict) else part, version, chunk, of)

    # From the actor's GPUs, see engines/rollout/vllm/links.py. What comes so cannot come again.

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_shared(self, parts: "Sequence[SharedPart]", version: int, chunk: int, of: int) -> None:
        """As `load_weights`, of a part that lies in the memory of the actor's GPUs, those of its ranks."""
        self._refuse_again()
        self._receive(parts[0].merged(parts), version, chunk, of)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay=True, memory=())
    def join_link(self, link: Mapping[str, Any]) -> None:  # Any: the fields of `Link`
        """Joins the actor's link with each device of this replica; done when all have."""
        self._refuse_again()
        self.engine.join_link(link, 1 + self.rank * self.context.num_tp_devices)

    @register(Dispatch.ONE_TO_ALL, blocking=False, replay="chunk", memory=("weights",))
    def load_sent(self, described: "Described", version: int, chunk: int, of: int) -> None:
        """As `load_weights`, of a part that the actor broadcasts through the link meanwhile."""
        self._refuse_again()
        self._receive(described, version, chunk, of)

    def _refuse_again(self) -> None:
        if self.context.replaced:
            raise RuntimeError(
                "the rollout's process was lost, and the weights that it had came from GPU to GPU, which leaves "
                "nothing to give another process: go on from the last checkpoint (resume: auto), or set "
                "rollout.transfer.via: object_store"
            )
