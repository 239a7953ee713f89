"""A StepPlan as the arrays that a back end runs.

What stays the same from step to step is kept in rows, one per running sequence (its slot): block tables, grown by the
entries that changed, and sampling parameters. A step gathers the rows it needs, so a decode step costs about a dozen
array operations whatever the number of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...model.backend import BackendLimits
from ...model.batch import Float32, Int32, Int64, SamplingBatch, StepBatch, StepResult
from ..scheduling.step_plan import Chunk, StepPlan
from .hidden_states import HiddenStates
from .prompt_rows import Collector, PromptPart, Rows
from .request import Sample

SAMPLE = -1  # in `targets`: no target, draw a token
NO_ROWS: Int32 = np.zeros(0, dtype=np.int32)


class StepBuilder:
    """Builds one StepBatch at a time. `release` a sample's slot when it stops running."""

    def __init__(self, limits: BackendLimits) -> None:
        slots, self._block_size = limits.max_num_seqs, limits.block_size
        max_blocks = -(-limits.max_model_len // limits.block_size)
        self._block_tables: Int32 = np.zeros((slots, max_blocks), dtype=np.int32)
        self._temperature: Float32 = np.zeros(slots, dtype=np.float32)
        self._top_k: Int32 = np.zeros(slots, dtype=np.int32)
        self._top_p: Float32 = np.ones(slots, dtype=np.float32)
        self._min_p: Float32 = np.zeros(slots, dtype=np.float32)
        self._seeds: NDArray[np.uint64] = np.zeros(slots, dtype=np.uint64)
        self._num_logprobs: Int32 = np.zeros(slots, dtype=np.int32)
        self._repetition_penalty: Float32 = np.ones(slots, dtype=np.float32)
        self._presence_penalty: Float32 = np.zeros(slots, dtype=np.float32)
        self._frequency_penalty: Float32 = np.zeros(slots, dtype=np.float32)
        self._with_lists: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # has penalties, bias, bans or a mask
        self._tells: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)  # of its prompt, or of layers
        self._with_logits: NDArray[np.bool_] = np.zeros(slots, dtype=np.bool_)
        self._prompt_rows: list[PromptRows] = []  # of the step that was built last
        self._layer_rows: list[LayerRows] = []
        self._layers: tuple[int, ...] = ()
        self._free_slots = list(range(slots - 1, -1, -1))

    def release(self, sample: Sample) -> None:
        """Give the sample's row back. Nothing of it is read again: the next owner writes every column."""
        if sample.slot >= 0:
            self._free_slots.append(sample.slot)
            sample.slot = -1

    def build(self, plan: StepPlan) -> StepBatch:
        """The arrays of a plan with at least one chunk."""
        chunks = plan.chunks
        slots = self._prepare(chunks)  # (S,)
        starts = np.array([chunk.start for chunk in chunks])
        counts = np.array([chunk.num_tokens for chunk in chunks])
        row_chunks = np.flatnonzero([chunk.samples for chunk in chunks])  # (R,) each logit row's chunk
        query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        seq_lens = starts + counts
        if plan.num_tokens == len(chunks):  # only decodes: one row each
            owners, positions = slots, starts
        else:
            owners = np.repeat(slots, counts)  # (T,) each row's slot
            positions = np.arange(plan.num_tokens) + np.repeat(starts - query_start[:-1], counts)
        blocks, offsets = np.divmod(positions, self._block_size)
        widest = -(-int(seq_lens.max()) // self._block_size)
        logit_rows = query_start[1:][row_chunks] - np.int32(1)
        self._prompt_rows, self._layer_rows = [], []
        if self._tells[slots].any():
            self._layer_rows = _layer_rows(chunks)
            self._prompt_rows = _prompt_rows(chunks, len(logit_rows))
            for rows in self._prompt_rows:
                row_chunks = np.append(row_chunks, np.full(len(rows.positions), rows.chunk))
                logit_rows = np.append(logit_rows, query_start[rows.chunk] - starts[rows.chunk] + rows.positions)
        self._layers = tuple(sorted({layer for rows in self._layer_rows for layer in rows.states.layers}))
        layer_rows = [query_start[rows.chunk] - starts[rows.chunk] + rows.positions for rows in self._layer_rows]
        return StepBatch(
            tokens=_tokens(chunks),
            positions=positions.astype(np.int32),
            slot_mapping=self._block_tables[owners, blocks].astype(np.int64) * self._block_size + offsets,
            query_start=query_start,
            seq_lens=seq_lens.astype(np.int32),
            block_tables=self._block_tables[slots, :widest],
            logit_rows=logit_rows.astype(np.int32),
            sampling=self._sampling([chunks[i] for i in row_chunks.tolist()], slots[row_chunks]),
            want_logits=bool(self._with_logits[slots].any()),
            want_hidden=any(rows.collector.wants_hidden for rows in self._prompt_rows),
            layers=self._layers,
            layer_rows=np.concatenate(layer_rows).astype(np.int32) if layer_rows else NO_ROWS,
            next_slots=np.array([chunk.next_slot for chunk in chunks], dtype=np.int64),
        )

    def reports(self, result: StepResult) -> list[Report]:
        """What the result of the step that was built last says to those who want more than tokens."""
        reports = []
        for rows in self._prompt_rows:
            end = rows.first_row + len(rows.positions)
            part = PromptPart(
                rows.positions,
                result.logprobs[rows.first_row : end],
                result.top_tokens[rows.first_row : end],
                result.top_logprobs[rows.first_row : end],
                None if result.hidden is None else result.hidden[rows.first_row : end],
                bool(result.numeric_errors[rows.first_row : end].any()),
            )
            reports.append(Report(rows.sample, rows.collector.take(part), part.numeric_error))
        for row in self._layer_rows:
            if result.layer_outputs is None:
                raise RuntimeError("the back end returned no outputs of layers")
            which = [self._layers.index(layer) for layer in row.states.layers]
            values = result.layer_outputs[which, row.first_row : row.first_row + len(row.positions)]
            reports.append(Report(row.sample, row.states.take(row.positions, values.transpose(1, 0, 2))))
        return reports

    def _prepare(self, chunks: list[Chunk]) -> Int64:
        """The chunks' slots, with their block tables up to date. Only entries from a chunk's first token on can differ
        from those of the step before: blocks are appended, and copy-on-write replaces the one being written."""
        slots: list[int] = []
        firsts: list[int] = []
        blocks: list[int] = []
        size = self._block_size
        for chunk in chunks:
            sample, table, first = _sample_of(chunk), chunk.sequence.block_table, chunk.start // size
            if sample.slot < 0:
                sample.slot = self._free_slots.pop()
                self._write_parameters(sample)
                self._block_tables[sample.slot, : len(table)] = table
            elif len(table) > first + 1:
                self._block_tables[sample.slot, first : len(table)] = table[first:]
            slots.append(sample.slot)
            firsts.append(first)
            blocks.append(table[first])
        rows = np.array(slots)
        self._block_tables[rows, firsts] = blocks
        return rows

    def _write_parameters(self, sample: Sample) -> None:
        params, slot = sample.request.params, sample.slot
        self._temperature[slot] = params.temperature
        self._top_k[slot] = max(params.top_k, 0)  # -1 is off, too
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        self._seeds[slot] = sample.seed
        self._num_logprobs[slot] = sample.num_logprobs
        self._repetition_penalty[slot] = params.repetition_penalty
        self._presence_penalty[slot] = params.presence_penalty
        self._frequency_penalty[slot] = params.frequency_penalty
        self._with_lists[slot] = not sample.is_plain
        self._with_logits[slot] = sample.request.want_logits
        self._tells[slot] = sample.collector is not None or sample.hidden is not None

    def _sampling(self, chunks: list[Chunk], slots: Int64) -> SamplingBatch:
        batch = SamplingBatch(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seeds=self._seeds[slots],
            counters=np.array([chunk.sequence.num_output_tokens for chunk in chunks], dtype=np.int64),
            num_logprobs=self._num_logprobs[slots],
            targets=np.full(len(chunks), SAMPLE, dtype=np.int32),
            repetition_penalty=self._repetition_penalty[slots],
            presence_penalty=self._presence_penalty[slots],
            frequency_penalty=self._frequency_penalty[slots],
            penalty_start=np.zeros(len(chunks) + 1, dtype=np.int32),
            bias_start=np.zeros(len(chunks) + 1, dtype=np.int32),
            allowed_start=np.zeros(len(chunks) + 1, dtype=np.int32),
        )
        if self._with_lists[slots].any():
            _add_lists(batch, [_sample_of(chunk) for chunk in chunks])
        for rows in self._prompt_rows:
            end = rows.first_row + len(rows.positions)
            batch.targets[rows.first_row : end] = rows.targets
            batch.num_logprobs[rows.first_row : end] = rows.collector.num_logprobs
        return batch


@dataclass(frozen=True, slots=True)
class Report:
    """What a step found out for a sample's reader."""

    sample: Sample
    rows: list[Rows]
    numeric_error: bool = False  # what it tells of held NaN or infinity


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Logit rows of one chunk that tell something about its prompt; they follow the rows that are sampled."""

    sample: Sample
    collector: Collector
    chunk: int  # which of the step's
    positions: range
    first_row: int  # of the step's logit rows
    targets: list[int]  # the token after each position


def _prompt_rows(chunks: list[Chunk], first_row: int) -> list[PromptRows]:
    found = []
    for index, chunk in enumerate(chunks):
        sample = _sample_of(chunk)
        if sample.collector is None:
            continue
        positions = sample.collector.missing(chunk.start, chunk.start + chunk.num_tokens)
        if positions:
            following = chunk.sequence.token_ids[positions.start + 1 : positions.stop + 1]
            targets = following + [0] * (len(positions) - len(following))  # the last one of an embedding has none
            found.append(PromptRows(sample, sample.collector, index, positions, first_row, targets))
            first_row += len(positions)
    return found


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Rows of one chunk whose layers' outputs are told."""

    sample: Sample
    states: HiddenStates
    chunk: int  # which of the step's
    positions: range
    first_row: int  # of the step's rows that outputs are wanted of


def _layer_rows(chunks: list[Chunk]) -> list[LayerRows]:
    found = []
    first_row = 0
    for index, chunk in enumerate(chunks):
        sample = _sample_of(chunk)
        if sample.hidden is None:
            continue
        positions = sample.hidden.missing(chunk.start, chunk.start + chunk.num_tokens)
        if positions:
            found.append(LayerRows(sample, sample.hidden, index, positions, first_row))
            first_row += len(positions)
    return found


def _tokens(chunks: list[Chunk]) -> Int32:
    """(T,) the token ids of all chunks, one after the other."""
    tokens: list[int] = []
    for chunk in chunks:
        if chunk.num_tokens == 1:
            tokens.append(chunk.sequence.token_ids[chunk.start])
        else:
            tokens += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.num_tokens]
    return np.array(tokens, dtype=np.int32)


def _sample_of(chunk: Chunk) -> Sample:
    sample = chunk.sequence.client_data
    if not isinstance(sample, Sample):
        raise TypeError("a sequence in the plan belongs to nobody")
    return sample


def _add_lists(batch: SamplingBatch, samples: list[Sample]) -> None:
    """Fill the ragged lists: penalties' counts, biases and bans, allowed tokens."""
    penalties = [sample.token_counts for sample in samples]
    biases = [sample.biases() for sample in samples]
    allowed = [sample.allowed for sample in samples]
    np.cumsum([len(row) for row in penalties], out=batch.penalty_start[1:])
    batch.penalty_tokens = np.array([token for row in penalties for token in row], dtype=np.int32)
    batch.penalty_counts = np.array([count for row in penalties for count in row.values()], dtype=np.int32)
    np.cumsum([len(row) for row in biases], out=batch.bias_start[1:])
    batch.bias_tokens = np.array([token for row in biases for token in row], dtype=np.int32)
    batch.bias_values = np.array([value for row in biases for value in row.values()], dtype=np.float32)
    np.cumsum([len(row) for row in allowed], out=batch.allowed_start[1:])
    batch.allowed_tokens = np.array([token for row in allowed for token in row], dtype=np.int32)
