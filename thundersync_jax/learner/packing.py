"""Which ready trajectories of a group share a lane: one backward for a combination of gradients.

One backward gives one linear combination. The direct path needs one, sum A_i g_i; an open group
needs two, sum (r_i - c) g_i and sum g_i, which one backward gives only where rewards are equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thundersync_jax.learner.buckets import bucket_of
from thundersync_jax.learner.groups import Member


@dataclasses.dataclass(eq=False)
class _Pack:
    members: list[Member]
    num_positions: int
    padded: int  # positions of the members' own buckets


def pack(
    members: Sequence[Member], buckets: Sequence[int], *, is_direct: bool
) -> list[tuple[int, tuple[Member, ...]]]:
    """Ready members as (bucket, members of one lane), longest first.

    Args:
      buckets: ladder of the lanes that may be packed; none packs nothing.
      is_direct: any members may share a lane; otherwise those of equal rewards.
    """
    packs: list[_Pack] = []
    longest = buckets[-1] if buckets else 0
    for member in sorted(members, key=_num_positions, reverse=True):
        size = _num_positions(member)
        for found in packs:
            is_equal = is_direct or found.members[0].reward == member.reward
            total = found.num_positions + size
            if is_equal and total <= longest:
                padded = found.padded + member.bucket
                if bucket_of(total, buckets) <= padded:
                    found.members.append(member)
                    found.num_positions, found.padded = total, padded
                    break
        else:
            packs.append(_Pack([member], size, member.bucket))
    return [
        (
            p.members[0].bucket if len(p.members) == 1 else bucket_of(p.num_positions, buckets),
            tuple(sorted(p.members, key=lambda m: m.index)),
        )
        for p in packs
    ]


def _num_positions(member: Member) -> int:
    assert member.example is not None
    return member.example.num_positions
