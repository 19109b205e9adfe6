"""The one list of metrics: names, labels and meanings. ``docs/metrics.md`` is made from it.

Every line has the labels ``service`` and ``base_model`` of its process besides its own. No label
ever holds an id of a request, model, session, lineage or owner: there are few lines, however many
tenants there are, and they tell nothing of any one of them.
"""

from __future__ import annotations

from tinsmith.metrics.declared import Catalogue, Declared

ALL: dict[str, Declared] = {}
"""Name -> what was declared, in the order of the page."""

_SIZES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS = tuple(float(1 << n) for n in range(4, 20, 2))
_SHARES = (0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.7, 1.0)

# Every service.
_every = Catalogue(ALL, "gateway", "trainer", "sampler", "checkpointer")
INFO = _every.gauge("info", "Always 1; the process, by its version.", "version", "name")
READY = _every.gauge("ready", "1 while /readyz answers 200, else 0.")
BUS_CONNECTED = _every.gauge("bus_connected", "1 while the broker can be reached, else 0.")
BUS_DISCONNECTS = _every.counter("bus_disconnects_total", "Connections to the broker lost.")
BUS_RECONNECTS = _every.counter("bus_reconnects_total", "Connections to the broker regained.")
BUS_PUBLISH_SECONDS = _every.histogram(
    "bus_publish_seconds", "Time until the broker has answered to a message.", "kind"
)
BUS_REFUSED = _every.counter(
    "bus_refused_total", "Messages that the broker had no room for.", "kind", "reason"
)
BUS_REDELIVERED = _every.counter(
    "bus_redelivered_total", "Messages that came again, as work on them had not ended.", "stream"
)

# Gateways.
_gateway = Catalogue(ALL, "gateway")
HTTP_REQUESTS = _gateway.counter(
    "http_requests_total", "Requests answered.", "method", "route", "status"
)
HTTP_SECONDS = _gateway.histogram(
    "http_request_seconds", "Time to answer; polls are held for up to 40 s.", "route"
)
HTTP_OPEN = _gateway.gauge("http_requests_open", "Requests that are being answered, polls too.")
POLLS_HELD = _gateway.gauge("http_polls_held", "Polls that are held until there is a result.")
FUTURES_ANSWERED = _gateway.counter(
    "futures_answered_total",
    "Results given to clients; outcome is done, or the category of the failure.",
    "kind",
    "outcome",
)
UNFINISHED = _gateway.gauge(
    "requests_unfinished",
    "Requests of all gateways that are not done: training, sampling, or held over a share. Every "
    "gateway tells all of them: take the maximum.",
    "kind",
)
QUEUE_MESSAGES = _gateway.gauge(
    "queue_messages", "What lies on a queue, waiting or worked on; take the maximum.", "queue"
)
QUEUE_BYTES = _gateway.gauge("queue_bytes", "Bytes of a queue; take the maximum.", "queue")
QUEUE_OLDEST_SECONDS = _gateway.gauge(
    "queue_oldest_seconds",
    "Age of the oldest message of a queue, 0 when it is empty; take the maximum.",
    "queue",
)
WORKERS = _gateway.gauge(
    "workers", "Trainers or samplers that a gateway hears, of each model.", "role", "model"
)
SESSIONS = _gateway.gauge("sessions_active", "Sessions that are active; take the maximum.")

# Trainers.
_trainer = Catalogue(ALL, "trainer")
BUSY_SECONDS = _trainer.counter("trainer_busy_seconds_total", "Time spent computing.")
BUSY_SHARE = _trainer.gauge(
    "trainer_busy_share", "Share of the last ten seconds spent computing, 0 to 1."
)
TURN_AGE = _trainer.gauge(
    "trainer_turn_age_seconds", "For how long the present computation has run; 0: none does."
)
OPS = _trainer.counter(
    "trainer_ops_total",
    "Operations that have ended; outcome is done, or the category of the failure.",
    "op",
    "outcome",
)
OP_SECONDS = _trainer.histogram(
    "trainer_op_seconds", "Time from an operation's turn to its record in the log.", "op"
)
COMMIT_SECONDS = _trainer.histogram(
    "trainer_commit_seconds", "Time to append a record to a model's log."
)
TRAINER_TOKENS = _trainer.counter("trainer_tokens_total", "Tokens that passes were made of.")
PASS_TOKENS = _trainer.histogram("trainer_pass_tokens", "Tokens of a pass.", buckets=_TOKENS)
PASS_OPS = _trainer.histogram("trainer_pass_ops", "Operations that share a pass.", buckets=_SIZES)
MODELS = _trainer.gauge("trainer_models", "Models in the trainer's hands.")
ROOM = _trainer.gauge("trainer_room", "How many more models it may take.")
WAITING = _trainer.gauge("trainer_models_waiting", "Models that wait for a turn.")
PAUSE_SECONDS = _trainer.histogram(
    "trainer_pause_seconds", "Time that a step waited for its model to be copied or digested."
)
TAKEN = _trainer.counter(
    "trainer_models_taken_total", "Models taken: new ones, or recovered from their logs.", "how"
)
LOST = _trainer.counter(
    "trainer_models_lost_total",
    "Models given up before their end: fenced by another trainer, forgotten, failed, or left when "
    "the trainer was told to stop.",
    "why",
)
RECOVERY_SECONDS = _trainer.histogram(
    "trainer_recovery_seconds", "Time to rebuild a model from its log."
)
STATES_SAVED = _trainer.counter(
    "trainer_states_saved_total", "States saved for take-overs, by outcome.", "outcome"
)
CANARY_PICKED = _trainer.counter(
    "canary_continuations_total",
    "Continuations picked to be scored again; outcome is scored, busy, long, outdated or failed.",
    "outcome",
)
CANARY_TOKENS = _trainer.counter("canary_tokens_total", "Drawn tokens that were scored again.")
CANARY_KL = _trainer.gauge(
    "canary_kl",
    "KL per token, of the last some thousand tokens scored again: part is numerics (sampler to "
    "trainer, same weights) or staleness (those weights to the present ones), estimator k1 or k3.",
    "part",
    "estimator",
)
CANARY_DLOGP = _trainer.gauge(
    "canary_dlogp", "Largest difference of a log-probability among those tokens.", "part"
)
CANARY_OVER = _trainer.gauge(
    "canary_over", "1 while a part is over its threshold in the configuration, else 0.", "part"
)

# Whoever has a device.
_device = Catalogue(ALL, "trainer", "sampler")
DEVICE_MEMORY = _device.gauge(
    "device_memory_bytes", "Memory of the GPU: allocated, reserved, total; none on a CPU.", "kind"
)

# Samplers.
_sampler = Catalogue(ALL, "sampler")
SAMPLE_REQUESTS = _sampler.counter(
    "sampler_requests_total",
    "Requests that have ended; outcome is done, or the category of the failure.",
    "outcome",
)
SAMPLE_SECONDS = _sampler.histogram(
    "sampler_request_seconds", "Time from taking a request to its stored result."
)
FIRST_TOKEN_SECONDS = _sampler.histogram(
    "sampler_first_token_seconds",
    "Time from a row's arrival at the torch engine to its first token.",
)
ROWS = _sampler.gauge("sampler_rows", "Rows of the engine: running, queued or free.", "state")
PROMPT_TOKENS = _sampler.counter("sampler_prompt_tokens_total", "Tokens of prompts, of all rows.")
CACHED_TOKENS = _sampler.counter(
    "sampler_cached_tokens_total", "Those of them that needed no pass, as others had it."
)
DRAWN_TOKENS = _sampler.counter("sampler_drawn_tokens_total", "Tokens drawn.")
ADAPTERS = _sampler.gauge("sampler_adapters", "Adapters and whole models in memory.")
ADAPTER_LOADS = _sampler.counter("sampler_adapter_loads_total", "Weights loaded.", "outcome")
ADAPTER_LOAD_SECONDS = _sampler.histogram(
    "sampler_adapter_load_seconds", "Time to fetch and load weights."
)
ADAPTER_EVICTIONS = _sampler.counter("sampler_adapter_evictions_total", "Weights unloaded.")
UNLOGGED = _sampler.counter(
    "sampler_unlogged_total", "Answers that the log of samples did not take."
)

# Lineages: who publishes weights, and who follows them.
FORMS = _trainer.counter("weights_published_total", "Versions published.", "form")
PUBLISHED_BYTES = _trainer.counter(
    "weights_published_bytes_total", "Bytes of published versions.", "form"
)
ELEMENTS_CHANGED = _trainer.histogram(
    "weights_density", "Share of elements that a version changes.", buckets=_SHARES
)
SIZE_RATIO = _trainer.histogram(
    "weights_size_ratio", "Bytes of a version, in those of the whole weights.", buckets=_SHARES
)
ENCODE_SECONDS = _trainer.histogram("weights_encode_seconds", "Time to find and code a change.")
PUBLISH_SECONDS = _trainer.histogram(
    "weights_publish_seconds", "Time until a version is durable, coding too."
)
REPLICAS_HEARD = _trainer.gauge(
    "weights_replicas_heard", "Replicas that acknowledge versions, of all lineages published here."
)
REPLICAS_BEHIND = _trainer.gauge(
    "weights_replicas_behind", "Those of them that do not serve the newest version."
)
REPLICAS = _sampler.gauge("weights_replicas", "Lineages followed here, by state.", "state")
BEHIND = _sampler.gauge(
    "weights_behind", "Versions that are committed and not served, of the lineage most behind."
)
LAG_SECONDS = _sampler.histogram(
    "weights_lag_seconds", "Time from a version's commit to its being served, by two clocks."
)
STAGE_SECONDS = _sampler.histogram(
    "weights_stage_seconds", "Time to fetch and prove a version beside the service."
)
WEIGHTS_PAUSE_SECONDS = _sampler.histogram(
    "weights_pause_seconds", "Time that nothing was computed, for a version to be written."
)
RECEIVED_BYTES = _sampler.counter("weights_received_bytes_total", "Bytes of versions received.")
MISMATCHES = _sampler.counter(
    "weights_mismatches_total", "Bits found that were not those that a root names."
)

# Checkpointers.
_checkpointer = Catalogue(ALL, "checkpointer")
COMMITS = _checkpointer.counter(
    "checkpointer_commits_total", "Checkpoints committed or refused.", "kind", "outcome"
)
COMMITTED_BYTES = _checkpointer.counter(
    "checkpointer_committed_bytes_total", "Bytes of committed checkpoints.", "kind"
)
CHECKPOINT_SECONDS = _checkpointer.histogram(
    "checkpointer_commit_seconds", "Time to commit a checkpoint."
)
FREED_BYTES = _checkpointer.counter(
    "checkpointer_freed_bytes_total", "Bytes of the blob store that were freed."
)
DISCARDED = _checkpointer.gauge(
    "checkpointer_discarded", "What was discarded and is not freed yet; take the maximum."
)
