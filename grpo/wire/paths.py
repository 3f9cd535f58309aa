"""The protocol's version, and the paths and content types of its requests."""

from __future__ import annotations

VERSION = 1
LOGPROBS_PATH = "/v1/logprobs"
REWARDS_PATH = "/v1/rewards"
TASK_PATHS = {"logprobs": LOGPROBS_PATH, "reward": REWARDS_PATH}
"""the path of each task"""
WEIGHTS_PATH = "/v1/weights"
COMMIT_PATH = "/v1/weights/commit"
RUN_PATH = "/v1/rollouts/run"
TASKS_PATH = "/v1/rollouts/tasks"
GROUPS_PATH = "/v1/rollouts/groups"
LEASE_PATH = "/v1/rollouts/lease"
RESULTS_PATH = "/v1/rollouts/results"
FILES_PATH = "/v1/rollouts/files"
VERSIONS_PATH = "/v1/rollouts/versions"
NEEDED_PATH = "/v1/rollouts/needed"
HEALTH_PATH = "/health"
METRICS_PATH = "/metrics"
STATUS_PATH = "/status"
PAGE_PATH = "/"
CONTENT_TYPE = "application/octet-stream"
CONTENT_TYPES = {"logprobs": CONTENT_TYPE, "reward": "application/json"}
