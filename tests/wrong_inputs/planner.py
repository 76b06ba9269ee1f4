"""The core's own commands: plans, architectures, measurements, policies."""

from wrong_inputs.case import File, Wrong

PLAN = "synergy_core plan model=gpt-1.3b gpu=a100 gpus=8"
HEAD = "placement,local_bsz,step_time,sync_time\n"
ROWS = HEAD + "".join(f"{nodes},{batch},{0.1 + 0.001 * batch},0.02\n" for nodes in (1, 2, 11) for batch in (16, 64))
TIMES = "model,layers,hidden,heads,ffn,vocab,seq_len,gpu,n_gpus,global_batch,micro_batch,tp,pp,dp,iter_time_s\n"
TIME = "m,24,1024,16,4096,50257,1024,a100,8,64,1,2,2,2,1.5\n"
OF_STEPS = "cifar10/placements-t4.csv"


def plan(typed: str, *said: str) -> Wrong:
    return Wrong(f"synergy_core plan {typed}".strip(), said)


def more(typed: str, *said: str) -> Wrong:
    return Wrong(f"{PLAN} {typed}", said)


def architecture(content: File, *said: str) -> Wrong:
    return Wrong("synergy_core plan model=mine.yaml gpu=a100 gpus=8", said, {"mine.yaml": content})


def steps(content: File, *said: str) -> Wrong:
    return Wrong(f"synergy_core validate {OF_STEPS}", said, {OF_STEPS: content})


def step(row: str, *said: str) -> Wrong:
    return steps(HEAD + row + "\n", f"{OF_STEPS}, line 2", *said)


def times(before: str, after: str, *said: str) -> Wrong:
    return Wrong("synergy_core validate m.csv", said, {"m.csv": TIMES + TIME.replace(before, after, 1)})


CASES = [
    Wrong("synergy_core", ("COMMAND is missing",)),
    Wrong("synergy_core plam", ("unknown command 'plam'", "Did you mean 'plan'")),
    plan("", "is missing", "python -m synergy_core plan"),
    plan("gpt", "'gpt': expected key=value"),
    plan("model=gpt-175b", "gpu= is missing"),
    plan("model=gpt-9b gpu=a100 gpus=8", "Did you mean 'gpt-"),
    plan("model=gpt-1.3b gpu=a1000 gpus=8", "Did you mean 'a100'"),
    plan("model=gpt-1.3b gpu= gpus=8", "expected key=value"),
    plan("model=gpt-1.3b gpu=a100 gpus=0", "gpus=0: expected at least 1"),
    plan("model=gpt-1.3b gpu=a100 gpus=8.5", "gpus=8.5: expected a whole number"),
    plan("model=gpt-1.3b gpu=a100 gpus=eight", "gpus=eight: expected a whole number"),
    plan("model=gpt-1.3b gpu=a100 gpus=8..4", "the range is empty"),
    plan("model=gpt-1.3b gpu=a100 gpus=8..", "expected a whole number"),
    plan("model=gpt-1.3b gpu=a100 gpus=1..9999999", "counts; expected at most 65,536"),
    plan("model=gpt-1.3b gpu=a100 gpus=99999999999", "gpus=99999999999: expected at most 10,000,000"),
    more("batch=0", "batch=0: expected at least 1"),
    more("batch=x", "batch=x: expected a whole number"),
    more("batch=99999999999999999999", "expected at most 10,000,000"),
    more("top=0", "top=0: expected at least 1"),
    more("software=meg", "Did you mean 'megatron'"),
    more("network=25GB", "such as 25e9"),
    more("network=nan", "such as 25e9"),
    more("gpus_per_node=0", "expected at least 1"),
    more("tensor=3", "tensor=3 does not divide the model's 32 heads; choose one of 1, 2, 4"),
    more("tensor=-2", "tensor=-2"),
    more("zero=9", "expected 0, 1, 2 or 3"),
    more("recompute=9", "expected 0 to 3"),
    more("pipeline=1000", "the model has 24 layers; choose at most that"),
    more("data=5", "does not divide the batch of 512"),
    more("tensr=2", "Did you mean 'tensor'"),
    more("--json .", ".: is a folder; expected the name of a file to write"),
    more("--json no/where.json", "expected a path in an existing folder"),
    more("--picture x.png", "give a name that ends in .svg"),
    more("--jsno x.json", "unknown option '--jsno'"),
    plan("model=nowhere.yaml gpu=a100 gpus=8", "nowhere.yaml: cannot be read (No such file or directory)"),
    architecture("", "mine.yaml: is empty"),
    architecture("[]", "mine.yaml: holds a list"),
    architecture("42", "mine.yaml: holds a number"),
    architecture("a: [", "mine.yaml: is not YAML: line 1"),
    architecture("\0", "mine.yaml: is not YAML"),
    architecture("a: b\n".encode("utf-16"), "mine.yaml: is no UTF-8 text; save it as UTF-8"),
    architecture(None, "mine.yaml/config.json: cannot be read (No such file or directory)"),
    architecture("family: transformer\nlayers: 24\n", "missing"),
    Wrong("synergy_core compression", ("is missing",)),
    Wrong("synergy_core compression model=gpt-1.3b gpu=a100 gpus=16,32", ("expected a whole number",)),
    Wrong("synergy_core compression model=gpt-1.3b gpu=a100 gpus=16 network_gbps=fast", ("Gb/s, or nvlink",)),
    Wrong("synergy_core compression model=gpt-1.3b gpu=a100 gpus=16 compressor=zip", ("unknown compressor 'zip'",)),
    Wrong("synergy_core compression model=gpt-1.3b gpu=a100 gpus=16 noise_tokens=-1", ("such as 1e6",)),
    Wrong("synergy_core check", ("NAME is missing",)),
    Wrong("synergy_core check fif", ("Did you mean 'fifo'",)),
    Wrong("synergy_core check fifo --module nope", ("--module nope: no such module here",)),
    Wrong("synergy_core validate", ("FILE is missing",)),
    Wrong("synergy_core validate nowhere.csv", ("nowhere.csv: cannot be read (No such file or directory)",)),
    Wrong("synergy_core calibrate .", ("cannot be read (Is a directory)",)),
    steps("", "is empty; expected a header line and rows"),
    steps(HEAD, "has a header but no rows"),
    steps(ROWS.encode("utf-16"), "is not a text CSV file"),
    steps(ROWS.replace("step_time", "steptime"), "called 'steptime'? Rename it, if it is in seconds."),
    step("1,16,abc,0", "column step_time: got 'abc', expected a positive number of seconds"),
    step("1,16,-1,0", "column step_time: got '-1'"),
    step("1,16,nan,0", "column step_time: got 'nan'"),
    step("x,16,1,0", "column placement: got 'x'"),
    step("1,0,1,0", "column local_bsz: got '0'"),
    step("1,16", "got 2 cells, expected 4 as in the header"),
    step("1,16,1,2", "expected less than the step_time 1"),
    Wrong("synergy_core validate x.csv", ("no known format has the columns 'a', 'b'",), {"x.csv": "a,b\n1,2\n"}),
    Wrong(f"synergy_core validate {OF_STEPS} --form zzz", ("unknown form 'zzz'",), {OF_STEPS: ROWS}),
    times("m,24", "m,0", "m.csv, line 2, column layers: got '0'"),
    times("24,", "abc,", "column layers: got 'abc'"),
    times("1024,16", "1024,7", "got tp 2, expected a divisor of heads 7. Fix tp or heads."),
    times(",8,64", ",9,64", "got n_gpus 9, expected tp 2"),
    times("1.5", "-1", "column iter_time_s: got '-1'"),
]
