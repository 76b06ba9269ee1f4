from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from backends_controller import Controller
from family import descendants

from synergy_core.errors import InputError
from synergy_core.jobs.testbed_profiles import Profile
from synergy_core.policies import get_policy
from synergy_exec.backends import get_backend
from synergy_exec.backends._agents import AgentPlace, require_reachable
from synergy_exec.backends.ray import RayNodes, bundles_of
from synergy_exec.controller.controller import Arrival
from synergy_exec.controller.controller import Controller as WholeController
from synergy_exec.job_file import JobFile
from synergy_exec.messages import Ended, Launch, PlanMessage, Report, Reserve, Reserved
from synergy_exec.recorded import open_journal, recorded_jobs
from synergy_exec.settings import Settings

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'synergy-cluster[ray]'")

JOBS = Path(__file__).with_name("agents_jobs.py")
HELLO_S = 90.0
"""An agent imports torch first, on a busy machine."""
DETECTION_S = 10.0
SMALL = {"object_store_memory": 80 * 2**20}
HEAD = {
    "num_cpus": 0,
    "include_dashboard": False,
    # By default Ray takes some 15 s to call a node dead; a busy one still gets as long as that.
    "_system_config": {"health_check_period_ms": 1000, "health_check_failure_threshold": 3},
    **SMALL,
}


def there(*resources: dict[str, float]) -> list[dict]:
    return [{"Alive": True, "Resources": each} for each in resources]


def test_all_gpus_of_all_nodes_are_asked_for_most_first_and_of_their_type():
    nodes = there(
        {"CPU": 8},
        {"GPU": 2, "CPU": 16, "accelerator_type:V100": 1},
        {"GPU": 4, "CPU": 2, "accelerator_type:A100": 1},
    )
    assert bundles_of(nodes, None, None) == [
        {"GPU": 4, "CPU": 2, "accelerator_type:A100": 0.001},
        {"GPU": 2, "CPU": 2, "accelerator_type:V100": 0.001},
    ]


def test_cpus_are_slots_where_no_node_has_gpus():
    assert bundles_of(there({"CPU": 2}, {}, {"CPU": 8}), None, None) == [{"CPU": 8}, {"CPU": 2}]


def test_dead_nodes_and_small_ones_are_passed_over():
    nodes = [*there({"CPU": 2}, {"CPU": 4}), {"Alive": False, "Resources": {"CPU": 64}}]
    assert bundles_of(nodes, 1, 3) == [{"CPU": 3}]


def test_more_nodes_than_there_are_is_an_error_that_says_what_there_is():
    with pytest.raises(InputError, match=r"1 nodes have 3 CPUs or more, 2 are asked for; .* have 2, 4\."):
        bundles_of(there({"CPU": 2}, {"CPU": 4}), 2, 3)


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "[::1]", "0.0.0.0"])
def test_a_controller_on_loopback_is_refused_by_nodes_elsewhere(name):
    with pytest.raises(InputError, match=r"which b cannot reach\. Start it with host=ADDRESS"):
        require_reachable(f"http://{name}:80", ["a", "b"], {"a"})
    require_reachable(f"http://{name}:80", ["a"], {"a"})
    require_reachable("http://10.0.0.1:80", ["a", "b"], {"a"})


def test_start_refuses_loopback_when_a_node_is_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    backend = RayNodes(None, [AgentPlace("10.0.0.1", 1, "cpu"), AgentPlace("10.0.0.2", 1, "cpu")], disconnect=False)
    controller = Controller(tmp_path)
    with controller, pytest.raises(InputError, match=r"listens on 127\.0\.0\.1, which 10\.0\.0\.2 cannot reach"):
        asyncio.run(backend.start(0, controller.meeting))


@pytest.mark.parametrize("options", [{"nodes": 0}, {"slots": -1}])
def test_options_below_one_are_refused(options):
    with pytest.raises(InputError, match="write numbers from 1"):
        get_backend("ray", options)


def test_a_missing_ray_says_what_to_type(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'synergy-cluster\[ray\]'"):
        get_backend("ray", {})


@pytest.fixture
def cluster() -> Iterator[ray.cluster_utils.Cluster]:
    """A head without CPUs and two nodes of one, all on this machine; none of their processes outlives it."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args=HEAD)
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, **SMALL)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def test_agents_on_ray_nodes_train_together_are_noticed_when_lost_and_come_back(cluster, tmp_path):
    backend = get_backend("ray", {"address": cluster.address, "patience_s": 30.0})
    with Controller(tmp_path) as controller:
        try:
            assert backend.nodes == 2
            assert [(place.slots, place.gpu_type) for place in backend.places] == [(1, "cpu")] * 2
            with pytest.raises(InputError, match=r"Ray did not give 1 nodes .* within 0\.5 s"):
                get_backend("ray", {"address": cluster.address, "nodes": 1, "patience_s": 0.5})
            for node in range(2):
                asyncio.run(backend.start(node, controller.meeting))
            controller.wait(lambda: len(controller.hellos) == 2, HELLO_S)
            assert backend.lost() == {}
            two_ranks_train_to_the_end(controller, tmp_path)
            a_lost_node_is_named_and_leaves_no_process(cluster, backend, controller, tmp_path)
            its_agent_starts_again_on_a_new_node(cluster, backend, controller)
            agents = [hello.pid for hello in controller.hellos.values()]
        finally:
            asyncio.run(backend.stop())
    assert not any(Path(f"/proc/{pid}").exists() for pid in agents)
    assert not ray.is_initialized()


def two_ranks_train_to_the_end(controller: Controller, folder: Path) -> None:
    launch(controller, 1, folder, work=20.0)
    for node in range(2):
        ended = controller.wait(lambda node=node: controller.of(node, Ended), 60.0)
        assert [(each.run, each.outcome) for each in ended] == [(1, "done")]
    assert controller.of(0, Report)[-1].step == 20


def a_lost_node_is_named_and_leaves_no_process(cluster, backend, controller: Controller, folder: Path) -> None:
    launch(controller, 2, folder, work=1e6)
    controller.wait(lambda: any(each.run == 2 for each in controller.of(0, Report)), 60.0)
    mine = descendants(controller.hellos[1].pid)
    assert len(mine) == 4, "the agent, its zygote, a warden and a worker"
    began_s = time.monotonic()
    cluster.remove_node(node_of(cluster, backend, 1), allow_graceful=False)
    while 1 not in backend.lost():
        assert time.monotonic() - began_s < DETECTION_S
        time.sleep(0.1)
    assert list(backend.lost()) == [1]
    assert "the Ray actor on" in backend.lost()[1]
    controller.wait(lambda: 1 not in controller.hellos, DETECTION_S)
    while left := [pid for pid in mine if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() - began_s < DETECTION_S, f"{left} of {mine} are left"
        time.sleep(0.1)
    # The other rank's agent sees the loss by itself, and lives.
    ended = controller.wait(lambda: [each for each in controller.of(0, Ended) if each.run == 2], 30.0)
    assert ended[0].outcome == "lost"


def its_agent_starts_again_on_a_new_node(cluster, backend, controller: Controller) -> None:
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(asyncio.run, backend.start(1, controller.meeting))
        cluster.add_node(num_cpus=1, **SMALL)
        starting.result(HELLO_S)
    controller.wait(lambda: 1 in controller.hellos, HELLO_S)
    assert backend.lost() == {}


def launch(controller: Controller, run: int, folder: Path, *, work: float) -> None:
    """A data-parallel run with one rank on each node."""
    controller.say(0, Reserve(run=run, ports=""))
    meeting = controller.wait(lambda: [each for each in controller.of(0, Reserved) if each.run == run], 10.0)[0]
    for node in range(2):
        message = Launch(
            run=run,
            job=run,
            job_class="synergy_exec.examples.mlp:Mlp",
            plan=PlanMessage(data=2, micro_batch=4),
            initial_batch=8,
            work=work,
            slots=[0],
            first_rank=node,
            world=2,
            store_host=meeting.host,
            store_port=meeting.port,
            folder=str(folder / f"job-{run}"),
            noise=False,
            report_s=0.1,
        )
        controller.say(node, message)


def node_of(cluster, backend, node: int):
    """The test cluster's node on which bundle `node` is."""
    from ray.util.placement_group import placement_group_table

    wanted = placement_group_table(backend._group)["bundles_to_node_id"][node]
    return next(each for each in cluster.worker_nodes if each.node_id == wanted)


@pytest.mark.thorough  # agents noticed when lost and started again, above; whole controllers: test_faults_of_a_run
def test_jobs_outlive_a_node_that_is_lost(cluster, tmp_path):
    """The whole controller, a job on each of two Ray nodes; one of those goes, and a spare one takes its place."""
    cluster.add_node(num_cpus=1, **SMALL)
    backend = get_backend("ray", {"address": cluster.address, "nodes": 2, "patience_s": 30.0})
    paused = {"pause_s": 0.03}
    file = JobFile(job_class=f"{JOBS}:Plain", name="plain", initial_batch=8, max_batch=8, work=200.0, arguments=paused)
    arrivals = [Arrival(0.0, f"job-{number}", file) for number in range(2)]
    settings = Settings(checkpoint_interval_s=1.0, round_s=0.5, nodes_s=HELLO_S, leave_s=20.0)
    controller = WholeController(get_policy("las"), arrivals, backend, settings, tmp_path, Profile())
    with ThreadPoolExecutor() as pool:
        losing = pool.submit(lose_a_node, cluster, backend, tmp_path)
        asyncio.run(controller.run())
        lost_s = losing.result()
    journal = open_journal(tmp_path)
    assert [(job.name, job.state) for job in journal.jobs()] == [("job-0", "done"), ("job-1", "done")]
    outcomes = [run.outcome for run in journal.runs()]
    journal.close()
    assert (outcomes.count("done"), outcomes.count("lost")) == (2, 1)
    assert lost_s < DETECTION_S
    for job in recorded_jobs(tmp_path):
        assert [step.number for step in job.steps] == list(range(1, 201))


def lose_a_node(cluster, backend: RayNodes, folder: Path) -> float:
    """Seconds until the journal said that a run was lost."""
    until_s = time.monotonic() + 2 * HELLO_S
    while len({path.parents[1] for path in folder.glob("jobs/*/checkpoints/step-*")}) < 2:
        assert time.monotonic() < until_s
        time.sleep(0.1)
    began_s = time.monotonic()
    cluster.remove_node(node_of(cluster, backend, 1), allow_graceful=False)
    while True:
        journal = open_journal(folder)
        lost = any(run.outcome == "lost" for run in journal.runs())
        journal.close()
        if lost:
            return time.monotonic() - began_s
        assert time.monotonic() - began_s < 60
        time.sleep(0.1)
