"""Products of codes: panels in groups (see `groups`) times activations in groups of codes (see `activations`).

With w = scale * code + least for the weights and x = step * number for the activations, a group adds

    scale * step * sum(code * number) + least * step * sum(number)

to a sum; without least values the code of zero is taken off in integers: sum(code * number) - zero * sum(number). The
sums of codes are exact integers, which any processor and any order gives; what is added in float32 is one multiply-add
for each term, group after group. A vector of words of 32 bits holds two numbers of 16 bits, or four of 8, of each
column: whole words are masked, and one instruction multiplies and adds what lies in a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from .activations import CodeForm, form_of
from .emit import BYTE, Values, loop
from .group_steps import ask_line, group_scales
from .groups import GroupFormat, group_of
from .isa import host_pair_bits, host_quad_bits
from .memory import INT64
from .vectors import FLOATS, LANES, multiply_add, splat_value

HALF, WORD, FLOAT = ir.IntType(16), ir.IntType(32), ir.FloatType()


def halves(words: int) -> ir.Type:
    """A vector of `words` words, as numbers of 16 bits."""
    return ir.VectorType(HALF, 2 * words)


def integers(words: int) -> ir.Type:
    return ir.VectorType(WORD, words)


def constant(kind: ir.Type, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


# -- the instructions: products of what lies in a word of a and b, added to a total if there is one --------------------


def add_pairs(builder: Any, a: Any, b: Any, words: int, total: Any = None) -> Any:
    """Signed numbers of 16 bits: a[2 i] * b[2 i] + a[2 i + 1] * b[2 i + 1] in every word (VPMADDWD, and VPDPWSSD where
    there is one: LLVM joins the addition to it)."""
    name = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}.get(words)
    if host_pair_bits() and name:
        return _added(builder, _call(builder, name, integers(words), a, b), total)
    a, b = builder.bitcast(a, integers(words)), builder.bitcast(b, integers(words))
    sixteen = constant(integers(words), 16)
    low = builder.mul(*(builder.ashr(builder.shl(side, sixteen), sixteen) for side in (a, b)))
    return _added(builder, builder.add(low, builder.mul(builder.ashr(a, sixteen), builder.ashr(b, sixteen))), total)


def add_byte_pairs(builder: Any, a: Any, b: Any, words: int, total: Any = None) -> Any:
    """a unsigned, b signed bytes: the same, in numbers of 16 bits that must hold the sum (VPMADDUBSW)."""
    kind = ir.VectorType(ir.IntType(8), 4 * words)
    name = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}.get(words)
    if host_pair_bits() and name:
        product = _call(builder, name, halves(words), builder.bitcast(a, kind), builder.bitcast(b, kind))
        return _added(builder, product, total)
    eight = constant(halves(words), 8)
    low = builder.mul(builder.and_(a, constant(halves(words), 255)), builder.ashr(builder.shl(b, eight), eight))
    return _added(builder, builder.add(low, builder.mul(builder.lshr(a, eight), builder.ashr(b, eight))), total)


def add_byte_quads(builder: Any, a: Any, b: Any, words: int, total: Any = None) -> Any:
    """a unsigned, b signed bytes: all four of a word (VPDPBUSD). Only for vectors of `host_quad_bits`."""
    a, b = builder.bitcast(a, integers(words)), builder.bitcast(b, integers(words))
    total = constant(integers(words), 0) if total is None else total
    return _call(builder, f"llvm.x86.avx512.vpdpbusd.{32 * words}", integers(words), total, a, b)


def has_byte_quads(words: int) -> bool:
    return host_quad_bits() == 32 * words


def _added(builder: Any, product: Any, total: Any) -> Any:
    return product if total is None else builder.add(total, product)


def _call(builder: Any, name: str, result: ir.Type, *operands: Any) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), operands)


# -- a step of a tile -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _IntegerStep:
    """Writes one group's part of the sums of a tile. The 16 columns are `parts` vectors of `words` words."""

    builder: Any
    group: GroupFormat
    form: CodeForm
    panels: Values
    xs: Values
    words: int
    parts: int
    distance: Any

    def at(self, pointer: Any, offset: int) -> Any:
        return self.builder.gep(pointer, [INT64(offset)], source_etype=BYTE)

    def emit(self, sums: list[Values]) -> list[Values]:
        builder, width = self.builder, len(self.panels)
        counted = self.code_sums()
        for line in range(self.group.words, self.group.lines):  # scales; a word of all columns is a line
            ask_line(builder, self.panels, INT64(64 * line), self.distance)
        scales = [group_scales(builder, self.group, panel) for panel in self.panels]
        out = []
        for r, row in enumerate(sums):
            step, number_sum = self.tail(r, 0, FLOAT), self.tail(r, 4, FLOAT) if self.group.has_least else None
            added = []
            for total, count, (scale, least) in zip(row, counted[r * width : (r + 1) * width], scales, strict=True):
                total = multiply_add(builder, count, builder.fmul(scale, step), total)
                added.append(total if least is None else multiply_add(builder, least, number_sum, total))
            out.append(added)
        return out

    def tail(self, row: int, offset: int, kind: ir.Type, lanes: int = LANES) -> Any:
        """What stands behind a row's numbers, in all lanes."""
        place = self.at(self.xs[row], self.form.codes_bytes + offset)
        return splat_value(self.builder, self.builder.load(place, align=4, typ=kind), lanes)

    def code_sums(self) -> Values:
        """sum(code * number) of each row and panel, as float32 vectors."""
        builder = self.builder
        unroll = 1 if self.places > 1 else 2
        starts: Values = []  # the first products are the first sums: an addition less than from zero
        if self.group.zero and not self.group.has_least:
            shift = constant(integers(self.words), -self.group.zero)
            counts = [self.tail(row, 8, WORD, self.words) for row in range(len(self.xs))]
            sums_of_row = len(self.panels) * self.parts
            starts = [start for count in counts for start in [builder.mul(count, shift)] * sums_of_row]

        def body(index: Any, sums: Sequence[Any]) -> Values:
            return self.some_words(builder.add(index, INT64(1)), sums, unroll)

        sums = self.some_words(INT64(0), starts, unroll)
        sums = loop(builder, INT64(self.group.words // unroll - 1), sums, body)
        if self.multiply is add_byte_pairs:  # a half has summed 16 products of at most 15 * 127: just what it can hold
            sums = [add_pairs(builder, total, constant(halves(self.words), 1), self.words) for total in sums]
        whole = [self.joined(sums[i : i + self.parts]) for i in range(0, len(sums), self.parts)]
        return [builder.sitofp(total, FLOATS) for total in whole]

    @property
    def multiply(self) -> Callable[..., Any]:
        if self.form.bits == 16:
            return add_pairs
        return add_byte_quads if has_byte_quads(self.words) else add_byte_pairs

    @property
    def places(self) -> int:
        """Codes of the weights in what holds one activation."""
        return self.form.bits // self.group.bits

    def some_words(self, index: Any, sums: Sequence[Any], count: int) -> Values:
        for number in range(count):
            sums = self.word(self.builder.add(self.builder.mul(index, INT64(count)), INT64(number)), sums)
        return list(sums)

    def word(self, index: Any, sums: Sequence[Any]) -> Values:
        """Add the products of word `index` of all columns, one place after the other; no sums: these are the first."""
        builder, out = self.builder, list(sums)
        ask_line(builder, self.panels, builder.mul(index, INT64(64)), self.distance)
        columns = [builder.gep(panel, [builder.mul(index, INT64(64))], source_etype=BYTE) for panel in self.panels]
        places = [self.at(column, 4 * self.words * part) for column in columns for part in range(self.parts)]
        raw = [builder.load(place, align=4, typ=halves(self.words)) for place in places]
        numbers = [builder.gep(x, [builder.mul(index, INT64(4))], source_etype=BYTE) for x in self.xs]
        multiply = self.multiply
        placed = zip(*(code_places(builder, self.group, self.form, value, self.words) for value in raw), strict=True)
        for place, codes in enumerate(placed):
            for r, pointer in enumerate(numbers):
                word = builder.load(self.at(pointer, 4 * self.group.words * place), align=4, typ=WORD)
                lanes = builder.bitcast(splat_value(builder, word, self.words), halves(self.words))
                for i, code in enumerate(codes, start=r * len(codes)):
                    if i < len(out):
                        out[i] = multiply(builder, code, lanes, self.words, out[i])
                    else:
                        out.append(multiply(builder, code, lanes, self.words))
        return out

    def joined(self, parts: Sequence[Any]) -> Any:
        """All columns as one vector."""
        while len(parts) > 1:
            order = ir.Constant(integers(2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            pairs = zip(parts[0::2], parts[1::2], strict=True)
            parts = [self.builder.shuffle_vector(low, high, order) for low, high in pairs]
        return parts[0]


def code_places(builder: Any, group: GroupFormat, form: CodeForm, raw: Any, words: int) -> Iterator[Any]:
    """What a vector of words of codes shows at each place of a number of 16 (or 8) bits, the others masked away."""
    for place in range(form.bits // group.bits):
        shift, mask = group.bits * place, (1 << group.bits) - 1
        if form.bits == 8:
            mask |= mask << 8
        value = builder.lshr(raw, constant(halves(words), shift)) if shift else raw
        yield value if 0xFFFF >> shift == mask else builder.and_(value, constant(halves(words), mask))


def integer_step(
    builder: Any, read_as: int, sums: list[Values], panels: Values, xs: Values, distance: Any = None
) -> list[Values]:
    """sums[r][p] += x[r, k] * w[p, k] for the k of one group; `xs` point to groups of activations in codes."""
    words = (host_pair_bits() or 32 * LANES) // 32
    step = _IntegerStep(builder, group_of(read_as), form_of(read_as), panels, xs, words, LANES // words, distance)
    return step.emit(sums)
