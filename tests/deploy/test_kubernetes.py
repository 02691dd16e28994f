"""The manifests of deploy/kubernetes as kubectl builds them: valid, bound, and not killed for being busy."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
FOLDERS = sorted(path.parent.relative_to(ROOT).as_posix() for path in ROOT.rglob("kustomization.yaml"))


def built(folder: str) -> list[dict[str, Any]]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl, which builds kustomizations, is not installed")
    assert kubectl
    done = subprocess.run([kubectl, "kustomize", str(ROOT / folder)], capture_output=True, check=True)
    return list(yaml.safe_load_all(done.stdout))


def containers(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    pods = [found["spec"]["template"]["spec"] for found in resources if found["kind"] == "StatefulSet"]
    return [one for pod in pods for one in (*pod.get("initContainers", []), *pod["containers"])]


def one_of_kind(resources: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [resource for resource in resources if resource["kind"] == kind]
    return found


def test_there_is_one_for_each_side_and_the_ways_to_change_it() -> None:
    overlays = {"overlays/gpu", "overlays/node-port", "overlays/tls-passthrough"}
    assert set(FOLDERS) == {"operator", "hospital", *overlays}


@pytest.mark.parametrize("folder", FOLDERS)
def test_manifests_follow_the_schema(folder: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for resource in built(folder):
        validator.validate(resource, validator.latest_version(), strict=True)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_container_is_bound_and_no_command_kills_one_that_is_busy(folder: str) -> None:
    found = containers(built(folder))
    assert found
    for container in found:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"] and context["capabilities"] == {"drop": ["ALL"]}
        assert context["allowPrivilegeEscalation"] is False
        assert "exec" not in container.get("livenessProbe", {})


def test_a_supernode_cannot_write_where_apps_and_approvals_are() -> None:
    [supernode] = [one for one in containers(built("hospital")) if one["name"] == "supernode"]
    mounts = {mount["mountPath"]: mount.get("readOnly", False) for mount in supernode["volumeMounts"]}
    writable = {"/site/state": False, "/site/tip": False, "/tmp": False}
    assert mounts == {"/site": True, "/site/data": True, **writable}


def test_overlays_change_what_they_say() -> None:
    [supernode] = [one for one in containers(built("overlays/gpu")) if one["name"] == "supernode"]
    assert supernode["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert supernode["image"].startswith("perennial-site-cuda")
    ports = [
        found["spec"]
        for found in built("overlays/node-port")
        if found["kind"] == "Service" and found["metadata"]["name"] == "superlink"
    ]
    assert ports[0]["type"] == "NodePort" and ports[0]["ports"][0]["nodePort"] == 30092
    ingress = one_of_kind(built("overlays/tls-passthrough"), "Ingress")
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/ssl-passthrough"] == "true"


@pytest.mark.parametrize("side", ["operator", "hospital"])
def test_images_are_named_by_digest_as_the_files_say(tmp_path: Path, side: str) -> None:
    shutil.copytree(ROOT, tmp_path / "kubernetes")
    path = tmp_path / "kubernetes" / side / "kustomization.yaml"
    text, digest = path.read_text(), "sha256:" + "ab" * 32
    said = [
        line.removeprefix("# ") if re.search("images:|digest:", line) else line for line in text.splitlines()
    ]
    path.write_text("\n".join(said).replace("sha256:...", digest).replace("REGISTRY", "registry.example.org"))
    found = containers(built(str(path.parent)))
    assert found and all(one["image"].endswith(f"@{digest}") for one in found)
