"""The executor's keys, commands and files; what needs no torch and starts nothing."""

from wrong_inputs.case import File, Wrong


def of_key(typed: str, *said: str) -> Wrong:
    return Wrong(f"synergy_exec +trace=demo figures=false {typed}", said)


def of_command(typed: str, *said: str) -> Wrong:
    return Wrong(f"synergy_exec {typed}".strip(), said)


def of_job(content: File, *said: str) -> Wrong:
    return Wrong("synergy_exec submit job.yaml", said, {"job.yaml": content})


NOBODY = "no controller runs below results. Start one: python -m synergy_exec serve=true"
CASES = [
    of_command("", "no trace was given"),
    of_command("nope", "expected key=value"),
    of_command("+trace=dmo", "Did you mean 'demo'"),
    of_command("list", NOBODY),
    of_command("list --jsno", "unknown option '--jsno'", "Did you mean '--json'"),
    of_command("cancel", "job is missing"),
    of_command("cancel 1", NOBODY),
    of_command("logs 1", "no run is in it"),
    of_command("retry 1", "no run is in it"),
    of_command("resume nowhere", "expected the work folder of a run"),
    of_command("submit nowhere.yaml", "the job file cannot be read (No such file or directory)"),
    of_job("", "job.yaml"),
    of_job("a: [", "job.yaml: not YAML: line 1"),
    of_job("nme: x\n", "Did you mean 'name'"),
    of_job("name: x\n".encode("utf-16"), "it is no UTF-8 text"),
    of_job(b"\0", "it has a character that no text has"),
    of_job(None, "the job file cannot be read (Is a directory)"),
    of_key("-m", "has no sweeps"),
    of_key("interface=nope0", "unknown interface 'nope0'", "lo"),
    of_key("policy=srft", "Did you mean 'srtf'"),
    of_key("ports=29600-29500", "two ports such as 29500-29599, or null"),
    of_key("port=99999", "expected a port, 0 to 65535"),
    of_key("port=x", "port=x: expected a whole number"),
    of_key("round_s=0", "round_s=0: expected a finite number > 0"),
    of_key("'round_s=2 s'", "round_s=2 s: expected a number"),
    of_key("backend.name=slrum", "Did you mean 'slurm'"),
    of_key("backend=slurm", "backend=slurm: expected"),
    of_key("backend.options.slts=2", "Did you mean 'slots'"),
    of_key("backend.options.slots=x", "backend.options.slots=x: expected a whole number"),
    of_key("host=", "expected an address, such as 127.0.0.1"),
    of_key("'cluster.virtual_clusters={a: -1}'", "{name: slots}, each at least 0"),
    of_key("results_dir=/proc/x", "Name another place with results_dir=DIR"),
    Wrong("synergy_exec serve=maybe", ("no trace was given",)),
]
