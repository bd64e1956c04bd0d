"""Docker's files, systemd's unit, SkyPilot's tasks and conda's recipe, held against their own validators."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.engines.launched import PATIENCE_S, ROOT, environment, needs_package

pytestmark = pytest.mark.engines

DEPLOY = ROOT / "deploy"


def checked(*command, **variables):
    """Run a command; return its exit code and its output."""
    done = subprocess.run(
        [str(part) for part in command], env=environment(**variables), timeout=PATIENCE_S, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return done.returncode, done.stdout


@pytest.fixture
def tool():
    """``tool(name)`` returns the path of a program that make test-engines installs."""

    def find(name):
        path = Path(sys.executable).with_name(name)
        if not path.exists():
            pytest.skip(f"{name} is not here: make test-engines")
        return path

    return find


def test_hadolint_finds_nothing_in_the_dockerfile(tool, tmp_path):
    hadolint, file = tool("hadolint"), DEPLOY / "docker" / "Dockerfile"
    assert checked(hadolint, "--no-color", file) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(file.read_text().replace("USER 1000", "USR 1000"))
    assert checked(hadolint, broken)[0] != 0


def test_the_image_starts_what_the_manifests_expect_of_it():
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["gossip", "run"]' in text, "their args are a script and its options"
    assert "useradd --uid 1000 " in text
    for file in ("statefulset.yaml", "job.yaml", "jobset.yaml", "trainjob.yaml"):
        assert "runAsUser: 1000," in (DEPLOY / "kubernetes" / file).read_text()


def test_the_compose_file_is_as_its_specification_says(tool, tmp_path):
    check, file = tool("check-jsonschema"), DEPLOY / "docker" / "compose.yaml"
    schema = ("--builtin-schema", "vendor.compose-spec")
    code, said = checked(check, *schema, file)
    assert code == 0, said
    broken = tmp_path / "compose.yaml"
    broken.write_text(file.read_text().replace("restart:", "restarts:"))
    assert checked(check, *schema, broken)[0] == 1


def test_systemd_takes_the_unit_and_tries_again_what_is_worth_it(needs, tmp_path):
    needs("systemd-analyze", "apt-get install systemd")
    text = (DEPLOY / "systemd" / "gossip@.service").read_text()
    assert "\nRestartPreventExitStatus=1 2\n" in text, "the script's fault, and whoever's who wrote the settings"
    assert "\nSuccessExitStatus=143\n" in text, "asked to leave"
    program = Path(sys.executable).with_name("gossip")
    unit = tmp_path / "gossip@.service"
    unit.write_text(text.replace("/opt/gossip/.venv/bin/gossip", str(program)))
    assert checked("systemd-analyze", "verify", unit) == (0, "")
    unit.write_text(unit.read_text().replace("Restart=on-failure", "Restart=on-faliure"))
    assert "Failed to parse" in checked("systemd-analyze", "verify", unit)[1]


SKY = """
import sys, sky, yaml
task = sky.Task.from_yaml_config(
    yaml.safe_load(open(sys.argv[1])), secrets_overrides=[("GOSSIP_SECRET", "none")],
    env_overrides=[("GOSSIP_SEEDS", "10.0.0.5:7700")] if "spot" in sys.argv[1] else None,
)
print(task.name, task.num_nodes, *(resources.use_spot for resources in task.resources))
"""


@needs_package("sky")
def test_skypilot_takes_the_tasks(tmp_path):
    at_home = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}  # SkyPilot writes files to HOME.
    for name, said in (("swarm", "swarm 4 False"), ("spot", "spot 1 True")):
        file = DEPLOY / "skypilot" / f"{name}.yaml"
        code, out = checked(sys.executable, "-c", SKY, file, **at_home)
        assert (code, out.splitlines()[-1]) == (0, said), out
        broken = tmp_path / file.name
        broken.write_text(file.read_text().replace("cpus:", "cpu:"))
        code, out = checked(sys.executable, "-c", SKY, broken, **at_home)
        assert code == 1
        assert "cpu" in out.splitlines()[-1] or "Invalid" in out


@needs_package("rattler_build")
def test_the_conda_recipe_renders_and_asks_for_what_the_package_asks_for():
    import rattler_build as build

    recipe = build.Stage0Recipe.from_file(DEPLOY / "conda" / "recipe.yaml")
    config = build.RenderConfig(platform=build.PlatformConfig(target_platform="linux-64"))
    (made,) = recipe.render(build.VariantConfig({"c_compiler": ["gcc"], "c_stdlib": ["sysroot"]}), config)
    made, project = made.recipe.to_dict(), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {"torch": "pytorch", "msgpack": "msgpack-python", "xxhash": "python-xxhash"}
    wanted = [re.fullmatch("([a-z]+)(>=.+)", text).groups() for text in project["dependencies"]]
    wanted = ["python " + project["requires-python"], *(f"{names.get(name, name)} {least}" for name, least in wanted)]
    assert made["requirements"]["run"] == wanted
    assert made["requirements"]["build"] == ["gcc_linux-64", "sysroot_linux-64"]
    assert made["build"]["python"] == {"version_independent": True}
    assert made["package"] == {name: project[name] for name in ("name", "version")}
    assert made["about"]["license"] == project["license"]
    assert all((ROOT / file).exists() for file in made["about"]["license_file"])
