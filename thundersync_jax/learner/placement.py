"""Shapes and shardings of everything that the learner keeps or passes on its mesh.

Abstract values only: nothing here allocates. Parameters lie on fsdp and tensor; accumulators and
prompt slots have a leading `data` axis; master weights and moments are spread over `data` too. Of
frozen parameters there is neither. Accumulators use every axis of a replica, for the factors of
adapters use one of them alone.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from thundersync_jax import sharding
from thundersync_jax.learner import streaming
from thundersync_jax.learner.buckets import LaneItem, pad_lanes, pad_prompts
from thundersync_jax.learner.sums import OrderedSum, Sum
from thundersync_jax.losses.objective import Objective
from thundersync_jax.model.kv_cache import KeysValues
from thundersync_jax.model.presets import TransformerConfig
from thundersync_jax.model.trainable import partition
from thundersync_jax.model.transformer import abstract_params, logical_axes


class Placement:
    """Abstract values with shardings, pytrees of jax.ShapeDtypeStruct.

    Attributes:
      params: the replicas' parameters, in the dtype that the model computes in.
      trainable, frozen: the parts of them.
      master: the optimizer's copy of what trains, in at least float32.
      is_master_shared: that and the replicas' are the same arrays.
      accumulator: one sum of gradients, [R, ...].
      held: one gradient ahead of its verdict, [R, ...].
      opt_state: the optimizer's moments and counters.
      slots: prompt slots [R, S, L, P, K, H], or None.
      scalar_dtype: of coefficients: float32, or float64 for float64 parameters.
    """

    def __init__(
        self,
        model: TransformerConfig,
        optimizer: optax.GradientTransformation,
        mesh: Mesh,
        *,
        num_slots: int,
        slot_length: int,
        objective: Objective | None = None,
        sum_type: type[Sum] = OrderedSum,
    ) -> None:
        self.mesh = mesh
        self.objective = objective
        self.num_sums = 1 if objective is None else objective.num_sums
        self._sum_type = sum_type
        self.num_replicas: int = mesh.shape[sharding.DATA]
        stored = abstract_params(model)
        params = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, model.dtype), stored)
        specs = jax.tree.map(
            sharding.partition_spec, logical_axes(model), is_leaf=lambda x: isinstance(x, tuple)
        )
        self.params = self._on_mesh(params, specs)
        self.trainable, self.frozen = partition(model, self.params)
        wide = jax.eval_shape(streaming.zeros_like_params, self.trainable)
        self.scalar_dtype = np.dtype(jax.tree.leaves(wide)[0].dtype)
        self.master = jax.tree.map(
            lambda w, p: self._struct(w, sharding.spread_over_data(p.sharding.spec, p.shape, mesh)),
            jax.eval_shape(streaming.zeros_like_params, partition(model, stored)[0]),
            self.trainable,
        )
        values = jax.tree.map(
            lambda p, w: self._struct(
                jax.ShapeDtypeStruct((self.num_replicas, *w.shape), w.dtype),
                sharding.replica_spec(sharding.spread_over_replica(p.sharding.spec, p.shape, mesh)),
            ),
            self.trainable,
            wide,
        )
        self.held = OrderedSum(values=values)
        self.accumulator = sum_type.abstract(values, self._numbers)
        self.is_master_shared = self.master == self.trainable
        self.opt_state = self._opt_state(optimizer)
        self.slots = self._slots(model, num_slots, slot_length) if num_slots else None

    def local(self, arrays: Any) -> Any:
        """Host arrays [R, ...], split over `data`."""
        return jax.tree.map(lambda x: self._struct(x, PartitionSpec(sharding.DATA)), arrays)

    def local_scalars(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.local(np.zeros((self.num_replicas, *shape), self.scalar_dtype))

    def weights(self, values: Any) -> np.ndarray:
        """Coefficients as the sums take them."""
        return self._sum_type.weights(np.asarray(values, np.float64), self.scalar_dtype)

    def local_weights(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self.local(self.weights(np.zeros((self.num_replicas, *shape))))

    def scalars(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._struct(np.zeros(shape, self.scalar_dtype), PartitionSpec())

    def lanes(self, lanes_per_call: int, bucket: int) -> Any:
        empty: list[list[LaneItem]] = [[]] * self.num_replicas
        lanes = pad_lanes(
            empty, lanes_per_call, bucket, self.scalar_dtype, objective=self.objective
        )
        return self.local(lanes)

    def prompts(self, bucket: int) -> Any:
        return self.local(pad_prompts([None] * self.num_replicas, bucket))

    def binding(self, num_buffers: int) -> Any:
        """Where held gradients go, one a replica."""
        fields: Any = {
            "is_used": np.zeros(self.num_replicas, np.bool_),
            "coefficients": self.weights(np.zeros((self.num_replicas, num_buffers))),
            "pair_coefficients": self.weights(np.zeros((self.num_replicas, 2))),
            "slot": np.zeros(self.num_replicas, np.int32),
            "held_slot": np.zeros(self.num_replicas, np.int32),
        }
        return self.local(streaming.Binding(**fields))

    def is_used(self) -> Any:
        return self.local(np.zeros(self.num_replicas, np.bool_))

    def stats(self, lanes_per_call: int) -> Any:
        """What `streaming.accumulate` reports."""
        shape = (self.num_replicas, streaming.STATISTICS, lanes_per_call)
        return self.local(np.zeros(shape, np.float32))

    def _opt_state(self, optimizer: optax.GradientTransformation) -> Any:
        """Moments lie where their parameters' master copies lie; counters everywhere."""

        def moment(leaf: Any, master: Any) -> jax.ShapeDtypeStruct:
            return self._struct(leaf, _moment_spec(leaf.shape, master))

        return optax.tree.map_params(
            optimizer,
            moment,
            jax.eval_shape(optimizer.init, self.master),
            self.master,
            transform_non_params=lambda leaf: self._struct(leaf, PartitionSpec()),
        )

    def _slots(self, model: TransformerConfig, num_slots: int, length: int) -> Any:
        def keys_values(dtype: Any) -> KeysValues:
            return self.keys_values(model, num_slots, length, dtype)

        numbers = functools.partial(self._numbers, num_slots)
        adjoint = self._sum_type.abstract(keys_values(self.scalar_dtype), numbers)
        return streaming.PromptSlots(
            kv=keys_values(model.dtype),
            adjoint1=adjoint,
            adjoint2=adjoint,
            terms=(adjoint,) * (self.num_sums - 1),
        )

    def keys_values(
        self, model: TransformerConfig, num_slots: int, length: int, dtype: Any
    ) -> KeysValues:
        """Of every replica [S, L, P, K, H]: positions over fsdp, heads over tensor."""
        heads = sharding.TABLE["kv_heads"]
        spec = PartitionSpec(sharding.DATA, None, None, sharding.FSDP, heads, None)
        one = (num_slots, model.num_layers, length, model.num_kv_heads, model.head_dim)
        array: Any = self._struct(
            jax.ShapeDtypeStruct((self.num_replicas, *one), jnp.dtype(dtype)), spec
        )
        return KeysValues(keys=array, values=array)

    def _numbers(self, *shape: int) -> Any:
        """Integers of every replica."""
        return self.local(np.zeros((self.num_replicas, *shape), np.int32))

    def _on_mesh(self, values: Any, specs: Any) -> Any:
        return jax.tree.map(self._struct, values, specs)

    def _struct(self, like: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        placed = NamedSharding(self.mesh, spec)
        return jax.ShapeDtypeStruct(np.shape(like), like.dtype, sharding=placed)


def _moment_spec(shape: tuple[int, ...], master: Any) -> PartitionSpec:
    """Of a moment of the master's shape, or of the mean of such along an axis."""
    spec = tuple(master.sharding.spec)
    if shape == master.shape:
        return PartitionSpec(*spec)
    for axis in range(len(spec)):
        if shape == master.shape[:axis] + master.shape[axis + 1 :]:
            return PartitionSpec(*spec[:axis], *spec[axis + 1 :])
    return PartitionSpec()


def device_bytes(abstract: Any) -> int:
    """Bytes of a pytree of abstract values on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(abstract)
    )


def shardings(abstract: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, abstract)
