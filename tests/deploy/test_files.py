"""What deploy/ has is what its readers accept: nats-server, Docker, compose, Kubernetes, we."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.deploy.shipped import NATS, ROOT, variables

from tinsmith import config
from tinsmith.broker import find_binary
from tinsmith.bus.permissions import inbox_prefix
from tinsmith.config_docs import render

DEPLOY = ROOT / "deploy"
K8S = DEPLOY / "k8s"
KUBERNETES = "1.34"
SERVICES = ("gateway", "trainer", "sampler", "checkpointer")
MANIFESTS = sorted(path for path in K8S.rglob("*.yaml") if path.name != "kustomization.yaml")


def documents(path):
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


ALL = [(path, one) for path in MANIFESTS for one in documents(path)]


def of_kind(kind, name):
    (found,) = [d for _, d in ALL if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


@pytest.mark.parametrize("name", sorted(p.name for p in NATS.glob("*.conf")))
def test_nats_server_takes_the_file(name, tls, tmp_path):
    text = (NATS / name).read_text()
    checked = subprocess.run(
        [find_binary(), "-c", NATS / name, "-t"],
        env=variables(tls, tmp_path), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr
    for included in re.findall(r"(?m)^include (\S+)", text):
        assert (NATS / included).exists()


@pytest.mark.parametrize("path", sorted((DEPLOY / "config").glob("*.toml")), ids=lambda p: p.name)
def test_our_configuration_takes_the_file(path):
    loaded = config.load(path, {})
    assert loaded.models
    again = render(loaded)
    assert all(model.name in again for model in loaded.models)


def test_the_configuration_in_the_cluster_is_one(tmp_path):
    text = of_kind("ConfigMap", "tinsmith")["data"]["tinsmith.toml"]
    path = tmp_path / "tinsmith.toml"
    path.write_text(text)
    loaded = config.load(path, {})
    assert loaded.bus.replicas == 3
    assert not loaded.bus.create_streams


@pytest.mark.parametrize("path", [DEPLOY / "Dockerfile"], ids=lambda p: p.name)
def test_the_dockerfile_passes_its_linter(path):
    hadolint = Path(sys.executable).parent / "hadolint"
    checked = subprocess.run([hadolint, path], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def stages():
    """Name -> lines of each stage of the Dockerfile, and what it is made from."""
    found, name = {}, ""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    for line in text.splitlines():
        if match := re.match(r"FROM (\S+) AS (\S+)", line):
            name = match[2]
            found[name] = (match[1], [])
        elif name and line and not line.startswith("#"):
            found[name][1].append(line.strip())
    return found


@pytest.mark.parametrize("target", [*SERVICES, "broker"])
def test_each_target_runs_as_nobody_and_says_how_it_is(target):
    base, lines = stages()[target]
    assert base == "runtime"
    inherited = stages()["runtime"][1]
    assert "USER 10001:10001" in inherited
    assert not any(line.startswith("USER") for line in lines)
    assert any(line.startswith("HEALTHCHECK") for line in (*inherited, *lines))
    assert lines[-1].startswith("ENTRYPOINT [")


@pytest.mark.parametrize("target", ["gateway", "checkpointer"])
def test_images_without_torch_install_no_extra_that_brings_it(target):
    (install,) = stages()[f"{target}-environment"][1]
    assert f"[{target}]" in install
    assert "-c /constraints.txt" in install


def test_every_path_that_the_dockerfile_copies_is_let_into_its_context():
    allowed = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"
    }
    copied = re.findall(r"(?m)^COPY (?!--from)(.*) \S+$", (DEPLOY / "Dockerfile").read_text())
    assert {path for line in copied for path in line.split()} == allowed
    assert all((ROOT / path).exists() for path in allowed)


COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_accepts_the_file():
    schemas = resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(COMPOSE)


def test_everything_that_compose_names_is_defined():
    for service in COMPOSE["services"].values():
        assert service["build"]["target"] in stages() if "build" in service else service["image"]
        for secret in service.get("secrets", []):
            assert (secret if isinstance(secret, str) else secret["source"]) in COMPOSE["secrets"]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"]
        assert set(service["networks"]) <= set(COMPOSE["networks"])
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"])
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
    assert (DEPLOY / COMPOSE["configs"]["tinsmith.toml"]["file"]).exists()


def environment_of(service):
    pod = of_kind("Deployment", service)["spec"]["template"]["spec"]["containers"][0]
    return {one["name"]: one.get("value", "") for one in pod["env"]}


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_says_who_it_is_and_is_understood(service):
    for environ in (COMPOSE["services"][service]["environment"], environment_of(service)):
        assert environ["TINSMITH_BUS__USER"] == service
        assert environ["TINSMITH_BUS__INBOX_PREFIX"] == inbox_prefix(service)
        ours = {k: v for k, v in environ.items() if k.startswith("TINSMITH_")}
        ours.pop("TINSMITH_CONFIG")
        assert config.load(None, ours).bus.user == service


def test_the_script_makes_every_secret_that_compose_names(tmp_path):
    folder = tmp_path / "secrets"
    command = [DEPLOY / "secrets.sh", folder]
    subprocess.run(command, check=True, timeout=60)
    wanted = {Path(one["file"]).name for one in COMPOSE["secrets"].values()}
    made = {path.name: path.read_text() for path in folder.iterdir()}
    assert wanted <= set(made)
    assert {f"NATS_{user.upper()}_PASSWORD" for user in (*SERVICES, "operator", "region")} == {
        line.partition("=")[0] for line in made["broker.env"].splitlines()
    }
    assert made["api_keys"].startswith("tml-")
    assert folder.stat().st_mode & 0o077 == 0
    subprocess.run(command, check=True, timeout=60)
    assert {path.name: path.read_text() for path in folder.iterdir()} == made


@pytest.mark.parametrize(
    ("path", "document"),
    [(p, d) for p, d in ALL if "keda" not in d["apiVersion"]],
    ids=lambda v: v.name if isinstance(v, Path) else f"{v['kind']}-{v['metadata']['name']}",
)
def test_kubernetes_accepts_the_manifest(path, document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_scaled_objects_say_what_keda_needs():
    """Its schema is in no package: the fields that its documentation asks for."""
    for name in ("sampler", "trainer"):
        spec = of_kind("ScaledObject", name)["spec"]
        assert of_kind("Deployment", spec["scaleTargetRef"]["name"])
        assert 0 < spec["minReplicaCount"] < spec["maxReplicaCount"]
        for trigger in spec["triggers"]:
            assert trigger["type"] == "prometheus"
            assert set(trigger["metadata"]) == {"serverAddress", "query", "threshold"}
            assert float(trigger["metadata"]["threshold"]) > 0


def test_the_metrics_that_scale_are_told():
    from tinsmith.metrics import names

    for name in ("sampler", "trainer"):
        query = of_kind("ScaledObject", name)["spec"]["triggers"][0]["metadata"]["query"]
        assert set(re.findall(r"tinsmith_\w+", query)) <= set(names.ALL)


@pytest.mark.parametrize("name", [*SERVICES, "nats", "prepare"])
def test_pods_are_closed_probed_and_bounded(name):
    kind = {"nats": "StatefulSet", "prepare": "Job"}.get(name, "Deployment")
    pod = of_kind(kind, name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert not container["image"].endswith(":latest")
    assert ":" in container["image"]
    assert "memory" in container["resources"]["limits"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    volumes |= {"data"} if kind == "StatefulSet" else set()
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    if kind != "Job":
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
        assert of_kind("PodDisruptionBudget", name)["spec"]["selector"]["matchLabels"] == {
            "app": name
        }


def test_the_broker_collects_its_garbage_before_it_is_killed_for_it():
    (container,) = of_kind("StatefulSet", "nats")["spec"]["template"]["spec"]["containers"]
    units = {"GiB": 1 << 30, "Gi": 1 << 30, "MiB": 1 << 20, "Mi": 1 << 20}

    def size(text):
        amount, unit = re.fullmatch(r"(\d+)(\w+)", text).groups()
        return int(amount) * units[unit]

    (known,) = [one["value"] for one in container["env"] if one["name"] == "GOMEMLIMIT"]
    assert 0.8 < size(known) / size(container["resources"]["limits"]["memory"]) < 0.95


def test_every_secret_that_a_pod_needs_is_in_the_template():
    template = {
        d["metadata"]["name"]: set(d["stringData"]) for _, d in ALL if d["kind"] == "Secret"
    }
    text = "".join(path.read_text() for path in (K8S / "base").glob("*.yaml"))
    named = set(re.findall(r"secretName: ([\w-]+)|secretRef: \{name: ([\w-]+)", text))
    wanted = {one or other for one, other in named}
    # Certificates are made by an authority: docs/deploy.md.
    assert wanted - set(template) == {"nats-tls", "gateway-tls", "public-tls"}
    assert not any(
        value for _, d in ALL if d["kind"] == "Secret" for value in d["stringData"].values()
    )


def test_kustomize_finds_every_file_that_is_named():
    for path in [*K8S.rglob("kustomization.yaml"), NATS / "kustomization.yaml"]:
        (said,) = documents(path)
        for resource in said.get("resources", []):
            assert (path.parent / resource).exists(), (path, resource)
        for generated in said.get("configMapGenerator", []):
            assert all((path.parent / file).exists() for file in generated["files"])
    (base,) = documents(K8S / "base" / "kustomization.yaml")
    ours = {p.name for p in (K8S / "base").glob("*.yaml")} - {"kustomization.yaml"}
    assert ours == {name for name in base["resources"] if name.endswith(".yaml")}
