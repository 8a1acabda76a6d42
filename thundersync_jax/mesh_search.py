"""Which mesh of the same chips would train fastest, by a model of the streaming step.

Of a replica of fsdp x tensor chips, one trajectory after the other: arithmetic is shared by its
chips; over `fsdp` every layer's weights are gathered for the forward pass, its repetition and the
backward pass, gradients are scattered once, keys and values gathered and their gradients scattered;
over `tensor` the residual stream is summed six times a layer. How much of that arithmetic hides
depends on the compiler; meshes are ranked as if it hid nothing. What a program needs besides its
arguments shrinks with the chips of a replica.

Called by `planner`, which compiles one mesh and not all of them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from thundersync_jax.learner.memory import MemoryPlan, Sizes
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.sharded import check_mesh
from thundersync_jax.model.transformer import num_parameters
from thundersync_jax.sharding import MeshError, MeshShape
from thundersync_jax.topology import Chip

MOST_GROUPS = 2**16  # of a replica, where each takes next to nothing
_BF16, _F32 = 2, 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
    """A step whose trajectories all have `tokens`, after shared prompts of `prompt_tokens`.

    Attributes:
      num_open_groups: so many should stream at a time.
    """

    model: TransformerConfig
    num_trajectories: int
    tokens: int
    prompt_tokens: int
    num_open_groups: int

    @property
    def num_product_parameters(self) -> int:
        """Parameters that a token is multiplied with: an embedding of its own is looked up."""
        model = self.model
        is_tied = model.tie_embeddings
        return num_parameters(model) - (0 if is_tied else model.vocab_size * model.embed_dim)

    @property
    def model_flops(self) -> float:
        """Of one trajectory, forward and backward in all parameters, and nothing repeated."""
        model = self.model
        blocks = model.forward_flops(self.tokens, self.prompt_tokens)
        return 3 * (blocks + 2 * model.vocab_size * model.embed_dim * self.tokens)

    @property
    def flops(self) -> float:
        """Of one trajectory as it runs: forward, again, and backward in what trains."""
        return self.model_flops * (1 if self.model.lora else 4 / 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshTime:
    """A mesh, the groups that can stream on it, and the learner's seconds a step by the model.

    Attributes:
      overlapped_s: a trajectory takes the longer of its two times.
      serial_s: it takes their sum.
    """

    data: int
    fsdp: int
    tensor: int
    open_groups: int
    arithmetic_s: float
    links_s: float
    overlapped_s: float
    serial_s: float


def fastest_meshes(
    shape: StepShape,
    memory: MemoryPlan,
    compiled_mesh: Mapping[str, int],
    chip: Chip,
    lengths: Sequence[int],
    sizes_on: Callable[[MeshShape], Sizes],
) -> list[MeshTime]:
    """All that the model divides by, best first: those with room for the groups, by serial time,
    and then the others, by room.

    Args:
      memory: of the compiled mesh, with its largest program.
      lengths: padded ones, which fsdp must divide.
      sizes_on: what a learner keeps on another mesh.
    """
    num_chips = math.prod(compiled_mesh.values())
    num_compiled = compiled_mesh["fsdp"] * compiled_mesh["tensor"]
    divisors = [n for n in range(1, num_chips + 1) if num_chips % n == 0]
    found = []
    for fsdp in divisors:
        for tensor in divisors:
            if num_chips % (fsdp * tensor):
                continue
            mesh = MeshShape(data=num_chips // (fsdp * tensor), fsdp=fsdp, tensor=tensor)
            try:
                check_mesh(mesh, shape.model, lengths, num_devices=num_chips)
            except MeshError:
                continue
            other = dataclasses.replace(
                memory,
                sizes=sizes_on(mesh),
                program_bytes=memory.program_bytes * num_compiled // (fsdp * tensor),
            )
            found.append(_mesh_time(shape, other, chip, mesh))
    wanted = shape.num_open_groups
    return sorted(found, key=lambda m: (-min(m.open_groups, wanted), m.serial_s))


def _mesh_time(shape: StepShape, memory: MemoryPlan, chip: Chip, mesh: MeshShape) -> MeshTime:
    replica = mesh.fsdp * mesh.tensor
    arithmetic_s = shape.flops / replica / chip.flops_per_s
    links_s = link_bytes(shape, mesh) / chip.ring_bytes_per_s
    num_runs = -(-shape.num_trajectories // mesh.data)
    sums = _F32 * num_trained(shape.model) / replica
    update_s = 2 * sums * (mesh.data - 1) / mesh.data / chip.ring_bytes_per_s
    return MeshTime(
        **dataclasses.asdict(mesh),
        open_groups=mesh.data * groups_that_fit(memory),
        arithmetic_s=num_runs * arithmetic_s,
        links_s=num_runs * links_s + update_s,
        overlapped_s=num_runs * max(arithmetic_s, links_s) + update_s,
        serial_s=num_runs * (arithmetic_s + links_s) + update_s,
    )


def link_bytes(shape: StepShape, mesh: MeshShape) -> float:
    """That a chip receives for one trajectory."""
    model, tokens = shape.model, shape.tokens
    others_fsdp, others_tensor = 1 - 1 / mesh.fsdp, 1 - 1 / mesh.tensor
    weights = _BF16 * shape.num_product_parameters / mesh.tensor
    gradients = _BF16 * num_trained(model) / mesh.tensor
    row = 2 * _BF16 * model.num_layers * model.num_kv_heads * model.head_dim / mesh.tensor
    keys_values = row * (3 * tokens + 3 * shape.prompt_tokens)  # twice there, once back
    stream = 2 * 6 * _BF16 * model.num_layers * model.embed_dim * tokens / mesh.fsdp
    return others_fsdp * (3 * weights + gradients + keys_values) + others_tensor * stream


def num_trained(model: TransformerConfig) -> int:
    """Parameters that train."""
    if model.lora is None:
        return num_parameters(model)
    return num_parameters(model) - num_parameters(dataclasses.replace(model, lora=None))


def groups_that_fit(memory: MemoryPlan) -> int:
    """Groups of a replica, each with a pair and a prompt slot, beside the largest program."""

    def fits(count: int) -> bool:
        section = dataclasses.replace(memory.config, pool_size=count, prompt_slots=max(1, count))
        return dataclasses.replace(memory, config=section).fits

    return bisect.bisect_left(range(1, MOST_GROUPS + 1), True, key=lambda count: not fits(count))
