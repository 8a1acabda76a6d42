"""What a call costs: computations count as often as they run, and FLOPs are those of 6 N T."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from thundersync_jax import hlo, hlo_cost
from thundersync_jax.config_sections import OptimizerSection
from thundersync_jax.hlo_cost import Assumed
from thundersync_jax.learner.optimizer import make_optimizer
from thundersync_jax.learner.program_names import Fold, Shapes
from thundersync_jax.learner.programs import Programs
from thundersync_jax.learner.score import ScoreSettings
from thundersync_jax.model.presets import preset
from thundersync_jax.model.transformer import num_parameters
from thundersync_jax.sharding import MeshShape, make_mesh

pytestmark = pytest.mark.optimized

MESH = make_mesh(MeshShape(), jax.devices()[:1])

# As TPU compilers print a product of [512, 1024] and [1024, 16, 128]: head by head, or summed over
# them; and a batch of 4 products [8, 16] x [16, 32] whose batch is a dilated window.
CONVOLUTIONS = {
    "heads out": (
        "bf16[512,1024,1]", "bf16[16,1024,128]", "bf16[512,16,128]",
        "window={size=16 pad=15_15 rhs_reversal=1}, dim_labels=bf0_0io->b0f",
        2 * 512 * 1024 * 16 * 128,
    ),
    "heads in": (
        "bf16[512,16,128]", "bf16[16,128,1024]", "bf16[512,1024,1]",
        "window={size=16}, dim_labels=b0f_0io->bf0",
        2 * 512 * 1024 * 16 * 128,
    ),
    "batch": (
        "f32[4,8,16]", "f32[4,16,32]", "f32[4,8,32]",
        "window={size=4 stride=3 pad=0_0 lhs_dilate=4}, dim_labels=0bf_0io->0bf",
        2 * 4 * 8 * 16 * 32,
    ),
    "plain": (
        "f32[8,16]", "f32[16,32]", "f32[8,32]", "dim_labels=bf_io->bf", 2 * 8 * 16 * 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_product_written_as_a_convolution_has_the_products_flops(case: str):
    lhs, rhs, out, attributes, flops = CONVOLUTIONS[case]
    text = f"""HloModule m

ENTRY %main (a: {lhs}, b: {rhs}) -> {out} {{
  %a = {lhs}{{1,0}} parameter(0)
  %b = {rhs}{{1,0}} parameter(1)
  ROOT %c = {out}{{1,0}} convolution(%a, %b), {attributes}
}}
"""
    assert hlo_cost.cost(text, MESH, Assumed()).flops == flops


BY_PAIRS = "channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true"
LOOPS = """HloModule m, num_partitions=4

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%inner_test (p: (s32[], f32[8,8])) -> pred[] {
  %p = (s32[], f32[8,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(72)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%inner (p.1: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %p.1 = (s32[], f32[8,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %w = f32[8,8]{1,0} get-tuple-element(%p.1), index=1
  %dot = f32[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %all-reduce = f32[8,8]{1,0} all-reduce(%dot), BY_PAIRS, to_apply=%add
  %two = s32[] constant(2)
  %next = s32[] add(%i.1, %two)
  ROOT %t = (s32[], f32[8,8]{1,0}) tuple(%next, %all-reduce)
}

%outer_test (p.2: (s32[], f32[8,8], s32[])) -> pred[] {
  %p.2 = (s32[], f32[8,8]{1,0}, s32[]) parameter(0)
  %i.2 = s32[] get-tuple-element(%p.2), index=0
  %n.2 = s32[] get-tuple-element(%p.2), index=2
  ROOT %lt.2 = pred[] compare(%i.2, %n.2), direction=LT
}

%outer (p.3: (s32[], f32[8,8], s32[])) -> (s32[], f32[8,8], s32[]) {
  %p.3 = (s32[], f32[8,8]{1,0}, s32[]) parameter(0)
  %z = s32[] constant(0)
  %w.3 = f32[8,8]{1,0} get-tuple-element(%p.3), index=1
  %n.3 = s32[] get-tuple-element(%p.3), index=2
  %begin = (s32[], f32[8,8]{1,0}) tuple(%z, %w.3)
  %loop = (s32[], f32[8,8]{1,0}) while(%begin), condition=%inner_test, body=%inner
  %w.4 = f32[8,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %t.3 = (s32[], f32[8,8]{1,0}, s32[]) tuple(%z, %w.4, %n.3)
}

ENTRY %main (w.0: f32[8,8], n.0: s32[]) -> (s32[], f32[8,8], s32[]) {
  %w.0 = f32[8,8]{1,0} parameter(0)
  %n.0 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %start = (s32[], f32[8,8]{1,0}, s32[]) tuple(%zero, %w.0, %n.0)
  ROOT %while = (s32[], f32[8,8]{1,0}, s32[]) while(%start), condition=%outer_test, body=%outer
}
"""


def test_what_stands_in_loops_counts_as_often_as_it_runs():
    """A loop to 72 in steps of 2, inside of one that an argument bounds: 36 x 5 products and sums
    over `fsdp`.
    """
    mesh = Mesh(np.array(jax.devices() * 4).reshape(2, 2, 1), ("data", "fsdp", "tensor"))
    found = hlo_cost.cost(LOOPS.replace("BY_PAIRS", BY_PAIRS), mesh, Assumed(trips=5))
    assert found.flops == 36 * 5 * 2 * 8**3
    # A ring of two receives its neighbour's half and then the sum of the other half.
    assert found.collectives["fsdp"] == (36 * 5, 36 * 5 * 8 * 8 * 4)
    assert found.collectives["data"] == (0, 0)
    assert found.link_bytes == 36 * 5 * 8 * 8 * 4


SLICES = """HloModule m

%slice (p0: f32[36,8,8], p1: s32[]) -> f32[1,8,8] {
  %p0 = f32[36,8,8]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  ROOT %s = f32[1,8,8]{2,1,0} dynamic-slice(%p0, %p1, %z, %z), dynamic_slice_sizes={1,8,8}
}

%nested (q0: f32[36,8,8], q1: s32[]) -> f32[1,8,8] {
  %q0 = f32[36,8,8]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %cast = f32[36,8,8]{2,1,0} bitcast(%q0)
  %part = f32[1,8,8]{2,1,0} fusion(%cast, %q1), kind=kLoop, calls=%slice
  ROOT %neg = f32[1,8,8]{2,1,0} negate(%part)
}

%update (r0: f32[36,8,8], r1: f32[1,8,8], r2: s32[]) -> f32[36,8,8] {
  %r0 = f32[36,8,8]{2,1,0} parameter(0)
  %r1 = f32[1,8,8]{2,1,0} parameter(1)
  %r2 = s32[] parameter(2)
  %z.1 = s32[] constant(0)
  ROOT %put = f32[36,8,8]{2,1,0} dynamic-update-slice(%r0, %r1, %r2, %z.1, %z.1)
}

ENTRY %main (w: f32[36,8,8], i: s32[]) -> f32[36,8,8] {
  %w = f32[36,8,8]{2,1,0:T(8,128)} parameter(0)
  %i = s32[] parameter(1)
  %layer = f32[1,8,8]{2,1,0:T(8,128)S(1)} fusion(%w, %i), kind=kLoop, calls=%nested
  ROOT %out = f32[36,8,8]{2,1,0:T(8,128)} fusion(%w, %layer, %i), kind=kLoop, calls=%update
}
"""


def test_bytes_are_those_in_hbm_and_of_slices_their_parts():
    """A layer is read into on-chip memory, and then written back in place; so is an index twice."""
    layer, index = 8 * 8 * 4, 4
    assert hlo_cost.cost(SLICES, MESH, Assumed()).hbm_bytes == 2 * layer + 2 * index


@pytest.mark.parametrize(
    ("kind", "num_bytes"),
    [
        (hlo.Kind.ALL_GATHER, 75),
        (hlo.Kind.ALL_TO_ALL, 75),
        (hlo.Kind.ALL_REDUCE, 150),
        (hlo.Kind.REDUCE_SCATTER, 300),
    ],
)
def test_a_ring_of_four_receives_what_it_lacks(kind: hlo.Kind, num_bytes: int):
    collective = hlo.Collective(kind=kind, name="c", replica_groups=((0, 1, 2, 3),), bytes=100)
    assert hlo_cost.received_bytes(collective, 8) == num_bytes
    of_all = hlo.Collective(kind=kind, name="c", bytes=100)  # one group of all devices
    assert hlo_cost.received_bytes(of_all, 4) == num_bytes


def test_a_linear_stack_has_6_n_t():
    """Forward, and backward in weights and inputs, of a scan over layers: 2 + 4 FLOPs a weight and
    token, but for the first layer's inputs.
    """
    layers, width, tokens = 7, 32, 64

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0])

    abstract = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((tokens, width), jnp.float32)
    text = jax.jit(jax.grad(loss)).lower(abstract, x).compile().as_text()
    found = hlo_cost.cost(text or "", MESH, Assumed())
    assert found.flops == 6 * layers * width**2 * tokens


def test_the_streaming_step_of_a_tiny_model_has_the_flops_of_its_parts():
    """3 lanes of 32 tokens after 16 of a prompt: 6 N T of the blocks, 8 of the head, which repeats
    its forward pass in pieces, and 12 of every query-key pair.
    """
    model = preset("tiny", vocab_size=128)
    lanes, tokens, prompt = 3, 32, 16
    shapes = Shapes(
        lanes_per_call=lambda bucket: lanes,
        num_pairs=1,
        num_held=0,
        num_slots=1,
        slot_length=prompt,
    )
    settings = ScoreSettings(model=model, logprob_chunk=model.vocab_size)
    made = Programs(settings, make_optimizer(OptimizerSection()), MESH, shapes)
    text = made.lower(Fold(prompt, tokens)).compile().as_text() or ""
    found = hlo_cost.cost(text, MESH, Assumed(trips=lanes))
    head = model.vocab_size * model.embed_dim
    blocks = num_parameters(model) - 2 * head
    pairs = tokens * (prompt + tokens) * model.num_heads * model.head_dim * model.num_layers
    expected = lanes * (6 * blocks * tokens + 8 * head * tokens + 12 * pairs)
    assert found.flops == pytest.approx(expected, rel=0.02)
