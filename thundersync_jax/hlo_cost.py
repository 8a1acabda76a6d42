"""What one call of a compiled program costs a device, read from its HLO text.

XLA's own analysis counts the body of a loop once. Here every computation counts as often as it
runs: a loop whose condition compares its counter with a constant runs until it is there; one that
the caller bounds by an argument has `Assumed.trips` where it is outermost and one inside of others;
of a conditional every branch counts once, so what is read there is a bound from above.

    FLOPs      of matrix products, written as `dot` or as `convolution`, and of attention kernels
    HBM bytes  of what scheduled instructions read and write there; arrays in on-chip memory are
               free, and so are parts of an array that a slice leaves out
    links      of a collective, the bytes that a device receives over a ring

Called by `planner`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np
from jax.sharding import Mesh

from thundersync_jax import hlo
from thundersync_jax.hlo import Kind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the text does not say.

    Attributes:
      trips: iterations of an outermost loop that an argument bounds.
      attended: share of all query-key pairs that an attention kernel does not skip.
    """

    trips: int = 1
    attended: float = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one call on one device.

    Attributes:
      collectives: mesh axis -> (how many run that join devices along it, bytes that they bring); a
        collective along two axes counts under both.
      link_bytes: of all of them, each once.
    """

    flops: float
    hbm_bytes: int
    link_bytes: int
    collectives: Mapping[str, tuple[int, int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line: `shape` with layouts, `attributes` the rest of the line after the operands."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    text: str
    is_root: bool


# Attention kernels by name -> matrix products over [heads, queries, keys, head_dim].
_KERNEL_PRODUCTS = {"_fwd_": 2, "_dq_": 3, "_dkv_": 4}
_SLICES = ("dynamic-slice", "slice", "gather")
# What updates its first operand in place -> which operand has the new values.
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "optimization-barrier",
}  # fmt: skip

_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\) -> .* \{$")
_NAMED = re.compile(r"^\s*(?P<root>ROOT )?%?(?P<name>[\w.\-]+) = ")
_OPCODE = re.compile(r" ?(?P<opcode>[a-z][\w\-]*)\(")
_REFERENCE = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?P<how>calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations)=(?P<names>\{[^}]*\}|%[\w.\-]+)"
)
_KNOWN_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_ELEMENT = re.compile(r"index=(\d+)")
_DIMS = re.compile(r"[a-z]\w*\[(?P<dims>[\d,<= ]*)\]")
_ARRAY = re.compile(r"[a-z]\w*\[[\d,<= ]*\](?:\{[^{}]*\})?")
_ON_CHIP = re.compile(r"\{[^{}]*S\([1-9]\)[^{}]*\}")
_WINDOW = re.compile(r"window=\{(?P<fields>[^}]*)\}")
_LABELS = re.compile(r"dim_labels=(?P<lhs>\w+)_(?P<rhs>\w+)->(?P<out>\w+)")


class Program:
    """The computations of a program's text, and how often each runs in one call."""

    def __init__(self, text: str, assumed: Assumed) -> None:
        self._computations: dict[str, list[Instruction]] = {}
        self._assumed = assumed
        entry, current = "", ""
        for line in text.splitlines():
            if header := _HEADER.match(line):
                current = header["name"]
                self._computations[current] = []
                entry = current if header["entry"] else entry
            elif current and (found := _instruction(line)):
                self._computations[current].append(found)
        self._entry = entry
        self.runs, self.scheduled = self._count()

    def _count(self) -> tuple[dict[str, int], set[str]]:
        """Computation -> runs; and those whose instructions run one by one, not fused."""
        runs = dict.fromkeys(self._computations, 0)
        runs[self._entry] = 1
        scheduled = {self._entry}
        for name in reversed(self._computations):  # the text has callees before their callers
            for found in self._computations[name]:
                for how, called in _calls(found):
                    if called not in runs:
                        continue
                    times = self._trips(found, name) if how in ("body", "condition") else 1
                    runs[called] += runs[name] * times
                    is_fused = how == "to_apply" or found.opcode in ("fusion", "custom-call")
                    if not is_fused and name in scheduled:
                        scheduled.add(called)
        return runs, scheduled

    def _trips(self, loop: Instruction, computation: str) -> int:
        if known := _KNOWN_TRIPS.search(loop.text):
            return int(known[1])
        called = dict(_calls(loop))
        test = {i.name: i for i in self._computations[called["condition"]]}
        root = next(i for i in test.values() if i.is_root)
        limits = [limit for name in root.operands if (limit := _constant(test[name])) is not None]
        if "direction=LT" not in root.attributes or not limits:
            return self._assumed.trips if computation == self._entry else 1
        at = next(m for name in root.operands if (m := _ELEMENT.search(test[name].attributes)))
        return -(-limits[0] // _step(self._computations[called["body"]], int(at[1])))

    def instructions(self) -> Iterator[tuple[str, Instruction, dict[str, Instruction]]]:
        """(computation, instruction, its computation by name) of all that run."""
        for name, found in self._computations.items():
            if self.runs[name]:
                by_name = {i.name: i for i in found}
                for one in found:
                    yield name, one, by_name

    def flops(self) -> float:
        return sum(
            self.runs[name] * _flops(one, by_name, self._assumed.attended)
            for name, one, by_name in self.instructions()
        )

    def hbm_bytes(self) -> int:
        return sum(
            self.runs[name] * self._traffic(one, by_name)
            for name, one, by_name in self.instructions()
            if name in self.scheduled and one.opcode not in _FREE
        )

    def _traffic(self, one: Instruction, by_name: Mapping[str, Instruction]) -> int:
        """Bytes that one scheduled instruction reads from and writes to HBM."""
        operands = [by_name[name].shape for name in one.operands if name in by_name]
        if one.opcode.endswith("-done") or one.opcode.endswith("-update"):
            return 0
        if one.opcode in _SLICES:
            return 2 * _hbm_bytes(one.shape)
        if one.opcode in _UPDATES:
            return 2 * _hbm_bytes(operands[_UPDATES[one.opcode]])
        if one.opcode.endswith("-start"):  # (operand, result, ...) or (result, operand, ...)
            return max(map(_hbm_bytes, _arrays(one.shape)))
        if one.opcode != "fusion":
            return sum(map(_hbm_bytes, [*operands, *_arrays(one.shape)]))
        inside = self._inside(one)
        read = sum(
            min(whole, self._read_bytes(inside, _parameter(inside, number), whole))
            for number, whole in enumerate(map(_hbm_bytes, operands))
            if whole
        )
        updated = self._updated_bytes(inside)
        written = (
            min(_hbm_bytes(shape), updated.get(tuple(_dims(shape)), _hbm_bytes(shape)))
            for shape in _arrays(one.shape)
        )
        return read + sum(written)

    def _inside(self, fusion: Instruction) -> list[Instruction]:
        return self._computations[next(name for how, name in _calls(fusion) if how == "calls")]

    def _read_bytes(self, inside: list[Instruction], name: str, whole: int) -> int:
        """What a fusion reads of an array of so many bytes: slices of it, or nothing where it
        updates it in place, or all.
        """
        total = 0
        for one in inside:
            if name not in one.operands:
                continue
            if one.opcode == "bitcast":
                total += self._read_bytes(inside, one.name, whole)
            elif one.opcode == "fusion":
                nested, number = self._inside(one), one.operands.index(name)
                total += self._read_bytes(nested, _parameter(nested, number), whole)
            elif one.operands[0] == name and one.opcode in _SLICES:
                total += hlo.num_bytes(one.shape)
            elif one.operands[0] != name or one.opcode not in _UPDATES:
                total += whole
        return total

    def _updated_bytes(self, inside: list[Instruction]) -> dict[tuple[int, ...], int]:
        """Dimensions of what a fusion updates in place -> bytes of its new values."""
        by_name = {one.name: one for one in inside}
        found: dict[tuple[int, ...], int] = {}
        for one in inside:
            if one.opcode == "fusion":
                found |= self._updated_bytes(self._inside(one))
            elif (at := _UPDATES.get(one.opcode)) is not None:
                found[tuple(_dims(one.shape))] = hlo.num_bytes(by_name[one.operands[at]].shape)
        return found


def cost(text: str, mesh: Mesh, assumed: Assumed) -> Cost:
    """Of a program compiled for `mesh`."""
    program = Program(text, assumed)
    collectives = [c for c in hlo.collectives(text) if program.runs[c.computation]]
    runs = {c.name: program.runs[c.computation] for c in collectives}
    received = {c.name: runs[c.name] * received_bytes(c, mesh.size) for c in collectives}

    def along(axis: str) -> tuple[int, int]:
        crossed = hlo.crossing(collectives, mesh, axis)
        return sum(runs[c.name] for c in crossed), sum(received[c.name] for c in crossed)

    return Cost(
        flops=program.flops(),
        hbm_bytes=program.hbm_bytes(),
        link_bytes=sum(received.values()),
        collectives={axis: along(axis) for axis in mesh.axis_names},
    )


def received_bytes(collective: hlo.Collective, num_devices: int) -> int:
    """Bytes that a device of a ring receives, at least."""
    if collective.kind == Kind.COLLECTIVE_PERMUTE:
        return collective.bytes
    groups = collective.replica_groups
    size = num_devices if groups is None else max(map(len, groups), default=1)
    others = {
        Kind.ALL_REDUCE: 2 * (size - 1) / size,
        Kind.REDUCE_SCATTER: size - 1,
    }.get(collective.kind, (size - 1) / size)
    return int(collective.bytes * others)


def _instruction(line: str) -> Instruction | None:
    match = _NAMED.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    shape, rest = rest[:end], rest[end:]
    opcode = _OPCODE.match(rest)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    return Instruction(
        name=match["name"],
        shape=shape,
        opcode=opcode["opcode"],
        operands=tuple(_REFERENCE.findall(rest[opcode.end() : close])),
        attributes=rest[close + 1 :],
        text=line,
        is_root=bool(match["root"]),
    )


def _closing(text: str, begin: int) -> int:
    """Where the parenthesis that opens at `begin` closes; the end when it does not."""
    depth = 0
    for match in re.finditer(r"[()]", text[begin:]):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return begin + match.start()
    return len(text)


def _constant(one: Instruction) -> int | None:
    match = re.search(r" constant\((\d+)\)", one.text)
    return int(match[1]) if match else None


def _step(body: list[Instruction], at: int) -> int:
    """What an iteration adds to element `at` of its loop's tuple: 2 where the loop was unrolled."""
    by_name = {one.name: one for one in body}
    root = next(one for one in body if one.is_root)
    one, total = by_name[root.operands[at]], 0
    while one.opcode in ("add", "copy", "bitcast"):
        names = [name for name in one.operands if _constant(by_name[name]) is None]
        total += sum(_constant(by_name[name]) or 0 for name in one.operands)
        if len(names) != 1:
            break
        one = by_name[names[0]]
    return total or 1


@functools.cache
def _calls(one: Instruction) -> tuple[tuple[str, str], ...]:
    """(attribute, computation) of what an instruction calls."""
    return tuple(
        (match["how"], name)
        for match in _CALLED.finditer(one.attributes)
        for name in _REFERENCE.findall(match["names"])
    )


def _flops(one: Instruction, by_name: Mapping[str, Instruction], attended: float) -> float:
    if one.opcode == "custom-call" and "tpu_custom_call" in one.attributes:
        return attended * _kernel_flops(one, by_name)
    if one.opcode not in ("dot", "convolution"):
        return 0
    lhs, rhs = (_dims(by_name[name].shape) for name in one.operands[:2])
    out = _dims(one.shape)
    if one.opcode == "dot":
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        axes = [int(axis) for axis in (match[1] if match else "").split(",") if axis]
        return 2.0 * math.prod(out) * math.prod(lhs[axis] for axis in axes)
    return _convolution_flops(one, lhs, rhs, out)


def _convolution_flops(one: Instruction, lhs: list[int], rhs: list[int], out: list[int]) -> float:
    """TPUs write every matrix product so: batch and second contracted axes become a window, of
    which only what lies on an element of the left operand is computed.
    """
    labels = _LABELS.search(one.attributes)
    assert labels is not None, one.text
    window = _WINDOW.search(one.attributes)
    fields = dict(part.split("=") for part in window["fields"].split()) if window else {}
    batch = lhs[labels["lhs"].index("b")]
    features = rhs[labels["rhs"].index("i")] * rhs[labels["rhs"].index("o")]
    groups = re.search(r"batch_group_count=(\d+)", one.attributes)
    products = batch // (int(groups[1]) if groups else 1) * features
    for axis in sorted(filter(str.isdigit, labels["out"])):
        at = int(axis)

        def field(name: str, default: str, at: int = at) -> str:
            return fields[name].split("x")[at] if name in fields else default

        before = int(field("pad", "0_0").split("_")[0])
        dilation = int(field("lhs_dilate", "1"))
        place = (
            np.arange(out[labels["out"].index(axis)])[:, None] * int(field("stride", "1"))
            + np.arange(rhs[labels["rhs"].index(axis)])[None] * int(field("rhs_dilate", "1"))
            - before
        )
        extent = (lhs[labels["lhs"].index(axis)] - 1) * dilation + 1
        inside = (place >= 0) & (place < extent) & (place % dilation == 0)
        products *= int(np.count_nonzero(inside))
    return 2.0 * products


def _kernel_flops(one: Instruction, by_name: Mapping[str, Instruction]) -> float:
    """Of an attention kernel without a block skipped; 0 of any other."""
    products = next((n for part, n in _KERNEL_PRODUCTS.items() if part in one.name), 0)
    shapes = [_dims(by_name[name].shape) for name in one.operands]
    cubes = [dims for dims in shapes if len(dims) == 3]
    wide = [dims for dims in cubes if dims[0] > 1]  # block masks have one head
    if not products or len(wide) < 2:
        return 0
    (heads, queries, width), (_, keys, _) = wide[0], wide[1]
    return 2.0 * products * heads * queries * keys * width


def _parameter(inside: list[Instruction], number: int) -> str:
    """The name of a fusion's operand inside of it."""
    return next(
        one.name
        for one in inside
        if one.opcode == "parameter" and f" parameter({number})" in one.text
    )


def _dims(shape: str) -> list[int]:
    match = _DIMS.search(shape)
    text = match["dims"].replace("<=", "") if match else ""
    return [int(part) for part in text.split(",") if part.strip()]


def _arrays(shape: str) -> list[str]:
    """Of a tuple, nested ones included, each with its layout."""
    return [match[0] for match in _ARRAY.finditer(shape)]


def _hbm_bytes(shape: str) -> int:
    """Bytes of an array unless it lies in on-chip memory."""
    return 0 if _ON_CHIP.search(shape) else hlo.num_bytes(shape)
