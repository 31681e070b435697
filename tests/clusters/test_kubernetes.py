"""launch/trainjob.yaml: Kubeflow takes it, it fits the image, and what it starts trains."""

import copy
import os
import re
import signal
import subprocess
import time

import pytest
import yaml
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob
from ports import free_port
from pydantic import ValidationError
from running import SCREENED, metrics
from test_docker import instructions

LONG = "Very_Long-" * 5 + "x" * 10


@pytest.fixture(scope="module")
def project(bake):
    return bake(cluster="kubernetes")


def job(project):
    return yaml.safe_load((project / "launch" / "trainjob.yaml").read_text())


def pod(project):
    """The pod as the job changes it."""
    (patch,) = job(project)["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node"
    return node["template"]["spec"]["template"]["spec"]


def is_valid(trainjob):
    """Whether Kubeflow's own models take all of it; what they don't know, they drop."""
    return TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(trainjob)).to_dict() == trainjob


# The job


def test_kubeflows_models_take_all_of_it(project):
    trainjob = job(project)
    assert is_valid(trainjob)
    assert trainjob["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert trainjob["kind"] == "TrainJob"
    assert trainjob["spec"]["runtimeRef"] == {"name": "torch-distributed"}


def test_kubeflows_models_refuse_mistakes(project):
    """Or the test above would say nothing."""
    trainjob = job(project)
    trainjob["spec"]["trainer"]["numNodes"] = "two"
    with pytest.raises(ValidationError):
        is_valid(trainjob)
    for path in (["trainer"], ["runtimePatches", 0, "trainingRuntimeSpec", "template", "spec"]):
        trainjob = inner = job(project)
        for key in ["spec", *path]:
            inner = inner[key]
        inner["unknown"] = "1"
        assert not is_valid(trainjob)


@pytest.mark.parametrize("slug", ["A", "my_net-2", LONG])
def test_its_names_are_dns_labels_with_room_for_what_is_appended(bake, slug):
    project = bake(cluster="kubernetes", project_slug=slug)
    prefix = job(project)["metadata"]["generateName"]
    pod_name = f"{prefix}x2x2x-node-0-9999"
    assert re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", pod_name) and len(pod_name) <= 63
    assert "--" not in prefix


def test_manager_of_the_patch_is_a_domain_with_a_path(project):
    """Kubeflow Trainer's webhook refuses others, which its models do not tell."""
    (patch,) = job(project)["spec"]["runtimePatches"]
    label = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    assert re.fullmatch(rf"{label}(\.{label})*/[a-z0-9-]+", patch["manager"])


def test_two_jobs_do_not_share_a_folder(project):
    trainer = job(project)["spec"]["trainer"]
    own = next(variable for variable in trainer["env"] if "valueFrom" in variable)
    name = own["valueFrom"]["fieldRef"]["fieldPath"]
    assert name == "metadata.labels['jobset.sigs.k8s.io/jobset-name']"  # the TrainJob's
    assert trainer["args"][:2] == ["--output", f"runs/$({own['name']})"]
    assert "name" not in job(project)["metadata"]


def test_it_has_gpus_and_starts_again(project):
    trainer = job(project)["spec"]["trainer"]
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) > 0
    assert {"name": "MAX_RESTARTS", "value": "5"} in trainer["env"]
    assert trainer["args"][2:4] == ["--resume", "auto"]


def test_it_fits_the_image(project):
    trainer, spec, image = job(project)["spec"]["trainer"], pod(project), instructions(project)
    (container,) = spec["containers"]
    assert container["name"] == "node"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert mounted.keys() == {"/dev/shm", *image["VOLUME"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory"}
    for folder in ("data", "runs"):
        (path,) = [path for path in image["VOLUME"] if path.endswith(folder)]
        claim = mounted[path]["persistentVolumeClaim"]["claimName"]
        assert claim == f"ddp-training-{folder}"
    assert image["USER"].endswith(f":{spec['securityContext']['fsGroup']}")
    output = os.path.join(image["WORKDIR"], trainer["args"][1])
    assert os.path.dirname(output) in mounted
    assert trainer["args"][-2:] == ["--data", "/data"]


def kubelet(words, variables):
    """The words as a kubelet expands them."""
    return [re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], word) for word in words]


@pytest.mark.weekly
@pytest.mark.xdist_group("train")
def test_an_evicted_pod_saves_and_all_go_on(project, tmp_path):
    """Two pods as processes on this machine, with what Kubeflow Trainer tells them."""
    port = free_port()
    trainer = job(project)["spec"]["trainer"]
    flags = ["--arch", "mobilenet_v3_small", "--batch-size", "64", "--epochs", "3"]
    flags = [*trainer["args"][: trainer["args"].index("--data")], *flags]
    output = project / "runs" / "net-x2x2x"

    def start_pods():
        for rank in range(2):
            variables = {
                "JOB": "net-x2x2x",
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "auto",
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(port),
            }
            given = {each["name"]: each["value"] for each in trainer["env"] if "value" in each}
            with (tmp_path / f"pod{rank}.log").open("a") as log:
                yield subprocess.Popen(
                    kubelet([*trainer["command"], *flags], variables),
                    cwd=project,
                    env=SCREENED | given | variables | {"NPROC": "1"},
                    stdout=log,
                    stderr=log,
                )

    def said():
        return "".join((tmp_path / f"pod{rank}.log").read_text() for rank in range(2))

    pods = list(start_pods())
    try:
        deadline = time.monotonic() + 90
        while not (output / "metrics.csv").exists() or len(metrics(output)) < 1:
            assert time.monotonic() < deadline, said()
            time.sleep(0.1)
        pods[1].terminate()
        assert [pod.wait(60) for pod in pods] == [128 + signal.SIGTERM] * 2, said()
        pods = list(start_pods())
        assert [pod.wait(120) for pod in pods] == [0, 0], said()
    finally:
        for pod in pods:
            pod.kill()
            pod.wait()
    assert "2 processes on the CPU" in said()
    assert "resumed runs/net-x2x2x/" in said()
    assert [row["epoch"] for row in metrics(output)] == [1, 2, 3]
