"""The learner's compiled programs on its mesh; nothing else of the learner ever compiles.

All but the update run under shard_map, manual over `data` and automatic inside: a replica cannot
communicate with another before the update. Owns no state: buffers go in donated and come back.
`warm_up` compiles everything ahead of time; what is asked for before is compiled then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from thundersync_jax import sharding
from thundersync_jax.learner import streaming
from thundersync_jax.learner.buckets import Lanes, Prompts
from thundersync_jax.learner.compilation import compile_all
from thundersync_jax.learner.placement import Placement, shardings
from thundersync_jax.learner.program_names import (
    Caches,
    Fold,
    Name,
    PromptBackward,
    PromptForward,
    Shapes,
    Turn,
    Whole,
)
from thundersync_jax.learner.reduction import REDUCTIONS
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.learner.streaming import Binding, Params, PromptSlots
from thundersync_jax.learner.sums import Sum
from thundersync_jax.model.trainable import join, partition


@dataclasses.dataclass(frozen=True)
class Program:
    """A program's function, what it donates, and its abstract arguments and results."""

    function: Callable[..., Any]
    donated: tuple[int, ...]
    arguments: tuple[Any, ...]
    results: Any


class Programs:
    """Compiled programs for one model, mesh and optimizer."""

    def __init__(
        self,
        settings: ScoreSettings,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        shapes: Shapes,
    ) -> None:
        self._settings = settings
        self._optimizer = optimizer
        self._mesh = mesh
        self.shapes = shapes
        self.lanes_per_call = shapes.lanes_per_call
        self.placement = Placement(
            settings.model,
            optimizer,
            mesh,
            num_slots=shapes.num_slots,
            slot_length=shapes.slot_length,
            objective=settings.objective,
            sum_type=REDUCTIONS[shapes.reduction].sum_type,
        )
        self.num_replicas = self.placement.num_replicas
        self.caches: Any = None  # trajectory caches, abstract: see TurnPrograms
        self.host_caches: Any = None
        self._compiled: dict[Name, jax.stages.Compiled] = {}

    # -- making and moving state ----------------------------------------------------------------

    def accumulator(self) -> Sum:
        """A sum of gradients, zero."""
        return self._get(Whole.ACCUMULATOR)()

    def held(self) -> Sum:
        """A gradient ahead of its verdict, zero."""
        return self._get(Whole.HELD)()

    def prompt_slots(self) -> PromptSlots | None:
        """The prompt slots, zero; None without any."""
        return None if self.placement.slots is None else self._get(Whole.SLOTS)()

    def place(self, params: Params) -> tuple[Params, Params]:
        """(master, frozen): parameters of any float dtype, as the optimizer's copy of those that
        train and the replicas' copy of those that do not.
        """
        trainable, frozen = partition(self._settings.model, params)
        return jax.tree.map(
            lambda x, like: jax.device_put(x.astype(like.dtype), like.sharding),
            (trainable, frozen),
            (self.placement.master, self.placement.frozen),
        )

    def init_opt_state(self, master: Params) -> Any:
        return jax.jit(self._optimizer.init, out_shardings=shardings(self.placement.opt_state))(
            master
        )

    @property
    def num_programs(self) -> int:
        return len(self._compiled)

    def warm_up(self, names: Iterable[Name]) -> None:
        """Compiles the named programs, in parallel."""
        missing = {name: self._lowering(name) for name in names if name not in self._compiled}
        self._compiled |= compile_all(missing)

    def temporaries(self) -> dict[Name, int]:
        """Bytes of a device that each compiled program takes besides the learner's buffers."""
        made = [Whole.ACCUMULATOR, Whole.HELD, Whole.SLOTS]
        made += [Whole.GATHER] * self.placement.is_master_shared
        is_cpu = self._mesh.devices.flat[0].platform == "cpu"
        return {
            name: _extra_bytes(program, is_cpu=is_cpu)
            for name, program in self._compiled.items()
            if name not in made
        }

    # -- running ----------------------------------------------------------------------------------

    def fold(
        self,
        name: Fold,
        params: Params,
        buffers: tuple[Sum, ...],
        slots: PromptSlots | None,
        coefficients: np.ndarray,
        pair_coefficients: np.ndarray,
        lanes: Lanes,
    ) -> tuple[tuple[Sum, ...], PromptSlots | None, jax.Array]:
        """`streaming.accumulate` on every replica; buffers and slots are donated.

        Args:
          coefficients: [R, num buffers, K]; pair_coefficients: [R, 2, K].
        """
        weigh = self.placement.weights
        weights = (weigh(coefficients), weigh(pair_coefficients))
        return self._get(name)(params, buffers, slots, *weights, lanes)

    def bind(
        self,
        held: Sum,
        buffers: tuple[Sum, ...],
        slots: PromptSlots | None,
        binding: Binding,
    ) -> tuple[Sum, tuple[Sum, ...], PromptSlots | None]:
        """`streaming.bind` on every replica; all but the binding is donated."""
        binding = binding.replace(
            coefficients=self.placement.weights(binding.coefficients),
            pair_coefficients=self.placement.weights(binding.pair_coefficients),
        )
        return self._get(Whole.BIND)(held, buffers, slots, binding)

    def prompt_forward(self, params: Params, slots: PromptSlots, prompts: Prompts) -> PromptSlots:
        """`streaming.prompt_forward` on every replica; slots are donated."""
        return self._get(PromptForward(prompts.tokens.shape[1]))(params, slots, prompts)

    def prompt_backward(
        self,
        params: Params,
        sums: tuple[Sum, ...],
        slots: PromptSlots,
        coefficients: np.ndarray,
        prompts: Prompts,
    ) -> tuple[Sum, ...]:
        """`streaming.prompt_backward` on every replica; sums are donated. coefficients [R, 2]."""
        program = self._get(PromptBackward(prompts.tokens.shape[1]))
        return program(params, sums, slots, self.placement.weights(coefficients), prompts)

    def close(
        self,
        batch: Sum,
        pair: Sequence[Sum],
        coefficients: np.ndarray,
        is_used: np.ndarray,
    ) -> tuple[Sum, Sum, Sum]:
        """`streaming.close_group` on every replica; batch and pair are donated.

        Args:
          coefficients: [R, 2]; is_used: bool [R].
        """
        scalars = (self.placement.weights(coefficients), is_used)
        return self._get(Whole.CLOSE)(batch, *pair, *scalars)

    def update(
        self,
        master: Params,
        opt_state: Any,
        sums: tuple[Sum, ...],
        denominators: Sequence[float],
    ) -> tuple[Params, Any, tuple[Sum, ...], jax.Array]:
        """`streaming.apply_update`; everything is donated."""
        return self._get(Whole.UPDATE)(master, opt_state, sums, self._scalars(denominators))

    def gather(self, master: Params, frozen: Params) -> Params:
        """The replicas' parameters: copies of the master weights, or the same arrays where they lie
        alike, and the frozen ones.
        """
        is_shared = self.placement.is_master_shared
        return join(master if is_shared else self._get(Whole.GATHER)(master), frozen)

    # -- compilation ------------------------------------------------------------------------------

    def lower(self, name: Name) -> jax.stages.Lowered:
        """The lowered program, also for a mesh of devices that are not there (TPU topologies)."""
        return self._lowering(name)()

    def _scalars(self, values: Any) -> np.ndarray:
        return np.asarray(values, self.placement.scalar_dtype)

    def _get(self, name: Name) -> Callable[..., Any]:
        if name not in self._compiled:
            self._compiled[name] = self._lowering(name)().compile()
        return self._compiled[name]

    def _lowering(self, name: Name) -> Callable[[], jax.stages.Lowered]:
        program = self._declare(name)
        jitted = jax.jit(
            program.function,
            donate_argnums=program.donated,
            keep_unused=True,  # or a donated buffer that is not read is not reused either
            out_shardings=shardings(program.results),
        )

        def lower() -> jax.stages.Lowered:
            with jax.set_mesh(self._mesh):
                return jitted.lower(*program.arguments)

        return lower

    def _declare(self, name: Name) -> Program:
        match name:
            case Fold():
                return self._fold_program(name)
            case PromptForward() | PromptBackward():
                return self._prompt_program(name)
            case Whole():
                return self._whole_program(name)
            case Turn() | Caches():
                raise KeyError(f"{name} is a program of TurnPrograms alone")

    @property
    def _sums(self) -> tuple[Any, ...]:
        """What the update divides: the batch sum and the term sums."""
        return (self.placement.accumulator,) * self.placement.num_sums

    @property
    def _summed(self) -> tuple[Any, ...]:
        """The accumulators that a verdict reaches: the batch sum and pairs."""
        return (self.placement.accumulator,) * (1 + 2 * self.shapes.num_pairs)

    def _fold_program(self, name: Fold) -> Program:
        place = self.placement
        num_lanes = self.lanes_per_call(name.bucket)
        slots = place.slots if name.prefix_bucket else None
        pairs = (place.accumulator,) * (2 * self.shapes.num_pairs)
        buffers = (*self._sums, *pairs, *(place.held,) * self.shapes.num_held)
        function = functools.partial(streaming.accumulate, self._settings, name.prefix_bucket)
        return Program(
            self._on_replicas(function, 6),
            donated=(1, 2),
            arguments=(
                place.params,
                buffers,
                slots,
                place.local_weights(len(buffers), num_lanes),
                place.local_weights(2, num_lanes),
                place.lanes(num_lanes, name.bucket),
            ),
            results=(buffers, slots, place.stats(num_lanes)),
        )

    def _prompt_program(self, name: PromptForward | PromptBackward) -> Program:
        place, prompts = self.placement, self.placement.prompts(name.bucket)
        if isinstance(name, PromptForward):
            function = functools.partial(streaming.prompt_forward, self._settings)
            return Program(
                self._on_replicas(function, 3),
                donated=(1,),
                arguments=(place.params, place.slots, prompts),
                results=place.slots,
            )
        weights = place.local_weights(2)
        return Program(
            self._on_replicas(functools.partial(streaming.prompt_backward, self._settings), 5),
            donated=(1,),
            arguments=(place.params, self._sums, place.slots, weights, prompts),
            results=self._sums,
        )

    def _whole_program(self, name: Whole) -> Program:
        place, acc = self.placement, self.placement.accumulator
        match name:
            case Whole.BIND:
                state = (place.held, self._summed, place.slots)
                return Program(
                    self._on_replicas(streaming.bind, 4, num_shared=0),
                    donated=(0, 1, 2),
                    arguments=(*state, place.binding(len(self._summed))),
                    results=state,
                )
            case Whole.CLOSE:
                return Program(
                    self._on_replicas(streaming.close_group, 5, num_shared=0),
                    donated=(0, 1, 2),
                    arguments=(acc, acc, acc, place.local_weights(2), place.is_used()),
                    results=(acc, acc, acc),
                )
            case Whole.UPDATE:
                return Program(
                    functools.partial(streaming.apply_update, self._optimizer),
                    donated=(0, 1, 2),
                    arguments=(
                        place.master,
                        place.opt_state,
                        self._sums,
                        place.scalars(place.num_sums),
                    ),
                    results=(place.master, place.opt_state, self._sums, place.scalars()),
                )
            case Whole.GATHER:
                return Program(
                    lambda master: jax.tree.map(
                        lambda m, p: m.astype(p.dtype), master, place.trainable
                    ),
                    donated=(),
                    arguments=(place.master,),
                    results=place.trainable,
                )
            case Whole.ACCUMULATOR:
                return zeros(acc)
            case Whole.HELD:
                return zeros(place.held)
            case Whole.SLOTS:
                return zeros(place.slots)

    def _on_replicas(
        self, function: Callable[..., Any], num_arguments: int, *, num_shared: int = 1
    ) -> Callable[..., Any]:
        """shard_map over `data`: arguments after the shared ones lose their first axis."""

        def body(*arguments: Any) -> Any:
            shared, local = arguments[:num_shared], arguments[num_shared:]
            results = function(*shared, *jax.tree.map(lambda x: x[0], local))
            return jax.tree.map(lambda x: x[None], results)

        everywhere, split = PartitionSpec(), PartitionSpec(sharding.DATA)
        num_local = num_arguments - num_shared
        return jax.shard_map(
            body,
            mesh=self._mesh,
            in_specs=(*[everywhere] * num_shared, *[split] * num_local),
            out_specs=split,
            axis_names={sharding.DATA},
            check_vma=False,
        )


def _extra_bytes(program: jax.stages.Compiled, *, is_cpu: bool) -> int:
    """What a program needs on a device besides its arguments.

    Accelerators refuse by the peak, which counts no fragments; the CPU's leaves temporaries out.
    """
    memory: Any = program.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    return memory.temp_size_in_bytes + new if is_cpu else max(peak, new)


def zeros(abstract: Any) -> Program:
    def make() -> Any:
        return jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), abstract)

    return Program(make, donated=(), arguments=(), results=abstract)
