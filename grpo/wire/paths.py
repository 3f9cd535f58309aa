"""The protocol's version, and the paths and content types of its requests."""

from __future__ import annotations

VERSION = 1
LOGPROBS_PATH = "/v1/logprobs"
REWARDS_PATH = "/v1/rewards"
TASK_PATHS = {"logprobs": LOGPROBS_PATH, "reward": REWARDS_PATH}
"""the path of each task"""
WEIGHTS_PATH = "/v1/weights"
COMMIT_PATH = "/v1/weights/commit"
ROLLOUTS_PATH = "/v1/rollouts"
RUN_PATH = f"{ROLLOUTS_PATH}/run"
TASKS_PATH = f"{ROLLOUTS_PATH}/tasks"
GROUPS_PATH = f"{ROLLOUTS_PATH}/groups"
LEASE_PATH = f"{ROLLOUTS_PATH}/lease"
RESULTS_PATH = f"{ROLLOUTS_PATH}/results"
FILES_PATH = f"{ROLLOUTS_PATH}/files"
VERSIONS_PATH = f"{ROLLOUTS_PATH}/versions"
NEEDED_PATH = f"{ROLLOUTS_PATH}/needed"
DRIFT_PATH = f"{ROLLOUTS_PATH}/drift"
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
STATUS_PATH = "/status"
PAGE_PATH = "/"
CONTENT_TYPE = "application/octet-stream"
CONTENT_TYPES = {"logprobs": CONTENT_TYPE, "reward": "application/json"}
