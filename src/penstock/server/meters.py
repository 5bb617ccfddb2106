"""Meters: what /metrics says, under vLLM's names where vLLM has one."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.generation.serving.events import Finished
from penstock.generation.serving.stats import EngineStats

_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip


class Meters:
    """Counters of one server, in a registry of its own."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        """Begin at zero.

        Args:
            stats: of the engine, asked at every scrape.
        """
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))
        self._labels = labels = {"model_name": model_name}

        def histogram(name: str, about: str) -> Any:
            made = Histogram(
                f"vllm:{name}", about, list(labels), buckets=_SECONDS, registry=self._registry
            )
            return made.labels(**labels)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._between = histogram("inter_token_latency_seconds", "Between two tokens.")
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end.")
        self._queue = histogram("request_queue_time_seconds", "From arrival to admission.")
        self._prefill = histogram("request_prefill_time_seconds", "From there to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From there to the last token.")

    def count(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Tell further counters, which are asked at every scrape."""
        self._registry.register(_Counts(self._labels, counts))

    def finished(self, end: Finished) -> None:
        """A request is over."""
        times = end.timings
        if end.usage.new_tokens:
            self._first.observe(times.first_token_s)
            self._prefill.observe(times.prefill_s)
            self._decode.observe(times.decode_s)
        self._queue.observe(times.queue_s)
        self._whole.observe(times.total_s)

    def between_tokens(self, seconds: float) -> None:
        """A token has come so long after the one before."""
        self._between.observe(seconds)

    def text(self) -> bytes:
        """In Prometheus's text format."""
        return generate_latest(self._registry)

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Name, labels and value of each, for other registries; of histograms, sum and count."""
        for family in self._registry.collect():
            for each in family.samples:
                if not each.name.endswith(("_bucket", "_created")):
                    yield each.name, dict(each.labels), each.value


class _EngineCollector(Collector):
    """Reads an engine's counters when it is asked."""

    def __init__(self, model_name: str, stats: Callable[[], EngineStats]) -> None:
        self._labels, self._stats = {"model_name": model_name}, stats

    def collect(self) -> Iterator[Any]:
        """Every counter and gauge."""
        stats, names = self._stats(), list(self._labels)
        values = list(self._labels.values())

        def gauge(name: str, about: str, value: float) -> Any:
            family = GaugeMetricFamily(name, about, labels=names)
            family.add_metric(values, value)
            return family

        def counter(name: str, about: str, value: float) -> Any:
            family = CounterMetricFamily(name, about, labels=names)
            family.add_metric(values, value)
            return family

        limit = stats.limit_bytes
        yield gauge("vllm:num_requests_running", "Requests that have a cache.", stats.running)
        yield gauge("vllm:num_requests_waiting", "Requests that wait for one.", stats.waiting)
        yield gauge(
            "vllm:kv_cache_usage_perc", "Share of the memory that caches are promised; 1 is all.",
            stats.used_bytes / limit if limit else 0.0,
        )  # fmt: skip
        yield counter(
            "vllm:prefix_cache_queries", "Tokens of prompts looked up.", stats.prompt_tokens
        )
        yield counter(
            "vllm:prefix_cache_hits", "Of them, those whose KV was stored.", stats.cached_tokens
        )
        yield counter("vllm:prompt_tokens", "Tokens of prompts.", stats.prompt_tokens)
        yield counter("vllm:generation_tokens", "Tokens of answers.", stats.new_tokens)
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that are over.", labels=[*names, "finished_reason"]
        )
        for reason, count in sorted(stats.finished.items()):
            success.add_metric([*values, reason], count)
        yield success
        yield counter("penstock:requests_refused", "Found the queue full.", stats.refused)
        yield counter("penstock:kv_read_bytes", "Read from stores.", stats.read_bytes)
        yield counter("penstock:kv_written_bytes", "Written to stores.", stats.written_bytes)
        yield counter("penstock:stall_seconds", "Attention waited for reads.", stats.stall_s)
        yield counter("penstock:units_wanted", "Units that selections asked for.",
                      stats.units_wanted)  # fmt: skip
        yield counter("penstock:units_hit", "Of them, already in memory.", stats.units_hit)
        yield gauge("penstock:kv_memory_bytes", "Promised to caches now.", stats.used_bytes)
        yield gauge("penstock:kv_memory_peak_bytes", "At most so far.", stats.peak_bytes)
        if limit is not None:
            yield gauge("penstock:kv_memory_limit_bytes", "Of all caches together.", limit)
        yield counter("penstock:decode_steps", "Forward passes that decoded.", stats.steps)
        yield counter("penstock:decode_step_rows", "Rows of all of them.", stats.step_rows)


class _Counts(Collector):
    """Counters that something else keeps."""

    def __init__(self, labels: Mapping[str, str], counts: Callable[[], Mapping[str, int]]) -> None:
        self._labels, self._counts = dict(labels), counts

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        for name, value in self._counts().items():
            about = name.replace("_", " ").capitalize() + "."
            family = CounterMetricFamily(f"penstock:{name}", about, labels=list(self._labels))
            family.add_metric(list(self._labels.values()), value)
            yield family


def of_replicas(texts: Mapping[str, bytes], counts: Mapping[str, Mapping[str, float]]) -> bytes:
    """What several servers count, each sample with the label of its replica.

    Args:
        texts: what `Meters.text` gave, by replica.
        counts: what is counted in front of them, by metric and replica.
    """
    families: dict[str, Metric] = {}
    for replica, text in texts.items():
        for family in text_string_to_metric_families(text.decode()):
            merged = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            for each in family.samples:
                merged.add_sample(each.name, {**each.labels, "replica": replica}, each.value)
    for name, values in counts.items():
        own = families[name] = GaugeMetricFamily(name, "Of each replica.", labels=["replica"])
        for replica, value in values.items():
            own.add_metric([replica], value)
    registry = CollectorRegistry()
    registry.register(_Given(families.values()))
    return generate_latest(registry)


class _Given(Collector):
    """Metrics that are there already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        return iter(self._metrics)
