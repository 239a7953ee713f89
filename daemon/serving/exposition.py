"""The daemon's figures as Prometheus text. Rendered when somebody asks, inside the loop, from plain numbers.

Imported only where `metrics_address` is set: the library takes longer to import than the rest of a start.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ..engine.metrics import Distribution
from .clients import Clients
from .health import health_of
from .users import user_name

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
MAX_USERS = 100
OTHERS = "(others)"


class Exposition(Collector):
    """Collects from the daemon's own numbers. `with_users`: also who holds how many blocks."""

    def __init__(self, clients: Clients, version: str, *, with_users: bool) -> None:
        self._clients = clients
        self._version = version
        self._with_users = with_users
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing in advance, so that registering asks for nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._state()
        yield from self._requests()
        yield from self._waits()
        yield from self._tokens()
        yield from self._blocks()
        yield from self._journal()

    def _state(self) -> Iterator[Metric]:
        clients, engine = self._clients, self._clients.engine
        stuck_s = engine.no_progress_s(clients.now)
        healthy = health_of(engine, clients.config.health_limit_s, clients.now).healthy
        info = {"version": self._version, "model": clients.model_name}
        yield InfoMetricFamily("kvpool", "What runs here.", value=info)
        yield _gauge("healthy", "1: steps finish while there is work; 0: they do not.", healthy)
        yield _gauge("no_progress_seconds", "Time with work and without a finished step.", stuck_s)
        yield _gauge("draining", "1: no new work is taken.", clients.draining)
        yield _gauge("uptime_seconds", "Time since the start.", clients.now - clients.metrics.started_at)
        yield _gauge("clients", "Sessions that are open.", len(clients.sessions))
        yield _counter("sessions", "Sessions opened.", clients.metrics.sessions_total)
        yield _counter("messages", "Messages received.", clients.metrics.messages_total)
        yield _counter("garbage_messages", "Messages that could not be read.", clients.metrics.garbage_total)

    def _requests(self) -> Iterator[Metric]:
        metrics, roster = self._clients.metrics, self._clients.engine.scheduler.roster
        states = {
            "running": len(roster.running),
            "waiting": roster.num_waiting,
            "paused": roster.num_paused,
        }
        yield _labelled_gauge("sequences", "Living sequences; idle ones count as paused.", "state", states)
        yield _counter("requests", "Requests accepted.", metrics.requests_total)
        yield _counter("requests_taken_up", "Requests of an earlier daemon.", metrics.requests_taken_up_total)
        yield _labelled_counter("samples_finished", "Samples that ended, by outcome.", "outcome", metrics.finished)
        yield _labelled_counter("refused", "Requests and calls refused, by error code.", "code", metrics.refused)

    def _waits(self) -> Iterator[Metric]:
        metrics = self._clients.metrics
        yield _histogram("queue_seconds", "From arrival to the first step.", metrics.queue_s)
        yield _histogram("time_to_first_token_seconds", "From arrival to the first token.", metrics.ttft_s)
        yield _histogram("inter_token_seconds", "Between two tokens of a sample.", metrics.itl_s)
        yield _histogram("step_seconds", "A step on the device.", metrics.step_s)
        yield _histogram("step_host_seconds", "The device waits for the host between two steps.", metrics.host_s)

    def _tokens(self) -> Iterator[Metric]:
        metrics, scheduler = self._clients.metrics, self._clients.engine.scheduler
        cache = scheduler.cache
        looked_up, found = (cache.stats.lookup_tokens, cache.stats.hit_tokens) if cache else (0, 0)
        yield _counter("generated_tokens", "Tokens generated.", metrics.tokens_generated_total)
        yield _counter("prompt_tokens", "Tokens of accepted prompts.", metrics.prompt_tokens_total)
        yield _counter("computed_tokens", "Rows computed, recomputed ones included.", scheduler.tokens_computed_total)
        yield _counter("prefix_lookup_tokens", "Tokens looked up in the prefix cache.", looked_up)
        yield _counter("prefix_hit_tokens", "Of those, tokens found.", found)
        yield _counter("preemptions", "Sequences whose blocks were taken.", scheduler.preemptions_total)

    def _blocks(self) -> Iterator[Metric]:
        metrics, engine = self._clients.metrics, self._clients.engine
        pool = engine.scheduler.pool
        states = {"free": pool.num_free - pool.num_cached, "cached": pool.num_cached, "used": pool.num_used}
        yield _labelled_gauge("blocks", "Blocks of the pool.", "state", states)
        yield _gauge("block_bytes", "Size of a block.", engine.runner.block_bytes)
        if self._with_users:
            yield _labelled_gauge("user_blocks", "Used blocks charged to a user.", "user", _by_user(pool.charges()))
        swapped = {"out": metrics.swapped_out_blocks_total, "in": metrics.swapped_in_blocks_total}
        yield _labelled_counter("swapped_blocks", "Blocks copied to and from the host.", "direction", swapped)
        yield _gauge("waste_ratio", "Share of allocated slots without a token, so far.", metrics.kv_waste_ratio)
        yield _counter("allocated_slots", "Slots of used blocks, summed over steps.", metrics.slots_allocated_total)
        yield _counter("filled_slots", "Of those, slots with a token.", metrics.slots_filled_total)

    def _journal(self) -> Iterator[Metric]:
        journal = self._clients.engine.journal
        if journal is not None:
            figures = journal.stats()
            yield _gauge("journal_working", "1: accepted requests survive a crash.", figures["journal"] == "on")
            yield _gauge("journal_bytes", "Size of the journal.", figures["journal_bytes"])
            yield _gauge("journal_live_bytes", "Of it, what a restart needs.", figures["journal_live_bytes"])


def _by_user(charges: Mapping[int, int]) -> dict[str, int]:
    """The largest holders by name, and the rest together: a scrape has a bounded size."""
    largest = heapq.nlargest(MAX_USERS, charges.items(), key=lambda item: item[1])
    rest = sum(charges.values()) - sum(count for _, count in largest)
    return {user_name(uid): count for uid, count in largest} | ({OTHERS: rest} if rest else {})


def _gauge(name: str, help: str, value: object) -> Metric:
    return GaugeMetricFamily(f"kvpool_{name}", help, value=_number(value))


def _counter(name: str, help: str, value: int) -> Metric:
    return CounterMetricFamily(f"kvpool_{name}", help, value=value)


def _labelled_gauge(name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(f"kvpool_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _labelled_counter(name: str, help: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(f"kvpool_{name}", help, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, help: str, seconds: Distribution) -> Metric:
    buckets = [("+Inf" if bound == math.inf else repr(bound), float(count)) for bound, count in seconds.cumulative()]
    return HistogramMetricFamily(f"kvpool_{name}", help, buckets=buckets, sum_value=seconds.sum_s)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
