"""The model as the engine runs it, and as it finds it again afterwards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from transformers.cache_utils import Cache

from longstraw.engine.evaluation import evaluating
from longstraw.engine.fit import refuse_compiled, refuse_inference_tensors, refuse_noise
from longstraw.engine.randomness import refuse_randomness
from longstraw.engine.recompute import recomputed_layers
from longstraw.engine.turn import turn_of
from longstraw.engine.version import version_of
from longstraw.models import adapted, family_of
from longstraw.models.positions import position_limit, refuse_length_dependent
from longstraw.models.rotary import repair
from longstraw.pages import PageStore
from longstraw.parallel.context import ALONE, Context
from longstraw.state.chain import Chain
from longstraw.state.layer import PieceComplete


class ModelHost:
    """A causal LM, PEFT-wrapped or not, split into backbone and head.

    Args:
        model: the causal LM.
        recompute_layers: see `recompute`.

    Raises:
        ValueError: no family serves the model, it has prompt-learning adapters, its RoPE depends on the length, it is
            compiled, or was made in inference mode.

    Attributes:
        turn: to be taken while the model runs.
        told: writes to parameters that were reported.
    """

    def __init__(self, model: Any, recompute_layers: bool = False) -> None:
        self.model = model
        self.recompute_layers = recompute_layers
        self.told = 0
        refuse_compiled(model)
        refuse_inference_tensors(model)
        causal_lm = model
        if hasattr(model, "peft_config"):
            kinds = {config.peft_type for config in model.peft_config.values() if config.is_prompt_learning}
            if kinds:
                raise ValueError(
                    f"prompt-learning adapters ({', '.join(sorted(kinds))}) put virtual tokens before the prompt, "
                    "which the engine does not do; use LoRA or full fine-tuning"
                )
            if hasattr(model, "get_base_model"):
                causal_lm = model.get_base_model()
        if not hasattr(causal_lm, "config"):
            raise ValueError(f"a transformers causal LM is needed, got {type(causal_lm).__name__}")
        text_config = causal_lm.config.get_text_config()
        self.family = family_of(text_config.model_type)
        try:
            self.backbone, self.head = self.family.parts(causal_lm)
        except AttributeError as error:
            raise ValueError(
                f"a transformers causal LM is needed, got {type(causal_lm).__name__} ({error}): load the model with "
                "AutoModelForCausalLM"
            ) from error
        if self.backbone.config.model_type != text_config.model_type:  # its text model would keep its own attention
            raise ValueError(
                f"no family serves the {text_config.model_type} text model inside {type(causal_lm).__name__}: load "
                "the text model alone with AutoModelForCausalLM, or add its layout in longstraw/models"
            )
        self.turn = turn_of(self.backbone)
        self.config = text_config
        self.layers = self.family.layers(text_config)
        self._report_without_gradient()
        refuse_length_dependent(text_config)
        with self.turn.taken(), torch.inference_mode(False):
            repair(self.backbone)

    @property
    def device(self) -> torch.device:
        return next(self.backbone.parameters()).device

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def position_limit(self) -> int | None:
        """Positions that the model is made for: its own, or what an explicit RoPE override stretches them to."""
        return position_limit(self.config)

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for _, p in self.trainable()]

    def parameter_version(self) -> int:
        """A number that changes with what the model computes: see `version_of`."""
        return version_of(self.model, self.told)

    def new_chain(self, store: PageStore, grad_from: int) -> Chain:
        return Chain([layer.chain(store, grad_from) for layer in self.layers], context=store.context)

    @contextmanager
    def running(self, context: Context = ALONE) -> Iterator[None]:
        """The model on the engine's attention and caches, in evaluation mode; restored on leaving, also by exception.

        Args:
            context: the ranks that run it together, so that what one refuses afterwards all do.

        Raises:
            ValueError: dropout or a router's noise is active, or the model is compiled: a recomputed graph would be
                another function.
            RuntimeError: the model drew random numbers.
        """
        refuse_noise(self.model)
        refuse_compiled(self.model)
        refuse_inference_tensors(self.model)
        recomputed = recomputed_layers(self.backbone) if self.recompute_layers else nullcontext()
        constant = refuse_randomness(self.device, self._run_a_little, context)
        with evaluating(self.model), adapted(self.backbone, self.layers), recomputed, constant:
            yield

    def forward(self, ids_BT: torch.Tensor, start: int, cache: Cache) -> torch.Tensor | None:
        """Hidden states [B, T, E] of a piece whose first token stands at `start`; None if its output is not read."""
        positions = torch.arange(start, start + ids_BT.shape[1], device=ids_BT.device)[None]
        try:
            return self.backbone(
                input_ids=ids_BT, position_ids=positions, cache=cache, use_cache=True, return_dict=True
            ).last_hidden_state
        except PieceComplete:
            return None

    def _run_a_little(self) -> None:
        cache = self.new_chain(PageStore(self.device), 0).enter(0)
        with torch.no_grad():
            hidden_1TE = self.forward(torch.zeros(1, 4, dtype=torch.long, device=self.device), 0, cache)
            assert hidden_1TE is not None
            self.head(hidden_1TE)

    def _report_without_gradient(self) -> None:
        trainable = {name for name, p in self.backbone.named_parameters() if p.requires_grad}
        idle = [name for name in self.family.without_gradient(self.backbone) if name in trainable]
        if idle:
            warnings.warn(
                f"{len(idle)} trainable parameters get no gradient and stay as they are, as in the stock model, whose "
                f"choice of tokens has none: {', '.join(idle[:3])}{', ...' if len(idle) > 3 else ''}. Set "
                "requires_grad_(False) on them to say so",
                stacklevel=4,
            )
