"""Job logs: files of other kinds, encodings, headers, rows."""

import gzip

from wrong_inputs.case import File, Wrong
from wrong_inputs.keys import LOG

READ = "synergy_sim +trace=file trace.path={} cluster.nodes=2 figures=false policy=fifo"
CHECK = "synergy_sim.traces check {}"
HEAD = "submit_time,duration_s,gpus,job\n"
PACKED = gzip.compress(LOG.encode())


def of_file(content: File, *said: str, name: str = "log.csv", typed: str = CHECK) -> Wrong:
    return Wrong(typed.format(name), said, {name: content})


def of_training_job(row: str, said: str) -> Wrong:
    content = f"name,time,application,num_replicas,batch_size\nfirst,0,cifar10,2,512\n{row}\n"
    return Wrong(
        "synergy_sim experiment=pollux_osdi21 trace.path=jobs.csv policy=tiresias", (said,), {"jobs.csv": content}
    )


def of_row(row: str, *said: str) -> Wrong:
    return of_file(f"submit_time,duration_s,gpus,job,gpu_type\n0,100,1,a,v100\n{row}\n", *said, typed=READ)


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
    Wrong(READ.format("log.csv") + " trace.format=swf", ("expected at least 18 fields",), {"log.csv": LOG}),
    # Headers and rows: one of each; all others are in tests/logs.
    Wrong(CHECK.format("log.csv"), ("column 'gpus' is missing",), {"log.csv": "submit_time,duration_s\n0,1\n"}),
    Wrong(CHECK.format("log.csv"), ("line 2, duration_s: got -5", "Fix these rows"), {"log.csv": f"{HEAD}10,-5,1,b\n"}),
    of_row("10,5,8,b,h999", "requests 8 h999; this cluster has none", "gpu_type: h999"),
    of_row("10,5,17,b,v100", "line 3: requests 17 v100; this cluster has 16", "Enlarge"),
    of_row("10,5,99,b,", "requests 99 GPUs; this cluster has at most 16 of a type"),
    of_training_job("x,10,resnet999,2,512", "unknown application resnet999"),
    of_training_job("x,10,cifar10,2,0", "line 3: job x has no batch size"),
    of_training_job("x,10,cifar10,2,-8", "line 3, batch_size: got -8"),
    of_training_job("x,10,cifar10,65,512", "line 3: requests 65 GPUs; this cluster has at most 64 of a type"),
]
