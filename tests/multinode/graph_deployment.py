"""What of Dynamo's graph deployment the manifests use, as a schema that refuses everything else.

Written down from the published Go types of the custom resource, repository ai-dynamo/dynamo:
deploy/operator/api/v1beta1/ dynamographdeployment_types.go at 0fddc01b37, dynamocomponentdeployment_types.go
at 006b6e1085 and common.go at 02911c80e4; limits of names from deploy/operator/internal/consts/consts.go at
0367e404b0. Containers are core/v1 of Kubernetes.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

# Grove refuses longer combinations of a deployment's and a component's name.
MAX_COMBINED_NAME = 45
SEMANTIC_VERSION = re.compile(r":(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})\.(0|[1-9]\d{0,3})$")
Name = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$")]
DnsName = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Quantity = Annotated[str, Field(pattern=r"^[1-9][0-9]*(m|Ki|Mi|Gi|Ti)?$")]


class Strict(BaseModel):
    """An object without further fields; values are not converted, as the API server does not either."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class EnvVar(Strict):
    name: Annotated[str, Field(pattern=r"^[^=]+$")]
    value: str


class SecretRef(Strict):
    name: DnsName


class EnvFrom(Strict):
    secret_ref: SecretRef


class Resources(Strict):
    limits: dict[Literal["cpu", "memory", "nvidia.com/gpu"], Quantity]


class Container(Strict):
    name: DnsName
    image: str
    working_dir: str | None = None
    command: list[str] = []
    args: list[str] = []
    env_from: list[EnvFrom] = []
    resources: Resources | None = None


class PodSpec(Strict):
    containers: Annotated[list[Container], Field(min_length=1)]


class PodTemplate(Strict):
    spec: PodSpec


class Component(Strict):
    name: Name
    type: Literal["frontend", "worker", "prefill", "decode", "planner", "epp"]
    replicas: Annotated[int, Field(ge=0)]
    pod_template: PodTemplate

    @field_validator("pod_template")
    @classmethod
    def has_a_main_container_with_a_version(cls, template: PodTemplate) -> PodTemplate:
        """Admission wants a container called main, and reads the runtime's version from its image's tag."""
        (main,) = [container for container in template.spec.containers if container.name == "main"]
        if SEMANTIC_VERSION.search(main.image) is None:
            raise ValueError(f"{main.image} has no version for a tag")
        return template

    @property
    def main(self) -> Container:
        return next(container for container in self.pod_template.spec.containers if container.name == "main")


class Spec(Strict):
    backend_framework: Literal["sglang", "vllm", "trtllm"]
    env: list[EnvVar]
    components: Annotated[list[Component], Field(max_length=25)]

    @field_validator("components")
    @classmethod
    def names_differ_in_more_than_case(cls, components: list[Component]) -> list[Component]:
        if len({component.name.lower() for component in components}) < len(components):
            raise ValueError("two components have the same name")
        return components


class Metadata(Strict):
    name: DnsName


class GraphDeployment(Strict):
    api_version: Literal["nvidia.com/v1beta1"]
    kind: Literal["DynamoGraphDeployment"]
    metadata: Metadata
    spec: Spec

    @model_validator(mode="after")
    def names_fit_into_those_of_pods(self) -> GraphDeployment:
        longest = max(len(component.name) for component in self.spec.components)
        if len(self.metadata.name) + longest > MAX_COMBINED_NAME:
            raise ValueError("the names are too long together")
        return self
