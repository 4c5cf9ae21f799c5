"""What /metrics tells: one registry per server, so that several servers fit into one process."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class ServerMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "topd_serve_requests",
            "Answers, by route and status; 499: the client left.",
            ["route", "status"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "topd_serve_request_seconds",
            "Time from the first byte of a request to its answer.",
            ["route"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.scored = Counter("topd_serve_scored_tokens", "Tokens whose log-prob was computed.", registry=self.registry)
        self.generated = Counter("topd_serve_generated_tokens", "Tokens that were sampled.", registry=self.registry)
        self.queued = Gauge("topd_serve_queued_requests", "Requests with work that has not begun.", registry=self.registry)
        self.batches = Histogram(
            "topd_serve_batch_size",
            "Pieces of work that ran together.",
            ["work"],
            buckets=REQUESTS,
            registry=self.registry,
        )
