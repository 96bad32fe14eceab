"""The recipes, end to end and for real: small studies of each, what stands around them, and their manifests."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import documents
import jsonschema
import kubernetes_validate
import optuna
import pytest
import yaml
from fake_gpu import forks
from fixtures.torchrun import free_port

from batchtune.result import load_result, result_schema

ROOT = Path(__file__).parents[2]


def tuned(recipe, folder, *overrides):
    """The document that the recipe's command prints."""
    output = folder / "result.json"
    config = ROOT / "recipes" / recipe / "config.yaml"
    command = [sys.executable, "-m", "batchtune", "tune", str(config), *overrides]
    command += ["--fresh", "--json", "-q", "-o", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = forks.run(command, cwd=folder, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout == output.read_text(encoding="utf-8")
    jsonschema.validate(json.loads(done.stdout), result_schema())
    return load_result(output)


@pytest.mark.timeout(300)
def test_the_sampler_and_pruner_serve_a_study_of_ones_own(tmp_path):
    script = ROOT / "recipes" / "optuna-sampler" / "study.py"
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    command = [sys.executable, str(script), "--trials", "8", "--storage", storage]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = re.search(r"^best of 8: (\d+\.\d+) s with \{'batch_size': \d+, ", done.stdout, re.MULTILINE)
    study = optuna.load_study(study_name="optuna-sampler", storage=storage)
    assert float(told[1]) == pytest.approx(study.best_value, abs=0.01)
    assert all("lower_bound" in t.user_attrs or "outcome" in t.user_attrs for t in study.trials if t.value is None)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(  # "digits" is the README's own run, which CI makes in full
    ("recipe", "metric", "run"),
    [
        ("charlm", "val_loss", "2s"),
        ("lightning", "val_accuracy", "1s"),
        ("transformers", "eval_loss", "1s"),
        ("gan", "distance", "3s"),  # its first steps take it further off, and are not to be all of a run
    ],
)
def test_a_recipe_is_tuned_as_its_users_wrote_it(recipe, metric, run, tmp_path):
    if recipe in {"lightning", "transformers"} and importlib.util.find_spec(recipe) is None:
        pytest.skip(f"{recipe} is not installed")
    assert "batchtune" not in (ROOT / "recipes" / recipe / "model.py").read_text(encoding="utf-8")
    budget = (f"budget.run={run}", "budget.total=5m", "budget.trials=2", "batch_size.max=32")
    result = tuned(recipe, tmp_path, *budget, "confirm.seeds=1", "confirm.top=1")
    assert result.status == "complete"
    assert result.target.metric == metric
    assert result.probe.verified_in_fresh_process
    sizes = {trial.micro_batch_size for trial in result.trials if trial.state == "complete"}
    assert result.recommendation.micro_batch_size in sizes


def test_the_lengths_of_a_result_are_trained_with(tmp_path):
    recipe, points = ROOT / "recipes" / "lengths", {128: 16, 512: 3}
    assert "batchtune" not in (recipe / "model.py").read_text(encoding="utf-8")
    lengths = [{"length": length, "max_batch_size": batch} for length, batch in points.items()]
    result = documents.document(
        "probe", probe=documents.probed() | {"lengths": lengths, "length_check": {"steps": 200}}
    )
    (tmp_path / "result.json").write_text(json.dumps(result))
    command = [sys.executable, str(recipe / "train.py"), "result.json", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, length = re.match(r"batch 0 of \d+: \((\d+), (\d+)\), loss \d", done.stdout).groups()
    assert int(count) <= max(batch for edge, batch in points.items() if edge >= int(length))


CLUSTER = ROOT / "recipes" / "cluster"  # the recipe "cluster"


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library leaves its schema files open
@pytest.mark.parametrize("name", ["postgresql.yaml", "workers.yaml", "ranks.yaml"])
def test_the_manifests_of_kubernetes_are_what_its_own_schemas_allow(name):
    documents = list(yaml.safe_load_all((CLUSTER / "kubernetes" / name).read_text(encoding="utf-8")))
    assert documents
    for document in documents:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # the library leaves its schema files open
def test_a_mistake_in_a_manifest_would_be_found():
    job = yaml.safe_load((CLUSTER / "kubernetes" / "workers.yaml").read_text(encoding="utf-8"))
    job["spec"]["completion"] = job["spec"].pop("completions")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def test_the_workers_of_kubernetes_run_a_command_that_there_is(tmp_path):
    (container,) = yaml.safe_load((CLUSTER / "kubernetes" / "workers.yaml").read_text())["spec"]["template"]["spec"][
        "containers"
    ]
    environment = {each["name"]: each.get("value", "secret") for each in container["env"]}
    assert environment.pop("PASSWORD") == "secret"
    command = [word.replace("/task", str(ROOT / "recipes" / "digits")) for word in container["args"]]
    here = f"storage=sqlite:///{tmp_path}/studies.db"  # the cluster's database answers there alone
    there, done = (
        subprocess.run(
            [sys.executable, "-m", "batchtune", *command, "--dry-run", "device=cpu", *instead],
            cwd=tmp_path,
            env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        for instead in ([], [here])
    )
    assert there.returncode == 2
    assert "@batchtune-storage/batchtune cannot be opened" in there.stderr
    assert done.returncode == 0, done.stderr


def test_the_pods_of_kubernetes_with_ranks_find_each_other_and_train_as_one(tmp_path):
    service, job = yaml.safe_load_all((CLUSTER / "kubernetes" / "ranks.yaml").read_text())
    pods, name, count = job["spec"]["template"]["spec"], job["metadata"]["name"], job["spec"]["completions"]
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pods["subdomain"], "None")
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    (container,) = pods["containers"]
    (port,) = service["spec"]["ports"]
    assert container["command"] == ["torchrun"]
    arguments = container["args"]
    assert {f"--nnodes={count}", f"--rdzv-endpoint={name}-0.{pods['subdomain']}:{port['port']}"} <= set(arguments)
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']}" in arguments
    here = {"/task": str(ROOT / "recipes" / "digits"), f"{name}-0.{pods['subdomain']}": "127.0.0.1"}
    here |= {str(port["port"]): str(free_port()), "node=8": "node=1"}
    for named, there in here.items():
        arguments = [word.replace(named, there) for word in arguments]
    command = [sys.executable, "-m", "torch.distributed.run", *arguments, "--dry-run", "device=cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = [
        forks.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    told = [json.loads(out) for pod in started if (out := pod.communicate(timeout=120)[0])]
    assert [pod.returncode for pod in started] == [0] * count
    assert [each["world_size"] for each in told] == [count]


def test_the_container_installs_an_extra_and_starts_a_program_that_the_package_has():
    lines = (CLUSTER / "container" / "Containerfile").read_text(encoding="utf-8").splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (extra,) = re.findall(r"/tmp/batchtune\[(\w+)\]", "\n".join(lines))
    assert extra in project["optional-dependencies"]
    assert json.loads(next(line for line in lines if line.startswith("ENTRYPOINT")).split(maxsplit=1)[1]) == [
        "batchtune"
    ]
    assert "batchtune" in project["scripts"]
