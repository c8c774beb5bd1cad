"""Prometheus metrics, with vLLM's names and the prefix `graft:`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

if TYPE_CHECKING:
    from graft.engine.scheduler import Scheduler
    from graft.request.stats import Stats

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """Counters and histograms of one server. Tokens count as they come, speculation when an answer ends.

    Metrics of the process (memory, CPU time, open files) have Prometheus' usual names, `process_...`.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model_name
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

        def counter(name: str, words: str, *labels: str) -> Counter:
            return Counter(f"graft:{name}", words, ("model_name", *labels), registry=self._registry)

        def histogram(name: str, words: str) -> Histogram:
            made = Histogram(f"graft:{name}", words, ("model_name",), buckets=_SECONDS, registry=self._registry)
            return made.labels(model_name)

        self._http = counter("http_requests", "HTTP requests by status.", "method", "path", "status")
        self._http_seconds = Histogram(
            "graft:http_request_duration_seconds",
            "From a request to the end of its response.",
            ("model_name", "path"),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._successes = counter("request_success", "Finished answers.", "finished_reason")
        self._failures = counter("request_failure", "Requests that failed.", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens.").labels(model_name)
        self.new_tokens = counter("generation_tokens", "Generated tokens.").labels(model_name)
        self._rounds = counter("spec_decode_num_drafts", "Rounds that verified a tree.")
        self._proposed = counter("spec_decode_num_draft_tokens", "Proposed tokens that were verified.", "source")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Proposed tokens that were accepted.", "source")
        self._by_depth = counter("spec_decode_num_accepted_tokens_per_pos", "Accepted tokens by depth.", "position")
        self.time_to_first_token = histogram("time_to_first_token_seconds", "From a request to its first token.")
        self.inter_token_latency = histogram("inter_token_latency_seconds", "From a token to the next.")
        self.queue_time = histogram("request_queue_time_seconds", "From a request to its first round.")
        self.end_to_end = histogram("e2e_request_latency_seconds", "From a request to its last token.")

    def watch(self, scheduler: Scheduler) -> None:
        """Report this scheduler's gauges too."""
        self._registry.register(_SchedulerCollector(scheduler, self._model))

    def responded(self, method: str, path: str, status: int, seconds: float) -> None:
        """Count an HTTP response. path: the route's, not the client's, so that there are few labels."""
        self._http.labels(self._model, method, path, str(status)).inc()
        self._http_seconds.labels(self._model, path).observe(seconds)

    def answered(self, reason: str) -> None:
        self._successes.labels(self._model, reason).inc()

    def failed(self, reason: str) -> None:
        self._failures.labels(self._model, reason).inc()

    def speculated(self, stats: Stats) -> None:
        self._rounds.labels(self._model).inc(stats.rounds - stats.plain_rounds)
        # Copies: the scheduler's thread may still add to them.
        for source, count in list(stats.proposed_by_source.items()):
            self._proposed.labels(self._model, source).inc(count)
        for source, count in list(stats.accepted_by_source.items()):
            self._accepted.labels(self._model, source).inc(count)
        for depth, count in list(stats.accepted_by_depth.items()):
            self._by_depth.labels(self._model, str(depth - 1)).inc(count)

    def response(self) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4")


class _SchedulerCollector:
    """Prometheus collector that reads the scheduler's gauges when scraped."""

    def __init__(self, scheduler: Scheduler, model_name: str) -> None:
        self._scheduler, self._model = scheduler, model_name

    def collect(self) -> Iterator[Metric]:
        scheduler, pool = self._scheduler, self._scheduler.pool
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for family, name, words, value in (
            (gauge, "num_requests_running", "Requests in prefill or decode.", scheduler.num_running),
            (gauge, "num_requests_waiting", "Requests that wait for room.", scheduler.num_waiting),
            (gauge, "kv_cache_usage_perc", "Share of the KV cache's pages used by requests.", scheduler.cache_use),
            (gauge, "prefix_cache_tokens", "Tokens in the prefix cache.", pool.num_prefix_tokens),
            (counter, "prefix_cache_queries", "Tokens looked up in the prefix cache.", pool.num_prefix_queries),
            (counter, "prefix_cache_hits", "Tokens found in the prefix cache.", pool.num_prefix_hits),
        ):
            metric = family(f"graft:{name}", words, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
