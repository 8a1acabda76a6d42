"""Reads compiled HLO text: which devices exchange what, and which arrays there are.

Ids in groups and pairs are positions in the program's device assignment, never `device.id`: id i is
`mesh.devices.flat[i]` for a program compiled for `mesh`, whatever the order of its devices.

Called by tests and by `topology.describe`. What cannot be read raises: an unread group is a hole in
the proof that replicas do not communicate.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh

Groups = tuple[tuple[int, ...], ...]


class Kind(enum.StrEnum):
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"
    COLLECTIVE_BROADCAST = "collective-broadcast"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One instruction of the program; in a loop's body it runs once an iteration.

    Attributes:
      name: of the instruction, without the percent sign.
      computation: where it stands in the program's text.
      replica_groups: who exchanges with whom; None is one group of all devices.
      source_target_pairs: who sends to whom; a permute has these instead of groups.
      bytes: of the result on one device.
    """

    kind: Kind
    name: str
    computation: str = ""
    replica_groups: Groups | None = None
    source_target_pairs: Groups = ()
    bytes: int

    @property
    def exchanges(self) -> Groups | None:
        return self.source_target_pairs or self.replica_groups


# TPU compilers print a reduce-scatter as a computation of this name around an all-reduce.
_FUSED_REDUCE_SCATTER = "all-reduce-scatter"
# They also repeat an asynchronous collective in every piece of work that it runs beside.
_CHAIN = re.compile(r" channel_id=(\d+),.* frontend_attributes=\{[^{}]*chain_id=\"(\d+)\"")
# With `use_global_device_ids` these count devices, and without it replicas; the others count
# partitions as soon as they have a channel.
_FLAGGED = (Kind.ALL_REDUCE, Kind.ALL_GATHER, Kind.REDUCE_SCATTER)

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> (?P<shape>.*) \{$")
_INSTRUCTION = re.compile(
    r"^\s*(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) "
    rf"(?P<kind>{'|'.join(sorted(Kind, key=len, reverse=True))})(?P<start>-start)?\("
)
_INTEGERS = r"[\d,]*"
_IOTA = re.compile(rf"\[(?P<shape>{_INTEGERS})\]<=(?P<source>\[.*)")
_ARRANGED = re.compile(rf"\[(?P<dims>{_INTEGERS})\](?:T\((?P<order>{_INTEGERS})\))?")
_NAMED_AXES = re.compile(
    r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\))? \{(?P<used>[^}]*)\}"
)
_GROUPS = re.compile(
    rf" replica_groups=(?P<groups>\{{\}}|\{{\{{[\d,{{}}\s]*\}}\}}"
    rf"|\[{_INTEGERS}\]<=\[{_INTEGERS}\](?:T\({_INTEGERS}\))?|{_NAMED_AXES.pattern})"
)
_PAIRS = re.compile(r" source_target_pairs=(?P<pairs>\{[\d,{}\s]*\})")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[\d,<= ]*)\]")
_LAYOUT_OR_COMMENT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")


def collectives(text: str) -> list[Collective]:
    """The collectives of a compiled program, in the order of its text.

    An asynchronous one counts once. Raises ValueError at groups in an unknown syntax.
    """
    counts = _device_counts(text)
    found, computation, result = [], "", ""
    chains: set[tuple[str, ...]] = set()
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            computation, result = header["name"], header["shape"]
        elif match := _INSTRUCTION.match(line):
            if chain := _CHAIN.search(line):
                if chain.groups() in chains:
                    continue
                chains.add(chain.groups())
            kind, shape = Kind(match["kind"]), match["shape"]
            elements = _tuple_elements(shape)
            if match["start"] and kind != Kind.ALL_REDUCE and len(elements) > 1:
                shape = elements[1]  # (operands, results, contexts...)
            groups, pairs = _exchanges(line, kind, *counts)
            if kind == Kind.ALL_REDUCE and computation.startswith(_FUSED_REDUCE_SCATTER):
                kind, shape = Kind.REDUCE_SCATTER, result
            found.append(
                Collective(
                    kind=kind,
                    name=match["name"],
                    computation=computation,
                    replica_groups=groups,
                    source_target_pairs=pairs,
                    bytes=num_bytes(shape),
                )
            )
    return found


def crossing(found: Iterable[Collective], mesh: Mesh, axis: str) -> list[Collective]:
    """Those that join devices of different coordinates along `axis` of the program's mesh."""
    number = mesh.axis_names.index(axis)
    coordinates = np.indices(mesh.devices.shape)[number].ravel()

    def joins(collective: Collective) -> bool:
        exchanges = collective.exchanges
        if exchanges is None:
            exchanges = (tuple(range(mesh.size)),)
        ids = {i for group in exchanges for i in group}
        if not ids <= set(range(mesh.size)):
            raise ValueError(
                f"{collective.name} names device {max(ids)}, the mesh has {mesh.size}: expected "
                "the mesh that the program was compiled for"
            )
        return any(len({coordinates[i] for i in group}) > 1 for group in exchanges)

    return [collective for collective in found if joins(collective)]


def array_shapes(text: str) -> set[tuple[int, ...]]:
    """The dimensions of every array in a program, operands and results of fused parts included."""
    return {tuple(_integers(m["dims"])) for m in _ARRAY.finditer(text)}


def num_bytes(shape: str) -> int:
    """Of an array, or of all arrays in a tuple."""
    total = 0
    for match in _ARRAY.finditer(_LAYOUT_OR_COMMENT.sub("", shape)):
        digits = re.search(r"\d+", match["dtype"])
        bits = int(digits[0]) if digits else {"pred": 8}.get(match["dtype"], 0)
        elements = math.prod(_integers(match["dims"].replace("<=", "")))
        total += math.ceil(elements * bits / 8)
    return total


def parse_groups(text: str) -> Groups:
    """Groups as XLA prints them: {{0,1},{2,3}}, [2,4]<=[4,2]T(1,0) or mesh['x'=2,'y'=4] {'y'}."""
    if match := _NAMED_AXES.fullmatch(text):
        return _named_axes_groups(match)
    if match := _IOTA.fullmatch(text):
        ids = _arranged(match["source"]).reshape(_integers(match["shape"]))
        return tuple(tuple(int(i) for i in group) for group in ids)
    groups = re.findall(rf"\{{({_INTEGERS})\}}", text.replace(" ", ""))
    return tuple(tuple(_integers(group)) for group in groups if group)


def _exchanges(
    line: str, kind: Kind, replicas: int, partitions: int
) -> tuple[Groups | None, Groups]:
    """(groups, pairs) of devices: replica r of partition p is device r * partitions + p."""
    has_channel = " channel_id=" in line
    counts_devices = " use_global_device_ids=true" in line
    if kind == Kind.COLLECTIVE_PERMUTE:
        pairs = _PAIRS.search(line)
        if pairs is None:
            raise ValueError(f"no source_target_pairs could be read in: {line.strip()}")
        groups = parse_groups(pairs["pairs"])
    else:
        match = _GROUPS.search(line)
        if match is None:
            raise ValueError(f"no replica_groups could be read in: {line.strip()}")
        groups = parse_groups(match["groups"])
    if kind in _FLAGGED and has_channel:
        if not groups:
            return None, ()
        if not counts_devices:  # replicas, with all their partitions
            groups = tuple(
                tuple(r * partitions + p for r in group for p in range(partitions))
                for group in groups
            )
    elif has_channel:  # partitions of one replica
        groups = groups or (tuple(range(partitions)),)
        groups = tuple(
            tuple(r * partitions + p for p in group) for r in range(replicas) for group in groups
        )
    else:  # replicas of one partition
        if not groups and (replicas, partitions) == (1, 1):
            return None, ()
        groups = groups or (tuple(range(replicas)),)
        groups = tuple(
            tuple(r * partitions + p for r in group) for p in range(partitions) for group in groups
        )
    return (None, groups) if kind == Kind.COLLECTIVE_PERMUTE else (groups, ())


def _named_axes_groups(match: re.Match[str]) -> Groups:
    """Groups along whole axes 'y', or along parts 'y':(2)4 of them: 4 wide, after 2 slices."""
    names, sizes = [], []
    for part in match["axes"].split(","):
        name, size = part.rsplit("=", 1)
        names.append(name)
        sizes.append(int(size))
    ids = _arranged(match["ids"]) if match["ids"] else np.arange(math.prod(sizes))
    used = list(filter(None, match["used"].split(",")))
    axes = [re.fullmatch(r"(.*?)(?::\((\d+)\)(\d+))?", part) for part in used]
    dims: list[int] = []
    joined: dict[int, int] = {}  # place among `used` -> dimension
    for name, size in zip(names, sizes, strict=True):
        parts = sorted(
            (int(axis[2] or 1), int(axis[3] or size), place)
            for place, axis in enumerate(axes)
            if axis is not None and axis[1] == name
        )
        reached = 1
        for before, width, place in parts:
            dims.append(before // reached)
            joined[place] = len(dims)
            dims.append(width)
            reached = before * width
        dims.append(size // reached)
    if len(joined) != len(used):
        raise ValueError(f"unknown axes among {used}: expected some of {names}")
    inner = [joined[place] for place in range(len(used))]
    outer = [d for d in range(len(dims)) if d not in inner]
    width = math.prod(dims[d] for d in inner)
    groups = ids.reshape(dims).transpose(*outer, *inner).reshape(-1, width)
    return tuple(tuple(int(i) for i in group) for group in groups)


def _arranged(text: str) -> np.ndarray:
    """Ids in the order of `[2,4]T(1,0)` (an iota, reshaped and transposed) or of a plain list."""
    match = _ARRANGED.fullmatch(text)
    if match is None:
        return np.asarray(_integers(text.strip("{}").replace("},{", ",")))
    dims = _integers(match["dims"])
    ids = np.arange(math.prod(dims)).reshape(dims)
    return (ids.transpose(_integers(match["order"])) if match["order"] else ids).ravel()


def _device_counts(text: str) -> tuple[int, int]:
    """(replicas, partitions) of the module; 1 where its first line names none."""
    header = text.split("\n", 1)[0]

    def count(name: str) -> int:
        match = re.search(rf"\b{name}=(\d+)", header)
        return int(match[1]) if match else 1

    return count("replica_count"), count("num_partitions")


def _tuple_elements(shape: str) -> Sequence[str]:
    """Top-level elements of a tuple's shape; the shape itself when it is no tuple."""
    plain = _LAYOUT_OR_COMMENT.sub("", shape)
    return list(_split(plain[1:-1])) if plain.startswith("(") else [plain]


def _split(text: str) -> Iterator[str]:
    depth, begin = 0, 0
    for at, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            yield text[begin:at].strip()
            begin = at + 1
    yield text[begin:].strip()


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part.strip()]
