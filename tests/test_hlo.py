"""Every collective of a compiled program is found, with exactly the devices that it joins."""

from __future__ import annotations

import math

import numpy as np
import pytest
from eight_devices import on_eight_devices
from hypothesis import given
from hypothesis import strategies as st

from thundersync_jax import hlo

pytestmark = pytest.mark.optimized

HEADER = "HloModule m, is_scheduled=true, entry_computation_layout={()->f32[]}, num_partitions=8\n"


def only(line: str, header: str = HEADER) -> hlo.Collective:
    (found,) = hlo.collectives(header + line)
    return found


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,1,2,3,4,5,6,7}}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("{{0}, {1}}", ((0,), (1,))),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(2,1,0)", ((0, 4), (2, 6), (1, 5), (3, 7))),
        ("[1,8]<=[8]", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['a'=2,'b'=4] {'b'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", ((3, 1), (2, 0))),
        ("mesh[a=2,b=4] {b}", ((0, 1, 2, 3), (4, 5, 6, 7))),
    ],
)
def test_groups_in_every_syntax(text: str, groups: hlo.Groups) -> None:
    assert hlo.parse_groups(text) == groups
    line = (
        f"  %all-reduce.1 = f32[2,3]{{1,0:T(8,128)S(1)}} all-reduce(%x), channel_id=1, "
        f"replica_groups={text}, use_global_device_ids=true, to_apply=%add"
    )
    assert only(line) == hlo.Collective(
        kind=hlo.Kind.ALL_REDUCE, name="all-reduce.1", replica_groups=groups, bytes=24
    )


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_iota_groups_equal_numpys(data: st.DataObject, dims: list[int]) -> None:
    size = math.prod(dims)
    num_groups = data.draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
    order = data.draw(st.permutations(range(len(dims))))
    shown = ",".join(map(str, order))
    text = f"[{num_groups},{size // num_groups}]<=[{','.join(map(str, dims))}]T({shown})"
    want = np.arange(size).reshape(dims).transpose(order).reshape(num_groups, -1)
    assert hlo.parse_groups(text) == tuple(map(tuple, want.tolist()))


@given(st.data(), st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_named_axes_equal_numpys(data: st.DataObject, dims: list[int]) -> None:
    names = [f"'{chr(97 + i)}'" for i in range(len(dims))]
    used = data.draw(st.lists(st.sampled_from(range(len(dims))), min_size=1, unique=True))
    axes = ",".join(f"{name}={size}" for name, size in zip(names, dims, strict=True))
    text = f"mesh[{axes}] {{{','.join(names[i] for i in used)}}}"
    rest = [i for i in range(len(dims)) if i not in used]
    ids = np.arange(math.prod(dims)).reshape(dims).transpose(*rest, *used)
    want = ids.reshape(-1, math.prod(dims[i] for i in used))
    assert hlo.parse_groups(text) == tuple(map(tuple, want.tolist()))


ALL = tuple(range(8))
ALONE = tuple((i,) for i in range(8))


@pytest.mark.parametrize(
    ("operation", "attributes", "groups"),
    [
        ("all-reduce", "channel_id=1, replica_groups={}, use_global_device_ids=true", None),
        # Without the flag a group lists replicas, and joins all their partitions.
        ("all-reduce", "channel_id=1, replica_groups={{0}}", (ALL,)),
        # Without a channel nothing leaves the partition: one replica is alone.
        ("all-reduce", "replica_groups={}", ALONE),
        ("all-gather", "replica_groups={{0}}, dimensions={0}", ALONE),
        ("all-to-all", "channel_id=3, replica_groups={{0,1,2,3},{4,5,6,7}}", (ALL[:4], ALL[4:])),
        ("all-to-all", "channel_id=3, replica_groups={}", (ALL,)),
        ("ragged-all-to-all", "channel_id=3, replica_groups=[1,8]<=[8]", (ALL,)),
        ("collective-broadcast", "channel_id=3, replica_groups={{6,7}}", ((6, 7),)),
    ],
)
def test_ids_are_devices_whatever_the_instruction_counts(
    operation: str, attributes: str, groups: hlo.Groups | None
) -> None:
    found = only(f"  ROOT %x.1 = bf16[4]{{0}} {operation}(%y), {attributes}, metadata={{}}")
    assert (found.kind, found.replica_groups, found.bytes) == (operation, groups, 8)


def test_replicas_and_partitions_make_devices() -> None:
    header = "HloModule m, replica_count=2, num_partitions=4\n"
    line = "  %x = f32[] all-reduce(%y), replica_groups={{0,1}}, to_apply=%add"
    assert only(line, header).replica_groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    line = "  %x = f32[] collective-permute(%y), channel_id=1, source_target_pairs={{0,3}}"
    assert only(line, header).source_target_pairs == ((0, 3), (4, 7))


def test_asynchronous_forms_count_once_by_their_result() -> None:
    text = (
        "  %g = (f32[4]{0}, f32[32]{0:S(1)}) all-gather-start(%x), channel_id=1, "
        "replica_groups=[1,8]<=[8], dimensions={0}, use_global_device_ids=true\n"
        "  %gd = f32[32]{0} all-gather-done(%g)\n"
        "  %p = (bf16[8,2]{1,0:T(8,128)(2,1)}, bf16[8,2]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%gd), channel_id=2, source_target_pairs={{0,0},{4,2},{2,4}}\n"
        "  %pd = bf16[8,2]{1,0} collective-permute-done(%p)\n"
        "  %r = (f32[2]{0}, /*index=1*/pred[3]{0}) all-reduce-start(%a, %b), channel_id=3, "
        "replica_groups={{0,1}}, use_global_device_ids=true, to_apply=%add\n"
        "  %s = ((f32[16]{0}, f32[8]{0}), (f32[2]{0}, f32[1]{0}), u32[]) "
        "reduce-scatter-start(%c, %d), channel_id=4, replica_groups=[1,8]<=[8], "
        "use_global_device_ids=true, dimensions={0}, to_apply=%add\n"
        '  %n = f32[2]{0} add(%a, %b), metadata={op_name="jit(f)/all-reduce(x)"}\n'
    )
    found = hlo.collectives(HEADER + text)
    assert [(c.name, c.bytes) for c in found] == [("g", 128), ("p", 32), ("r", 11), ("s", 12)]
    assert found[1].source_target_pairs == ((0, 0), (4, 2), (2, 4))
    assert found[1].replica_groups is None


def test_a_tpus_chain_of_pieces_counts_once() -> None:
    """Each piece of work beside an asynchronous collective repeats it, with its channel."""
    line = (
        "  %g.{name} = bf16[64,8]{{1,0}} all-gather(%x), channel_id={channel}, "
        "replica_groups=[1,8]<=[8], dimensions={{0}}, use_global_device_ids=true, "
        'frontend_attributes={{chain_id="{chain}"}}, metadata={{}}\n'
    )
    pieces = ((1, 5, 2), (2, 5, 2), (3, 5, 2), (4, 6, 3))
    text = "".join(line.format(name=n, channel=c, chain=k) for n, c, k in pieces)
    assert [c.name for c in hlo.collectives(HEADER + text)] == ["g.1", "g.4"]


def test_the_dimensions_of_all_arrays() -> None:
    text = "  %f = (bf16[8,4]{1,0:T(8,128)(2,1)}, s32[]) fusion(f32[16]{0} %x), calls=%c\n"
    assert hlo.array_shapes(text) == {(8, 4), (), (16,)}


def test_a_tpus_fused_reduce_scatter_is_one() -> None:
    text = (
        "%all-reduce-scatter.2 (input: bf16[2048,8]) -> bf16[528,8] {\n"
        "  %all-reduce.1 = bf16[2112,8]{1,0} all-reduce(%pad), channel_id=2, "
        "replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add\n"
        "}\n"
    )
    found = only(text)
    assert (found.kind, found.bytes) == (hlo.Kind.REDUCE_SCATTER, 528 * 8 * 2)


def test_what_cannot_be_read_raises() -> None:
    for line in (
        "  %x = f32[] all-reduce(%y), channel_id=1, replica_groups=@new{0}, to_apply=%add",
        "  %x = f32[] all-gather(%y), channel_id=1, dimensions={0}",
        "  %x = f32[] collective-permute(%y), channel_id=1",
    ):
        with pytest.raises(ValueError, match="could be read in"):
            hlo.collectives(HEADER + line)
    with pytest.raises(ValueError, match="unknown axes"):
        hlo.parse_groups("mesh['a'=2] {'b'}")


def test_a_deliberate_exchange_between_replicas_is_found_and_its_absence_is_not() -> None:
    """Real programs on 8 devices, in the default order and in a shuffled one."""
    for found in on_eight_devices("collectives"):
        assert found == {
            "within": {"data": 0, "fsdp": 1, "tensor": 0},
            "psum": {"data": 1, "fsdp": 1, "tensor": 0},
            "ppermute": {"data": 1, "fsdp": 0, "tensor": 0},
            "identity": {"data": 0, "fsdp": 0, "tensor": 0},
            "gather": {"data": 0, "fsdp": 0, "tensor": 1},
        }
