"""Arguments and files of the simulator's other commands."""

from wrong_inputs.case import File, Wrong


def of_command(typed: str, *said: str, **files: File) -> Wrong:
    return Wrong(typed, said, {name.replace("__", "/").replace("_yaml", ".yaml"): each for name, each in files.items()})


EXPLAIN = "synergy_sim.explain run job --at 1h"
SUMMARY = "run/fifo-0/summary.json"
CASES = [
    of_command("synergy_sim.traces", "COMMAND is missing"),
    of_command("synergy_sim.traces chek log.csv", "unknown command 'chek'", "Did you mean 'check'"),
    of_command("synergy_sim.traces check", "FILE is missing", "python -m synergy_sim.traces check"),
    of_command("synergy_sim.traces download phily", "Did you mean 'philly'"),
    of_command("synergy_sim.traces download philly --to /proc/x", "/proc/x: cannot be written"),
    of_command("synergy_sim.generators", "name is missing"),
    of_command("synergy_sim.generators philly --days abc", "--days abc: expected a number"),
    of_command("synergy_sim.generators philly --days 0", "got 0 days; expected either, above 0"),
    of_command("synergy_sim.generators philly --days 1e9", "expected at most 10,000,000 jobs, 3,660 days"),
    of_command("synergy_sim.generators philly --jobs -4", "got -4 jobs"),
    of_command("synergy_sim.generators philly --jobs 9 --seed -1", "--seed -1: expected a whole number ≥ 0"),
    of_command("synergy_sim.generators philly --jobs 9 --csv .", "expected a file in a folder that exists"),
    of_command("synergy_sim.generators philly --jobs 9 --dasy 3", "unknown option '--dasy'", "Did you mean '--days'"),
    of_command("synergy_sim.explain", "run, job is missing"),
    of_command("synergy_sim.explain nowhere job", "nowhere: no such folder; expected one with results"),
    of_command(EXPLAIN, "is not the configuration of a run", run__config_yaml="[]"),
    of_command(EXPLAIN, "is not the configuration of a run", run__config_yaml="a: ["),
    of_command(EXPLAIN, "is not the configuration of a run", run__config_yaml="a: 1\n".encode("utf-16")),
    of_command(EXPLAIN, "trace is missing", run__config_yaml="policy: fifo\nseed: 0\n"),
    of_command("synergy_sim.results", "DIR is missing"),
    of_command("synergy_sim.results nowhere", "nowhere: no such folder; expected one with results"),
    Wrong("synergy_sim.results run", ("not a readable summary (incomplete JSON)",), {SUMMARY: '{"policy": "fi'}),
    Wrong("synergy_sim.results run", ("not the summary of a run",), {SUMMARY: "{}"}),
]
