"""Whole deployments for process tests: a frontend and the workers of each topology of the design."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from processes.cluster import Cluster, Managed

TOPOLOGIES: dict[str, tuple[str, ...]] = {
    "agg": ("agg",),
    "disagg": ("prefill", "decode"),
    "disagg_e_pd": ("encode", "agg"),
    "epd_disagg": ("encode", "prefill", "decode"),
}
ENCODE_ENDPOINT = "dyn://dynamo.tensorrt_llm_encode.generate"


class Deployment:
    """A running topology: its cluster, and its workers by role."""

    def __init__(self, name: str, cluster: Cluster, options: Sequence[str], model_path: str = "demo") -> None:
        self.name = name
        self.cluster = cluster
        self._options = tuple(options)
        self._model_path = model_path
        self.workers: dict[str, list[Managed]] = {}

    @property
    def roles(self) -> tuple[str, ...]:
        return TOPOLOGIES[self.name]

    def start(self, role: str, env: Mapping[str, str] | None = None) -> Managed:
        """Start one more worker of `role`, without waiting for it."""
        options = ["--disaggregation-mode", role, *self._options]
        if role in ("agg", "prefill") and "encode" in self.roles:
            options += ["--encode-endpoint", ENCODE_ENDPOINT]
        worker = self.cluster.worker(*options, name=role, env=env, model_path=self._model_path, wait=False)
        self.workers.setdefault(role, []).append(worker)
        return worker

    def all(self) -> list[Managed]:
        return [worker for group in self.workers.values() for worker in group]


def deploy(
    name: str,
    cluster: Cluster,
    *,
    options: Sequence[str] = ("--engine", "transformers", "--modality", "multimodal"),
    count: int = 1,
    env: Mapping[str, str] | None = None,
    model_path: str = "demo",
) -> Deployment:
    """Start the frontend and `count` workers of each role of topology `name`;
    returns when the model is listed."""
    deployment = Deployment(name, cluster, options, model_path)
    cluster.frontend()
    for role in deployment.roles:
        for _ in range(count):
            deployment.start(role, env)
    for worker in deployment.all():
        cluster.wait_serving(worker)
    cluster.wait_listed()
    return deployment
