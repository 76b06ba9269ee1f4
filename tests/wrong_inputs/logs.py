"""Job logs: files of other kinds, encodings, headers, rows."""

import gzip

from wrong_inputs.case import File, Wrong
from wrong_inputs.keys import LOG

READ = "synergy_sim +trace=file trace.path={} cluster.nodes=2 figures=false policy=fifo"
CHECK = "synergy_sim.traces check {}"
HEAD = "submit_time,duration_s,gpus,job\n"
FULL = "submit_time,duration_s,gpus,job,gpu_type,cpus,memory_bytes,estimate_s,end_state\n"
PACKED = gzip.compress(LOG.encode())


def of_file(content: File, *said: str, name: str = "log.csv") -> Wrong:
    return Wrong(READ.format(name), said, {name: content})


def of_head(head: str, *said: str) -> Wrong:
    return Wrong(CHECK.format("log.csv"), said, {"log.csv": head + "\n0,1,1,a\n"})


def of_row(row: str, *said: str) -> Wrong:
    return Wrong(CHECK.format("log.csv"), said, {"log.csv": f"{HEAD}0,100,1,a\n{row}\n20,50,1,z\n"})


def of_training_job(row: str, said: str) -> Wrong:
    content = f"name,time,application,num_replicas,batch_size\nfirst,0,cifar10,2,512\n{row}\n"
    return Wrong(
        "synergy_sim experiment=pollux_osdi21 trace.path=jobs.csv policy=tiresias", (said,), {"jobs.csv": content}
    )


def of_full_row(row: str, *said: str) -> Wrong:
    return of_file(f"{FULL}0,100,1,a,v100,4,1e9,50,completed\n{row}\n", *said)


CASES = [
    # Files.
    Wrong(READ.format("nowhere.csv"), ("trace.path=nowhere.csv: does not exist", "Give one with trace.path=FILE")),
    of_file(None, "is a folder; expected a job log", name="folder"),
    of_file(b"", "the file is empty; expected a job log"),
    of_file(HEAD, "no job to replay (it has no rows)"),
    of_file(b"\0" * 100, "is not text: it has zero bytes"),
    of_file(LOG.replace("b\n", "b\0b\n"), "is not text: it has zero bytes"),
    of_file(LOG.encode("utf-16"), "is UTF-16 text; type: iconv -f UTF-16 -t utf-8 log.csv"),
    of_file(LOG.encode("utf-32"), "is UTF-32 text"),
    of_file((LOG + "30,5,1,Jürgen\n").encode("latin-1"), "line 5: bytes that are not UTF-8 text", "iconv -f latin1"),
    of_file(PACKED[:40], "gzip cannot unpack it", "Get it again", name="log.csv.gz"),
    of_file(gzip.compress(LOG.encode("utf-16")), "is UTF-16 text", name="log.csv.gz"),
    of_file(b"PAR1" + b"x" * 60, "is a Parquet file; write it as CSV first", name="log.parquet"),
    of_file(b"PK\x03\x04" + b"x" * 60, "is a ZIP archive or a spreadsheet", name="log.xlsx"),
    of_file(b"BZh91AY&SY", "is packed by bzip2; unpack it first: bzip2 -d log.csv.bz2", name="log.csv.bz2"),
    of_file(b"\xfd7zXZ\0\0", "is packed by xz; unpack it first", name="log.csv.xz"),
    of_file(b"\x28\xb5\x2f\xfd\x04", "is packed by zstd; unpack it first", name="log.csv.zst"),
    of_file("{}", "no known format starts with '{}'", "trace.format=NAME", name="log.json"),
    of_file('[{"a": 1}]', "jobid", name="log.json"),
    of_file("<html></html>", "no known format starts with '<html></html>'", name="log.html"),
    Wrong(CHECK.format("nowhere.csv"), ("does not exist",)),
    Wrong(CHECK.format("log.csv --format xml"), ("unknown trace.format 'xml'",), {"log.csv": LOG}),
    Wrong(CHECK.format("log.csv --attempts x"), ("unknown --attempts 'x'", "apart, merged"), {"log.csv": LOG}),
    Wrong(READ.format("log.csv") + " trace.format=slurm", ("no column JobID", "sacct --parsable2"), {"log.csv": LOG}),
    Wrong(READ.format("log.csv") + " trace.format=swf", ("expected 18 fields",), {"log.csv": LOG}),
    # Headers: missing, renamed, in another unit.
    of_head("submit_time,duration_s,gpu,job", "column 'gpus' is missing", "called 'gpu'? Rename it."),
    of_head("submit_time,duration,gpus,job", "called 'duration'? Rename it, if it is in seconds."),
    of_head("submit_time,duration_seconds,gpus,job", "called 'duration_seconds'? Rename it."),
    of_head("submit_time,duration_hours,gpus,job", "another unit", "a column 'duration_s' with 3,600 times its values"),
    of_head("submit_time,duration_ms,gpus,job", "write a column 'duration_s' with 0.001 times its values"),
    of_head("submit_time,hours,gpus,job", "Is it 'hours'? It has another unit", "3,600 times"),
    of_head("submit_time,run_time,gpus,job", "called 'run_time'? Rename it, if it is in seconds."),
    of_head("submit_time,duration_s,gpus,gpus", "column 'gpus' appears twice; remove or rename one"),
    # Rows.
    of_row("10,-5,1,b", "line 3, duration_s: got -5, expected a duration from 0", "Fix these rows", "bad_rows=skip"),
    of_row("10,nan,1,b", "line 3, duration_s: got nan"),
    of_row("10,1e300,1,b", "line 3, duration_s: got 1e+300"),
    of_row("10,1:00:00,1,b", "line 3, duration_s: got '1:00:00', expected seconds"),
    of_row("10,5,0,b", "line 3, gpus: got 0, expected a number of GPUs from 1"),
    of_row("10,5,1.5,b", "line 3, gpus: got '1.5', expected a whole number"),
    of_row("yesterday,5,1,b", "line 3, submit_time: got 'yesterday', expected seconds or a date such as"),
    of_row("2017-02-30 00:00:00,5,1,b", "line 3, submit_time: got '2017-02-30 00:00:00'"),
    of_row("1767571200000,5,1,b", "line 3, submit_time: got 1767571200000", "milliseconds since 1970", "by 1,000"),
    of_row("10,٣٠,1,b", "line 3, duration_s: got '٣٠'", "digits of another script"),
    Wrong(
        CHECK.format("log.csv"),
        ("line 3, duration_s: got '5,5'", "decimal point"),
        {"log.csv": "sep=;\nsubmit_time;duration_s;gpus\n0;5,5;1\n"},
    ),
    of_row("1_000,5,1,b", "line 3, submit_time: got '1_000'"),
    of_row("10,5,1,a", "line 3, job: got 'a', which line 2 has too"),
    of_row("10,5", "line 3, whole row: got 2 fields", "expected 4 fields"),
    of_row("10,5,1,b,extra", "line 3, whole row: got 5 fields", "does a value contain the separator?"),
    of_row('10,5,1,"b', "line 3, whole row: got a row of", "is a quote left open?"),
    of_full_row("10,5,8,b,h999,4,1e9,50,completed", "requests 8 h999; this cluster has none", "gpu_type: h999"),
    of_full_row("10,5,17,b,v100,4,1e9,50,completed", "line 3: requests 17 v100; this cluster has 16", "Enlarge"),
    of_full_row("10,5,99,b,,4,1e9,50,completed", "requests 99 GPUs; this cluster has at most 16 of a type"),
    of_full_row("10,5,1,b,v100,-4,1e9,50,completed", "line 3, cpus: got -4"),
    of_full_row("10,5,1,b,v100,4,8GB,50,completed", "line 3, memory_bytes: got '8GB'"),
    of_full_row("10,5,1,b,v100,4,1e9,-50,completed", "line 3, estimate_s: got -50"),
    of_full_row("10,5,1,b,v100,4,1e9,50,exploded", "line 3, end_state: got 'exploded'", "COMPLETED"),
    of_training_job("x,10,resnet999,2,512", "unknown application resnet999"),
    of_training_job("x,10,cifar10,2,0", "line 3: job x has no batch size"),
    of_training_job("x,10,cifar10,2,-8", "line 3, batch_size: got -8"),
    of_training_job("x,10,cifar10,65,512", "line 3: requests 65 GPUs; this cluster has at most 64 of a type"),
]
