"""A planner for tests, by rooflines: three made-up decoders, and step times that scale as plans do."""

from __future__ import annotations

from functools import cache

import numpy as np

from synergy_core.errors import unknown
from synergy_core.performance.catalog import gpu_sheet
from synergy_core.performance.planner import tables
from synergy_core.performance.planner.machine import Machine
from synergy_core.performance.planner.plan import Plan, plans_of
from synergy_core.performance.planner.tables import PlannedModel, PlannedTable

MODELS = {
    name: PlannedModel(name, parameters, 2048, 14.0 * parameters)
    for name, parameters in (("tiny-llm", 0.4e9), ("small-llm", 1.3e9), ("big-llm", 6.7e9))
}
FRACTION = 0.4
NETWORK_BYTES_PER_S, LINK_BYTES_PER_S = 3e9, 50e9
USABLE = 0.9
STATE_BYTES = 18.0


def machine_of(gpu_type, gpus_per_node):
    sheet = gpu_sheet(gpu_type)
    assert sheet is not None
    memory = sheet.memory_bytes
    return Machine(sheet, gpus_per_node, "nvlink", LINK_BYTES_PER_S, gpus_per_node, NETWORK_BYTES_PER_S, memory)


def model_named(name):
    if name not in MODELS:
        raise unknown("architecture", name, MODELS)
    return MODELS[name]


def model_names():
    return tuple(sorted(MODELS))


def language_models():
    return model_names()


def step_s(model, machine, plan, batch):
    """Compute with the pipeline's bubble, tensor-parallel exchanges per layer, gradients reduced at the end."""
    shards = plan.tensor * plan.pipeline
    if batch % plan.data or STATE_BYTES * model.parameters / shards > USABLE * machine.memory_bytes:
        return np.inf
    micro = batch // plan.data
    tokens = batch * model.seq_len
    peak = 4.0 * machine.gpu.fp32_flops_per_s * FRACTION
    compute_s = 6.0 * model.parameters * tokens / (plan.gpus * peak) * (1.0 + (plan.pipeline - 1) / micro)
    layers = 24 * (model.parameters / 0.4e9) ** (1 / 3)
    width = (model.parameters / (12.0 * layers)) ** 0.5
    exchanged = 8.0 * layers * width * tokens / plan.data / plan.pipeline * (plan.tensor - 1) / plan.tensor * 2
    local = plan.gpus <= machine.gpus_per_node
    reduced = 4.0 * model.parameters / shards * 2 * (plan.data - 1) / plan.data
    return compute_s + exchanged / LINK_BYTES_PER_S + reduced / (LINK_BYTES_PER_S if local else NETWORK_BYTES_PER_S)


def powers(most):
    return [1 << at for at in range(most.bit_length())]


def shards_of(machine, most):
    """(tensor, pipeline) degrees, tensor parallelism within a node."""
    return [
        (tensor, pipeline) for tensor in powers(min(machine.gpus_per_node, most)) for pipeline in powers(most // tensor)
    ]


def best(model, machine, gpus, batch, replicas_only):
    shards = [(t, p) for t, p in shards_of(machine, gpus) if gpus % (t * p) == 0]
    if replicas_only:
        fixed = smallest(model, machine)
        shards = [each for each in shards if each == fixed]
    shards = [(t, p, gpus // (t * p)) for t, p in shards]
    plans = [Plan(tensor=t, pipeline=p, data=d, micro_batch=batch // d) for t, p, d in shards if batch % d == 0]
    times = [step_s(model, machine, plan, batch) for plan in plans]
    if not times:
        return np.inf, Plan(data=gpus)
    at = int(np.argmin(times))
    return times[at], plans[at]


def smallest(model, machine, most=64):
    """Of the plans without replicas that fit, that on the fewest GPUs, the fastest of those."""
    fits = [
        (t * p, step_s(model, machine, Plan(tensor=t, pipeline=p), 64), (t, p)) for t, p in shards_of(machine, most)
    ]
    return min((each for each in fits if np.isfinite(each[1])), default=(0, 0.0, (0, 0)))[2]


@cache
def planned_tables(architecture_name, nodes, counts, global_batch, *, data_parallel_only=False, errors=None):
    assert errors is None, "this planner's times are the true ones"
    model = model_named(architecture_name)
    machines = [machine_of(*each) for each in nodes]
    cells = [(at, gpus) for at in range(len(machines)) for gpus in counts]
    found = [best(model, machines[at], gpus, global_batch, data_parallel_only) for at, gpus in cells]
    return PlannedTable(
        np.array([at for at, _ in cells]),
        np.array([gpus for _, gpus in cells]),
        np.array([time_s for time_s, _ in found]),
        plans_of([plan for _, plan in found]),
    )


def memory_factors(architecture_name, gpu_type, plan):
    """Every plan is near its GPU's memory, so that many run out of it."""
    return 0.95, 0.9, 1.2


def install(patch=setattr):
    """Puts this planner in the real one's place; patch: such as `monkeypatch.setattr`."""
    for each in (language_models, model_named, model_names, planned_tables, memory_factors):
        patch(tables, each.__name__, each)
